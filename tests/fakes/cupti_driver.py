"""CUPTI without a GPU: the real record classes of cupti-python, filled with made-up values; only what would talk to a
driver (registration, switching on and off, flushing, the clock) is played."""

from __future__ import annotations

import ctypes
import time
from functools import cache
from typing import Any

from cupti import cupti

KINDS = cupti.ActivityKind
_kept: list[Any] = []


class CuptiError(Exception):
    """As the binding raises them."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{cupti.Result(status).name} ({status})")
        self.status = status


class FakeCupti:
    """Stands in for the module ``cupti.cupti``. ``refuse``: function → status it fails with; ``refuse_kinds``: kinds.

    ``emit`` puts records into CUPTI's buffer; they are delivered when it flushes, or by ``deliver``.
    """

    def __init__(self) -> None:
        self.refuse: dict[str, int | Exception] = {}
        self.holder = ""
        self.refuse_kinds: dict[int, int] = {}
        self.enabled: set[int] = set()
        self.calls: list[str] = []
        self.dropped = 0
        self.skew_ns = 0
        self.external: list[tuple[int, int]] = []
        self.subscribed: Any = None
        self.callbacks: set[tuple[int, int]] = set()
        self._records: list[Any] = []
        self._requested: Any = None
        self._completed: Any = None
        self._corr = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(cupti, name)

    # what the recorder calls

    def get_timestamp(self) -> int:
        self._call("get_timestamp")
        return time.time_ns() + self.skew_ns

    def activity_register_callbacks(self, requested: Any, completed: Any) -> None:
        self._call("activity_register_callbacks")
        self._requested, self._completed = requested, completed

    def activity_enable(self, kind: int) -> None:
        self._call("activity_enable")
        if kind in self.refuse_kinds:
            raise CuptiError(self.refuse_kinds[kind])
        self.enabled.add(kind)

    def activity_disable(self, kind: int) -> None:
        self.enabled.discard(kind)

    def activity_enable_runtime_api(self, number: int, on: int) -> None:
        self._call("activity_enable_runtime_api")
        self.enabled.add(int(KINDS.RUNTIME))

    def activity_enable_driver_api(self, number: int, on: int) -> None:
        self._call("activity_enable_driver_api")

    def activity_flush_all(self, flag: int) -> None:
        self._call("activity_flush_all")
        self.deliver()

    def activity_flush_period(self, milliseconds: int) -> None:
        self._call("activity_flush_period")

    def activity_get_num_dropped_records(self, context: int, stream: int, place: int) -> None:
        self._call("activity_get_num_dropped_records")
        ctypes.c_size_t.from_address(place).value = self.dropped
        self.dropped = 0

    def activity_push_external_correlation_id(self, kind: int, identifier: int) -> None:
        self._call("activity_push_external_correlation_id")
        self.external.append((kind, identifier))

    def activity_pop_external_correlation_id(self, kind: int) -> int:
        return self.external.pop()[1]

    def subscribe_v2(self, callback: Any, userdata: Any, parameters: int) -> int:
        if self.holder:
            place = ctypes.c_uint64.from_address(parameters + 16).value
            ctypes.memmove(place, self.holder.encode() + b"\0", len(self.holder) + 1)
        self._call("subscribe_v2")
        self.subscribed = callback
        return 1

    def unsubscribe(self, subscriber: int) -> None:
        self.subscribed = None

    def enable_callback(self, on: int, subscriber: int, domain: int, number: int) -> None:
        self._call("enable_callback")
        self.callbacks.add((domain, number))

    def _call(self, name: str) -> None:
        self.calls.append(name)
        refused = self.refuse.get(name)
        if isinstance(refused, Exception):
            raise refused
        if refused is not None:
            raise CuptiError(refused)

    # what a program and its GPU do

    def emit(self, *records: Any) -> None:
        """Into CUPTI's buffer, if the kind is switched on."""
        self._records.extend(record for record in records if record.kind in self.enabled)

    def deliver(self) -> None:
        if self._completed is not None and self._records:
            self._requested()
            records, self._records = self._records, []
            self._completed(records)

    def launch(
        self, name: str = "kernel", *, start_ns: int | None = None, duration_ns: int = 1000, **values: Any
    ) -> int:
        """A kernel runs; answers its correlation id. Ranges that are pushed tell themselves of it."""
        self._corr += 1
        start = time.time_ns() if start_ns is None else start_ns
        if self.external:
            kind, identifier = self.external[-1]
            self.emit(external(self._corr, kind, identifier))
        self.emit(
            kernel(name, start + self.skew_ns, start + duration_ns + self.skew_ns, correlation_id=self._corr, **values)
        )
        return self._corr


def _filled(record: Any, **values: Any) -> Any:
    for name, value in values.items():
        setattr(record, name, value)
    if "name" in values or "domain" in values:
        _kept.append(record)  # the texts live as long as their record
    return record


@cache
def _newest(stem: str) -> Any:
    """The newest class of a kind of record."""
    found = [n for n in dir(cupti) if n.startswith(stem) and n.removeprefix(stem).isdigit()]
    return getattr(cupti, max(found, key=lambda n: int(n.removeprefix(stem))) if found else stem)


_names: dict[str, Any] = {}


