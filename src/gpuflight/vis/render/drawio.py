"""draw.io (diagrams.net): the picture as boxes in boxes and lines that a person can go on drawing with.

Each box and line has an id made of what it stands for, so the same thing has the same id in every export. When a file
is replaced by a new export, ``keep`` takes over what a person did to it: what was moved or resized stays so, what was
added stays, on whatever page. Where we put a cell is noted in it (``gpuflight_place``); a cell that is still there was
not moved, and goes where the new layout puts it.

All XML is made by one writer (``xml.etree``); labels are plain text (``html=0``), so nothing in a name is markup. The
values of an entity are its data in draw.io (Edit Data).
"""

from __future__ import annotations

import hashlib
import re
import xml.etree.ElementTree as ET
from typing import Any, BinaryIO, ClassVar

from msgspec.structs import replace

from gpuflight.vis.base import Document, Renderer
from gpuflight.vis.model import Box, LayoutGraph, Route
from gpuflight.vis.render.drawio_kept import Kept, read_kept
from gpuflight.vis.render.tables import boxes_by_id, value_text
from gpuflight.vis.text import clean
from gpuflight.vis.visual import CATEGORIES, CHANGES, MEDIA, REMOVED_DASH, key_of_changes, signed

LABEL_LIMIT = 200
VALUES_MAX = 64
PAGE = "gpuflight"
_NAME = re.compile(r"[^A-Za-z0-9_.-]")
_TAKEN = frozenset(("id", "label", "link", "placeholders", "placeholder", "tooltip", "tags", "style", "value"))
"""Names that mean something to draw.io on a cell with data."""


class Cell(Document):
    """A box: ``x`` and ``y`` are relative to the box around it, whose id is ``parent``."""

    id: str
    parent: str
    style: str
    place: tuple[float, float, float, float]
    values: list[tuple[str, str]]


class Line(Document):
    """A line between two cells; ``points`` are its corners, absolute."""

    id: str
    source: str
    target: str
    style: str
    points: list[tuple[float, float]]


class DrawioDocument(Document):
    """The page, and what is kept of an earlier file."""

    cells: list[Cell]
    lines: list[Line]
    width: float
    height: float
    kept: Kept | None = None


class DrawioRenderer(Renderer):
    """draw.io diagram: nested boxes and lines to go on editing; a new export keeps what was moved by hand."""

    name = "drawio"
    suffix: ClassVar[str] = ".drawio"

    def build(self, layout: LayoutGraph) -> DrawioDocument:
        """See Renderer.build."""
        ids = _ids(layout)
        return DrawioDocument(
            title=clean(layout.title, LABEL_LIMIT),
            cells=[*_cells(layout, ids), *_notes(layout)],
            lines=_lines(layout, ids),
            width=layout.width,
            height=layout.height,
        )

    def keep(self, document: DrawioDocument, previous: BinaryIO) -> DrawioDocument:
        """See Renderer.keep. Raises InputError for what is no draw.io file."""
        return replace(document, kept=read_kept(previous.read(), PAGE))

    def write(self, document: DrawioDocument, file: BinaryIO) -> None:
        """See Renderer.write. UTF-8, not compressed, so that it can be compared and searched."""
        kept = document.kept or Kept()
        page = ET.Element("diagram", {"id": PAGE, "name": document.title or PAGE})
        model = ET.SubElement(
            page, "mxGraphModel",
            {"grid": "0", "page": "0", "math": "0", "pageWidth": _number(document.width),
             "pageHeight": _number(document.height)},
        )  # fmt: skip
        root = ET.SubElement(model, "root")
        ET.SubElement(root, "mxCell", {"id": "0"})
        ET.SubElement(root, "mxCell", {"id": "1", "parent": "0"})
        ids = {"0", "1"}
        for cell in document.cells:
            _write_cell(root, cell, kept)
            ids.add(cell.id)
        for line in document.lines:
            _write_line(root, line, kept)
            ids.add(line.id)
        for element in kept.added(ids):
            root.append(element)
        whole = ET.Element("mxfile", {"host": "gpuflight", "compressed": "false"})
        for before in kept.pages_before:
            whole.append(before)
        whole.append(page)
        for after in kept.pages_after:
            whole.append(after)
        ET.indent(page, " ")
        file.write(b'<?xml version="1.0" encoding="UTF-8"?>\n')
        file.write(ET.tostring(whole, encoding="utf-8", xml_declaration=False))
        file.write(b"\n")


