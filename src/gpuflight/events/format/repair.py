"""A line that is not quite JSON, read as what its writer meant; nothing raises, whatever the bytes."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from gpuflight.events.ledger import Ledger, Place

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_STRING_OR_NON_FINITE = re.compile(
    rb'"(?:[^"\\]|\\.)*"|[-+]?(?:nan|inf(?:inity)?)\b(?:\([a-z0-9_]*\))?|[-+]?1\.#[a-z]+\d*', re.IGNORECASE | re.DOTALL
)
"""Strings are matched so that what looks like NaN inside of one is left alone."""

_decode = msgspec.json.decode


def load(line: bytes, ledger: Ledger, place: Place) -> Any:
    """The value of a line; None, with the reason in the ledger, where there is none.

    NaN, inf and MSVC's ``-nan(ind)``, ``1.#QNAN`` become null (counted ``not_finite``), bytes that are not UTF-8
    become U+FFFD (counted ``invalid_utf8``).
    """
    try:
        return _decode(line)
    except (ValueError, RecursionError):
        pass
    repaired = line
    try:
        line.decode()
    except UnicodeDecodeError:
        repaired = line.decode("utf-8", "replace").encode()
    found = 0

    def null(match: re.Match[bytes]) -> bytes:
        nonlocal found
        if match[0][:1] == b'"':
            return match[0]
        found += 1
        return b"null"

    plain = _STRING_OR_NON_FINITE.sub(null, repaired)
    try:
        value = _last_resort(plain)
    except (ValueError, RecursionError):
        ledger.add("not_json", place, size_bytes=len(line))
        return None
    if repaired is not line:
        ledger.add("invalid_utf8", place)
    if found:
        ledger.add("not_finite", place, count=found)
    return value


def _last_resort(line: bytes) -> Any:
    """msgspec, else the standard library, which also takes lone surrogates and integers of any length."""
    try:
        return _decode(line)
    except (ValueError, RecursionError):
        return _without_surrogates(json.loads(line))


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_without_surrogates(v) for v in value]
    if isinstance(value, dict):
        return {_without_surrogates(k): _without_surrogates(v) for k, v in value.items()}
    return value


def is_whole(line: bytes) -> bool:
    """Whether a last line without its newline is a whole object (a writer that has not flushed its newline)."""
    if not line.rstrip().endswith(b"}"):
        return False
    return isinstance(load(line, Ledger(), Place()), dict)
