"""The short way for a request that was answered before in the same round.

Clients ask the same again and again. Once an answer about the latest round was given, the next request with the same
path, query, Accept and Accept-Encoding needs no routing and no parsing of parameters: only the role is checked, and the
ETag compared (``middleware.RepeatedAnswers``). The bodies stay in the BodyCache; a request for one that is no longer
there goes the long way.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from msgspec import Struct

from gpuflight.server.bodies import Key

if TYPE_CHECKING:
    from starlette.types import Scope

RawHeaders = list[tuple[bytes, bytes]]
RequestKey = tuple[str, bytes, bytes, bytes]

_KEPT = 256


class Repeat(Struct, frozen=True):
    """How a request about the latest round was answered."""

    number: int
    etag: str
    body: Key
    headers: RawHeaders
    unchanged_headers: RawHeaders


class Repeats:
    """The answers given last, by request. Used in the event loop only."""

    def __init__(self) -> None:
        self._known: OrderedDict[RequestKey, Repeat] = OrderedDict()

    def find(self, key: RequestKey) -> Repeat | None:
        """The answer to such a request, of whatever round it was."""
        return self._known.get(key)

    def learn(self, key: RequestKey, repeat: Repeat) -> None:
        """Remember an answer; the oldest one goes."""
        self._known[key] = repeat
        self._known.move_to_end(key)
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)


def request_key(scope: Scope) -> tuple[RequestKey, str | None]:
    """What tells one request from another here, and its If-None-Match."""
    accept = accept_encoding = b""
    if_none_match = None
    for name, value in scope["headers"]:
        if name == b"accept":
            accept = value
        elif name == b"accept-encoding":
            accept_encoding = value
        elif name == b"if-none-match":
            if_none_match = value.decode("latin-1")
    return (scope["path"], scope["query_string"], accept, accept_encoding), if_none_match


def matches(if_none_match: str, etag: str) -> bool:
    """Whether an If-None-Match header names an ETag, by weak comparison (RFC 9110 §8.8.3.2)."""
    wanted = etag.removeprefix("W/")
    return any(tag.strip() == "*" or tag.strip().removeprefix("W/") == wanted for tag in if_none_match.split(","))
