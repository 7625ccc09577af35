"""Sizes and places: children in rows inside their box, boxes inside boxes, widths chosen so that the whole is neither a
ribbon nor a tower."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from gpuflight.vis.layout.cards import CHIP_H, CHIP_KINDS, TEXT
from gpuflight.vis.layout.item import Item, boxes_in
from gpuflight.vis.text import width

TITLE = 12.0  # font size
LINE = 15.0
CARD_MIN_W, CARD_MAX_W = 132.0, 236.0
PAD, CHIP_GAP, ROW_GAP = 12.0, 6.0, 22.0
GOLDEN = 1.6  # width to height a box aims at
WIDE = 1.8  # the same of boxes that stand on a hardware band
GROUND_RATIO = 4.0  # the same of what stands on the hardware: side by side, so that lines go straight down
FIELD_W, FIELD_H = 132.0, 30.0  # where a group draws its members
DEVICE_SCALE = 0.8  # what is inside a device (its PCI function, its ports) is drawn smaller
CHIP_FIELD_W = 44.0  # the same of a group that is itself a chip
_DEVICES = frozenset(("GPU", "NPU", "Nic", "RdmaDevice", "Disk"))
_ENDPOINTS = CHIP_KINDS - {"CpuPackage", "RdmaPort", "Scope"}


def is_chip(item: Item) -> bool:
    """Drawn as one line: a small leaf, or a group of such."""
    if item.role == "group":
        return item.children[0].kind in _ENDPOINTS
    return item.role == "chip" and not item.children


def pack(boxes: Sequence[Item]) -> None:
    """Set size and relative place of everything in a root, which is the first of ``boxes``, all that hold others,
    parents first. Groups must be set."""
    root = boxes[0]
    _pack_boxes(boxes[:0:-1])
    for child in root.children:
        if not child.children and child.role != "chip":
            _size_leaf(child)
    _pack_rows(root, sorted_children(root), _target_width(root.children, ROW_GAP), ROW_GAP * 2)


def _title_width(item: Item) -> float:
    return width(item.label, TITLE) * 1.1 + 38  # bold, after the glyph


def _size_leaf(item: Item) -> None:
    widest = max([width(line, TEXT) for line in item.lines], default=0.0)
    item.w = min(CARD_MAX_W, max(CARD_MIN_W, _title_width(item), widest + 22))
    if item.bars:
        item.w = max(item.w, 176.0)
    item.header = 24 + LINE * len(item.lines) + LINE * len(item.bars)
    item.h = item.header + 6


def pack_inside(box: Item) -> None:
    """Set the size of ``box`` and of all in it, children before parents, and their places within it. Groups must be
    set."""
    if box.children:
        _pack_boxes(boxes_in(box)[::-1])
    elif box.role != "chip":
        _size_leaf(box)


def _pack_boxes(boxes: Iterable[Item]) -> None:
    """The same of boxes that hold others, children before parents."""
    alike: _Alike = {}
    for box in boxes:
        for item in box.children:
            if not item.children and item.role != "chip":  # a chip has its size since it was written
                _size_leaf(item)
        if box.folds:
            _size_group(box, alike)
        else:
            _size_frame(box, alike)


class _Content(NamedTuple):
    """How the children of a box stand in it: their places, the size of all, and the scale at which they are drawn."""

    places: list[tuple[float, float]]
    w: float
    h: float
    scale: float = 1.0


_Alike = dict[tuple[Any, ...], _Content]
"""Contents that were packed already, by all that matters to them. In a big picture most boxes are a process in a group,
with a few threads and sockets whose names are of one length: many are the same but for the words."""


def _put(children: list[Item], content: _Content) -> None:
    for child, place in zip(children, content.places, strict=True):
        child.x, child.y = place


def _size_group(item: Item, alike: _Alike) -> None:
    children = item.children
    if is_chip(item):
        text = min(280.0, width(item.label, TEXT) + 31)
        item.header = 0.0
        item.w, item.h = text + CHIP_FIELD_W + 6, CHIP_H
        key = (text, *[child.w for child in children], *[child.h for child in children])
        content = alike.get(key)
        if content is None:
            alike[key] = content = _drawn_small(children, _area(children), text, 3.0, CHIP_FIELD_W, CHIP_H - 6)
    else:
        area = _area(children)
        grow = min(4.0 if item.score >= 1 else 1.25, max(0.8, math.sqrt(area / 300_000)))  # idle ones stay small
        field_w, field_h = FIELD_W * grow, FIELD_H * grow
        item.header = 24 + LINE * len(item.lines)
        item.w = max(field_w + 16, min(300.0, _title_width(item)))
        item.h = item.header + field_h + 8
        content = _drawn_small(children, area, 8.0, item.header, item.w - 16, field_h)
    item.content_scale = content.scale
    _put(children, content)


def _area(children: list[Item]) -> float:
    return sum([(child.w + CHIP_GAP) * (child.h + CHIP_GAP) for child in children])


def _drawn_small(
    children: list[Item], area: float, left: float, top: float, field_w: float, field_h: float
) -> _Content:
    """The members of a group in a field whose corner is at ``left`` and ``top``: in rows, left to right."""
    limit = max([math.sqrt(area * field_w / field_h), *[child.w for child in children]]) + 0.01
    places: list[tuple[float, float]] = []
    x = y = row_h = widest = 0.0
    for child in children:
        w, h = child.w, child.h
        if x and x + w > limit:
            y += row_h + CHIP_GAP
            x = row_h = 0.0
        places.append((x, y))
        x += w + CHIP_GAP
        if h > row_h:
            row_h = h
        if x - CHIP_GAP > widest:
            widest = x - CHIP_GAP
    scale = min(field_w / widest, field_h / (y + row_h), 0.8)
    return _Content([(left + x * scale, top + y * scale) for x, y in places], field_w, field_h, scale)


def _size_frame(item: Item, alike: _Alike) -> None:
    item.role = "frame"
    item.header = 26 + LINE * (len(item.lines) + len(item.bars))
    least = min(320.0, _title_width(item) + 8)
    for line in item.lines:
        wide = width(line, TEXT) + 26
        if wide > least:
            least = wide if wide < 360.0 else 360.0
    if item.bars:
        least = max(least, 176.0)
    if item.group is not None and item.kind == "Process":
        inner_w, inner_h = _pack_small(item, least, alike)
    elif item.kind in _DEVICES:
        item.content_scale = DEVICE_SCALE
        for child in item.children:
            child.w *= DEVICE_SCALE
            child.h *= DEVICE_SCALE
        inner_w, inner_h = _pack_frame(item, least)
        for child in item.children:  # ``place`` shrinks them
            child.w /= DEVICE_SCALE
            child.h /= DEVICE_SCALE
    else:
        inner_w, inner_h = _pack_frame(item, least)
    item.w = max(least, inner_w + 2 * PAD)
    item.h = item.header + inner_h + PAD
    if item.child_links > 2:
        item.h += min(28.0, 3.0 * (item.child_links - 2))  # lanes under the last row
    if item.kind == "Hardware":
        _stretch(item)


def _pack_small(item: Item, least: float, alike: _Alike) -> tuple[float, float]:
    """The children of a process in a group, where no line ends and any fair place will do."""
    children = item.children
    key = (least, item.header, item.ground, *[(child.w, child.h, child.kind, child.ground) for child in children])
    content = alike.get(key)
    if content is None:
        w, h = _pack_frame(item, least)
        alike[key] = content = _Content([(child.x, child.y) for child in children], w, h)
    else:
        _put(children, content)
    return content.w, content.h


def _pack_frame(item: Item, least: float) -> tuple[float, float]:
    children, bands = item.children, sorted_children(item)
    ratio, gap = _ratio(item), _gap(item)
    target = max(_target_width(children, gap, ratio), least - 2 * PAD)
    hardware = [child for child in bands[-1] if child.kind == "Hardware"]
    if hardware and len(children) > 1:
        return _pack_host(item, hardware[0], bands, target)
    if item.group is not None:
        return _place_bands(item, bands, max([target, *[child.w for child in children]]), gap)
    return _pack_rows(item, bands, target, gap, ratio)


def _ratio(item: Item) -> float:
    if item.kind in _DEVICES:
        return 1.0
    if item.kind in ("Hardware", "PciDevice", "Numa"):
        return GROUND_RATIO
    if item.ground and item.kind != "Host":
        return GROUND_RATIO if any(child.ground for child in item.children) else 1.0
    return GOLDEN if item.kind == "Host" else WIDE


def _pack_host(item: Item, hardware: Item, bands: list[list[Item]], target: float) -> tuple[float, float]:
    """A host: its software above, its hardware band under it, both of about one width; the width that suits best."""
    gap = _gap(item)
    best = (math.inf, target, bands)
    for option in filter(None, (bands, _beside(bands))):
        for factor in (1.0, 0.75, 0.9, 1.15, 1.35, 1.6, 2.0):
            w, h = _host_at(item, hardware, option, target * factor, gap)
            ratio = w / h if h else 1.0
            cost = w * h * (1 + 0.6 * abs(math.log(ratio / GOLDEN))) * _rows_penalty(option)
            if cost < best[0] - 1e-6:
                best = (cost, target * factor, option)
    w, h = _host_at(item, hardware, best[2], best[1], gap)
    hardware.w = max(hardware.w, w)
    _stretch(hardware)
    return w, h


def _host_at(item: Item, hardware: Item, bands: list[list[Item]], target: float, gap: float) -> tuple[float, float]:
    target = max(target, max(child.w for band in bands for child in band if child is not hardware))
    inner_w, inner_h = _place_bands(hardware, sorted_children(hardware), target - 2 * PAD, _gap(hardware))
    hardware.w, hardware.h = inner_w + 2 * PAD, hardware.header + inner_h + PAD
    return _place_bands(item, bands, target, gap)


def _stretch(hardware: Item) -> None:
    """Switches between GPUs are a rail as wide as what hangs on it, so that links go straight down."""
    for child in hardware.children:
        if _is_rail(child):
            child.w = max(child.w, hardware.w - 2 * PAD)


def _is_rail(item: Item) -> bool:
    return item.kind == "NvSwitch" or (item.role == "group" and item.children[0].kind == "NvSwitch")


def sorted_children(item: Item) -> list[list[Item]]:
    """Children in bands from top to bottom: chips, then boxes, then what is wired to the ground, then the ground."""
    chips: list[Item] = []
    boxes: list[Item] = []
    wired: list[Item] = []
    ground: list[Item] = []
    is_ground = item.kind in ("Numa", "PciDevice")
    for child in item.children:
        if is_chip(child) or child.kind == "Elsewhere":
            chips.append(child)
        elif child.kind == "Hardware" or _is_rail(child):
            ground.append(child)
        elif is_ground:  # what work above is wired to stands on top
            (boxes if _accelerates(child) else wired).append(child)
        else:
            (wired if child.ground else boxes).append(child)
    return [band for band in (chips, boxes, wired, ground) if band]


def _accelerates(item: Item) -> bool:
    return item.kind in ("GPU", "NPU") or (item.kind == "PciDevice" and len(item.children) > 0)


def _beside(bands: list[list[Item]]) -> list[list[Item]] | None:
    """The bands with what is not wired to the ground to the right of what is, or None if there are not both."""
    for at in range(1, len(bands)):
        if bands[at][0].ground and not is_chip(bands[at - 1][0]) and bands[at - 1][0].kind != "Elsewhere":
            return [*bands[: at - 1], bands[at] + bands[at - 1], *bands[at + 1 :]]
    return None


def _gap(item: Item) -> float:
    """Distance between rows: room for the lines that run there."""
    if not item.child_links:
        return ROW_GAP
    return ROW_GAP + min(56.0, 2.5 * item.child_links / max(1.0, math.sqrt(len(item.children))))


def _target_width(children: list[Item], gap: float, ratio: float = GOLDEN) -> float:
    area = sum([(child.w + ROW_GAP) * (child.h + gap) for child in children])
    return math.sqrt(area * ratio)


def _pack_rows(
    item: Item, bands: list[list[Item]], target: float, gap: float, aim: float = GOLDEN
) -> tuple[float, float]:
    """Place the bands under each other at about ``target`` width; the best of a few widths when there are few."""
    if not bands:
        return 0.0, 0.0
    widest = max(child.w for band in bands for child in band)
    count = sum(map(len, bands))
    widths = [target * factor for factor in (1.0, 0.7, 0.85, 1.2, 1.5, 2.0)]
    if count > 80 or count == 1:
        return _place_bands(item, bands, max(target, widest), gap)
    best = (math.inf, target, bands)
    for option in filter(None, (bands, _beside(bands) if count < 200 else None)):
        for candidate in sorted({max(candidate, widest) for candidate in widths}):
            w, h = _place_bands(item, option, candidate, gap)
            ratio = w / h if h else 1.0
            cost = w * h * (1 + 0.7 * abs(math.log(ratio / aim))) * _rows_penalty(option)
            if cost < best[0] - 1e-6:
                best = (cost, candidate, option)
            if len(item.rows) == len(option):
                break  # nothing wraps: wider is the same
    return _place_bands(item, best[2], best[1], gap)


def _rows_penalty(bands: list[list[Item]]) -> float:
    """What is wired to the ground should stand in one row, nothing of it or of its neighbours under it."""
    penalty = 1.0
    for band in bands:
        if band[0].ground and not is_chip(band[0]):
            rows = len({item.y for item in band if item.ground})
            under = any(item.y > band[0].y + band[0].h for item in band if not item.ground)
            penalty *= 1 + 0.3 * (rows - 1) + (0.8 if under else 0.0)
    return penalty


def _place_bands(item: Item, bands: list[list[Item]], target: float, gap: float) -> tuple[float, float]:
    """Place the bands of a box under each other; gives the size of all. Places are relative to the box."""
    rows: list[tuple[float, float]] = []
    left, top = PAD if item.parent is not None else 0.0, item.header
    y = widest = 0.0
    for band in bands:
        gap_x, gap_y = (CHIP_GAP, CHIP_GAP) if is_chip(band[0]) else (ROW_GAP * 0.8, gap)
        if y:
            y += gap_y
        w, h = _rows(band, target, gap_x, gap_y, left, y, top, rows)
        if w > widest:
            widest = w
        y += h
    item.rows = rows
    return widest, y


def _rows(
    band: list[Item],
    target: float,
    gap_x: float,
    gap_y: float,
    left: float,
    above: float,
    top: float,
    rows: list[tuple[float, float]],
) -> tuple[float, float]:
    """Left to right, then the next row; low boxes share a column as long as they fit beside a high one. The rows go to
    ``rows``; gives the size of all. ``above`` is what the bands above take, ``top`` where the first of them begins."""
    if len(band) == 1:
        child = band[0]
        child.x, child.y = left, above + top
        rows.append((above + top, above + child.h + top))
        return child.w + gap_x - gap_x, child.h  # as a sum, so that a band of one is exactly as wide as in a longer one
    x = y = row_h = widest = 0.0
    column: Item | None = None
    column_x = column_y = 0.0
    stacking = gap_x > CHIP_GAP
    limit = target + 0.01
    for child in band:
        w, h = child.w, child.h
        if stacking and column is not None and not child.ground and column_y + gap_x + h <= row_h and w <= column.w:
            child.x, child.y = column_x + left, above + y + column_y + gap_x + top
            column_y += gap_x + h
            continue
        if x and x + w > limit:
            rows.append((above + y + top, above + y + row_h + top))
            y += row_h + gap_y
            x = row_h = 0.0
        child.x, child.y = x + left, above + y + top
        column, column_x, column_y = child, x, h
        x += w + gap_x
        if h > row_h:
            row_h = h
        if x - gap_x > widest:
            widest = x - gap_x
    rows.append((above + y + top, above + y + row_h + top))
    return widest, y + row_h
