"""Reports of sessions of every generation, whole, killed and damaged, against what is in their files."""

from __future__ import annotations

import gzip
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("duckdb")
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.unit.event_rows import Rows, fill, names
from tests.unit.gpufl_files import CLEAN, DATA, GEN, START_NS, detail, kernels, line, shutdown, start

from gpuflight.cli.report import print_report
from gpuflight.errors import InputError
from gpuflight.events.files import SessionReader, find_sessions
from gpuflight.events.ledger import Ledger
from gpuflight.events.load import load_folders, size_of
from gpuflight.events.report import Report, build_report
from gpuflight.events.report.document import sections
from gpuflight.events.store import EventStore

BASE_NS = 10**18


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EventStore]:
    made = EventStore(str(tmp_path_factory.mktemp("events") / "store"), threads=1)
    yield made
    made.close()


def reports(folder: Path, tmp_path: Path, **how: Any) -> dict[str, Report]:
    """By session, as `gpuflight report` would make them."""
    own = EventStore(tempfile.mkdtemp(dir=tmp_path), threads=1)
    try:
        loaded = load_folders(own, find_sessions(str(folder)))
        made = {}
        for session_id in loaded.sessions:
            session = own.session(session_id)
            assert session is not None
            state = "live" if session_id in loaded.live else "" if session.end_ns is not None else "silent"
            made[session_id] = build_report(own, session, now_ns=START_NS, state_now=state, **how)
        return made
    finally:
        own.close()


def one(folder: Path, tmp_path: Path, **how: Any) -> Report:
    (report,) = reports(folder, tmp_path, **how).values()
    return report


def of(store: EventStore, **tables: Rows) -> Report:
    reader = fill(store, **tables)
    return build_report(store, reader.sessions[0], now_ns=BASE_NS)


