"""Sizes and places: children in rows inside their box, boxes inside boxes, widths chosen so that the whole is neither a
ribbon nor a tower."""

from __future__ import annotations

import math

from gpuflight.vis.layout.cards import CHIP_KINDS
from gpuflight.vis.layout.item import Item, by_level
from gpuflight.vis.text import width

TITLE, TEXT = 12.0, 10.5  # font sizes
LINE = 15.0
CHIP_H, CARD_MIN_W, CARD_MAX_W, CHIP_MAX_W = 20.0, 132.0, 236.0, 200.0
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


def pack(root: Item) -> None:
    """Set size and relative place of everything under ``root``, children before parents."""
    for child in root.children:
        pack_inside(child)
    _pack_rows(root, sorted_children(root), _target_width(root.children, ROW_GAP), ROW_GAP * 2)


def _title_width(item: Item) -> float:
    return width(item.label, TITLE) * 1.1 + 38  # bold, after the glyph


def _size_leaf(item: Item) -> None:
    if item.role == "chip":
        least = width(item.label, TEXT) + 31
        item.w = 44.0 if least < 44.0 else least if least < CHIP_MAX_W else CHIP_MAX_W
        item.h = CHIP_H
        return
    widest = max((width(line, TEXT) for line in item.lines), default=0.0)
    item.w = min(CARD_MAX_W, max(CARD_MIN_W, _title_width(item), widest + 22))
    if item.bars:
        item.w = max(item.w, 176.0)
    item.header = 24 + LINE * len(item.lines) + LINE * len(item.bars)
    item.h = item.header + 6


def pack_inside(box: Item) -> None:
    """Set the size of ``box`` and of all in it, children before parents, and their places within it."""
    outer: list[Item] = []
    small: set[Item] = set()  # stands in a group, so any fair place will do
    for item in by_level(box):
        if not item.children:
            _size_leaf(item)
            continue
        outer.append(item)
        if item.folds or item in small:
            small.update([child for child in item.children if child.children])
    for item in reversed(outer):
        if item.folds:
            _size_group(item)
        else:
            _size_frame(item, item in small)


def _size_group(item: Item) -> None:
    area = sum([(child.w + CHIP_GAP) * (child.h + CHIP_GAP) for child in item.children])
    if is_chip(item):
        item.header = 0.0
        field_w, field_h = CHIP_FIELD_W, CHIP_H - 6
        text = min(280.0, width(item.label, TEXT) + 31)
        item.w, item.h = text + field_w + 6, CHIP_H
        left, top = text, 3.0
    else:
        grow = min(4.0 if item.score >= 1 else 1.25, max(0.8, math.sqrt(area / 300_000)))  # idle ones stay small
        field_w, field_h = FIELD_W * grow, FIELD_H * grow
        item.header = 24 + LINE * len(item.lines)
        item.w = max(field_w + 16, min(300.0, _title_width(item)))
        field_w = item.w - 16
        item.h = item.header + field_h + 8
        left, top = 8.0, item.header
    aim = math.sqrt(area * field_w / field_h)
    widest = max([child.w for child in item.children])
    content_w, content_h = _rows(item, item.children, max(aim, widest), CHIP_GAP, 0.0, 0.0)
    scale = min(field_w / content_w, field_h / content_h, 0.8)
    item.content_scale = scale
    for child in item.children:
        child.x = left + child.x * scale
        child.y = top + child.y * scale
    item.rows = []


