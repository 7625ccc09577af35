"""Writer of generation E: sessions that GPU Flight's own agent, analyzer and reports read, and so do we.

Different from the original in one thing: what is finished is on the disk (fsync), not only handed to the kernel.
"""

from __future__ import annotations

import errno
import fcntl
import os
import queue
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from gpuflight.events.files.names import CHANNELS
from gpuflight.events.files.sidecars import HELD, LOCK_NAME
from gpuflight.events.format.matrix import array_text
from gpuflight.events.format.plans import BATCHES, EVERY_CHANNEL
from gpuflight.events.format.windows import ActiveWindow, Retired, export, sync_directory, write_durably
from gpuflight.events.names import DICTIONARIES

ROWS_PER_BATCH = 2048
ROWS_PER_METRIC_BATCH = 4
FLUSH_AFTER_S = 0.25
SYNC_AFTER_S = 1
ROTATE_BYTES = 64 << 20
MAX_SPOOL_BYTES = 4 << 30
MIN_FREE_BYTES = 512 << 20
_LOOK_AFTER_BYTES = 1 << 20
_EXPORT_NICE = 10

CHANNEL_OF = {
    **dict.fromkeys(
        (
            "kernel_event_batch",
            "kernel_detail",
            "memcpy_event_batch",
            "memset_event",
            "sass_config",
            "kernel_perf_metric_event",
        ),
        "device",
    ),
    **dict.fromkeys(("device_metric_batch", "host_metric_batch", "system_start", "system_stop"), "system"),
    **dict.fromkeys(("source_file_content", "cubin_disassembly", "ptx_disassembly"), "sass"),
}
"""Channel of a type; types that are not here go to ``scope``, those of EVERY_CHANNEL to all."""

_VERSIONS = {"scope_event_batch": 3}
_UNVERSIONED = frozenset(
    {
        "memset_event",
        "nvtx_marker_event",
        "graph_launch_event",
        "graph_node_definition",
        "perf_metric_event",
        "kernel_perf_metric_event",
        "deep_window_event",
        "deep_window_rule_summary",
        "counter_data_quality_summary",
        "system_start",
        "system_stop",
        "shutdown",
    }
)
_WIRE_DICTIONARIES = {ours: wire for wire, ours in DICTIONARIES.items()}
_encode = msgspec.json.Encoder().encode


