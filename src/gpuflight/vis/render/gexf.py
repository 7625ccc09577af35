"""GEXF 1.3, the format of Gephi (https://gexf.net): nodes and edges with typed attributes, places, sizes and colours.

Written row by row, so that memory is that of the graph. All edges are ``directed``, since readers (networkx) refuse
graphs that mix; the column ``directed`` says which have no direction. Places are those of the layout, with the y axis
turned up as Gephi has it.
"""

from __future__ import annotations

from typing import Any, BinaryIO, ClassVar

from gpuflight.vis.base import Document, Renderer
from gpuflight.vis.model import Box, LayoutGraph
from gpuflight.vis.render.tables import (
    Elements,
    Table,
    always_of_edge,
    category_of,
    elements,
    identity_fields,
    seldom_of_edge,
    seldom_of_node,
)
from gpuflight.vis.render.xml_text import XmlValues, escaped, xml, xml_value
from gpuflight.vis.text import clean
from gpuflight.vis.visual import CATEGORIES, CHANGES, MEDIA, signed

LABEL_LIMIT = 200
ROWS_AT_ONCE = 512
FRAME_SIZE = 16.0
THICKNESS_MAX = 6.0

_HEAD = """<?xml version="1.0" encoding="UTF-8"?>
<gexf xmlns="http://gexf.net/1.3" xmlns:viz="http://gexf.net/1.3/viz" version="1.3">
<meta><creator>gpuflight</creator><description>{description}</description></meta>
<graph defaultedgetype="directed" mode="static" idtype="string">
"""


class GexfDocument(Document):
    """The graph before it is text: tables, elements, thickness of the drawn edges by (source, target, kind)."""

    description: str
    data: Elements
    thickness: dict[tuple[str, str, str], float]


class GexfRenderer(Renderer):
    """GEXF 1.3 for Gephi: every node and edge with its values, place, size and colour."""

    name = "gexf"
    suffix: ClassVar[str] = ".gexf"

    def build(self, layout: LayoutGraph) -> GexfDocument:
        """See Renderer.build."""
        weights = [1.0 + (THICKNESS_MAX - 1.0) * route.weight for route in layout.routes]
        return GexfDocument(
            title=clean(layout.title, LABEL_LIMIT),
            description=". ".join(clean(text) for text in (layout.title, *layout.notes) if text),
            data=elements(layout),
            thickness={
                (link.source, link.target, link.kind): weights[link.route] for link in layout.links if link.route >= 0
            },
        )

    def write(self, document: GexfDocument, file: BinaryIO) -> None:
        """See Renderer.write. UTF-8, one element of the graph a line."""
        data = document.data
        file.write(_HEAD.format(description=escaped(document.description)).encode())
        for name, table in (("node", data.nodes), ("edge", data.edges)):
            file.write(_columns(name, table).encode())
        _write_nodes(data, file)
        _write_edges(data, document.thickness, file)
        file.write(b"</graph>\n</gexf>\n")


def _columns(name: str, table: Table) -> str:
    rows = "".join(
        f'<attribute id="{number}" title="{xml(column.title)}" type="{column.type}"/>\n'
        for number, column in enumerate(table.columns)
    )
    return f'<attributes class="{name}" mode="static">\n{rows}</attributes>\n'


class _Cells:
    """The ``<attvalue>`` elements of a row; the texts around the values are made once per column."""

    def __init__(self, table: Table) -> None:
        self.heads = {
            group: {name: f'<attvalue for="{number}" value="' for name, number in columns.items()}
            for group, columns in table.of.items()
        }
        self.texts = XmlValues()
        self.identities: dict[type, list[tuple[str, str]]] = {}

    def about(self, values: dict[str, Any]) -> str:
        heads, texts = self.heads["about"], self.texts
        row = ""
        for name, head in heads.items():
            value = values.get(name)
            if value is not None:
                row += f'{head}{texts[value] if value.__class__ is str else xml_value(value)}"/>'
        return row

    def of(self, group: Any, values: dict[str, Any]) -> str:
        heads, texts = self.heads.get(group, {}), self.texts
        row = ""
        for name, value in values.items():
            kind = value.__class__
            if kind is str:
                row += f'{heads[name]}{texts[value]}"/>'
            elif kind is int and -(10**15) < value < 10**15:
                row += f'{heads[name]}{value}"/>'
            elif value is not None:
                row += f'{heads[name]}{xml_value(value)}"/>'
        return row

    def identity(self, entity: Any) -> str:
        kind = entity.__class__
        fields = self.identities.get(kind)
        if fields is None:
            heads = self.heads.get("identity", {})
            fields = self.identities[kind] = [(name, heads[name]) for name in identity_fields(kind)]
        texts, row = self.texts, ""
        for name, head in fields:
            value = getattr(entity, name)
            row += f'{head}{texts[value] if value.__class__ is str else xml_value(value)}"/>'
        return row


