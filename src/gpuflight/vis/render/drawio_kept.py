"""What a person did to a draw.io file of ours: cells that were moved, lines that were bent, what was added."""

from __future__ import annotations

import base64
import binascii
import math
import urllib.parse
import xml.etree.ElementTree as ET
import zlib
from collections.abc import Sequence

from msgspec import Struct, field

from gpuflight.errors import InputError

SIZE_MAX = 256 << 20
Place = tuple[float, float, float, float]


class Kept(Struct):
    """``places`` of moved or resized cells by (id, id of the box around it), so that one which now stands in another
    box goes where the layout puts it; ``ways``: the geometry of bent lines by id; ``others``: cells that are not ours,
    by id; ``pages_before`` and ``pages_after``: other pages of the file."""

    places: dict[tuple[str, str], Place] = field(default_factory=dict)
    ways: dict[str, ET.Element] = field(default_factory=dict)
    others: dict[str, ET.Element] = field(default_factory=dict)
    pages_before: list[ET.Element] = field(default_factory=list)
    pages_after: list[ET.Element] = field(default_factory=list)

    def added(self, ids: set[str]) -> list[ET.Element]:
        """What a person added, for a page with the cells ``ids``: what stood in a box that is gone, or was joined to
        one, stays without it."""
        known = ids | set(self.others)
        found = []
        for element in self.others.values():
            copy = ET.fromstring(ET.tostring(element))  # noqa: S314 - of our own making
            cell = _cell_of(copy)
            if cell.get("parent") not in known:
                cell.set("parent", "1")
            for end in ("source", "target"):
                if cell.get(end) is not None and cell.get(end) not in known:
                    del cell.attrib[end]
            found.append(copy)
        return found


def read_kept(data: bytes, page: str) -> Kept:
    """What to keep of an earlier file, whose page of ours has the id ``page``. Raises InputError."""
    whole = _parsed(data)
    if whole.tag != "mxfile":
        raise InputError("the file to be replaced is no draw.io file; name another one")
    kept = Kept()
    ours: ET.Element | None = None
    for diagram in whole.findall("diagram"):
        diagram.tail = "\n"
        if ours is None and diagram.get("id") == page:
            ours = diagram
        else:
            (kept.pages_before if ours is None else kept.pages_after).append(diagram)
    if ours is None:
        return kept
    for element in _root_of(ours):
        _keep(element, kept)
    return kept


def _parsed(data: bytes) -> ET.Element:
    if len(data) > SIZE_MAX or b"<!DOCTYPE" in data or b"<!ENTITY" in data:
        raise InputError("the file to be replaced is no draw.io file that can be read; name another one")
    try:
        return ET.fromstring(data)  # noqa: S314 - no entities, see above
    except (ET.ParseError, LookupError, ValueError) as error:  # the latter of odd encodings
        raise InputError(f"the file to be replaced is no draw.io file: {error}; name another one") from None


def _root_of(diagram: ET.Element) -> list[ET.Element]:
    model = diagram.find("mxGraphModel")
    if model is None and (diagram.text or "").strip():
        model = _inflated(diagram.text or "")
    root = model.find("root") if model is not None else None
    return list(root) if root is not None else []


def _inflated(text: str) -> ET.Element:
    """A page that draw.io stored compressed: deflated, in base64, after percent encoding."""
    try:
        unpacker = zlib.decompressobj(-15)
        plain = unpacker.decompress(base64.b64decode(text), SIZE_MAX)
        if unpacker.unconsumed_tail:
            raise InputError("the file to be replaced is too large; name another one")
        return _parsed(urllib.parse.unquote(plain.decode()).encode())
    except (binascii.Error, zlib.error, UnicodeError) as error:
        raise InputError(f"the file to be replaced is a damaged draw.io file: {error}; name another one") from None


def _keep(element: ET.Element, kept: Kept) -> None:
    name = element.get("id") or ""
    if name in ("", "0", "1"):
        return
    if not name.startswith("gf-"):
        element.tail = "\n"
        kept.others[name] = element
        return
    cell = _cell_of(element)
    geometry = cell.find("mxGeometry")
    if geometry is None:
        return
    placed = element.get("gpuflight_place", "")
    if cell.get("edge") == "1":
        points = geometry.findall("Array[@as='points']/mxPoint")
        corners = [(_float(point.get("x")), _float(point.get("y"))) for point in points]
        if not _same(corners, [_pair(part) for part in placed.split()]):
            geometry.tail = None
            kept.ways[name] = geometry
        return
    place = tuple(_float(geometry.get(side)) for side in ("x", "y", "width", "height"))
    before = tuple(_float(part) for part in placed.split())
    if len(before) == 4 and _same([place], [before]):
        return
    kept.places[name, cell.get("parent") or ""] = (place[0], place[1], place[2], place[3])


def _cell_of(element: ET.Element) -> ET.Element:
    """The cell itself: one with data is inside its ``object``."""
    found = element.find("mxCell")
    return found if found is not None else element


def _pair(text: str) -> tuple[float, float]:
    across, _, down = text.partition(",")
    return _float(across), _float(down)


def _float(text: str | None) -> float:
    try:
        value = float(text or 0)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0


def _same(first: Sequence[tuple[float, ...]], second: Sequence[tuple[float, ...]]) -> bool:
    """Whether places are the same; draw.io rounds what it saves."""
    flat = [[part for place in places for part in place] for places in (first, second)]
    return len(flat[0]) == len(flat[1]) and all(abs(a - b) < 0.51 for a, b in zip(*flat, strict=True))
