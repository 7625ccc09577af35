"""The lanes of one session, out of an event store. What is too short to be seen is put together by the store itself, so
a session of a million kernels costs no more memory than one of a thousand."""

from __future__ import annotations

from typing import Any

from gpuflight.events.export.trace import scope_runs
from gpuflight.events.query.reader import Reader
from gpuflight.events.tables import COPY_KINDS, SYNC_TYPES, TABLES
from gpuflight.vis.text import plural
from gpuflight.vis.timeline import Lane, Slice, SliceKind, Timeline

PARTS = 500
"""Parts of the time of a session; what is shorter than one is put together with its neighbours."""
LONG_MAX = 5_000
"""Slices that are longer than a part, at most, of each kind of lane; the longest are kept."""
_TIMED = ("kernel", "memcpy", "memset", "sync", "scope", "nvtx", "deep_window")
_WORK_KINDS: tuple[SliceKind, ...] = ("kernel", "copy", "fill")


def read_timeline(
    reader: Reader, session_entity: str, label: str, stream_ids: dict[tuple[int | None, int | None], str]
) -> Timeline:
    """The timeline of the reader's first session. ``stream_ids`` gets the entity ids of streams as lanes need them."""
    session = reader.sessions[0]
    reading = _Reading(Reader(reader.store, [session]))
    lanes = [*reading.host(), *reading.work(stream_ids)]
    return Timeline(
        session=session_entity,
        session_id=session.session_id,
        label=label,
        start_ns=reading.first_ns,
        end_ns=reading.last_ns,
        lanes=lanes,
        notes=reading.notes,
    )


def streams_of(reader: Reader) -> list[dict[str, Any]]:
    """Device, stream, launches, copies and their times of every stream that did something at a known time."""
    return reader.rows(
        f"SELECT device_id, stream_id, count(*) FILTER (kind = 0) AS launches, count(*) FILTER (kind = 1) AS copies,"  # noqa: S608
        f" sum(end_ns - start_ns) FILTER (kind = 0) AS kernels_ns, sum(bytes) FILTER (kind = 1) AS copied_bytes"
        f" FROM {_work(reader)} GROUP BY ALL ORDER BY ALL"
    )


def _work(reader: Reader) -> str:
    """SQL of kernels, copies and fills."""
    shared = "start_ns, start_ns + greatest(coalesce(duration_ns, 0), 0) AS end_ns, device_id, stream_id"
    return "({} UNION ALL {} UNION ALL {})".format(
        *(
            f"SELECT {number} AS kind, {shared}, {name} AS name, {size} AS bytes FROM {reader.table(table)}"  # noqa: S608
            " WHERE clock = 0 AND start_ns IS NOT NULL"
            for number, table, name, size in (
                (0, "kernel", "kernel_id", "NULL"), (1, "memcpy", "copy_kind", "bytes"), (2, "memset", "NULL", "bytes"),
            )
        )
    )  # fmt: skip


