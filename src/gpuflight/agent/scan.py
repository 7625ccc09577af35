"""Which session folders there are, and which have changed. Only folders whose time of change moves are listed again."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence

from msgspec import Struct, field

from gpuflight.events.files.folder import SessionFolder, sessions_in
from gpuflight.events.tail.tree import DEPTH

_RACY_NS = 2_000_000_000
"""A folder that changed so shortly before it was listed may change again without its time moving."""


class _Folder(Struct):
    path: str
    depth: int
    stamps: tuple[int, int] = (-1, -1)
    settled: bool = False
    below: list[str] = field(default_factory=list)


class Scanner:
    """Folders that do not exist yet are looked for again by every scan."""

    def __init__(self, folders: Sequence[str]) -> None:
        self._known: dict[str, _Folder] = {}
        self._roots = list(dict.fromkeys(os.path.abspath(folder) for folder in folders))
        self.flat: set[str] = set()
        """Folders with files of more than one session in them (generations A and B)."""
        self.gone: set[str] = set()
        """Folders that the last scan did not find any more."""

    def scan(self) -> Iterator[SessionFolder]:
        """Sessions that are new, or whose folder has changed."""
        seen: set[str] = set()
        for root in self._roots:
            yield from self._scan(root, DEPTH, seen)
        self.gone = self._known.keys() - seen
        for path in self.gone:
            del self._known[path]

    def look(self, path: str) -> SessionFolder | None:
        """One session as it lies there now; None if it is gone."""
        try:
            names = sorted(os.listdir(path))
        except OSError:
            return None
        return next((found for found in sessions_in(path, names) if not found.base), None)

    def forget(self, path: str) -> None:
        """Have the next scan tell of a session again."""
        if path in self._known:
            self._known[path].stamps = (-1, -1)

    def _scan(self, path: str, depth: int, seen: set[str]) -> Iterator[SessionFolder]:
        try:
            stamps = _stamps(path)
        except OSError:
            return
        seen.add(path)
        folder = self._known.setdefault(path, _Folder(path, depth))
        if not folder.settled or stamps != folder.stamps:
            now_ns = time.time_ns()
            try:
                names = sorted(os.listdir(path))
            except OSError:
                return
            found = sessions_in(path, names)
            nested = [session for session in found if not session.base]
            if any(session.base for session in found):
                self.flat.add(path)
            else:
                self.flat.discard(path)
            changed = stamps != folder.stamps
            folder.settled = max(stamps) < now_ns - _RACY_NS
            folder.stamps = stamps
            folder.below = []
            if depth and not nested:
                below = (f"{path}/{name}" for name in names if not name.startswith("."))
                folder.below = [name for name in below if os.path.isdir(name)]
            if changed or not folder.settled:
                yield from nested
        for name in folder.below:
            yield from self._scan(name, depth - 1, seen)


def _stamps(path: str) -> tuple[int, int]:
    own = os.stat(path).st_mtime_ns
    try:
        return own, os.stat(f"{path}/.tmp").st_mtime_ns
    except OSError:
        return own, -1
