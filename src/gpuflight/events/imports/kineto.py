"""PyTorch profiler (Kineto) traces, JSON or gzip of it.

Kernels, copies, fills, the calls that started them (joined by correlation, whichever comes first), host waits,
allocations of the caching allocator, and what runs on the host as ranges, by category. Arrows and names of lanes say
nothing that is not there already; everything else is counted (``not_imported``).

Times: µs with ns as the fraction, from ``baseTimeNanoseconds``; traces before it was there have UNIX µs.
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Iterator
from decimal import Decimal
from hashlib import blake2b
from typing import Any

import msgspec

from gpuflight.events.batch import Batch, Clock
from gpuflight.events.format.session import EPOCH_FROM_NS
from gpuflight.events.imports.base import ROWS_AT_ONCE, Rows
from gpuflight.events.imports.json_stream import TraceFile, base_of
from gpuflight.events.ledger import Ledger
from gpuflight.events.tables import COPY_KINDS

_WAITING = 500_000
"""Calls that wait for what they started, and GPU work that waits for its call; older ones go on alone."""

_COPY = re.compile(r"Memcpy\s+(\w+)\s*(?:\((\w+) -> (\w+)\))?")
_COPY_CODES = {name: code for code, name in COPY_KINDS.items()}
_WAITS = {
    "cudaEventSynchronize": 1,
    "cudaStreamWaitEvent": 2,
    "cudaStreamSynchronize": 3,
    "cudaDeviceSynchronize": 4,
    "hipEventSynchronize": 1,
    "hipStreamSynchronize": 3,
    "hipDeviceSynchronize": 4,
}
_RANGES = frozenset(("cpu_op", "user_annotation", "gpu_user_annotation", "python_function", "operator", "overhead"))
_GPU = {"kernel": "kernel", "gpu_memcpy": "memcpy", "memcpy": "memcpy", "gpu_memset": "memset", "memset": "memset"}
_CALLS = frozenset(("cuda_runtime", "cuda_driver", "runtime", "driver", "hip_runtime"))


class _Call(msgspec.Struct):
    """A call of the host; ``used``: GPU work of it was met."""

    start_ns: int
    exit_ns: int
    name_id: int
    category: str
    clock: Clock
    used: bool = False


class Kineto:
    """See the module's text."""

    kind = "PyTorch profiler"

    def __init__(self, path: str, ledger: Ledger | None = None) -> None:
        self.path = path
        self.ledger = Ledger() if ledger is None else ledger
        self.done_bytes = 0
        self._file = TraceFile(path, self.ledger, self._seen)
        self.identity = _session_id(path)
        self._rows = Rows(self.identity, self.ledger, "kineto")
        self._base_ns: int | None = None
        self._calls: OrderedDict[int, _Call] = OrderedDict()
        self._waiting: OrderedDict[int, list[tuple[str, dict[str, Any], Clock]]] = OrderedDict()
        self._first_ns: int | None = None
        self._last_ns = 0
        self._pid: int | None = None

    def __iter__(self) -> Iterator[list[Batch]]:
        for event in self._file.events():
            if self._base_ns is None:
                self._base_ns = self._find_base()
            self._event(event)
            if self._rows.count >= ROWS_AT_ONCE:
                yield self._rows.take()
        for waiting in self._waiting.values():
            for table, row, clock in waiting:
                self._rows.add(table, row, clock)
        for call in self._calls.values():
            self._without_work(call)
            if self._rows.count >= ROWS_AT_ONCE:
                yield self._rows.take()
        self._finish()
        yield self._rows.take()

    def _seen(self, size: int) -> None:
        self.done_bytes += size

    def _find_base(self) -> int:
        told = self._file.head.get("baseTimeNanoseconds")
        if isinstance(told, int) and not isinstance(told, bool) and 0 <= told < 2**62:
            return told
        return base_of(self.path) or 0

    def _event(self, event: Any) -> None:
        if not isinstance(event, dict):
            self.ledger.add("not_object")
            return
        phase, category = event.get("ph"), str(event.get("cat") or "").lower()
        if phase in ("M", "s", "t", "f"):
            return
        args = event.get("args")
        args = args if isinstance(args, dict) else {}
        start_ns = self._time(event.get("ts"))
        if phase == "i" and event.get("name") == "[memory]":
            self._memory(start_ns, args)
        elif phase == "X" and start_ns is not None:
            self._slice(event, category, start_ns, _ns(event.get("dur")), args)
        elif phase == "X":
            self.ledger.add("bad_cell", subject=f"{category[:60]}.ts")
        else:
            self.ledger.add("not_imported", subject=f"{phase}: {category or event.get('name')}"[:80])

    def _slice(
        self, event: dict[str, Any], category: str, start_ns: int, took_ns: int | None, args: dict[str, Any]
    ) -> None:
        name = str(event.get("name") or "")
        if took_ns is not None and took_ns < 0:
            self.ledger.add("bad_cell", subject=f"{category[:60]}.dur")
            took_ns = None
        clock = self._clock(start_ns, took_ns)
        if category in _GPU:
            self._gpu(_GPU[category], name, start_ns, took_ns, args, clock)
            return
        if category in _CALLS:
            self._call(name, category, start_ns, took_ns, args, clock)
        elif category in _RANGES:
            row = {"start_ns": start_ns, "duration_ns": took_ns, "name_id": self._rows.text("marker", name)}
            end_ns = None if took_ns is None else start_ns + took_ns
            self._rows.add(
                "nvtx", {**row, "end_ns": end_ns, "domain": category, "pid": self._number(event.get("pid"))}, clock
            )
            if self._pid is None and category != "gpu_user_annotation":
                self._pid = self._number(event.get("pid"))
        else:
            self.ledger.add("not_imported", subject=category[:80] or "no category")

    def _gpu(
        self, table: str, name: str, start_ns: int, took_ns: int | None, args: dict[str, Any], clock: Clock
    ) -> None:
        correlation = self._number(args.get("correlation"))
        row: dict[str, Any] = {
            "start_ns": start_ns,
            "duration_ns": took_ns,
            "stream_id": self._number(args.get("stream")),
            "device_id": self._number(args.get("device")),
            "corr_id": correlation,
        }
        if table == "kernel":
            row["kernel_id"] = self._rows.text("kernel", name)
            row["num_regs"] = self._number(args.get("registers per thread"))
            self._shape(correlation, args, clock)
        else:
            row["bytes"] = self._number(args.get("bytes"))
        if table == "memcpy":
            found = _COPY.search(name)
            if found is not None:
                row["copy_kind"] = _COPY_CODES.get(found[1])
                row["src_kind"], row["dst_kind"] = found[2], found[3]
        call = self._calls.get(correlation) if correlation is not None else None
        if call is not None:
            call.used = True
            row["api_start_ns"], row["api_exit_ns"] = call.start_ns, call.exit_ns
        elif correlation:
            self._waiting.setdefault(correlation, []).append((table, row, clock))
            if len(self._waiting) > _WAITING:
                for late in self._waiting.popitem(last=False)[1]:
                    self._rows.add(*late)
            return
        self._rows.add(table, row, clock)

    def _shape(self, correlation: int | None, args: dict[str, Any], clock: Clock) -> None:
        fields: dict[str, Any] = {}
        for of in ("grid", "block"):
            sides = args.get(of)
            if isinstance(sides, list) and len(sides) == 3:
                fields.update({f"{of}_{axis}": self._number(side) for axis, side in zip("xyz", sides, strict=True)})
        occupancy = args.get("est. achieved occupancy %")
        if isinstance(occupancy, (int, Decimal)) and not isinstance(occupancy, bool):
            fields["occupancy"] = float(occupancy) / 100
        shape = self._rows.shape(fields)
        if shape is not None and correlation is not None:
            self._rows.add("kernel_detail", {"corr_id": correlation, "shape_id": shape}, clock)

    def _call(
        self, name: str, category: str, start_ns: int, took_ns: int | None, args: dict[str, Any], clock: Clock
    ) -> None:
        """A call of the host: a wait, or one that may have started GPU work; what has not becomes a range."""
        correlation = self._number(args.get("correlation"))
        code = _WAITS.get(name.partition("_v")[0])
        if code is not None:
            row = {"start_ns": start_ns, "duration_ns": took_ns, "sync_type": code, "corr_id": correlation}
            self._rows.add("sync", {**row, "stream_id": self._number(args.get("stream"))}, clock)
            return
        call = _Call(start_ns, start_ns + (took_ns or 0), self._rows.text("marker", name), category, clock)
        if correlation is None or correlation in self._calls:
            self._without_work(call)
            return
        self._calls[correlation] = call
        for table, row, when in self._waiting.pop(correlation, ()):
            call.used = True
            row["api_start_ns"], row["api_exit_ns"] = call.start_ns, call.exit_ns
            self._rows.add(table, row, when)
        if len(self._calls) > _WAITING:
            self._without_work(self._calls.popitem(last=False)[1])

    def _without_work(self, call: _Call) -> None:
        if not call.used:
            row = {"start_ns": call.start_ns, "end_ns": call.exit_ns, "duration_ns": call.exit_ns - call.start_ns}
            self._rows.add("nvtx", {**row, "name_id": call.name_id, "domain": call.category}, call.clock)

    def _memory(self, time_ns: int | None, args: dict[str, Any]) -> None:
        size, address = self._number(args.get("Bytes")), self._number(args.get("Addr"))
        if size is None or address is None or time_ns is None:
            self.ledger.add("bad_cell", subject="[memory]")
            return
        on_gpu = args.get("Device Type") != 0
        row = {
            "start_ns": time_ns,
            "memory_op": 1 if size >= 0 else 2,
            "memory_kind": 3 if on_gpu else 1,
            "address": address % 2**64,
            "bytes": abs(size),
            "device_id": self._number(args.get("Device Id")) if on_gpu else None,
        }
        self._rows.add("allocation", row, self._clock(time_ns, None))

    def _finish(self) -> None:
        """What the head says of devices, and when the session began and ended."""
        devices = self._file.head.get("deviceProperties")
        for device in devices if isinstance(devices, list) else ():
            if isinstance(device, dict) and self._number(device.get("id")) is not None:
                memory = self._number(device.get("totalGlobalMem"))
                self._rows.add(
                    "device",
                    {
                        "device_id": device["id"],
                        "name": device.get("name"),
                        "total_mib": None if memory is None else memory // 1024**2,
                        "compute_major": device.get("computeMajor"),
                        "compute_minor": device.get("computeMinor"),
                        "multi_processor_count": device.get("numSms"),
                        "warp_size": device.get("warpSize"),
                        "regs_per_block": device.get("regsPerBlock"),
                        "shared_mem_per_block_bytes": device.get("sharedMemPerBlock"),
                    },
                )
        if self._first_ns is None:
            return
        who = {"pid": self._pid, "app": os.path.basename(self.path).partition(".")[0] or None}
        begin = {"time_ns": self._first_ns, **who, "session_kind": "trace", "profiling_engine": "kineto"}
        self._rows.add("session_start", {**begin, "log_path": self.path})
        self._rows.add("session_end", {"time_ns": self._last_ns, **who})

    def _time(self, value: Any) -> int | None:
        ns = _ns(value)
        return None if ns is None else ns + (self._base_ns or 0)

    def _clock(self, start_ns: int, took_ns: int | None) -> Clock:
        if start_ns < EPOCH_FROM_NS:
            self.ledger.add("implausible_time")
            return "unplaced"
        self._first_ns = start_ns if self._first_ns is None else min(self._first_ns, start_ns)
        self._last_ns = max(self._last_ns, start_ns + (took_ns or 0))
        return "wall"

    @staticmethod
    def _number(value: Any) -> int | None:
        return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63 else None


def _ns(value: Any) -> int | None:
    """ns of µs; None if it is no such number."""
    if isinstance(value, bool) or not isinstance(value, (int, Decimal)):
        return None
    if isinstance(value, Decimal) and not (value.is_finite() and abs(value.adjusted()) < 30):
        return 0 if value.is_finite() and value == 0 else None
    ns = round(value * 1000)
    return ns if abs(ns) < 2**62 else None


def _session_id(path: str) -> str:
    """The same for the same content: its first MiB, its last, its size."""
    digest = blake2b(digest_size=8)
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        digest.update(file.read(1 << 20))
        file.seek(max(size - (1 << 20), 0))
        digest.update(file.read(1 << 20))
    digest.update(str(size).encode())
    return f"kineto-{digest.hexdigest()}"
