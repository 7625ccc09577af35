"""Sessions as traces for Perfetto, as CSV, NDJSON and Parquet: what is written, read back."""

from __future__ import annotations

import csv
import gzip
import io
import json
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("duckdb")
import duckdb
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.unit.event_rows import Rows, both, fill, names
from tests.unit.gpufl_files import CLEAN, GEN

from gpuflight.errors import InputError
from gpuflight.events.export import windows
from gpuflight.events.export.lanes import Lanes
from gpuflight.events.export.tables import QUERIES, columns_of, text_of, write_parquet
from gpuflight.events.export.trace import TraceCounts, chrome_trace
from gpuflight.events.files import find_sessions
from gpuflight.events.load import load_folders
from gpuflight.events.query.reader import Reader
from gpuflight.events.store import EventStore
from gpuflight.events.tables import TABLES

BASE_NS = 10**18


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EventStore]:
    made = EventStore(str(tmp_path_factory.mktemp("events") / "store"), threads=1)
    load_folders(made, find_sessions(str(GEN)))
    yield made
    made.close()


def clean(store: EventStore) -> Reader:
    session = store.session(CLEAN.name)
    assert session is not None
    return Reader(store, [session])


class Trace:
    """A trace, checked for what Perfetto and chrome://tracing demand of one."""

    def __init__(self, reader: Reader) -> None:
        self.counts = TraceCounts()
        self.text = b"".join(chrome_trace(reader, self.counts))
        raw = json.loads(self.text, parse_float=Fraction)
        self.base_ns: int = raw["baseTimeNanoseconds"]
        self.events: list[dict[str, Any]] = raw["traceEvents"]
        assert raw["displayTimeUnit"] == "ns"
        assert self.counts.events == len(self.events)
        lanes: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        ends: dict[str, list[dict[str, Any]]] = {"s": [], "f": []}
        for event in self.events:
            assert event["ph"] in "XMCsf"
            assert 0 <= event["pid"] < 2**32 and 0 <= event["tid"] < 2**32
            if event["ph"] == "M":
                continue
            time_ns = Fraction(event["ts"]) * 1000
            assert time_ns.denominator == 1 and time_ns >= 0
            assert float(event["ts"]) < 2**53 / 1000  # ns survive in a double
            if event["ph"] == "X":
                lanes[event["pid"], event["tid"]].append((int(time_ns), int(time_ns + Fraction(event["dur"]) * 1000)))
            elif event["ph"] == "C":
                (value,) = event["args"].values()
                assert not isinstance(value, str)
            else:
                ends[event["ph"]].append(event)
        for intervals in lanes.values():
            stack: list[int] = []
            for start, end in sorted(intervals, key=lambda i: (i[0], -i[1])):
                while stack and stack[-1] <= start:
                    stack.pop()
                assert not stack or end <= stack[-1], "overlaps without nesting"
                stack.append(end)
        begun = {(e["cat"], e["name"], e["id"]) for e in ends["s"]}
        assert begun == {(e["cat"], e["name"], e["id"]) for e in ends["f"]}
        for event in ends["s"] + ends["f"]:
            at = int(Fraction(event["ts"]) * 1000)
            assert any(start <= at <= end for start, end in lanes[event["pid"], event["tid"]]), "arrow beside a slice"
            assert event["ph"] == "s" or event["bp"] == "e"
        self.names = {
            (e["pid"], e["tid"]): e["args"]["name"]
            for e in self.events
            if e["ph"] == "M" and e["name"] == "thread_name"
        }
        self.processes = {
            e["pid"]: e["args"]["name"] for e in self.events if e["ph"] == "M" and e["name"] == "process_name"
        }
        assert lanes.keys() <= self.names.keys()
        assert {pid for pid, _ in lanes} <= self.processes.keys()

    def slices(self, category: str) -> list[tuple[str, int, int]]:
        return [
            (e["name"], self.base_ns + int(Fraction(e["ts"]) * 1000), int(Fraction(e["dur"]) * 1000))
            for e in self.events
            if e["ph"] == "X" and e["cat"] == category
        ]


# --- trace ------------------------------------------------------------------------------------------------------------


