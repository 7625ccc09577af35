"""The timeline layout: when what ran, in lanes per device and stream; what has no time stands below, as by ``default``.

A session that was loaded from its records (``LayoutOptions.timelines``) gets a frame with an axis, lanes of the host
and of each GPU, its kernels and scopes. In a graph without records each session is one bar, from its start to its end.
"""

from __future__ import annotations

from gpuflight.graph import Graph
from gpuflight.graph.element import EMPTY, EdgeKey
from gpuflight.vis.base import Layout, LayoutOptions
from gpuflight.vis.layout.default import DefaultLayout
from gpuflight.vis.layout.lanes import MARGIN, Canvas, cards, timeline_frame
from gpuflight.vis.model import Box, LayoutGraph, LegendEntry, Link
from gpuflight.vis.text import plural
from gpuflight.vis.timeline import Timeline, of_entities
from gpuflight.vis.visual import KIND_CATEGORY, MEDIA, SLICES, medium_of

_GAP = 28.0


class TimelineLayout(Layout):
    """When what ran in GPU sessions: lanes per device and stream; all else below, nested as by the default."""

    name = "timeline"
    stability = "beta"

    def layout(self, graph: Graph, options: LayoutOptions) -> LayoutGraph:
        """See Layout.layout. O(nodes + edges · depth + slices)."""
        notes: list[str] = []
        timelines = [each for each in options.timelines if each.session in graph.nodes]
        if hidden := len(options.timelines) - len(timelines):
            notes.append(f"{plural(hidden, 'session')} not among what is shown: left out of the time line")
        if not timelines:
            timelines = of_entities(graph.nodes.values())
        if not timelines:
            notes.append("No session with a known time in this graph: there is no time line to draw")
        canvas = Canvas(graph)
        y = MARGIN
        spans = _spans(timelines)
        if len(timelines) > 1 and len(set(spans)) == 1:
            notes.append("All sessions on one axis of time")
        for timeline, span in zip(timelines, spans, strict=True):
            y = timeline_frame(canvas, timeline, span, _inside(graph, timeline, canvas), y) + _GAP
        placed = canvas.placed
        rest = _without(graph, placed)
        below = DefaultLayout().layout(rest, options)
        if rest.nodes or below.boxes:
            _move(below, y - MARGIN if canvas.boxes else 0.0)
        boxes = [*canvas.boxes, *below.boxes]
        links, named = _links(graph, placed, below)
        if named:
            bottom = max((box.y + box.h for box in boxes), default=0.0)
            boxes.append(cards(canvas, "Named by an edge, not in the graph", named, bottom + _GAP))
        kept = placed | {entity.id for entity in below.entities}
        edge_keys = {(link.source, link.target, link.kind) for link in links} | {edge.key for edge in below.edges}
        links = [*below.links, *links]
        title = options.title or (timelines[0].label if len(timelines) == 1 and timelines[0].label else below.title)
        return LayoutGraph(
            title=title,
            layout=self.name,
            width=round(max((box.x + box.w for box in boxes), default=0.0) + MARGIN, 1),
            height=round(max((box.y + box.h for box in boxes), default=0.0) + MARGIN, 1),
            boxes=boxes,
            links=links,
            routes=below.routes,
            kinds=_kinds(canvas, below),
            media=_media(links),
            nodes_count=len(kept),
            edges_count=len(edge_keys),
            environment=options.environment,
            coverage=options.coverage,
            findings=options.findings,
            notes=[*notes, *below.notes],
            round_number=options.round_number,
            time_ns=options.time_ns,
            entities=[entity for entity in graph.nodes.values() if entity.id in kept],
            edges=[edge for key, edge in graph.edges.items() if key in edge_keys],
            timelines=timelines,
        )


def _spans(timelines: list[Timeline]) -> list[tuple[int, int]]:
    """The axis of each: one for all if they ran about together, else each its own."""
    if not timelines:
        return []
    first, last = min(each.start_ns for each in timelines), max(each.end_ns for each in timelines)
    longest = max(each.end_ns - each.start_ns for each in timelines)
    if last - first <= 4 * max(longest, 1):
        return [(first, last)] * len(timelines)
    return [(each.start_ns, each.end_ns) for each in timelines]


