"""How a session's work comes about: how it is launched, copied, waited for, and what its instructions wait for.

Counters only, each a few array operations per batch, so that they can be kept while the program runs.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gpuflight.events.activity.steps import PauseSum, Steps, StepSum, kind_of
from gpuflight.events.activity.sums import Sums
from gpuflight.events.activity.timeline import Gaps, Timelines
from gpuflight.events.arrays import numpy
from gpuflight.events.batch import Batch
from gpuflight.events.names import Names
from gpuflight.events.tables import COPY_KINDS

SHORT_NS = 10_000
"""A kernel below this is short (TraceLens, HTA)."""
SLOW_CALL_NS = 50_000
"""A launch call above this is slow (a constant of HTA)."""
SMALL_BYTES = 64 << 10
BIG_BYTES = 1 << 20
_BLOCKED_NS = 20_000
"""A copy's call below this says nothing: the copy may have ended while the call still returned."""
_EPOCH_FROM_NS = 946_684_800_000_000_000
"""Times of calls before the year 2000 are of another clock."""
_HTOD = next(code for code, name in COPY_KINDS.items() if name == "HtoD")
_THREADS_PER_WARP = 32
_NO_STALLS = ("selected", "not_selected")
"""What samples also say: an instruction was issued, or another warp was chosen. Neither is a stall."""


class CallSum(msgspec.Struct):
    """Calls of the host whose times are told: ``count``, of them ``odd``, and the time of the odd ones."""

    count: int = 0
    odd: int = 0
    odd_ns: int = 0


class WorkSum(msgspec.Struct, kw_only=True):
    """Sums since the session's beginning; None where the log has none of it.

    ``gpus`` … ``gaps``: see ``timeline``. ``invalid``: kernels without sane times.
    ``short``: kernels below 10 µs. ``graph_kernels``: launched by the call that launched the kernel before (a graph).
    ``launch_calls``: odd are those above 50 µs. ``copy_calls``: of copies and fills, odd are those that came back only
    when the copy was over. ``pageable``: copies whose kinds of memory are told, odd are those from or to pageable
    memory. ``stalls``: PC samples by what an instruction waited for. ``counters``: hardware counters by name, (sum,
    number).
    """

    gpus: int = 0
    timeline_ns: int = 0
    first_ns: int = 0
    latest_ns: int = 0
    active_ns: int = 0
    gaps: Gaps | None = None
    invalid: int = 0
    short: int = 0
    graph_kernels: int = 0
    launch_calls: CallSum | None = None
    copy_calls: CallSum | None = None
    pageable: CallSum | None = None
    pageable_bytes: int = 0
    pageable_big: int = 0
    htod_copies: int = 0
    htod_small: int = 0
    copy_ns: int = 0
    memset_ns: int = 0
    allocation_ns: int = 0
    steps: StepSum | None = None
    loader: PauseSum | None = None
    gc: PauseSum | None = None
    stalls: dict[str, int] = msgspec.field(default_factory=dict)
    stall_samples: int = 0
    instructions: int = 0
    thread_instructions: int = 0
    counters: dict[str, tuple[float, int]] = msgspec.field(default_factory=dict)


