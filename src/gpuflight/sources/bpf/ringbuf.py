"""Draining a BPF ring buffer by its shared memory: no callback and no system call per record.

Layout (kernel/bpf/ringbuf.c): a page with the consumer's position, which we write; a page with the producer's, then the
data, mapped twice in a row so that no record is ever cut. Each record has a header of 8 bytes (length with two flags,
and an offset) and is rounded up to 8.
"""

from __future__ import annotations

import mmap
import struct
import threading

_PAGE = mmap.PAGESIZE
_BUSY, _DISCARDED = 1 << 31, 1 << 30
_POSITION = struct.Struct("<Q")
_HEADER = struct.Struct("<II")


class RingBuffer:
    """The reader's end of one ring buffer. Not for several threads at a time."""

    def __init__(self, fd: int, size: int) -> None:
        """``size``: the data's bytes (max_entries of the map). Raises OSError."""
        self._size = size
        self._consumer = mmap.mmap(fd, _PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=0)
        self._producer = mmap.mmap(fd, _PAGE + 2 * size, mmap.MAP_SHARED, mmap.PROT_READ, offset=_PAGE)
        self._barrier = threading.Lock()

    def drain(self, limit: int) -> list[bytes]:
        """Complete records, oldest first. One that is still being written holds back those behind it."""
        consumer, data, mask = self._consumer, self._producer, self._size - 1
        (position,) = _POSITION.unpack_from(consumer, 0)
        (end,) = _POSITION.unpack_from(data, 0)
        self._fence()
        places: list[tuple[int, int]] = []
        while position < end and len(places) < limit:
            start = _PAGE + (position & mask)
            length, _ = _HEADER.unpack_from(data, start)
            if length & _BUSY:
                break
            size = length & ~_DISCARDED
            if not length & _DISCARDED:
                places.append((start + 8, start + 8 + size))
            position += (size + 8 + 7) // 8 * 8
        self._fence()
        records = [data[start:stop] for start, stop in places]
        self._fence()
        _POSITION.pack_into(consumer, 0, position)
        return records

    def _fence(self) -> None:
        """Keep a weakly ordered CPU (arm64) from reading data before the header that says it is there: taking a lock
        and giving it back is the one memory barrier that Python offers."""
        with self._barrier:
            pass

    def close(self) -> None:
        """Unmap it."""
        self._consumer.close()
        self._producer.close()
