"""The viewer's data: a LayoutGraph in columns of numbers and cleaned text, small enough to sit inside a page.

The live page will hand the same data to the same viewer, so this module knows nothing of HTML.
"""

from __future__ import annotations

from datetime import UTC, datetime
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
QUIET_MEDIA = ("placement", "attribute")
"""Media that the viewer leaves out until the reader asks for them."""


class _Table:
    """Texts numbered in the order of their first use."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._index: dict[str, int] = {}

    def of(self, text: str) -> int:
        index = self._index.get(text)
        if index is None:
            index = self._index[text] = len(self.texts)
            self.texts.append(clean(text, LABEL_LIMIT))
        return index


def payload(layout: LayoutGraph) -> dict[str, Any]:
    """Everything the viewer needs, as JSON-ready data."""
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
    columns: dict[str, list[Any]] = {name: [] for name in BOX_COLUMNS}
    index: dict[str, int] = {}
    roles = {role: number for number, role in enumerate(ROLES)}
    stack: list[tuple[Box, int]] = [(box, -1) for box in reversed(layout.boxes)]
    add = {name: column.append for name, column in columns.items()}
    while stack:
        box, parent = stack.pop()
        number = len(index)
        index[box.id] = number
        add["id"](clean(box.id))
        add["parent"](parent)
        add["kind"](words.of(box.kind))
        add["category"](words.of(box.category))
        add["role"](roles[box.role])
        columns["place"].extend((box.x, box.y, box.w, box.h))
        add["scale"](box.scale)
        add["header"](box.header)
        label = clean(box.label, LABEL_LIMIT)
        add["label"](label)
        add["lines"]([clean(line, LABEL_LIMIT) for line in box.lines])
        add["bars"]([[bar.label, round(bar.fraction, 4), bar.text] for bar in box.bars])
        add["count"](box.count)
        add["rule"](words.of(box.rule))
        add["flags"]((1 if box.synthetic else 0) + (2 if box.missing else 0))
        add["facts"](_facts(box.attributes, box.metrics, box.unknown, box.ns))
        add["change"](CHANGES.index(box.change))
        stack.extend((child, number) for child in reversed(box.children))
    return columns, index


def _facts(attributes: dict[str, Any], metrics: dict[str, Any], unknown: dict[str, str], ns: str = "") -> Any:
    """Attributes, metrics and reasons for what is unknown; 0 when there is nothing to say."""
    if not attributes and not metrics and not unknown and not ns:
        return 0
    facts: list[Any] = [_cleaned(attributes), _cleaned(metrics), _cleaned(unknown)]
    if ns:
        facts.append(clean(ns, LABEL_LIMIT))
    while facts and not facts[-1]:
        facts.pop()
    return facts


def _cleaned(values: dict[str, Any]) -> dict[str, Any]:
    return {clean(str(name), LABEL_LIMIT): _deep(value) for name, value in values.items()}


def _deep(value: Any) -> Any:
    if isinstance(value, dict):
        return _cleaned(value)
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return [_deep(item) for item in value[:256]]
    return clean_value(value)


def _links(
    layout: LayoutGraph, index: dict[str, int], words: _Table, wanted: set[str], edge_index: dict[str, int]
) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {
        name: [] for name in ("ends", "kind", "medium", "directed", "route", "facts", "change")
    }
    ends, kinds, media = columns["ends"], columns["kind"], columns["medium"]
    for number, link in enumerate(layout.links):
        ends.append(index[link.source])
        ends.append(index[link.target])
        kinds.append(words.of(link.kind))
        media.append(words.of(link.medium))
        columns["directed"].append(1 if link.directed else 0)
        columns["route"].append(link.route)
        columns["facts"].append(_facts(link.attributes, link.metrics, link.unknown))
        columns["change"].append(CHANGES.index(link.change))
        if wanted:
            edge_id = f"{link.kind}({link.source}->{link.target})"
            if edge_id in wanted:
                edge_index[edge_id] = number
    return columns


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
