"""The viewer's data: a LayoutGraph in columns of numbers and cleaned text, small enough to sit inside a page.

The live page will hand the same data to the same viewer, so this module knows nothing of HTML.
"""

from __future__ import annotations

import gc
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import msgspec

from gpuflight.vis.model import Box, LayoutGraph
from gpuflight.vis.text import clean, clean_value
from gpuflight.vis.visual import CATEGORIES, GLYPHS, KIND_NOUN, MEDIA

LABEL_LIMIT = 200
BOX_COLUMNS = (
    "id", "parent", "kind", "category", "role", "place", "scale", "header", "label", "lines", "bars", "count", "rule",
    "flags", "facts", "change",
)  # fmt: skip
ROLES = ("frame", "card", "chip", "group")
CHANGES = ("", "added", "removed", "changed")
NOTHING: list[Any] = []
"""What most boxes have: one list instead of one each, which the garbage collector would look at again and again."""
QUIET_MEDIA = ("placement", "attribute")
"""Media that the viewer leaves out until the reader asks for them."""


class _Table(dict[str, int]):
    """Texts numbered in the order of their first use: ``table[text]``."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def __missing__(self, text: str) -> int:
        number = self[text] = len(self.texts)
        self.texts.append(clean(text, LABEL_LIMIT))
        return number


def payload(layout: LayoutGraph) -> dict[str, Any]:
    """Everything the viewer needs, as JSON-ready data."""
    collecting = gc.isenabled()
    gc.disable()  # many lists and no cycles: half of the time would go into looking at them
    try:
        return _payload(layout)
    finally:
        if collecting:
            gc.enable()


def _payload(layout: LayoutGraph) -> dict[str, Any]:
    words = _Table()
    boxes, index = _boxes(layout, words)
    edge_index: dict[str, int] = {}
    wanted = {edge for finding in layout.findings for edge in finding.edges}
    links = _links(layout, index, words, wanted, edge_index)
    return {
        "version": 1,
        "title": clean(layout.title, LABEL_LIMIT),
        "layout": layout.layout,
        "width": layout.width,
        "height": layout.height,
        "round": layout.round_number,
        "time": time_text(layout.time_ns),
        "environment": _cleaned(msgspec.to_builtins(layout.environment)),
        "nodes": layout.nodes_count,
        "edges": layout.edges_count,
        "notes": [clean(note) for note in layout.notes],
        "kinds": [[clean(e.key, LABEL_LIMIT), clean(e.label, LABEL_LIMIT), e.category, e.count] for e in layout.kinds],
        "media": [[e.key, e.label, e.count, e.key not in QUIET_MEDIA] for e in layout.media],
        "nouns": KIND_NOUN,
        "style": {
            "categories": CATEGORIES,
            "media": MEDIA,
            "glyphs": GLYPHS,
        },
        "changes": CHANGES,
        "coverage": [_cleaned(msgspec.to_builtins(line)) for line in layout.coverage],
        "findings": _findings(layout, index, edge_index),
        "boxes": boxes,
        "links": links,
        "routes": _routes(layout, index),
        "words": words.texts,
    }


def time_text(time_ns: int) -> str:
    """UNIX ns as ISO 8601 in UTC, empty for 0 and what no calendar has."""
    if not time_ns:
        return ""
    try:
        return datetime.fromtimestamp(time_ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return ""


def _boxes(layout: LayoutGraph, words: _Table) -> tuple[dict[str, list[Any]], dict[str, int]]:
    """Boxes in columns, parents before children; -1 is the parent of the outermost."""
    rows: list[tuple[Any, ...]] = []  # in the order of BOX_COLUMNS: a tuple per box is a third of an append per column
    places: list[float] = []
    index: dict[str, int] = {}
    roles = {role: number for number, role in enumerate(ROLES)}
    changes = {change: number for number, change in enumerate(CHANGES)}
    stack: list[tuple[Box, int]] = [(box, -1) for box in reversed(layout.boxes)]
    while stack:
        box, parent = stack.pop()
        number = len(index)
        index[box.id] = number
        places += (box.x, box.y, box.w, box.h)
        rows.append(
            (
                clean(box.id), parent, words[box.kind], words[box.category], roles[box.role], 0, box.scale, box.header,
                clean(box.label, LABEL_LIMIT),
                [clean(line, LABEL_LIMIT) for line in box.lines] if box.lines else NOTHING,
                [[bar.label, round(bar.fraction, 4), bar.text] for bar in box.bars] if box.bars else NOTHING,
                box.count, words[box.rule], box.synthetic + 2 * box.missing,
                _facts(box.attributes, box.metrics, box.unknown, box.ns), changes[box.change],
            )
        )  # fmt: skip
        if box.children:
            stack += [(child, number) for child in reversed(box.children)]
    columns = dict(zip(BOX_COLUMNS, map(list, zip(*rows, strict=True)), strict=False))
    columns = {name: columns.get(name, []) for name in BOX_COLUMNS}
    columns["place"] = places
    return columns, index


def _facts(attributes: dict[str, Any], metrics: dict[str, Any], unknown: dict[str, str], ns: str = "") -> Any:
    """Attributes, metrics and reasons for what is unknown; 0 when there is nothing to say."""
    if ns:
        return [_cleaned(attributes), _cleaned(metrics), _cleaned(unknown), clean(ns, LABEL_LIMIT)]
    if unknown:
        return [_cleaned(attributes), _cleaned(metrics), _cleaned(unknown)]
    if metrics:
        return [_cleaned(attributes), _cleaned(metrics)]
    return [_cleaned(attributes)] if attributes else 0


@lru_cache(maxsize=4096)
def _name(name: str) -> str:
    return clean(name, LABEL_LIMIT)


def _cleaned(values: dict[str, Any]) -> dict[str, Any]:
    cleaned: dict[str, Any] = {}
    for name, value in values.items():
        kind = value.__class__
        if kind is str:
            value = clean(value)
        elif kind is float:
            if value - value != 0.0:  # not finite
                value = str(value)
        elif kind is not int or not -(2**53) <= value <= 2**53:
            value = _deep(value)
        cleaned[_name(name) if name.__class__ is str else _name(str(name))] = value
    return cleaned


def _deep(value: Any) -> Any:
    if isinstance(value, dict):
        return _cleaned(value)
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return [_deep(item) for item in value[:256]]
    return clean_value(value)


def _links(
    layout: LayoutGraph, index: dict[str, int], words: _Table, wanted: set[str], edge_index: dict[str, int]
) -> dict[str, list[Any]]:
    links = layout.links
    changes = {change: number for number, change in enumerate(CHANGES)}
    if wanted:
        for number, link in enumerate(links):
            edge_id = f"{link.kind}({link.source}->{link.target})"
            if edge_id in wanted:
                edge_index[edge_id] = number
    return {
        "ends": [number for link in links for number in (index[link.source], index[link.target])],
        "kind": [words[link.kind] for link in links],
        "medium": [words[link.medium] for link in links],
        "directed": [1 if link.directed else 0 for link in links],
        "route": [link.route for link in links],
        "facts": [
            _facts(link.attributes, link.metrics, link.unknown)
            if link.attributes or link.metrics or link.unknown
            else 0
            for link in links
        ],
        "change": [changes[link.change] for link in links],
    }


def _routes(layout: LayoutGraph, index: dict[str, int]) -> list[list[Any]]:
    return [
        [
            index[route.source],
            index[route.target],
            route.medium,
            clean(route.label, LABEL_LIMIT),
            [part for point in route.points for part in point],
            (1 if route.forward else 0) + (2 if route.backward else 0),
            route.weight,
            route.links,
            CHANGES.index(route.change),
        ]
        for route in layout.routes
    ]


def _findings(layout: LayoutGraph, index: dict[str, int], edge_index: dict[str, int]) -> list[dict[str, Any]]:
    """Findings with their entities as box numbers and edges as link numbers; names that are not drawn stay as text."""
    found = []
    for finding in layout.findings:
        data = _cleaned(msgspec.to_builtins(finding))
        data["boxes"] = [index[name] for name in finding.entities if name in index]
        data["links"] = [edge_index[name] for name in finding.edges if name in edge_index]
        data["elsewhere"] = [clean(name) for name in finding.entities if name not in index]
        found.append(data)
    return found
