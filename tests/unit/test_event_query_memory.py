"""Questions about copies, fills and allocations, answered by the store and by loops over the same rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("duckdb")
import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.unit.event_rows import Rows, both, fill, names

from gpuflight.errors import InputError
from gpuflight.events.names import text_id
from gpuflight.events.query.allocations import held, memory_series, memory_use
from gpuflight.events.query.copies import copies, fills
from gpuflight.events.query.reader import MAX_ROWS
from gpuflight.events.store import EventStore
from gpuflight.events.tables import COPY_KINDS, MEMORY_KINDS


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EventStore]:
    made = EventStore(str(tmp_path_factory.mktemp("events") / "store"), threads=1)
    yield made
    made.close()


def maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


BASE_NS = 10**18
copy = st.fixed_dictionaries(
    {
        "start_ns": st.integers(BASE_NS, BASE_NS + 100),
        "duration_ns": maybe(st.integers(0, 50)),
        "bytes": maybe(st.integers(0, 5000) | st.integers(60_000, 70_000) | st.integers(0, 2**40)),
        "copy_kind": maybe(st.integers(0, 11)),
        "src_kind": maybe(st.just("Device")),
        "dst_kind": maybe(st.just("Host")),
    }
)
EDGES = (0, 4096, 65_536, 1 << 20, 16 << 20, 256 << 20, None)


def size_class(size: int | None) -> tuple[int | None, int | None]:
    if size is None:
        return None, None
    return next(
        (low, high) for low, high in itertools.pairwise(EDGES) if low is not None and (high is None or size < high)
    )


def direction(row: dict[str, Any]) -> str | None:
    if row["copy_kind"] in COPY_KINDS:
        return COPY_KINDS[row["copy_kind"]]
    return "DeviceToHost" if row["src_kind"] and row["dst_kind"] else None


@given(st.lists(copy, max_size=30), st.booleans(), maybe(st.integers(BASE_NS, BASE_NS + 120)))
@settings(max_examples=examples(50), deadline=None)
def test_copies(store: EventStore, rows: Rows, by_size: bool, from_ns: int | None) -> None:
    groups: dict[Any, Rows] = defaultdict(list)
    for row in rows:
        if from_ns is None or row["start_ns"] + (row["duration_ns"] or 0) >= from_ns:
            sizes = size_class(row["bytes"]) if by_size else (None, None)
            groups[direction(row), *sizes].append(row)
    found = copies(fill(store, memcpy=rows), by_size=by_size, from_ns=from_ns)
    assert sum(line.count for line in found) == sum(map(len, groups.values()))
    expected = sorted(repr(item) for item in (_line(key, group) for key, group in groups.items()))
    assert sorted(repr(_told(line)) for line in found) == expected
    assert [line.total_ns for line in found] == sorted((line.total_ns for line in found), reverse=True)


def _line(key: Any, group: Rows) -> tuple[Any, ...]:
    sizes = [row["bytes"] for row in group if row["bytes"] is not None]
    timed = [row for row in group if row["duration_ns"] and row["bytes"] is not None]
    rate = sum(r["bytes"] for r in timed) * 1e9 / sum(r["duration_ns"] for r in timed) if timed else None
    best = max((r["bytes"] * 1e9 / r["duration_ns"] for r in timed), default=None)
    return (
        *key,
        len(group),
        sum(sizes),
        sum(row["duration_ns"] or 0 for row in group),
        len(timed),
        None if rate is None else f"{rate:.9e}",
        None if best is None else f"{best:.9e}",
        min(sizes, default=None),
        max(sizes, default=None),
        len(group) - len(sizes),
    )


def _told(line: Any) -> tuple[Any, ...]:
    return (
        line.direction,
        line.size_from_bytes,
        line.size_to_bytes,
        line.count,
        line.bytes,
        line.total_ns,
        line.timed_count,
        None if line.bytes_per_s is None else f"{line.bytes_per_s:.9e}",
        None if line.best_bytes_per_s is None else f"{line.best_bytes_per_s:.9e}",
        line.min_bytes,
        line.max_bytes,
        line.unsized_count,
    )


def test_fills(store: EventStore) -> None:
    rows = [
        {"start_ns": BASE_NS, "duration_ns": 4, "bytes": 400, "stream_id": 7, "device_id": 0},
        {"start_ns": BASE_NS + 10, "duration_ns": 6, "bytes": 200, "stream_id": 7, "device_id": 0},
        {"start_ns": BASE_NS + 20, "duration_ns": 0, "bytes": 1, "stream_id": 8, "device_id": 0},
        {"start_ns": BASE_NS + 30, "stream_id": 9},
    ]
    reader = fill(store, memset=rows)
    found = [(f.device_id, f.stream_id, f.count, f.bytes, f.total_ns, f.bytes_per_s) for f in fills(reader)]
    assert found == [(0, 7, 2, 600, 10, 6e10), (0, 8, 1, 1, 0, None), (None, 9, 1, 0, 0, None)]
    assert [line.stream_id for line in fills(reader, from_ns=BASE_NS + 11, to_ns=BASE_NS + 30)] == [7, 8]
    assert [line.stream_id for line in fills(reader, limit=1)] == [7]


@st.composite
def programs(draw: st.DrawFn) -> Rows:
    """What a program does to its memory, in the order of time; some of it unseen."""
    rows: Rows = []
    now = BASE_NS
    for _ in range(draw(st.integers(0, 25))):
        now += draw(st.integers(1, 20))
        rows.append(
            {
                "start_ns": now,
                "memory_op": draw(st.sampled_from([1, 1, 2])),
                "memory_kind": draw(maybe(st.sampled_from([0, 2, 3, 5]))),
                "device_id": draw(maybe(st.integers(0, 1))),
                "address": draw(st.sampled_from([2**63 + 1, 4096, 8192])),
                "bytes": draw(maybe(st.integers(1, 1000))),
            }
        )
    return rows


def played(rows: Rows) -> tuple[dict[Any, dict[str, int]], Rows, list[tuple[int, int, int]]]:
    """Statistics by (kind, device), what is still held, and device memory in use (time, before, after)."""
    live: dict[int, dict[str, Any]] = {}
    used: dict[Any, int] = defaultdict(int)
    lines: dict[Any, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    device, levels = 0, []

    def change(row: dict[str, Any], size: int, now: int) -> None:
        nonlocal device
        key = (row["memory_kind"] or 0, row["device_id"])
        used[key] += size
        if used[key] > lines[key]["peak_bytes"] or "peak_ns" not in lines[key]:
            lines[key]["peak_bytes"], lines[key]["peak_ns"] = used[key], now
        if key[0] in (3, 4, 5, 6, 7):
            levels.append((now, device, device + size))
            device += size

    for row in rows:
        key = (row["memory_kind"] or 0, row["device_id"])
        former = live.pop(row["address"], None)
        if former is not None:
            old = (former["memory_kind"] or 0, former["device_id"])
            change(former, -(former["bytes"] or 0), row["start_ns"])
        if row["memory_op"] == 1:
            if former is not None:
                lines[old]["unseen_frees_count"] += 1
            lines[key]["allocations_count"] += 1
            lines[key]["allocated_bytes"] += row["bytes"] or 0
            live[row["address"]] = row
            change(row, row["bytes"] or 0, row["start_ns"])
        else:
            lines[old if former is not None else key]["frees_count"] += 1
            if former is None:
                lines[key]["unmatched_frees_count"] += 1
    for row in live.values():
        key = (row["memory_kind"] or 0, row["device_id"])
        lines[key]["held_bytes"] += row["bytes"] or 0
        lines[key]["held_count"] += 1
    return lines, list(live.values()), levels


@given(programs())
@settings(max_examples=examples(60), deadline=None)
def test_memory(store: EventStore, rows: Rows) -> None:
    reader = fill(store, allocation=rows)
    lines, leaks, levels = played(rows)
    counters = [
        *("allocations_count", "allocated_bytes", "frees_count", "unmatched_frees_count", "unseen_frees_count"),
        *("peak_bytes", "held_bytes", "held_count"),
    ]
    found = memory_use(reader)
    assert {(line.kind, line.device_id): [getattr(line, name) for name in counters] for line in found} == {
        (MEMORY_KINDS[kind], device): [line[name] for name in counters] for (kind, device), line in lines.items()
    }
    for line in found:
        if line.peak_bytes:
            key = next(k for k, v in MEMORY_KINDS.items() if v == line.kind), line.device_id
            assert line.peak_ns == lines[key]["peak_ns"]
    assert [line.peak_bytes for line in found] == sorted((line.peak_bytes for line in found), reverse=True)
    leaks.sort(key=lambda r: (r["bytes"] is None, -(r["bytes"] or 0), r["start_ns"]))
    assert [(h.address, h.bytes, h.start_ns) for h in held(reader, limit=MAX_ROWS)] == [
        (r["address"], r["bytes"], r["start_ns"]) for r in leaks
    ]
    for points in (1, 3, 500):
        series = memory_series(reader, points=points)
        assert len(series) <= points
        assert [p.time_ns for p in series] == sorted(p.time_ns for p in series)
        highest = max((max(before, after) for _, before, after in levels), default=0)
        assert max((p.bytes for p in series), default=0) == highest


def test_what_is_held_tells_where(store: EventStore) -> None:
    row = {"start_ns": BASE_NS, "memory_op": 1, "memory_kind": 3, "address": 1, "bytes": 5}
    row |= {"scope_id": text_id("global|load"), "stack_id": text_id("main|load")}
    reader = fill(
        store,
        allocation=[row],
        name=names("user_scope", {text_id("global|load"): "global|load"})
        + names("stack", {text_id("main|load"): "main|load"}),
    )
    assert [(h.kind, h.scope, h.stack) for h in held(reader)] == [("device", "global|load", "main|load")]


def test_addresses_of_two_sessions_are_different(store: EventStore) -> None:
    taken = {"start_ns": BASE_NS, "memory_op": 1, "memory_kind": 3, "address": 1, "bytes": 5}
    one, two = fill(store, allocation=[taken]), fill(store, allocation=[{**taken, "memory_op": 2}])
    assert len(held(both(one, two))) == 1
    assert memory_use(two)[0].unmatched_frees_count == 1


def test_bounds(store: EventStore) -> None:
    reader = fill(store)
    assert copies(reader) == fills(reader) == memory_use(reader) == held(reader) == memory_series(reader) == []
    for points in (0, MAX_ROWS + 1):
        with pytest.raises(InputError):
            memory_series(reader, points=points)
