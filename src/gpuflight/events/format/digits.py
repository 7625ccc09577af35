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
    """``keep``: by number of digits 0-8, which bytes of a word these are.
    ``least``: by number of digits, the smallest number that has so many and no leading zero."""

    keep: Any
    least: Any
    steps: tuple[tuple[Any, Any, Any], ...]


@cache
def _tables() -> _Tables:
    np = numpy()
    keep = [_FULL & ~((1 << 8 * (8 - n)) - 1) for n in range(9)]
    return _Tables(
        np.array(keep, dtype=np.uint64),
        np.array([0, 0] + [10 ** (n - 1) for n in range(2, MOST_DIGITS + 1)], dtype=np.uint64),
        tuple(
            (mask and np.uint64(mask), np.uint64((10**digits << 8 * digits) + 1), np.uint64(8 * digits))
            for mask, digits in ((None, 1), (0x00FF00FF00FF00FF, 2), (0x0000FFFF0000FFFF, 4))
        ),
    )


def words(data: bytes) -> Any:
    """The eight bytes from each offset on, as little-endian integers. ``data`` has eight bytes or more."""
    return numpy().ndarray((len(data) - 7,), dtype="<u8", buffer=data, strides=(1,))


def parse(view: Any, ends: Any, lengths: Any) -> tuple[Any, Any]:
    """(uint64 values, whether each is one): ``lengths`` bytes before the offsets ``ends``, all at least 8. ``view``: of
    ``words``.

    A number is 1-20 digits without leading zeros, below 2^64.
    """
    np = numpy()
    if not len(ends):
        return np.empty(0, dtype=np.uint64), np.empty(0, dtype=bool)
    shortest, longest = int(lengths.min()), int(lengths.max())
    if shortest == longest and 0 < longest < MOST_DIGITS and (longest <= 8 or int(ends.min()) >= 24):
        return _of_one_length(view, ends, longest)
    values, good = _number(view[ends - 8], np.minimum(lengths, 8))
    if longest > 8:
        long = np.flatnonzero(lengths > 8)
        values[long], good[long] = _long(view, ends[long], lengths[long], values[long], good[long])
    good &= (lengths > 0) & (values >= _tables().least[np.minimum(lengths, MOST_DIGITS)])
    return values, good


def parse_columns(view: Any, ends: Any, lengths: Any) -> tuple[Any, Any]:
    """The same for several columns, a row of ``ends`` and ``lengths`` for each: those of one length go together."""
    np = numpy()
    if not ends.size:
        return np.empty(ends.shape, dtype=np.uint64), np.empty(ends.shape, dtype=bool)
    alike: dict[int, list[int]] = {}
    for j, (least, most) in enumerate(zip(lengths.min(axis=1).tolist(), lengths.max(axis=1).tolist(), strict=True)):
        alike.setdefault(most if least == most else -1, []).append(j)
    if len(alike) == 1:
        values, good = parse(view, ends.ravel(), lengths.ravel())
        return values.reshape(ends.shape), good.reshape(ends.shape)
    values, good = np.empty(ends.shape, dtype=np.uint64), np.empty(ends.shape, dtype=bool)
    for chosen in alike.values():
        parsed, are_numbers = parse(view, ends[chosen].ravel(), lengths[chosen].ravel())
        values[chosen], good[chosen] = parsed.reshape(len(chosen), -1), are_numbers.reshape(len(chosen), -1)
    return values, good


