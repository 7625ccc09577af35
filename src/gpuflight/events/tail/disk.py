"""The file system as the tailer sees it: the one place where it opens, looks and lists."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

from gpuflight.events.files.inflate import chunks

_NETWORK = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "glusterfs", "gpfs", "beegfs", "beegfs_nodev"),
        *("9p", "virtiofs", "afs", "orangefs", "pvfs2", "davfs", "wekafs", "panfs", "vboxsf", "prl_fs"),
    }
)
"""File systems that others write to behind this kernel's back: no notification, and numbers of files that change."""


class Stamp(NamedTuple):
    """What the file system says of a file."""

    device: int
    inode: int
    size_bytes: int
    modified_ns: int


class Entry(NamedTuple):
    """A name in a folder."""

    name: str
    is_folder: bool


class Disk:
    """Raises OSError where the file system does. Tests put faults in by overriding methods."""

    def open(self, path: str) -> int:
        """A descriptor of a regular file. A pipe of that name does not block, it is refused."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(22, "is no regular file", path)
        return descriptor

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def read(self, descriptor: int, size: int, offset: int) -> bytes:
        return os.pread(descriptor, size, offset)

    def status(self, descriptor: int) -> Stamp:
        return _stamp(os.fstat(descriptor))

    def look(self, path: str) -> Stamp:
        return _stamp(os.stat(path))

    def entries(self, folder: str) -> list[Entry]:
        with os.scandir(folder) as found:
            return [Entry(entry.name, entry.is_dir()) for entry in found]

    def inflate(self, path: str) -> Iterator[bytes]:
        """Content of a compressed file, piece by piece; Damaged after the last one that could be had."""
        return chunks(path, True)

    def is_network(self, path: str) -> bool:
        """Whether a path lies on a network file system, by the mounts of this process."""
        path = os.path.realpath(path)
        best, kind = "", ""
        try:
            with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
                for line in lines:
                    fields = line.split(" ")
                    point = _unescape(fields[4])
                    if len(point) >= len(best) and (path == point or path.startswith(point.rstrip("/") + "/")):
                        best, kind = point, fields[fields.index("-") + 1]
        except (OSError, ValueError, IndexError):
            return False
        return kind in _NETWORK or (kind.startswith("fuse.") and kind != "fuse.overlayfs")


def _stamp(found: os.stat_result) -> Stamp:
    return Stamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def _unescape(point: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        point = point.replace(code, character)
    return point
