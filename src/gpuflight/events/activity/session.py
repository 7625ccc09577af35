"""One session's sums, kept up as its batches come."""

from __future__ import annotations

from collections.abc import Callable

from gpuflight.events.activity.busy import Busy
from gpuflight.events.activity.communication import Communication
from gpuflight.events.activity.memory import Memory
from gpuflight.events.activity.scopes import Scopes
from gpuflight.events.activity.summary import (
    CopySum,
    DeviceFacts,
    KernelSum,
    LaunchShape,
    StreamSum,
    Summary,
    WaitSum,
    without_secrets,
)
from gpuflight.events.activity.sums import OTHER, UNKNOWN, Sums
from gpuflight.events.activity.work import Work
from gpuflight.events.aggregate import KernelGroup, KernelTable
from gpuflight.events.batch import Batch
from gpuflight.events.names import Names
from gpuflight.events.tables import COPY_KINDS, SYNC_TYPES, TABLES
from gpuflight.sources.job_environment import FACTS

_SYNTHETIC = "launch_callbacks_synthetic"


class Activity:
    """Takes batches of any table of one session. ``folder``, ``uid``: where its log lies, and whose it is."""

    def __init__(self, session_id: str, folder: str = "", uid: int | None = None) -> None:
        self._summary = Summary(session_id=session_id, folder=folder, uid=uid)
        self._kernels = KernelTable()
        self._launches = 0
        self._names = Names()
        self._busy = Busy()
        self._communication = Communication()
        self._copies = Sums(("copy_kind", "device_id", "stream_id"), ("duration_ns", "bytes"))
        self._memsets = Sums(("device_id",), ("duration_ns", "bytes"))
        self._waits = Sums(("sync_type",), ("duration_ns",))
        self._memory = Memory()
        self._work = Work(self._names)
        self._scopes = Scopes(self._work.steps, self._names)
        self._devices: dict[int, DeviceFacts] = {}
        self._device_of: dict[int, int] = {}  # by stream
        self._seen: set[str] = set()
        self._take: dict[str, Callable[[Batch], None]] = {
            "session_start": self._begin,
            "session_end": self._end,
            "capability": self._capability,
            "device": self._device,
            "name": self._name,
            "kernel": self._kernel,
            "kernel_detail": self._kernels.add,
            "kernel_shape": self._kernels.add,
            "memcpy": self._copy,
            "memset": self._memset,
            "sync": self._wait,
            "allocation": self._allocation,
            "scope": self._scope,
            "graph_launch": self._graph_launch,
            "nvtx": self._work.ranges,
            "profile_sample": self._work.samples,
            "pm_sample": self._work.counters,
            "perf_metric": self._work.counters,
            "kernel_perf_metric": self._work.counters,
        }

    @property
    def session_id(self) -> str:
        return self._summary.session_id

    @property
    def folder(self) -> str:
        """Where its log lies."""
        return self._summary.folder

    def add(self, batch: Batch) -> None:
        """Rows of one of the session's tables."""
        self._summary.events += batch.count
        time = TABLES[batch.table].time
        if time and batch.clock == "wall" and batch.count and time in batch.columns:
            latest = int(batch.columns[time].max())
            self._summary.last_event_ns = max(self._summary.last_event_ns or latest, latest)
        take = self._take.get(batch.table)
        if take is not None and batch.count:
            self._seen.add(batch.table)
            take(batch)

    def lose(self, count: int) -> None:
        """Lines or rows of it were lost."""
        self._summary.losses += count

    def forget_beginning(self) -> None:
        """Earlier lines of it were read and are forgotten."""
        self._summary.partial = True

    def summary(self, *, most_kernels: int, most_scopes: int, most_streams: int) -> Summary:
        """What is known now; later batches do not change it."""
        seen, now = self._seen, self._summary
        groups = self._kernels.groups(now.session_id, most_kernels)
        streams = self._streams(groups)
        copies = self._copies.result()
        memsets = self._memsets.result()
        made = Summary(**{name: getattr(now, name) for name in now.__struct_fields__})
        made.devices = [self._devices[number] for number in sorted(self._devices)]
        if "kernel" in seen:
            made.launches = self._launches
            made.communication = self._communication.result()
            made.kernel_ns = sum(group.total_ns for group in groups)
            busy_ns = self._busy.busy_ns
            made.busy_ns = busy_ns if self._busy.latest_ns else None  # else none of them is on the timeline
        made.device_latest_ns = max(now.device_latest_ns, self._busy.latest_ns)
        made.kernels = [_kernel(group) for group in groups[:most_kernels]]
        made.kernels_count = len(groups)
        made.unnamed_count = sum(group.name is None and group.kernel_id != 0 for group in groups)
        made.streams = sorted(streams.values(), key=lambda s: (-s.kernel_ns, -s.copied_bytes, s.stream_id))[
            :most_streams
        ]
        made.streams_count = len(streams)
        if "memcpy" in seen:
            made.copies = self._copy_sums(copies)
        if "memset" in seen:
            made.memsets = sum(line[0] for line in memsets.values())
            made.memset_bytes = sum(line[2] for line in memsets.values())
        if "sync" in seen:
            made.waits = _wait_sums(self._waits.result())
        if "allocation" in seen:
            made.memory = self._memory.result()
        if "scope" in seen:
            made.scopes = self._scopes.result(self._names, most_scopes)
            made.scopes_count = len(self._scopes)
        made.work = self._work.result()
        made.losses += self._memory.beyond + self._scopes.beyond
        return made

    # --- who it is -------------------------------------------------------------------------------------------------

    def _begin(self, batch: Batch) -> None:
        row, now = batch.rows()[-1], self._summary
        now.app = without_secrets(row.get("app") or now.app)
        now.hostname = row.get("hostname") or now.hostname
        now.pid = row.get("pid", now.pid)
        for name in FACTS:
            told = row.get(name)
            if name in ("job", "job_launcher") and isinstance(told, str):
                now.job[name] = without_secrets(told)
            elif name not in ("job", "job_launcher") and type(told) is int and 0 <= told < 1 << 31:
                now.job[name] = told
        now.kind, now.engine = row.get("session_kind") or now.kind, row.get("profiling_engine") or now.engine
        now.run_id, now.segment_index = row.get("run_id") or now.run_id, row.get("segment_index", now.segment_index)
        if batch.clock == "wall" and "time_ns" in row:
            now.start_ns = min(now.start_ns or row["time_ns"], row["time_ns"])

    def _end(self, batch: Batch) -> None:
        row, now = batch.rows()[-1], self._summary
        now.end = "launcher" if row.get("synthetic") else "shutdown"
        if batch.clock == "wall" and "time_ns" in row:
            now.end_ns = max(now.end_ns or row["time_ns"], row["time_ns"])

    def _capability(self, batch: Batch) -> None:
        for row in batch.rows():
            if row.get("feature") == "kernel_events":
                self._summary.synthetic = row.get("mode") == _SYNTHETIC

    def _device(self, batch: Batch) -> None:
        for row in batch.rows():
            known = self._devices.setdefault(row["device_id"], DeviceFacts(row["device_id"]))
            known.uuid, known.name = row.get("uuid") or known.uuid, row.get("name") or known.name
            known.vendor = row.get("vendor") or known.vendor
            known.sm_count = row.get("multi_processor_count") or known.sm_count
            known.compute_major = row.get("compute_major") or known.compute_major

    def _name(self, batch: Batch) -> None:
        self._kernels.add(batch)
        self._communication.names(batch)
        columns = batch.columns
        for dictionary, identifier, text in zip(
            columns["dictionary"], columns["id"].tolist(), columns["text"], strict=True
        ):
            if dictionary in ("scope", "marker", "metric"):
                self._names.add(dictionary, identifier, text)

    # --- what it does ----------------------------------------------------------------------------------------------

    def _kernel(self, batch: Batch) -> None:
        self._kernels.add(batch)
        self._launches += batch.count
        self._communication.kernels(batch)
        self._work.kernels(batch)
        self._learn_devices(batch)
        if batch.clock == "wall" and "start_ns" in batch.columns and "duration_ns" in batch.columns:
            self._busy.add(batch.columns["start_ns"], batch.columns["duration_ns"])

    def _copy(self, batch: Batch) -> None:
        self._copies.add(batch.columns, batch.count)
        self._work.copies(batch)
        self._learn_devices(batch)
        self._reach(batch, "device_latest_ns")

    def _memset(self, batch: Batch) -> None:
        self._memsets.add(batch.columns, batch.count)
        self._work.fills(batch)
        self._learn_devices(batch)
        self._reach(batch, "device_latest_ns")

    def _wait(self, batch: Batch) -> None:
        self._waits.add(batch.columns, batch.count)
        self._reach(batch, "host_latest_ns")

    def _allocation(self, batch: Batch) -> None:
        self._memory.add(batch.columns, batch.count)
        self._work.allocations(batch)
        self._reach(batch, "host_latest_ns")

    def _scope(self, batch: Batch) -> None:
        self._scopes.add(batch.columns, batch.count)

    def _graph_launch(self, batch: Batch) -> None:
        self._summary.graph_launches = (self._summary.graph_launches or 0) + batch.count
        self._learn_devices(batch)

    def _reach(self, batch: Batch, name: str) -> None:
        """Up to when rows of this kind are told."""
        if batch.clock == "wall" and "start_ns" in batch.columns:
            latest = int(batch.columns["start_ns"].max())
            setattr(self._summary, name, max(getattr(self._summary, name), latest))

    def _learn_devices(self, batch: Batch) -> None:
        """Kernels and copies in batches name no GPU; single events and graph launches tell which one a stream is on."""
        streams, devices = batch.columns.get("stream_id"), batch.columns.get("device_id")
        if streams is not None and devices is not None and len(self._device_of) < 1 << 16:
            self._device_of.update(zip(streams.tolist(), devices.tolist(), strict=True))

    def _device_at(self, stream: int, told: int) -> int | None:
        if told >= 0:
            return told
        known = self._device_of.get(stream)
        if known is None and len(self._devices) == 1:
            return next(iter(self._devices))
        return known

    def _streams(self, groups: list[KernelGroup]) -> dict[tuple[int, int | None], StreamSum]:
        found: dict[tuple[int, int | None], StreamSum] = {}
        for group in groups:
            for stream, told, count, total_ns in group.lanes:
                if stream >= 0:
                    line = self._stream(found, stream, told)
                    line.launches += count
                    line.kernel_ns += total_ns
        for (_, told, stream), (count, _, size, _) in self._copies.result().items():
            if stream >= 0:
                line = self._stream(found, stream, told)
                line.copies += count
                line.copied_bytes += size
        return found

    def _stream(self, found: dict[tuple[int, int | None], StreamSum], stream: int, told: int) -> StreamSum:
        key = (stream, self._device_at(stream, told))
        return found.setdefault(key, StreamSum(*key))

    def _copy_sums(self, lines: dict[tuple[int, ...], list[int]]) -> list[CopySum]:
        found: dict[tuple[str, int | None], CopySum] = {}
        for (kind, told, stream), (count, total_ns, size, _) in lines.items():
            name = "other" if kind in (OTHER, UNKNOWN) else COPY_KINDS.get(kind, "other")
            device = self._device_at(stream, told)
            line = found.setdefault((name, device), CopySum(name, device, 0, 0, 0))
            line.count += count
            line.bytes += size
            line.total_ns += total_ns
        return sorted(found.values(), key=lambda c: (c.kind, -1 if c.device_id is None else c.device_id))


