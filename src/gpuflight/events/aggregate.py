"""Kernels by (session, kernel, stream, device): count, total, least, most, quantiles and launch details, streaming.

Memory is that of the distinct keys, not of the events. Quantiles come of a histogram with 64 buckets per octave, so
they are within 0.8 % of a value that occurred; everything else is exact.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from gpuflight.events.arrays import numpy
from gpuflight.events.batch import Batch
from gpuflight.events.ledger import Ledger
from gpuflight.events.names import Names

_ROWS_AT_ONCE = 1 << 16
_WAITING_DETAILS = 1 << 16
"""Kernels and details of one session that may wait for each other; what waits longer is counted, not joined."""

_BUCKET_SHIFT = 52 - 6
_FIRST_BUCKET = 1023 << 6


class KernelStats(msgspec.Struct):
    """A line. ``name`` None: its dictionary entry never came; ``stream_id``, ``device_id`` None: unknown.

    ``details``: launches whose configuration is known; ``occupancy`` their mean (0-1) and ``shape_id`` the most
    frequent one, None without any.
    """

    session_id: str
    kernel_id: int
    name: str | None
    stream_id: int | None
    device_id: int | None
    count: int
    total_ns: int
    min_ns: int
    max_ns: int
    p50_ns: int
    p99_ns: int
    details: int = 0
    occupancy: float | None = None
    shape_id: int | None = None


class KernelTable:
    """Takes batches of any table, keeps those of kernels, names and launch details."""

    def __init__(self) -> None:
        self._sessions: dict[str, _Kernels] = {}

    def add(self, batch: Batch) -> None:
        if batch.table not in ("kernel", "kernel_detail", "kernel_shape", "name"):
            return
        session = self._sessions.get(batch.session_id)
        if session is None:
            session = self._sessions[batch.session_id] = _Kernels()
        session.add(batch)

    def stats(self, ledger: Ledger | None = None) -> list[KernelStats]:
        """The table, longest total first. Names that never came are counted in the ledger."""
        lines = [line for identifier, kernels in self._sessions.items() for line in kernels.stats(identifier)]
        if ledger is not None:
            for line in lines:
                if line.name is None and line.kernel_id:
                    ledger.add("missing_name", subject="kernel")
        return sorted(lines, key=lambda s: (-s.total_ns, s.session_id, s.kernel_id, s.stream_id or 0))

    def waiting(self) -> int:
        """Details whose kernel has not come."""
        return sum(kernels.waiting() for kernels in self._sessions.values())


class _Kernels:
    """One session's kernels."""

    def __init__(self) -> None:
        np = numpy()
        self.names = Names()
        self._occupancy: dict[int, float] = {}
        self._keys: dict[tuple[int, int, int], int] = {}
        self._packed: Any = np.empty(0, dtype=np.int64)
        self._packed_codes: Any = np.empty(0, dtype=np.int64)
        self._sums: Any = np.zeros((0, 4), dtype=np.int64)  # count, total, min, max
        self._buckets: dict[int, int] = {}
        self._shapes: dict[int, int] = {}
        self._detail_counts: dict[tuple[int, int], int] = {}
        self._rows: list[tuple[Any, Any, Any, Any, Any]] = []
        self._row_count = 0
        self._waiting_kernels: tuple[Any, Any] = (np.empty(0, np.int64), np.empty(0, np.int64))
        self._details: list[tuple[Any, Any]] = []
        self._detail_count = 0

    def add(self, batch: Batch) -> None:
        columns = batch.columns
        if batch.table == "name":
            for dictionary, identifier, text in zip(
                columns["dictionary"], columns["id"].tolist(), columns["text"], strict=True
            ):
                if dictionary == "kernel":
                    self.names.add(dictionary, identifier, text)
        elif batch.table == "kernel_shape":
            if "occupancy" in columns:
                self._occupancy.update(zip(columns["shape_id"].tolist(), columns["occupancy"].tolist(), strict=True))
        elif batch.table == "kernel_detail":
            if "corr_id" in columns and "shape_id" in columns:
                self._details.append((columns["corr_id"], columns["shape_id"]))
                self._detail_count += batch.count
        elif "kernel_id" in columns and "duration_ns" in columns:
            self._rows.append(
                (
                    columns["kernel_id"],
                    columns.get("stream_id"),
                    columns.get("device_id"),
                    columns["duration_ns"],
                    columns.get("corr_id"),
                )
            )
            self._row_count += batch.count
        if max(self._row_count, self._detail_count) >= _ROWS_AT_ONCE:
            self._reduce()

    def waiting(self) -> int:
        self._reduce()
        return self._detail_count

    def _reduce(self) -> None:
        np = numpy()
        if self._rows:
            columns = []
            for part in range(5):
                pieces = [
                    np.full(len(row[0]), -1, dtype=np.int64) if row[part] is None else row[part] for row in self._rows
                ]
                columns.append(np.concatenate(pieces))
            self._rows, self._row_count = [], 0
            kernel, stream, device, duration, corr = columns
            codes = self._codes(kernel, stream, device)
            self._sum(codes, duration)
            known_corr, known_codes = self._waiting_kernels
            self._waiting_kernels = (
                np.concatenate([known_corr, corr]),
                np.concatenate([known_codes, codes]),
            )
        if self._details:
            self._join()
        known_corr, known_codes = self._waiting_kernels
        if len(known_corr) > _WAITING_DETAILS:
            self._waiting_kernels = (known_corr[-_WAITING_DETAILS:], known_codes[-_WAITING_DETAILS:])

    def _codes(self, kernel: Any, stream: Any, device: Any) -> Any:
        """A small number for each row's key."""
        np = numpy()
        packable = (
            int(kernel.max()) < 1 << 38
            and int(kernel.min()) >= 0
            and int(stream.max()) < (1 << 16) - 1
            and int(stream.min()) >= -1
            and int(device.max()) < 255
            and int(device.min()) >= -1
        )
        if not packable:
            keys = list(zip(kernel.tolist(), stream.tolist(), device.tolist(), strict=True))
            return np.array([self._code(key) for key in keys], dtype=np.int64)
        packed = (kernel << 24) | ((stream + 1) << 8) | (device + 1)
        if len(self._packed):
            places = np.minimum(np.searchsorted(self._packed, packed), len(self._packed) - 1)
            fresh = np.unique(packed[self._packed[places] != packed])
        else:
            fresh = np.unique(packed)
        if len(fresh):
            for value in fresh.tolist():
                self._code((value >> 24, ((value >> 8) & 0xFFFF) - 1, (value & 0xFF) - 1))
            both = np.concatenate([self._packed, fresh])
            order = np.argsort(both)
            self._packed = both[order]
            self._packed_codes = np.array(
                [self._code((v >> 24, ((v >> 8) & 0xFFFF) - 1, (v & 0xFF) - 1)) for v in self._packed.tolist()],
                dtype=np.int64,
            )
            places = np.searchsorted(self._packed, packed)
        return self._packed_codes[places]

    def _code(self, key: tuple[int, int, int]) -> int:
        return self._keys.setdefault(key, len(self._keys))

    def _sum(self, codes: Any, duration: Any) -> None:
        np = numpy()
        if len(self._sums) < len(self._keys):
            more = np.zeros((len(self._keys) - len(self._sums), 4), dtype=np.int64)
            more[:, 2] = np.iinfo(np.int64).max
            more[:, 3] = np.iinfo(np.int64).min
            self._sums = np.concatenate([self._sums, more])
        small = codes.astype(np.uint16) if len(self._keys) < 1 << 16 else codes
        order = np.argsort(small, kind="stable")  # a radix sort for 16 bits
        ordered = codes[order]
        starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        present = ordered[starts]
        durations = duration[order]
        self._sums[present, 0] += np.diff(np.append(starts, len(ordered)))
        self._sums[present, 1] += np.add.reduceat(durations, starts)
        self._sums[present, 2] = np.minimum(self._sums[present, 2], np.minimum.reduceat(durations, starts))
        self._sums[present, 3] = np.maximum(self._sums[present, 3], np.maximum.reduceat(durations, starts))
        bits = np.maximum(duration, 1).astype(np.float64).view(np.int64) >> _BUCKET_SHIFT
        cells, counts = np.unique((codes << 12) | (bits - _FIRST_BUCKET), return_counts=True)
        buckets = self._buckets
        for cell, count in zip(cells.tolist(), counts.tolist(), strict=True):
            buckets[cell] = buckets.get(cell, 0) + count

    def _join(self) -> None:
        """Details to the kernels of the same corr_id; what finds none waits, to a limit, for kernels to come."""
        np = numpy()
        corr = np.concatenate([c for c, _ in self._details])
        shape = np.concatenate([s for _, s in self._details])
        known_corr, known_codes = self._waiting_kernels
        found = np.zeros(len(corr), dtype=bool)
        if len(known_corr):
            order = np.argsort(known_corr, kind="stable")
            ordered = known_corr[order]
            places = np.minimum(np.searchsorted(ordered, corr), len(ordered) - 1)
            found = ordered[places] == corr
            chosen, first = np.unique(order[places[found]], return_index=True)  # told twice, it counts once
            codes = known_codes[chosen]
            distinct, positions = np.unique(shape[found][first], return_inverse=True)
            joint, counts = np.unique(codes * max(len(distinct), 1) + positions, return_counts=True)
            for cell, count in zip(joint.tolist(), counts.tolist(), strict=True):
                key = (cell // len(distinct), int(distinct[cell % len(distinct)]))
                self._detail_counts[key] = self._detail_counts.get(key, 0) + count
            taken = np.zeros(len(known_corr), dtype=bool)
            taken[chosen] = True
            self._waiting_kernels = (known_corr[~taken], known_codes[~taken])
        left = ~found
        self._details = [(corr[left][-_WAITING_DETAILS:], shape[left][-_WAITING_DETAILS:])] if left.any() else []
        self._detail_count = sum(len(c) for c, _ in self._details)

    def stats(self, session_id: str) -> Iterable[KernelStats]:
        self._reduce()
        histograms: dict[int, list[tuple[int, int]]] = {}
        for cell, count in self._buckets.items():
            histograms.setdefault(cell >> 12, []).append((cell & 0xFFF, count))
        shapes: dict[int, dict[int, int]] = {}
        for (code, shape_id), count in self._detail_counts.items():
            shapes.setdefault(code, {})[shape_id] = count
        for (kernel_id, stream_id, device_id), code in self._keys.items():
            count, total, least, most = self._sums[code].tolist()
            histogram = sorted(histograms[code])
            mine = shapes.get(code, {})
            known = [(self._occupancy[s], n) for s, n in mine.items() if s in self._occupancy]
            weight = sum(n for _, n in known)
            yield KernelStats(
                session_id,
                kernel_id,
                self.names.get("kernel", kernel_id),
                None if stream_id < 0 else stream_id,
                None if device_id < 0 else device_id,
                count,
                total,
                least,
                most,
                _quantile(histogram, count, 0.5, least, most),
                _quantile(histogram, count, 0.99, least, most),
                sum(mine.values()),
                sum(o * n for o, n in known) / weight if weight else None,
                max(mine, key=lambda s: mine[s]) if mine else None,
            )


def _quantile(histogram: list[tuple[int, int]], count: int, q: float, least: int, most: int) -> int:
    """The middle of the bucket where the quantile lies, kept between the least and the most that occurred."""
    np = numpy()
    rank = q * (count - 1)
    seen = 0
    for bucket, size in histogram:
        seen += size
        if seen > rank:
            edges = np.array([bucket + _FIRST_BUCKET, bucket + _FIRST_BUCKET + 1], dtype=np.int64) << _BUCKET_SHIFT
            low, high = edges.view(np.float64).tolist()
            return min(max(int((low + high) // 2), least), most)
    return most