def kernel(name: str, start: int, end: int, **values: Any) -> Any:
    """Of one name the same pointer, as CUPTI has it."""
    facts = {"registers_per_thread": 32, "grid_x": 64, "grid_y": 1, "grid_z": 1, "block_x": 128, "block_y": 1}
    facts |= {"block_z": 1, "device_id": 0, "stream_id": 7, "context_id": 1, **values}
    made = _newest("ActivityKernel")()
    made.kind = int(KINDS.CONCURRENT_KERNEL)
    if name not in _names:
        holder = _newest("ActivityKernel")()
        holder.name = name
        _names[name] = (holder, _pointer(holder, "name"))
    _set_pointer(made, "name", _names[name][1])
    return _filled(made, start=start, end=end, **facts)


def memcpy(start: int, end: int, **values: Any) -> Any:
    facts = {"bytes": 4096, "copy_kind": 1, "src_kind": 1, "dst_kind": 3, "stream_id": 7, "device_id": 0}
    facts |= {"correlation_id": 1, **values}
    return _filled(_newest("ActivityMemcpy")(), kind=int(KINDS.MEMCPY), start=start, end=end, **facts)


def peer_copy(start: int, end: int, **values: Any) -> Any:
    facts = {"bytes": 4096, "copy_kind": 10, "stream_id": 7, "device_id": 0, "correlation_id": 1, **values}
    return _filled(_newest("ActivityMemcpyPtoP")(), kind=int(KINDS.MEMCPY2), start=start, end=end, **facts)


def memset(start: int, end: int, **values: Any) -> Any:
    facts = {"bytes": 4096, "stream_id": 7, "device_id": 0, "correlation_id": 1, **values}
    return _filled(_newest("ActivityMemset")(), kind=int(KINDS.MEMSET), start=start, end=end, **facts)


def wait(start: int, end: int, **values: Any) -> Any:
    facts = {"type": 3, "stream_id": 7, "context_id": 1, "correlation_id": 1, **values}
    return _filled(_newest("ActivitySynchronization")(), kind=int(KINDS.SYNCHRONIZATION), start=start, end=end, **facts)


def allocation(timestamp: int, **values: Any) -> Any:
    facts = {"memory_operation_type": 1, "memory_kind": 3, "bytes": 1 << 20, "address": 0x7F00_0000_0000}
    facts |= {"device_id": 0, "stream_id": 0, "correlation_id": 1, **values}
    return _filled(_newest("ActivityMemory")(), kind=int(KINDS.MEMORY2), timestamp=timestamp, **facts)


def overhead(start: int, end: int, overhead_kind: int) -> Any:
    return _filled(
        _newest("ActivityOverhead")(), kind=int(KINDS.OVERHEAD), start=start, end=end, overhead_kind=overhead_kind
    )


def marker(timestamp: int, identifier: int, flags: int, name: str = "", domain: str = "") -> Any:
    made = _filled(
        _newest("ActivityMarker")(), kind=int(KINDS.MARKER), timestamp=timestamp, id=identifier, flags_=flags
    )
    return _filled(made, name=name, domain=domain) if name else made


def external(correlation_id: int, kind: int, identifier: int) -> Any:
    return _filled(
        cupti.ActivityExternalCorrelation(),
        kind=int(KINDS.EXTERNAL_CORRELATION),
        correlation_id=correlation_id,
        external_kind=kind,
        external_id=identifier,
    )


def call(start: int, end: int, correlation_id: int, **values: Any) -> Any:
    return _filled(
        cupti.ActivityAPI(), kind=int(KINDS.RUNTIME), start=start, end=end, correlation_id=correlation_id, **values
    )


def graph(start: int, end: int, **values: Any) -> Any:
    facts = {"graph_id": 3, "stream_id": 7, "device_id": 0, "correlation_id": 1, **values}
    return _filled(_newest("ActivityGraphTrace")(), kind=int(KINDS.GRAPH_TRACE), start=start, end=end, **facts)


def device(number: int, uuid: bytes, name: str, **values: Any) -> Any:
    """With the limits of an H200."""
    import numpy as np

    dtype = cupti.activity_device6_dtype
    row = np.zeros(1, dtype=dtype)
    facts = {"id": number, "num_multiprocessors": 132, "max_warps_per_multiprocessor": 64, "num_threads_per_warp": 32}
    facts |= {"max_blocks_per_multiprocessor": 32, "max_registers_per_multiprocessor": 65536}
    facts |= {"max_registers_per_block": 65536, "max_shared_memory_per_multiprocessor": 233_472}
    facts |= {
        "max_shared_memory_per_block": 49_152,
        "compute_capability_major": 9,
        "l2cache_size": 62_914_560,
        **values,
    }
    for key, value in {"kind": int(KINDS.DEVICE), **facts}.items():
        row[key] = value
    row["uuid"] = np.frombuffer(uuid, dtype="V16")
    text = ctypes.create_string_buffer(name.encode())
    row["name"] = ctypes.addressof(text)
    _kept.append((text, row))
    return cupti.ActivityDevice6.from_data(row)


def _pointer(record: Any, name: str) -> int:
    dtype = cupti.activity_kernel13_dtype
    return ctypes.c_int64.from_address(record.ptr + dtype.fields[name][1]).value


def _set_pointer(record: Any, name: str, value: int) -> None:
    dtype = cupti.activity_kernel13_dtype
    ctypes.c_int64.from_address(record.ptr + dtype.fields[name][1]).value = value
