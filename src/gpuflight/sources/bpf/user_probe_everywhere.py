"""A user's uprobe in every file of a name that some process has in memory: each container brings its own libc."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from msgspec import Struct, field

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.bpf.base import Link, ProbeObject, Uprobe
from gpuflight.sources.bpf.user_probe_places import NoPlace, find_file, find_place
from gpuflight.sources.bpf.user_probe_spec import Attach, Place


class FileFound(Struct, frozen=True):
    """One file: by what it is known (``DEVICE:INODE``), how it is opened, and the offset of the place in it (bytes)."""

    key: str
    path: str
    offset: int


class Sweep(Struct):
    """One look through the memory of all processes. ``unreadable``: processes that may not be looked into;
    ``without``: files of the name that do not have the place."""

    files: list[FileFound] = field(default_factory=list)
    unreadable: int = 0
    without: int = 0


def sweep(place: Place) -> Sweep:
    """Every file of the name of ``place.file``, in whatever container, and the one of the system."""
    found = Sweep()
    seen: set[str] = set()
    for path in _paths(os.path.basename(place.file), found):
        try:
            known = os.stat(path)
        except OSError:
            continue  # replaced or gone: what maps it is nowhere to be opened
        key = f"{known.st_dev}:{known.st_ino}"
        if key in seen:
            continue
        seen.add(key)
        try:
            _, offset = find_place(Place(path, place.symbol, place.plus, place.offset))
        except NoPlace:
            found.without += 1
        else:
            found.files.append(FileFound(key, path, offset))
    return found


def _paths(name: str, found: Sweep) -> Iterator[str]:
    try:
        yield find_file(name)
    except NoPlace:
        pass  # only containers have it
    ending = b"/" + os.fsencode(name)
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/maps", "rb") as file:
                text = file.read()
        except PermissionError:
            found.unreadable += 1
            continue
        except OSError:
            continue  # it ended
        if ending in text:
            paths = {line.split(None, 5)[5] for line in text.splitlines() if line.endswith(ending)}
            for path in paths:
                yield f"/proc/{pid}/root{os.fsdecode(path)}"


class Everywhere:
    """One ``[[attach]]`` with ``everywhere``: attached where files come, detached where nobody has them any more."""

    def __init__(self, attach: Attach, look: Callable[[], Sweep]) -> None:
        """``look``: ``sweep``, or what a recording has of it."""
        self.attach = attach
        self._look = look
        self._links: dict[str, Link] = {}
        self.refused: dict[str, str] = {}  # path → why it cannot be attached there
        self.unreadable = 0
        self.without = 0

    @property
    def attached(self) -> int:
        """In how many files."""
        return len(self._links)

    def refresh(self, loaded: ProbeObject) -> None:
        """Look again, and attach or detach what has changed. Raises SourceUnavailable as ``look`` does."""
        found = self._look()
        self.unreadable, self.without = found.unreadable, found.without
        self.refused = {}
        for gone in self._links.keys() - {file.key for file in found.files}:
            self._links.pop(gone).close()
        for file in found.files:
            if file.key in self._links:
                continue
            returns = self.attach.target[0] == "uretprobe"
            uprobe = Uprobe(file.path, file.offset, self.attach.cookie, returns, self.attach.place.symbol)
            try:
                link = loaded.attach_uprobes(self.attach.program, [uprobe])
            except (OSError, SourceUnavailable) as error:
                self.refused[file.path] = str(error)
                continue
            if link.failed:
                self.refused[file.path] = link.failed[0][1]
            else:
                self._links[file.key] = link
