"""A session's folder: its windows in the order of writing, whatever the generation."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Literal

import msgspec

from gpuflight.events.files.names import CHANNELS, Window, parse_name
from gpuflight.events.files.order import newest_first
from gpuflight.events.files.sidecars import Companions, owner, read_companions

_DEPTH = 3
"""Levels below the folder that is given: date, run, session."""

_QUIET_S = 30
"""Without a lock, a session whose files have not changed for so long has no writer (what the format's agent takes)."""

Order = Literal["oldest_first", "newest_first"]


class SessionFolder(msgspec.Struct):
    """Files of one session; in flat folders (generations A, B) of all sessions behind one another in the same files.

    ``session_id``: of lines that name none, empty in flat folders. ``windows``: by channel, in the order of writing;
    several of one number stand beside each other, the most finished first.
    """

    path: str
    session_id: str
    base: str
    windows: dict[str, list[Window]]
    companions: Companions
    order: Order

    def live(self, now_s: float | None = None) -> bool:
        """Whether somebody still writes: the lock if there is one, else files changed a moment ago."""
        state = owner(self.path) if self.companions.has_lock else "unknown"
        if state != "unknown":
            return state == "alive"
        now = time.time() if now_s is None else now_s
        return any(now - _modified(w.path) < _QUIET_S for windows in self.windows.values() for w in windows[-1:])

    def missing(self, channel: str) -> list[int]:
        """Numbers of windows that once were and are not here (holes, and sidecars without their payload)."""
        if self.order == "newest_first":
            return []
        have = {w.number for w in self.windows.get(channel, ()) if w.number is not None}
        known = have | {n for c, n in self.companions.sidecars if c == channel}
        known |= {n for c, n in self.companions.acknowledged if c == channel}
        if not known:
            return []
        first = 0 if 0 in known else 1
        return [n for n in range(first, max(known)) if n not in have] + ([max(known)] if max(known) not in have else [])


def find_sessions(folder: str) -> list[SessionFolder]:
    """All sessions in a folder or below it, by path. A folder that cannot be read has none."""
    return list(_find(os.path.abspath(folder), _DEPTH))


def sessions_in(folder: str, names: list[str]) -> list[SessionFolder]:
    """The session whose folder this is, and the flat ones in it. ``names``: what lies there."""
    return list(_sessions_of(folder, names))


def _find(folder: str, depth: int) -> Iterator[SessionFolder]:
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return
    found = list(_sessions_of(folder, names))
    yield from found
    if depth and not any(not f.base for f in found):
        for name in names:
            if not name.startswith(".") and os.path.isdir(f"{folder}/{name}"):
                yield from _find(f"{folder}/{name}", depth - 1)


def _sessions_of(folder: str, names: list[str]) -> Iterator[SessionFolder]:
    """The session whose folder this is, and the flat ones by their base."""
    windows = [w for w in (parse_name(folder, name) for name in names) if w is not None]
    if ".tmp" in names:
        try:
            temporary = sorted(os.listdir(f"{folder}/.tmp"))
        except OSError:
            temporary = []
        parsed = (parse_name(f"{folder}/.tmp", name, temporary=True) for name in temporary)
        windows += [w for w in parsed if w is not None and not w.base]
    nested = [w for w in windows if not w.base]
    companions = read_companions(folder, names)
    if nested or companions.sidecars or companions.losses or companions.has_lock:
        yield _session(folder, folder.rsplit("/", 1)[-1], "", nested, companions)
    for base in sorted({w.base for w in windows if w.base}):
        yield _session(folder, "", base, [w for w in windows if w.base == base], Companions())


def _session(folder: str, session_id: str, base: str, windows: list[Window], companions: Companions) -> SessionFolder:
    by_channel = {c: [w for w in windows if w.channel == c] for c in CHANNELS}
    by_channel = {c: found for c, found in by_channel.items() if found}
    descending = newest_first(windows)
    for found in by_channel.values():
        found.sort(key=lambda w: _position(w, descending))
    return SessionFolder(
        folder, session_id, base, by_channel, companions, "newest_first" if descending else "oldest_first"
    )


def _position(window: Window, descending: bool) -> tuple[float, bool, bool, bool]:
    """Order of writing; of one number the most finished file first."""
    index = float("inf") if window.number is None else float(-window.number if descending else window.number)
    return (index, window.part, window.temporary, not window.compressed)


def _modified(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0
