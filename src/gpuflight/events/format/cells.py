"""One value of the wire as a value of a column's kind, however it was written: ids as strings, hex, 0/1 for bools."""

from __future__ import annotations

from math import isfinite
from typing import Any

import msgspec

from gpuflight.events.format.plans import MEMORY_WORDS, WORDS, Field

_I64 = (-(1 << 63), (1 << 63) - 1)
_U64 = (0, (1 << 64) - 1)
_json = msgspec.json.Encoder().encode

Value = int | float | str


def cell(value: Any, kind: str) -> Value | None:
    """The value; None where it cannot be one of this kind. Integers stay exact, floats are taken if they are whole."""
    if kind == "text":
        if isinstance(value, str):
            return value
        return None if isinstance(value, (list, dict)) or value is None else str(value)
    if kind == "json":
        return _json(value).decode()
    if isinstance(value, str):
        value = _number(value)
    if isinstance(value, bool):
        value = int(value)
    if kind == "f64":
        if not isinstance(value, (int, float)):
            return None
        try:
            value = float(value)
        except OverflowError:
            return None
        return value if isfinite(value) else None
    if isinstance(value, float):
        if not value.is_integer():
            return None
        value = int(value)
    if not isinstance(value, int):
        return None
    low, high = _U64 if kind == "u64" else _I64
    return value if low <= value <= high else None


def _number(text: str) -> int | float | None:
    text = text.strip()
    if len(text) > 40 or "_" in text:
        return None
    try:
        return int(text, 16) if text[:2].lower() == "0x" else int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return None


def read(value: Any, field: Field) -> Value | None:
    """``cell`` after what the field's ``how`` asks for; texts that become ids are left texts."""
    how = field.how
    if how[:1] == "@":
        return cell(value, "text")
    if how in WORDS and isinstance(value, str):
        code = WORDS[how].get(value.lower())
        return cell(value, field.column.kind) if code is None else code
    if how == "memory_word" and isinstance(value, int):
        return MEMORY_WORDS.get(value)
    number = cell(value, field.column.kind)
    if number is None:
        return None
    if how == "x100" and not isinstance(number, str):
        return number / 100
    if how == "na" and number == -1:
        return None
    return number
