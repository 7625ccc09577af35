"""The 18 classes of faults that a reader of GPU Flight logs must survive, a test each (rows G of docs/faults.md)."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import shutil
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest
from tests.unit.gpufl_files import (
    CLEAN,
    DATA,
    GEN,
    START_NS,
    copy_clean,
    counts,
    decode,
    detail,
    kernels,
    line,
    losses,
    read,
    rows,
    session_folder,
    shutdown,
    start,
)

from gpuflight.errors import InputError
from gpuflight.events.aggregate import KernelTable
from gpuflight.events.batch import Batch
from gpuflight.events.files import SessionReader, find_sessions, read_session
from gpuflight.events.format.decoder import Decoder
from gpuflight.events.format.writer import SessionWriter
from gpuflight.events.ledger import Ledger, Place

pytest.importorskip("numpy")


def corr_ids(batches: list[Batch]) -> list[int]:
    return [row["corr_id"] for row in rows(batches, "kernel")]


# --- 1: order of windows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generation", "order", "first", "last"),
    [
        ("v0-per-event-5cbcf7d", "oldest_first", 0, 4),
        ("v0.1-flat-batch-682ac92", "newest_first", 6, None),
        ("v1.0.2-flat-killed", "newest_first", 9, None),
        ("v1.1.0-nested", "newest_first", 9, None),
        ("v1.2.1-nested", "oldest_first", 1, 10),
        ("v1.3.0rc1-clean", "oldest_first", 1, 11),
        ("v1.3.0rc1-killed", "oldest_first", 1, None),
    ],
)
def test_g01_windows_come_in_the_order_of_writing(generation: str, order: str, first: int, last: int | None) -> None:
    (folder,) = find_sessions(str(GEN / generation))
    assert folder.order == order
    numbers = [window.number for window in folder.windows["device"]]
    assert (numbers[0], numbers[-1]) == (first, last)
    times = [row["start_ns"] for batch in SessionReader(folder) if batch.table == "kernel" for row in batch.rows()]
    assert times == sorted(times) and times


@pytest.mark.parametrize("descending", [True, False])
def test_g01_where_names_do_not_tell_the_order_times_do(tmp_path: Path, descending: bool) -> None:
    """Flat files whose active one is gone."""
    for number in (1, 2, 3):
        age = number if descending else 4 - number
        data = kernels([[0, 1, 7, 5, 4 - age]], base=START_NS + (4 - age) * 10**9, number=4 - age)
        (tmp_path / f"run.device.{number}.log.gz").write_bytes(gzip.compress(data))
    batches, _ = read(tmp_path)
    assert corr_ids(batches) == [1, 2, 3]


# --- 2: what is not exported -----------------------------------------------------------------------------------------


def test_g02_a_session_that_only_has_unexported_files_is_read_whole(tmp_path: Path) -> None:
    batches, ledger = read(GEN / "v1.3.0rc1-killed")
    assert counts(batches)["kernel"] == 96
    assert losses(ledger) == {"unclean_end": 1, "no_newline": 1}
    parts = [kernels([[i, 1, 7, 5, i]], number=i) for i in range(1, 5)]
    session_folder(
        tmp_path,
        {
            "device.1.log.gz": start() + parts[0],
            ".tmp/device.2.log.gz": parts[1],
            ".tmp/device.3.log": parts[2],
            ".tmp/device.3.log.gz.part": parts[2][:20],
            ".tmp/device.log": parts[3],
        },
    )
    batches, ledger = read(tmp_path)
    assert corr_ids(batches) == [1, 2, 3, 4]
    assert losses(ledger) == {"unfinished_file": 1, "unclean_end": 1}


def test_g02_a_part_without_its_raw_file_gives_what_it_holds(tmp_path: Path) -> None:
    session_folder(tmp_path, {".tmp/device.1.log.gz.part": kernels([[0, 1, 7, 5, 1]])})
    part = tmp_path / "s" / ".tmp" / "device.1.log.gz.part"
    part.write_bytes(part.read_bytes()[:-4])
    batches, ledger = read(tmp_path)
    assert corr_ids(batches) == [1]
    assert losses(ledger)["unfinished_file"] == 1


# --- 3: rename and compress under the reader -------------------------------------------------------------------------


def test_g03_raw_and_compressed_file_of_one_window_are_one(tmp_path: Path) -> None:
    data = start() + kernels([[0, 1, 7, 5, 1]]) + line("memset_event", start_ns=1, end_ns=2, corr_id=9, bytes=4)
    session_folder(tmp_path, {"device.1.log": data, "device.1.log.gz": data})
    batches, ledger = read(tmp_path)
    assert (corr_ids(batches), counts(batches)["memset"]) == ([1], 1)
    assert ledger.count("repeated_window") == 1 and not ledger.lost


def test_g03_a_file_that_is_gone_when_it_is_opened_costs_itself(tmp_path: Path) -> None:
    session = session_folder(
        tmp_path,
        {f"device.{i}.log": kernels([[0, 1, 7, 5, i]], number=i) for i in (1, 2, 3)} | {"scope.1.log": start()},
    )
    (folder,) = find_sessions(str(tmp_path))
    (session / "device.2.log").unlink()
    ledger = Ledger()
    assert corr_ids(list(SessionReader(folder, ledger))) == [1, 3]
    assert ledger.count("vanished_file") == 1


# --- 4: ends of files ------------------------------------------------------------------------------------------------


def test_g04_a_whole_last_line_counts_a_cut_one_is_told_and_empty_files_are_nothing(tmp_path: Path) -> None:
    whole, cut = kernels([[0, 1, 7, 5, 1]]), kernels([[0, 1, 7, 5, 2]], number=2)
    session_folder(
        tmp_path, {".tmp/device.log": start() + whole[:-1], ".tmp/scope.log": cut[:-9], ".tmp/sass.log": b""}
    )
    batches, ledger = read(tmp_path)
    assert corr_ids(batches) == [1]
    assert losses(ledger) == {"no_newline": 1, "cut_line": 1, "unclean_end": 1}
    (entry,) = [e for e in ledger if e.reason == "cut_line"]
    assert entry.size_bytes == len(cut) - 9


def test_g04_a_line_cut_in_a_live_file_is_no_loss(tmp_path: Path) -> None:
    session_folder(tmp_path, {".tmp/device.log": start() + kernels([[0, 1, 7, 5, 2]])[:-9]})
    _, ledger = read(tmp_path, live=None)
    assert losses(ledger) == {"unfinished_line": 1}


# --- 5: damaged files and identities ---------------------------------------------------------------------------------


def test_g05_damaged_files_give_what_they_hold_and_say_so(tmp_path: Path) -> None:
    session = copy_clean(tmp_path)
    whole = counts(read(tmp_path)[0])
    packed = (session / "device.1.log.gz").read_bytes()
    (session / "device.1.log.gz").write_bytes(packed[: len(packed) // 2])
    damaged = bytearray((session / "device.3.log.gz").read_bytes())
    damaged[200:260] = os.urandom(60)
    (session / "device.3.log.gz").write_bytes(bytes(damaged))
    (session / "device.5.log.gz").write_bytes(b"")
    (session / "device.6.log.gz").write_bytes(b"this is no gzip")
    batches, ledger = read(tmp_path)
    found = losses(ledger)
    assert found["truncated_file"] == 1 and found["empty_file"] == 1 and found["corrupt_file"] == 2
    assert found["sidecar_mismatch"] == 4
    assert 0 < counts(batches)["kernel"] < whole["kernel"]
    assert counts(batches)["scope"] == whole["scope"], "other channels lose nothing"


def test_g05_missing_malformed_and_wrong_identities_are_told_and_the_window_is_read(tmp_path: Path) -> None:
    session = copy_clean(tmp_path)
    (session / ".gpufl-window.device.1.json").unlink()
    (session / ".gpufl-window.device.2.json").write_bytes(b'{"schema_version":1')
    sidecar = json.loads((session / ".gpufl-window.device.3.json").read_bytes())
    for number, change in ((3, {"payload_crc32": 1}), (4, {"session_id": "other"}), (5, {"channel": "scope"})):
        path = session / f".gpufl-window.device.{number}.json"
        path.write_text(json.dumps(json.loads(path.read_bytes()) | change))
    assert sidecar["payload_crc32"] == zlib.crc32((session / "device.3.log.gz").read_bytes())
    batches, ledger = read(tmp_path)
    assert counts(batches)["kernel"] == 48
    assert losses(ledger) == {"missing_sidecar": 1, "bad_sidecar": 1, "sidecar_mismatch": 3}


# --- 6: holes --------------------------------------------------------------------------------------------------------


def test_g06_holes_are_told_apart_and_what_comes_late_is_in_its_place(tmp_path: Path) -> None:
    session = copy_clean(tmp_path)
    late = (session / "device.4.log.gz").read_bytes()
    for number in (4, 6, 8):
        (session / f"device.{number}.log.gz").unlink()
    (session / ".gpufl-window-ack.device.6").write_text("id\n")
    loss = {"schema_version": 1, "source": "gpufl-agent", "channel": "device", "window_sequence": 8, "reason": "x"}
    (session / ".gpufl-transport-loss.agent-device.8.json").write_text(json.dumps(loss))
    _, ledger = read(tmp_path)
    assert losses(ledger) == {"missing_window": 1, "acked_window": 1, "marked_loss": 1}
    (session / "device.4.log.gz").write_bytes(late)
    batches, ledger = read(tmp_path)
    assert "missing_window" not in losses(ledger)
    times = [row["start_ns"] for row in rows(batches, "kernel")]
    assert times == sorted(times)


def test_g06_a_last_window_that_is_gone_is_seen_by_its_identity(tmp_path: Path) -> None:
    session = copy_clean(tmp_path)
    (session / "device.11.log.gz").unlink()
    _, ledger = read(tmp_path)
    assert ledger.count("missing_window", "device") == 1


# --- 7: one number, two payloads -------------------------------------------------------------------------------------


def test_g07_two_payloads_of_one_number_are_both_read(tmp_path: Path) -> None:
    session_folder(
        tmp_path,
        {
            "device.1.log.gz": start() + kernels([[0, 1, 7, 5, 1]], number=1),
            ".tmp/device.1.log": start() + kernels([[0, 1, 7, 5, 2]], number=2),
        },
    )
    batches, ledger = read(tmp_path)
    assert sorted(corr_ids(batches)) == [1, 2]
    assert ledger.count("window_collision") == 1


def test_g07_batches_of_one_number_that_differ_are_both_kept() -> None:
    batches, ledger = decode(kernels([[0, 1, 7, 5, 1]], number=3) + kernels([[0, 1, 7, 5, 2]], number=3))
    assert corr_ids(batches) == [1, 2]
    assert [b.batch_id for b in batches if b.table == "kernel"] == [3, None]
    assert ledger.count("batch_conflict") == 1


# --- 8: copies -------------------------------------------------------------------------------------------------------


def isa(number: int) -> bytes:
    columns = ["dt_ns", "function_id", "pc_offset", "metric_id", "metric_value", "sample_kind"]
    batch = {"batch_id": number, "base_time_ns": 12_345, "columns": columns, "rows": [[0, 1, 16, 2, 1, 2]]}
    return line("profile_sample_batch", **batch)


def test_g08_what_goes_to_every_channel_counts_once() -> None:
    decoder = Decoder()
    names = line("dictionary_update", kernel_dict={"1": "k"})
    batches: list[Batch] = []
    for channel in ("device", "scope", "system", "sass"):
        data = start() + names + isa(1_000_001) + isa(1_000_002) + shutdown()
        batches += decoder.feed(data, Place(channel, channel, 1, 0))
    assert counts(batches) == {"session_start": 1, "name": 1, "profile_sample": 2, "session_end": 1}
    assert decoder.ledger.count("channel_copy") == 3 * 5


def test_g08_the_same_event_twice_in_one_channel_is_two() -> None:
    decoder = Decoder()
    batches: list[Batch] = []
    for channel in ("device", "scope"):
        batches += decoder.feed(shutdown() + shutdown(), Place(channel, channel, 1, 0))
    assert counts(batches) == {"session_end": 2}


def test_g08_windows_that_come_twice_count_once() -> None:
    decoder = Decoder()
    window = b"".join(kernels([[0, 1, 7, 5, i]], number=i) for i in range(5))
    place = Place("f", "device", 1, 0)
    assert len(corr_ids(decoder.feed(window, place) + decoder.feed(window, place))) == 5
    assert decoder.ledger.count("repeated_batch") == 5


def test_g08_memory_of_what_was_seen_does_not_grow_with_the_session() -> None:
    decoder = Decoder()
    for block in range(6):
        decoder.feed(b"".join(kernels([[0, 1, 7, 5, i]], number=block * 1000 + i) for i in range(1000)))
    numbers = decoder.sessions["s"]._batches["kernel_event_batch"]
    assert len(numbers._recent) <= 4096 and len(numbers._ends) == 1
    again = decoder.feed(kernels([[0, 1, 7, 5, 7]], number=7))
    assert not again and decoder.ledger.count("repeated_batch") == 1


# --- 9: ends of sessions ---------------------------------------------------------------------------------------------


def test_g09_ends_of_every_sort(tmp_path: Path) -> None:
    _, ledger = read(GEN / "v1.2.1-nested-killed")
    assert losses(ledger) == {"unclean_end": 1}
    ended = line("shutdown", ts_ns=START_NS, synthetic=True, exit_code=-9, signaled=True, signal=9, crashed=True)
    batches, _ = decode(ended, "system")
    assert rows(batches, "session_end")[0] == {
        "time_ns": START_NS,
        "synthetic": 1,
        "exit_code": -9,
        "signaled": 1,
        "signal": 9,
        "crashed": 1,
    }
    session_folder(
        tmp_path, {"device.1.log": start() + kernels([[0, 1, 7, 5, 1]]), "system.1.log": start() + shutdown()}
    )
    _, ledger = read(tmp_path)
    assert not losses(ledger), "an end in one channel is an end"


def test_g09_events_after_the_shutdown_are_kept_and_told() -> None:
    batches, ledger = decode(start() + kernels([[0, 1, 7, 5, 1]]) + shutdown() + kernels([[0, 1, 7, 5, 2]], number=2))
    assert corr_ids(batches) == [1, 2]
    assert ledger.count("after_shutdown") == 1


def test_g09_a_lock_file_means_nothing_a_lock_does(tmp_path: Path) -> None:
    session = session_folder(tmp_path, {".tmp/device.log": start(), ".gpufl-session.lock": b""})
    (folder,) = find_sessions(str(tmp_path))
    assert not folder.live()
    holder = (
        "import fcntl, sys; f = open(sys.argv[1], 'r+b'); fcntl.lockf(f, fcntl.LOCK_EX); "
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(session / ".gpufl-session.lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        assert folder.live(now_s=1e12), "alive, however long it is silent"
        _, ledger = read(tmp_path, live=None)
        assert "unclean_end" not in losses(ledger)
        process.stdin.close()
    assert not folder.live()


# --- 10: dictionaries ------------------------------------------------------------------------------------------------


def test_g10_a_missing_name_is_told_not_invented() -> None:
    table = KernelTable()
    batches, ledger = decode(
        line("dictionary_update", kernel_dict={"1": "known"}) + kernels([[0, 1, 7, 5, 1], [0, 2, 7, 5, 2]])
    )
    for batch in batches:
        table.add(batch)
    assert {s.kernel_id: s.name for s in table.stats(ledger)} == {1: "known", 2: None}
    assert ledger.count("missing_name") == 1


def test_g10_ids_belong_to_their_session_and_entries_may_come_again() -> None:
    one = line("dictionary_update", "a", kernel_dict={"1": "x"})
    two = line("dictionary_update", "b", kernel_dict={"1": "y"})
    batches, ledger = decode(one + two + one + line("dictionary_update", "a", kernel_dict={"1": "z"}))
    told = [(b.session_id, r["text"]) for b in batches if b.table == "name" for r in b.rows()]
    assert told == [("a", "x"), ("a", "z"), ("b", "y")]
    assert ledger.count("changed_name") == 1
    assert ledger.count("channel_copy", "dictionary_update") == 1


# --- 11: clocks ------------------------------------------------------------------------------------------------------


def test_g11_times_before_the_base_and_steps_of_the_clock_are_as_written() -> None:
    batches, ledger = decode(start() + kernels([[0, 1, 7, 5, 1], [-700, 1, 7, 5, 2], [-(10**12), 1, 7, 5, 3]]))
    assert [row["start_ns"] - START_NS for row in rows(batches, "kernel")] == [0, -700, -(10**12)]
    assert {b.clock for b in batches} == {"wall"} and not losses(ledger)


def test_g11_what_has_no_wall_clock_is_apart() -> None:
    batches, ledger = decode(
        start()
        + kernels([[0, 1, 7, 5, 1]], number=1)
        + kernels([[9, 1, 7, 5, 2]], number=2, base=0)
        + kernels([[0, 1, 7, 5, 3], [5000 - START_NS, 1, 7, 6, 4]], number=3)
        + isa(1_000_001)
    )
    clocks = {r["corr_id"]: b.clock for b in batches if b.table == "kernel" for r in b.rows()}
    assert clocks == {1: "wall", 2: "unplaced", 3: "wall", 4: "unplaced"}
    assert [b.clock for b in batches if b.table == "profile_sample"] == ["steady"]
    assert losses(ledger) == {"implausible_time": 2, "steady_clock": 1}
    assert [b.part for b in batches if b.batch_id == 3] == [0, 1]
    columns = ["dt_ns", "kernel_id", "new"]
    split, _ = decode(start() + kernels([[0, 1, 5], [5 - START_NS, 2, 6]], columns=columns))
    assert [(b.clock, b.extra) for b in split if b.table == "kernel"] == [
        ("wall", {"new": [5]}),
        ("unplaced", {"new": [6]}),
    ]
    relative, ledger = decode(start(ts_ns=5) + kernels([[0, 1, 7, 5, 1]], base=100))
    assert {b.clock for b in relative} == {"wall"} and not losses(ledger), (
        "a session that counts from zero is its own clock"
    )


@pytest.mark.parametrize(
    ("status", "mode", "expected"),
    [("fallback", "launch_callbacks_synthetic", True), ("collected", "cupti_activity", False)],
)
def test_g11_synthetic_kernels_are_known_as_such(status: str, mode: str, expected: bool) -> None:
    decoder = Decoder()
    feature = {"feature": "kernel_events", "requested": True, "status": status, "mode": mode, "reason_code": ""}
    decoder.feed(kernels([[0, 1, 7, 5, 1]]))
    assert decoder.sessions["s"].synthetic_kernels is None
    batches = decoder.feed(line("capture_capabilities", ts_ns=9, capabilities=[feature]))
    assert decoder.sessions["s"].synthetic_kernels is expected
    assert rows(batches, "capability")[0]["mode"] == mode


# --- 12: joins -------------------------------------------------------------------------------------------------------


def test_g12_several_sessions_in_one_file_keep_their_own_launches(tmp_path: Path) -> None:
    data = b"".join(
        start(s) + kernels([[0, 1, 7, d, 1]], session=s) + detail(1, s, grid=f"({d},1,1)") + shutdown(s)
        for s, d in (("a", 5), ("b", 6))
    )
    (tmp_path / "run.device.log").write_bytes(data)
    table = KernelTable()
    shapes: dict[tuple[str, int], int] = {}
    for batch in read_session(str(tmp_path)):
        table.add(batch)
        if batch.table == "kernel_shape":
            shapes.update({(batch.session_id, r["shape_id"]): r["grid_x"] for r in batch.rows()})
    found = {s.session_id: (s.total_ns, shapes[s.session_id, s.shape_id or 0]) for s in table.stats()}
    assert found == {"a": (5, 5), "b": (6, 6)}


def test_g12_details_join_before_after_without_and_twice() -> None:
    table = KernelTable()
    decoder = Decoder()
    data = detail(1, occupancy=0.5) + kernels([[0, 1, 7, 5, i] for i in (1, 2, 3)]) + detail(2, occupancy=1.0) * 2
    for item in (data, detail(99)):
        for batch in decoder.feed(item):
            table.add(batch)
    (stats,) = table.stats()
    assert (stats.count, stats.details, stats.occupancy) == (3, 2, 0.75)


# --- 13: versions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "row", "expected"),
    [
        (
            ["dt_ns", "device_id", "gpu_util", "mem_util", "temp_c", "power_mw", "used_mib"],
            [0, 0, 7, 1, 50, 9, 20],
            None,
        ),
        (["dt_ns", "device_id", "clock_sm"], [0, 0, 1987], {"clock_sm_mhz": 1987}),
        (["clock_sm", "total_mib", "device_id", "dt_ns"], [5, 6, 0, 0], {"clock_sm_mhz": 5, "total_mib": 6}),
    ],
)
def test_g13_columns_are_found_by_their_names(columns: list[str], row: list[int], expected: Any) -> None:
    batches, ledger = decode(line("device_metric_batch", base_time_ns=9, columns=columns, rows=[row]))
    found = rows(batches, "device_metric")[0]
    assert found["time_ns"] == 9 and found["device_id"] == 0 and not losses(ledger)
    assert len(found) == len(columns)
    assert expected is None or found.items() >= expected.items()


def test_g13_what_is_unknown_is_kept_raw_and_counted() -> None:
    data = (
        line(
            "kernel_event_batch",
            version=9,
            base_time_ns=1,
            columns=["dt_ns", "new", "kernel_id"],
            rows=[[0, "x", 1], [5, 2]],
        )
        + line("future_event", a=[1, {"b": 2}])
        + line("memset_event", start_ns=1, end_ns=3, corr_id=2, bytes=4, colour="red")
    )
    batches, ledger = decode(data.replace(b'"version":1,"type":"kernel', b'"type":"kernel'))
    first, second = (b for b in batches if b.table == "kernel")
    assert first.extra == {"new": ["x"]} and first.rows() == [{"start_ns": 1, "kernel_id": 1}]
    assert second.extra == {"new": [2]} and second.rows() == [{"start_ns": 6}]
    (unknown,) = rows(batches, "unknown")
    assert json.loads(unknown["line"])["a"] == [1, {"b": 2}] and unknown["type"] == "future_event"
    assert [b.extra for b in batches if b.table == "memset"] == [{"colour": ["red"]}]
    assert losses(ledger) == {"unknown_column": 2, "short_row": 1, "unknown_type": 1}
    assert ledger.count("unknown_column", "memset_event.colour") == 1


def test_g13_readings_that_a_gpu_has_not_are_unknown_not_zero() -> None:
    columns = ["dt_ns", "device_id", "temp_c", "temp_mem_c", "voltage_mv"]
    batches, _ = decode(line("device_metric_batch", base_time_ns=9, columns=columns, rows=[[0, 0, 0, 0, 0]] * 2))
    assert set(rows(batches, "device_metric")[0]) == {"time_ns", "device_id", "temp_c"}


# --- 14: bytes -------------------------------------------------------------------------------------------------------


def test_g14_bad_lines_cost_themselves() -> None:
    batches, ledger = read(DATA / "faults" / "bad-lines")
    assert counts(batches)["kernel"] == 10
    found = losses(ledger)
    assert found == {
        "byte_order_mark": 1,
        "not_json": 3,
        "not_object": 2,
        "not_finite": 2,
        "bad_batch": 1,
        "unknown_type": 2,
        "unknown_column": 1,
        "short_row": 1,
        "no_newline": 1,
        "unclean_end": 2,
    }
    big = max(len(r["text"]) for r in rows(batches, "name"))
    assert big == 200_000


def test_g14_numbers_that_are_none_leave_the_row() -> None:
    columns = ["sample_index", "dt_ns", "metric_id", "value"]
    text = line(
        "pm_sample_batch", base_time_ns=9, columns=columns, rows=[[0, 0, 1, 1.5], [1, 1, 1, 8.25], [2, 2, 1, 7]]
    )
    text = text.replace(b"8.25", b"-nan(ind)").replace(b"1.5", b"Infinity")
    batches, ledger = decode(text)
    assert [(r["sample_index"], r.get("value")) for r in rows(batches, "pm_sample")] in (
        [(0, None), (1, None), (2, 7.0)],
        [(2, 7.0), (0, None), (1, None)],
    )
    assert losses(ledger) == {"not_finite": 2}
    named, _ = decode(line("nvtx_marker_event", name="f(nan, -inf)", v=1).replace(b'"v":1', b'"duration_ns":nan'))
    assert rows(named, "name")[0]["text"] == "f(nan, -inf)", "texts are left alone"


def test_g14_line_ends_blank_lines_and_broken_text() -> None:
    data = start() + kernels([[0, 1, 7, 5, 1]]) + b"\n   \n" + detail(1) + detail(2)
    batches, ledger = decode(data.replace(b"\n", b"\r\n"))
    assert counts(batches)["kernel_detail"] == 2 and not losses(ledger)
    broken = line("dictionary_update", kernel_dict={"1": "a?b"}).replace(b"?", b"\xff\xc3")
    batches, ledger = decode(broken + kernels([[0, 1, 7, 5, 1]]))
    assert rows(batches, "name")[0]["text"].startswith("a\ufffd")
    assert corr_ids(batches) == [1] and losses(ledger) == {"invalid_utf8": 1}


def test_g14_a_line_of_megabytes_is_read_one_above_the_limit_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ptx = line("ptx_disassembly", function_name="f", arch="sm_90", ptx="x" * 5_000_000)
    session_folder(tmp_path, {"device.1.log.gz": start() + ptx + kernels([[0, 1, 7, 5, 1]]) + shutdown()})
    batches, ledger = read(tmp_path)
    assert len(rows(batches, "ptx")[0]["ptx"]) == 5_000_000 and not losses(ledger)
    from gpuflight.events.files import reader

    monkeypatch.setattr(reader, "Lines", lambda place, ledger: reader_lines(place, ledger, 2_000_000))
    from gpuflight.events.format.lines import Lines as reader_lines

    batches, ledger = read(tmp_path)
    assert corr_ids(batches) == [1] and losses(ledger) == {"line_too_long": 1}
    assert next(iter(e for e in ledger if e.reason == "line_too_long")).size_bytes == len(ptx)


def test_g14_utf16_is_told_not_guessed(tmp_path: Path) -> None:
    (tmp_path / "run.device.0.log").write_bytes(start().decode().encode("utf-16"))
    _, ledger = read(tmp_path)
    assert losses(ledger) == {"utf16_file": 1}


# --- 15: runs of many sessions ---------------------------------------------------------------------------------------


def test_g15_segments_of_a_run_are_found_with_their_order() -> None:
    batches, ledger = read(GEN / "v1.3.0rc1-segments")
    starts = {
        r["segment_index"]: (b.session_id, r.get("previous_session_id"))
        for b in batches
        if b.table == "segment_start"
        for r in b.rows()
    }
    assert starts[0][1] is None and starts[1][1] == starts[0][0] and starts[2][1] == starts[1][0]
    assert rows(batches, "run_end")[0]["final_segment_index"] == 2
    assert rows(batches, "segment_end")[0]["end_reason"] == "time" and not losses(ledger)


def test_g15_sessions_lie_up_to_three_levels_below(tmp_path: Path) -> None:
    deep = tmp_path / "20260101-000000_abcdef01" / "run-app-12345678"
    deep.mkdir(parents=True)
    shutil.copytree(CLEAN, deep / CLEAN.name)
    (tmp_path / ".hidden").mkdir()
    shutil.copytree(CLEAN, tmp_path / ".hidden" / "x")
    assert [Path(folder.path).name for folder in find_sessions(str(tmp_path))] == [CLEAN.name]
    with pytest.raises(InputError, match="no GPU session"):
        list(read_session(str(tmp_path / "nothing")))


# --- 16: spool saturation --------------------------------------------------------------------------------------------


def test_g16_a_full_spool_ends_the_capture_with_a_marker_and_readers_say_so(tmp_path: Path) -> None:
    writer = SessionWriter(
        str(tmp_path), "s", rotate_bytes=4000, max_spool_bytes=6000, min_free_bytes=0, compress=False
    )
    writer.event("job_start", {"ts_ns": START_NS})
    for i in range(200):
        writer.event("nvtx_marker_event", {"name": f"n{i}", "start_ns": START_NS + i, "marker_id": i})
    assert writer.stopped.startswith("spool_budget_exceeded:") and writer.dropped
    writer.event("shutdown", {"ts_ns": START_NS})
    writer.close()
    marker = json.loads((tmp_path / "s" / ".gpufl-transport-loss.spool.0.json").read_bytes())
    assert (marker["type"], marker["channel"]) == ("transport_window_loss", "spool")
    batches, ledger = read(tmp_path)
    found = losses(ledger)
    assert found == {"marked_loss": 1, "unclean_end": 1}
    assert counts(batches)["nvtx"] + writer.dropped - 1 == 200


# --- 18: precision ---------------------------------------------------------------------------------------------------


def test_g18_what_needs_64_bits_has_them_and_six_digits_stay_six() -> None:
    data = (
        line(
            "memory_alloc_event_batch",
            base_time_ns=1,
            columns=["dt_ns", "address", "bytes"],
            rows=[[0, 2**64 - 1, 2**62 + 1]],
        )
        + line("execution_signature", ts_ns=1, signature="12345678901234567890")
        + line("pm_sample_batch", base_time_ns=1, columns=["dt_ns", "value"], rows=[[0, 7217.67], [1, 1.23457e06]])
    )
    batches, _ = decode(data)
    assert rows(batches, "allocation")[0] == {"start_ns": 1, "address": 2**64 - 1, "bytes": 2**62 + 1}
    assert rows(batches, "execution_signature")[0]["signature"] == 12345678901234567890
    assert [r["value"] for r in rows(batches, "pm_sample")] == [7217.67, 1234570.0]


def test_locks_of_this_process_survive_a_look_at_its_session(tmp_path: Path) -> None:
    """POSIX gives all locks of a file back at any close of it in the process."""
    writer = SessionWriter(str(tmp_path), "s")
    (folder,) = find_sessions(str(tmp_path))
    assert folder.live()
    probe = "import fcntl, sys; f = open(sys.argv[1], 'r+b'); fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB)"
    path = str(tmp_path / "s" / ".gpufl-session.lock")
    assert subprocess.run([sys.executable, "-c", probe, path], capture_output=True).returncode != 0
    with pytest.raises(BlockingIOError):
        SessionWriter(str(tmp_path), "s")
    assert folder.live()
    writer.close()
    assert not folder.live()
    assert subprocess.run([sys.executable, "-c", probe, path], capture_output=True).returncode == 0
    assert fcntl.F_UNLCK == 2


# --- reports of others -----------------------------------------------------------------------------------------------


def test_n27_an_empty_session_costs_itself(tmp_path: Path) -> None:
    for rank in range(3):
        session_folder(
            tmp_path, {"device.1.log.gz": start() + kernels([[0, 1, 7, 5, rank]]) + shutdown()}, f"rank{rank}"
        )
    (tmp_path / "rank1" / "device.1.log.gz").write_bytes(b"")
    (tmp_path / "rank3" / ".tmp").mkdir(parents=True)
    (tmp_path / "rank3" / ".gpufl-session.lock").touch()
    batches, ledger = read(tmp_path)
    assert sorted(corr_ids(batches)) == [0, 2]
    assert ledger.count("empty_file") == 1


def test_n28_memory_does_not_grow_with_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peak while decoding, by the length of the session; a third of its lines are like no other."""
    monkeypatch.setattr("gpuflight.events.format.singles._KEPT_BYTES", 100_000)
    monkeypatch.setattr("gpuflight.events.format.session._TEXTS", 300)

    def block(number: int) -> bytes:
        first = number * 300
        texts = [f"step {i}" if i % 3 == 0 else "global" for i in range(first, first + 300)]
        memsets = (
            line("memset_event", start_ns=START_NS, end_ns=START_NS + 9, corr_id=first + i, bytes=4, user_scope=text)
            for i, text in enumerate(texts)
        )
        return b"".join(detail(first + i, user_scope=text) for i, text in enumerate(texts)) + b"".join(memsets)

    peaks = []
    for blocks in (2, 6):
        decoder = Decoder()
        tracemalloc.start()
        try:
            for number in range(blocks):
                assert counts(decoder.feed(block(number)))["kernel_detail"] == 300
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]
