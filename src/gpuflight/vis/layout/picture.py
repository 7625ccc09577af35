"""From placed items to the LayoutGraph: what every layout of boxes ends with."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol

from gpuflight.graph import Graph
from gpuflight.graph.element import EMPTY
from gpuflight.vis.base import LayoutOptions
from gpuflight.vis.layout.bundle import Bundle, Bundles, route_label
from gpuflight.vis.layout.item import Item
from gpuflight.vis.layout.place import places_in
from gpuflight.vis.layout.wires import Wires
from gpuflight.vis.model import Box, LayoutGraph, LegendEntry, Route
from gpuflight.vis.text import plural
from gpuflight.vis.visual import CATEGORIES, KIND_CATEGORY, KIND_NOUN, MEDIA

MARGIN = 24.0
ASPECT_MAX = 3.0


class Placed(Protocol):
    """What a picture is made of: the tree of items under ``root``, and what was learnt while building it."""

    graph: Graph
    options: LayoutOptions
    root: Item
    items: dict[str, Item]
    notes: list[str]
    wires: Wires


def finish(name: str, forest: Placed, bundles: Bundles, drawn: Iterable[Bundle]) -> LayoutGraph:
    """The picture of layout ``name``, made of placed items and the bundles that are to be lines."""
    options = forest.options
    routes: list[Route] = []
    links = forest.wires.links
    for number, bundle in enumerate(drawn):
        for index in bundle.links:
            links[index].route = number
        routes.append(
            Route(
                source=bundle.first.id,
                target=bundle.second.id,
                medium=bundle.medium,
                label=route_label(bundle, links),
                points=[(rounded(x, 1), rounded(y, 1)) for x, y in bundle.points],
                forward=bundle.forward,
                backward=bundle.backward,
                weight=bundle.weight,
                links=bundle.links,
            )
        )
    boxes = _boxes(forest.root)
    width = max((box.x + box.w for box in boxes), default=0.0) + MARGIN
    height = max((box.y + box.h for box in boxes), default=0.0) + MARGIN
    width, height = max(width, height / ASPECT_MAX), max(height, width / ASPECT_MAX)
    notes = list(forest.notes)
    if bundles.inside:
        notes.append(f"{plural(bundles.inside, 'connection')} between things of one box: in its details, not drawn")
    return LayoutGraph(
        title=options.title or _title(forest),
        layout=name,
        width=round(width, 1),
        height=round(height, 1),
        boxes=boxes,
        links=links,
        routes=routes,
        kinds=_kinds(forest),
        media=_media(forest),
        nodes_count=len(forest.graph.nodes),
        edges_count=len(forest.graph.edges),
        environment=options.environment,
        coverage=options.coverage,
        findings=options.findings,
        notes=notes,
        round_number=options.round_number,
        time_ns=options.time_ns,
        entities=list(forest.graph.nodes.values()),
        edges=list(forest.graph.edges.values()),
        timelines=options.timelines,
    )


def _title(forest: Placed) -> str:
    if forest.options.environment.hostname:
        return forest.options.environment.hostname
    return next((item.label for item in forest.root.children if item.kind == "Host"), "gpuflight")


_SHIFT = 1.5 * 2**52
"""A double this large has no room for a fraction: what is added to it, and taken off again, is a whole number."""


_POWERS = [10.0**digits for digits in range(8)]


def rounded(number: float, digits: int) -> float:
    """What ``round`` gives, in a third of the time: only what is near the middle of two needs its exact arithmetic; a
    whole number over a power of ten is the nearest double without it."""
    power = _POWERS[digits]
    scaled = number * power
    whole = scaled + _SHIFT - _SHIFT
    return whole / power if -0.49 < scaled - whole < 0.49 else round(number, digits)


def _boxes(root: Item) -> list[Box]:
    """The boxes of all that stands in ``root``, without recursion. What stands in groups gets its place here, where
    that is read (see ``place``).

    Neighbours are mostly alike: of one kind, in a row, with names of one length. So what is as before is not rounded
    again.
    """
    nothing: list[Any] = []
    outermost: list[Box] = []
    holders = [(root, outermost)]  # items, and where the boxes of their children go
    around: list[Box] = []  # the boxes of these items, but for the root
    last_scale = last_y = last_w = last_h = math.nan  # which nothing equals
    for holder, boxes in holders:  # grows while it is read
        placed = holder.group is None and not holder.folds
        left, top, by, inner = (0.0, 0.0, 1.0, 1.0) if placed else places_in(holder)
        for item in holder.children:
            scale = item.scale if placed else inner
            if scale != last_scale:
                last_scale, last_y, last_w, last_h = scale, math.nan, math.nan, math.nan
                digits = 2 if scale > 0.2 else 4 if scale > 0.005 else 7  # what is drawn small needs finer places
                shown_scale = rounded(scale, 5)
            x = left + item.x * by
            if (now := top + item.y * by) != last_y:
                last_y = now
                y = rounded(now, digits)
            if (now := item.w * inner) != last_w:
                last_w = now
                w = rounded(now, digits)
            if (now := item.h * inner) != last_h:
                last_h = now
                h = rounded(now, digits)
            header, lines, bars = 0.0, nothing, nothing
            if item.header:  # where both are written
                header = rounded(item.header * inner, 2)
                lines, bars = list(item.lines), list(item.bars)
            kind = item.kind
            children = item.children
            entity = item.entity
            if entity is not None:
                role = item.role
                category = KIND_CATEGORY.get(kind, "bus")
                attributes, metrics, unknown = entity.attributes, entity.metrics, entity.unknown
                ns = entity.ns
            else:
                role = "group" if item.folds else item.role
                category = KIND_CATEGORY.get(children[0].kind if item.folds and children else kind, "group")
                attributes = metrics = unknown = EMPTY
                ns = ""
            box = Box(  # by place: a keyword each would cost half as much again
                item.id,
                kind,
                item.label,
                category,
                role,
                rounded(x, digits),
                y,
                w,
                h,
                shown_scale,
                header,
                lines,
                bars,
                [] if children else nothing,
                attributes or EMPTY,
                metrics or EMPTY,
                unknown or EMPTY,
                ns,
            )
            if entity is None:
                box.rule = item.rule
                box.count = item.count
                box.missing = item.missing
                box.synthetic = not item.missing
            boxes.append(box)
            if children:
                holders.append((item, box.children))
                around.append(box)
                if not placed:
                    item.x, item.y, item.scale = x, last_y, scale
    for box in reversed(around):
        box.count += sum([child.count for child in box.children])
    return outermost


def _kinds(forest: Placed) -> list[LegendEntry]:
    counts: Counter[str] = Counter()
    for cls, count in Counter([type(entity) for entity in forest.graph.nodes.values()]).items():
        counts[str(cls.__struct_config__.tag)] += count
    ranks = {category: rank for rank, category in enumerate(CATEGORIES)}
    entries = [
        LegendEntry(kind, KIND_NOUN.get(kind, kind), KIND_CATEGORY.get(kind, "bus"), count)
        for kind, count in counts.items()
    ]
    return sorted(entries, key=lambda entry: (ranks[entry.category], entry.key))


def _media(forest: Placed) -> list[LegendEntry]:
    counts: Counter[str] = Counter()
    for sort, count in Counter(forest.wires.sorts).items():
        counts[sort.medium] += count
    return [LegendEntry(medium, MEDIA[medium][0], medium, counts[medium]) for medium in MEDIA if counts[medium]]