def test_every_event_of_the_fixtures_is_where_it_was(store: EventStore) -> None:
    for session in store.catalogue.find()[0]:
        reader = Reader(store, [session])
        trace = Trace(reader)
        for table, category in (("kernel", "kernel"), ("memcpy", "gpu_memcpy"), ("memset", "gpu_memset")):
            rows = reader.rows(f"SELECT start_ns, duration_ns FROM {reader.table(table)} WHERE clock = 0")
            wanted = Counter((row["start_ns"], row["duration_ns"] or 0) for row in rows)
            assert Counter((start, duration) for _, start, duration in trace.slices(category)) == wanted
        unplaced = sum(
            reader.rows(f"SELECT count(*) AS n FROM {reader.table(t)} WHERE clock <> 0")[0]["n"]
            for t in (
                "kernel",
                "memcpy",
                "memset",
                "sync",
                "scope",
                "nvtx",
                "device_metric",
                "host_metric",
                "pm_sample",
            )
        )
        assert trace.counts.unplaced >= unplaced


def test_lanes_names_and_counters(store: EventStore) -> None:
    trace = Trace(clean(store))
    assert {"stream 7", "scopes", "waits", "NVTX", "CUDA calls"} <= set(trace.names.values())
    assert "fixture_app (host)" in trace.processes.values() and "GPU 0" in trace.processes.values()
    counters = {e["name"] for e in trace.events if e["ph"] == "C"}
    assert {"gpu_util_pct", "power_mw", "cpu_pct", "sm__warps_launched.sum", "memory in use, bytes"} <= counters
    assert {name for name, _, _ in trace.slices("user_annotation")} >= {"train_step"}
    assert len([e for e in trace.events if e["ph"] == "s"]) == 6  # memset events carry their calls
    kernels = {name for name, _, _ in trace.slices("kernel")}
    assert 'λ_unicode_kernel "quoted"\\path' in kernels


intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), max_size=40)


@given(intervals, st.booleans())
def test_lanes_never_overlap(pairs: list[tuple[int, int]], nested: bool) -> None:
    lanes = Lanes(nested=nested)
    placed: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for start, length in sorted(pairs):
        lane = lanes.place(start, start + length)
        for other, end in placed[lane]:
            beside = end <= start or start + length <= other
            inside = other <= start and start + length <= end
            assert beside or (nested and inside)
        placed[lane].append((start, start + length))
    assert sorted(placed) == list(range(len(placed)))


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "start_ns": st.integers(BASE_NS, BASE_NS + 50),
                "duration_ns": st.none() | st.integers(0, 20),
                "stream_id": st.none() | st.integers(7, 8),
                "device_id": st.none() | st.integers(0, 1),
                "kernel_id": st.integers(0, 2),
                "api_start_ns": st.none() | st.just(0) | st.integers(BASE_NS - 30, BASE_NS),
                "api_exit_ns": st.none() | st.integers(BASE_NS - 30, BASE_NS + 10),
            }
        ),
        max_size=25,
    ),
    st.integers(1, 5),
)
@settings(max_examples=examples(50), deadline=None)
def test_any_kernels_make_a_valid_trace(store: EventStore, rows: Rows, at_once: int) -> None:
    for number, row in enumerate(rows):
        row["corr_id"] = number
    reader = fill(store, kernel=rows, name=names("kernel", {1: "gemm\ufffd</script>"}))
    before, windows._ROWS_AT_ONCE = windows._ROWS_AT_ONCE, at_once
    try:
        trace = Trace(reader)
    finally:
        windows._ROWS_AT_ONCE = before
    assert Counter((s, d) for _, s, d in trace.slices("kernel")) == Counter(
        (row["start_ns"], row["duration_ns"] or 0) for row in rows
    )
    called = [row for row in rows if row["api_start_ns"]]
    assert Counter(s for _, s, _ in trace.slices("cuda_runtime")) == Counter(row["api_start_ns"] for row in called)
    assert len([e for e in trace.events if e["ph"] == "f"]) == len(called)


