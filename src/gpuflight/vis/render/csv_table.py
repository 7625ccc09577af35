"""CSV for spreadsheets and data frames: one table in one file, a row per node and per edge.

The first column, ``element``, says ``node`` or ``edge``, so that a filter shows either; one file with one header opens
everywhere, which an archive, or two tables under each other, does not. It begins with a byte order mark, without which
Excel takes UTF-8 for something else.

Text that a spreadsheet would take for a formula (it begins with ``=``, ``+``, ``-``, ``@`` …) has an apostrophe before
it, as has text that begins with one: take one off to have the text back. Numbers are left as they are.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from typing import Any, BinaryIO, ClassVar

from gpuflight.vis.base import Document, Renderer
from gpuflight.vis.model import Box, LayoutGraph
from gpuflight.vis.render.tables import (
    Elements,
    Table,
    about_edge,
    about_node,
    elements,
    identity_fields,
    value_text,
)
from gpuflight.vis.text import clean

CELL_LIMIT = 7_500
"""A list in a cell may be four times as long; Excel cuts a cell at 32,767 characters."""

ROWS_AT_ONCE = 512
_FIRST = ("element", "id", "label", "source", "target")
_PLACE = ("x", "y", "width", "height")
_FORMULA = tuple("=+-@'\t\r\n|%")


class CsvDocument(Document):
    """The header and what the rows are made of."""

    header: list[str]
    data: Elements


class CsvRenderer(Renderer):
    """CSV: one table for spreadsheets, a row per node and edge, a column per attribute and metric."""

    name = "csv"
    suffix: ClassVar[str] = ".csv"

    def build(self, layout: LayoutGraph) -> CsvDocument:
        """See Renderer.build."""
        data = elements(layout)
        titles = dict.fromkeys(column.title for table in (data.nodes, data.edges) for column in table.columns)
        return CsvDocument(
            title=clean(layout.title, 200),
            header=[*_FIRST, *_PLACE, *(f"{title} (attribute)" if title in _PLACE else title for title in titles)],
            data=data,
        )

    def write(self, document: CsvDocument, file: BinaryIO) -> None:
        """See Renderer.write. UTF-8 with a byte order mark, lines end in CR LF (RFC 4180)."""
        file.write(b"\xef\xbb\xbf")
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow([_safe(title) for title in document.header])
        for number, row in enumerate(_rows(document), 1):
            writer.writerow(row)
            if number % ROWS_AT_ONCE == 0:
                file.write(text.getvalue().encode())
                text.seek(0)
                text.truncate()
        file.write(text.getvalue().encode())


def _rows(document: CsvDocument) -> Iterator[list[str]]:
    data, width = document.data, len(document.header)
    at = {title: number for number, title in enumerate(document.header)}
    node_at, edge_at = _places(data.nodes, at), _places(data.edges, at)
    for entity in data.entities:
        box = data.boxes.get(entity.id)
        row = _start(width, "node", data.names[entity.id], box.label if box is not None else entity.label, box)
        _fill(row, node_at["about"], about_node(entity, box))
        identity = {name: getattr(entity, name) for name in identity_fields(entity.__class__)}
        _fill(row, node_at["identity"], identity)
        _fill(row, node_at["attributes"], entity.attributes)
        _fill(row, node_at["metrics"], entity.metrics)
        yield row
    for name in data.missing:
        row = _start(width, "node", data.names[name], name, data.boxes.get(name))
        _fill(row, node_at["about"], {"kind": data.kinds[name], "missing": True})
        yield row
    for edge in data.links:
        row = _start(width, "edge", "", edge.kind, None)
        row[3], row[4] = _safe(data.names[edge.source]), _safe(data.names[edge.target])
        _fill(row, edge_at["about"], about_edge(edge, data))
        _fill(row, edge_at["attributes"], edge.attributes)
        _fill(row, edge_at["metrics"], edge.metrics)
        yield row


def _places(table: Table, at: dict[str, int]) -> dict[str, dict[str, int]]:
    """Where in a row each value of a group goes."""
    titles = [f"{column.title} (attribute)" if column.title in _PLACE else column.title for column in table.columns]
    found: dict[str, dict[str, int]] = {"about": {}, "identity": {}, "attributes": {}, "metrics": {}}
    for group, columns in table.of.items():
        found[group] = {key: at[titles[number]] for key, number in columns.items()}
    return found


def _start(width: int, element: str, name: str, label: str, box: Box | None) -> list[str]:
    row = [""] * width
    row[0], row[1], row[2] = element, _safe(name), _safe(clean(label, 200))
    if box is not None:
        for number, value in enumerate((box.x, box.y, box.w, box.h), len(_FIRST)):
            row[number] = repr(round(value, 3))
    return row


def _fill(row: list[str], at: dict[str, int], values: dict[str, Any]) -> None:
    for name, value in values.items():
        text = value_text(value, CELL_LIMIT)
        if text is not None and name in at:
            plain = value.__class__ in (int, bool) or (value.__class__ is float and math.isfinite(value))
            row[at[name]] = text if plain else _safe(text)


def _safe(text: str) -> str:
    """Text that no spreadsheet takes for a formula."""
    return f"'{text}" if text.startswith(_FORMULA) else text
