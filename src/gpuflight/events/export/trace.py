"""A session as a trace in Chrome's JSON format, for Perfetto (https://ui.perfetto.dev) and chrome://tracing.

* GPU lanes: per device and stream, with kernels, copies and fills; what overlaps in a stream gets a lane beside it.
* Host lanes: scopes, NVTX ranges, waits, deep windows, and calls where their time is known, with an arrow from each
  call to the kernel or copy that it started.
* Counters: telemetry, sampled hardware counters, device memory in use.

Times are µs with their ns as the fraction, counted from ``baseTimeNanoseconds`` (UNIX): since 1970 they would not fit
into the doubles of the readers. Events that have no wall-clock time are left out and counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from gpuflight.events.export.lanes import Lanes
from gpuflight.events.export.windows import in_order
from gpuflight.events.query.allocations import memory_series
from gpuflight.events.query.reader import MAX_ROWS, Reader
from gpuflight.events.query.series import metrics_of
from gpuflight.events.store.catalogue import Session
from gpuflight.events.tables import COPY_KINDS, SYNC_TYPES, TABLES

_GPU_PID = 1 << 23
"""Above every process id of Linux (2^22), and what the viewers' 32 bits hold."""
_NO_DEVICE = 1 << 16
_EPOCH_FROM_NS = 10**17
"""Stamps below are zero or since boot, as the decoder of the format takes it."""
_NO_TIME = ("kernel", "memcpy", "memset", "sync", "scope", "nvtx", "device_metric", "host_metric", "pm_sample")


class TraceCounts(msgspec.Struct):
    """``events`` written, ``unplaced`` rows left out for having no wall-clock time; complete when the trace is."""

    events: int = 0
    unplaced: int = 0


def chrome_trace(reader: Reader, counts: TraceCounts | None = None) -> Iterator[bytes]:
    """Pieces of the JSON text of one session (the reader's first)."""
    trace = _Trace(reader, counts or TraceCounts())
    head = {
        "displayTimeUnit": "ns",
        "baseTimeNanoseconds": trace.base_ns,
        "otherData": {"session_id": trace.session.session_id, "app": trace.session.app or "", "writer": "gpuflight"},
    }
    yield (json.dumps(head)[:-1] + ', "traceEvents": [\n').encode()
    first = True
    for events in trace.pieces():
        text = ",\n".join(events)
        if text:
            yield (text if first else ",\n" + text).encode("utf-8", "replace")
            first = False
    yield b"\n]}\n"


def scope_runs(table: str) -> str:
    """SQL of scopes with their ends: a begin with the end of its instance; where there are no instances, with the next
    end of its depth. ``end_ns`` is unknown where the log has none, ``last_ns`` is the latest time of any scope."""
    return f"""(
            WITH event AS (
                SELECT time_ns, name_id, coalesce(depth, 0) AS depth, repeat, event_type IN (1, 3) AS ends,
                    scope_instance_id, lead(event_type IN (1, 3)) OVER same AS next_ends,
                    lead(time_ns) OVER same AS next_ns
                FROM {table} WHERE clock = 0 AND time_ns IS NOT NULL AND event_type IS NOT NULL
                WINDOW same AS (
                    PARTITION BY scope_instance_id, CASE WHEN scope_instance_id IS NULL THEN coalesce(depth, 0) END
                    ORDER BY time_ns, event_type IN (1, 3)))
            SELECT time_ns, name_id, depth, repeat, scope_instance_id, CASE WHEN next_ends THEN next_ns END AS end_ns,
                (SELECT max(time_ns) FROM event) AS last_ns
            FROM event WHERE NOT ends)"""  # noqa: S608


