"""Rounds as bytes, made once per round however many subscribers send them."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable
from typing import Literal

import zstandard

from gpuflight import round_codec
from gpuflight.rounds import Round

Content = Literal["graph", "diff"]
Encoding = Literal["none", "gzip", "zstd"]

_lock = threading.Lock()
_last: dict[str, tuple[Round, bytes]] = {}


def encode_round(completed: Round) -> bytes:
    """The whole round in the JSON form of a graph file (no newline)."""
    return _cached("graph", completed, lambda: round_codec.encode_round(completed))


def encode_diff_line(completed: Round) -> bytes:
    """What changed since the round before, as one JSON object (no newline)."""
    return _cached("diff", completed, lambda: round_codec.encode_round_diff(completed))


def compress(data: bytes, encoding: Encoding) -> bytes:
    """The bytes under an HTTP content coding; gzip through isal where it is installed."""
    if encoding == "none":
        return data
    if encoding == "zstd":
        return zstandard.ZstdCompressor(level=3).compress(data)
    try:
        from isal import igzip
    except ImportError:
        return gzip.compress(data, compresslevel=1, mtime=0)
    return bytes(igzip.compress(data, compresslevel=1, mtime=0))


def compressed(completed: Round, content: Content, encoding: Encoding) -> bytes:
    """A round (or what changed in it) as JSON under a content coding, made once per round."""
    data = (encode_round if content == "graph" else encode_diff_line)(completed)
    if encoding == "none":
        return data
    return _cached(f"{content}+{encoding}", completed, lambda: compress(data, encoding))


def _cached(form: str, completed: Round, make: Callable[[], bytes]) -> bytes:
    # The lock is held while encoding: of ten subscribers one encodes, nine wait for it instead of doing the same.
    with _lock:
        known = _last.get(form)
        if known is not None and known[0] is completed:
            return known[1]
        data = make()
        _last[form] = (completed, data)
        return data