class _Reading:
    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.notes: list[str] = []
        self.first_ns, self.last_ns = self._span()
        self._part_ns = max(1, (self.last_ns - self.first_ns) // PARTS)

    def _span(self) -> tuple[int, int]:
        """From the first to the last thing that has a time; those that have none are noted."""
        session = self._reader.sessions[0]
        first = [t for t in (session.start_ns, session.first_event_ns) if t]
        last = [t for t in (session.end_ns, session.last_event_ns) if t]
        unplaced = 0
        for table in _TIMED:
            time = TABLES[table].time
            long = "" if table == "scope" else " + greatest(coalesce(duration_ns, 0), 0)"
            row = self._reader.rows(
                f"SELECT min({time}) FILTER (clock = 0) AS first, max({time}{long}) FILTER (clock = 0) AS last,"  # noqa: S608
                f" count(*) FILTER (clock <> 0 OR {time} IS NULL) AS unplaced FROM {self._reader.table(table)}"
            )[0]
            unplaced += row["unplaced"]
            if row["first"] is not None:
                first.append(row["first"])
                last.append(row["last"])
        if unplaced:
            self.notes.append(f"{plural(unplaced, 'record')} without a wall-clock time: not on the time line")
        start_ns = min(first, default=0)
        return start_ns, max([start_ns, *last])

    def work(self, stream_ids: dict[tuple[int | None, int | None], str]) -> list[Lane]:
        """One lane per device and stream."""
        rows = self._slices(_work(self._reader), "device_id, stream_id, kind", "kernels and copies")
        texts = self._reader.texts("kernel", {row["name"] for row in rows if row["kind"] == 0 and row["name"]})
        kernels = {number: text for (_, number), text in texts.items()}
        lanes: dict[tuple[int | None, int | None], Lane] = {}
        for row in rows:
            key = (row["device_id"], row["stream_id"])
            lane = lanes.get(key)
            if lane is None:
                device = "GPU (device not told)" if key[0] is None else f"GPU {key[0]}"
                stream = "stream not told" if key[1] is None else f"stream {key[1]}"
                lane = lanes[key] = Lane(device, stream, [], stream_ids.get(key, ""))
            kind, name = row["kind"], row["name"]
            if kind == 0:
                label = kernels.get(name or 0) or (f"kernel #{name}" if name else "kernel")
            else:
                label = f"copy {COPY_KINDS.get(name, '')}".rstrip() if kind == 1 else "fill"
            lane.slices.append(_slice(row, label, _WORK_KINDS[kind]))
        return [lanes[key] for key in sorted(lanes, key=lambda key: tuple((part is None, part or 0) for part in key))]

    def host(self) -> list[Lane]:
        """Lanes of scopes, ranges, waits and deep windows; those without anything are left out."""
        scopes = (
            f"(SELECT time_ns AS start_ns, coalesce(end_ns, last_ns) AS end_ns, end_ns IS NULL AS open,"  # noqa: S608
            f" name_id AS name, depth FROM {scope_runs(self._reader.table('scope'))})"
        )
        found: list[tuple[str, SliceKind, list[dict[str, Any]], dict[int, str]]] = []
        rows = self._slices(scopes, "depth, open", "scopes")
        found.append(("scopes", "scope", rows, self._texts("scope", rows)))
        for track, kind, table, name, dictionary in (
            ("NVTX", "range", "nvtx", "name_id", "marker"),
            ("waits", "wait", "sync", "sync_type", ""),
            ("deep windows", "window", "deep_window", "NULL", ""),
        ):
            source = (
                f"(SELECT start_ns, start_ns + greatest(coalesce(duration_ns, 0), 0) AS end_ns, {name} AS name"  # noqa: S608
                f" FROM {self._reader.table(table)} WHERE clock = 0 AND start_ns IS NOT NULL)"
            )
            rows = self._slices(source, "", track)
            if dictionary:
                texts = self._texts(dictionary, rows)
            elif table == "sync":
                texts = {number: f"wait for {what}" for number, what in SYNC_TYPES.items()}
            else:
                texts = {}
            found.append((track, kind, rows, texts))  # type: ignore[arg-type]
        return [
            Lane("Host", track, [_slice(row, texts.get(row["name"] or 0) or kind, kind) for row in rows])
            for track, kind, rows, texts in found
            if rows
        ]

    def _texts(self, dictionary: str, rows: list[dict[str, Any]]) -> dict[int, str]:
        texts = self._reader.texts(dictionary, {row["name"] for row in rows if row["name"]})
        return {number: text for (_, number), text in texts.items()}

    def _slices(self, source: str, keys: str, what: str) -> list[dict[str, Any]]:
        """The long ones as they are, the short ones together by part, in order of time."""
        also = f"{keys}, " if keys else ""
        long = self._reader.rows(
            f"SELECT {also}start_ns, end_ns, name, 1 AS count, end_ns - start_ns AS busy_ns FROM {source}"  # noqa: S608
            f" WHERE end_ns - start_ns >= {self._part_ns} ORDER BY busy_ns DESC, start_ns, name LIMIT {LONG_MAX + 1}"
        )
        if len(long) > LONG_MAX:
            long.pop()
            self.notes.append(f"{what}: only the {LONG_MAX:,} longest are drawn one by one")
        short = self._reader.rows(
            f"SELECT {also}min(start_ns) AS start_ns, max(end_ns) AS end_ns,"  # noqa: S608
            f" arg_max(name, (end_ns - start_ns, -start_ns)) AS name, count(*) AS count,"
            f" sum(end_ns - start_ns) AS busy_ns, (start_ns - {self.first_ns}) // {self._part_ns} AS part"
            f" FROM {source} WHERE end_ns - start_ns < {self._part_ns} GROUP BY {also}part"
        )
        together = sum(row["count"] for row in short if row["count"] > 1)
        if together:
            self.notes.append(f"{what}: {together:,} too short to be seen are drawn together")
        return sorted((*long, *short), key=lambda row: (row["start_ns"], -row["end_ns"], row["name"] or 0))


def _slice(row: dict[str, Any], label: str, kind: SliceKind) -> Slice:
    return Slice(
        int(row["start_ns"]),
        int(row["end_ns"]),
        label,
        kind,
        int(row["count"]),
        int(row["busy_ns"]),
        bool(row.get("open")),
    )
