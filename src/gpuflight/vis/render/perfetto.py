"""Sessions of a picture as a trace in Chrome's JSON format, for https://ui.perfetto.dev and chrome://tracing.

One session whose records are at hand is written in full (``gpuflight.events.export.trace``). Several sessions, and
those that only a graph tells of, are written as the timeline has them: what is too short to be seen is together there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, BinaryIO, ClassVar

from msgspec import field

from gpuflight.vis.base import Document, Renderer
from gpuflight.vis.model import LayoutGraph
from gpuflight.vis.text import clean
from gpuflight.vis.timeline import Timeline, of_entities
from gpuflight.vis.visual import SLICES


class PerfettoDocument(Document):
    """What is written: ``timelines``, from their store if there is one of one session."""

    timelines: list[Timeline] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class PerfettoRenderer(Renderer):
    """Sessions as a trace for ui.perfetto.dev and chrome://tracing: lanes, arrows, counters."""

    name = "perfetto"
    stability = "beta"
    suffix: ClassVar[str] = ".trace.json"

    def build(self, layout: LayoutGraph) -> PerfettoDocument:
        """See Renderer.build."""
        timelines = layout.timelines or of_entities(layout.entities)
        notes = [clean(note, 400) for note in layout.notes]
        if not timelines:
            notes.append("There is no session with a known time in this graph")
        return PerfettoDocument(title=clean(layout.title, 200), timelines=timelines, notes=notes)

    def write(self, document: PerfettoDocument, file: BinaryIO) -> None:
        """See Renderer.write. The file is ASCII."""
        from gpuflight.vis.sessions import records_of

        timelines = document.timelines
        reader = records_of(timelines[0]) if len(timelines) == 1 else None
        if reader is not None:
            from gpuflight.events.export.trace import chrome_trace

            for piece in chrome_trace(reader):
                file.write(piece)
            return
        base_ns = min((each.start_ns for each in timelines), default=0)
        head = {
            "displayTimeUnit": "ns",
            "baseTimeNanoseconds": base_ns,
            "otherData": {"title": document.title, "notes": document.notes, "writer": "gpuflight"},
        }
        file.write((_json(head)[:-1] + ', "traceEvents": [').encode())
        comma = "\n"
        for event in _events(timelines, base_ns):
            file.write((comma + _json(event)).encode())
            comma = ",\n"
        file.write(b"\n]}\n")


def _events(timelines: list[Timeline], base_ns: int) -> Iterator[dict[str, Any]]:
    """Each group of lanes as a process, each lane as a thread."""
    pids: dict[tuple[int, str], int] = {}
    thread = 0
    for number, timeline in enumerate(timelines):
        for lane in timeline.lanes:
            pid = pids.get((number, lane.group))
            if pid is None:
                pid = pids[number, lane.group] = len(pids) + 1
                name = f"{timeline.label} · {lane.group}" if timeline.label else lane.group
                yield _about("process_name", pid, 0, {"name": clean(name, 400)})
                yield _about("process_sort_index", pid, 0, {"sort_index": pid})
            thread += 1
            yield _about("thread_name", pid, thread, {"name": clean(lane.label, 400)})
            for each in lane.slices:
                args: dict[str, Any] = {"count": each.count, "busy_us": each.busy_ns / 1e3} if each.count > 1 else {}
                if each.open:
                    args["end"] = "not in the log"
                yield {
                    "ph": "X",
                    "name": clean(each.label, 400),
                    "cat": SLICES[each.kind][1],
                    "pid": pid,
                    "tid": thread,
                    "ts": (each.start_ns - base_ns) / 1e3,
                    "dur": max(each.end_ns - each.start_ns, 0) / 1e3,
                    "args": args,
                }


def _about(what: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _json(value: dict[str, Any]) -> str:
    """JSON that stays harmless where somebody pastes it into a page."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
