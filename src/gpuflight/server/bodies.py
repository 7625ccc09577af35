"""Bodies of answers, built once per (round, representation, encoding) and kept within a number of bytes."""

from __future__ import annotations

import gzip
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal, NamedTuple

import zstandard

_gzip: Callable[..., bytes]
try:
    from isal import igzip

    _gzip = igzip.compress
except ImportError:  # no wheel for this processor
    _gzip = gzip.compress

Encoding = Literal["identity", "gzip", "zstd"]

LEAST_COMPRESSED_BYTES = 1024
"""Below this a body is sent as it is: it fits into one packet anyway."""


class Key(NamedTuple):
    """What one body is of. ``round`` is 0 for what belongs to no round."""

    round: int
    representation: str
    encoding: Encoding = "identity"


class BodyCache:
    """The bodies used last, within ``max_bytes``. Thread-safe; of several that want one body at once, one builds it."""

    def __init__(self, max_bytes: int = 256 * 1024 * 1024) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.built_count = 0
        self.hits_count = 0
        self._bodies: OrderedDict[Key, bytes] = OrderedDict()
        self._building: dict[Key, threading.Lock] = {}
        self._lock = threading.Lock()

    def find(self, key: Key) -> bytes | None:
        """The body if it is there; never waits for one that is being built."""
        with self._lock:
            body = self._bodies.get(key)
            if body is not None:
                self._bodies.move_to_end(key)
                self.hits_count += 1
            return body

    def get(self, key: Key, build: Callable[[], bytes]) -> bytes:
        """The body, built by ``build`` (as it is, uncompressed) if it is not there. What ``build`` raises is raised."""
        body = self.find(key)
        if body is not None:
            return body
        with self._lock:
            turn = self._building.setdefault(key, threading.Lock())
        try:
            with turn:
                body = self.find(key)
                if body is None:
                    if key.encoding == "identity":
                        body = build()
                    else:
                        body = compress(self.get(key._replace(encoding="identity"), build), key.encoding)
                    self._keep(key, body)
                return body
        finally:
            with self._lock:
                if not turn.locked():
                    self._building.pop(key, None)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._bodies.clear()
            self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._bodies)

    def _keep(self, key: Key, body: bytes) -> None:
        with self._lock:
            self.built_count += 1
            if len(body) > self.max_bytes:
                return
            replaced = self._bodies.pop(key, None)
            if replaced is not None:
                self.used_bytes -= len(replaced)
            self._bodies[key] = body
            self.used_bytes += len(body)
            while self.used_bytes > self.max_bytes:
                _, oldest = self._bodies.popitem(last=False)
                self.used_bytes -= len(oldest)


def compress(body: bytes, encoding: Encoding) -> bytes:
    """A body in a content encoding; the same bytes each time."""
    if encoding == "zstd":
        return zstandard.ZstdCompressor(level=1).compress(body)
    if encoding == "gzip":
        return _gzip(body, compresslevel=1, mtime=0)
    return body
