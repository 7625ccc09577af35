"""Frames of a timeline: an axis of time, lanes of slices under each other, cards of what belongs to the session."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from gpuflight.events.export.lanes import Lanes
from gpuflight.graph import Graph
from gpuflight.graph.element import EMPTY
from gpuflight.vis.layout.cards import write_card
from gpuflight.vis.layout.item import Item
from gpuflight.vis.model import Box, LegendEntry
from gpuflight.vis.text import human
from gpuflight.vis.timeline import Lane, Slice, Timeline
from gpuflight.vis.visual import KIND_CATEGORY, KIND_NOUN, SLICES

MARGIN = 24.0
WIDTH = 1400.0
"""Of the time, in units of the picture."""
_LABELS = 170.0
_PAD = 12.0
_ROW = 18.0
_SLICE = 16.0
_SLICE_MIN = 1.4
_TICKS = 10
_ROWS_MAX = 12
"""Rows of one lane; what overlaps deeper is drawn in the last."""
_CARD = (264.0, 44.0)
_CHIP = (264.0, 20.0)


class Canvas:
    """Boxes made so far, what of the graph has one, and how many slices of each kind."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.boxes: list[Box] = []
        self.placed: set[str] = set()
        self.slices: Counter[str] = Counter()
        self._numbers = 0
        self._mark = "timeline"
        while any(node_id.startswith(self._mark) for node_id in graph.nodes):
            self._mark += "'"

    def fresh_id(self) -> str:
        """An id that no entity has."""
        self._numbers += 1
        return f"{self._mark}:{self._numbers}"

    def entity(self, entity_id: str, x: float, y: float, w: float, h: float) -> Box:
        """The box of an entity of the graph, written as everywhere."""
        entity = self.graph.nodes[entity_id]
        item = Item(entity_id, entity.kind, entity)
        write_card(item)
        self.placed.add(entity_id)
        return Box(
            id=entity_id, kind=entity.kind, label=item.label, category=KIND_CATEGORY.get(entity.kind, "bus"),
            role=item.role, x=x, y=y, w=w, h=h, lines=list(item.lines), bars=list(item.bars),
            attributes=entity.attributes or EMPTY, metrics=entity.metrics or EMPTY,
            unknown=entity.unknown or EMPTY, ns=entity.ns,
        )  # fmt: skip

    def ours(self, kind: str, label: str, category: str, x: float, y: float, w: float, h: float) -> Box:
        """A box that is no entity."""
        return Box(
            id=self.fresh_id(), kind=kind, label=label, category=category, role="chip", x=x, y=y, w=w, h=h,
            synthetic=True, count=0,
        )  # fmt: skip

    def legend(self, kind: str) -> LegendEntry:
        """An entry with nothing counted yet."""
        return LegendEntry(kind, KIND_NOUN.get(kind, kind), KIND_CATEGORY.get(kind, "bus"), 0)


def timeline_frame(canvas: Canvas, timeline: Timeline, span: tuple[int, int], inside: list[str], y: float) -> float:
    """Draw a timeline from ``y`` on; returns where it ends."""
    width = 4 * _PAD + _LABELS + WIDTH
    if timeline.session:
        frame = canvas.entity(timeline.session, MARGIN, y, width, 0)
        frame.label = timeline.label or frame.label
    else:
        frame = canvas.ours("Timeline", "Sessions", "session", MARGIN, y, width, 0)
    frame.role = "frame"
    frame.lines = [*frame.lines, _said(timeline, span)]
    frame.header = 26 + 15.0 * len(frame.lines)
    top = y + frame.header + 6
    left = MARGIN + 2 * _PAD + _LABELS
    ticks = _ticks(canvas, span, left, top)
    frame.children += ticks
    top += 24
    lanes: dict[str, list[Lane]] = {}
    for lane in timeline.lanes:
        lanes.setdefault(lane.group, []).append(lane)
    for group, members in lanes.items():
        box = canvas.ours(
            "Hardware" if group.startswith("GPU") else "Host", group, "gpu" if group.startswith("GPU") else "host",
            MARGIN + _PAD, top, width - 2 * _PAD, 0,
        )  # fmt: skip
        box.role, box.header = "frame", 24.0
        row = top + box.header + 2
        for lane in members:
            row = _lane(canvas, box, lane, span, left, row) + 4
        box.h = row + 6 - top
        box.count += len(box.children)
        frame.children.append(box)
        top = row + 16
    for tick in ticks:
        tick.attributes = {"to_y": top - 10}
    boxes = [canvas.entity(each, 0, 0, *_size(canvas.graph.nodes[each].kind)) for each in dict.fromkeys(inside)]
    if boxes:
        top = _grid(frame, boxes, MARGIN + _PAD, top, width - 2 * _PAD)
    frame.h = top + 4 - y
    canvas.boxes.append(frame)
    return top + 4


