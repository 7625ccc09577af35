"""Writer of generation E: what is read back is what was written, and it lies there as the format says."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import textwrap
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.unit.gpufl_files import START_NS, counts, kernels, losses, naive, read, rows

from gpuflight.events.files import find_sessions
from gpuflight.events.format import windows
from gpuflight.events.format.plans import BATCHES, EVERY_CHANNEL, MEMORY_WORDS
from gpuflight.events.format.writer import CHANNEL_OF, SessionWriter

pytest.importorskip("numpy")


@pytest.fixture(autouse=True, scope="module")
def quick_disk() -> Iterator[None]:
    """What is asked of the disk is the writer's business; that it asks is seen in the crash test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(os, "fdatasync", lambda descriptor: None)
        yield


NUMBERS = {
    "i64": st.integers(-(1 << 62), 1 << 62),
    "u64": st.integers(0, (1 << 64) - 2),
    "f64": st.floats(allow_nan=False, allow_infinity=False, width=32),
}
NEVER_ZERO = {"temp_mem_c", "temp_junction_c", "voltage_mv"}


def written_rows(wire_type: str) -> st.SearchStrategy[list[dict[str, Any]]]:
    """Rows of some of a type's columns, under the names of the wire."""
    fields = BATCHES[wire_type].fields

    def column(name: str) -> st.SearchStrategy[Any]:
        if name == "dt_ns":
            return st.integers(START_NS - 10**12, START_NS + 10**15)
        if name == "cpu_pct_x100":
            return st.integers(0, 10**6)
        if name == "sample_kind":
            return st.integers(0, 1)
        if name in NEVER_ZERO:
            return st.integers(1, 100)
        if fields[name].how == "memory_word":
            return st.integers(0, 7)
        return NUMBERS[fields[name].column.kind]

    names = st.sets(st.sampled_from(sorted(fields))).map(lambda chosen: sorted(chosen | {"dt_ns"}))
    return names.flatmap(lambda n: st.lists(st.fixed_dictionaries({c: column(c) for c in n}), min_size=1, max_size=12))


@given(st.data())
@settings(deadline=None, max_examples=examples(60))
def test_rows_that_were_written_are_read_back(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("round")
    expected: dict[str, list[dict[str, Any]]] = {}
    with SessionWriter(str(folder), "s", rotate_bytes=data.draw(st.sampled_from([300, 2000, 1 << 26]))) as writer:
        writer.event("job_start", {"ts_ns": START_NS})
        for wire_type in data.draw(st.lists(st.sampled_from(sorted(BATCHES)), max_size=6)):
            drawn = data.draw(written_rows(wire_type))
            writer.rows(wire_type, {name: [row[name] for row in drawn] for name in drawn[0]})
            plan = BATCHES[wire_type]
            for row in drawn:
                values = {plan.fields[n].column.name: v / 100 if n == "cpu_pct_x100" else v for n, v in row.items()}
                words = {n for n in row if plan.fields[n].how == "memory_word"}
                values.update({n: MEMORY_WORDS[row[n]] for n in words})
                expected.setdefault(plan.table.name, []).append(values)
        writer.event("shutdown", {"ts_ns": START_NS})
    batches, ledger = read(folder)
    assert not losses(ledger)

    def comparable(found: list[dict[str, Any]]) -> list[str]:
        return sorted(json.dumps(row, sort_keys=True) for row in found)

    for table, written in expected.items():
        assert comparable(rows(batches, table)) == comparable(written)


@given(st.lists(st.tuples(st.text(max_size=20), st.text(max_size=20), st.integers(0, 1 << 50)), max_size=15))
@settings(deadline=None, max_examples=examples(60))
def test_texts_and_events_that_were_written_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, items: list[tuple[str, str, int]]
) -> None:
    folder = tmp_path_factory.mktemp("round")
    with SessionWriter(str(folder), "s", rotate_bytes=700) as writer:
        ids = [writer.text("kernel", name) for name, _, _ in items]
        writer.rows(
            "kernel_event_batch", {"dt_ns": [START_NS] * len(items), "kernel_id": ids} if items else {"dt_ns": []}
        )
        writer.kernel_details({"corr_id": n, "user_scope": scope, "grid": "(1,2,3)"} for _, scope, n in items)
        for name, scope, n in items:
            writer.event("nvtx_marker_event", {"name": name, "domain": scope, "start_ns": n, "marker_id": n})
    batches, _ = read(folder)
    names = {(r["dictionary"], r["id"]): r["text"] for r in rows(batches, "name")} | {("kernel", 0): ""}

    def clean(text: str) -> str:
        return text.encode("utf-8", "replace").decode()

    assert [names["kernel", r["kernel_id"]] for r in rows(batches, "kernel")] == [clean(name) for name, _, _ in items]
    found = sorted(
        (names.get(("user_scope", r.get("scope_id", 0)), ""), r["corr_id"]) for r in rows(batches, "kernel_detail")
    )
    assert found == sorted((clean(scope), n) for _, scope, n in items)
    ranges = sorted(
        (names.get(("marker", r.get("name_id", 0)), ""), r["domain"], r["marker_id"]) for r in rows(batches, "nvtx")
    )
    assert ranges == sorted((clean(name), clean(scope), n) for name, scope, n in items)


