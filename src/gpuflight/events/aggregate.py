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
from gpuflight.events.histogram import Histogram
from gpuflight.events.ledger import Ledger
from gpuflight.events.names import Names

_ROWS_AT_ONCE = 1 << 16
_WAITING_DETAILS = 1 << 16
"""Kernels and details of one session that may wait for each other; what waits longer is counted, not joined."""

_COMBINATIONS = 1 << 20
"""Largest table of counts that is used instead of sorting."""


_ODD = 0x9E3779B97F4A7C15
"""Multiplied by it, the upper bits of numbers depend on all of their bits."""


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


class KernelGroup(msgspec.Struct):
    """All launches of one kernel in one session. ``lanes``: (stream, device, count, total ns), -1 for unknown.

    Quantiles, ``details`` and ``occupancy`` as in KernelStats; ``p50_ns`` and ``p99_ns`` are 0 where not asked for.
    ``registers``: per thread, the most. ``shape``: the row of ``kernel_shape`` of most of its launches.
    """

    kernel_id: int
    name: str | None
    count: int
    total_ns: int
    min_ns: int
    max_ns: int
    lanes: list[tuple[int, int, int, int]]
    p50_ns: int = 0
    p99_ns: int = 0
    details: int = 0
    occupancy: float | None = None
    registers: int | None = None
    shape: dict[str, object] | None = None


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

    def groups(self, session_id: str, most: int) -> list[KernelGroup]:
        """A session's kernels over all streams and devices, longest total first; quantiles and launch details of the
        first ``most`` only."""
        kernels = self._sessions.get(session_id)
        return [] if kernels is None else kernels.groups(most)

    def waiting(self) -> int:
        """Details whose kernel has not come."""
        return sum(kernels.waiting() for kernels in self._sessions.values())


class _Kernels:
    """One session's kernels."""

    def __init__(self) -> None:
        np = numpy()
        self.names = Names()
        self._occupancy: dict[int, float] = {}
        self._configurations: dict[int, tuple[dict[str, Any], int]] = {}  # shape → the columns it came in, its row
        self._registers: dict[int, int] = {}
        self._keys: dict[tuple[int, int, int], int] = {}
        self._sums: Any = np.zeros((0, 4), dtype=np.int64)  # count, total, min, max
        self._histogram = Histogram()
        self._shapes: dict[int, int] = {}
        self._detail_counts: dict[tuple[int, int], int] = {}
        self._rows: list[tuple[Any, Any, Any, Any, Any, Any]] = []
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
            for row, shape_id in enumerate(columns["shape_id"].tolist()):
                self._configurations[shape_id] = (columns, row)
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
                    columns.get("num_regs"),
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
            for part in range(6):
                pieces = [
                    np.full(len(row[0]), -1, dtype=np.int64) if row[part] is None else row[part] for row in self._rows
                ]
                columns.append(np.concatenate(pieces))
            self._rows, self._row_count = [], 0
            kernel, stream, device, duration, corr, registers = columns
            codes = self._codes(kernel, stream, device)
            self._sum(codes, duration, registers)
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
        """A small number for each row's key, by a table over all combinations where these are not too many."""
        np = numpy()
        (kernels, k), (streams, s), (devices, d) = _dense(kernel), _dense(stream), _dense(device)
        combinations = len(kernels) * len(streams) * len(devices)
        if combinations > _COMBINATIONS:
            keys = zip(kernel.tolist(), stream.tolist(), device.tolist(), strict=True)
            return np.array([self._code(key) for key in keys], dtype=np.int64)
        index = (k * len(streams) + s) * len(devices) + d
        codes = np.zeros(combinations, dtype=np.int64)
        for cell in np.flatnonzero(np.bincount(index, minlength=combinations)).tolist():
            rest, at_device = divmod(cell, len(devices))
            at_kernel, at_stream = divmod(rest, len(streams))
            codes[cell] = self._code((int(kernels[at_kernel]), int(streams[at_stream]), int(devices[at_device])))
        return codes[index]

    def _code(self, key: tuple[int, int, int]) -> int:
        return self._keys.setdefault(key, len(self._keys))

    def _sum(self, codes: Any, duration: Any, registers: Any) -> None:
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
        for code, used in zip(present.tolist(), registers[order[starts]].tolist(), strict=True):
            if used > self._registers.get(code, 0):  # they are of the code, so one launch of each is enough
                self._registers[code] = used
        durations = duration[order]
        self._sums[present, 0] += np.diff(np.append(starts, len(ordered)))
        self._sums[present, 1] += np.add.reduceat(durations, starts)
        self._sums[present, 2] = np.minimum(self._sums[present, 2], np.minimum.reduceat(durations, starts))
        self._sums[present, 3] = np.maximum(self._sums[present, 3], np.maximum.reduceat(durations, starts))
        self._histogram.add(codes, duration, len(self._keys))

    def _join(self) -> None:
        """Details to the kernels of the same corr_id; what finds none waits, to a limit, for kernels to come."""
        np = numpy()
        corr = np.concatenate([c for c, _ in self._details])
        shape = np.concatenate([s for _, s in self._details])
        known_corr, known_codes = self._waiting_kernels
        found = np.zeros(len(corr), dtype=bool)
        if len(known_corr):
            places, found = _find(known_corr, corr)
            chosen, first = places[found], slice(None)
            if not _ascending(chosen):  # told twice, it counts once
                chosen, first = np.unique(chosen, return_index=True)
            distinct, positions = _indexed(shape[found][first])
            cells = known_codes[chosen] * len(distinct) + positions
            for cell, count in _counts(cells, len(self._keys) * len(distinct)):
                key = (cell // len(distinct), int(distinct[cell % len(distinct)]))
                self._detail_counts[key] = self._detail_counts.get(key, 0) + count
            taken = np.zeros(len(known_corr), dtype=bool)
            taken[chosen] = True
            self._waiting_kernels = (known_corr[~taken], known_codes[~taken])
        left = ~found
        self._details = [(corr[left][-_WAITING_DETAILS:], shape[left][-_WAITING_DETAILS:])] if left.any() else []
        self._detail_count = sum(len(c) for c, _ in self._details)

    def groups(self, most: int) -> list[KernelGroup]:
        self._reduce()
        sums = self._sums.tolist()
        found: dict[int, KernelGroup] = {}
        codes: dict[int, list[int]] = {}
        for (kernel_id, stream_id, device_id), code in self._keys.items():
            count, total, least, longest = sums[code]
            group = found.get(kernel_id)
            if group is None:
                name = self.names.get("kernel", kernel_id)
                group = found[kernel_id] = KernelGroup(kernel_id, name, 0, 0, least, longest, [])
            group.count += count
            group.total_ns += total
            group.min_ns, group.max_ns = min(group.min_ns, least), max(group.max_ns, longest)
            group.lanes.append((stream_id, device_id, count, total))
            codes.setdefault(kernel_id, []).append(code)
        ordered = sorted(found.values(), key=lambda g: (-g.total_ns, g.kernel_id))
        wanted = {code: group for group in ordered[:most] for code in codes[group.kernel_id]}
        weights: dict[int, int] = {}
        most_used: dict[int, tuple[int, int]] = {}
        for code, group in wanted.items():
            if (used := self._registers.get(code)) is not None:
                group.registers = max(group.registers or 0, used)
        for (code, shape_id), size in self._detail_counts.items():
            wanted_group = wanted.get(code)
            if wanted_group is None:
                continue
            if (size, shape_id) > most_used.get(wanted_group.kernel_id, (0, 0)):
                most_used[wanted_group.kernel_id] = (size, shape_id)
            wanted_group.details += size
            if (occupancy := self._occupancy.get(shape_id)) is not None:
                weights[wanted_group.kernel_id] = weights.get(wanted_group.kernel_id, 0) + size
                wanted_group.occupancy = (wanted_group.occupancy or 0.0) + occupancy * size
        for group in ordered[:most]:
            group.p50_ns, group.p99_ns = self._histogram.quantiles(
                codes[group.kernel_id], (0.5, 0.99), group.min_ns, group.max_ns
            )
            if group.occupancy is not None:
                group.occupancy /= weights[group.kernel_id]
            if (shape := self._configurations.get(most_used.get(group.kernel_id, (0, 0))[1])) is not None:
                columns, row = shape
                group.shape = {name: _plain(column[row]) for name, column in columns.items()}
        return ordered

    def stats(self, session_id: str) -> Iterable[KernelStats]:
        self._reduce()
        shapes: dict[int, dict[int, int]] = {}
        for (code, shape_id), count in self._detail_counts.items():
            shapes.setdefault(code, {})[shape_id] = count
        for (kernel_id, stream_id, device_id), code in self._keys.items():
            count, total, least, most = self._sums[code].tolist()
            median, high = self._histogram.quantiles([code], (0.5, 0.99), least, most)
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
                median,
                high,
                sum(mine.values()),
                sum(o * n for o, n in known) / weight if weight else None,
                max(mine, key=lambda s: mine[s]) if mine else None,
            )