def written(tmp_path: Path, *lines: bytes, name: str = "device.1.log") -> Path:
    folder = tmp_path / "s"
    folder.mkdir(exist_ok=True)
    data = b"".join(lines)
    (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return folder


# --- what was wrong with the reports of others ------------------------------------------------------------------------


@pytest.mark.parametrize("folder", sorted(GEN.iterdir()), ids=lambda path: path.name)
def test_every_window_of_every_generation_counts(folder: Path, tmp_path: Path) -> None:
    for session in find_sessions(str(folder)):
        ledger = Ledger()
        kernels = fills = 0
        total = 0
        for batch in SessionReader(session, ledger):
            kernels += batch.count if batch.table == "kernel" else 0
            fills += batch.count if batch.table == "memset" else 0
            total += int(batch.columns["duration_ns"].sum()) if batch.table == "kernel" else 0
        made = list(reports(Path(session.path), tmp_path).values())
        assert sum(report.kernels.count for report in made) == kernels
        assert sum(report.kernels.total_ns for report in made) == total
        assert sum(line.count for report in made for line in report.fills) == fills
        lost = sum(loss.count for report in made for loss in report.losses if loss.effect == "lost")
        assert lost >= ledger.lost
        for report in made:
            assert report.kernels.busy_share is None or 0 <= report.kernels.busy_share <= 1
            assert msgspec.convert(msgspec.to_builtins(report), Report) == report


def test_fills_are_there_although_the_file_has_batches(tmp_path: Path) -> None:
    report = one(CLEAN, tmp_path)
    assert [(f.device_id, f.stream_id, f.count, f.bytes) for f in report.fills] == [(0, 7, 6, 6 * 65536)]


def test_a_killed_session_shows_what_is_in_tmp(tmp_path: Path) -> None:
    report = one(GEN / "v1.3.0rc1-killed", tmp_path)
    assert report.kernels.count == 96
    assert report.head.state == "silent"
    assert any(item.what == "the end of the session" for item in report.unseen)


def test_a_byte_that_is_no_utf8_costs_that_byte(tmp_path: Path) -> None:
    name = line("dictionary_update", kernel_dict={"1": "bad_X_name"}).replace(b"X", b"\xff")
    report = one(written(tmp_path, start(), name, kernels([[0, 1, 7, 500, 1]]), shutdown()), tmp_path)
    assert [k.name for k in report.top_kernels] == ["bad_\ufffd_name"]
    assert {loss.reason for loss in report.losses} >= {"invalid_utf8"}


def test_a_truncated_gzip_costs_its_rest(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    folder.mkdir()
    many = b"".join(kernels([[i, 1, 7, 500 + i * 7919 % 1000, i]], number=i + 1) for i in range(3000))
    packed = gzip.compress(start() + many)
    (folder / "device.1.log.gz").write_bytes(packed[: len(packed) // 2])
    (folder / "device.2.log.gz").write_bytes(gzip.compress(kernels([[9, 1, 7, 500, 9]], number=5000)))
    report = one(folder, tmp_path)
    assert 100 < report.kernels.count < 3001
    assert [loss.effect for loss in report.losses if loss.reason == "truncated_file"] == ["lost"]


def test_stalls_are_named_by_their_metric(tmp_path: Path) -> None:
    report = one(GEN / "v1.3.0rc1-killed", tmp_path)
    assert {line.metric.rpartition("stalled_")[2] for line in report.stalls} == {
        "barrier",
        "wait_not_issued",
        "long_scoreboard",
    }


def test_devices_are_told_with_what_the_wire_calls_it(tmp_path: Path) -> None:
    (device,) = one(CLEAN, tmp_path).devices
    assert (device.name, device.compute_capability, device.l2_cache_size_bytes) == ("Fixture GPU", "8.9", 75497472)
    assert (device.multi_processor_count, device.shared_mem_per_block_bytes) == (128, 49152)


def test_details_of_one_session_do_not_reach_another(tmp_path: Path) -> None:
    folder = written(
        tmp_path,
        *(start(s) + line("dictionary_update", s, kernel_dict={"1": s}) for s in ("a", "b")),
        kernels([[0, 1, 7, 500, 1]], session="a"),
        kernels([[0, 1, 7, 900, 1]], session="b"),
        detail(1, "a", max_active_blocks=4),
        name="run.device.0.log",
    )
    made = reports(folder, tmp_path)
    assert [d.shape["grid_y"] for d in made["a"].kernel_details] == [2]
    assert made["b"].kernel_details == []
    assert [r.kernels.total_ns for r in made.values()] == [500, 900]
    # both have no end; each tells its own
    for session_id, report in made.items():
        ends = [loss.about for loss in report.losses if loss.reason == "unclean_end"]
        assert ends in ([], [session_id])


def test_a_live_session_is_told_as_of_now(tmp_path: Path) -> None:
    folder = tmp_path / "11111111-1111-4111-8111-111111111111"
    (folder / ".tmp").mkdir(parents=True)
    (folder / ".tmp" / "device.log").write_bytes(start() + kernels([[0, 1, 7, 500, 1]]).rstrip(b"\n"))
    report = one(folder, tmp_path)
    assert (report.head.state, report.kernels.count) == ("live", 1)
    assert report.unseen[0].what == "what is still to come"
    assert "unclean_end" not in {loss.reason for loss in report.losses}


@pytest.mark.parametrize("fault", sorted((DATA / "faults").iterdir()), ids=lambda path: path.name)
def test_damaged_sessions_have_reports(fault: Path, tmp_path: Path) -> None:
    for report in reports(fault, tmp_path).values():
        assert report.kernels.count > 0 or report.losses


# --- numbers ----------------------------------------------------------------------------------------------------------

runs = st.lists(
    st.tuples(st.integers(0, 200), st.none() | st.integers(0, 60), st.integers(0, 2)), min_size=1, max_size=30
)


@given(runs)
@settings(max_examples=examples(40), deadline=None)
def test_busy_time_counts_overlaps_once(store: EventStore, rows: list[Any]) -> None:
    kernels = [{"start_ns": BASE_NS + s, "duration_ns": d, "kernel_id": 1, "stream_id": q} for s, d, q in rows]
    report = of(store, kernel=kernels)
    busy = {ns for s, d, _ in rows for ns in range(s, s + (d or 0))}
    timed = [d for _, d, _ in rows if d is not None]
    span = max(s + (d or 0) for s, d, _ in rows) - min(s for s, _, _ in rows)
    found = report.kernels
    assert (found.count, found.timed_count, found.total_ns) == (len(rows), len(timed), sum(timed))
    assert found.busy_ns == (len(busy) if timed else None)
    assert report.head.span_ns == (span or None)
    assert found.busy_share == (len(busy) / span if timed and span else None)
    ordered = sorted(timed)
    for q, value in ((0.5, found.median_ns), (0.9, found.p90_ns), (0.99, found.p99_ns)):
        assert value == (ordered[max(-(-int(q * 100) * len(ordered) // 100) - 1, 0)] if ordered else None)


def test_synthetic_kernels_have_no_busy_time(store: EventStore) -> None:
    report = of(
        store,
        kernel=[{"start_ns": BASE_NS, "duration_ns": 5, "kernel_id": 1}],
        capability=[{"feature": "kernel_events", "status": "fallback", "mode": "launch_callbacks_synthetic"}],
    )
    assert report.kernels.synthetic and report.kernels.busy_ns is None
    assert any("not timed on the GPU" in item.reason for item in report.unseen)


@pytest.mark.parametrize(
    ("readings", "joules", "how"),
    [
        ([(0, 100_000, None), (10**9, 300_000, None)], 200.0, "trapezoid"),
        ([(0, 100_000, 1_000_000), (10**9, 300_000, 151_000_000)], 150.0, "counter"),
        ([(0, 100_000, 9_000_000), (10**9, 300_000, 1_000_000)], 200.0, "trapezoid"),  # the counter began anew
        ([(0, 100_000, 0), (10**9, 100_000, 0)], 100.0, "trapezoid"),  # a device without one
    ],
)
def test_energy(store: EventStore, readings: list[Any], joules: float, how: str) -> None:
    rows = [{"time_ns": BASE_NS + t, "device_id": 0, "power_mw": mw, "energy_uj": uj} for t, mw, uj in readings]
    (energy,) = of(store, device_metric=rows).energy
    assert (energy.joules, energy.seconds, energy.how) == (pytest.approx(joules), 1.0, how)


def test_waves(store: EventStore) -> None:
    shape = {"shape_id": 1, "grid_x": 100, "grid_y": 2, "grid_z": 1, "max_active_blocks": 4}
    tables: dict[str, Rows] = {
        "kernel": [{"start_ns": BASE_NS, "duration_ns": 1, "kernel_id": 1, "corr_id": 1, "num_regs": 40}],
        "kernel_detail": [{"corr_id": 1, "shape_id": 1}, {"corr_id": 1, "shape_id": 1}],
        "kernel_shape": [shape],
    }
    same = [{"device_id": n, "multi_processor_count": 10} for n in (0, 1)]
    (found,) = of(store, **tables, device=same).kernel_details
    assert (found.waves_per_sm, found.details_count, found.num_regs) == (5.0, 1, 40)
    different = [*same, {"device_id": 2, "multi_processor_count": 20}]
    report = of(store, **tables, device=different)
    assert report.kernel_details[0].waves_per_sm is None
    assert any(item.what.startswith("waves per multiprocessor") for item in report.unseen)


def test_replayed_kernels_are_named_by_their_ordinal(store: EventStore) -> None:
    kernel = [{"start_ns": BASE_NS + n, "duration_ns": 1, "kernel_id": n + 1, "corr_id": n} for n in range(3)]
    counters = [
        {"kernel_name": str(n), "launch_ordinal": n, "sm_throughput_pct": 10.0 * n, "dram_read_bytes": 5}
        for n in range(3)
    ]
    texts = names("kernel", {1: "first", 2: "second", 3: "third"})
    found = {c.of: c.values for c in of(store, kernel=kernel, kernel_perf_metric=counters, name=texts).counters}
    assert found == {
        name: {"sm_throughput_pct": 10.0 * n, "dram_read_bytes": 5.0}
        for n, name in enumerate(("first", "second", "third"))
    }
    later = of(store, kernel=kernel, kernel_perf_metric=counters[1:], name=texts)  # counted from 0 or 1? not told
    assert {c.of for c in later.counters} == {"range 1", "range 2"}


def test_nothing_is_told_as_nothing(store: EventStore) -> None:
    report = of(store)
    assert report.kernels.count == 0 and report.kernels.mean_ns is None and report.head.span_ns is None
    assert {item.what for item in report.unseen} >= {"kernels", "copies", "scopes"}
    assert [section.id for section in sections(report)] == ["summary", "unseen", "losses"]


def test_what_the_capture_says_of_an_empty_section_is_its_reason(store: EventStore) -> None:
    row = {"feature": "kernel_events", "status": "skipped", "message": "No CUDA context."}
    report = of(store, capability=[row])
    assert {"the capture says skipped: No CUDA context."} == {i.reason for i in report.unseen if i.what == "kernels"}


@pytest.mark.parametrize("top", [0, 1001])
def test_bounds(store: EventStore, top: int) -> None:
    session = fill(store).sessions[0]
    with pytest.raises(InputError):
        build_report(store, session, now_ns=1, top=top)


def test_top_cuts_lists_and_says_so(store: EventStore) -> None:
    rows = [{"start_ns": BASE_NS, "duration_ns": n, "kernel_id": n} for n in range(1, 6)]
    reader = fill(store, kernel=rows)
    report = build_report(store, reader.sessions[0], now_ns=1, top=2)
    assert (len(report.top_kernels), report.top_kernels_count, report.kernels.unique_count) == (2, 5, 5)
    assert next(s for s in sections(report) if s.id == "top").note == "3 more kernels are not listed."


# --- the command ------------------------------------------------------------------------------------------------------


def test_progress_reaches_the_size_of_the_files(tmp_path: Path) -> None:
    folders = find_sessions(str(GEN))
    told: list[int] = []
    own = EventStore(str(tmp_path / "store"), threads=1)
    try:
        load_folders(own, folders, told.append)
    finally:
        own.close()
    assert told == sorted(told)
    assert told[-1] <= size_of(folders) and told[-1] > size_of(folders) * 0.9


def run(*argv: str) -> int:
    from gpuflight.cli import main

    return main(["report", *argv])


@pytest.fixture
def folders_of_gpuflight(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def test_text(capsys: pytest.CaptureFixture[str], folders_of_gpuflight: Path) -> None:
    assert run(str(CLEAN)) == 0
    text = capsys.readouterr().out
    for word in ("fixture_app", "Kernels with the most time", "Fills (memset)", "What could not be seen", "train_step"):
        assert word in text
    assert list(folders_of_gpuflight.iterdir()) == []


def test_several_sessions_are_listed_and_chosen(capsys: pytest.CaptureFixture[str], folders_of_gpuflight: Path) -> None:
    assert run(str(GEN / "v1.3.0rc1-segments"), "--json") == 0
    listed = msgspec.json.decode(capsys.readouterr().out)["sessions"]
    assert [row["records"]["kernel"] for row in listed] == [4, 4, 4]
    assert {row["state"] for row in listed} == {"ended"}
    assert run(str(GEN / "v1.3.0rc1-segments"), "--session", "66666666-6666-4666-8666-666666666601", "--json") == 0
    assert msgspec.json.decode(capsys.readouterr().out)["head"]["segment_index"] == 1
    assert run(str(GEN / "v1.3.0rc1-segments"), "--session", "all", "--json") == 0
    assert len(msgspec.json.decode(capsys.readouterr().out)["reports"]) == 3
    assert run(str(GEN / "v1.3.0rc1-segments"), "--session", "nope") == 2
    assert run(str(GEN / "v1.3.0rc1-segments")) == 0
    assert "3 sessions" in capsys.readouterr().err
    assert list(folders_of_gpuflight.iterdir()) == []


def test_a_session_of_a_store(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    own = EventStore(str(tmp_path / "store"))
    load_folders(own, find_sessions(str(CLEAN)))
    own.close()
    assert run(CLEAN.name, "--store", str(tmp_path / "store"), "--json") == 0
    assert msgspec.json.decode(capsys.readouterr().out)["kernels"]["count"] == 48
    assert run("other", "--store", str(tmp_path / "store")) == 2
    assert run(CLEAN.name, "--store", str(tmp_path)) == 2


def test_what_cannot_be_used_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, folders_of_gpuflight: Path
) -> None:
    (tmp_path / "page.html").write_text("mine")
    empty = tmp_path / "empty"
    empty.mkdir()
    for argv in (
        ["/does/not/exist"],
        [str(empty)],
        [str(CLEAN), "--top", "0"],
        [str(CLEAN), "--html", str(tmp_path / "page.html")],
    ):
        assert run(*argv) == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.startswith("gpuflight: ") and said.err.count("\n") == 1
    assert (tmp_path / "page.html").read_text() == "mine"
    assert list(folders_of_gpuflight.iterdir()) == []


def test_what_is_temporary_goes_also_when_it_is_ended(
    monkeypatch: pytest.MonkeyPatch, folders_of_gpuflight: Path
) -> None:
    from gpuflight.cli import event_source

    def ended(*_: Any) -> None:
        assert list(folders_of_gpuflight.iterdir())
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(event_source.ReadProgress, "done", ended)
    before = signal.getsignal(signal.SIGTERM)
    assert run(str(CLEAN)) == 128 + signal.SIGTERM
    assert list(folders_of_gpuflight.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_names_that_act_on_terminals_do_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gpuflight.cli.output import console

    hostile = "\x1b]0;owned\x07\u202eevil[bold]"
    folder = written(
        tmp_path,
        line("job_start", pid=1, app=hostile, ts_ns=START_NS),
        line("dictionary_update", kernel_dict={"1": hostile}),
        kernels([[0, 1, 7, 500, 1]]),
    )
    print_report(one(folder, tmp_path), console())
    text = capsys.readouterr().out
    assert "\x1b" not in text and "\u202e" not in text and "\x07" not in text
    assert "[bold]" in text


def test_a_folder_that_is_moved_away_while_it_is_read(tmp_path: Path) -> None:
    copy = tmp_path / "logs"
    shutil.copytree(CLEAN, copy)
    found = find_sessions(str(copy))
    shutil.rmtree(copy)
    own = EventStore(str(tmp_path / "store"), threads=1)
    try:
        loaded = load_folders(own, found)
        session = own.session(loaded.sessions[0])
        assert session is not None
        vanished = sum(row["count"] for row in own.losses(session) if row["reason"] == "vanished_file")
    finally:
        own.close()
    assert vanished == sum(len(windows) for folder in found for windows in folder.windows.values())
