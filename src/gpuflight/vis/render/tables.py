"""The elements of a graph as two typed tables, nodes and edges, for formats that know columns (GEXF, GraphML, CSV).

A column is named once for the whole file and has one type: what fits all its values. Identity fields, attributes and
metrics stand side by side. Names that these formats or their readers use for themselves are changed (``pid`` is a
node's parent in GEXF), names that would be one after cleaning are told apart.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct, field

from gpuflight.graph import Edge, Entity
from gpuflight.vis.model import Box, LayoutGraph
from gpuflight.vis.text import clean, clean_value
from gpuflight.vis.visual import KIND_CATEGORY, medium_of

ColumnType = Literal["string", "long", "double", "boolean"]
Group = Literal["about", "identity", "attributes", "metrics"]

TITLE_LIMIT = 200
LONG = range(-(2**63), 2**63)
RESERVED = {
    # Attributes of the formats' own elements and columns of Gephi; networkx takes a node's or edge's data for them.
    "pid": "process_id", "id": "entity_id", "start": "start_ticks", "end": "end_value", "label": "label_text",
    "source": "source_name", "target": "target_name", "type": "type_name", "weight": "weight_value",
    "viz": "viz_value", "parents": "parents_value", "slices": "slices_value", "spells": "spells_value",
    "for": "for_value", "interval": "interval_value", "timeset": "timeset_value", "timestamp": "timestamp_value",
    "networkx_key": "networkx_key_value", "key": "key_name", "x": "x_value", "y": "y_value", "z": "z_value",
    "r": "r_value", "g": "g_value", "b": "b_value", "size": "size_value", "color": "color_value",
    "element": "element_name",
}  # fmt: skip

_BASE_FIELDS = frozenset(Entity.__struct_fields__)


class Column(Struct, frozen=True):
    """One column. ``key`` is the name that the graph has for it, ``title`` what the file calls it."""

    title: str
    type: ColumnType
    group: Group
    key: str


class Table(Struct):
    """The columns of the nodes or of the edges; ``of`` finds the number of a column by group and name."""

    columns: list[Column] = field(default_factory=list)
    of: dict[Group, dict[str, int]] = field(default_factory=dict)


class Elements(Struct, kw_only=True):
    """All that a data format writes: tables, elements, and where each entity stands in the picture.

    ``names`` are the ids as the file has them: cleaned, and still one per entity. ``missing`` are ends of edges that
    the graph does not hold.
    """

    nodes: Table
    edges: Table
    entities: list[Entity]
    links: list[Edge]
    names: dict[str, str]
    missing: list[str]
    boxes: dict[str, Box]
    kinds: dict[str, str]
    link_changes: dict[str, str] = field(default_factory=dict)


def elements(layout: LayoutGraph) -> Elements:
    """What a data format writes of a picture. O(nodes + edges)."""
    boxes = boxes_by_id(layout.boxes)
    kinds = {entity.id: entity.kind for entity in layout.entities}
    missing = dict.fromkeys(end for edge in layout.edges for end in (edge.source, edge.target) if end not in kinds)
    changes = {f"{link.kind}({link.source}->{link.target})": link.change for link in layout.links if link.change}
    about: list[tuple[str, ColumnType]] = [("kind", "string"), ("category", "string")]
    if any(entity.ns for entity in layout.entities):
        about.append(("ns", "string"))
    if missing:
        about.append(("missing", "boolean"))
    if any(box.change for box in boxes.values()):
        about.append(("change", "string"))
    edge_about: list[tuple[str, ColumnType]] = [
        ("kind", "string"), ("category", "string"), ("medium", "string"), ("directed", "boolean"),
    ]  # fmt: skip
    if changes:
        edge_about.append(("change", "string"))
    for rows, columns in ((layout.entities, about), (layout.edges, edge_about)):
        if any(row.unknown for row in rows):
            columns.append(("unknown", "string"))
    return Elements(
        nodes=_table(layout.entities, about, identity=True),
        edges=_table(layout.edges, edge_about, identity=False),
        entities=layout.entities,
        links=layout.edges,
        names=unique_names([*kinds, *missing]),
        missing=list(missing),
        boxes=boxes,
        kinds=kinds | {end: boxes[end].kind if end in boxes else "?" for end in missing},
        link_changes=changes,
    )


def boxes_by_id(boxes: Sequence[Box]) -> dict[str, Box]:
    """Every box of a picture, however deep."""
    found: dict[str, Box] = {}
    stack = list(reversed(boxes))
    while stack:
        box = stack.pop()
        found[box.id] = box
        if box.children:
            stack.extend(reversed(box.children))
    return found


def category_of(entity: Entity, box: Box | None) -> str:
    """The category of an entity in the visual language."""
    return box.category if box is not None else KIND_CATEGORY.get(entity.kind, "bus")


def seldom_of_node(entity: Entity, box: Box | None) -> dict[str, Any]:
    """What few entities have, by column key: a namespace, a change, values that could not be read."""
    return {
        "ns": entity.ns or None,
        "change": (box.change or None) if box is not None else None,
        "unknown": entity.unknown or None,
    }


def about_node(entity: Entity, box: Box | None) -> dict[str, Any]:
    """What the picture says of an entity besides its own values, by column key."""
    return {"kind": entity.kind, "category": category_of(entity, box), **seldom_of_node(entity, box)}


def always_of_edge(edge: Edge, kinds: Mapping[str, str]) -> dict[str, Any]:
    """What every edge of a kind between two kinds of entity has, by column key."""
    kind, category = edge.kind, edge.category
    medium = medium_of(kind, category, kinds[edge.source], kinds[edge.target])
    return {"kind": kind, "category": category, "medium": medium, "directed": edge.directed}


def seldom_of_edge(edge: Edge, changes: Mapping[str, str]) -> dict[str, Any]:
    """What few edges have, by column key."""
    return {"change": changes.get(edge.id) if changes else None, "unknown": edge.unknown or None}


def about_edge(edge: Edge, data: Elements) -> dict[str, Any]:
    """As ``about_node``, of an edge."""
    return always_of_edge(edge, data.kinds) | seldom_of_edge(edge, data.link_changes)


def identity_fields(kind: type[Entity]) -> tuple[str, ...]:
    """The fields that identify an entity of a kind, such as ``pid`` and ``start``."""
    return tuple(name for name in kind.__struct_fields__ if name not in _BASE_FIELDS)


def _table(rows: Sequence[Any], about: list[tuple[str, ColumnType]], *, identity: bool) -> Table:
    seen: dict[tuple[Group, str], set[type]] = {}
    wide: set[tuple[Group, str]] = set()  # integers that no 64 bits hold
    pairs: dict[tuple[Group, str, type], None] = {}
    fields_of: dict[type, tuple[str, ...]] = {}
    twice: set[str] = set()  # names that an entity has as a field of its identity and as an attribute
    for row in rows:
        for group, values in (("attributes", row.attributes), ("metrics", row.metrics)):
            for name, value in values.items():
                pairs[group, name, value.__class__] = None  # type: ignore[index]
                if value.__class__ is int and value not in LONG:
                    wide.add((group, name))  # type: ignore[arg-type]
        if identity:
            kind = row.__class__
            if kind not in fields_of:
                fields_of[kind] = identity_fields(kind)
            for name in fields_of[kind]:
                value = getattr(row, name)
                if name in row.attributes:
                    twice.add(name)
                pairs["identity", name, value.__class__] = None
                if value.__class__ is int and value not in LONG:
                    wide.add(("identity", name))
    shared: list[str] = []
    for group, name, kind in pairs:
        seen.setdefault((group, name), set()).add(kind)
    for group, name in [key for key in seen if key[0] == "attributes"]:
        if ("identity", name) in seen and name not in twice:  # a disk's name and that of a process: one column
            seen["identity", name] |= seen.pop((group, name))
            shared.append(name)
            if (group, name) in wide:
                wide.add(("identity", name))
    table = Table()
    titles: set[str] = set()
    for name, column_type in about:
        _add(table, titles, Column(name, column_type, "about", name))
    for wanted in ("identity", "attributes", "metrics"):
        for (group, name), types in seen.items():
            if group == wanted and types != {type(None)}:
                _add(table, titles, Column(name, _type(types, wide=(group, name) in wide), group, name))
    for name in shared:
        if name in table.of.get("identity", {}):
            table.of.setdefault("attributes", {})[name] = table.of["identity"][name]
    return table


def _type(types: set[type], *, wide: bool) -> ColumnType:
    types = types - {type(None)}
    if types == {bool}:
        return "boolean"
    if types == {int} and not wide:
        return "long"
    return "double" if types <= {int, float} else "string"


def _add(table: Table, titles: set[str], column: Column) -> None:
    name = clean(str(column.key), TITLE_LIMIT) or "(empty)"
    if column.group != "about":
        name = RESERVED.get(name.casefold(), name)
    title, number = name, 1
    while title.casefold() in titles:  # an attribute and a metric of one name; programs that ignore case
        number += 1
        title = f"{name} ({number})"
    titles.add(title.casefold())
    table.of.setdefault(column.group, {})[column.key] = len(table.columns)
    table.columns.append(Column(title, column.type, column.group, column.key))


def unique_names(raw: Iterable[str], limit: int = 1000) -> dict[str, str]:
    """Each text cleaned and cut, and still different from every other."""
    names: dict[str, str] = {}
    taken: set[str] = set()
    later: list[str] = []
    for text in raw:
        name = clean(text, limit)
        if name == text and text:
            names[text] = name
            taken.add(name)
        else:
            later.append(text)
    for text in later:  # what needed no cleaning keeps its name, whatever comes before it
        name = base = clean(text, limit) or "(empty)"
        number = 1
        while name in taken:
            number += 1
            name = f"{base} ({number})"
        names[text] = name
        taken.add(name)
    return names


def value_text(value: Any, limit: int = 4096) -> str | None:
    """A value as it stands in a file, cleaned but not escaped; None for nothing.

    Numbers that are not finite are ``INF``, ``-INF`` and ``NaN``, as XML Schema writes a double; lists are JSON.
    """
    kind = value.__class__
    if kind is str:
        return clean(value, limit)
    if kind is int:
        return int_text(value)
    if kind is float:
        if math.isfinite(value):
            return repr(value)
        return "NaN" if value != value else "INF" if value > 0 else "-INF"
    if kind is bool:
        return "true" if value else "false"
    if value is None:
        return None
    if isinstance(value, Mapping):
        plain = {clean(str(name), TITLE_LIMIT): clean_value(item, limit) for name, item in value.items()}
        return clean(json.dumps(plain, ensure_ascii=False), 4 * limit)
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value, key=str) if isinstance(value, (set, frozenset)) else value
        return clean(json.dumps(clean_value(list(items), limit), ensure_ascii=False, default=str), 4 * limit)
    return clean(str(value), limit)


def int_text(value: int) -> str:
    """Decimal, or hexadecimal for one so long that Python refuses to write it."""
    try:
        return str(value)
    except ValueError:
        return clean(hex(value))