class SessionWriter:
    """One session. Thread-safe. Call ``tick`` a few times a second, ``close`` at the end (or use ``with``).

    ``folder``: the session's folder is made in it. ``compress``: finished windows, all or none, or as is answered for
    each (its bytes, whether it is needed because plain ones would soon fill the session). ``stopped``: why capture has
    ended before its time (spool limits), empty while it goes on; ``dropped`` counts the rows and events that came after
    that.
    """

    def __init__(
        self,
        folder: str,
        session_id: str = "",
        *,
        rotate_bytes: int = ROTATE_BYTES,
        rotate_after_s: float = 0,
        max_spool_bytes: int = MAX_SPOOL_BYTES,
        min_free_bytes: int = MIN_FREE_BYTES,
        compress: bool | Callable[[int, bool], bool] = True,
    ) -> None:
        self.session_id = session_id or str(uuid.uuid4())
        self.path = os.path.join(os.path.abspath(folder), self.session_id)
        self.stopped = ""
        self.dropped = 0
        self._rotate_bytes = rotate_bytes
        self._rotate_after_ms = rotate_after_s * 1000
        self._limits = (max_spool_bytes, min_free_bytes)
        self._compress = compress
        self._guard = threading.RLock()
        self._rows: dict[str, _Rows] = {}
        self._batch_ids: dict[str, int] = {}
        self._ids: dict[tuple[str, str], int] = {}
        self._counts: dict[str, int] = {}
        self._new_texts: dict[str, dict[str, str]] = {}
        self._unlooked_bytes = 0
        self._filling = False
        self._last_flush_s = self._last_sync_s = time.monotonic()
        self._closed = False
        os.makedirs(f"{self.path}/.tmp", exist_ok=True)
        self._lock = _take_lock(self.path)
        self._windows = {channel: ActiveWindow(self.path, channel, _mono_ms) for channel in CHANNELS}
        sync_directory(f"{self.path}/.tmp")
        sync_directory(os.path.dirname(self.path))
        self._retired: queue.Queue[Retired | None] = queue.Queue()
        self._export_error: OSError | None = None
        self._worker = threading.Thread(target=self._export_all, name="gpuflight-export", daemon=True)
        self._worker.start()

    def __enter__(self) -> SessionWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def text(self, dictionary: str, text: str) -> int:
        """Id of a text in one of the session's dictionaries, 0 for the empty one; written before its first use."""
        if not text:
            return 0
        with self._guard:
            key = (dictionary, text)
            identifier = self._ids.get(key)
            if identifier is None:
                identifier = self._counts[dictionary] = self._counts.get(dictionary, 0) + 1
                self._ids[key] = identifier
                texts = self._new_texts.setdefault(_WIRE_DICTIONARIES[dictionary], {})
                texts[str(identifier)] = _clean(text)
            return identifier

    def rows(self, wire_type: str, columns: Mapping[str, Sequence[Any] | Any], **envelope: str) -> None:
        """Rows of a columnar type under the names of the wire, ``dt_ns`` holding absolute times (UNIX ns).

        Sequences or numpy arrays of one length. ``envelope``: what else the batch's line says (hostname, ip_addr).
        """
        plan = BATCHES[wire_type]
        names = [name for name in plan.fields if name in columns]
        if len(names) != len(columns) or "dt_ns" not in columns:
            raise ValueError(f"{wire_type}: columns are {', '.join(plan.fields)}; dt_ns is needed")
        limit = ROWS_PER_METRIC_BATCH if wire_type.endswith("metric_batch") else ROWS_PER_BATCH
        chosen = [columns[name] for name in names]
        if len(chosen[0]) >= limit and all(hasattr(column, "tolist") for column in chosen):
            self._write_arrays(wire_type, names, chosen, envelope, limit)
            return
        values = [c.tolist() if hasattr(c, "tolist") else c for c in chosen]
        fresh = list(zip(*values, strict=True))
        with self._guard:
            if self._refuses(len(fresh)):
                return
            pending = self._rows.get(wire_type)
            if pending is not None and (pending.names != names or pending.envelope != envelope):
                self._flush_rows(wire_type)
                pending = None
            if pending is None:
                pending = self._rows[wire_type] = _Rows(names, envelope)
            pending.rows.extend(fresh)
            while len(pending.rows) >= limit and not self.stopped:
                self._write_batch(wire_type, pending, pending.rows[:limit])
                del pending.rows[:limit]

    def event(self, wire_type: str, fields: Mapping[str, Any]) -> None:
        """An event of one line, to its channel or to all; rows that wait are written before it."""
        with self._guard:
            if self._refuses(1):
                return
            self.flush(sync=False)
            version = {} if wire_type in _UNVERSIONED else {"version": 1}
            line = _line({**version, "type": wire_type, "session_id": self.session_id, **fields})
            for channel in CHANNELS if wire_type in EVERY_CHANNEL else (CHANNEL_OF.get(wire_type, "scope"),):
                self._write(channel, line)

    def events(self, wire_type: str, many: Iterable[Mapping[str, Any]]) -> None:
        """Events of one line each, of one channel; unlike ``event`` it leaves rows of other types waiting."""
        channel = CHANNEL_OF.get(wire_type, "scope")
        head: dict[str, Any] = {"type": wire_type, "session_id": self.session_id}
        if wire_type not in _UNVERSIONED:
            head = {"version": 1, **head}
        with self._guard:
            for fields in many:
                if not self._refuses(1):
                    self._write(channel, _line({**head, **fields}))

    def kernel_details(self, details: Iterable[Mapping[str, Any]]) -> None:
        """Launch configurations, a line each, behind the kernels they belong to."""
        with self._guard:
            self._flush_rows("kernel_event_batch")
            self.events("kernel_detail", details)

    def tick(self) -> None:
        """What time asks for: rows out after 250 ms, on the disk once a second, windows rotated by age."""
        with self._guard:
            if self._closed or self.stopped:
                return
            now = time.monotonic()
            if now - self._last_flush_s >= FLUSH_AFTER_S:
                self.flush(sync=now - self._last_sync_s >= SYNC_AFTER_S)
            if self._rotate_after_ms:
                for channel, window in self._windows.items():
                    if window.size_bytes and _mono_ms() - window.first_write_ms >= self._rotate_after_ms:
                        self._rotate(channel)

    def flush(self, *, sync: bool = True) -> None:
        """All rows into their files; with ``sync`` on the disk when it returns."""
        with self._guard:
            for wire_type in list(self._rows):
                self._flush_rows(wire_type)
            self._write_texts()
            self._last_flush_s = time.monotonic()
            if sync:
                self._last_sync_s = self._last_flush_s
            if not self.stopped:
                for window in self._windows.values():
                    window.flush(sync=sync)

    def close(self) -> None:
        """Everything out, compressed and identified; the lock is given back. Raises OSError if an export failed.

        Writing ``shutdown`` is up to the caller: a session without one counts as killed.
        """
        with self._guard:
            if self._closed:
                return
            self.flush()
            self._closed = True
            for window in self._windows.values():
                retired = window.end()
                if retired is not None:
                    self._retired.put(retired)
            self._retired.put(None)
        self._worker.join()
        if not os.listdir(f"{self.path}/.tmp"):
            os.rmdir(f"{self.path}/.tmp")
        sync_directory(self.path)
        _give_back(self._lock)
        if self._export_error is not None:
            raise self._export_error

    def loss(self, channel: str, reason: str, window_index: int = 0) -> None:
        """A loss marker: records of a channel were lost before they could be written. A later one of the channel with
        the same ``window_index`` replaces it."""
        _mark_loss(self.path, channel, window_index, reason)

    def abandon_in_child(self) -> None:
        """In a forked child: the files and the lock are the parent's; nothing of them may be written or given back
        here. Right after the fork, whose parent held ``before_fork``."""
        self._guard = threading.RLock()
        self._closed = True
        self._rows.clear()
        for window in self._windows.values():
            window.forget()
        _give_back(self._lock)

    def before_fork(self) -> None:
        """Nothing half written and nothing in a buffer that the child would write once more; ``after_fork`` follows."""
        self._guard.acquire()
        if not self._closed:
            for window in self._windows.values():
                window.flush(sync=False)

    def after_fork(self) -> None:
        """In the parent."""
        self._guard.release()

    def _refuses(self, count: int) -> bool:
        if self._closed:
            raise ValueError("session is closed")
        if self.stopped:
            self.dropped += count
        return bool(self.stopped)

    def _flush_rows(self, wire_type: str) -> None:
        pending = self._rows.pop(wire_type, None)
        if pending is not None and pending.rows:
            if self.stopped:
                self.dropped += len(pending.rows)
            else:
                self._write_batch(wire_type, pending, pending.rows)

    def _write_arrays(
        self, wire_type: str, names: list[str], arrays: list[Any], envelope: dict[str, str], limit: int
    ) -> None:
        """Many rows at once: batches straight from the arrays, a fourth of the work of rows that wait."""
        count = len(arrays[0])
        if any(len(array) != count for array in arrays):
            raise ValueError(f"{wire_type}: columns of different lengths")
        time_at = names.index("dt_ns")
        with self._guard:
            if self._refuses(count):
                return
            self._flush_rows(wire_type)
            for begin in range(0, count, limit):
                if self.stopped:
                    self.dropped += count - begin
                    return
                pieces = [array[begin : begin + limit] for array in arrays]
                base = int(pieces[time_at][0])
                pieces[time_at] = pieces[time_at] - pieces[time_at][0]
                text = array_text(pieces)
                if text is None:
                    rows = list(zip(*(piece.tolist() for piece in pieces), strict=True))
                    self._write_relative(wire_type, names, envelope, base, rows)
                else:
                    self._write_relative(wire_type, names, envelope, base, msgspec.Raw(text))

    def _write_batch(self, wire_type: str, pending: _Rows, rows: list[tuple[Any, ...]]) -> None:
        time_at = pending.names.index("dt_ns")
        base = rows[0][time_at]
        relative = [(*row[:time_at], row[time_at] - base, *row[time_at + 1 :]) for row in rows]
        self._write_relative(wire_type, pending.names, pending.envelope, base, relative)

    def _write_relative(
        self,
        wire_type: str,
        names: list[str],
        envelope: dict[str, str],
        base: int,
        rows: list[tuple[Any, ...]] | msgspec.Raw,
    ) -> None:
        self._write_texts()
        number = self._batch_ids[wire_type] = self._batch_ids.get(wire_type, 0) + 1
        line = _line(
            {
                "version": _VERSIONS.get(wire_type, 1),
                "type": wire_type,
                "session_id": self.session_id,
                **envelope,
                "batch_id": number,
                "base_time_ns": base,
                "columns": names,
                "rows": rows,
            }
        )
        self._write(CHANNEL_OF.get(wire_type, "scope"), line)

    def _write_texts(self) -> None:
        if self._new_texts and not self.stopped:
            texts, self._new_texts = self._new_texts, {}
            line = _line({"version": 1, "type": "dictionary_update", "session_id": self.session_id, **texts})
            for channel in CHANNELS:
                self._write(channel, line)

    def _write(self, channel: str, line: bytes) -> None:
        window = self._windows[channel]
        if window.size_bytes and window.size_bytes + len(line) > self._rotate_bytes:
            self._rotate(channel)
        self._unlooked_bytes += len(line)
        if self._unlooked_bytes >= _LOOK_AFTER_BYTES:
            self._look_at_disk()
        if self.stopped:
            self.dropped += 1
            return
        window.write(line)

    def _rotate(self, channel: str) -> None:
        retired = self._windows[channel].retire()
        if retired is not None:
            self._retired.put(retired)
        self._look_at_disk()

    def _look_at_disk(self) -> None:
        """Ends the capture where the session or the disk is full; says so in a loss marker."""
        self._unlooked_bytes = 0
        most, least = self._limits
        spool = _spool_bytes(self.path) if most else 0
        free = shutil.disk_usage(self.path).free if least else 0
        facts = f"spool_bytes={spool},max_spool_bytes={most},available_bytes={free},min_free_bytes={least}"
        self._filling = bool(most) and 2 * spool > most
        if most and spool > most:
            self._stop(f"spool_budget_exceeded:{facts}")
        elif least and free < least:
            self._stop(f"filesystem_reserve_reached:{facts}")

    def _stop(self, reason: str) -> None:
        self.stopped = reason
        _mark_loss(self.path, "spool", 0, reason)

    def _compresses(self, retired: Retired) -> bool:
        if not callable(self._compress):
            return self._compress
        return self._compress(retired.size_bytes, self._filling)

    def _export_all(self) -> None:
        try:  # compressing gives way to the program
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _EXPORT_NICE)
        except (OSError, AttributeError):
            pass
        while (retired := self._retired.get()) is not None:
            try:
                export(
                    self.path,
                    self.session_id,
                    retired,
                    compress=self._compresses(retired),
                    wall_ms=time.time_ns() // 1_000_000,
                )
            except OSError as error:  # the raw window stays where readers find it
                self._export_error = error


