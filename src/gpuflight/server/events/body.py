"""The body of a request with events, decompressed a piece at a time and never beyond its limit."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import zstandard

_inflate: ModuleType = zlib
try:
    from isal import isal_zlib
except ImportError:  # no wheel for this processor
    pass
else:
    _inflate = isal_zlib

PIECE_BYTES = 1 << 20
_GZIP = 31
_ZSTD_BITE_BYTES = 256
_ENCODINGS = {"": "", "identity": "", "gzip": "gzip", "x-gzip": "gzip", "zstd": "zstd"}


class TooLarge(Exception):
    """More than the limit when decompressed."""


class Damaged(Exception):
    """Compressed content that ends in the middle or makes no sense; what came before it was given out."""


def encoding_of(header: str) -> str | None:
    """``gzip``, ``zstd`` or nothing, of a Content-Encoding; None for one that is not taken."""
    return _ENCODINGS.get(header.strip().lower())


def pieces(body: bytes, encoding: str, limit: int) -> Iterator[bytes]:
    """The content in pieces of about 1 MiB. Raises TooLarge and, after the last piece that could be had, Damaged."""
    total = 0
    source = _gunzip(body) if encoding == "gzip" else _unzstd(body) if encoding == "zstd" else _plain(body)
    for piece in source:
        total += len(piece)
        if total > limit:
            raise TooLarge
        yield piece


def _plain(body: bytes) -> Iterator[bytes]:
    if len(body) <= PIECE_BYTES:
        yield body
        return
    for start in range(0, len(body), PIECE_BYTES):
        yield body[start : start + PIECE_BYTES]


def _gunzip(body: bytes) -> Iterator[bytes]:
    """Of one or several members, as gzip files may have."""
    data = body
    while True:
        inflater: Any = _inflate.decompressobj(_GZIP)
        while True:
            try:
                piece = inflater.decompress(data, PIECE_BYTES)
            except (zlib.error, _inflate.error) as error:
                raise Damaged(str(error)) from None
            if piece:
                yield piece
            if inflater.eof:
                break
            if not piece and not inflater.unconsumed_tail:
                raise Damaged("it ends in the middle")
            data = inflater.unconsumed_tail
        data = inflater.unused_data.lstrip(b"\0")  # files may be padded
        if not data:
            return


def _unzstd(body: bytes) -> Iterator[bytes]:
    """Of one or several frames. Fed by little bits: 256 bytes of it can be 8 MiB of content, and not more."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 27)
    held: list[bytes] = []
    held_bytes = 0
    data = body
    while True:
        frame = decompressor.decompressobj()
        start = 0
        while start < len(data) and not frame.eof:
            try:
                content = frame.decompress(data[start : start + _ZSTD_BITE_BYTES])
            except zstandard.ZstdError as error:
                if held:
                    yield b"".join(held)
                raise Damaged(str(error)) from None
            start += _ZSTD_BITE_BYTES
            if content:
                held.append(content)
                held_bytes += len(content)
                if held_bytes >= PIECE_BYTES:
                    yield b"".join(held)
                    held, held_bytes = [], 0
        rest = frame.unused_data + data[start:] if frame.eof else b""
        if not rest:
            break
        data = rest
    if held:
        yield b"".join(held)
    if not frame.eof:
        raise Damaged("it ends in the middle")