def _wait_sums(lines: dict[tuple[int, ...], list[int]]) -> list[WaitSum]:
    found: dict[str, WaitSum] = {}
    for (kind,), (count, total_ns, longest_ns) in lines.items():
        name = "unknown" if kind == UNKNOWN else SYNC_TYPES.get(kind, "other")
        line = found.setdefault(name, WaitSum(name, 0, 0, 0))
        line.count += count
        line.total_ns += total_ns
        line.max_ns = max(line.max_ns, longest_ns)
    return sorted(found.values(), key=lambda w: w.kind)


def _kernel(group: KernelGroup) -> KernelSum:
    lanes: dict[int, tuple[int, int]] = {}
    for stream, _, count, total_ns in group.lanes:
        if stream >= 0:
            before = lanes.get(stream, (0, 0))
            lanes[stream] = (before[0] + count, before[1] + total_ns)
    return KernelSum(
        group.kernel_id,
        None if group.name is None else without_secrets(group.name),
        group.count,
        group.total_ns,
        group.min_ns,
        group.max_ns,
        group.p50_ns,
        group.p99_ns,
        [(stream, *line) for stream, line in sorted(lanes.items())],
        group.details,
        group.occupancy,
        group.registers,
        _shape(group.shape),
    )


def _shape(told: dict[str, object] | None) -> LaunchShape | None:
    """Of a row of ``kernel_shape``; products of grid and block."""
    if told is None:
        return None

    def number(name: str) -> int | None:
        value = told.get(name)
        return value if isinstance(value, int) else None

    def share(name: str) -> float | None:
        value = told.get(name)
        return float(value) if isinstance(value, float) and value == value and value > 0 else None

    def product(name: str) -> int | None:
        x, y, z = (number(f"{name}_{axis}") for axis in "xyz")
        return x * (y or 1) * (z or 1) if x else None

    local = number("local_mem_per_thread_bytes")
    return LaunchShape(
        product("grid"),
        product("block"),
        share("occupancy"),
        share("reg_occupancy"),
        str(told.get("limiting_resource") or ""),
        number("max_active_blocks") or None,
        number("local_bytes") if local is None else local,
    )
