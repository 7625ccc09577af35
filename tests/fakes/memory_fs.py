"""A file system in memory, with links that lead somewhere, in which every question is counted and any may fail."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from gpuflight.sources.fs import Stat, StatVfs

_DIRECTORY, _REGULAR, _LINK = 0o040000, 0o100000, 0o120000
_LINKS_AT_MOST = 40


def no_fault(what: str, path: str) -> bytes | None:
    """Nothing goes wrong."""
    return None


class MemoryFs:
    """A FileSystem of dictionaries.

    ``asked`` counts questions by (what, path): read, list, link, real, stat, lstat, statvfs. ``fault`` is called before
    each: what it raises is the answer, and so are bytes that it gives for a ``read``. ``share`` makes another view of
    the same files with its own count and faults.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.links: dict[str, str] = {}
        self.directories: dict[str, dict[str, None]] = {"/": {}}
        self.modes: dict[str, int] = {}  # of /proc/PID/fd links: which ends they are
        self.stats: dict[str, Stat] = {}  # of what links lead to that is no file here
        self.spaces: dict[str, StatVfs] = {}
        self.asked: Counter[tuple[str, str]] = Counter()
        self.fault: Callable[[str, str], bytes | None] = no_fault
        self._resolved: dict[str, str] = {}

    def share(self) -> MemoryFs:
        """The same files, asked by somebody else."""
        other = MemoryFs()
        for name in ("files", "links", "directories", "modes", "stats", "spaces", "_resolved"):
            setattr(other, name, getattr(self, name))
        return other

    def copy(self) -> MemoryFs:
        """Files of its own, equal to these."""
        other = MemoryFs()
        for name in ("files", "links", "modes", "stats", "spaces"):
            setattr(other, name, dict(getattr(self, name)))
        other.directories = {path: dict(names) for path, names in self.directories.items()}
        return other

    # --- making it -------------------------------------------------------------------------------------------------

    def write(self, path: str, content: str | bytes) -> None:
        self._enter(path)
        self.files[path] = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content

    def link(self, path: str, target: str, mode: int = 0o777) -> None:
        """A link; a ``target`` with a colon in its first part (``socket:[1]``) leads nowhere."""
        self._enter(path)
        self.links[path] = target
        self.modes[path] = mode

    def directory(self, path: str) -> None:
        self._enter(path)
        self.directories.setdefault(path, {})

    def remove(self, path: str) -> None:
        """A file, a link, or a directory with all that is in it."""
        for name in list(self.directories.get(path, ())):
            self.remove(f"{path}/{name}")
        for kept in (self.files, self.links, self.modes, self.directories, self.stats):
            kept.pop(path, None)
        parent, _, name = path.rpartition("/")
        self.directories.get(parent or "/", {}).pop(name, None)
        self._resolved.clear()

    def load(self, root: Path) -> None:
        """Everything that is in a folder of the test machine."""
        for folder, names, files in os.walk(root):
            base = folder[len(str(root)) :]
            for name in (*names, *files):
                place = Path(folder, name)
                if place.is_symlink():
                    self.link(f"{base}/{name}", os.readlink(place))
                elif place.is_dir():
                    self.directory(f"{base}/{name}")
                else:
                    self.write(f"{base}/{name}", place.read_bytes())

    def _enter(self, path: str) -> None:
        self._resolved.clear()
        while path != "/":
            parent, _, name = path.rpartition("/")
            parent = parent or "/"
            known = self.directories.setdefault(parent, {})
            if name in known:
                return
            known[name] = None
            path = parent

    # --- asking it -------------------------------------------------------------------------------------------------

    def read(self, path: str) -> bytes:
        instead = self._ask("read", path)
        if instead is not None:
            return instead
        place = self._resolve(path)
        if place in self.directories:
            raise _error(errno.EISDIR, path)
        if place not in self.files:
            raise _error(errno.ENOENT, path)
        return self.files[place]

    read_record = read

    def listdir(self, path: str) -> list[str]:
        self._ask("list", path)
        place = self._resolve(path)
        if place not in self.directories:
            raise _error(errno.ENOTDIR if place in self.files else errno.ENOENT, path)
        return list(self.directories[place])

    def readlink(self, path: str) -> str:
        self._ask("link", path)
        place = self._parent_resolved(path)
        if place not in self.links:
            raise _error(errno.EINVAL if place in self.files else errno.ENOENT, path)
        return self.links[place]

    def realpath(self, path: str) -> str:
        self._ask("real", path)
        return self._resolve(path)

    def stat(self, path: str) -> Stat:
        self._ask("stat", path)
        return self._status(path, self._resolve(path))

    def lstat(self, path: str) -> Stat:
        self._ask("lstat", path)
        place = self._parent_resolved(path)
        if place in self.links:
            return Stat(_LINK | self.modes[place], 1, 1, 0, 0, 64)
        return self._status(path, place)

    def statvfs(self, path: str) -> StatVfs:
        self._ask("statvfs", path)
        if path not in self.spaces:
            raise _error(errno.ENOENT, path)
        return self.spaces[path]

    def count(self, what: str, beginning: str = "", ending: str = "") -> int:
        """How often something was asked of the paths that begin and end like that."""
        return sum(
            times
            for (asked, path), times in self.asked.items()
            if asked == what and path.startswith(beginning) and path.endswith(ending)
        )

    def _ask(self, what: str, path: str) -> bytes | None:
        self.asked[what, path] += 1
        return self.fault(what, path)

    def _status(self, path: str, place: str) -> Stat:
        if place in self.stats:
            return self.stats[place]
        if place in self.directories:
            return Stat(_DIRECTORY | 0o755, hash(place) & 0xFFFF, 1, 0, 0, len(self.directories[place]))
        if place in self.files:
            return Stat(_REGULAR | 0o644, hash(place) & 0xFFFF, 1, 0, 0, len(self.files[place]))
        raise _error(errno.ENOENT, path)

    def _parent_resolved(self, path: str) -> str:
        parent, _, name = path.rpartition("/")
        return f"{self._resolve(parent or '/').rstrip('/')}/{name}"

    def _resolve(self, path: str) -> str:
        place = self._resolved.get(path)
        if place is None:
            place = self._resolved[path] = self._walk(path, _LINKS_AT_MOST)
        return place

    def _walk(self, path: str, links_left: int) -> str:
        place = ""
        parts = path.strip("/").split("/")
        for index, part in enumerate(parts):
            if part == "..":
                place = place.rpartition("/")[0]
                continue
            if part in (".", ""):
                continue
            place = f"{place}/{part}"
            target = self.links.get(place)
            if target is None or ":[" in target or place in self.stats:
                continue
            if not links_left:
                raise _error(errno.ELOOP, path)
            base = "" if target.startswith("/") else place.rpartition("/")[0] + "/"
            rest = "/".join(parts[index + 1 :])
            return self._walk(f"{base}{target}/{rest}", links_left - 1)
        return place or "/"


def _error(code: int, path: str) -> OSError:
    return OSError(code, os.strerror(code), path)