def small_session(folder: Path, **more: Any) -> Path:
    with SessionWriter(str(folder), "s", rotate_bytes=3000, **more) as writer:
        writer.event("job_start", {"ts_ns": START_NS})
        for step in range(20):
            writer.rows(
                "kernel_event_batch",
                {
                    "dt_ns": [START_NS + step * 100 + i for i in range(100)],
                    "kernel_id": [writer.text("kernel", f"k{step}")] * 100,
                },
            )
            writer.flush()
        writer.rows("scope_event_batch", {"dt_ns": [START_NS], "scope_instance_id": [1], "event_type": [0]})
        writer.event("shutdown", {"ts_ns": START_NS + 10**9})
    return folder / "s"


def test_it_lies_there_as_the_format_says(tmp_path: Path) -> None:
    session = small_session(tmp_path)
    assert not (session / ".tmp").exists()
    assert (session / ".gpufl-session.lock").stat().st_mode & 0o777 == 0o600
    (folder,) = find_sessions(str(tmp_path))
    for channel, found in folder.windows.items():
        assert [w.number for w in found] == list(range(1, len(found) + 1))
        assert len(found) > 1 or channel != "device"
        for number, window in enumerate(found, 1):
            packed = Path(window.path).read_bytes()
            assert len(gzip.decompress(packed)) <= 3000
            sidecar = json.loads((session / f".gpufl-window.{channel}.{number}.json").read_bytes())
            assert sidecar["schema_version"] == 1 and sidecar["type"] == "transport_window"
            assert (sidecar["session_id"], sidecar["channel"], sidecar["window_sequence"]) == ("s", channel, number)
            assert (sidecar["payload_file"], sidecar["payload_bytes"]) == (window.name, len(packed))
            assert sidecar["payload_crc32"] == zlib.crc32(packed)
            assert 0 <= sidecar["opened_mono_ms"] <= sidecar["closed_mono_ms"] and sidecar["created_wall_ms"] > 1e12
    events = naive(session)
    assert {e["version"] for e in events if e["type"] == "scope_event_batch"} == {3}
    assert all("version" not in e for e in events if e["type"] == "shutdown")
    for wire_type in ("job_start", "shutdown", "dictionary_update"):
        assert len([e for e in events if e["type"] == wire_type]) % 4 == 0
    for path in session.glob("device.*.log.gz"):
        assert gzip.decompress(path.read_bytes()).endswith(b"}\n")
    batches, ledger = read(tmp_path)
    assert counts(batches)["kernel"] == 2000 and not losses(ledger)


def test_uncompressed_windows_and_numbers_that_go_on(tmp_path: Path) -> None:
    session = small_session(tmp_path, compress=False)
    before = len(list(session.glob("device.*.log")))
    (session / "device.1.log").unlink()
    small_session(tmp_path, compress=False)
    assert len(list(session.glob("device.*.log"))) == 2 * before - 1
    assert windows.highest_number(str(session), "device") == 2 * before