class Work:
    """Takes a session's batches."""

    def __init__(self, names: Names) -> None:
        self.steps = Steps()
        self._names = names
        self._sums = WorkSum()
        self._timelines = Timelines()
        self._samples = Sums(("sample_kind", "metric_id"), ("metric_value",))
        self._counters: dict[str, list[float]] = {}
        self._pm = Sums(("metric_id",), ("value",))

    def kernels(self, batch: Batch) -> None:
        """Rows of ``kernel``."""
        np, columns, sums = numpy(), batch.columns, self._sums
        starts, durations = columns.get("start_ns"), columns.get("duration_ns")
        if durations is not None:
            sums.short += int(np.count_nonzero((durations < SHORT_NS) & (durations >= 0)))
        corr = columns.get("corr_id")
        if corr is not None and len(corr) > 1:
            sums.graph_kernels += int(np.count_nonzero((corr[1:] == corr[:-1]) & (corr[1:] > 0)))
        if starts is None or durations is None:
            return
        sums.invalid += int(np.count_nonzero((starts <= 0) | (durations <= 0)))
        calls = _calls(batch)
        if calls is not None:
            begun, took = calls
            told = begun > 0
            line = sums.launch_calls = sums.launch_calls or CallSum()
            slow = told & (took > SLOW_CALL_NS)
            line.count += int(np.count_nonzero(told))
            line.odd += int(np.count_nonzero(slow))
            line.odd_ns += int(took[slow].sum())
        if batch.clock == "wall":
            begun = None if calls is None else calls[0]
            self._timelines.add(starts, durations, begun, columns.get("device_id"), kernels=True)

    def copies(self, batch: Batch) -> None:
        """Rows of ``memcpy``."""
        np, columns, sums = numpy(), batch.columns, self._sums
        kinds, sizes, durations = columns.get("copy_kind"), columns.get("bytes"), columns.get("duration_ns")
        if kinds is not None and sizes is not None:
            ahead = kinds == _HTOD
            sums.htod_copies += int(np.count_nonzero(ahead))
            sums.htod_small += int(np.count_nonzero(ahead & (sizes < SMALL_BYTES)))
        if durations is not None:
            sums.copy_ns += int(np.maximum(durations, 0).sum())
        sources, targets = columns.get("src_kind"), columns.get("dst_kind")
        if sources is not None and targets is not None:
            self._pageable(sources, targets, sizes, durations)
        self._moved(batch)

    def _pageable(self, sources: list[str], targets: list[str], sizes: Any, durations: Any) -> None:
        np, sums = numpy(), self._sums
        told = sums.pageable = sums.pageable or CallSum()
        slow = np.array([_pageable(one) or _pageable(other) for one, other in zip(sources, targets, strict=True)])
        told.count += sum(bool(one or other) for one, other in zip(sources, targets, strict=True))
        told.odd += int(np.count_nonzero(slow))
        if durations is not None:
            told.odd_ns += int(np.maximum(durations[slow], 0).sum())
        if sizes is not None:
            sums.pageable_bytes += int(np.maximum(sizes[slow], 0).sum())
            sums.pageable_big += int(np.count_nonzero(slow & (sizes > BIG_BYTES)))

    def fills(self, batch: Batch) -> None:
        """Rows of ``memset``."""
        durations = batch.columns.get("duration_ns")
        if durations is not None:
            self._sums.memset_ns += int(numpy().maximum(durations, 0).sum())
        self._moved(batch)

    def _moved(self, batch: Batch) -> None:
        np, columns, sums = numpy(), batch.columns, self._sums
        starts, durations = columns.get("start_ns"), columns.get("duration_ns")
        if starts is None or durations is None or batch.clock != "wall":
            return
        calls = _calls(batch)
        if calls is not None:
            begun, took = calls
            told = begun > 0
            line = sums.copy_calls = sums.copy_calls or CallSum()
            blocked = told & (took >= _BLOCKED_NS) & (begun + took >= starts + durations)
            line.count += int(np.count_nonzero(told))
            line.odd += int(np.count_nonzero(blocked))
            line.odd_ns += int(took[blocked].sum())
        begun = None if calls is None else calls[0]
        self._timelines.add(starts, durations, begun, columns.get("device_id"), kernels=False)

    def allocations(self, batch: Batch) -> None:
        """Rows of ``allocation``."""
        durations = batch.columns.get("duration_ns")
        if durations is not None:
            self._sums.allocation_ns += int(numpy().maximum(durations, 0).sum())

    def ranges(self, batch: Batch) -> None:
        """Rows of ``nvtx``: only the few whose name says that they are steps or pauses are looked at."""
        np, columns = numpy(), batch.columns
        names, starts, durations = columns.get("name_id"), columns.get("start_ns"), columns.get("duration_ns")
        if names is None or starts is None or durations is None:
            return
        texts = self._names.of("marker")
        wanted = [one for one in np.unique(names).tolist() if kind_of(texts.get(one, ""))[0]]
        if wanted:
            for at in np.flatnonzero(np.isin(names, wanted)).tolist():
                took = max(int(durations[at]), 0)
                self.steps.take(texts[int(names[at])], int(starts[at]), took)

    def samples(self, batch: Batch) -> None:
        """Rows of ``profile_sample``."""
        self._samples.add(batch.columns, batch.count)

    def counters(self, batch: Batch) -> None:
        """Rows of ``pm_sample``, ``perf_metric`` and ``kernel_perf_metric``: means of hardware counters."""
        np, columns = numpy(), batch.columns
        if batch.table == "pm_sample":
            if "metric_id" in columns and "value" in columns:
                known = ~np.isnan(columns["value"])
                kept = {name: columns[name][known] for name in ("metric_id", "value")}
                if known.any():
                    self._pm.add(kept, int(np.count_nonzero(known)))
            return
        for name in ("sm_throughput_pct", "tensor_active_pct"):
            column = columns.get(name)
            if column is not None:
                known = column[~np.isnan(column)]
                line = self._counters.setdefault(name, [0.0, 0])
                line[0] += float(known.sum())
                line[1] += len(known)

    def result(self) -> WorkSum:
        """A copy of what is known now."""
        now = self._sums
        made = WorkSum(**{name: getattr(now, name) for name in WorkSum.__struct_fields__})
        made.launch_calls, made.copy_calls, made.pageable = (
            None if line is None else CallSum(line.count, line.odd, line.odd_ns)
            for line in (now.launch_calls, now.copy_calls, now.pageable)
        )
        told = self._timelines.result()
        if told is not None:
            made.gpus, made.timeline_ns, made.first_ns, made.latest_ns, made.active_ns, made.gaps = told
        made.steps = self.steps.result()
        loader, collected = self.steps.loader, self.steps.gc
        made.loader = PauseSum(loader.count, loader.total_ns, loader.long, loader.max_ns) if loader.count else None
        made.gc = PauseSum(collected.count, collected.total_ns, collected.long, collected.max_ns)
        made.gc = made.gc if collected.count else None
        self._samples_into(made)
        made.counters = {name: (total, int(count)) for name, (total, count) in self._counters.items() if count}
        texts = self._names.of("metric")
        for (metric,), (count, total, _) in self._pm.result().items():
            if metric in texts:
                made.counters[texts[metric]] = (float(total), count)
        return made

    def _samples_into(self, made: WorkSum) -> None:
        texts = self._names.of("metric")
        made.stalls = {}
        for (kind, metric), (_, value, _) in self._samples.result().items():
            name = texts.get(metric, "")
            if name.endswith("thread_inst_executed"):
                made.thread_instructions += value
            elif name.endswith("sass_inst_executed"):
                made.instructions += value
            elif kind in (0, -1):
                made.stall_samples += value
                stall = stall_of(name)
                if stall and stall not in _NO_STALLS:
                    made.stalls[stall] = made.stalls.get(stall, 0) + value