def cards(canvas: Canvas, label: str, names: Iterable[str], y: float) -> Box:
    """A frame with a chip for each name that an edge has and the graph has not."""
    width = 4 * _PAD + _LABELS + WIDTH
    frame = canvas.ours("Elsewhere", label, "group", MARGIN, y, width, 0)
    frame.role, frame.header = "frame", 26.0
    chips = []
    for name in names:
        kind = name.partition("(")[0] if "(" in name else "?"
        kind = kind if kind.isidentifier() else "?"
        chips.append(
            Box(
                id=name,
                kind=kind,
                label=name,
                category=KIND_CATEGORY.get(kind, "group"),
                role="chip",
                x=0,
                y=0,
                w=_CHIP[0],
                h=_CHIP[1],
                missing=True,
            )
        )
    frame.h = _grid(frame, chips, MARGIN + _PAD, y + frame.header, width - 2 * _PAD) + 4 - y
    return frame


def _size(kind: str) -> tuple[float, float]:
    return _CARD if kind == "Kernel" else _CHIP


def _grid(frame: Box, members: list[Box], x: float, y: float, width: float) -> float:
    """Place boxes in rows, kind by kind; returns where they end."""
    by_kind: dict[str, list[Box]] = {}
    for box in members:
        by_kind.setdefault(box.kind, []).append(box)
    for same in by_kind.values():
        across = max(1, int((width + 8) // (same[0].w + 8)))
        for at, box in enumerate(same):
            box.x, box.y = x + (at % across) * (box.w + 8), y + (at // across) * (box.h + 8)
        y = same[-1].y + same[-1].h + 12
        frame.children += same
    return y


def _lane(canvas: Canvas, frame: Box, lane: Lane, span: tuple[int, int], left: float, y: float) -> float:
    """The label of a lane and its slices, in as many rows as overlap; returns where it ends."""
    x = MARGIN + 2 * _PAD
    size = (_LABELS - _PAD, _ROW - 1)
    if lane.entity in canvas.graph.nodes and lane.entity not in canvas.placed:
        label = canvas.entity(lane.entity, x, y, *size)
        label.role = "chip"
        label.lines, label.bars = [], []
    else:
        label = canvas.ours("Timeline", lane.label, "session", x, y, *size)
    label.label = lane.label
    frame.children.append(label)
    rows = Lanes(nested=False)
    used = 0
    scale = WIDTH / max(span[1] - span[0], 1)
    for each in lane.slices:
        row = min(rows.place(each.start_ns, max(each.end_ns, each.start_ns + 1)), _ROWS_MAX - 1)
        used = max(used, row)
        first, last = (
            min(max(time, span[0]), span[1]) for time in (each.start_ns, each.end_ns)
        )  # as far as it is shown
        start = left + (first - span[0]) * scale
        width = max((last - first) * scale, _SLICE_MIN)
        canvas.slices[each.kind] += each.count
        frame.children.append(_slice(canvas, each, span[0], start, y + row * _ROW, width))
    return y + (used + 1) * _ROW


def _slice(canvas: Canvas, each: Slice, origin_ns: int, x: float, y: float, width: float) -> Box:
    kind, noun, category = SLICES[each.kind]
    label = each.label if each.count == 1 else f"{each.count} × {noun}: {each.label}"
    box = canvas.ours(kind, label, category, round(x, 2), y, round(width, 2), _SLICE)
    taken = each.end_ns - each.start_ns
    box.lines = [f"{_time(taken)} from {_time(each.start_ns - origin_ns)}"]
    box.metrics = {"duration_ms": taken / 1e6, "start_ms": (each.start_ns - origin_ns) / 1e6}
    if each.open:
        box.lines.append("its end is not in the log")
    if each.count > 1:
        box.rule = "too short to be seen one by one"
        box.metrics |= {"busy_ms": each.busy_ns / 1e6, "runs_count": each.count}
        box.lines.append(f"{_time(each.busy_ns)} busy; the name is that of the longest")
    return box


def _ticks(canvas: Canvas, span: tuple[int, int], left: float, y: float) -> list[Box]:
    """Round times along the axis, from the start on."""
    total = max(span[1] - span[0], 1)
    step = next(base * 10**power for power in range(19) for base in (1, 2, 5) if total / (base * 10**power) <= _TICKS)
    found = []
    for at in range(0, total + 1, step):
        tick = canvas.ours("Tick", _time(at) if at else "0", "group", left + at * WIDTH / total, y, 76.0, 16.0)
        if tick.x + 30 <= left + WIDTH or not at:
            found.append(tick)
    return found


def _said(timeline: Timeline, span: tuple[int, int]) -> str:
    words = [f"{_time(timeline.end_ns - timeline.start_ns)} long"]
    if timeline.start_ns > span[0]:
        words.append(f"{_time(timeline.start_ns - span[0])} after the first")
    return ", ".join(words)


def _time(ns: int) -> str:
    """A length of time, in the unit that it is read in."""
    for unit, size in (("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1000)):
        if ns >= size:
            return human(f"x_{unit}", ns / size)
    return f"{ns} ns"
