"""Decimal numbers in a block of bytes, thousands at once: eight digits are one machine word, three words a number.

Exact for all that fits into 64 bits; anything else is said to be no such number.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from gpuflight.events.arrays import numpy

MOST_DIGITS = 20
_FULL = (1 << 64) - 1
_ZEROS = 0x3030303030303030


class _Tables(NamedTuple):
    """``keep`` and ``fill``: by number of digits 0-8, which bytes of a word these are and "0" in the others.
    ``least``: by number of digits, the smallest number that has so many and no leading zero."""

    keep: Any
    fill: Any
    least: Any
    steps: tuple[tuple[Any, Any, Any], ...]


@cache
def _tables() -> _Tables:
    np = numpy()
    keep = [_FULL & ~((1 << 8 * (8 - n)) - 1) for n in range(9)]
    return _Tables(
        np.array(keep, dtype=np.uint64),
        np.array([_ZEROS & ~k for k in keep], dtype=np.uint64),
        np.array([0, 0] + [10 ** (n - 1) for n in range(2, MOST_DIGITS + 1)], dtype=np.uint64),
        tuple(
            (np.uint64(mask), np.uint64((10**digits << 8 * digits) + 1), np.uint64(8 * digits))
            for mask, digits in ((0x0F0F0F0F0F0F0F0F, 1), (0x00FF00FF00FF00FF, 2), (0x0000FFFF0000FFFF, 4))
        ),
    )


def words(data: bytes) -> Any:
    """The eight bytes from each offset on, as little-endian integers. ``data`` has eight bytes or more."""
    return numpy().ndarray((len(data) - 7,), dtype="<u8", buffer=data, strides=(1,))


def parse(view: Any, ends: Any, lengths: Any) -> tuple[Any, Any]:
    """(uint64 values, whether each is one): ``lengths`` bytes before the offsets ``ends``, all at least 8.

    A number is 1-20 digits without leading zeros, below 2^64.
    """
    np = numpy()
    low = view[ends - 8]
    digits = np.minimum(lengths, 8)
    good = _are_digits(low, digits)
    values = _value(low, digits)
    if int(lengths.max(initial=0)) > 8:
        long = np.flatnonzero(lengths > 8)
        values[long], good[long] = _long(view, ends[long], lengths[long], values[long], good[long])
    good &= (lengths > 0) & (values >= _tables().least[np.minimum(lengths, MOST_DIGITS)])
    return values, good


def _long(view: Any, ends: Any, lengths: Any, values: Any, good: Any) -> tuple[Any, Any]:
    """The same, given the value of the last eight digits."""
    np = numpy()
    middle, high = lengths - 8, lengths - 16
    low = values
    for digits, offset, weight in ((middle, 16, 10**8), (high, 24, 10**16)):
        if offset == 24 and int(high.max()) <= 0:
            return values, good
        digits = np.clip(digits, 0, 8)
        word = view[np.maximum(ends - offset, 0)]  # what is before the block is no digit of ours
        good = good & _are_digits(word, digits) & ((ends >= offset) | (digits == 0))
        part = _value(word, digits)
        low, values = values, values + part * np.uint64(weight)
    most_high, most_low = divmod(_FULL, 10**16)
    fits = (part < most_high) | ((part == most_high) & (low <= most_low))
    return values, good & fits & (high <= MOST_DIGITS - 16)


def columns(data: bytes, ends: Any, lengths: Any) -> Any | None:
    """The values of whole columns (``ends`` and ``lengths``: a row per column) that are known to be digits only.

    None if one is empty, has a leading zero or is 2^64 or more.
    """
    np = numpy()
    if int(lengths.min()) < 1:
        return None
    view, content = words(data), np.frombuffer(data, dtype=np.uint8)
    values = np.empty(ends.shape, dtype=np.uint64)
    longest = lengths.max(axis=1)
    for j, length in enumerate(longest.tolist()):
        if length == 1:
            np.subtract(content[ends[j] - 1], 48, out=values[j], dtype=np.uint8, casting="unsafe")
        elif length > 8:
            constant = _constant(data, view, ends[j], length) if length == lengths[j].min() else None
            if constant is not None:
                values[j] = constant
                continue
            values[j], good = parse(view, ends[j], lengths[j])
            if not good.all():
                return None
    short = np.flatnonzero((longest > 1) & (longest <= 8))
    if len(short):
        digits = lengths[short]
        parsed = _value(view[ends[short] - 8], digits)
        if (parsed < _tables().least[digits]).any():
            return None
        values[short] = parsed
    return values


def _constant(data: bytes, view: Any, ends: Any, length: int) -> int | None:
    """The one value of a column of numbers of more than eight digits, if it has no other."""
    first = int(ends[0])
    if length > MOST_DIGITS:
        return None
    for back in (*range(8, length, 8), length):
        found = view[ends - back]
        if (found != found[0]).any():
            return None
    text = data[first - length : first]
    value = int(text)
    return value if value <= _FULL and text[:1] != b"0" else None


def _are_digits(word: Any, digits: Any) -> Any:
    """Whether the last ``digits`` (0-8) bytes of each word are digits."""
    np = numpy()
    tables = _tables()
    word = (word & tables.keep[digits]) | tables.fill[digits]
    high = np.uint64(0xF0F0F0F0F0F0F0F0)
    probe = word + np.uint64(0x0606060606060606)
    probe &= high
    probe >>= np.uint64(4)
    probe |= word & high
    return probe == np.uint64(0x3333333333333333)


def _value(word: Any, digits: Any) -> Any:
    """The number that the last ``digits`` (0-8) bytes of each word are."""
    tables = _tables()
    word = word & tables.keep[digits]
    for mask, factor, shift in tables.steps:
        word &= mask
        word *= factor
        word >>= shift
    return word