def stall_of(metric: str) -> str:
    """``long_scoreboard`` of ``smsp__pcsamp_warps_issue_stalled_long_scoreboard_not_issued`` or ``Long Scoreboard``;
    empty if it is no stall."""
    word = metric.strip().lower().replace(" ", "_")
    if "stalled_" in word:
        word = word.rpartition("stalled_")[2]
    elif "__" in word:
        return ""
    return word.removesuffix("_not_issued")


def thread_efficiency_pct(work: WorkSum) -> float | None:
    """Threads that took part in an instruction, of 32 (%); None where it was not counted, or not in the same passes
    (an instruction has at least one thread)."""
    if not work.instructions or work.thread_instructions < work.instructions:
        return None
    return min(100.0 * work.thread_instructions / (_THREADS_PER_WARP * work.instructions), 100.0)


def _calls(batch: Batch) -> tuple[Any, Any] | None:
    """(begin of each row's call or 0, how long it took); None where the log does not say."""
    np = numpy()
    begun, ended = batch.columns.get("api_start_ns"), batch.columns.get("api_exit_ns")
    if begun is None or ended is None or batch.clock != "wall":
        return None
    told = (begun >= _EPOCH_FROM_NS) & (ended >= begun)
    if not told.any():
        return None
    return np.where(told, begun, 0), np.where(told, ended - begun, 0)


def _pageable(kind: str) -> bool:
    return kind.lower() == "pageable"
