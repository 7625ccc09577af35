"""When what ran in a recorded session, as plain data: lanes of slices. ``sessions`` makes it, ``layout.timeline``
places it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from msgspec import Struct, field

from gpuflight.graph import Entity
from gpuflight.vis.text import finite

SliceKind = Literal["kernel", "copy", "fill", "scope", "range", "wait", "window", "session"]


class Slice(Struct, gc=False, omit_defaults=True):
    """Something that took time, from ``start_ns`` to ``end_ns`` (UNIX). ``count`` > 1: so many that were each too short
    to be seen, the longest of which gives the name; ``busy_ns`` is the time that they took together. ``open``: its end
    is not in the log."""

    start_ns: int
    end_ns: int
    label: str
    kind: SliceKind
    count: int = 1
    busy_ns: int = 0
    open: bool = False


class Lane(Struct, omit_defaults=True):
    """Slices in order of their starts. ``group`` is the box that it stands in ("GPU 0", "Host"), ``entity`` the id of
    the entity of the graph that it belongs to, empty if there is none."""

    group: str
    label: str
    slices: list[Slice]
    entity: str = ""


class Timeline(Struct, kw_only=True, omit_defaults=True):
    """The lanes of one session. ``session`` is the id of its entity. ``store``: folder of the event store that has
    all of it, for as long as the picture is open; empty if there is none. ``notes`` say what is not shown."""

    session: str
    session_id: str
    label: str
    start_ns: int
    end_ns: int
    lanes: list[Lane] = field(default_factory=list)
    store: str = ""
    notes: list[str] = field(default_factory=list)


def of_entities(entities: Iterable[Entity]) -> list[Timeline]:
    """One timeline with a bar for each session of a graph that tells when it began; none if no session does."""
    lanes: list[Lane] = []
    for entity in entities:
        if entity.kind != "Session":
            continue
        start, end = _ns(entity.attributes.get("started")), _ns(entity.attributes.get("ended"))
        last = end or _ns(entity.attributes.get("last_event"))
        if last is None and start is not None:
            last = start + int(1e9 * min(max(finite(entity.metrics, "duration_s") or 0.0, 0.0), 1e9))
        if start is None or last is None or last < start:
            continue
        group = str(entity.attributes.get("hostname") or entity.ns or "Sessions")[:200]
        label = str(entity.attributes.get("name") or entity.label)[:200]
        lanes.append(Lane(group, label, [Slice(start, last, label, "session", open=end is None)], entity.id))
    if not lanes:
        return []
    lanes.sort(key=lambda lane: (lane.group, lane.slices[0].start_ns, lane.entity))
    first = min(lane.slices[0].start_ns for lane in lanes)
    last_ns = max(lane.slices[0].end_ns for lane in lanes)
    return [Timeline(session="", session_id="", label="", start_ns=first, end_ns=last_ns, lanes=lanes)]


def _ns(value: Any) -> int | None:
    """A UNIX time as attributes have it: ns. Other types and impossible ones are unknown."""
    return value if type(value) is int and 0 < value < 2**62 else None