def _colour(text: str) -> str:
    return f'<viz:color r="{int(text[1:3], 16)}" g="{int(text[3:5], 16)}" b="{int(text[5:7], 16)}"/>'


def _place(box: Box) -> str:
    """Position and size: a leaf's own; something that holds others is a dot on its header."""
    if box.role == "frame":
        size = min(box.header or FRAME_SIZE, FRAME_SIZE) * box.scale or FRAME_SIZE
        down = box.y + size / 2
    else:
        size = min(box.w, box.h)
        down = box.y + box.h / 2
    digits = 2 if box.scale > 0.2 else 6
    across, up = round(box.x + box.w / 2, digits), round(-down, digits)
    return f'<viz:position x="{across}" y="{up}" z="0"/><viz:size value="{round(size, digits)}"/>'


def _write_nodes(data: Elements, file: BinaryIO) -> None:
    cells, names, boxes, texts = _Cells(data.nodes), data.names, data.boxes, XmlValues()
    colours = {key: _colour(light) for key, (_, light, _) in (CATEGORIES | CHANGES).items()}
    usual: dict[tuple[type, str], str] = {}  # what all entities of a kind say about themselves
    file.write(f'<nodes count="{len(data.entities) + len(data.missing)}">\n'.encode())
    rows: list[str] = []
    for entity in data.entities:
        box = boxes.get(entity.id)
        kind, category = entity.__class__, category_of(entity, box)
        values = usual.get((kind, category))
        if values is None:
            values = usual[kind, category] = cells.about({"kind": entity.kind, "category": category})
        if entity.ns or entity.unknown or (box is not None and box.change):
            values += cells.about(seldom_of_node(entity, box))
        values += cells.identity(entity)
        if entity.attributes:
            values += cells.of("attributes", entity.attributes)
        if entity.metrics:
            values += cells.of("metrics", entity.metrics)
        change = box.change if box is not None and box.change in CHANGES else ""
        label = signed(box.label if box is not None else entity.label, change)
        rows.append(
            f'<node id="{escaped(names[entity.id])}" label="{texts[label[:LABEL_LIMIT]]}"><attvalues>{values}'
            f"</attvalues>{colours.get(change or category, '')}{_place(box) if box is not None else ''}</node>\n"
        )
        if len(rows) >= ROWS_AT_ONCE:
            file.write("".join(rows).encode())
            rows.clear()
    for name in data.missing:
        box = boxes.get(name)
        values = cells.about({"kind": data.kinds[name], "category": box.category if box else None, "missing": True})
        rows.append(
            f'<node id="{escaped(names[name])}" label="{xml(name, LABEL_LIMIT)}"><attvalues>{values}</attvalues>'
            f"{_place(box) if box else ''}</node>\n"
        )
    file.write("".join(rows).encode() + b"</nodes>\n")


def _write_edges(data: Elements, thickness: dict[tuple[str, str, str], float], file: BinaryIO) -> None:
    cells, names, kinds = _Cells(data.edges), {raw: escaped(name) for raw, name in data.names.items()}, data.kinds
    changes = data.link_changes
    usual: dict[tuple[type, str, str], tuple[str, str, str]] = {}  # what all edges of a kind between two kinds say
    widths: dict[float, str] = {}
    file.write(f'<edges count="{len(data.links)}">\n'.encode())
    rows: list[str] = []
    for number, edge in enumerate(data.links):
        source, target = edge.source, edge.target
        key = (edge.__class__, kinds[source], kinds[target])
        known = usual.get(key)
        if known is None:
            about = always_of_edge(edge, kinds)
            colour = _colour(MEDIA[about["medium"]][1])
            known = usual[key] = (xml(about["kind"]), cells.about(about), colour)
        label, values, colour = known
        if edge.unknown or changes:
            values += cells.about(seldom_of_edge(edge, changes))
        if changes and (change := changes.get(edge.id, "")) in CHANGES:
            label, colour = signed(label, change), _colour(CHANGES[change][1])
        if edge.attributes:
            values += cells.of("attributes", edge.attributes)
        if edge.metrics:
            values += cells.of("metrics", edge.metrics)
        wide = thickness.get((source, target, edge.kind))
        width = ""
        if wide is not None:
            width = widths.get(wide) or widths.setdefault(wide, f'<viz:thickness value="{round(wide, 2)}"/>')
        rows.append(
            f'<edge id="{number}" source="{names[source]}" target="{names[target]}" type="directed" '
            f'label="{label}"><attvalues>{values}</attvalues>{colour}{width}</edge>\n'
        )
        if len(rows) >= ROWS_AT_ONCE:
            file.write("".join(rows).encode())
            rows.clear()
    file.write("".join(rows).encode() + b"</edges>\n")
