"""Exports of Nsight Systems (``nsys export --type sqlite``).

One session per profiled process: correlation ids are those of a process. Kernels, copies and fills with the calls that
started them, host waits, allocations, NVTX ranges, sampled GPU metrics. Tables of other kinds are counted by their rows
(``not_imported``). Tables and columns differ between versions, and tables that would be empty are not there, so each is
looked up. Times are ns since the session's start, which the export tells as UNIX ns; without it they are no wall clock.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from hashlib import blake2b
from typing import Any
from urllib.parse import quote

from gpuflight.errors import InputError
from gpuflight.events.batch import Batch, Clock
from gpuflight.events.imports.base import ROWS_AT_ONCE, Rows
from gpuflight.events.ledger import Ledger, Place

_NVTX_RANGES = frozenset((59, 60, 70, 71))
"""Event types of push/pop and start/end ranges, with text and with a registered string."""
_NVTX_DOMAIN = 75
_MEMORY_KINDS = {0: 1, 1: 2, 2: 3, 3: 4, 4: 5, 5: 6, 6: 7}
"""Of nsys (pageable, pinned, device, array, managed, device static, managed static) → those of CUPTI."""

_TAKEN = frozenset(
    (
        *("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET"),
        *("CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "CUDA_GPU_MEMORY_USAGE_EVENTS"),
        *("NVTX_EVENTS", "GPU_METRICS"),
    )
)
_SHAPE = {
    **{f"grid{axis.upper()}": f"grid_{axis}" for axis in "xyz"},
    **{f"block{axis.upper()}": f"block_{axis}" for axis in "xyz"},
    "staticSharedMemory": "static_shared_bytes",
    "localMemoryTotal": "local_mem_total_bytes",
    "localMemoryPerThread": "local_mem_per_thread_bytes",
    "sharedMemoryExecuted": "shared_mem_executed_bytes",
}


class Nsys:
    """See the module's text. Raises InputError if the file is no such database."""

    kind = "Nsight Systems"

    def __init__(self, path: str, ledger: Ledger | None = None) -> None:
        self.path = path
        self.ledger = Ledger() if ledger is None else ledger
        self.done_bytes = 0
        self._sessions: dict[int, Rows] = {}
        self._strings: dict[int, str] = {}
        self._names: dict[int, str] = {}
        self._domains: dict[int, str] = {}
        self._digest = _digest(path)
        self._base_ns = 0
        self._clock: Clock = "wall"
        self._span: dict[int, tuple[int, int]] = {}
        self._worked: dict[int, int] = {}
        self.identity = f"nsys-{self._digest}"

    def __iter__(self) -> Iterator[list[Batch]]:
        try:
            with closing(sqlite3.connect(f"file:{quote(os.path.abspath(self.path))}?mode=ro", uri=True)) as database:
                database.text_factory = lambda raw: raw.decode("utf-8", "replace")
                database.row_factory = sqlite3.Row
                self._database = database
                self._open()
                for step in (
                    self._kernels,
                    self._copies,
                    self._fills,
                    self._waits,
                    self._memory,
                    self._ranges,
                    self._metrics,
                ):
                    yield from step()
                self._finish()
                yield [batch for rows in self._sessions.values() for batch in rows.take()]
        except sqlite3.Error as error:
            if not self._sessions:
                raise InputError(f"{self.path}: cannot be read as an export of Nsight Systems: {error}") from error
            self.ledger.add("corrupt_file", Place(self.path))
            yield [batch for rows in self._sessions.values() for batch in rows.take()]
        self.done_bytes = os.path.getsize(self.path)

    # --- the database ----------------------------------------------------------------------------------------------

    def _open(self) -> None:
        rows = self._database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        self._tables = {row[0]: self._columns(row[0]) for row in rows}
        if not _TAKEN & self._tables.keys() and "StringIds" not in self._tables:
            raise InputError(f"{self.path}: no table of an export of Nsight Systems is in it")
        if "utcEpochNs" in self._tables.get("TARGET_INFO_SESSION_START_TIME", ()):
            row = self._database.execute("SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME").fetchone()
            self._base_ns = int(row[0]) if row is not None and isinstance(row[0], int) else 0
        if self._base_ns <= 0:
            self._base_ns, self._clock = 0, "unplaced"
            self.ledger.add("implausible_time", Place(self.path))
        if {"globalPid", "name"} <= self._tables.get("PROCESSES", set()):
            for row in self._database.execute("SELECT globalPid, name FROM PROCESSES"):
                if isinstance(row["globalPid"], int):
                    self._names[_pid(row["globalPid"])] = os.path.basename(str(row["name"] or ""))

    def _columns(self, table: str) -> set[str]:
        name = table.replace('"', '""')
        return {row[1] for row in self._database.execute(f'PRAGMA table_info("{name}")')}

    def _select(self, table: str, wanted: dict[str, str], extra: str = "", join: str = "") -> Iterator[sqlite3.Row]:
        """Rows of a table with ``wanted`` columns (ours → theirs), those it lacks as NULL; none without the table."""
        there = self._tables.get(table)
        if there is None:
            return
        columns = [
            f't."{theirs}" AS "{ours}"' if theirs in there else f'NULL AS "{ours}"' for ours, theirs in wanted.items()
        ]
        if extra:
            columns.append(extra)
        cursor = self._database.execute(f'SELECT {", ".join(columns)} FROM "{table}" AS t {join}')  # noqa: S608
        while rows := cursor.fetchmany(ROWS_AT_ONCE):
            yield from rows

    def _text(self, identifier: Any) -> str | None:
        if not isinstance(identifier, int) or "StringIds" not in self._tables:
            return None
        known = self._strings.get(identifier)
        if known is None:
            row = self._database.execute("SELECT value FROM StringIds WHERE id = ?", (identifier,)).fetchone()
            if row is None:
                self.ledger.add("missing_name", subject="StringIds")
                return None
            if len(self._strings) > 500_000:
                self._strings.clear()
            known = self._strings[identifier] = str(row[0])
        return known

    def _text_of(self, row: sqlite3.Row) -> str | None:
        return row["text"] if isinstance(row["text"], str) else self._text(row["string"])

    # --- sessions --------------------------------------------------------------------------------------------------

    def _of(self, global_id: Any) -> Rows:
        """Rows of the process that a globalPid or globalTid names; 0 where an export does not tell."""
        pid = _pid(global_id) if isinstance(global_id, int) else 0
        rows = self._sessions.get(pid)
        if rows is None:
            rows = self._sessions[pid] = Rows(f"{self.identity}-{pid}", self.ledger, "nsys", pid)
        return rows

    def _add(self, table: str, rows: Rows, start: Any, end: Any, row: dict[str, Any]) -> None:
        if not isinstance(start, int):
            self.ledger.add("bad_cell", subject=f"{table}.start")
            return
        start_ns = self._base_ns + start
        took_ns = end - start if isinstance(end, int) and end >= start else None
        rows.add(table, {"start_ns": start_ns, "duration_ns": took_ns, **row}, self._clock)
        pid = rows.key
        self._worked[pid] = self._worked.get(pid, 0) + (table == "kernel")
        first, last = self._span.get(pid, (start_ns, start_ns))
        self._span[pid] = (min(first, start_ns), max(last, start_ns + (took_ns or 0)))

    def _full(self) -> Iterator[list[Batch]]:
        """Batches, once there are enough rows."""
        if sum(rows.count for rows in self._sessions.values()) >= ROWS_AT_ONCE:
            yield [batch for rows in self._sessions.values() for batch in rows.take()]

    # --- kinds of events -------------------------------------------------------------------------------------------

    def _call(self, table: str) -> tuple[str, str]:
        """What joins the call that started GPU work: of the same process, where both tables tell it."""
        runtime = self._tables.get("CUPTI_ACTIVITY_KIND_RUNTIME", set())
        if not {"start", "end", "correlationId"} <= runtime or "correlationId" not in self._tables.get(table, ()):
            return "NULL AS api_start, NULL AS api_end", ""
        by_process = "globalTid" in runtime and "globalPid" in self._tables[table]
        process = f"globalTid & {_PROCESS_MASK}" if by_process else "NULL"
        # A call may be there twice, the driver's inside of the runtime's. Exports have no indexes: SQLite makes one.
        calls = (
            f"SELECT correlationId AS id, {process} AS process, min(start) AS start, max(end) AS end"  # noqa: S608
            " FROM CUPTI_ACTIVITY_KIND_RUNTIME GROUP BY 1, 2"
        )
        same = " AND r.process = t.globalPid" if by_process else ""
        return "r.start AS api_start, r.end AS api_end", f"LEFT JOIN ({calls}) AS r ON r.id = t.correlationId{same}"

    def _gpu(self, table: str, more: dict[str, str]) -> Iterator[sqlite3.Row]:
        wanted = {"start": "start", "end": "end", "device": "deviceId", "stream": "streamId", "corr": "correlationId"}
        extra, join = self._call(table)
        yield from self._select(table, {**wanted, "process": "globalPid", **more}, extra, join)

    def _work(self, row: sqlite3.Row) -> dict[str, Any]:
        call = row["api_start"]
        return {
            "device_id": row["device"],
            "stream_id": row["stream"],
            "corr_id": row["corr"],
            "api_start_ns": self._base_ns + call if isinstance(call, int) else None,
            "api_exit_ns": self._base_ns + row["api_end"] if isinstance(row["api_end"], int) else None,
        }

    def _kernels(self) -> Iterator[list[Batch]]:
        more = {
            "name": "demangledName",
            "short": "shortName",
            "regs": "registersPerThread",
            "dynamic": "dynamicSharedMemory",
            **{ours: theirs for theirs, ours in _SHAPE.items()},
        }
        for row in self._gpu("CUPTI_ACTIVITY_KIND_KERNEL", more):
            rows = self._of(row["process"])
            name = self._text(row["name"]) or self._text(row["short"])
            kernel = None if name is None else rows.text("kernel", name)
            shape = rows.shape({ours: row[ours] for ours in _SHAPE.values() if isinstance(row[ours], int)})
            if shape is not None and isinstance(row["corr"], int):
                rows.add("kernel_detail", {"corr_id": row["corr"], "shape_id": shape})
            work = {"kernel_id": kernel, "num_regs": row["regs"], "dyn_shared_bytes": row["dynamic"]}
            self._add("kernel", rows, row["start"], row["end"], {**self._work(row), **work})
            yield from self._full()

    def _copies(self) -> Iterator[list[Batch]]:
        for row in self._gpu("CUPTI_ACTIVITY_KIND_MEMCPY", {"bytes": "bytes", "kind": "copyKind"}):
            work = {**self._work(row), "bytes": row["bytes"], "copy_kind": row["kind"]}
            self._add("memcpy", self._of(row["process"]), row["start"], row["end"], work)
            yield from self._full()

    def _fills(self) -> Iterator[list[Batch]]:
        for row in self._gpu("CUPTI_ACTIVITY_KIND_MEMSET", {"bytes": "bytes"}):
            work = {**self._work(row), "bytes": row["bytes"]}
            self._add("memset", self._of(row["process"]), row["start"], row["end"], work)
            yield from self._full()

    def _waits(self) -> Iterator[list[Batch]]:
        wanted = {"start": "start", "end": "end", "process": "globalPid", "type": "syncType", "stream": "streamId"}
        wanted |= {"event": "eventId", "context": "contextId", "corr": "correlationId"}
        for row in self._select("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", wanted):
            ids = {"sync_type": row["type"], "stream_id": row["stream"], "event_id": row["event"]}
            ids |= {"context_id": row["context"], "corr_id": row["corr"]}
            self._add("sync", self._of(row["process"]), row["start"], row["end"], ids)
            yield from self._full()

    def _memory(self) -> Iterator[list[Batch]]:
        wanted = {
            "start": "start",
            "process": "globalPid",
            "device": "deviceId",
            "address": "address",
            "bytes": "bytes",
        }
        wanted |= {"kind": "memKind", "op": "memoryOperationType", "corr": "correlationId"}
        for row in self._select("CUDA_GPU_MEMORY_USAGE_EVENTS", wanted):
            address = row["address"]
            event = {
                "memory_op": {0: 1, 1: 2}.get(row["op"]),
                "memory_kind": _MEMORY_KINDS.get(row["kind"], 0),
                "address": address % 2**64 if isinstance(address, int) else None,
                "bytes": row["bytes"],
                "device_id": row["device"],
                "corr_id": row["corr"],
            }
            self._add("allocation", self._of(row["process"]), row["start"], None, event)
            yield from self._full()

    def _ranges(self) -> Iterator[list[Batch]]:
        wanted = {"start": "start", "end": "end", "thread": "globalTid", "type": "eventType", "text": "text"}
        wanted |= {"string": "textId", "domain": "domainId", "range": "rangeId"}
        for row in self._select("NVTX_EVENTS", wanted):
            if row["type"] == _NVTX_DOMAIN and isinstance(row["domain"], int):
                self._domains[row["domain"]] = self._text_of(row) or f"#{row['domain']}"
        for row in self._select("NVTX_EVENTS", wanted):
            if row["type"] == _NVTX_DOMAIN:
                continue
            if row["type"] not in _NVTX_RANGES or not isinstance(row["end"], int):
                what = "without an end" if row["type"] in _NVTX_RANGES else f"of type {row['type']}"
                self.ledger.add("not_imported", subject=f"NVTX_EVENTS {what}")
                continue
            rows = self._of(row["thread"])
            domain = self._domains.get(row["domain"] or 0) or (f"#{row['domain']}" if row["domain"] else None)
            event = {
                "name_id": rows.text("marker", self._text_of(row) or ""),
                "domain": domain,
                "marker_id": row["range"],
            }
            end_ns = self._base_ns + row["end"]
            self._add("nvtx", rows, row["start"], row["end"], {**event, "end_ns": end_ns})
            yield from self._full()

    def _metrics(self) -> Iterator[list[Batch]]:
        """Sampled GPU metrics are of the machine: they go with the process that worked most."""
        names: dict[tuple[Any, Any], str] = {}
        known = {"type": "typeId", "metric": "metricId", "name": "metricName"}
        for row in self._select("TARGET_INFO_GPU_METRICS", known):
            names[row["type"], row["metric"]] = str(row["name"])
        main = max(self._worked, key=lambda pid: self._worked[pid], default=0)
        wanted = {"time": "timestamp", "type": "typeId", "metric": "metricId", "value": "value"}
        for row in self._select("GPU_METRICS", wanted):
            if not isinstance(row["time"], int):
                self.ledger.add("bad_cell", subject="GPU_METRICS.timestamp")
                continue
            rows = self._sessions.get(main) or self._of(main << 24)
            name = names.get((row["type"], row["metric"])) or f"metric {row['metric']}"
            device = row["type"] & 0xFFFFFFFF if isinstance(row["type"], int) else None
            sample = {"device_id": device, "metric_id": rows.text("metric", name), "value": row["value"]}
            rows.add("pm_sample", {"time_ns": self._base_ns + row["time"], **sample}, self._clock)
            yield from self._full()

    def _finish(self) -> None:
        for table, columns in self._tables.items():
            if table not in _TAKEN and columns & {"start", "timestamp"}:
                name = table.replace('"', '""')
                count = self._database.execute(f'SELECT count(*) FROM "{name}"').fetchone()[0]  # noqa: S608
                if count:
                    self.ledger.add("not_imported", count=count, subject=table)
        host = self._host()
        for pid, rows in self._sessions.items():
            self._devices(rows, pid)
            if pid not in self._span:
                continue
            first, last = self._span[pid]
            who = {"pid": pid or None, "app": self._names.get(pid) or os.path.basename(self.path).partition(".")[0]}
            begin = {
                **who,
                "hostname": host,
                "session_kind": "trace",
                "profiling_engine": "nsys",
                "log_path": self.path,
            }
            rows.add("session_start", {"time_ns": first, **begin}, self._clock)
            rows.add("session_end", {"time_ns": last, **who}, self._clock)

    def _host(self) -> str | None:
        for row in self._select("TARGET_INFO_SYSTEM_ENV", {"name": "name", "value": "value"}):
            if str(row["name"]).lower() == "hostname":
                return str(row["value"])
        return None

    def _devices(self, rows: Rows, pid: int) -> None:
        """GPUs under the numbers that CUDA gave them in this process, where the export tells."""
        numbers: dict[Any, Any] = {}
        for row in self._select("TARGET_INFO_CUDA_DEVICE", {"gpu": "gpuId", "cuda": "cudaId", "pid": "pid"}):
            if row["pid"] in (None, pid, 0) and isinstance(row["cuda"], int):
                numbers[row["gpu"]] = row["cuda"]
        wanted = {"id": "id", "name": "name", "uuid": "uuid", "memory": "totalMemory", "sm": "smCount"}
        wanted |= {"major": "computeMajor", "minor": "computeMinor", "chip": "chipName", "l2": "l2CacheSize"}
        wanted |= {"warp": "threadsPerWarp", "regs": "maxRegistersPerBlock", "shared": "maxShmemPerBlock"}
        for row in self._select("TARGET_INFO_GPU", wanted):
            if not isinstance(row["id"], int) or (numbers and row["id"] not in numbers):
                continue
            memory = row["memory"]
            rows.add(
                "device",
                {
                    "device_id": numbers.get(row["id"], row["id"]),
                    "name": row["name"],
                    "uuid": row["uuid"],
                    "architecture": row["chip"],
                    "total_mib": memory // 1024**2 if isinstance(memory, int) and memory > 0 else None,
                    "multi_processor_count": row["sm"],
                    "compute_major": row["major"],
                    "compute_minor": row["minor"],
                    "l2_cache_size_bytes": row["l2"],
                    "warp_size": row["warp"],
                    "regs_per_block": row["regs"],
                    "shared_mem_per_block_bytes": row["shared"],
                },
            )


_PROCESS_MASK = -(1 << 24)
"""What of a globalTid is its globalPid: all but the thread's 24 bits."""


def _pid(global_id: int) -> int:
    """The process id in a serialized global id: bits 24 to 47."""
    return (global_id >> 24) & 0xFFFFFF


def _digest(path: str) -> str:
    digest = blake2b(str(os.path.getsize(path)).encode(), digest_size=6)
    with open(path, "rb") as file:
        digest.update(file.read(1 << 20))
    return digest.hexdigest()
