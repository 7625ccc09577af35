"""LayoutGraph: what a layout hands to a renderer. Plain data: a tree of boxes with positions, and routed edges.

Lengths are picture units (one unit is one CSS pixel at zoom 1), x grows to the right and y downwards, positions are
absolute. Nothing in here is escaped, cut or cleaned: that is each renderer's own duty, since each format has its own
dangers.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, field

from gpuflight.graph import Edge, Entity
from gpuflight.graph.element import EMPTY
from gpuflight.rounds import Coverage, Environment, Finding
from gpuflight.vis.timeline import Timeline

Role = Literal["frame", "card", "chip", "group"]
"""*frame* holds other boxes under a header; *card* is a leaf with lines and bars; *chip* is a leaf of one line; *group*
is many things folded into one box by a rule, drawn small inside it."""


class Bar(Struct, gc=False):
    """A filled bar inside a box: how full or how busy. ``fraction`` is 0 to 1, ``text`` says the number."""

    label: str
    fraction: float
    text: str


class Box(Struct, gc=False, omit_defaults=True):
    """One entity, or one group of them, with its place.

    ``scale`` is the size of its text relative to normal: what stands inside a group is drawn smaller and read by
    zooming in. ``rule`` says, for a group, why these were folded; ``count`` how many entities it stands for, deep.
    ``missing`` marks an entity that an edge names but the graph does not hold. ``change``: what a comparison found,
    ``added``, ``removed`` or ``changed`` (set by ``gpuflight.vis.changes``). Attributes and metrics are the entity's
    own, where it has none the read-only ``EMPTY``: not to be changed in place. Nor are the lists: boxes without lines,
    bars or children share one.
    """

    id: str
    kind: str
    label: str
    category: str
    role: Role
    x: float
    y: float
    w: float
    h: float
    scale: float = 1.0
    header: float = 0.0
    lines: list[str] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    children: list[Box] = field(default_factory=list)
    attributes: dict[str, Any] = EMPTY
    metrics: dict[str, Any] = EMPTY
    unknown: dict[str, str] = EMPTY
    ns: str = ""
    rule: str = ""
    count: int = 1
    synthetic: bool = False
    missing: bool = False
    change: str = ""


class Link(Struct, gc=False, kw_only=True, omit_defaults=True):
    """One edge of the graph, between the boxes of its two ends. ``route`` is the index of the route that draws it, -1
    if it is not drawn until asked for (nesting already says it, or it would hide the rest). ``change``: as of a box."""

    source: str
    target: str
    kind: str
    category: str
    medium: str
    directed: bool = True
    attributes: dict[str, Any] = EMPTY
    metrics: dict[str, Any] = EMPTY
    unknown: dict[str, str] = EMPTY
    route: int = -1
    change: str = ""


class Route(Struct, gc=False, kw_only=True, omit_defaults=True):
    """A drawn line: all links of one medium between two boxes as shown, with its way.

    ``forward`` and ``backward`` tell which ends carry an arrow. ``weight`` is 0 to 1 among the routes of the medium.
    ``change``: that of its links if all changed alike, else ``changed`` if any did.
    """

    source: str
    target: str
    medium: str
    label: str
    points: list[tuple[float, float]]
    forward: bool = True
    backward: bool = False
    weight: float = 0.0
    links: list[int] = field(default_factory=list)
    change: str = ""


class LegendEntry(Struct, gc=False):
    """A kind of box or a medium of edge in this picture, and how many there are."""

    key: str
    label: str
    category: str
    count: int


class LayoutGraph(Struct, kw_only=True):
    """A laid out picture. ``notes`` says in words what a reader must know that the boxes do not show.

    ``entities`` and ``edges`` are the elements of the graph that was placed, as they are there: formats for other
    programs (GEXF, CSV, JSON …) need their identity and values, whatever the layout folded. ``timelines``: when what
    ran, of the sessions among them.
    """

    title: str
    layout: str
    width: float
    height: float
    boxes: list[Box]
    links: list[Link]
    routes: list[Route]
    kinds: list[LegendEntry]
    media: list[LegendEntry]
    nodes_count: int
    edges_count: int
    environment: Environment
    coverage: list[Coverage] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    round_number: int = 0
    time_ns: int = 0
    entities: list[Entity] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)