def stable_id(kind: str, *parts: str) -> str:
    """The id of what stands for these names, in every file; an id of any length would be one of draw.io's too."""
    digest = hashlib.blake2b(digest_size=9)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big") + data)
    return f"gf-{kind}-{digest.hexdigest()}"


def _ids(layout: LayoutGraph) -> dict[str, str]:
    return {box_id: stable_id("box", box_id) for box_id in boxes_by_id(layout.boxes)}


def _cells(layout: LayoutGraph, ids: dict[str, str]) -> list[Cell]:
    cells: list[Cell] = []
    stack: list[tuple[Box, Box | None]] = [(box, None) for box in reversed(layout.boxes)]
    while stack:
        box, around = stack.pop()
        left, top = (around.x, around.y) if around is not None else (0.0, 0.0)
        digits = 2 if box.scale > 0.2 else 5
        cells.append(
            Cell(
                title=_label(box),
                id=ids[box.id],
                parent=ids[around.id] if around is not None else "1",
                style=_style(box),
                place=(
                    round(box.x - left, digits), round(box.y - top, digits), round(box.w, digits), round(box.h, digits),
                ),
                values=_values(box),
            )
        )  # fmt: skip
        stack += [(child, box) for child in reversed(box.children)]
    return cells


def _notes(layout: LayoutGraph) -> list[Cell]:
    """What a reader must know that the boxes do not show, as a text under them."""
    changes = [box.change for box in boxes_by_id(layout.boxes).values()] + [route.change for route in layout.routes]
    notes = list(filter(None, [*layout.notes, key_of_changes(changes)]))
    if not notes:
        return []
    place = (0.0, round(layout.height + 12, 1), max(400.0, round(layout.width, 1)), 16.0 * len(notes) + 8)
    text = "\n".join(clean(note, 1000) for note in notes)
    style = "text;html=0;whiteSpace=wrap;align=left;verticalAlign=top;fontSize=11;"
    return [Cell(title=text, id="gf-notes", parent="1", style=style, place=place, values=[])]


def _label(box: Box) -> str:
    texts = [signed(box.label, box.change)]
    if not box.children or box.role != "frame":
        texts += box.lines
        texts += [f"{bar.label} {bar.text}" for bar in box.bars]
    return "\n".join(clean(text, LABEL_LIMIT) for text in texts if text)


def _style(box: Box) -> str:
    colour = CHANGES.get(box.change, CATEGORIES.get(box.category, CATEGORIES["group"]))[1]
    size = max(1, round(11 * box.scale))
    style = {
        "rounded": "1", "arcSize": "4", "absoluteArcSize": "0", "html": "0", "whiteSpace": "wrap", "overflow": "hidden",
        "strokeColor": colour, "fillColor": "default", "fontSize": str(size), "align": "left",
        "spacingLeft": str(max(1, round(6 * box.scale))), "verticalAlign": "top" if box.children else "middle",
    }  # fmt: skip
    if box.children:
        style |= {"container": "1", "collapsible": "0", "recursiveResize": "0", "fillColor": "none"}
        style["fontStyle"] = "1"
    if box.role == "group":
        style |= {"strokeWidth": "2"}
    if box.change in CHANGES:
        style |= {"strokeWidth": "3"}
    if box.synthetic or box.missing or box.change == "removed":
        style |= {"dashed": "1"}
    return "".join(f"{name}={value};" for name, value in style.items())


