"""When the GPUs of a session work at all, the gaps between, and what each gap waited for.

Kernels, copies and fills of all streams of a GPU together: the union of their intervals; of several GPUs the sums. A
gap is *host wait* if the call that launched the work which ended it began only after the work before had ended (the
definition of ``breakdown_analysis`` in HTA, Holistic Trace Analysis): then nothing could have run. It is known only of
work whose log tells the time of the call.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from gpuflight.events.arrays import numpy

LONG_GAP_NS = 500_000_000
"""A gap of which people are told one by one; as in the rule ``gpu_gaps`` of NVIDIA Nsight Systems."""
DELAY_NS = 100_000
"""A kernel starts later than this after its call although the GPU was idle: an outlier (a constant of HTA)."""
_ROWS_AT_ONCE = 1 << 16
_EARLY = 1024
_MOST_GPUS = 256
_OPEN = 1024
"""Merged intervals that may still grow; as in ``busy``."""


@dataclass
class Gaps:
    """Sums over gaps, ns. ``known_ns``: of those whose end has a known call. ``launches``: kernels that were called
    while the GPUs were idle; ``delayed`` of them began more than 100 µs after the call."""

    count: int = 0
    total_ns: int = 0
    long: int = 0
    long_ns: int = 0
    max_ns: int = 0
    max_at_ns: int = 0
    known_ns: int = 0
    host_wait_ns: int = 0
    launches: int = 0
    delayed: int = 0

    def plus(self, other: Gaps) -> Gaps:
        """Both together."""
        both = Gaps(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Gaps)})
        longer = self if self.max_ns >= other.max_ns else other
        both.max_ns, both.max_at_ns = longer.max_ns, longer.max_at_ns
        return both


class Timeline:
    """Takes rows in any order within reason. ``first_ns`` and ``latest_ns``: from when to when work is told of."""

    def __init__(self) -> None:
        np = numpy()
        self.first_ns = 0
        self.latest_ns = 0
        self._closed_ns = 0
        self._closed_until = 0
        self._closed = Gaps()
        self._open: tuple[Any, ...] = tuple(np.empty(0, np.int64) for _ in range(4))  # start, end, call, kernel
        self._waiting: list[tuple[Any, Any, Any, Any]] = []
        self._rows = 0

    def add(self, starts: Any, durations: Any, calls: Any | None, *, kernels: bool) -> None:
        """``calls``: when the host called for each (UNIX ns, 0 unknown); None where the log does not say."""
        np = numpy()
        if len(starts):
            calls = np.zeros(len(starts), np.int64) if calls is None else calls
            self._waiting.append((starts, durations, calls, np.full(len(starts), int(kernels), np.int64)))
            self._rows += len(starts)
            if self._rows >= _ROWS_AT_ONCE:
                self._merge()

    def result(self) -> tuple[int, Gaps]:
        """(ns in which something ran, the gaps between)."""
        self._merge()
        starts, ends, _, _ = self._open
        return self._closed_ns + int((ends - starts).sum()), self._closed.plus(self._gaps(*self._open))

    def _merge(self) -> None:
        if not self._waiting:
            return
        np = numpy()
        fresh, lasted, calls, kernels = (np.concatenate(parts) for parts in zip(*self._waiting, strict=True))
        self._waiting, self._rows = [], 0
        sane = (fresh > 0) & (lasted >= 0) & (lasted < 1 << 60) & (fresh < 1 << 62)
        if not sane.all():
            fresh, lasted, calls, kernels = fresh[sane], lasted[sane], calls[sane], kernels[sane]
        if not len(fresh):
            return
        self.latest_ns = max(self.latest_ns, int((fresh + lasted).max()))
        self.first_ns = min(self.first_ns or int(fresh.min()), int(fresh.min()))
        starts = np.concatenate([self._open[0], np.maximum(fresh, self._closed_until)])
        ends = np.concatenate([self._open[1], fresh + lasted])
        calls = np.concatenate([self._open[2], calls])
        kernels = np.concatenate([self._open[3], kernels])
        order = np.argsort(starts, kind="stable")
        order = order[ends[order] > starts[order]]
        if not len(order):
            return
        starts, ends = starts[order], ends[order]
        reach = np.maximum.accumulate(ends)
        begins = np.flatnonzero(np.concatenate([[True], starts[1:] > reach[:-1]]))
        ends = reach[np.append(begins[1:], len(reach)) - 1]
        merged = starts[begins], ends, calls[order[begins]], kernels[order[begins]]
        close = max(len(begins) - _OPEN, 0)
        if close:
            closing = tuple(column[:close] for column in merged)
            self._closed = self._closed.plus(self._gaps(*closing))
            self._closed_ns += int((closing[1] - closing[0]).sum())
            self._closed_until = int(closing[1][-1])
        self._open = tuple(column[close:] for column in merged)

    def _gaps(self, starts: Any, ends: Any, calls: Any, kernels: Any) -> Gaps:
        """The gaps before each of some merged intervals; the very first has none."""
        np = numpy()
        if not len(starts):
            return Gaps()
        before = np.concatenate([[self._closed_until], ends[:-1]])
        chosen = slice(None) if self._closed_until else slice(1, None)
        starts, before, calls, kernels = starts[chosen], before[chosen], calls[chosen], kernels[chosen]
        if not len(starts):
            return Gaps()
        lasted = starts - before
        known, host = calls > 0, calls >= before
        longest = int(np.argmax(lasted))
        large = lasted > LONG_GAP_NS
        launched = host & (kernels == 1) & (calls <= starts)
        return Gaps(
            count=int(np.count_nonzero(lasted)),
            total_ns=int(lasted.sum()),
            long=int(np.count_nonzero(large)),
            long_ns=int(lasted[large].sum()),
            max_ns=int(lasted[longest]),
            max_at_ns=int(before[longest]),
            known_ns=int(lasted[known].sum()),
            host_wait_ns=int(lasted[host].sum()),
            launches=int(np.count_nonzero(launched)),
            delayed=int(np.count_nonzero(launched & (starts - calls > DELAY_NS))),
        )


class Timelines:
    """One timeline per GPU where the log names the GPU of kernels, else one for all work. What comes before the first
    kernel waits for it, since batches of older logs name the GPU of some kinds of work only."""

    def __init__(self) -> None:
        self._by_gpu: dict[int, Timeline] = {}
        self._named: bool | None = None
        self._early: list[tuple[Any, Any, Any | None, Any | None]] = []

    def add(self, starts: Any, durations: Any, calls: Any | None, gpus: Any | None, *, kernels: bool) -> None:
        """As ``Timeline.add``; ``gpus``: the number of each row's GPU, None where the log does not say."""
        if self._named is None:
            if not kernels and len(self._early) < _EARLY:
                self._early.append((starts, durations, calls, gpus))
                return
            self._named = gpus is not None
            self._settle()
        self._add(starts, durations, calls, gpus, kernels)

    def _settle(self) -> None:
        early, self._early = self._early, []
        for starts, durations, calls, gpus in early:
            self._add(starts, durations, calls, gpus, False)

    def _add(self, starts: Any, durations: Any, calls: Any | None, gpus: Any | None, kernels: bool) -> None:
        if not len(starts):
            return
        if self._named is False or gpus is None:
            only = next(iter(self._by_gpu)) if self._named and len(self._by_gpu) == 1 else -1
            self._of(only).add(starts, durations, calls, kernels=kernels)
            return
        first, last = int(gpus.min()), int(gpus.max())
        if first == last:
            self._of(first).add(starts, durations, calls, kernels=kernels)
            return
        for gpu in numpy().unique(gpus).tolist():
            mine = gpus == gpu
            part = None if calls is None else calls[mine]
            self._of(gpu).add(starts[mine], durations[mine], part, kernels=kernels)

    def _of(self, gpu: int) -> Timeline:
        if gpu not in self._by_gpu and len(self._by_gpu) >= _MOST_GPUS:
            gpu = -1
        timeline = self._by_gpu.get(gpu)
        if timeline is None:
            timeline = self._by_gpu[gpu] = Timeline()
        return timeline

    def result(self) -> tuple[int, int, int, int, int, Gaps] | None:
        """(GPUs, their time from their first to their last work in sum, first and latest of all, ns in which something
        ran, gaps); None of nothing."""
        if self._early:
            self._settle()
        worked, told_ns, active_ns, gaps = 0, 0, 0, Gaps()
        first_ns, latest_ns = 0, 0
        for timeline in self._by_gpu.values():
            active, more = timeline.result()
            if timeline.latest_ns:
                worked += 1
                told_ns += timeline.latest_ns - timeline.first_ns
                active_ns += active
                gaps = gaps.plus(more)
                first_ns = min(first_ns or timeline.first_ns, timeline.first_ns)
                latest_ns = max(latest_ns, timeline.latest_ns)
        return (worked, told_ns, first_ns, latest_ns, active_ns, gaps) if latest_ns else None
