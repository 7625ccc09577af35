"""What of a session is to be sent, in which order, and whether it is all there."""

from __future__ import annotations

import os
import struct
from collections.abc import Collection, Iterator
from itertools import groupby

from msgspec import Struct, field

from gpuflight.agent.progress import Sent
from gpuflight.events.files.folder import SessionFolder
from gpuflight.events.files.names import Window
from gpuflight.events.files.sidecars import Sidecar
from gpuflight.events.tail.cursors import Cursor

SALVAGED = "~"
"""In keys of windows that were sent out of ``.tmp``: a salvage may publish them later, under any number."""


class Item(Struct):
    """A window to be sent. ``verbatim``: as the file it is. ``twin``: another file that may be the same window."""

    folder: str
    session_id: str
    key: str
    window: Window
    verbatim: bool
    sidecar: Sidecar | None = None
    twin: Window | None = None
    cursor: Cursor | None = None
    sent: Sent | None = None


class Plan(Struct):
    """``items``: by channel, in the order of writing. ``missing``: (channel, number) of holes. ``notes``: why not all
    of the session has arrived, nor will. ``unsent``: there is more that has to wait until the session is over."""

    items: dict[str, list[Item]] = field(default_factory=dict)
    missing: list[tuple[str, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    unsent: bool = False
    has_temporary: bool = False


def make_plan(
    folder: SessionFolder,
    known: dict[str, Sent],
    cursors: dict[str, Cursor],
    channels: Collection[str],
    *,
    over: bool,
    archives: bool = False,
) -> Plan:
    """``over``: nobody writes any more, so that what lies in ``.tmp`` is final. ``archives``: a window is done only
    once it is archived too."""
    plan = Plan()
    beside = folder.companions
    plan.has_temporary = any(w.temporary for windows in folder.windows.values() for w in windows)
    for channel in channels:
        cursor = cursors.get(channel)
        salvaged = {sent.crc32 for key, sent in known.items() if SALVAGED in key and key.startswith(channel)}
        items = plan.items.setdefault(channel, [])
        for item in _items(folder, channel, over=over):
            number = item.window.number
            sent = known.get(item.key)
            if sent is None and number is not None and not item.window.temporary and item.twin is None:
                # of a second file of a number this says nothing: its content does, when it is its turn
                before = cursor is not None and number < cursor.file_index
                sent = Sent("sent") if before or (channel, number) in beside.acknowledged else None
            item.sent = sent
            if sent is not None and sent.state == "dead":
                plan.notes.append(f"{item.key}: {sent.note}")
                continue
            if sent is not None and sent.state == "sent":
                if sent.note:
                    plan.notes.append(f"{item.key}: {sent.note}")
                if sent.archived or not archives:
                    continue
            elif salvaged and item.verbatim and _content_crc32(item.window.path) in salvaged:
                continue
            if cursor is not None and number == cursor.file_index and cursor.offset:
                item.cursor = cursor
            items.append(item)
        waits = {w.path for w in folder.windows.get(channel, ())} if not over else set()
        plan.unsent = plan.unsent or any(_waits(folder, w) for w in folder.windows.get(channel, ()) if w.path in waits)
        first = cursor.file_index if cursor is not None else 0
        plan.missing += [
            (channel, number)
            for number in folder.missing(channel)
            if number >= first and (channel, number) not in beside.acknowledged and not _known(known, channel, number)
        ]
    plan.losses = [f"{loss.channel}: {loss.reason}" for loss in beside.losses if not loss.channel.startswith("agent-")]
    return plan


def _items(folder: SessionFolder, channel: str, *, over: bool) -> Iterator[Item]:
    for number, group in groupby(folder.windows.get(channel, ()), key=lambda w: w.number):
        same = [w for w in group if not w.part and (over or not _waits(folder, w))]
        if number is not None and all(w.temporary for w in same):
            same.sort(key=lambda w: w.compressed)  # the plain file is whole, the other one perhaps half written
        if number is None and len(same) > 1:  # un-numbered ones are different windows: the finished one is older
            same.sort(key=lambda w: (w.temporary, not w.compressed))
        for position, window in enumerate(same):
            twin = same[0] if position and number is not None else None
            mark = SALVAGED if window.temporary else ""
            kind = "" if window.compressed or not (position or window.temporary) else ".log"
            key = f"{channel}{'' if number is None else f'.{number}'}{mark}{kind}"
            sidecar = None
            if number is not None and not window.temporary:
                sidecar = folder.companions.sidecars.get((channel, number))
                if sidecar is not None and sidecar.payload_file != window.name:
                    sidecar = None
            verbatim = window.compressed and not window.temporary and twin is None
            yield Item(folder.path, folder.session_id, key, window, verbatim, sidecar, twin)


def _waits(folder: SessionFolder, window: Window) -> bool:
    """Whether it may still change or move: what lies in ``.tmp``, the active file, and where numbers are shifted."""
    if window.temporary or window.part or folder.order == "newest_first":
        return True
    return window.number is None and not window.compressed


def _known(known: dict[str, Sent], channel: str, number: int) -> bool:
    return any(f"{channel}.{number}{rest}" in known for rest in ("", ".log", SALVAGED, f"{SALVAGED}.log"))


def _content_crc32(path: str) -> int:
    """What a gzip file of one member says of its content (RFC 1952 §2.3.1); -1 if it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(-8, os.SEEK_END)
            return int(struct.unpack("<I", file.read(4))[0])
    except (OSError, struct.error):
        return -1
