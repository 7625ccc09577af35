"""A disk on which only sessions are seen that something was written to lately, or whose writer lives.

Folders of traces are kept for ever; who looks at what runs now must not read last month's.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from gpuflight.events.files.names import parse_name
from gpuflight.events.files.sidecars import LOCK_NAME, owner
from gpuflight.events.tail.disk import Disk, Entry, Stamp

_VERDICT_HOLDS_S = 60.0
_LOOKED_AT_AGAIN = 32


class RecentDisk(Disk):
    """``within_s``: how long ago the last change may be. Sessions that are hidden come into sight when they change:
    ``look_again`` (once per round) looks at some of them in turn."""

    def __init__(
        self, within_s: float, wall_s: Callable[[], float], monotonic_s: Callable[[], float], alive: bool = True
    ) -> None:
        self._within_s = within_s
        self._wall_s = wall_s
        self._monotonic_s = monotonic_s
        self._alive = alive
        self._verdicts: dict[str, tuple[float, bool]] = {}
        self._hidden: dict[str, None] = {}
        self._closed: set[str] = set()
        self._turns: dict[str, int] = {}  # by folder: how often what is seen of it changed without its own time stamp

    @property
    def hidden_count(self) -> int:
        """Sessions, or flat logs, that are there and not seen."""
        return len(self._hidden)

    @property
    def closed_count(self) -> int:
        """Folders and files that may not be read."""
        return len(self._closed)

    def open(self, path: str) -> int:
        try:
            descriptor = super().open(path)
        except PermissionError:
            self._closed.add(path)
            raise
        self._closed.discard(path)
        return descriptor

    def entries(self, folder: str) -> list[Entry]:
        try:
            found = super().entries(folder)
        except PermissionError:
            self._closed.add(folder)
            raise
        except OSError:
            self._closed.discard(folder)
            raise
        self._closed.discard(folder)
        shown = []
        flat: dict[str, list[Entry]] = {}
        for entry in found:
            if entry.is_folder:
                if entry.name.startswith(".") or not self._is_hidden(f"{folder}/{entry.name}"):
                    shown.append(entry)
                continue
            window = parse_name(folder, entry.name)
            if window is not None and window.base:
                flat.setdefault(window.base, []).append(entry)
            else:
                shown.append(entry)
        for base, entries in flat.items():
            paths = [f"{folder}/{entry.name}" for entry in entries]
            if self._keep(f"{folder}/{base}.", self._changed_lately(paths)):
                shown += entries
        return shown

    def look(self, path: str) -> Stamp:
        stamp = super().look(path)
        turns = self._turns.get(path)
        return stamp if turns is None else stamp._replace(modified_ns=stamp.modified_ns + turns)

    def look_again(self) -> None:
        """At some of the hidden ones: whether they are still as they were."""
        for path in list(self._hidden)[:_LOOKED_AT_AGAIN]:
            del self._hidden[path]
            self._verdicts.pop(path, None)
            if not os.path.lexists(path) and not path.endswith("."):
                continue
            if path.endswith("."):
                folder, _, base = path.rpartition("/")
                hidden = not self._changed_lately(self._flat_files(folder, base))
            else:
                hidden = self._is_hidden(path)
            if hidden:
                self._hidden[path] = None  # at the end of the row
            else:
                folder = path.rpartition("/")[0]
                self._turns[folder] = self._turns.get(folder, 0) + 1

    # --- one session -------------------------------------------------------------------------------------------------

    def _is_hidden(self, path: str) -> bool:
        known = self._verdicts.get(path)
        now_s = self._monotonic_s()
        if known is not None and now_s - known[0] < _VERDICT_HOLDS_S:
            return known[1]
        hidden = not self._keep(path, self._is_recent(path))
        if len(self._verdicts) > 100_000:
            self._verdicts.clear()
        self._verdicts[path] = (now_s, hidden)
        return hidden

    def _keep(self, path: str, recent: bool) -> bool:
        if recent:
            self._hidden.pop(path, None)
        else:
            self._hidden[path] = None
        return recent

    def _is_recent(self, path: str) -> bool:
        """A folder with a session that goes on or ended just now, or without any: then what is below decides."""
        try:
            with os.scandir(path) as entries:
                names = [(entry.name, entry.is_dir()) for entry in entries]
        except OSError:
            return True  # the tailer says what is wrong with it
        logs = [name for name, is_folder in names if not is_folder and parse_name(path, name) is not None]
        temporary = (".tmp", True) in names
        if not logs and not temporary and (LOCK_NAME, False) not in names:
            return True
        # Whatever is renamed or made changes the time of the folder; what is only appended to is not numbered.
        growing = [f"{path}/{name}" for name in logs if name.count(".") == 1]
        folders = [path]
        if temporary:
            folders.append(f"{path}/.tmp")
            try:
                growing += [f"{path}/.tmp/{name}" for name in os.listdir(f"{path}/.tmp")]
            except OSError:
                pass
        if self._changed_lately([*folders, *growing]):
            return True
        return self._alive and (LOCK_NAME, False) in names and owner(path) == "alive"

    def _changed_lately(self, paths: list[str]) -> bool:
        since_s = self._wall_s() - self._within_s
        for path in paths:
            try:
                if os.stat(path).st_mtime >= since_s:
                    return True
            except OSError:
                continue
        return False

    def _flat_files(self, folder: str, base: str) -> list[str]:
        try:
            return [f"{folder}/{name}" for name in os.listdir(folder) if name.startswith(base)]
        except OSError:
            return []