def _inside(graph: Graph, timeline: Timeline, canvas: Canvas) -> list[str]:
    """What belongs to a session and is no lane: its kernels, scopes, idle streams, in the order of the graph."""
    if not timeline.session:
        return []
    lanes = {lane.entity for lane in timeline.lanes}
    return [
        source
        for source, target, kind in graph.edges
        if target == timeline.session
        and kind == "Belong"
        and source in graph.nodes
        and source not in lanes
        and graph.nodes[source].kind in ("Kernel", "Scope", "Stream")
    ]


def _without(graph: Graph, placed: set[str]) -> Graph:
    if not placed:
        return graph
    nodes = {key: entity for key, entity in graph.nodes.items() if key not in placed}
    edges = {key: edge for key, edge in graph.edges.items() if key[0] not in placed and key[1] not in placed}
    return Graph.of(nodes, edges)


def _move(picture: LayoutGraph, down: float) -> None:
    """Everything of a picture further down."""
    stack = list(picture.boxes)
    while stack:
        box = stack.pop()
        box.y = round(box.y + down, 7)
        stack += box.children
    for route in picture.routes:
        route.points = [(x, round(y + down, 1)) for x, y in route.points]


def _links(graph: Graph, placed: set[str], below: LayoutGraph) -> tuple[list[Link], list[str]]:
    """Links at what is in the lanes, none of them drawn, and the ends of theirs that are in no graph."""
    links: list[Link] = []
    named: dict[str, None] = {}
    kept = {entity.id for entity in below.entities} | placed
    known = {entity_id for entity_id in _ids(below.boxes) if entity_id not in graph.nodes}
    for key in graph.edges:
        source, target, kind = key
        if source not in placed and target not in placed:
            continue
        if any(end in graph.nodes and end not in kept for end in (source, target)):
            continue  # a stand-in that the layout below draws as its real end
        named.update(dict.fromkeys(end for end in (source, target) if end not in kept and end not in known))
        links.append(_link(graph, key, kind))
    return links, list(named)


def _link(graph: Graph, key: EdgeKey, kind: str) -> Link:
    edge = graph.edges[key]
    kinds = [graph.nodes[end].kind if end in graph.nodes else "?" for end in key[:2]]
    return Link(
        source=edge.source,
        target=edge.target,
        kind=kind,
        category=edge.category,
        medium=medium_of(kind, edge.category, *kinds),
        directed=edge.directed,
        attributes=edge.attributes or EMPTY,
        metrics=edge.metrics or EMPTY,
        unknown=edge.unknown or EMPTY,
    )


def _ids(boxes: list[Box]) -> list[str]:
    found = []
    stack = list(boxes)
    while stack:
        box = stack.pop()
        found.append(box.id)
        stack += box.children
    return found


def _kinds(canvas: Canvas, below: LayoutGraph) -> list[LegendEntry]:
    """Kinds of slices, of what is in the lanes, and of what is below."""
    entries = [
        LegendEntry(box_kind, noun, category, canvas.slices[kind])
        for kind, (box_kind, noun, category) in SLICES.items()
        if canvas.slices[kind]
    ]
    counts: dict[str, LegendEntry] = {}
    for entity_id in sorted(canvas.placed):
        kind = canvas.graph.nodes[entity_id].kind
        entry = counts.setdefault(kind, canvas.legend(kind))
        entry.count += 1
    for entry in below.kinds:
        known = counts.get(entry.key)
        if known is None:
            counts[entry.key] = entry
        else:
            known.count += entry.count
    order = list(KIND_CATEGORY)
    return entries + sorted(counts.values(), key=lambda each: order.index(each.key) if each.key in order else 99)


def _media(links: list[Link]) -> list[LegendEntry]:
    counts = dict.fromkeys(MEDIA, 0)
    for link in links:
        counts[link.medium] += 1
    return [LegendEntry(medium, MEDIA[medium][0], medium, count) for medium, count in counts.items() if count]
