"""Shared memory segments with all who use them: mappings and open descriptors, joined by device and inode."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable
from typing import NamedTuple

from msgspec import Struct, field

from gpuflight.sources.fs import FileSystem
from gpuflight.sources.maps import Mechanism, SharedMapping
from gpuflight.sources.procfs import FdIndex

SHM = "/dev/shm"  # noqa: S108 - looked at, never written

MAX_LISTED_FILES = 2048
"""Most files of /dev/shm looked at per round."""


class Use(Struct):
    """How one process uses a segment: ``mapped_bytes`` is 0 if it only holds descriptors of it."""

    mapped_bytes: int = 0
    descriptors: int = 0
    readable: bool = False
    writable: bool = False


class Segment(Struct):
    """One shared memory object. ``inode`` is the shmid for sysv; ``ipc_namespace`` is 0 but for sysv of another one.

    ``extent_bytes``: how far it was seen mapped, so its size is at least that. ``users``: by pid.
    """

    mechanism: Mechanism
    device: int
    inode: int
    ipc_namespace: int = 0
    name: str = ""
    deleted: bool = True
    extent_bytes: int = 0
    users: dict[int, Use] = field(default_factory=dict)
    ways: list[str] = field(default_factory=list)
    """Paths in /proc under which its status may be asked, best first."""


_OLD_TEMPORARY = re.compile(r"[A-Za-z0-9]{6}")

SegmentKey = tuple[str, int, int, int]
"""(mechanism, device, inode, IPC namespace)."""


class ShmFile(NamedTuple):
    """A file in our own /dev/shm."""

    name: str
    size_bytes: int
    uid: int


class ShmMount(NamedTuple):
    """Space of a /dev/shm; ``own`` if it is the one that gpuflight itself has."""

    device: int
    own: bool
    size_bytes: int
    free_bytes: int
    files: int


def join(
    mappings: dict[int, tuple[SharedMapping, ...]], index: FdIndex, ipc_namespace: Callable[[int], int]
) -> dict[SegmentKey, Segment]:
    """All segments by key; ``ipc_namespace`` of a pid may raise OSError (it ended meanwhile: left out)."""
    found: dict[SegmentKey, Segment] = {}
    for pid, mapped in mappings.items():
        for mapping in mapped:
            try:
                namespace = ipc_namespace(pid) if mapping.mechanism == "sysv" else 0
            except OSError:
                continue
            segment = _segment(found, mapping.mechanism, mapping.device, mapping.inode, namespace)
            _name(segment, mapping.name, mapping.deleted)
            segment.extent_bytes = max(segment.extent_bytes, mapping.extent_bytes)
            segment.ways.append(f"/proc/{pid}/map_files/{mapping.address_range}")
            if not mapping.deleted:
                segment.ways.insert(0, f"/proc/{pid}/root{mapping.name}")
            use = segment.users.setdefault(pid, Use())
            use.mapped_bytes += mapping.mapped_bytes
            use.readable |= mapping.readable
            use.writable |= mapping.writable
    for path, refs in index.paths.items():
        mechanism: Mechanism
        if path.startswith(SHM + "/"):
            mechanism = "posix"
        elif path.startswith("/memfd:"):
            mechanism = "memfd"
        else:
            continue
        name = path.removesuffix(" (deleted)")
        for ref in refs:
            inode = index.inodes.get(ref)
            if inode is None:
                continue
            segment = _segment(found, mechanism, *inode, 0)
            _name(segment, name, name != path)
            segment.ways.insert(0, f"/proc/{ref.pid}/fd/{ref.fd}")
            use = segment.users.setdefault(ref.pid, Use())
            use.descriptors += 1
            use.readable |= ref.readable
            use.writable |= ref.writable
    return found


def size_bytes(fs: FileSystem, segment: Segment) -> int | None:
    """Size of a segment by its file's status, through the first of three ways that answers; None if none does.

    What answers must be the same file: the name may meanwhile belong to another one.
    """
    for way in segment.ways[:3]:
        try:
            stat = fs.stat(way)
        except OSError:
            continue
        if (stat.device, stat.inode) == (segment.device, segment.inode):
            return stat.size
    return None


def list_files(fs: FileSystem) -> tuple[dict[tuple[int, int], ShmFile], int]:
    """The files of our /dev/shm by (device, inode), and how many there are beyond ``MAX_LISTED_FILES``."""
    try:
        names = sorted(fs.listdir(SHM))
    except OSError:
        return {}, 0
    files = {}
    for name in names[:MAX_LISTED_FILES]:
        try:
            stat = fs.lstat(f"{SHM}/{name}")
        except OSError:
            continue
        if stat.mode & 0o170000 == 0o100000:
            files[stat.device, stat.inode] = ShmFile(name, stat.size, stat.uid)
    return files, max(0, len(names) - MAX_LISTED_FILES)


def mount(fs: FileSystem, pid: int | None = None) -> ShmMount | None:
    """Space of /dev/shm, of the mount namespace of ``pid`` or our own; None if there is no such mount there.

    Raises OSError.
    """
    base = "" if pid is None else f"/proc/{pid}/root"
    device = fs.stat(f"{base}{SHM}").device
    if device == fs.stat(f"{base}/dev").device:
        return None  # an ordinary folder
    space = fs.statvfs(f"{base}{SHM}")
    try:
        own = device == fs.stat(SHM).device
    except OSError:
        own = False
    return ShmMount(device, own, space.size_bytes, space.free_bytes, max(0, space.files - space.files_free))


class SemaphoreState(NamedTuple):
    """Value of a POSIX semaphore and how many threads wait for it."""

    value: int
    waiting: int


def is_semaphore(segment: Segment) -> bool:
    """Whether a POSIX segment is a named semaphore of sem_open(3), unlinked ones too.

    The one that creates it has it mapped under the temporary name which the C library gave the file first:
    ``sem.XXXXXX`` today, six characters alone before glibc 2.34.
    """
    if segment.mechanism != "posix":
        return False
    name = segment.name.rpartition("/")[2]
    return name.startswith("sem.") or (
        segment.deleted and bool(_OLD_TEMPORARY.fullmatch(name)) and segment.extent_bytes <= 65536
    )


def semaphore_name(segment: Segment, files: dict[tuple[int, int], ShmFile]) -> str:
    """``/name`` as sem_open(3) takes it; empty if the semaphore has no name any more, or none that is visible here."""
    file = files.get((segment.device, segment.inode))
    name = file.name if file is not None else "" if segment.deleted else segment.name.rpartition("/")[2]
    return "/" + name.removeprefix("sem.") if name else ""


def semaphore_state(fs: FileSystem, segment: Segment) -> SemaphoreState | None:
    """State of a POSIX semaphore from its memory; None if that may not be read or is not laid out as known.

    ``sem_t`` of 64-bit glibc is ``{uint32 value; uint32 nwaiters; …}`` on little-endian machines (``struct new_sem``
    of sysdeps/nptl/internaltypes.h), 32 bytes; musl's begins with the same two.
    """
    for way in segment.ways[:3]:
        try:
            stat = fs.stat(way)
            if (stat.device, stat.inode, stat.size) != (segment.device, segment.inode, 32):
                continue
            raw = fs.read_record(way)
        except OSError:
            continue
        if len(raw) == 32:
            return SemaphoreState(*struct.unpack_from("<II", raw))
    return None


def shared(segments: Iterable[Segment]) -> list[Segment]:
    """Those that are a means of exchange: named ones always, others only between two processes or more.

    A file counts if at least one of its users may write it: all else is a library or a cache that everybody reads.
    """
    return [
        segment
        for segment in segments
        if segment.mechanism in ("posix", "sysv")
        or (
            len(segment.users) > 1
            and (segment.mechanism != "file" or any(use.writable for use in segment.users.values()))
        )
    ]


def _segment(
    found: dict[SegmentKey, Segment], mechanism: Mechanism, device: int, inode: int, namespace: int
) -> Segment:
    key = (mechanism, device, inode, namespace)
    segment = found.get(key)
    if segment is None:
        segment = found[key] = Segment(mechanism, device, inode, namespace)
    return segment


def _name(segment: Segment, name: str, deleted: bool) -> None:
    """A living name stands before a deleted one; among equals the first in order, so that it does not flap."""
    if not segment.name or (deleted, name) < (segment.deleted, segment.name):
        segment.name, segment.deleted = name, deleted
