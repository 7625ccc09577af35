"""Folders with logs: which there are, and which have changed. Only folders whose time stamps move are listed again."""

from __future__ import annotations

import os

import msgspec

from gpuflight.events.files import names
from gpuflight.events.files.order import newest_first
from gpuflight.events.files.sidecars import LOCK_NAME
from gpuflight.events.tail.disk import Disk
from gpuflight.events.tail.window import Found

DEPTH = 3
"""Levels below a folder that is followed: date, run, session."""

_RACY_NS = 2_000_000_000
"""A folder changed so shortly before it was listed may change again without its time stamp moving."""


class Folder(msgspec.Struct, eq=False):
    """A folder. ``depth``: levels that may follow below it. ``stamps``: its own and its ``.tmp``'s time of change."""

    path: str
    depth: int
    trusted: bool
    stamps: tuple[int, int] = (-1, -1)
    has_temporary: bool = False
    settled: bool = False
    below: set[str] = msgspec.field(default_factory=set)
    descending: dict[str, bool] = msgspec.field(default_factory=dict)
    """Order of the windows by base, once it is certain."""
    due_s: float = 0.0
    changed_s: float = 0.0


class Listing(msgspec.Struct):
    """A folder's log files by (base, channel), the order of each base, and the folders below that may hold sessions."""

    files: dict[tuple[str, str], list[Found]]
    descending: dict[str, bool]
    below: set[str]


def has_changed(disk: Disk, folder: Folder) -> bool:
    """Whether it has to be listed. Raises OSError if it is gone or cannot be looked at."""
    return not folder.settled or _stamps(disk, folder) != folder.stamps


def list_folder(disk: Disk, folder: Folder, wall_ns: int) -> Listing:
    """Look into a folder and its ``.tmp``. Raises OSError.

    ``.tmp`` comes first: what is moved out of it meanwhile is seen twice rather than not at all.
    """
    folder.has_temporary = True
    stamps = _stamps(disk, folder)
    windows: list[names.Window] = []
    temporary = f"{folder.path}/.tmp"
    try:
        entries = disk.entries(temporary)
    except OSError:
        folder.has_temporary = False
        stamps = (stamps[0], 0)
        entries = []
    parsed = (names.parse_name(temporary, entry.name, temporary=True) for entry in entries)
    windows += [w for w in parsed if w is not None and not w.base]
    below = set()
    nested = bool(windows)
    for entry in disk.entries(folder.path):
        if entry.is_folder:
            if not entry.name.startswith("."):
                below.add(f"{folder.path}/{entry.name}")
            elif entry.name == ".tmp" and not folder.has_temporary:
                stamps = (-1, -1)  # it came meanwhile
            continue
        window = names.parse_name(folder.path, entry.name)
        if window is not None:
            windows.append(window)
            nested = nested or not window.base
        elif entry.name == LOCK_NAME or entry.name.startswith((".gpufl-window.", ".gpufl-transport-loss.")):
            nested = True
    files: dict[tuple[str, str], list[Found]] = {}
    for window in windows:
        try:
            files.setdefault((window.base, window.channel), []).append(Found(window, disk.look(window.path)))
        except OSError:
            stamps = (-1, -1)  # gone, or away for a moment: look again
    folder.stamps = stamps
    folder.settled = max(stamps) < wall_ns - _RACY_NS and min(stamps[0], 0) == 0
    descending = {base: _order(folder, base, windows) for base in {w.base for w in windows}}
    return Listing(files, descending, below if folder.depth and not nested else set())


def _stamps(disk: Disk, folder: Folder) -> tuple[int, int]:
    own = disk.look(folder.path).modified_ns
    if not folder.has_temporary:
        return (own, 0)
    try:
        return (own, disk.look(f"{folder.path}/.tmp").modified_ns)
    except OSError:
        return (own, -1)


def _order(folder: Folder, base: str, windows: list[names.Window]) -> bool:
    """Whether higher numbers are older. What ``.tmp`` or an un-numbered file says once holds for good."""
    certain = folder.descending.get(base)
    if certain is not None:
        return certain
    mine = [window for window in windows if window.base == base]
    found = newest_first(mine)
    numbered = any(window.number is not None for window in mine)
    if any(window.temporary for window in mine):
        folder.descending[base] = False
    elif numbered and any(window.number is None for window in mine):
        folder.descending[base] = found
    return found


def path_of(path: str) -> str:
    """A folder's path as everything here names it."""
    return os.path.abspath(path)