class _Rows:
    """Rows of one type that wait for their batch."""

    def __init__(self, names: list[str], envelope: dict[str, str]) -> None:
        self.names = names
        self.envelope = envelope
        self.rows: list[tuple[Any, ...]] = []


def _mark_loss(path: str, channel: str, window_index: int, reason: str) -> None:
    marker = {
        "schema_version": 1,
        "type": "transport_window_loss",
        "channel": channel,
        "window_index": window_index,
        "reason": reason,
    }
    write_durably(f"{path}/.gpufl-transport-loss.{channel}.{window_index}.json", _encode(marker))
    sync_directory(path)


def _mono_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def _line(fields: dict[str, Any]) -> bytes:
    try:
        return _encode(fields) + b"\n"
    except UnicodeEncodeError:
        return _encode(_clean(fields)) + b"\n"


def _clean(value: Any) -> Any:
    """Texts without lone surrogates, which are no UTF-8."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_clean(k): _clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(v) for v in value]
    return value


def _spool_bytes(path: str) -> int:
    """Of all log files of a session."""
    total = 0
    for directory in (path, f"{path}/.tmp"):
        with os.scandir(directory) as entries:
            for entry in entries:
                if ".log" in entry.name:
                    try:
                        total += entry.stat().st_size
                    except FileNotFoundError:
                        continue
    return total


def _take_lock(path: str) -> int:
    """The session's lock, for as long as the descriptor is open. Raises BlockingIOError if somebody has it."""
    name = f"{path}/{LOCK_NAME}"
    if os.path.exists(name) and (os.stat(name).st_dev, os.stat(name).st_ino) in HELD:
        raise BlockingIOError(errno.EAGAIN, "session is being written by this process", name)
    descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    status = os.fstat(descriptor)
    HELD.add((status.st_dev, status.st_ino))
    return descriptor


def _give_back(descriptor: int) -> None:
    status = os.fstat(descriptor)
    HELD.discard((status.st_dev, status.st_ino))
    os.close(descriptor)
