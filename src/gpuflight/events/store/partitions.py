"""Where a session's records lie under the root of a fleet's store, and locks that hold on every host that shares it.

Paths are Hive partitions, ``date=2026-11-30/host=gpu-7/session=…/type=kernel``, as Spark, Trino, Polars and DuckDB
read them: values are percent-encoded wherever a character could mean something.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from hashlib import blake2b
from zlib import crc32

from gpuflight.errors import InputError

_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
_LONGEST = 200
"""Bytes of a name; file systems take 255 in all."""

NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
"""What Hive calls a partition whose value is not known; its readers give NULL for it."""

BUCKETS = 4096
UPKEEP = 0
"""The byte of the lock file that is locked by who tidies up; the others are for sessions and sources."""

MERGING = BUCKETS
"""The byte that is locked by who puts small files together."""


def escaped(value: str | None) -> str:
    """A value as part of a path. Two values are never the same; a very long one is cut and ends in a hash."""
    if not value:
        return NO_VALUE
    raw = value.encode("utf-8", "surrogatepass")
    text = "".join(chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in raw)
    if len(text) <= _LONGEST:
        return text
    head = text[: _LONGEST - 40]
    head = head[: head.rfind("%")] if "%" in head[-2:] else head  # not in the middle of an escape
    return f"{head}~{blake2b(raw, digest_size=16).hexdigest()}"


def date_of(*times_ns: int | None) -> str:
    """The UTC day of the first of these times that is known and can be one."""
    for time_ns in times_ns:
        if time_ns is not None and 0 < time_ns < 1 << 63:
            return datetime.fromtimestamp(time_ns // 10**9, UTC).strftime("%Y-%m-%d")
    return NO_VALUE


def home(date: str, hostname: str | None, session_id: str) -> str:
    """The folder of a session, relative to the root."""
    return f"date={date}/host={escaped(hostname)}/session={escaped(session_id)}"


def bucket_of(name: str) -> int:
    """Which byte of the lock file stands for a session or a source."""
    return 1 + crc32(name.encode("utf-8", "surrogatepass")) % (BUCKETS - 1)


class Locks:
    """Bytes of one file, locked by one open file each: they exclude other stores in this process and, over NFS 4, those
    of other hosts; a process that dies lets go. One thread at a time."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    @contextmanager
    def held(self, buckets: Iterable[int]) -> Iterator[None]:
        """Waits for all of them. Raises InputError where the file system has no locks."""
        got = []
        try:
            for bucket in sorted(set(buckets)):  # everybody in the same order: nobody waits in a circle
                self._set(fcntl.F_OFD_SETLKW, fcntl.F_WRLCK, bucket)
                got.append(bucket)
            yield
        finally:
            for bucket in got:
                self._set(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, bucket)

    @contextmanager
    def if_free(self, bucket: int) -> Iterator[bool]:
        """Held, if nobody else has it; does not wait."""
        try:
            self._set(fcntl.F_OFD_SETLK, fcntl.F_WRLCK, bucket)
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:
            self._set(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, bucket)

    def take(self) -> bool:
        """Lock the first byte for as long as this is open; False if another has it."""
        try:
            self._set(fcntl.F_OFD_SETLK, fcntl.F_WRLCK, 0)
        except BlockingIOError:
            return False
        return True

    def _set(self, command: int, kind: int, start: int) -> None:
        try:
            fcntl.fcntl(self._descriptor, command, struct.pack("@hhqqi4x", kind, os.SEEK_SET, start, 1, 0))
        except BlockingIOError:
            raise
        except OSError as error:
            raise InputError(f"{self.path}: cannot be locked: {error.strerror}") from error

    def close(self) -> None:
        """Let go of everything."""
        os.close(self._descriptor)


def new_writer() -> str:
    """A name for one opening of a store, the later ones greater."""
    return f"{time.time_ns():016x}-{os.urandom(4).hex()}"
