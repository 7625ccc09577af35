"""Which window of a session is the oldest: the generations disagree, and so do folders that a crash has left."""

from __future__ import annotations

import re

from gpuflight.events.files.inflate import chunks
from gpuflight.events.files.names import Window

_TIME = re.compile(rb'"(?:ts_ns|start_ns|base_time_ns)":(\d{10,19})')
_LOOK_BYTES = 1 << 16


def newest_first(windows: list[Window]) -> bool:
    """Whether higher numbers are older.

    Numbers from 0 (A) and files in ``.tmp`` (D, E) ascend; an un-numbered file beside them (B, C) means that they
    descend; without one, those of a session's own folder ascend (D, E). Flat files without one are told by the times
    inside of the lowest and the highest, and where those do not tell, compressed ones descend (B).
    """
    numbered = sorted({w.number for w in windows if w.number is not None})
    if not numbered or numbered[0] == 0 or any(w.temporary for w in windows):
        return False
    if any(w.number is None for w in windows):
        return True
    if not any(w.base for w in windows):
        return False
    for channel in sorted({w.channel for w in windows}):
        mine = sorted(
            (w for w in windows if w.channel == channel and w.number is not None), key=lambda w: w.number or 0
        )
        if len(mine) > 1:
            first, last = _time(mine[0]), _time(mine[-1])
            if first is not None and last is not None and first != last:
                return first > last
    return any(w.compressed for w in windows)


def _time(window: Window) -> int | None:
    """The first time in a window."""
    try:
        for chunk in chunks(window.path, window.compressed):
            match = _TIME.search(chunk[:_LOOK_BYTES])
            return int(match[1]) if match else None
    except (OSError, ValueError, EOFError):
        return None
    return None
