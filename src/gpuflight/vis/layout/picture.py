"""From placed items to the LayoutGraph: what every layout of boxes ends with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from gpuflight.graph import Graph
from gpuflight.vis.base import LayoutOptions
from gpuflight.vis.layout.bundle import Bundle, Bundles, route_label
from gpuflight.vis.layout.item import Item, walk
from gpuflight.vis.model import Box, LayoutGraph, LegendEntry, Route
from gpuflight.vis.text import plain_dict, plural
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
    for bundle in drawn:
        for index in bundle.links:
            bundles.links[index].route = len(routes)
        routes.append(
            Route(
                source=bundle.first.id,
                target=bundle.second.id,
                medium=bundle.medium,
                label=route_label(bundle, bundles.links),
                points=[(round(x, 1), round(y, 1)) for x, y in bundle.points],
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


def _boxes(root: Item) -> list[Box]:
    """The tree of items as boxes; built from the leaves up, without recursion."""
    made: dict[Item, Box] = {}
    for item in reversed(walk(root)):
        if item is root:
            continue
        entity = item.entity
        scale = item.scale
        digits = 2 if scale > 0.2 else 4 if scale > 0.005 else 7  # what is drawn small needs finer places
        box = Box(
            id=item.id,
            kind=item.kind,
            label=item.label,
            category=_category(item),
            role="group" if item.folds else item.role,
            x=round(item.x, digits),
            y=round(item.y, digits),
            w=round(item.w, digits),
            h=round(item.h, digits),
            scale=round(scale, 5),
            header=round(item.header, 2),
            lines=item.lines,
            bars=item.bars,
            rule=item.rule,
            count=item.count,
        )
        if item.children:
            box.children = children = [made[child] for child in item.children]
            box.count += sum([child.count for child in children])
        if entity is not None:
            box.ns = entity.ns
            if entity.attributes:
                box.attributes = plain_dict(entity.attributes)
            if entity.metrics:
                box.metrics = plain_dict(entity.metrics)
            if entity.unknown:
                box.unknown = entity.unknown
        elif item.missing:
            box.missing = True
        else:
            box.synthetic = True
        made[item] = box
    return [made[child] for child in root.children]


def _category(item: Item) -> str:
    """That of the kind; a group has that of its members."""
    kind = item.children[0].kind if item.folds and item.children else item.kind
    return KIND_CATEGORY.get(kind, "group" if item.entity is None else "bus")


def _kinds(forest: Placed) -> list[LegendEntry]:
    counts = Counter(item.kind for item in forest.items.values() if item.entity is not None)
    ranks = {category: rank for rank, category in enumerate(CATEGORIES)}
    entries = [
        LegendEntry(kind, KIND_NOUN.get(kind, kind), KIND_CATEGORY.get(kind, "bus"), count)
        for kind, count in counts.items()
    ]
    return sorted(entries, key=lambda entry: (ranks[entry.category], entry.key))


def _media(bundles: Bundles) -> list[LegendEntry]:
    counts = Counter(link.medium for link in bundles.links)
    return [LegendEntry(medium, MEDIA[medium][0], medium, counts[medium]) for medium in MEDIA if counts[medium]]
