"""What runs in CUPTI's callbacks: records are copied and handed on. Nothing here waits, and nothing is raised.

Records are views into CUPTI's buffer, which is its own again when the callback returns: their bytes are copied (one
``bytes.join`` for all of a class), and texts behind pointers that were not met before are read while they are there.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from itertools import groupby
from typing import Any, NamedTuple

from gpuflight.events.arrays import numpy
from gpuflight.events.recorder.binding import KIND_OF_NUMBER
from gpuflight.events.recorder.layouts import Layouts, columns_of

_NAMES_KEPT = 200_000
_RECORD_BYTES = 256
_WAKE_BYTES = 4 << 20

TEXTS: dict[str, tuple[str, ...]] = {"kernel": ("name",), "nvtx": ("name", "domain"), "device": ("name", "uuid")}
"""Attributes that are texts, by group."""
_LASTING = frozenset({"kernel"})
"""Texts that CUPTI keeps as long as the program runs: the same pointer is the same text."""
_FIRST = frozenset({"device", "external", "api"})
"""What the other records of the buffer are joined to."""

ATTRIBUTES = (
    *("kind", "start", "end", "timestamp", "device_id", "stream_id", "context_id", "correlation_id", "bytes"),
    *("copy_kind", "src_kind", "dst_kind", "registers_per_thread", "dynamic_shared_memory", "static_shared_memory"),
    "local_memory_per_thread",
    *("local_memory_total_v2", "local_memory_total", "grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z"),
    *("shared_memory_executed", "graph_id", "type", "cuda_event_id", "memory_operation_type", "memory_kind", "address"),
    *("overhead_kind", "flags_", "id", "external_kind", "external_id", "cbid", "thread_id"),
    *("num_multiprocessors", "max_warps_per_multiprocessor", "max_blocks_per_multiprocessor", "l2cache_size"),
    *("max_registers_per_multiprocessor", "max_shared_memory_per_multiprocessor", "max_registers_per_block"),
    *("max_shared_memory_per_block", "num_threads_per_warp", "compute_capability_major", "compute_capability_minor"),
    "global_memory_size",
)
"""What is read of records without a layout."""


class Chunk(NamedTuple):
    """Records of one class as they came. ``data`` in ``dtype``, or ``columns`` where there is no layout. ``texts``: by
    attribute, pointer → text (of those not told before); without a layout, a list."""

    group: str
    size: int
    data: bytes
    dtype: Any
    columns: dict[str, Any] | None
    texts: dict[str, Any]


class Intake:
    """Takes records in and gives chunks out. ``wake`` is called when much is waiting."""

    def __init__(self, layouts: Layouts, max_bytes: int, buffer_bytes: int, wake: Callable[[], None]) -> None:
        self.buffers = 0
        self.records = 0
        self.failures = 0
        self.failure = ""
        self.dropped: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()
        self._layouts = layouts
        self._max_bytes = max_bytes
        self._buffer_bytes = buffer_bytes
        self._wake = wake
        self._waiting: deque[Chunk] = deque()
        self._bytes = 0
        self._lock = threading.Lock()
        self._known: set[int] = set()

    def requested(self) -> tuple[int, int]:
        """CUPTI wants a buffer: its size in bytes, and no limit to its records."""
        return self._buffer_bytes, 0

    def completed(self, records: list[Any]) -> None:
        """CUPTI delivers a buffer."""
        try:
            self._take(records)
        except BaseException as error:  # noqa: BLE001 - must not reach CUPTI's thread, nor the program's
            self.failures += 1
            self.failure = f"{type(error).__name__}: {error}"[:200]
            self.dropped["callback"] += len(records) if isinstance(records, list) else 1

    def take(self) -> Chunk | None:
        """The oldest chunk, None if there is none."""
        try:
            chunk = self._waiting.popleft()
        except IndexError:
            return None
        with self._lock:
            self._bytes -= _size(chunk)
        return chunk

    @property
    def waiting_bytes(self) -> int:
        return self._bytes

    def _take(self, records: list[Any]) -> None:
        self.buffers += 1
        self.records += len(records)
        by_class: dict[type, list[Any]] = {}
        for kind, run in groupby(records, type):
            by_class.setdefault(kind, []).extend(run)
        chunks: list[Chunk] = []
        for kind, same in by_class.items():
            if kind is type(None):
                self.unknown["none"] += len(same)
                continue
            dtype = self._layouts.of(same[0])
            if dtype is not None:
                self._take_bytes(b"".join(same), dtype, same, chunks)
            else:
                self._take_objects(same, chunks)
        chunks.sort(key=lambda chunk: chunk.group not in _FIRST)
        for chunk in chunks:
            self._put(chunk)

    def _take_bytes(self, data: bytes, dtype: Any, records: list[Any], chunks: list[Chunk]) -> None:
        """One class may hold several kinds (runtime and driver calls); groups of one class never mix."""
        array = numpy().frombuffer(data, dtype)
        group = KIND_OF_NUMBER.get(int(array["kind"][0]))
        if group is None:
            self.unknown[type(records[0]).__name__] += len(records)
            return
        if not self._fits(group, len(records), len(data)):
            return
        texts: dict[str, Any] = {}
        for attribute in TEXTS.get(group, ()):
            pointers = array[attribute].tolist()
            if group in _LASTING:
                fresh = set(pointers) - self._known
                if not fresh:
                    continue
                if len(self._known) > _NAMES_KEPT:
                    self._known.clear()
                    fresh = set(pointers)
            else:
                fresh = set(pointers)
            found: dict[int, str] = {}
            for pointer, record in zip(pointers, records, strict=True):
                if pointer in fresh and pointer not in found:
                    found[pointer] = _text(record, attribute)
                    if len(found) == len(fresh):
                        break
            if group in _LASTING:
                self._known |= fresh
            texts[attribute] = found
        chunks.append(Chunk(group, len(records), data, dtype, None, texts))

    def _take_objects(self, records: list[Any], chunks: list[Chunk]) -> None:
        by_group: dict[str | None, list[Any]] = {}
        for record in records:
            by_group.setdefault(KIND_OF_NUMBER.get(int(getattr(record, "kind", 0))), []).append(record)
        for group, same in by_group.items():
            if group is None:
                self.unknown[type(same[0]).__name__] += len(same)
            elif self._fits(group, len(same), len(same) * _RECORD_BYTES):
                texts = {name: [_text(record, name) for record in same] for name in TEXTS.get(group, ())}
                chunks.append(Chunk(group, len(same), b"", None, columns_of(same, ATTRIBUTES), texts))

    def _fits(self, group: str, count: int, size: int) -> bool:
        if self._bytes + size > self._max_bytes:
            self.dropped[group] += count
            return False
        return True

    def _put(self, chunk: Chunk) -> None:
        with self._lock:
            self._bytes += _size(chunk)
        self._waiting.append(chunk)
        if self._bytes >= _WAKE_BYTES:
            self._wake()


def _size(chunk: Chunk) -> int:
    return len(chunk.data) or chunk.size * _RECORD_BYTES


def _text(record: Any, name: str) -> str:
    """A text of a record, empty if it has none; a uuid as ``GPU-…``."""
    try:
        value = getattr(record, name)
    except Exception:  # noqa: BLE001 - a text that is no UTF-8
        return ""
    if name == "uuid":
        return _uuid(value)
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value or "")


def _uuid(value: Any) -> str:
    """``GPU-…`` of a CUuuid or its 16 bytes; empty for zeros."""
    raw = getattr(value, "bytes", value)
    if not isinstance(raw, bytes) or len(raw) != 16 or not any(raw):
        return ""
    text = raw.hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