def test_scopes_without_an_end_last_to_the_last_event(store: EventStore) -> None:
    rows = [
        {"time_ns": BASE_NS, "event_type": 0, "name_id": 1, "scope_instance_id": 1, "depth": 0},
        {"time_ns": BASE_NS + 10, "event_type": 0, "name_id": 2, "scope_instance_id": 2, "depth": 1},
        {"time_ns": BASE_NS + 30, "event_type": 1, "name_id": 2, "scope_instance_id": 2, "depth": 1},
    ]
    reader = fill(store, scope=rows, name=names("scope", {1: "outer", 2: "inner"}))
    trace = Trace(reader)
    assert sorted(trace.slices("user_annotation")) == [("inner", BASE_NS + 10, 20), ("outer", BASE_NS, 30)]
    outer = next(e for e in trace.events if e.get("name") == "outer")
    assert outer["args"]["end"] == "not in the log"


def test_legacy_scopes_are_paired_by_depth(store: EventStore) -> None:
    rows = [
        {"time_ns": BASE_NS + t, "event_type": e, "name_id": n, "depth": d}
        for t, e, n, d in ((0, 0, 1, 0), (5, 0, 2, 1), (7, 1, 2, 1), (8, 0, 2, 1), (9, 1, 2, 1), (20, 1, 1, 0))
    ]
    trace = Trace(fill(store, scope=rows, name=names("scope", {1: "outer", 2: "inner"})))
    assert sorted(trace.slices("user_annotation")) == [
        ("inner", BASE_NS + 5, 2),
        ("inner", BASE_NS + 8, 1),
        ("outer", BASE_NS, 20),
    ]


def test_what_has_no_time_is_counted(store: EventStore) -> None:
    reader = fill(
        store,
        {"kernel": [{"start_ns": 5, "duration_ns": 1, "kernel_id": 1}]},
        kernel=[{"start_ns": BASE_NS, "duration_ns": 1, "kernel_id": 1}],
    )
    trace = Trace(reader)
    assert (len(trace.slices("kernel")), trace.counts.unplaced) == (1, 1)


def test_an_empty_session_is_an_empty_trace(store: EventStore) -> None:
    assert Trace(fill(store)).events == []


# --- tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", TABLES)
def test_every_table_in_every_form(store: EventStore, table: str, tmp_path: Path) -> None:
    reader = both(*(Reader(store, [session]) for session in store.catalogue.find()[0] if session.app))
    count = reader.rows(f"SELECT count(*) AS n FROM {reader.table(table)}")[0]["n"]
    assert count or table in (
        "graph_node",
        "source_file",
        "disassembly",
        "ptx",
        "unknown",
        "kernel_start",
        "kernel_end",
    )
    lines = b"".join(text_of(reader, table, "ndjson")).splitlines()
    from_lines = [json.loads(line) for line in lines]
    from_csv = list(csv.DictReader(io.StringIO(b"".join(text_of(reader, table, "csv")).decode(), newline="")))
    path = tmp_path / "made.parquet"
    assert write_parquet(store, reader.sessions, table, str(path)) == count
    found = duckdb.sql(f"SELECT * FROM '{path}'")
    assert [(c, str(t)) for c, t in zip(found.columns, found.types, strict=True)] == columns_of(table)
    from_parquet = [
        {c: v for c, v in zip(found.columns, row, strict=True) if v is not None} for row in found.fetchall()
    ]
    assert len(from_lines) == len(from_csv) == len(from_parquet) == count
    assert Counter(map(repr, map(sorted, map(dict.items, from_lines)))) == Counter(
        map(repr, map(sorted, map(dict.items, from_parquet)))
    )
    for row, line in zip(from_csv, from_lines, strict=True):
        assert {k: v for k, v in row.items() if v != ""} == {k: str(v) for k, v in line.items() if v != ""}
    assert list(tmp_path.iterdir()) == [path]


def test_rows_come_in_order_of_time_with_their_texts(store: EventStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "_ROWS_AT_ONCE", 7)
    pieces = list(text_of(clean(store), "kernel", "ndjson"))
    assert len(pieces) > 6
    rows = [json.loads(line) for line in b"".join(pieces).splitlines()]
    assert len(rows) == 48
    assert [row["start_ns"] for row in rows] == sorted(row["start_ns"] for row in rows)
    assert all(row["kernel_name"] for row in rows)
    assert {row["session_id"] for row in rows} == {CLEAN.name}


