"""Context switches and storage I/O of the processes that matter: each costs several files, so few are read."""

from __future__ import annotations

from collections.abc import Sequence

from gpuflight.collectors.process_facts import NO_RIGHT
from gpuflight.collectors.rates import FIRST_READING
from gpuflight.sources.procfs import ProcFs, ProcStat

_SWITCHES = ("context_switches_voluntary_per_s", "context_switches_involuntary_per_s")
_IO = {"read_bytes": "io_read_bytes_per_s", "write_bytes": "io_write_bytes_per_s"}
_TOO_MANY_THREADS = "too many threads to read them all each round"


class DetailReader:
    """Reads the chosen processes' counters once per round and turns them into rates."""

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self.chosen: set[int] = set()
        self._now_s = 0.0
        self._switches: dict[str, tuple[float, dict[int, tuple[int, int]]]] = {}  # by process: when, by tid
        self._io: dict[str, tuple[float, dict[str, int]]] = {}

    def begin(self, procfs: ProcFs, now_s: float, chosen: Sequence[ProcStat]) -> None:
        """Open a round at ``now_s``; ``chosen`` are the processes worth reading, the most important first."""
        self._procfs = procfs
        self._now_s = now_s
        self.chosen = {stat.pid for stat in chosen}
        self._readable: set[int] = set()
        threads = 0
        for stat in chosen:
            threads += stat.threads
            if threads > self._max_threads:
                break
            self._readable.add(stat.pid)
        ids = {stat.id for stat in chosen}
        self._switches = {key: value for key, value in self._switches.items() if key in ids}
        self._io = {key: value for key, value in self._io.items() if key in ids}

    def add(self, stat: ProcStat, metrics: dict[str, int | float], unknown: dict[str, str]) -> None:
        """Put the rates of a chosen process, or why they are unknown, among its metrics; of others nothing."""
        if stat.pid not in self.chosen:
            return
        self._add_switches(stat, metrics, unknown)
        self._add_io(stat, metrics, unknown)

    def _add_switches(self, stat: ProcStat, metrics: dict[str, int | float], unknown: dict[str, str]) -> None:
        """Summed over the threads: the kernel counts per thread, and the process's own file is its main thread's."""
        reason = ""
        if stat.pid not in self._readable:
            reason = _TOO_MANY_THREADS
        else:
            try:
                counts = self._procfs.switches(stat.pid)
            except OSError as error:
                reason = error.strerror or "cannot be read"
        if reason:
            self._switches.pop(stat.id, None)
            unknown.update(dict.fromkeys(_SWITCHES, reason))
            return
        last = self._switches.get(stat.id)
        self._switches[stat.id] = (self._now_s, counts)
        if last is None or self._now_s <= last[0]:
            unknown.update(dict.fromkeys(_SWITCHES, FIRST_READING))
            return
        elapsed_s = self._now_s - last[0]
        for position, name in enumerate(_SWITCHES):
            # A thread born since counts from 0; what one that ended did since is lost with it.
            total = sum(max(0, now[position] - last[1].get(tid, (0, 0))[position]) for tid, now in counts.items())
            metrics[name] = total / elapsed_s

    def _add_io(self, stat: ProcStat, metrics: dict[str, int | float], unknown: dict[str, str]) -> None:
        try:
            counts = self._procfs.io(stat.pid)
        except PermissionError:
            unknown.update(dict.fromkeys(_IO.values(), NO_RIGHT))
            return
        except (OSError, ValueError):
            unknown.update(dict.fromkeys(_IO.values(), "the kernel keeps no account of it"))
            return
        last = self._io.get(stat.id)
        self._io[stat.id] = (self._now_s, counts)
        for field, name in _IO.items():
            if field not in counts:
                unknown[name] = "the kernel keeps no account of it"
            elif last is None or self._now_s <= last[0]:
                unknown[name] = FIRST_READING
            else:
                metrics[name] = max(0, counts[field] - last[1].get(field, 0)) / (self._now_s - last[0])