def _values(box: Box) -> list[tuple[str, str]]:
    """What the cell has as data: the id of the entity, its attributes, metrics, and what could not be read."""
    found: dict[str, str] = {}
    sources: list[tuple[str, Any]] = [("entity", box.id), ("kind", box.kind)]
    if box.ns:
        sources.append(("ns", box.ns))
    if box.rule:
        sources += [("folded", box.rule), ("count", box.count)]
    if box.change:
        sources.append(("change", box.change))
    sources += [*box.attributes.items(), *box.metrics.items()]
    sources += [(f"unknown_{name}", reason) for name, reason in box.unknown.items()]
    for name, value in sources[:VALUES_MAX]:
        text = value_text(value, 2000)
        if text is None:
            continue
        key = base = _data_name(str(name))
        number = 1
        while key in found:
            number += 1
            key = f"{base}_{number}"
        found[key] = text
    if len(sources) > VALUES_MAX:
        found["left_out"] = f"{len(sources) - VALUES_MAX} more values"
    return list(found.items())


def _data_name(name: str) -> str:
    """A name of data that XML and draw.io take."""
    name = _NAME.sub("_", name[:80])
    if not name or not (name[0].isalpha() or name[0] == "_") or name.casefold().startswith("xml"):
        name = f"_{name}"
    return f"{name}_" if name.casefold() in _TAKEN or name.startswith("gpuflight") else name


def _lines(layout: LayoutGraph, ids: dict[str, str]) -> list[Line]:
    lines: list[Line] = []
    for route in layout.routes:
        if route.source in ids and route.target in ids:
            lines.append(
                Line(
                    title=clean(signed(route.label, route.change), LABEL_LIMIT),
                    id=stable_id("line", route.source, route.target, route.medium),
                    source=ids[route.source],
                    target=ids[route.target],
                    style=_line_style(route),
                    points=[(round(x, 1), round(y, 1)) for x, y in route.points[1:-1]],
                )
            )
    return lines


def _line_style(route: Route) -> str:
    _, colour, _, dashes = MEDIA.get(route.medium, MEDIA["attribute"])
    style = {
        "html": "0", "rounded": "1", "strokeColor": CHANGES.get(route.change, ("", colour))[1], "fontSize": "9",
        "strokeWidth": f"{1 + 3 * route.weight:.1f}", "endArrow": "classic" if route.forward else "none",
        "startArrow": "classic" if route.backward else "none", "endFill": "1", "startFill": "1",
    }  # fmt: skip
    if dashes or route.change == "removed":
        style |= {"dashed": "1", "dashPattern": REMOVED_DASH if route.change == "removed" else dashes}
    return "".join(f"{name}={value};" for name, value in style.items())


def _write_cell(root: ET.Element, cell: Cell, kept: Kept) -> None:
    placed = " ".join(_number(part) for part in cell.place)
    data = {"id": cell.id, "label": cell.title, **dict(cell.values), "gpuflight_place": placed}
    element = ET.SubElement(root, "object", data)
    inner = ET.SubElement(element, "mxCell", {"style": cell.style, "vertex": "1", "parent": cell.parent})
    x, y, w, h = kept.places.get((cell.id, cell.parent), cell.place)
    geometry = {"x": _number(x), "y": _number(y), "width": _number(w), "height": _number(h), "as": "geometry"}
    ET.SubElement(inner, "mxGeometry", geometry)


def _write_line(root: ET.Element, line: Line, kept: Kept) -> None:
    placed = " ".join(f"{_number(x)},{_number(y)}" for x, y in line.points)
    element = ET.SubElement(root, "object", {"id": line.id, "label": line.title, "gpuflight_place": placed})
    inner = ET.SubElement(
        element, "mxCell",
        {"style": line.style, "edge": "1", "parent": "1", "source": line.source, "target": line.target},
    )  # fmt: skip
    if line.id in kept.ways:
        inner.append(kept.ways[line.id])
        return
    geometry = ET.SubElement(inner, "mxGeometry", {"relative": "1", "as": "geometry"})
    if line.points:
        corners = ET.SubElement(geometry, "Array", {"as": "points"})
        for x, y in line.points:
            ET.SubElement(corners, "mxPoint", {"x": _number(x), "y": _number(y)})


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
