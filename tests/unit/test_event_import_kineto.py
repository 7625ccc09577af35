"""Traces of the PyTorch profiler as GPU events."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("duckdb")
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.unit.test_event_export import Trace

from gpuflight.errors import InputError
from gpuflight.events.batch import Batch
from gpuflight.events.export.trace import chrome_trace
from gpuflight.events.imports import json_stream, kineto, open_import
from gpuflight.events.imports.kineto import Kineto
from gpuflight.events.ledger import Ledger
from gpuflight.events.load import load_import
from gpuflight.events.query.reader import Reader
from gpuflight.events.report import build_report
from gpuflight.events.store import EventStore

TORCH = Path(__file__).parents[1] / "data" / "imports" / "torch.pt.trace.json"
BASE_NS = 1_743_521_598_000_000_000


class Read:
    """What an import of a file gives."""

    def __init__(self, path: Path) -> None:
        self.trace = Kineto(str(path))
        self.batches: list[Batch] = [batch for batches in self.trace for batch in batches]
        self.ledger: Ledger = self.trace.ledger
        self.names = {(r["dictionary"], r["id"]): r["text"] for r in self.rows("name")}

    def rows(self, table: str) -> list[dict[str, Any]]:
        return [row for batch in self.batches if batch.table == table for row in batch.rows()]

    def kernels(self) -> list[tuple[str, int, int, int | None]]:
        return sorted(
            (self.names["kernel", r["kernel_id"]], r["start_ns"] - BASE_NS, r["duration_ns"], r.get("api_start_ns"))
            for r in self.rows("kernel")
        )


def write(path: Path, *events: Any, **head: Any) -> Path:
    path.write_text(json.dumps({"baseTimeNanoseconds": BASE_NS, **head, "traceEvents": list(events)}))
    return path


def kernel(ts: float = 5, correlation: int = 1, **more: Any) -> dict[str, Any]:
    args = {"device": 0, "stream": 7, "correlation": correlation}
    return {"ph": "X", "cat": "kernel", "name": "k", "ts": ts, "dur": 1, "pid": 0, "tid": 7, "args": args, **more}


def launch(ts: float = 1, correlation: int = 1) -> dict[str, Any]:
    args = {"correlation": correlation}
    return {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": "cudaLaunchKernel",
        "ts": ts,
        "dur": 2,
        "pid": 9,
        "tid": 9,
        "args": args,
    }


def test_the_fixture(tmp_path: Path) -> None:
    read = Read(TORCH)
    gemm = "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_64x64_32x6_nn_align4>(Params)"
    assert read.kernels() == [
        ("triton_poi_fused_relu_0", 1320000, 3500, BASE_NS + 1300000),
        ("triton_poi_fused_relu_0", 1324000, 3250, BASE_NS + 1300000),
        (gemm, 1035125, 20003, BASE_NS + 1020001),
    ]
    (copy,) = read.rows("memcpy")
    assert (copy["copy_kind"], copy["src_kind"], copy["dst_kind"], copy["bytes"]) == (1, "Pinned", "Device", 1609728)
    assert (copy["api_start_ns"], copy["api_exit_ns"]) == (BASE_NS + 1090500, BASE_NS + 1096000)  # its call came later
    (fill,) = read.rows("memset")
    assert fill["bytes"] == 4096 and "api_start_ns" not in fill
    (wait,) = read.rows("sync")
    assert (wait["sync_type"], wait["duration_ns"]) == (4, 100_000)
    taken = [(a["memory_op"], a["memory_kind"], a["bytes"], a["device_id"]) for a in read.rows("allocation")]
    assert taken == [(1, 3, 16384, 0), (2, 3, 16384, 0)]
    ranges = {(read.names["marker", n["name_id"]], n["domain"]) for n in read.rows("nvtx")}
    assert ranges == {
        ("ProfilerStep#0", "user_annotation"),
        ("aten::mm", "cpu_op"),
        ("cudaStreamIsCapturing", "cuda_runtime"),  # a call that started nothing
    }
    (device,) = read.rows("device")
    assert (device["total_mib"], device["compute_major"], device["multi_processor_count"]) == (81007, 9, 132)
    shapes = {(s["grid_x"], s["block_x"], s["occupancy"]) for s in read.rows("kernel_shape")}
    assert shapes == {(8, 128, 0.12), (128, 256, 1.0)}
    (begin,) = read.rows("session_start")
    assert (begin["time_ns"], begin["pid"], begin["app"]) == (BASE_NS + 1000250, 4242, "torch")
    assert {(e.reason, e.detail, e.count) for e in read.ledger} == {
        ("not_imported", "cuda_sync", 1),
        ("not_imported", "i: Iteration Start: PyTorch Profiler", 1),
    }
    assert read.trace.done_bytes == TORCH.stat().st_size


def test_gzip_and_a_base_at_the_end_are_the_same(tmp_path: Path) -> None:
    whole = Read(TORCH).kernels()
    packed = tmp_path / "t.pt.trace.json.gz"
    packed.write_bytes(gzip.compress(TORCH.read_bytes()))
    assert Read(packed).kernels() == whole
    raw = json.loads(TORCH.read_text())
    base = raw.pop("baseTimeNanoseconds")
    raw["baseTimeNanoseconds"] = base
    late = tmp_path / "late.json"
    late.write_text("\ufeff" + json.dumps(raw), encoding="utf-8")
    assert Read(late).kernels() == whole


def test_old_traces_have_unix_microseconds_and_may_be_a_bare_list(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text(json.dumps([kernel(ts=BASE_NS // 1000 + 5, cat="Kernel")]))
    assert Read(old).kernels() == [("k", 5000, 1000, None)]


def test_n24_times_without_an_epoch_are_not_on_the_timeline(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": [kernel()]}))
    read = Read(path)
    assert [b.clock for b in read.batches if b.table == "kernel"] == ["unplaced"]
    assert read.ledger.count("implausible_time") == 1
    assert read.rows("session_start") == []


@given(st.integers(0, 10**15), st.integers(0, 10**9), st.integers(1, 40))
@settings(max_examples=examples(40), deadline=None)
def test_every_ns_survives(tmp_path_factory: pytest.TempPathFactory, at: int, took: int, piece: int) -> None:
    path = tmp_path_factory.mktemp("t") / "t.json"
    event = kernel()
    text = json.dumps({"baseTimeNanoseconds": BASE_NS, "traceEvents": [event]})
    text = text.replace('"ts": 5', f'"ts": {at // 1000}.{at % 1000:03}').replace(
        '"dur": 1,', f'"dur": {took // 1000}.{took % 1000:03},'
    )
    path.write_text(text)
    before, json_stream.chunks = (
        json_stream.chunks,
        lambda *_: (text.encode()[i : i + piece] for i in range(0, len(text), piece)),
    )
    try:
        assert Read(path).kernels() == [("k", at, took, None)]
    finally:
        json_stream.chunks = before


@given(st.permutations([launch(1, 1), launch(2, 2), kernel(5, 1), kernel(6, 2), kernel(7, 2), kernel(8, 3)]))
@settings(max_examples=examples(40), deadline=None)
def test_calls_and_their_work_in_any_order(tmp_path_factory: pytest.TempPathFactory, events: list[Any]) -> None:
    read = Read(write(tmp_path_factory.mktemp("t") / "t.json", *events))
    assert read.kernels() == [
        ("k", 5000, 1000, BASE_NS + 1000),
        ("k", 6000, 1000, BASE_NS + 2000),
        ("k", 7000, 1000, BASE_NS + 2000),
        ("k", 8000, 1000, None),
    ]
    assert read.rows("nvtx") == []


def test_memory_is_bounded_by_forgetting_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kineto, "_WAITING", 2)
    events = [launch(n, n) for n in range(1, 6)] + [kernel(10 + n, n) for n in range(1, 6)]
    read = Read(write(tmp_path / "t.json", *events))
    called = [api is not None for _, _, _, api in read.kernels()]
    assert called == [False, False, False, True, True]
    assert len(read.rows("nvtx")) == 3  # calls whose work came too late: kept as ranges


@pytest.mark.parametrize("cut", [0.2, 0.5, 0.9])
def test_a_cut_file_gives_what_it_has_and_says_so(tmp_path: Path, cut: float) -> None:
    data = TORCH.read_bytes()
    path = tmp_path / "cut.json"
    path.write_bytes(data[: int(len(data) * cut)])
    read = Read(path)
    assert read.ledger.lost >= 1
    assert {row[0] for row in read.kernels()} <= {row[0] for row in Read(TORCH).kernels()}
    packed = gzip.compress(data)
    path.write_bytes(packed[: int(len(packed) * cut)])
    assert Read(path).ledger.count("truncated_file") + Read(path).ledger.count("corrupt_file") >= 1


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        '{"traceEvents": {}}',
        '{"traceEvents": [1, "x", null, []]}',
        '{"traceEvents": [{"ph": "X", "cat": "kernel"}]}',
        '{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": "soon", "args": 5}]}',
        '{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": 1e400, "dur": NaN}]}',
        '{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": 1, "dur": -1, "name": "\\ud800", "args": {"grid": [1]}}]}',
        '{"traceEvents": [{"ph": "i", "name": "[memory]", "ts": 5, "args": {"Bytes": "many"}}]}',
        '{"traceEvents": [{"a": ' + "[" * 5000 + "]" * 5000 + "}]}",
        '{"deviceProperties": [5, {"id": "x"}], "traceEvents": []}',
        '{"deviceProperties": 5, "traceEvents": []}',
        '{"baseTimeNanoseconds": "x", "traceEvents": [{"ph": "X", "cat": "kernel", "ts": 1}]}',
    ],
)
def test_hostile_files_never_break_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    read = Read(path)
    store = EventStore(str(tmp_path / "store"), threads=1)
    try:
        load_import(store, Kineto(str(path)))
    finally:
        store.close()
    assert all(batch.count for batch in read.batches)


# --- into a store -----------------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EventStore]:
    made = EventStore(str(tmp_path / "store"), threads=1)
    yield made
    made.close()


def test_once_into_a_store_and_reported(store: EventStore) -> None:
    first = load_import(store, open_import(str(TORCH)))
    again = load_import(store, open_import(str(TORCH)))
    assert first.rows > 0 and again.rows == 0
    (session_id,) = first.sessions
    session = store.session(session_id)
    assert session is not None and session.completed_ns is not None
    report = build_report(store, session, now_ns=BASE_NS)
    assert (report.head.state, report.kernels.count, report.head.profiling_engine) == ("ended", 3, "kineto")
    assert report.kernel_details[0].waves_per_sm is None  # Kineto does not tell max_active_blocks
    assert {loss.reason for loss in report.losses} == {"not_imported"}


def test_there_and_back(store: EventStore, tmp_path: Path) -> None:
    """Our own trace is one that our import reads: kernels, copies and fills are the same."""
    (session_id,) = load_import(store, open_import(str(TORCH))).sessions
    session = store.session(session_id)
    assert session is not None
    reader = Reader(store, [session])
    Trace(reader)
    path = tmp_path / "back.json"
    path.write_bytes(b"".join(chrome_trace(reader)))
    assert Read(path).kernels() == Read(TORCH).kernels()
    assert [c["bytes"] for c in Read(path).rows("memcpy")] == [1609728]


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("hello")
    with pytest.raises(InputError, match="neither a trace"):
        open_import(str(path))
    with pytest.raises(InputError, match="No such file"):
        open_import(str(tmp_path / "none"))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gpuflight.cli import main

    folder = str(tmp_path / "events")
    assert main(["import", str(TORCH), "--store", folder, "--json"]) == 0
    (imported,) = json.loads(capsys.readouterr().out)["imported"]
    assert imported["kind"] == "PyTorch profiler" and imported["rows"] > 20
    assert main(["report", imported["sessions"][0], "--store", folder]) == 0
    assert "triton_poi_fused_relu_0" in capsys.readouterr().out
    assert main(["report", str(TORCH), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kernels"]["count"] == 3
    assert main(["import", str(tmp_path / "none"), "--store", folder]) == 2


def test_n27_an_empty_rank_costs_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gpuflight.cli import main

    empty, broken = tmp_path / "rank1.json", tmp_path / "rank2.sqlite"
    empty.touch()
    broken.write_bytes(b"SQLite format 3\x00" + b"\xff" * 2000)
    argv = ["import", str(empty), str(TORCH), str(broken), "--store", str(tmp_path / "events"), "--json"]
    assert main(argv) == 1
    said = capsys.readouterr()
    answer = json.loads(said.out)
    assert [one["file"] for one in answer["imported"]] == [str(TORCH)]
    assert {one["file"] for one in answer["refused"]} == {str(empty), str(broken)}
    assert said.err.count("\n") == 2


def test_n28_memory_does_not_grow_with_the_trace(tmp_path: Path) -> None:
    """Five times the events, the same peak: rows stream, and what waits for its other half has a limit."""
    program = (
        "import resource, sys; from gpuflight.events.imports import kineto, open_import; kineto._WAITING = 10_000\n"
        "rows = sum(b.count for batches in open_import(sys.argv[1]) for b in batches if b.table == 'kernel')\n"
        "print(rows, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)"
    )
    peaks = []
    for count in (30_000, 150_000):
        path = tmp_path / f"{count}.json.gz"
        with gzip.open(path, "wt", compresslevel=1) as file:
            file.write(f'{{"baseTimeNanoseconds": {BASE_NS}, "traceEvents": [')
            for number in range(count):
                pair = (launch(number, number), kernel(number + 9, number, name=f"k{number % 50}"))
                file.write(("," if number else "") + json.dumps(pair)[1:-1])
            file.write("]}")
        done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
        rows, peak_mb = map(int, done.stdout.split())
        assert rows == count
        peaks.append(peak_mb)
    assert peaks[1] < peaks[0] + 40, peaks
