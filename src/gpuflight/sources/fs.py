"""Reading files: the boundary under procfs, sysfs and cgroups, and the place where a recording stands in.

``HostFs`` reads the real machine (or a fixture tree, with ``root``). It opens files with ``os.open``: a third of what
``open()`` costs, and /proc is read thousands of times a round. Every method raises the OSError of its system call.
"""

from __future__ import annotations

import os
from typing import NamedTuple, Protocol

_CHUNK_BYTES = 65_536


class Stat(NamedTuple):
    """What of ``os.stat_result`` the collectors use."""

    mode: int
    inode: int
    device: int
    rdev: int
    uid: int
    size: int


class StatVfs(NamedTuple):
    """What of ``os.statvfs_result`` the collectors use; sizes in bytes."""

    size_bytes: int
    free_bytes: int
    available_bytes: int
    files: int
    files_free: int


class FileSystem(Protocol):
    """What a source may ask of the file system. All paths are absolute."""

    def read(self, path: str) -> bytes:
        """The whole file."""

    def read_record(self, path: str) -> bytes:
        """A file that the kernel writes as one record (``stat``, ``status``, ``cgroup``, one sysfs value): one read."""

    def listdir(self, path: str) -> list[str]:
        """Names in a directory."""

    def readlink(self, path: str) -> str:
        """Target of a symbolic link."""

    def realpath(self, path: str) -> str:
        """The path with every link resolved, as seen under this file system's root."""

    def stat(self, path: str) -> Stat:
        """Status of a file, following links."""

    def lstat(self, path: str) -> Stat:
        """Status of a file, or of the link itself if it is one (of /proc/PID/fd/N: the access mode as mode bits)."""

    def statvfs(self, path: str) -> StatVfs:
        """Space of the file system that holds ``path``."""


class HostFs:
    """The machine's own files; with ``root`` a tree of fixtures laid out like them."""

    def __init__(self, root: str = "") -> None:
        self.root = root.rstrip("/")

    def read(self, path: str) -> bytes:
        descriptor = os.open(self.root + path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            parts = []
            # Only an empty read is the end: seq files of /proc stop short wherever the next record would not fit.
            while data := os.read(descriptor, _CHUNK_BYTES):
                parts.append(data)
            return parts[0] if len(parts) == 1 else b"".join(parts)
        finally:
            os.close(descriptor)

    def read_record(self, path: str) -> bytes:
        descriptor = os.open(self.root + path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(descriptor, _CHUNK_BYTES)
        finally:
            os.close(descriptor)

    def listdir(self, path: str) -> list[str]:
        return os.listdir(self.root + path)

    def readlink(self, path: str) -> str:
        return os.readlink(self.root + path)

    def realpath(self, path: str) -> str:
        resolved = os.path.realpath(self.root + path)
        return resolved[len(os.path.realpath(self.root)) :] if self.root else resolved

    def stat(self, path: str) -> Stat:
        result = os.stat(self.root + path)
        return Stat(result.st_mode, result.st_ino, result.st_dev, result.st_rdev, result.st_uid, result.st_size)

    def lstat(self, path: str) -> Stat:
        result = os.lstat(self.root + path)
        return Stat(result.st_mode, result.st_ino, result.st_dev, result.st_rdev, result.st_uid, result.st_size)

    def statvfs(self, path: str) -> StatVfs:
        result = os.statvfs(self.root + path)
        return StatVfs(
            result.f_blocks * result.f_frsize,
            result.f_bfree * result.f_frsize,
            result.f_bavail * result.f_frsize,
            result.f_files,
            result.f_ffree,
        )