def test_batches_have_2048_rows_and_telemetry_4(tmp_path: Path) -> None:
    with SessionWriter(str(tmp_path), "s") as writer:
        writer.rows("kernel_event_batch", {"dt_ns": list(range(START_NS, START_NS + 5000))})
        for i in range(9):
            writer.rows("host_metric_batch", {"dt_ns": [START_NS + i], "cpu_pct_x100": [2500]}, hostname="n1")
    events = naive(tmp_path)
    assert sorted(len(e["rows"]) for e in events if e["type"] == "kernel_event_batch") == [904, 2048, 2048]
    telemetry = [e for e in events if e["type"] == "host_metric_batch"]
    assert sorted(len(e["rows"]) for e in telemetry) == [1, 4, 4] and {e["hostname"] for e in telemetry} == {"n1"}
    assert sorted(e["batch_id"] for e in telemetry) == [1, 2, 3]


def test_time_flushes_rows_and_rotates_windows_but_no_empty_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("gpuflight.events.format.writer.time.monotonic", lambda: now[0])
    monkeypatch.setattr("gpuflight.events.format.writer._mono_ms", lambda: int(now[0] * 1000))
    writer = SessionWriter(str(tmp_path), "s", rotate_after_s=5)
    active = tmp_path / "s" / ".tmp" / "device.log"
    writer.rows("kernel_event_batch", {"dt_ns": [START_NS]})
    now[0] += 0.2
    writer.tick()
    assert active.stat().st_size == 0
    now[0] += 0.1
    writer.tick()
    assert active.stat().st_size > 0
    now[0] += 4.8
    writer.tick()
    assert active.stat().st_size > 0
    now[0] += 0.3
    writer.tick()
    assert active.stat().st_size == 0
    now[0] += 100
    writer.tick()
    writer.close()
    (folder,) = find_sessions(str(tmp_path))
    assert {channel: len(found) for channel, found in folder.windows.items()} == {"device": 1}


def test_what_was_flushed_survives_kill(tmp_path: Path) -> None:
    program = textwrap.dedent(
        f"""
        import os, signal
        from gpuflight.events.format.writer import SessionWriter
        writer = SessionWriter({str(tmp_path)!r}, "s", rotate_bytes=2000)
        for i in range(50):
            writer.rows("kernel_event_batch", {{"dt_ns": [{START_NS} + i], "corr_id": [i]}})
            writer.flush()
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == -signal.SIGKILL
    batches, ledger = read(tmp_path)
    assert sorted(r["corr_id"] for r in rows(batches, "kernel")) == list(range(50))
    assert not find_sessions(str(tmp_path))[0].live()
    assert ledger.count("unclean_end") == 1 and ledger.count("cut_line") == 0


@pytest.mark.parametrize("step", range(12))
def test_a_crash_between_any_two_steps_of_an_export_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Every rename, link, unlink and sync is a place to die at."""
    calls = [0]

    class Died(BaseException):
        pass

    def dying(real: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            calls[0] += 1
            if calls[0] > step:
                raise Died
            return real(*args, **more)

        return call

    (tmp_path / "s" / ".tmp").mkdir(parents=True)
    window = windows.ActiveWindow(str(tmp_path / "s"), "device", lambda: 5)
    text = kernels([[0, 1, 7, 5, 1]])
    window.write(text)
    window.flush(sync=False)
    for name in ("rename", "link", "unlink", "fsync"):
        monkeypatch.setattr(os, name, dying(getattr(os, name)))
    try:
        retired = window.end()
        assert retired is not None
        windows.export(str(tmp_path / "s"), "s", retired, compress=True, wall_ms=1)
    except Died:
        pass
    monkeypatch.undo()
    batches, ledger = read(tmp_path)
    assert counts(batches)["kernel"] == 1
    assert ledger.count("cut_line") == 0


def test_mistakes_are_refused(tmp_path: Path) -> None:
    writer = SessionWriter(str(tmp_path), "s")
    for columns in ({"kernel_id": [1]}, {"dt_ns": [1], "colour": [2]}, {"dt_ns": [1, 2], "kernel_id": [1]}):
        with pytest.raises(ValueError):
            writer.rows("kernel_event_batch", columns)
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.event("shutdown", {})


def test_every_type_has_its_channel() -> None:
    assert set(CHANNEL_OF.values()) == {"device", "system", "sass"}
    assert not set(CHANNEL_OF) & EVERY_CHANNEL
