"""Chunks of records to the session's lines, by what kind they are. Attributes that a record lacks are left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from gpuflight.events.arrays import numpy
from gpuflight.events.format.writer import ROWS_PER_BATCH, SessionWriter
from gpuflight.events.recorder.correlate import Recent
from gpuflight.events.recorder.intake import Chunk
from gpuflight.events.recorder.kernels import Shapes
from gpuflight.events.recorder.layouts import Fields
from gpuflight.events.recorder.marks import Marks, texts_of
from gpuflight.events.recorder.occupancy import Limits

OVERHEADS = {
    1: "driver compiler",
    2: "CUPTI buffer flush",
    3: "CUPTI instrumentation",
    4: "CUPTI resource",
    5: "module loading",
    6: "lazy function loading",
    7: "command buffer full",
    8: "activity buffer request",
    9: "UVM activity init",
}
"""Codes of CUPTI → words. CUPTI sets bits 16 and up for its own; those are masked away."""
OVERHEAD_DOMAIN = "CUPTI overhead"
_OVERHEAD_LINES = 20_000
_AT_ONCE = 4 * ROWS_PER_BATCH
"""Records that are few enough to stay in the processor's cache while they are read column by column, and enough to be
worth the calls."""


class Translator:
    """Of one session. ``counts``: records written, by group; ``invalid``: records without sane times, dropped.

    ``offset_ns`` is added to CUPTI's times. ``stacks``: correlation id → stack, of launches that were looked at.
    """

    def __init__(self, writer: SessionWriter, pid: int, app: str) -> None:
        self.offset_ns = 0
        self.counts: Counter[str] = Counter()
        self.invalid: Counter[str] = Counter()
        self.overhead_ns: Counter[str] = Counter()
        self.stacks: dict[int, str] = {}
        self.stacks_written = 0
        self.marks = Marks()
        self.devices: dict[int, dict[str, Any]] = {}
        self._writer = writer
        self._who = {"pid": pid, "app": app}
        self._shapes = Shapes(writer, self._who)
        self._external = Recent(2)
        self._calls = Recent(2)
        self._by_group: dict[str, Callable[[Chunk, Mapping[str, Any]], int]] = {
            "kernel": self._kernels,
            "memcpy": self._copies,
            "memset": self._fills,
            "sync": self._waits,
            "memory": self._allocations,
            "overhead": self._overheads,
            "nvtx": self._markers,
            "external": self._externals,
            "api": self._api,
            "graph": self._graphs,
            "device": self._device,
        }

    @property
    def shapes_beyond(self) -> int:
        """Launches whose configuration was not written, for too many different ones had been."""
        return self._shapes.beyond

    @property
    def calls_without_record(self) -> int:
        """Launches and copies that were called and of which no record came, as far as calls are recorded."""
        return self._calls.unseen()

    def chunk(self, chunk: Chunk) -> None:
        """Write a chunk."""
        translate = self._by_group[chunk.group]
        if chunk.dtype is None:
            self.counts[chunk.group] += translate(chunk, chunk.columns or {})
            return
        array = numpy().frombuffer(chunk.data, chunk.dtype)
        if chunk.group not in ("kernel", "memcpy"):
            self.counts[chunk.group] += translate(chunk, Fields(array))
            return
        for begin in range(0, len(array), _AT_ONCE):
            self.counts[chunk.group] += translate(chunk, Fields(array[begin : begin + _AT_ONCE]))

    def _spans(self, group: str, fields: Mapping[str, Any]) -> tuple[Any, Any, Any] | None:
        """(which records have sane times or None for all, start in UNIX ns, duration); None where none has.

        CUPTI leaves 0 where it has no time, and end before start where a clock went back: neither is a fact.
        """
        np = numpy()
        if "start" not in fields or "end" not in fields:
            self.invalid[group] += 1
            return None
        start, end = fields["start"].astype(np.int64), fields["end"].astype(np.int64)
        duration = end - start
        sane = (start > 0) & (duration >= 0)
        bad = len(sane) - int(np.count_nonzero(sane))
        if not bad:
            return None if not len(start) else (None, start + self.offset_ns, duration)
        self.invalid[group] += bad
        if bad == len(sane):
            return None
        chosen = np.flatnonzero(sane)
        return chosen, start[chosen] + self.offset_ns, duration[chosen]

    def _kernels(self, chunk: Chunk, fields: Mapping[str, Any]) -> int:
        np = numpy()
        pointers = self._names(chunk, fields)
        spans = self._spans("kernel", fields)
        if spans is None:
            return 0
        chosen, start, duration = spans
        fields = _some(fields, chosen)
        if chosen is not None:
            pointers = pointers[chosen]
        ids, fresh = self._shapes.find(fields, pointers)
        corr = _column(fields, "correlation_id")
        rows = {"dt_ns": start, "kernel_id": ids}
        _take(rows, fields, {"stream_id": "stream_id"})
        rows["duration_ns"] = duration
        if corr is not None:
            rows["corr_id"] = corr
        _take(rows, fields, {"dyn_shared": "dynamic_shared_memory", "num_regs": "registers_per_thread"})
        looked_at = fresh if corr is not None else np.empty(0, dtype=np.int64)
        if self.stacks and corr is not None:
            with_stack = np.flatnonzero(np.isin(corr, np.fromiter(self.stacks, np.int64, len(self.stacks))))
            looked_at = np.union1d(looked_at, with_stack)
        details = np.zeros(len(ids), dtype=np.int64)
        details[looked_at] = 1
        rows["has_details"] = details
        if corr is not None:
            self._with_external(rows, corr)
        _take(rows, fields, {"device_id": "device_id"})
        self._write("kernel_event_batch", rows)
        if len(looked_at) and corr is not None:
            self._shapes.write(fields, corr, looked_at, self.stacks)
            for at in looked_at.tolist():
                self.stacks_written += self.stacks.pop(int(corr[at]), None) is not None
        return len(ids)

    def _names(self, chunk: Chunk, fields: Mapping[str, Any]) -> Any:
        """What stands for each record's name: the pointer, or where there is none a hash of the text."""
        np = numpy()
        told = chunk.texts.get("name", {})
        if isinstance(told, list):
            stand_ins = [hash(name) for name in told]
            self._shapes.learn(dict(zip(stand_ins, told, strict=True)))
            return np.array(stand_ins, dtype=np.int64)
        self._shapes.learn(told)
        return fields["name"].astype(np.int64)

    def _with_external(self, rows: dict[str, Any], corr: Any) -> None:
        """Which range of the program a launch was in; 0 is none, as on the wire."""
        if len(self._external):
            known, (kinds, identifiers) = self._external.find(corr)
            if known.any():
                rows["external_kind"], rows["external_id"] = kinds.astype(numpy().int64), identifiers

    def _write(self, wire_type: str, rows: dict[str, Any]) -> None:
        """Rows with the times of their calls; those whose call is not known in a batch without such columns."""
        np = numpy()
        if "corr_id" not in rows or not len(self._calls):
            self._writer.rows(wire_type, rows)
            return
        known, (begin, end) = self._calls.find(rows["corr_id"], seen=True)
        for mask, more in ((known, {"api_start_ns": begin, "api_exit_ns": end}), (~known, {})):
            if mask.any():
                chosen = {**rows, **{name: column.astype(np.int64) for name, column in more.items()}}
                self._writer.rows(wire_type, {name: column[mask] for name, column in chosen.items()})

    def _copies(self, chunk: Chunk, fields: Mapping[str, Any]) -> int:
        spans = self._spans("memcpy", fields)
        if spans is None:
            return 0
        chosen, start, duration = spans
        fields = _some(fields, chosen)
        rows = {"dt_ns": start}
        _take(rows, fields, {"stream_id": "stream_id"})
        rows["duration_ns"] = duration
        names = {"bytes": "bytes", "copy_kind": "copy_kind", "corr_id": "correlation_id", "src_kind": "src_kind"}
        _take(rows, fields, {**names, "dst_kind": "dst_kind", "device_id": "device_id"})
        self._write("memcpy_event_batch", rows)
        return len(start)

    def _fills(self, chunk: Chunk, fields: Mapping[str, Any]) -> int:
        spans = self._spans("memset", fields)
        if spans is None:
            return 0
        chosen, start, duration = spans
        fields = _some(fields, chosen)
        columns: dict[str, list[Any]] = {"start_ns": start.tolist(), "end_ns": (start + duration).tolist()}
        for wire, name in (("corr_id", "correlation_id"), ("bytes", "bytes")):
            if name in fields:
                columns[wire] = fields[name].tolist()
        corr = _column(fields, "correlation_id")
        if corr is not None and len(self._calls):
            self._calls.find(corr, seen=True)
        for wire in ("device_id", "stream_id"):
            if wire in fields:
                columns[wire] = [str(value) for value in fields[wire].tolist()]
        head = {**self._who, "name": "memset", "platform": "cuda"}
        names = list(columns)
        lines = ({**head, **dict(zip(names, row, strict=True))} for row in zip(*columns.values(), strict=True))
        self._writer.events("memset_event", lines)
        return len(start)

    def _waits(self, chunk: Chunk, fields: Mapping[str, Any]) -> int:
        spans = self._spans("sync", fields)
        if spans is None:
            return 0
        chosen, start, duration = spans
        fields = _some(fields, chosen)
        rows = {"dt_ns": start, "duration_ns": duration}
        names = {"sync_type": "type", "stream_id": "stream_id", "event_id": "cuda_event_id"}
        _take(rows, fields, {**names, "context_id": "context_id", "corr_id": "correlation_id"})
        self._writer.rows("synchronization_event_batch", rows)
        return len(start)

    def _allocations(self, chunk: Chunk, fields: Mapping[str, Any]) -> int:
        np = numpy()
        when = _column(fields, "timestamp")
        if when is None:
            self.invalid["memory"] += chunk.size
            return 0
        sane = when > 0
        self.invalid["memory"] += len(when) - int(np.count_nonzero(sane))
        chosen = None if sane.all() else np.flatnonzero(sane)
        fields = _some(fields, chosen)
        when = when if chosen is None else when[chosen]
        if not len(when):
            return 0
        rows = {"dt_ns": when + self.offset_ns, "duration_ns": np.zeros(len(when), dtype=np.int64)}
        names = {"memory_op": "memory_operation_type", "memory_kind": "memory_kind"}
        _take(rows, fields, names)
        if "address" in fields:
            rows["address"] = fields["address"].astype(np.uint64)
        names = {"bytes": "bytes", "device_id": "device_id", "stream_id": "stream_id", "corr_id": "correlation_id"}
        _take(rows, fields, names)
        self._writer.rows("memory_alloc_event_batch", rows)
        return len(when)

    def _overheads(self, chunk: Chunk, fields: Mapping[str, Any]) -> int:
        spans = self._spans("overhead", fields)
        if spans is None:
            return 0
        chosen, start, duration = spans
        kinds = _column(_some(fields, chosen), "overhead_kind")
        words = (
            ["unknown"] * len(start) if kinds is None else [OVERHEADS.get(k & 0xFFFF, "other") for k in kinds.tolist()]
        )
        lines: list[dict[str, Any]] = []
        written = self.counts["overhead"]
        for word, begin, length in zip(words, start.tolist(), duration.tolist(), strict=True):
            self.overhead_ns[word] += length
            if written + len(lines) < _OVERHEAD_LINES:
                span = {"start_ns": begin, "end_ns": begin + length, "duration_ns": length}
                lines.append({**self._who, "name": word, "domain": OVERHEAD_DOMAIN, **span, "marker_id": 0})
        self._writer.events("nvtx_marker_event", lines)
        return len(start)

    def _markers(self, chunk: Chunk, fields: Mapping[str, Any]) -> int:
        when, flags, ids = (_column(fields, name) for name in ("timestamp", "flags_", "id"))
        if when is None or flags is None or ids is None:
            self.invalid["nvtx"] += chunk.size
            return 0
        names = texts_of(chunk.texts, "name", fields.get("name"), chunk.size)
        domains = texts_of(chunk.texts, "domain", fields.get("domain"), chunk.size)
        if not (when > 0).all():
            self.invalid["nvtx"] += int((when <= 0).sum())
            flags[when <= 0] = 0
        told = self.marks.feed(flags.tolist(), (when + self.offset_ns).tolist(), ids.tolist(), names, domains)
        lines = [{**self._who, **line} for line in told]
        self._writer.events("nvtx_marker_event", lines)
        return len(lines)

    def _externals(self, chunk: Chunk, fields: Mapping[str, Any]) -> int:
        corr, kinds = _column(fields, "correlation_id"), _column(fields, "external_kind")
        if corr is None or kinds is None or "external_id" not in fields:
            return 0
        self._external.add(corr, kinds, fields["external_id"])
        return len(corr)

    def _api(self, chunk: Chunk, fields: Mapping[str, Any]) -> int:
        spans = self._spans("api", fields)
        if spans is None:
            return 0
        chosen, start, duration = spans
        corr = _column(_some(fields, chosen), "correlation_id")
        if corr is None:
            return 0
        self._calls.add(corr, start, start + duration)
        return len(corr)

    def _graphs(self, chunk: Chunk, fields: Mapping[str, Any]) -> int:
        spans = self._spans("graph", fields)
        if spans is None:
            return 0
        chosen, start, duration = spans
        fields = _some(fields, chosen)
        columns = {
            "start_ns": start.tolist(),
            "end_ns": (start + duration).tolist(),
            "duration_ns": duration.tolist(),
        }
        for wire, name in (
            ("graph_id", "graph_id"),
            ("device_id", "device_id"),
            ("stream_id", "stream_id"),
            ("corr_id", "correlation_id"),
        ):
            if name in fields:
                columns[wire] = fields[name].tolist()
        names = list(columns)
        lines = ({**self._who, **dict(zip(names, row, strict=True))} for row in zip(*columns.values(), strict=True))
        self._writer.events("graph_launch_event", lines)
        return len(start)

    def _device(self, chunk: Chunk, fields: Mapping[str, Any]) -> int:
        numbers = _column(fields, "id")
        if numbers is None:
            return 0
        names = texts_of(chunk.texts, "name", fields.get("name"), chunk.size)
        uuids = texts_of(chunk.texts, "uuid", fields.get("uuid"), chunk.size)
        for at, number in enumerate(numbers.tolist()):
            line: dict[str, Any] = {"id": number, "vendor": "NVIDIA"}
            if names[at]:
                line["name"] = names[at]
            if uuids[at]:
                line["uuid"] = uuids[at]
            for wire, attribute in _DEVICE:
                if attribute in fields:
                    line[wire] = int(fields[attribute][at])
            self.devices[number] = line
            limits = _limits(fields, at)
            if limits is not None:
                self._shapes.limits[number] = limits
        return len(numbers)