class _Trace:
    def __init__(self, reader: Reader, counts: TraceCounts) -> None:
        self.session: Session = reader.sessions[0]
        self._reader = Reader(reader.store, [self.session])
        self._counts = counts
        self._texts: dict[tuple[str, int], str] = {}
        self._threads: dict[tuple[int, str, int], int] = {}
        self._lanes: dict[tuple[int, str], Lanes] = {}
        self._host_pid = self.session.pid if self.session.pid and 0 < self.session.pid < _GPU_PID else 1
        self._processes: set[int] = set()
        self._new: list[str] = []
        self.base_ns = self._first_ns()

    def pieces(self) -> Iterator[list[str]]:
        """Events of all kinds, in lists of some thousands."""
        for made in (
            self._gpu(),
            self._calls(),
            self._scopes(),
            self._ranges(),
            self._telemetry("device_metric"),
            self._telemetry("host_metric"),
            self._hardware(),
            self._memory(),
        ):
            for events in made:
                ready, self._new = self._new + events, []
                self._counts.events += len(ready)
                yield ready
        for table in _NO_TIME:
            row = self._reader.rows(
                f"SELECT count(*) AS count FROM {self._reader.table(table)}"  # noqa: S608
                f" WHERE clock <> 0 OR {TABLES[table].time} IS NULL"
            )[0]
            self._counts.unplaced += row["count"]

    def _first_ns(self) -> int:
        times = [t for t in (self.session.start_ns, self.session.first_event_ns) if t is not None]
        for table in _NO_TIME:
            time = TABLES[table].time
            row = self._reader.rows(
                f"SELECT min({time}) AS first FROM {self._reader.table(table)} WHERE clock = 0"  # noqa: S608
            )[0]
            times += [row["first"]] if row["first"] is not None else []
        calls = self._reader.rows(f"SELECT min(api_start_ns) AS first FROM {self._work()}")[0]["first"]  # noqa: S608
        times += [calls] if calls is not None else []
        return min(times, default=0)

    # --- lanes -----------------------------------------------------------------------------------------------------

    def _text(self, dictionary: str, rows: list[dict[str, Any]], column: str) -> None:
        """Fetch the texts of a page that are not known yet."""
        wanted = {row[column] for row in rows if row[column] and (dictionary, row[column]) not in self._texts}
        for (_, number), text in self._reader.texts(dictionary, wanted).items():
            self._texts[dictionary, number] = text

    def _name(self, dictionary: str, number: int | None, what: str) -> str:
        return self._texts.get((dictionary, number or 0)) or (f"{what} #{number}" if number else what)

    def _gpu_pid(self, device: int | None) -> int:
        number = _NO_DEVICE if device is None else device % _NO_DEVICE
        pid = _GPU_PID + number
        self._process(pid, "GPU (device not told)" if device is None else f"GPU {device}", 1 + number)
        return pid

    def _process(self, pid: int, name: str, order: int) -> None:
        if pid in self._processes:
            return
        self._processes.add(pid)
        for what, args in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": order})):
            self._new.append(_json({"ph": "M", "name": what, "pid": pid, "tid": 0, "args": args}))

    def _place(self, pid: int, track: str, start_ns: int, end_ns: int, *, nested: bool = False) -> int:
        """Thread number of the lane that an event gets."""
        lanes = self._lanes.setdefault((pid, track), Lanes(nested=nested))
        lane = lanes.place(start_ns, end_ns)
        key = (pid, track, lane)
        thread = self._threads.get(key)
        if thread is None:
            thread = self._threads[key] = len(self._threads) + 1
            name = track if lane == 0 else f"{track} (beside, {lane + 1})"
            for what, args in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": thread})):
                self._new.append(_json({"ph": "M", "name": what, "pid": pid, "tid": thread, "args": args}))
        return thread

    def _host(self, track: str, start_ns: int, end_ns: int) -> tuple[int, int]:
        pid = self._host_process()
        return pid, self._place(pid, track, start_ns, end_ns, nested=True)

    def _slice(
        self, name: str, category: str, lane: tuple[int, int], start_ns: int, end_ns: int, args: dict[str, Any]
    ) -> str:
        known = {key: value for key, value in args.items() if value is not None}
        return (
            f'{{"ph":"X","name":{json.dumps(name)},"cat":"{category}","pid":{lane[0]},"tid":{lane[1]},'
            f'"ts":{self._us(start_ns)},"dur":{_us(max(end_ns - start_ns, 0))},"args":{json.dumps(known)}}}'
        )

    def _flow(self, phase: str, number: int, lane: tuple[int, int], time_ns: int) -> str:
        bound = ',"bp":"e"' if phase == "f" else ""
        return (
            f'{{"ph":"{phase}","name":"launch","cat":"launch","id":{number},"pid":{lane[0]},"tid":{lane[1]},'
            f'"ts":{self._us(time_ns)}{bound}}}'
        )

    def _us(self, time_ns: int) -> str:
        return _us(time_ns - self.base_ns)

    # --- kinds of events -------------------------------------------------------------------------------------------

    def _work(self) -> str:
        """SQL of kernels, copies and fills. Calls whose time is 0, or since boot, have none."""
        call = f"CASE WHEN api_start_ns >= {_EPOCH_FROM_NS} THEN api_start_ns END AS api_start_ns"
        shared = f"duration_ns, stream_id, device_id, corr_id, {call}, api_exit_ns"
        kernels = f"SELECT 0 AS kind, start_ns, {shared}, kernel_id, NULL AS copy_kind, NULL AS bytes, num_regs"
        copies = f"SELECT 1, start_ns, {shared}, NULL, copy_kind, bytes, NULL"
        fills = f"SELECT 2, start_ns, {shared}, NULL, NULL, bytes, NULL"
        return "({} UNION ALL {} UNION ALL {})".format(
            *(
                f"{select} FROM {self._reader.table(table)} WHERE clock = 0 AND start_ns IS NOT NULL"
                for select, table in ((kernels, "kernel"), (copies, "memcpy"), (fills, "memset"))
            )
        )

    def _title(self, row: dict[str, Any]) -> tuple[str, str]:
        if row["kind"] == 0:
            return self._name("kernel", row["kernel_id"], "kernel"), "kernel"
        if row["kind"] == 1:
            return f"Memcpy {COPY_KINDS.get(row['copy_kind'], '')}".rstrip(), "gpu_memcpy"
        return "Memset", "gpu_memset"

    def _gpu(self) -> Iterator[list[str]]:
        for rows in in_order(self._reader, self._work(), "start_ns", "kind, stream_id, corr_id"):
            self._text("kernel", rows, "kernel_id")
            events = []
            for row in rows:
                start_ns, end_ns = row["start_ns"], row["start_ns"] + max(row["duration_ns"] or 0, 0)
                pid = self._gpu_pid(row["device_id"])
                stream = "stream not told" if row["stream_id"] is None else f"stream {row['stream_id']}"
                lane = (pid, self._place(pid, stream, start_ns, end_ns))
                name, category = self._title(row)
                args = {
                    "device": row["device_id"],
                    "stream": row["stream_id"],
                    "correlation": row["corr_id"],
                    "bytes": row["bytes"],
                    "registers per thread": row["num_regs"],
                }
                if row["duration_ns"] is None:
                    args["duration"] = "unknown"
                events.append(self._slice(name, category, lane, start_ns, end_ns, args))
                if row["api_start_ns"] is not None and row["corr_id"] is not None:
                    events.append(self._flow("f", row["corr_id"], lane, start_ns))
            yield events

    def _calls(self) -> Iterator[list[str]]:
        sql = f"(SELECT * FROM {self._work()} WHERE api_start_ns IS NOT NULL)"  # noqa: S608
        for rows in in_order(self._reader, sql, "api_start_ns", "corr_id"):
            events = []
            for row in rows:
                start_ns = row["api_start_ns"]
                end_ns = max(row["api_exit_ns"] if row["api_exit_ns"] is not None else start_ns, start_ns)
                lane = self._host("CUDA calls", start_ns, end_ns)
                args = {"correlation": row["corr_id"]}
                events.append(
                    self._slice(f"launch {self._title(row)[0]}", "cuda_runtime", lane, start_ns, end_ns, args)
                )
                if row["corr_id"] is not None:
                    events.append(self._flow("s", row["corr_id"], lane, start_ns))
            yield events

    def _scopes(self) -> Iterator[list[str]]:
        sql = scope_runs(self._reader.table("scope"))
        for rows in in_order(self._reader, sql, "time_ns", "depth, end_ns DESC NULLS FIRST"):
            self._text("scope", rows, "name_id")
            events = []
            for row in rows:
                end_ns = row["end_ns"] if row["end_ns"] is not None else row["last_ns"]
                lane = self._host("scopes", row["time_ns"], end_ns)
                args = {"instance": row["scope_instance_id"], "repeat": row["repeat"]}
                if row["end_ns"] is None:
                    args["end"] = "not in the log"
                name = self._name("scope", row["name_id"], "scope")
                events.append(self._slice(name, "user_annotation", lane, row["time_ns"], end_ns, args))
            yield events

    def _ranges(self) -> Iterator[list[str]]:
        """NVTX, waits and deep windows on lanes of their own."""
        for table, track, dictionary, column in (
            ("nvtx", "NVTX", "marker", "name_id"),
            ("sync", "waits", "function", "function_id"),
            ("deep_window", "deep windows", "", "name"),
        ):
            sql = f"(SELECT * FROM {self._reader.table(table)} WHERE clock = 0 AND start_ns IS NOT NULL)"  # noqa: S608
            for rows in in_order(self._reader, sql, "start_ns", "duration_ns DESC NULLS LAST"):
                if dictionary:
                    self._text(dictionary, rows, column)
                events = []
                for row in rows:
                    end_ns = row["start_ns"] + max(row["duration_ns"] or 0, 0)
                    lane = self._host(track, row["start_ns"], end_ns)
                    if table == "sync":
                        kind = SYNC_TYPES.get(row["sync_type"] or 0, str(row["sync_type"]))
                        where = self._texts.get((dictionary, row[column] or 0))
                        args = {"place": where, "stream": row["stream_id"], "correlation": row["corr_id"]}
                        name = f"wait for {kind}"
                    else:
                        args = {"domain": row.get("domain") or None}
                        name = self._name(dictionary, row[column], track) if dictionary else row[column] or track
                    category = "cuda_sync" if table == "sync" else "user_annotation"
                    events.append(self._slice(name, category, lane, row["start_ns"], end_ns, args))
                yield events

    def _counter(self, pid: int, name: str, time_ns: int, value: float) -> str:
        shown = value if isinstance(value, int) else float(f"{value:.9g}")
        return (
            f'{{"ph":"C","name":{json.dumps(name)},"pid":{pid},"tid":0,"ts":{self._us(time_ns)},'
            f'"args":{{"value":{json.dumps(shown)}}}}}'
        )

    def _telemetry(self, table: str) -> Iterator[list[str]]:
        names = metrics_of(table)  # type: ignore[arg-type]
        sql = f"(SELECT * FROM {self._reader.table(table)} WHERE clock = 0)"  # noqa: S608
        for rows in in_order(self._reader, sql, "time_ns"):
            events = []
            for row in rows:
                pid = self._gpu_pid(row["device_id"]) if table == "device_metric" else self._host_process()
                events += [
                    self._counter(pid, name, row["time_ns"], row[name]) for name in names if row[name] is not None
                ]
            yield events

    def _host_process(self) -> int:
        self._process(self._host_pid, f"{self.session.app or 'program'} (host)", 0)
        return self._host_pid

    def _hardware(self) -> Iterator[list[str]]:
        sql = f"(SELECT * FROM {self._reader.table('pm_sample')} WHERE clock = 0 AND value IS NOT NULL)"  # noqa: S608
        for rows in in_order(self._reader, sql, "time_ns", "metric_id"):
            self._text("metric", rows, "metric_id")
            yield [
                self._counter(
                    self._gpu_pid(row["device_id"]),
                    self._name("metric", row["metric_id"], "counter"),
                    row["time_ns"],
                    row["value"],
                )
                for row in rows
            ]

    def _memory(self) -> Iterator[list[str]]:
        devices = self._reader.rows(
            f"SELECT DISTINCT device_id FROM {self._reader.table('allocation')} WHERE device_id IS NOT NULL"  # noqa: S608
        )
        for row in sorted(devices, key=lambda row: row["device_id"]):
            points = memory_series(self._reader, device_id=row["device_id"], points=MAX_ROWS)
            pid = self._gpu_pid(row["device_id"]) if points else 0
            yield [self._counter(pid, "memory in use, bytes", point.time_ns, point.bytes) for point in points]


def _us(ns: int) -> str:
    """µs with all ns as the fraction."""
    return f"{ns // 1000}.{ns % 1000:03}"


def _json(event: dict[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":"))
