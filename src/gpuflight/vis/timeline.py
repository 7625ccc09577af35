"""When what ran in a recorded session, as plain data: lanes of slices. ``sessions`` makes it, ``layout.timeline``
places it."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

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
