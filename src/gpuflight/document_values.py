"""Names and values of JSON as any document database takes them, and back, exactly (a tuple becomes a list).

* Names: dots, a dollar sign at the beginning, null bytes and halves of surrogate pairs are written as ``%2E``, ``%24``,
  ``%00``, ``%uD800``, a percent sign as ``%25``, and the empty name as ``%``.
* BSON has integers of 64 bits and valid Unicode only: ``{"%int": "0x…"}`` and ``{"%utf8": bytes}`` stand for others.
* Whatever is nested deeper than databases allow is ``{"%packed": bytes}`` (MessagePack).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

_NESTED_AT_MOST = 32  # BSON: 100, all the documents around included
_ESCAPED = re.compile(r"[%.\0\ud800-\udfff]|^\$")
_ESCAPE = re.compile(r"%(u[0-9A-F]{4}|[0-9A-F]{2})")


@lru_cache(maxsize=8192)
def escaped(name: str) -> str:
    """A name as it may stand in any database; reversible."""
    return _ESCAPED.sub(_escape, name) if name else "%"


def unescaped(name: str) -> str:
    """Inverse of ``escaped``."""
    if "%" not in name:
        return name
    return "" if name == "%" else _ESCAPE.sub(lambda match: chr(int(match[1].removeprefix("u"), 16)), name)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"%{code:02X}" if code < 256 else f"%u{code:04X}"


def pack(value: Any, depth: int = 0) -> Any:
    """A value of JSON, bytes included, as it may stand in a document. Raises TypeError for anything else."""
    kind = type(value)
    if kind is str:
        return value if value.isascii() else _text(value)
    if kind is int:
        return value if -(2**63) <= value < 2**63 else {"%int": hex(value)}
    if value is None or kind is float or kind is bool:
        return value
    if isinstance(value, Mapping):
        if depth == _NESTED_AT_MOST:
            return {"%packed": msgspec.msgpack.encode(pack(value))}
        return {escaped(str(name)): pack(item, depth + 1) for name, item in value.items()}
    if isinstance(value, list | tuple):
        if depth == _NESTED_AT_MOST:
            return {"%packed": msgspec.msgpack.encode(pack(value))}
        return [pack(item, depth + 1) for item in value]
    if kind is bytes:
        return {"%bytes": value}
    for plain in (int, float, str):  # a subclass
        if isinstance(value, plain):
            return pack(plain(value), depth)
    raise TypeError(f"not a value of an attribute: {kind.__name__}")


def _text(value: str) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:
        return {"%utf8": value.encode("utf-8", "surrogatepass")}
    return value


def unpack(value: Any) -> Any:
    """Inverse of ``pack``."""
    kind = type(value)
    if kind is str or kind is float or kind is int or value is None or kind is bool:
        return value
    if isinstance(value, Mapping):
        if len(value) == 1:
            [(name, inner)] = value.items()
            if name == "%int":
                return int(inner, 16)
            if name == "%utf8":
                return bytes(inner).decode("utf-8", "surrogatepass")
            if name == "%packed":
                return unpack(msgspec.msgpack.decode(inner))
            if name == "%bytes":
                return bytes(inner)
        return {unescaped(name): unpack(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [unpack(item) for item in value]
    return int(value) if isinstance(value, int) else value  # a driver's own type for 64 bits
