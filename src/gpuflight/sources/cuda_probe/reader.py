"""One reading of the kernel side's maps, and taking out of them what is over."""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Iterable

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.bpf.base import ProbeObject
from gpuflight.sources.cuda_probe import decode, layouts
from gpuflight.sources.cuda_probe.rows import AllocationRow, CudaRows
from gpuflight.sources.recording import Tape

SOURCE = "cuda-probe"

_MONOTONIC_COARSE = 6
"""CLOCK_MONOTONIC_COARSE of linux/time.h, which Python does not name."""

Pairs = list[tuple[bytes, bytes]]

_KEPT = {
    "calls": ("durations", decode.call),
    "errors": ("errors", decode.error),
    "memory": ("memory", decode.memory),
    "copies": ("copies", decode.copy),
    "nccl": ("collectives", decode.collective),
    "communicators": ("communicators", decode.communicator),
}
"""Field of CudaRows → its map, and what makes a row of an entry."""


class Reader:
    """Reads the maps of one loaded object. ``over``: processes that ended without a hook having told."""

    def __init__(self, probe: ProbeObject, tape: Tape) -> None:
        self.over: set[int] = set()
        self._probe = probe
        self._tape = tape
        tick_ns = layouts.COUNT.unpack(self._tape.ask(SOURCE, "tick", lambda: layouts.COUNT.pack(_tick_ns())))[0]
        self._tick_ns = tick_ns
        self._kept = {field: decode.Kept(make) for field, (_, make) in _KEPT.items()}
        self._failed_stacks = 0
        self._gone_launches: dict[int, int] = {}  # of destroyed streams, by process
        self._flags: dict[int, int] = {}  # of processes, as last read
        self._name_keepers: set[int] = set()  # ended, but forked children go by their registered functions

    def read(self, *, allocations: bool) -> CudaRows:
        """See ``CudaProbe.read``; ``hits`` are the caller's."""
        now = layouts.COUNT.unpack(self._tape.ask(SOURCE, "now", lambda: layouts.COUNT.pack(time.monotonic_ns())))[0]
        rows = CudaRows(now)
        read = self._read
        # First the ends, so that a process whose end is known has made its last entry before the maps are read.
        rows.life, rows.environment, rows.aliases = decode.events(self._probe.drain("life"))
        ended = {event.pid: event.time_ns for event in rows.life if event.event in ("exit", "exec")}
        ended.update((pid, now) for pid in self.over if pid not in ended)
        self.over.clear()
        gone = {event.pid for event in rows.life if event.event == "exit"} | (ended.keys() - {e.pid for e in rows.life})
        maps = {name: read(name) for name in ("processes", "devices", "streams", "names")}
        packed = self._probe.read_packed("launches")
        launches = decode.launches(*packed, self._tick_ns)
        rows.launches = launches.rows
        self._sum_up(rows, launches, maps, ended)
        rows.names = decode.names(maps["names"])
        for field, (name, _) in _KEPT.items():
            maps[name] = read(name)
            setattr(rows, field, self._kept[field].rows(maps[name]))
        if any(flags & layouts.MANY_DEVICES for flags in self._flags.values()):
            maps["threads"] = read("threads")
            rows.threads = decode.threads(maps["threads"])
        if allocations or ended:
            maps["allocations"] = read("allocations")
            resets = {(row.pid, row.device): row.reset_ns for row in rows.devices if row.reset_ns}
            rows.allocations = decode.allocations(maps["allocations"], resets, None if allocations else ended.keys())
            rows.stacks = self._stacks(rows.allocations)
        names = [name for name, _ in layouts.LOSSES]
        rows.losses = {names[number]: count for number, count in self._probe.losses().items() if number < len(names)}
        if lost := self._probe.lost("life"):
            rows.losses["life"] = lost
        self._take_stacks(rows, maps)
        self._take_names(maps["names"])
        self._take_streams(rows, maps, packed)
        if ended:
            maps["launches"] = _split(packed)
            self._take_processes(maps, set(ended), gone)
        return rows

    def _read(self, name: str) -> Pairs:
        return self._probe.read(name)

    def _sum_up(self, rows: CudaRows, launches: decode.Launches, maps: dict[str, Pairs], ended: dict[int, int]) -> None:
        """Rows of processes, devices and streams: what they take from launches, and open spans up to now."""
        counts, assumed = launches.counts, launches.assumed
        for pid, gone in self._gone_launches.items():
            counts[pid] = counts.get(pid, 0) + gone
        rows.processes = decode.processes(maps["processes"], counts)
        self._flags.update(decode.flags(maps["processes"]))
        undecided = {row.pid for row in rows.processes if not row.set_device_calls}

        def now_of(pid: int) -> int:
            return ended.get(pid, rows.time_ns)

        assumed.update(at for at in launches.last_ns if at[0] in undecided)
        rows.devices = decode.devices(maps["devices"], assumed, launches.last_ns, now_of)
        rows.streams = decode.streams(maps["streams"], now_of)

    def _stacks(self, allocations: Iterable[AllocationRow]) -> dict[int, tuple[int, ...]]:
        stacks: dict[int, tuple[int, ...]] = {}
        for number in {row.stack_id for row in allocations if row.stack_id >= 0}:
            if raw := self._probe.lookup("stacks", layouts.PID.pack(number)):
                stacks[number] = tuple(address for (address,) in struct.iter_unpack("<Q", raw) if address)
        return stacks

    def hits(self, number: int) -> int:
        """Calls in the file of this number, over all CPUs."""
        raw = self._probe.lookup("hits", layouts.PID.pack(number)) or b""
        return sum(count for (count,) in struct.iter_unpack("<Q", raw))

    def clear_hits(self, number: int) -> None:
        """Count this file from 0 again."""
        key = layouts.PID.pack(number)
        with contextlib.suppress(SourceUnavailable):  # a replay that was not asked this has nothing to clear either
            self._probe.update("hits", key, bytes(len(self._probe.lookup("hits", key) or b"")))

    def _take_stacks(self, rows: CudaRows, maps: dict[str, Pairs]) -> None:
        """Stacks of memory that is long freed, once they stand in the way of new ones: the kernel never drops any."""
        failed = rows.losses.get("stacks", 0)
        if failed == self._failed_stacks:
            return
        self._failed_stacks = failed
        known = maps.get("allocations")
        pairs = self._read("allocations") if known is None else known
        used = {row.stack_id for row in decode.allocations(pairs, {}, None)}
        for key, _ in self._read("stacks"):
            if int.from_bytes(key, "little") not in used:
                self._probe.delete("stacks", key)

    def _take_names(self, pairs: Pairs) -> None:
        for key, value in pairs:
            if layouts.NAME_LENGTH.unpack_from(value)[0]:
                self._probe.delete("names", key)

    def _take_streams(self, rows: CudaRows, maps: dict[str, Pairs], packed: tuple[bytes, bytes]) -> None:
        """Destroyed streams whose work is done, and the launches on them."""
        over: set[tuple[int, int]] = set()
        ended = {(row.pid, row.stream) for row in rows.streams if row.destroyed and not row.open_since_ns}
        for key, _ in maps["streams"] if ended else ():
            pid, _, stream = layouts.STREAM_KEY.unpack(key)
            if (pid, stream) in ended and self._probe.delete("streams", key):
                over.add((pid, stream))
        for key, value in _split(packed) if over else ():
            pid, _, _, _, stream = layouts.LAUNCH_KEY.unpack(key)
            if (pid, stream) in over and self._probe.delete("launches", key):
                (count,) = layouts.COUNT.unpack_from(value)
                self._gone_launches[pid] = self._gone_launches.get(pid, 0) + count

    def _take_processes(self, maps: dict[str, Pairs], ended: set[int], gone: set[int]) -> None:
        """Everything of ended processes. One that executed another program keeps the process entry it got since."""
        flags = {pid: self._flags.pop(pid, 0) for pid in ended}
        for pid in ended:
            self._gone_launches.pop(pid, None)
        names_of = decode.inherited_names(maps["processes"])
        wanted = {of for pid, of in names_of.items() if pid not in gone}
        registered = {pid for pid in ended if flags[pid] & layouts.REGISTERED}
        self._name_keepers |= registered & wanted
        unwanted = (registered | self._name_keepers) - wanted
        self._name_keepers -= unwanted
        if unwanted:
            self._delete("registered", self._read("registered"), unwanted)
        for name in ("events", "contexts", "threads"):
            self._delete(name, maps.get(name) or self._read(name), ended)
        for name, pairs in maps.items():
            if name == "processes":
                self._delete(name, pairs, gone)
            elif name != "threads":
                self._delete(name, pairs, ended)

    def _delete(self, name: str, pairs: Pairs, pids: set[int]) -> None:
        at = 4 if name == "threads" else 0  # its key is tid, then pid
        for key, _ in pairs:
            if int.from_bytes(key[at : at + 4], "little") in pids:
                self._probe.delete(name, key)


def _split(packed: tuple[bytes, bytes]) -> Pairs:
    return decode.split(*packed, layouts.LAUNCH_KEY.size, layouts.LAUNCH.size)


def _tick_ns() -> int:
    """Length of a jiffy: what the coarse clocks resolve (clock_getres(2))."""
    return round(time.clock_getres(_MONOTONIC_COARSE) * 1e9)