def _size_frame(item: Item, small: bool) -> None:
    lines = LINE * (len(item.lines) + len(item.bars))
    item.role = "frame"
    item.header = 26 + lines
    least = min(320.0, _title_width(item) + 8)
    if item.lines:
        least = max(least, min(360.0, max([width(line, TEXT) for line in item.lines]) + 26))
    if item.bars:
        least = max(least, 176.0)
    if item.kind in _DEVICES:
        item.content_scale = DEVICE_SCALE
        for child in item.children:
            child.w *= DEVICE_SCALE
            child.h *= DEVICE_SCALE
    children = sorted_children(item)
    ratio, gap = _ratio(item), _gap(item)
    target = max(_target_width(item.children, gap, ratio), least - 2 * PAD)
    hardware = [child for child in item.children if child.kind == "Hardware"]
    if hardware and len(item.children) > 1:
        inner_w, inner_h = _pack_host(item, hardware[0], children, target)
    elif small:
        widest = max([child.w for child in item.children])
        inner_w, inner_h = _place_bands(item, children, max(target, widest), gap)
    else:
        inner_w, inner_h = _pack_rows(item, children, target, gap, ratio)
    item.w = max(least, inner_w + 2 * PAD)
    item.h = item.header + inner_h + PAD + min(28.0, 3.0 * max(0, item.child_links - 2))  # lanes under the last row
    if item.kind in _DEVICES:
        for child in item.children:  # ``place`` shrinks them
            child.w /= DEVICE_SCALE
            child.h /= DEVICE_SCALE
    if item.kind == "Hardware":
        _stretch(item)


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
    bands: list[list[Item]] = [[], [], [], []]
    for child in item.children:
        if is_chip(child) or child.kind == "Elsewhere":
            bands[0].append(child)
        elif child.kind == "Hardware" or _is_rail(child):
            bands[3].append(child)
        elif item.kind in ("Numa", "PciDevice"):  # ground itself: what work above is wired to stands on top
            bands[1 if _accelerates(child) else 2].append(child)
        else:
            bands[2 if child.ground else 1].append(child)
    return [band for band in bands if band]


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
    item.rows = []
    y = 0.0
    widest = 0.0
    for at, band in enumerate(bands):
        chips = is_chip(band[0])
        if at:
            y += gap if not chips else CHIP_GAP
        w, h = _rows(item, band, target, CHIP_GAP if chips else ROW_GAP * 0.8, y, CHIP_GAP if chips else gap)
        widest = max(widest, w)
        y += h
    left = PAD if item.parent is not None else 0.0
    top = item.header
    for band in bands:
        for child in band:
            child.x += left
            child.y += top
    item.rows = [(row_top + top, row_bottom + top) for row_top, row_bottom in item.rows]
    return widest, y


def _rows(item: Item, band: list[Item], target: float, gap_x: float, top: float, gap_y: float) -> tuple[float, float]:
    """Left to right, then the next row; low boxes share a column as long as they fit beside a high one."""
    x = y = row_h = widest = 0.0
    gap_y = gap_y or CHIP_GAP
    column: Item | None = None
    column_y = 0.0
    stacking = gap_x > CHIP_GAP
    limit = target + 0.01
    for child in band:
        w, h = child.w, child.h
        if stacking and column is not None and not child.ground and column_y + gap_x + h <= row_h and w <= column.w:
            child.x, child.y = column.x, top + y + column_y + gap_x
            column_y += gap_x + h
            continue
        if x and x + w > limit:
            item.rows.append((top + y, top + y + row_h))
            y += row_h + gap_y
            x = row_h = 0.0
        child.x, child.y = x, top + y
        column, column_y = child, h
        x += w + gap_x
        if h > row_h:
            row_h = h
        if x - gap_x > widest:
            widest = x - gap_x
    item.rows.append((top + y, top + y + row_h))
    return widest, y + row_h


def place(root: Item, margin: float) -> None:
    """Make every place absolute."""
    root.x = root.y = margin
    root.scale = 1.0
    place_inside(root)


def place_inside(root: Item) -> None:
    """Make the places of all that is in ``root`` absolute, whose own place and scale are."""
    for item in by_level(root):
        if not item.children:
            continue
        x, y, scale = item.x, item.y, item.scale
        inner = scale * item.content_scale
        if item.rows and scale != 1.0:
            item.rows = [(top * scale, bottom * scale) for top, bottom in item.rows]
        for child in item.children:
            child.x = x + child.x * scale
            child.y = y + child.y * scale
            child.scale = inner
            child.w *= inner
            child.h *= inner
            child.header *= inner
