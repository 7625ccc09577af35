"""A log file's bytes, decompressed, a piece at a time; what a damaged file still holds comes before the error."""

from __future__ import annotations

import errno
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

_inflate: ModuleType = zlib
FAST = False
"""Whether decompressing costs little beside decoding."""
try:
    from isal import isal_zlib
except ImportError:  # other processors
    pass
else:
    _inflate = isal_zlib  # twice to ten times zlib's speed
    FAST = True

PIECE_BYTES = 1 << 20
_READ_BYTES = 1 << 17
_GZIP = 31
_MAGIC = b"\x1f\x8b"


class Damaged(ValueError):
    """A compressed file whose content ends in the middle; ``reason`` is one of the ledger's."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def chunks(
    path: str, compressed: bool, seen: Callable[[bytes], Any] | None = None, piece_bytes: int = 0
) -> Iterator[bytes]:
    """Pieces of at most so many bytes (0: 1 MiB). ``seen`` is handed the file's bytes as they lie there.

    Raises OSError, and Damaged after the last piece that could be had.
    """
    piece_bytes = piece_bytes or PIECE_BYTES
    with open(path, "rb", buffering=0, opener=open_regular) as file:
        if not compressed:
            while piece := file.read(piece_bytes):
                if seen is not None:
                    seen(piece)
                yield piece
            return
        yield from _members(file, seen, piece_bytes)


def open_regular(path: str, flags: int) -> int:
    """A descriptor of a regular file (``opener`` of ``open``): a pipe of that name is refused, and never waited for."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is no regular file", path)
    return descriptor


def _members(file: Any, seen: Callable[[bytes], Any] | None, piece_bytes: int) -> Iterator[bytes]:
    inflater: Any = None
    held = b""
    anything = False
    while True:
        data = file.read(_READ_BYTES)
        if data:
            anything = True
            if seen is not None:
                seen(data)
        held += data
        if not held:
            break
        if inflater is None:
            if not held.strip(b"\0"):
                held = b""  # padding
                continue
            if len(held) < 2 and data:
                continue
            if not held.startswith(_MAGIC):
                raise Damaged("corrupt_file")
            inflater = _inflate.decompressobj(_GZIP)
        while held:
            try:
                piece = inflater.decompress(held, piece_bytes)
            except (zlib.error, OSError, ValueError, EOFError, getattr(_inflate, "error", zlib.error)) as error:
                raise Damaged("corrupt_file") from error
            if piece:
                yield piece
            if inflater.eof:
                held, inflater = inflater.unused_data, None
                break
            held = inflater.unconsumed_tail
        if not data and held and inflater is not None:
            break
    if inflater is not None:
        raise Damaged("truncated_file")
    if not anything:
        raise Damaged("empty_file")
