"""Communication between GPUs in one session: how long NCCL's kernels ran, how much of that other kernels ran too, and
when single collectives began, so that ranks can be compared.

A kernel is NCCL's by its name (``sources.nccl_kernels``). Time is the union of intervals, so that kernels on several
streams count once; overlap is that of HTA and TraceLens: the time in which both a communication kernel and another one
ran. It is meaningful for one GPU only.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gpuflight.events.activity.busy import Busy
from gpuflight.events.arrays import numpy
from gpuflight.events.batch import Batch
from gpuflight.sources.nccl_kernels import UNCLASSIFIED, classify

_TOGETHER = frozenset(("AllReduce", "AllGather", "ReduceScatter", "AlltoAll", "AllToAll"))
"""Operations that no rank ends before all have begun."""
_SYNC_NORMS = ("batch_norm_reduce_statistics_kernel", "welford_kernel_parallel")
"""What synchronised batch norms of PyTorch and apex launch once per call, and nothing else does: the kernel that puts
the statistics of all ranks together."""
_MOST_NAMES = 10
MARKS = 32
"""Collectives whose times are kept: the last whose number is a multiple of a power of two, which grows until they span
``MARKS_NS``. Ranks that look at different moments, or have powers of their own, still have numbers in common."""
MARKS_NS = 30_000_000_000
_MOST_STREAMS = 64


class Mark(msgspec.Struct, frozen=True):
    """The collective of this number (from 0) on its stream; UNIX ns by the clock of its host."""

    number: int
    operation: str
    start_ns: int
    end_ns: int


class CommunicationSum(msgspec.Struct):
    """Sums since the session's beginning. ``kernels``: launches of NCCL's kernels, ``unclassified`` of them with names
    that fit no known scheme. ``active_ns``: some of them ran; ``overlapped_ns``: another kernel did, too. ``marks``: of
    the stream with most collectives. ``sync_norms``: synchronised batch norms (forward)."""

    kernels: int = 0
    total_ns: int = 0
    active_ns: int = 0
    overlapped_ns: int = 0
    unclassified: int = 0
    unclassified_names: list[str] = msgspec.field(default_factory=list)
    timed: bool = False
    marks: list[Mark] = msgspec.field(default_factory=list)
    sync_norms: int = 0


class _Lane:
    """Collectives of one stream."""

    def __init__(self) -> None:
        self.count = 0
        self.stride = 1
        self.marks: list[Mark] = []

    def add(self, starts: Any, ends: Any, operations: list[str]) -> None:
        """Of one batch, in the order of their starts."""
        first = -self.count % self.stride
        for at in range(first, len(starts), self.stride):
            if operations[at] in _TOGETHER:
                self.marks.append(Mark(self.count + at, operations[at], int(starts[at]), int(ends[at])))
        self.count += len(starts)
        while len(self.marks) > MARKS:
            if self.marks[-1].start_ns - self.marks[-MARKS].start_ns >= MARKS_NS:
                del self.marks[:-MARKS]
            else:
                self.stride *= 2
                self.marks = [mark for mark in self.marks if mark.number % self.stride == 0]


class Communication:
    """Takes batches of ``name`` and ``kernel``. Costs nothing until a kernel of NCCL was named."""

    def __init__(self) -> None:
        self._operations: dict[int, str] = {}
        self._norms: set[int] = set()
        self._ids: Any = None
        self._sums = CommunicationSum()
        self._unclassified: dict[int, str] = {}
        self._busy, self._others, self._either = Busy(), Busy(), Busy()
        self._lanes: dict[int, _Lane] = {}

    def names(self, batch: Batch) -> None:
        """Rows of ``name``."""
        columns = batch.columns
        for dictionary, identifier, text in zip(
            columns["dictionary"], columns["id"].tolist(), columns["text"], strict=True
        ):
            if dictionary != "kernel" or not text:
                continue
            if any(norm in text for norm in _SYNC_NORMS):
                self._norms.add(identifier)
            kernel = classify(text)
            if kernel is not None:
                self._operations[identifier] = kernel.operation
                if kernel.operation == UNCLASSIFIED:
                    self._unclassified[identifier] = text
                self._ids = None

    def kernels(self, batch: Batch) -> None:
        """Rows of ``kernel``."""
        kernels = batch.columns.get("kernel_id")
        if kernels is None:
            return
        np = numpy()
        for norm in self._norms:
            self._sums.sync_norms += int(np.count_nonzero(kernels == norm))
        if not self._operations:
            return
        if self._ids is None:
            self._ids = np.array(sorted(self._operations), dtype=np.int64)
        ours = np.isin(kernels, self._ids)
        found = int(np.count_nonzero(ours))
        if not found and not self._sums.kernels:
            return
        self._sums.kernels += found
        for identifier in self._unclassified:
            self._sums.unclassified += int(np.count_nonzero(kernels == identifier))
        durations = batch.columns.get("duration_ns")
        if durations is None:
            return
        self._sums.total_ns += int(np.maximum(durations[ours], 0).sum())
        starts = batch.columns.get("start_ns")
        if starts is None or batch.clock != "wall":
            return
        self._sums.timed = True
        self._busy.add(starts[ours], durations[ours])
        self._others.add(starts[~ours], durations[~ours])
        self._either.add(starts, durations)
        streams = batch.columns.get("stream_id")
        if streams is not None and found:
            self._mark(kernels[ours], streams[ours], starts[ours], durations[ours])

    def _mark(self, kernels: Any, streams: Any, starts: Any, durations: Any) -> None:
        np = numpy()
        for stream in np.unique(streams).tolist():
            lane = self._lanes.get(stream)
            if lane is None:
                if len(self._lanes) >= _MOST_STREAMS:
                    continue
                lane = self._lanes[stream] = _Lane()
            on = np.flatnonzero(streams == stream)
            on = on[np.argsort(starts[on], kind="stable")]
            names = [self._operations[identifier] for identifier in kernels[on].tolist()]
            lane.add(starts[on], starts[on] + durations[on], names)

    def result(self) -> CommunicationSum:
        """A copy of what is known now."""
        now = self._sums
        made = CommunicationSum(now.kernels, now.total_ns, 0, 0, now.unclassified)
        made.unclassified_names = sorted(self._unclassified.values())[:_MOST_NAMES]
        made.sync_norms = now.sync_norms
        if now.timed:
            made.timed = True
            made.active_ns = self._busy.busy_ns
            made.overlapped_ns = max(made.active_ns + self._others.busy_ns - self._either.busy_ns, 0)
        lane = max(self._lanes.items(), key=lambda item: (item[1].count, -item[0]), default=None)
        made.marks = list(lane[1].marks) if lane is not None else []
        return made