def _plain(value: Any) -> object:
    """A number of Python's own."""
    return value.item() if hasattr(value, "item") else value


def _dense(column: Any) -> tuple[Any, Any]:
    """(values, index of each row's value): small numbers as they are, others sorted."""
    np = numpy()
    least, most = int(column.min()), int(column.max())
    if least >= -1 and most < 4096:
        return np.arange(-1, most + 1), column + 1
    values, index = np.unique(column, return_inverse=True)
    return values, index


def _ascending(values: Any) -> bool:
    """Whether each is greater than the one before."""
    return bool((values[1:] > values[:-1]).all())


def _find(values: Any, wanted: Any) -> tuple[Any, Any]:
    """(a place of each wanted one among the values, whether it is there)."""
    np = numpy()
    last = len(values) - 1
    if not _ascending(values):
        order = np.argsort(values, kind="stable")
        places = order[np.minimum(np.searchsorted(values, wanted, sorter=order), last)]
    elif int(values[-1]) - int(values[0]) == last:  # one after the other, as launches are numbered
        places = np.clip(wanted, values[0], values[-1]) - values[0]
    else:
        places = np.minimum(np.searchsorted(values, wanted), last)
    return places, values[places] == wanted


def _counts(cells: Any, limit: int) -> list[tuple[int, int]]:
    """How often each number (below the limit) occurs."""
    np = numpy()
    if limit > _COMBINATIONS:
        used, counts = np.unique(cells, return_counts=True)
    else:
        counts = np.bincount(cells, minlength=1)
        used = np.flatnonzero(counts)
        counts = counts[used]
    return list(zip(used.tolist(), counts.tolist(), strict=True))


def _indexed(values: Any) -> tuple[Any, Any]:
    """(different values, index of each row's value): by a hash where that tells them apart, else sorted."""
    np = numpy()
    slots = (values.view(np.uint64) * np.uint64(_ODD)) >> np.uint64(48)
    slots = slots.view(np.int64)
    table = np.zeros(1 << 16, dtype=np.int64)
    table[slots] = values
    if not (table[slots] == values).all():
        distinct, index = np.unique(values, return_inverse=True)
        return distinct, index
    used = np.flatnonzero(np.bincount(slots))
    distinct = table[used]
    table[used] = np.arange(len(used))
    return distinct, table[slots]
