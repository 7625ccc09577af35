"""The two registered stages of a picture: Layout (Graph → LayoutGraph) and Renderer (LayoutGraph → Document → file).

A new layout or format is one file in ``gpuflight.vis.layout`` or ``gpuflight.vis.render``, or an entry point
``gpuflight.layouts`` / ``gpuflight.renderers`` of another package.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, BinaryIO, ClassVar

from msgspec import Struct, field

from gpuflight.graph import Graph
from gpuflight.registry import Plugin
from gpuflight.rounds import Coverage, Environment, Finding
from gpuflight.vis.model import LayoutGraph
from gpuflight.vis.timeline import Timeline


class LayoutOptions(Struct, kw_only=True):
    """What a layout is told besides the graph: what to write on the picture, and how much to fold.

    ``notes`` are sentences that the picture must carry, such as where a capture was cut short.
    ``uncrowded_processes_max``: beyond this many processes, quiet ones fold even if a pipe or unix socket joins them.
    ``shown_processes_max``: beyond this many, only those with most connections have a box of their own.
    ``siblings_max``: at most this many boxes of one kind side by side in one box; the rest folds.
    ``depth_max``: boxes nested deeper than this stand side by side in one group.
    ``previous``: an earlier picture of the same system by the same layout: one that can starts from its places, so
    that what did not change stays where it was (``gephi``); the others leave it alone.
    ``timelines``: when what ran, of sessions in the graph; only the layout ``timeline`` draws it.
    """

    title: str = ""
    environment: Environment = field(default_factory=Environment)
    coverage: list[Coverage] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    round_number: int = 0
    time_ns: int = 0
    notes: list[str] = field(default_factory=list)
    uncrowded_processes_max: int = 60
    shown_processes_max: int = 100
    siblings_max: int = 36
    depth_max: int = 12
    previous: LayoutGraph | None = None
    timelines: list[Timeline] = field(default_factory=list)


class Layout(Plugin, family="layouts", package="gpuflight.vis.layout"):
    """Base of every layout. The same graph and options always give the same LayoutGraph."""

    @abstractmethod
    def layout(self, graph: Graph, options: LayoutOptions) -> LayoutGraph:
        """Place every entity of ``graph`` and route its edges. Never raises for any graph; loses nothing silently."""


class Document(Struct, kw_only=True):
    """A picture in some format as data, not yet bytes in a file. Renderers have their own subclasses."""

    title: str


class Renderer(Plugin, family="renderers", package="gpuflight.vis.render"):
    """Base of every renderer. ``suffix`` is what its files end with; ``binary`` says that they are not UTF-8 text.

    One that needs a package or a program of the machine raises MissingExtra or SourceUnavailable without it, in one
    line that says how to get it.
    """

    suffix: ClassVar[str]
    binary: ClassVar[bool] = False

    @abstractmethod
    def build(self, layout: LayoutGraph) -> Document:
        """The picture as data; harmless whatever the names in the graph are."""

    @abstractmethod
    def write(self, document: Any, file: BinaryIO) -> None:
        """Write a document that ``build`` made. The same document always gives the same bytes."""

    def keep(self, document: Any, previous: BinaryIO) -> Document:
        """``document`` with what a person changed by hand in an earlier file of this format, which it will replace.

        Formats that people go on editing (DrawIO) keep what was moved and added; the others keep nothing. Raises
        InputError for a file that is not of this format.
        """
        kept: Document = document
        return kept
