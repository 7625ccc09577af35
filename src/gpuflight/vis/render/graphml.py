"""GraphML 1.0 (http://graphml.graphdrawing.org), which networkx, igraph, yEd and Cytoscape read.

Every attribute and metric is a typed key; place, size and colour of a node's box are the keys ``x``, ``y`` (centre, y
downwards), ``width``, ``height`` and ``color``. All edges are directed, since readers refuse graphs that mix; the key
``directed`` says which have no direction. Written row by row.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, BinaryIO, ClassVar

from gpuflight.vis.base import Document, Renderer
from gpuflight.vis.model import Box, LayoutGraph
from gpuflight.vis.render.tables import Elements, Table, about_edge, about_node, elements, identity_fields
from gpuflight.vis.render.xml_text import escaped, xml, xml_value
from gpuflight.vis.text import clean
from gpuflight.vis.visual import CATEGORIES, CHANGES

ROWS_AT_ONCE = 512
LABEL_LIMIT = 200
_PICTURE = (
    ("label", "string"), ("x", "double"), ("y", "double"), ("width", "double"), ("height", "double"),
    ("color", "string"), ("parent", "string"),
)  # fmt: skip
_HEAD = """<?xml version="1.0" encoding="UTF-8"?>
<graphml xmlns="http://graphml.graphdrawing.org/xmlns" xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance" \
xsi:schemaLocation="http://graphml.graphdrawing.org/xmlns http://graphml.graphdrawing.org/xmlns/1.0/graphml.xsd">
"""


class GraphmlDocument(Document):
    """The graph before it is text: tables, elements, and the box around each box."""

    description: str
    data: Elements
    parents: dict[str, str]


class GraphmlRenderer(Renderer):
    """GraphML for networkx, igraph, yEd: every node and edge with its values, place and colour."""

    name = "graphml"
    suffix: ClassVar[str] = ".graphml"

    def build(self, layout: LayoutGraph) -> GraphmlDocument:
        """See Renderer.build."""
        data = elements(layout)
        parents = {
            child.id: box.id for box in data.boxes.values() for child in box.children if box.id in data.names
        }  # boxes of ours are no nodes, so what stands in one has no parent
        return GraphmlDocument(
            title=clean(layout.title, LABEL_LIMIT),
            description=". ".join(clean(text) for text in (layout.title, *layout.notes) if text),
            data=data,
            parents=parents,
        )

    def write(self, document: GraphmlDocument, file: BinaryIO) -> None:
        """See Renderer.write. UTF-8, one element of the graph a line."""
        data = document.data
        file.write(_HEAD.encode())
        file.write(_keys(data).encode())
        file.write(f'<graph id="G" edgedefault="directed">\n<desc>{escaped(document.description)}</desc>\n'.encode())
        rows: list[str] = []
        for row in chain(_nodes(document), _edges(data)):
            rows.append(row)
            if len(rows) >= ROWS_AT_ONCE:
                file.write("".join(rows).encode())
                rows.clear()
        file.write("".join(rows).encode() + b"</graph>\n</graphml>\n")


def _keys(data: Elements) -> str:
    rows = [
        f'<key id="p{number}" for="node" attr.name="{name}" attr.type="{kind}"/>\n'
        for number, (name, kind) in enumerate(_PICTURE)
    ]
    for short, owner, table in (("n", "node", data.nodes), ("e", "edge", data.edges)):
        rows += [
            f'<key id="{short}{number}" for="{owner}" attr.name="{_title(column.title)}" attr.type="{column.type}"/>\n'
            for number, column in enumerate(table.columns)
        ]
    return "".join(rows)


def _title(title: str) -> str:
    """Names of the picture's own keys are taken."""
    return xml(f"{title} (attribute)" if title.casefold() in {name for name, _ in _PICTURE} else title)


class _Cells:
    """The ``<data>`` elements of a row; the texts before the values are made once per column."""

    def __init__(self, table: Table, short: str) -> None:
        self.heads = {
            group: {name: f'<data key="{short}{number}">' for name, number in columns.items()}
            for group, columns in table.of.items()
        }

    def of(self, group: Any, values: dict[str, Any]) -> str:
        row = ""
        for name, head in self.heads[group].items() if group == "about" else ():
            text = xml_value(values.get(name))
            if text is not None:
                row += f"{head}{text}</data>"
        if group != "about" and values:
            heads = self.heads.get(group, {})
            for name, value in values.items():
                text = xml_value(value)
                if text is not None:
                    row += f"{heads[name]}{text}</data>"
        return row


def _nodes(document: GraphmlDocument) -> Iterator[str]:
    data, parents = document.data, document.parents
    cells, names = _Cells(data.nodes, "n"), data.names
    for entity in data.entities:
        box = data.boxes.get(entity.id)
        about = about_node(entity, box)
        identity = {name: getattr(entity, name) for name in identity_fields(entity.__class__)}
        yield (
            f'<node id="{escaped(names[entity.id])}">'
            + _picture(box, box.label if box is not None else entity.label, names.get(parents.get(entity.id, "")))
            + cells.of("about", about)
            + cells.of("identity", identity)
            + cells.of("attributes", entity.attributes)
            + cells.of("metrics", entity.metrics)
            + "</node>\n"
        )
    for name in data.missing:
        box = data.boxes.get(name)
        about = {"kind": data.kinds[name], "category": box.category if box is not None else None, "missing": True}
        yield f'<node id="{escaped(names[name])}">{_picture(box, name, None)}{cells.of("about", about)}</node>\n'


def _picture(box: Box | None, label: str, parent: str | None) -> str:
    values: list[Any] = [clean(label, LABEL_LIMIT)]
    if box is not None:
        digits = 2 if box.scale > 0.2 else 6
        values += [round(box.x + box.w / 2, digits), round(box.y + box.h / 2, digits), box.w, box.h]
        look = box.change if box.change in CHANGES else box.category
        values.append((CATEGORIES | CHANGES)[look][1] if look in CATEGORIES or look in CHANGES else None)
    else:
        values += [None] * 5
    values.append(parent)
    texts = [xml_value(value) for value in values]
    return "".join(f'<data key="p{number}">{text}</data>' for number, text in enumerate(texts) if text is not None)


def _edges(data: Elements) -> Iterator[str]:
    cells, names = _Cells(data.edges, "e"), {raw: escaped(name) for raw, name in data.names.items()}
    for number, edge in enumerate(data.links):
        yield (
            f'<edge id="{number}" source="{names[edge.source]}" target="{names[edge.target]}">'
            + cells.of("about", about_edge(edge, data))
            + cells.of("attributes", edge.attributes)
            + cells.of("metrics", edge.metrics)
            + "</edge>\n"
        )
