"""Exports of Nsight Systems as GPU events."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("duckdb")
from tests.unit.test_event_export import Trace

from gpuflight.errors import InputError
from gpuflight.events.batch import Batch
from gpuflight.events.imports import nsys, open_import
from gpuflight.events.imports.nsys import Nsys
from gpuflight.events.load import load_import
from gpuflight.events.query.reader import Reader
from gpuflight.events.report import build_report
from gpuflight.events.store import EventStore

SQL = (Path(__file__).parents[1] / "data" / "imports" / "nsys.sql").read_text()
BASE_NS = 1_743_521_598_000_000_000


def database(path: Path, *more: str) -> Path:
    connection = sqlite3.connect(path)
    connection.executescript(SQL)
    for statement in more:
        connection.executescript(statement)
    connection.commit()
    connection.close()
    return path


class Read:
    """What an import of a file gives, by the process it is of."""

    def __init__(self, path: Path) -> None:
        self.trace = Nsys(str(path))
        self.batches: list[Batch] = [batch for batches in self.trace for batch in batches]
        self.ledger = self.trace.ledger

    def rows(self, table: str, pid: int = 4242) -> list[dict[str, Any]]:
        return [
            row
            for batch in self.batches
            if batch.table == table and batch.session_id.endswith(f"-{pid}")
            for row in batch.rows()
        ]

    def texts(self, dictionary: str, pid: int = 4242) -> dict[int, str]:
        return {r["id"]: r["text"] for r in self.rows("name", pid) if r["dictionary"] == dictionary}


def test_the_fixture(tmp_path: Path) -> None:
    read = Read(database(tmp_path / "t.sqlite"))
    assert {batch.session_id.rpartition("-")[2] for batch in read.batches} == {"4242", "4343"}
    kernels = read.rows("kernel")
    names = read.texts("kernel")
    assert [(names[k["kernel_id"]], k["start_ns"] - BASE_NS, k["duration_ns"]) for k in kernels] == [
        ("vectorAdd(const float *, const float *, float *, int)", 1500, 1000),
        ("reduce<float>(float *)", 2600, 300),
    ]
    first = kernels[0]
    assert (first["api_start_ns"] - BASE_NS, first["api_exit_ns"] - BASE_NS) == (
        1000,
        1400,
    )
    assert (first["device_id"], first["stream_id"], first["num_regs"], first["dyn_shared_bytes"]) == (0, 7, 24, 512)
    assert "api_start_ns" not in kernels[1]
    shape = next(s for s in read.rows("kernel_shape") if s["grid_x"] == 64)
    assert (shape["block_x"], shape["static_shared_bytes"], shape["local_mem_per_thread_bytes"]) == (256, 1024, 8)
    (copy,) = read.rows("memcpy")
    assert (copy["copy_kind"], copy["bytes"], copy["api_start_ns"] - BASE_NS) == (1, 65536, 2000)
    (fill,) = read.rows("memset")
    assert (fill["bytes"], fill["duration_ns"]) == (4096, 100)
    (wait,) = read.rows("sync")
    assert (wait["sync_type"], wait["stream_id"], wait["duration_ns"]) == (3, 7, 1000)
    allocations = [(a["memory_op"], a["memory_kind"], a["address"], a["bytes"]) for a in read.rows("allocation")]
    assert allocations == [
        (1, 3, 139637976727552, 1048576),
        (1, 2, 2**64 - 4096, 2048),
        (2, 3, 139637976727552, 1048576),
    ]
    markers = read.texts("marker")
    ranges = [(markers[n["name_id"]], n.get("domain"), n["duration_ns"]) for n in read.rows("nvtx")]
    assert sorted(ranges) == [("epoch", "torch", 4200), ("step 1", None, 600)]
    metrics = read.texts("metric")
    samples = [(metrics[s["metric_id"]], s["device_id"], s["value"]) for s in read.rows("pm_sample")]
    assert samples == [("SMs Active [Throughput %]", 1, 40.0), ("SMs Active [Throughput %]", 1, 80.0)]
    (device,) = read.rows("device")
    assert (device["device_id"], device["uuid"], device["total_mib"]) == (
        0,
        "GPU-b",
        40960,
    )
    (begin,) = read.rows("session_start")
    assert (begin["app"], begin["pid"], begin["hostname"]) == ("train", 4242, "node7")
    assert {(e.reason, e.detail, e.count) for e in read.ledger} == {
        ("missing_name", "StringIds", 1),
        ("not_imported", "NVTX_EVENTS of type 34", 1),
        ("not_imported", "NVTX_EVENTS without an end", 1),
        ("not_imported", "OSRT_API", 2),
    }


def test_two_processes_do_not_share_their_correlation_ids(tmp_path: Path) -> None:
    read = Read(database(tmp_path / "t.sqlite"))
    (kernel,) = read.rows("kernel", 4343)
    assert (kernel["corr_id"], kernel["api_start_ns"] - BASE_NS) == (11, 900)
    assert read.texts("kernel", 4343) == {kernel["kernel_id"]: "vectorAdd"}  # the short name: the long one is missing
    assert read.rows("session_start", 4343)[0]["app"] == "eval"


def test_tables_and_columns_that_are_not_there(tmp_path: Path) -> None:
    path = tmp_path / "old.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript(
        """
        CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
        INSERT INTO StringIds VALUES (1, 'k');
        CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER,
          shortName INTEGER);
        INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (10, 30, 0, 7, 1), (NULL, 3, 0, 7, 1), ('x', 3, 0, 7, 1);
        """
    )
    connection.close()
    read = Read(path)
    (kernel,) = read.rows("kernel", 0)
    assert kernel["duration_ns"] == 20
    assert [b.clock for b in read.batches if b.table == "kernel"] == ["unplaced"]  # no start of the session
    assert read.ledger.count("implausible_time") == 1 and read.ledger.count("bad_cell") == 2


def test_many_rows_come_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nsys, "ROWS_AT_ONCE", 100)
    more = """
        WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1000)
        INSERT INTO CUPTI_ACTIVITY_KIND_MEMSET
            SELECT 5000 + i, 5001 + i, 0, 1, 7, 1000 + i, (1 << 48) | (4242 << 24), 0, 8 FROM n;
    """
    trace = Nsys(str(database(tmp_path / "t.sqlite", more)))
    pieces = list(trace)
    assert len(pieces) > 9
    assert sum(b.count for batches in pieces for b in batches if b.table == "memset") == 1001


def test_into_a_store_reported_and_exported(tmp_path: Path) -> None:
    path = database(tmp_path / "t.sqlite")
    store = EventStore(str(tmp_path / "store"), threads=1)
    try:
        loaded = load_import(store, open_import(str(path)))
        assert load_import(store, open_import(str(path))).rows == 0
        assert len(loaded.sessions) == 2
        session = store.session(next(s for s in loaded.sessions if s.endswith("-4242")))
        assert session is not None
        report = build_report(store, session, now_ns=BASE_NS)
        assert (report.kernels.count, report.kernels.busy_ns, report.head.hostname) == (2, 1300, "node7")
        assert [h.kind for h in report.held] == ["pinned"]
        trace = Trace(Reader(store, [session]))
        assert len([e for e in trace.events if e["ph"] == "f"]) == 2  # of a kernel and a copy
        assert {name for name, _, _ in trace.slices("user_annotation")} == {"epoch", "step 1"}
    finally:
        store.close()


def test_what_is_no_export_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite"
    connection = sqlite3.connect(other)
    connection.execute("CREATE TABLE cookies (a)")
    connection.commit()
    connection.close()
    with pytest.raises(InputError, match="no table of an export"):
        list(open_import(str(other)))
    broken = tmp_path / "broken.sqlite"
    broken.write_bytes(b"SQLite format 3\x00" + b"\xff" * 2000)
    with pytest.raises(InputError, match="cannot be read"):
        list(open_import(str(broken)))


def test_a_damaged_export_gives_what_it_has(tmp_path: Path) -> None:
    trace = Nsys(str(database(tmp_path / "t.sqlite")))
    original = trace._ranges

    def breaks() -> Any:
        yield from original()
        raise sqlite3.DatabaseError("database disk image is malformed")

    trace._ranges = breaks  # type: ignore[method-assign]
    found = [batch for batches in trace for batch in batches]
    assert sum(b.count for b in found if b.table == "kernel") == 3
    assert trace.ledger.count("corrupt_file") == 1