def test_numbers_stay_exact(store: EventStore, tmp_path: Path) -> None:
    row = {"start_ns": BASE_NS, "memory_op": 1, "address": 2**64 - 1, "bytes": 2**62 + 1}
    reader = fill(store, allocation=[row])
    (line,) = b"".join(text_of(reader, "allocation", "ndjson")).splitlines()
    assert json.loads(line)["address"] == 2**64 - 1
    write_parquet(store, reader.sessions, "allocation", str(tmp_path / "a.parquet"))
    assert duckdb.sql(f"SELECT address, bytes FROM '{tmp_path}/a.parquet'").fetchall() == [(2**64 - 1, 2**62 + 1)]


@pytest.mark.parametrize("query", QUERIES)
def test_every_answer_in_every_form(store: EventStore, query: str, tmp_path: Path) -> None:
    reader = clean(store)
    lines = [json.loads(line) for line in b"".join(text_of(reader, query, "ndjson")).splitlines()]
    rows = list(csv.DictReader(io.StringIO(b"".join(text_of(reader, query, "csv")).decode(), newline="")))
    assert write_parquet(store, reader.sessions, query, str(tmp_path / "q.parquet")) == len(lines) == len(rows)
    if query not in ("held-memory", "stalls"):
        assert lines
    assert duckdb.sql(f"SELECT count(*) FROM '{tmp_path}/q.parquet'").fetchall() == [(len(lines),)]


def test_hostile_session_ids_and_paths(store: EventStore, tmp_path: Path) -> None:
    from gpuflight.events.batch import Batch

    np = pytest.importorskip("numpy")
    name = "x' OR 1=1; --"
    store.write([Batch("kernel", name, 1, {"start_ns": np.array([BASE_NS]), "duration_ns": np.array([1])})])
    session = store.session(name)
    assert session is not None
    folder = tmp_path / "it's here"
    folder.mkdir()
    assert write_parquet(store, [session], "kernel", str(folder / "k.parquet")) == 1
    (line,) = b"".join(text_of(Reader(store, [session]), "kernel", "ndjson")).splitlines()
    assert json.loads(line)["session_id"] == name


def test_what_there_is_not_is_refused(store: EventStore, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no table"):
        list(text_of(clean(store), "nope", "csv"))


# --- the command ------------------------------------------------------------------------------------------------------


def run(*argv: str) -> int:
    from gpuflight.cli import main

    return main(["export", *argv])


def test_command(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    out = tmp_path / "t.json.gz"
    assert run(str(CLEAN), "--out", str(out), "--json") == 0
    said = json.loads(capsysbinary.readouterr().out)
    trace = json.loads(gzip.decompress(out.read_bytes()))
    assert said["events"] == len(trace["traceEvents"]) and said["unplaced"] == 0
    assert run(str(CLEAN), "--out", str(out)) == 2
    assert run(str(CLEAN), "--out", str(out), "--force") == 0
    capsysbinary.readouterr()
    assert run(str(CLEAN), "--as", "csv", "--query", "copies") == 0
    assert capsysbinary.readouterr().out.startswith(b"direction,")
    assert run("-", "--list", "--json") == 0
    listed = json.loads(capsysbinary.readouterr().out)
    assert listed["tables"]["kernel"]["columns"]["start_ns"] == "BIGINT"
    for argv in (
        ["--as", "parquet"],
        ["--as", "csv", "--table", "kernel", "--query", "copies"],
        ["--as", "csv", "--table", "nope"],
        ["--as", "csv", "--query", "nope"],
        ["--table", "kernel"],
        ["--json"],
    ):
        assert run(str(CLEAN), *argv) == 2
    assert run(str(GEN / "v1.3.0rc1-segments")) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.json.gz"]


def test_a_full_disk_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuflight.cli import export

    def fails(*_: object) -> Iterator[bytes]:
        yield b"some"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        export._write_pieces(fails(), str(tmp_path / "x.json"))
    assert list(tmp_path.iterdir()) == []
    assert shutil.disk_usage(tmp_path).total