def _of_one_length(view: Any, ends: Any, length: int) -> tuple[Any, Any]:
    """The same for numbers of 1-19 digits, which all fit. What they have in common, as times do, is read once."""
    np = numpy()
    if length <= 8:
        values, good = _number(view[ends - 8], length)
    else:
        windows = np.ndarray((len(view) - 16,), "V24", view.base, strides=(1,))
        parts = windows[ends - 24].view("<u8").reshape(-1, 3).T
        values, good = _number(parts[2].copy(), 8)
        for place in (1, 0)[: (length - 1) // 8]:
            digits, weight = min(length - 16 + 8 * place, 8), 10 ** (16 - 8 * place)
            word = parts[place] & _tables().keep[digits]
            if word[0] == word[-1] and (word == word[0]).all():
                text = int(word[0]).to_bytes(8, "little")[8 - digits :]
                if not text.isdigit():
                    return values, np.zeros(len(values), dtype=bool)
                values += np.uint64(int(text) * weight)
            else:
                part, are_digits = _number(word, digits)
                part *= np.uint64(weight)
                values += part
                good &= are_digits
    good &= values >= _tables().least[length]
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
        part, are_digits = _number(word, digits)
        good = good & are_digits & ((ends >= offset) | (digits == 0))
        low, values = values, values + part * np.uint64(weight)
    most_high, most_low = divmod(_FULL, 10**16)
    fits = (part < most_high) | ((part == most_high) & (low <= most_low))
    return values, good & fits & (high <= MOST_DIGITS - 16)


def columns(data: bytes, ends: Any, lengths: Any) -> Any | None:
    """The values of whole columns (``ends`` and ``lengths``: a row per column) that are known to be digits only.

    None if one is empty, has a leading zero or is 2^64 or more.
    """
    np = numpy()
    shortest, longest = lengths.min(axis=1).tolist(), lengths.max(axis=1).tolist()
    if min(shortest) < 1:
        return None
    view, content = words(data), np.frombuffer(data, dtype=np.uint8)
    values = np.empty(ends.shape, dtype=np.uint64)
    long = []
    for j, (least, most) in enumerate(zip(shortest, longest, strict=True)):
        if most == 1:
            np.subtract(content[ends[j] - 1], 48, out=values[j], dtype=np.uint8, casting="unsafe")
            continue
        constant = _constant(data, ends[j], most) if least == most else None
        if constant is not None:
            values[j] = constant
        elif most <= 8:
            digits = most if least == most else lengths[j]
            values[j] = _value(_digits(view[ends[j] - 8], digits))
            if (values[j] < _tables().least[digits]).any():
                return None
        else:
            long.append(j)
    if long:
        values[long], good = parse_columns(view, ends[long], lengths[long])
        if not good.all():
            return None
    return values


def _constant(data: bytes, ends: Any, length: int) -> int | None:
    """The one value of a column of numbers of so many digits, if it has no other."""
    first, last = int(ends[0]), int(ends[-1])
    text = data[first - length : first]
    if length > MOST_DIGITS or text[:1] == b"0" or data[last - length : last] != text:
        return None
    windows = numpy().ndarray((len(data) - length + 1,), f"V{length}", data, strides=(1,))
    if windows[ends - length].tobytes() != text * len(ends):
        return None
    value = int(text)
    return value if value <= _FULL else None


def _digits(word: Any, digits: Any) -> Any:
    """The last ``digits`` (0-8, one for all or one each) bytes of each word as values of digits, 0 before them. The
    words are used up."""
    np = numpy()
    word ^= np.uint64(_ZEROS)
    if not isinstance(digits, int) or digits < 8:
        word &= _tables().keep[digits]
    return word


def _value(digits: Any) -> Any:
    """The number that eight digits are. They are used up."""
    for mask, factor, shift in _tables().steps:
        if mask is not None:
            digits &= mask
        digits *= factor
        digits >>= shift
    return digits


def _number(word: Any, digits: Any) -> tuple[Any, Any]:
    """(the number that the last ``digits`` bytes of each word are, whether these are digits). The words are used up."""
    return _checked(_digits(word, digits))


def _checked(digits: Any) -> tuple[Any, Any]:
    """(the number that eight digits are, whether each is 0-9). They are used up."""
    np = numpy()
    beyond = digits + np.uint64(0x7676767676767676)
    beyond |= digits
    beyond &= np.uint64(0x8080808080808080)
    return _value(digits), beyond == 0
