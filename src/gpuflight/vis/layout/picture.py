"""From placed items to the LayoutGraph: what every layout of boxes ends with."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import islice, repeat
from typing import Protocol

from gpuflight.graph import Graph
from gpuflight.graph.element import EMPTY
from gpuflight.vis.base import LayoutOptions
from gpuflight.vis.layout.bundle import Bundle, Bundles, route_label
from gpuflight.vis.layout.item import Item, by_level
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


def finish(name: str, forest: Placed, bundles: Bundles, drawn: Iterable[Bundle]) -> LayoutGraph:
    """The picture of layout ``name``, made of placed items and the bundles that are to be lines."""
    options = forest.options
    routes: list[Route] = []
    links = bundles.links
    drawn = list(drawn)
    places = rounded([place for bundle in drawn for point in bundle.points for place in point], repeat(1))
    points = zip(places[::2], places[1::2], strict=True)
    for number, bundle in enumerate(drawn):
        for index in bundle.links:
            links[index].route = number
        routes.append(
            Route(
                source=bundle.first.id,
                target=bundle.second.id,
                medium=bundle.medium,
                label=route_label(bundle, links),
                points=list(islice(points, len(bundle.points))),
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
        links=bundles.links,
        routes=routes,
        kinds=_kinds(forest),
        media=_media(bundles),
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


def rounded(numbers: Iterable[float], digits: Iterable[int]) -> list[float]:
    """What ``round`` gives for each number and its digits, in a third of the time: only what is near the middle of two
    needs its exact arithmetic; a whole number over a power of ten is the nearest double without it."""
    return [
        whole / power
        if -0.49 < (scaled := number * (power := _POWERS[digit])) - (whole := scaled + _SHIFT - _SHIFT) < 0.49
        else round(number, digit)
        for number, digit in zip(numbers, digits, strict=False)
    ]


_POWERS = [10.0**digits for digits in range(8)]


def _boxes(root: Item) -> list[Box]:
    """The tree of items as boxes; built from the leaves up, without recursion."""
    items = by_level(root)[:0:-1]
    # what is drawn small needs finer places
    digits = [2 if item.scale > 0.2 else 4 if item.scale > 0.005 else 7 for item in items]
    scales = {scale: round(scale, 5) for scale in {item.scale for item in items}}
    headers = {height: round(height, 2) for height in {item.header for item in items}}
    inside: defaultdict[Item | None, list[Box]] = defaultdict(list)
    for item, x, y, w, h in zip(
        items,
        rounded([item.x for item in items], digits),
        rounded([item.y for item in items], digits),
        rounded([item.w for item in items], digits),
        rounded([item.h for item in items], digits),
        strict=True,
    ):
        entity = item.entity
        # more than 30 arguments, a keyword counting twice, are handed over in a dictionary, at six times the price
        box = Box(
            item.id,
            item.kind,
            item.label,
            _category(item),
            "group" if item.folds else item.role,
            x,
            y,
            w,
            h,
            scale=scales[item.scale],
            header=headers[item.header],
            lines=item.lines,
            bars=item.bars,
            attributes=entity.attributes or EMPTY if entity is not None else EMPTY,
            metrics=entity.metrics or EMPTY if entity is not None else EMPTY,
            unknown=entity.unknown or EMPTY if entity is not None else EMPTY,
            ns=entity.ns if entity is not None else "",
            rule=item.rule,
            count=item.count,
        )
        if item.children:
            box.children = children = inside.pop(item)
            children.reverse()
            box.count += sum([child.count for child in children])
        if entity is None:
            box.missing = item.missing
            box.synthetic = not item.missing
        inside[item.parent].append(box)
    return inside[root][::-1]


def _category(item: Item) -> str:
    """That of the kind; a group has that of its members."""
    kind = item.children[0].kind if item.folds and item.children else item.kind
    return KIND_CATEGORY.get(kind, "group" if item.entity is None else "bus")


def _kinds(forest: Placed) -> list[LegendEntry]:
    counts = Counter([item.kind for item in forest.items.values() if item.entity is not None])
    ranks = {category: rank for rank, category in enumerate(CATEGORIES)}
    entries = [
        LegendEntry(kind, KIND_NOUN.get(kind, kind), KIND_CATEGORY.get(kind, "bus"), count)
        for kind, count in counts.items()
    ]
    return sorted(entries, key=lambda entry: (ranks[entry.category], entry.key))


def _media(bundles: Bundles) -> list[LegendEntry]:
    counts = Counter([link.medium for link in bundles.links])
    return [LegendEntry(medium, MEDIA[medium][0], medium, counts[medium]) for medium in MEDIA if counts[medium]]