_DEVICE = (
    ("compute_major", "compute_capability_major"),
    ("compute_minor", "compute_capability_minor"),
    ("l2_cache_size_bytes", "l2cache_size"),
    ("shared_mem_per_block_bytes", "max_shared_memory_per_block"),
    ("regs_per_block", "max_registers_per_block"),
    ("multi_processor_count", "num_multiprocessors"),
    ("warp_size", "num_threads_per_warp"),
)


def _limits(fields: Mapping[str, Any], at: int) -> Limits | None:
    names = (
        *("max_warps_per_multiprocessor", "max_blocks_per_multiprocessor", "max_registers_per_multiprocessor"),
        *("max_registers_per_block", "max_shared_memory_per_multiprocessor", "compute_capability_major"),
    )
    if any(name not in fields for name in names):
        return None
    return Limits(*(int(fields[name][at]) for name in names))


def _column(fields: Mapping[str, Any], name: str) -> Any | None:
    return fields[name].astype(numpy().int64) if name in fields else None


def _take(rows: dict[str, Any], fields: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Columns under the names of the wire, those that there are."""
    for wire, name in names.items():
        if name in fields:
            rows[wire] = fields[name].astype(numpy().int64)


def _some(fields: Mapping[str, Any], chosen: Any | None) -> Mapping[str, Any]:
    """Some of the records; all of them for None."""
    if chosen is None:
        return fields
    if isinstance(fields, Fields):
        return fields.some(chosen)
    return {name: column[chosen] for name, column in fields.items()}
