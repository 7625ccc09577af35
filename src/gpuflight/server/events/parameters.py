"""Parameters that questions about sessions have in common."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import Path, Query

from gpuflight.errors import InputError
from gpuflight.server.errors import ApiError
from gpuflight.server.selection import parse_time

_LEAST_NS = 10**15
"""Whole numbers from here on are nanoseconds; seconds since the epoch do not get there."""

_DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)

SessionId = Annotated[str, Path(max_length=256, description="id of a session, as its log says")]
Limit = Annotated[int, Query(ge=1, le=10_000, description="at most so many")]
Offset = Annotated[int, Query(ge=0, le=2**53, description="so many are left out first")]
Points = Annotated[int, Query(ge=1, le=10_000, description="at most so many steps")]
From = Annotated[
    str | None,
    Query(
        alias="from",
        max_length=64,
        description="what happened from then on: ISO 8601, seconds or ns since the epoch, or -30 (half a minute ago)",
    ),
]
To = Annotated[str | None, Query(alias="to", max_length=64, description="what happened up to then, as `from`")]
Device = Annotated[int | None, Query(ge=0, le=2**31, description="index of a device")]
Name = Annotated[str | None, Query(max_length=4096, description="a part of the kernel's name")]
Number = Annotated[int | None, Query(ge=-(2**63), le=2**63 - 1)]


def time_ns(text: str | None) -> int | None:
    """ns since the epoch, or None for none. Raises ApiError 422."""
    if text is None:
        return None
    text = text.strip()
    if text.isascii() and text.isdigit() and int(text) >= _LEAST_NS:
        if int(text) >= 2**63:
            raise ApiError(422, "bad_request", f"{text[:40]!r} is no time")
        return int(text)
    if _DATE.fullmatch(text):
        text += "T00:00:00Z"
    found = parse_time(text)
    if not -(2**63) <= found < 2**63:
        raise InputError(f"{text[:40]!r} is no time")
    return found
