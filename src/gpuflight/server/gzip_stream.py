"""One gzip stream for each client, of parts that are compressed once for all of them.

A part is compressed by itself, as deflate blocks that reach back to nothing before it and end on a byte (a sync flush).
Such parts follow each other in any order and number: the result is one member of gzip as RFC 1952 has it, which every
decoder reads as it comes. Members or frames of their own would be simpler, and are not read by all: browsers and zlib's
``decompressobj`` end with the first member.

Only the checksum at the end is of the client: CRC-32 of all parts, put together from theirs (as zlib's
``crc32_combine``), without their bytes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any

from msgspec import Struct

_compressobj: Callable[..., Any]
try:
    from isal import isal_zlib

    _compressobj, _LEVEL = isal_zlib.compressobj, 1
except ImportError:  # no wheel for this processor
    _compressobj, _LEVEL = zlib.compressobj, 1

HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x04\xff"
"""Deflate, no name, no time, fastest, system not said."""

_LAST_BLOCK = b"\x03\x00"  # empty, of fixed codes, and the last one
_RAW = -15
_POLYNOMIAL = 0xEDB88320


class Part(Struct, frozen=True):
    """``data`` is deflate; the others are of what it decompresses to. ``shift``: what as many bytes do to a CRC."""

    data: bytes
    crc: int
    size: int
    shift: int


def compress_part(data: bytes) -> Part:
    """A part of any gzip stream."""
    compressor = _compressobj(_LEVEL, zlib.DEFLATED, _RAW)
    packed = compressor.compress(data) + compressor.flush(zlib.Z_SYNC_FLUSH)
    return Part(packed, zlib.crc32(data), len(data), _power_of_x(8 * len(data)))


class GzipStream:
    """What one client has had so far."""

    def __init__(self) -> None:
        self._crc = 0
        self._size = 0

    def add(self, part: Part) -> None:
        """The next part was sent."""
        self._crc = _multiply(part.shift, self._crc) ^ part.crc
        self._size += part.size

    def end(self) -> bytes:
        """What follows the last part."""
        return _LAST_BLOCK + struct.pack("<II", self._crc, self._size & 0xFFFFFFFF)


def _multiply(a: int, b: int) -> int:
    """a(x) * b(x) modulo the polynomial of CRC-32, bits reflected: the coefficient of x^0 is the highest bit."""
    product = 0
    while a:
        if a & 0x80000000:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


def _power_of_x(exponent: int) -> int:
    """x^exponent modulo the polynomial, by squaring."""
    result, square = 0x80000000, 0x40000000
    while exponent:
        if exponent & 1:
            result = _multiply(square, result)
        square = _multiply(square, square)
        exponent >>= 1
    return result
