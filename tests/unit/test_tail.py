"""Following log folders: every generation, order, holes, limits, fairness, notification, the agent's cursors."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import sys
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.tailing import SESSION, FaultyDisk, Rig, compress, descriptors_of, line, lines, pack, put

from gpuflight.errors import InputError
from gpuflight.events.tail import Tailer, TailSettings
from gpuflight.events.tail import notify as notification
from gpuflight.events.tail.cursors import read_cursors

GENERATIONS = sorted((Path(__file__).parents[1] / "data" / "gpufl").iterdir())


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    Rig.close_all()


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    return folder


@pytest.fixture
def session(logs: Path) -> Path:
    return logs / SESSION


def texts(*numbers: int) -> list[bytes]:
    return [line(number) for number in numbers]


def content(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix == ".gz" else data


@pytest.mark.parametrize("folder", [path for path in GENERATIONS if path.is_dir()], ids=lambda path: path.name)
def test_files_of_every_generation_come_whole(folder: Path) -> None:
    """The bytes of all files, each once; windows that are there twice count once."""
    try:
        expected = {
            path.relative_to(folder).as_posix().replace("/.tmp/", "/").removesuffix(".gz"): content(path)
            for path in sorted(folder.rglob("*.log*"))
            if path.suffix != ".part"
        }
    except (EOFError, OSError, zlib.error):
        pytest.skip("damaged on purpose")
    rig = Rig(folder, checkpoint=None, hole_wait_s=0, settle_s=0)
    rig.drain()
    read: dict[str, bytes] = {}
    for chunk in rig.chunks:
        name = os.path.relpath(chunk.path, folder).replace("/.tmp/", "/").removesuffix(".gz")
        assert len(read.get(name, b"")) == chunk.start
        read[name] = read.get(name, b"") + chunk.data
    cut = rig.count("utf16_file")
    for name, data in expected.items():
        got = read.get(name, b"")
        assert data.startswith(got)
        if not cut:
            assert b"\n" not in data[len(got) :] and not data[len(got) :].strip().endswith(b"}")


def test_windows_come_in_the_order_of_writing(logs: Path) -> None:
    """E ascends, B descends, the one being written is last; A counts from 0."""
    for number in (1, 2, 10):
        pack(logs / SESSION / f"device.{number}.log.gz", lines(number))
    put(logs / SESSION / ".tmp" / "device.11.log", lines(11))
    put(logs / SESSION / ".tmp" / "device.log", lines(12))
    for number in (1, 2, 3):
        pack(logs / "flat" / f"app.device.{number}.log.gz", lines(104 - number))
    put(logs / "flat" / "app.device.log", lines(104))
    for number in (0, 1, 2):
        put(logs / "old" / f"app.device.{number}.log", lines(200 + number))
    rig = Rig(logs, hole_wait_s=0)
    came = rig.drain()
    assert [text for text in came if text in texts(*range(100))] == texts(1, 2, 10, 11, 12)
    assert [text for text in came if text in texts(*range(100, 200))] == texts(101, 102, 103, 104)
    assert [text for text in came if text in texts(*range(200, 300))] == texts(200, 201, 202)
    by_folder = {chunk.folder: chunk.session_id for chunk in rig.chunks}
    assert by_folder == {str(logs / SESSION): SESSION, str(logs / "flat"): "", str(logs / "old"): ""}


def test_a_whole_last_line_comes_at_once_and_its_newline_brings_nothing(logs: Path) -> None:
    active = put(logs / "app.device.log", lines(1) + line(2))
    rig = Rig(logs)
    assert rig.drain() == texts(1, 2)
    for more, came in ((b"", []), (b"\r", []), (b"\n", []), (line(3), texts(3)), (b"\n" + line(4)[:5], [])):
        put(active, more, "ab")
        assert rig.drain() == came
    rig.restart()
    put(active, line(4)[5:], "ab")
    assert rig.drain() == texts(4)
    rig.restart()
    put(active, b"\n" + lines(5), "ab")
    assert rig.drain() == texts(5)
    assert b"".join(chunk.data for chunk in rig.chunks).count(b"\n") == 2
    assert not list(rig.tailer.ledger)


def test_a_hole_is_waited_for_then_told_and_filled_when_it_comes_late(session: Path) -> None:
    for number in (1, 4):
        pack(session / f"device.{number}.log.gz", lines(number))
    put(session / ".gpufl-window-ack.device.2", b"id\n")
    put(session / ".tmp" / "device.log", lines(5))
    rig = Rig(session.parent, hole_wait_s=60)
    rig.take(rig.poll())
    rig.take(rig.poll())
    assert rig.sink == texts(1)
    assert rig.count("missing_window") == 0 and rig.count("acked_window") == 1
    rig.take(rig.poll(61))
    assert rig.sink == texts(1, 4, 5)
    assert rig.count("missing_window") == 1
    pack(session / "device.3.log.gz", lines(3))
    assert rig.drain() == texts(3)
    assert rig.count("late_window") == 1
    rig.restart()
    assert rig.drain() == [] and rig.count("missing_window") == rig.count("acked_window") == 0


def test_a_window_that_the_agent_takes_away_after_it_was_read_is_no_hole(session: Path) -> None:
    first = pack(session / "device.1.log.gz", lines(1))
    rig = Rig(session.parent)
    rig.drain()
    first.unlink()
    put(session / ".gpufl-window-ack.device.1", b"id\n")
    pack(session / "device.2.log.gz", lines(2))
    assert rig.drain() == texts(2)
    rig.restart()
    pack(session / "device.3.log.gz", lines(3))
    assert rig.drain() == texts(3)
    assert not list(rig.tailer.ledger)


def test_every_step_of_a_window_from_being_written_to_being_exported(session: Path) -> None:
    active = put(session / ".tmp" / "device.log", lines(1))
    rig = Rig(session.parent)
    assert rig.drain() == texts(1)
    put(active, lines(2), "ab")
    retired = session / ".tmp" / "device.1.log"
    os.rename(active, retired)
    put(active, lines(3))
    assert rig.drain() == texts(2, 3)
    put(session / ".tmp" / "device.1.log.gz.part", gzip.compress(lines(1, 2))[:20])
    assert rig.drain() == []
    compress(retired)
    (session / ".tmp" / "device.1.log.gz.part").unlink()
    assert rig.drain() == []
    os.rename(session / ".tmp" / "device.1.log.gz", session / "device.1.log.gz")
    assert rig.drain() == []
    rig.kill()
    assert rig.drain() == []
    assert not list(rig.tailer.ledger)


def test_beside_our_own_writer(logs: Path) -> None:
    """It rotates, compresses in its thread and exports while it is followed; killed on the way as well."""
    from gpuflight.events.format.writer import SessionWriter

    rig = Rig(logs, gone_wait_s=1e6)
    with SessionWriter(str(logs), SESSION, rotate_bytes=3000) as writer:
        for number in range(600):
            writer.event("nvtx_marker_event", {"n": number, "pad": "p" * (number % 90)})
            if number % 7 == 0:
                writer.flush(sync=False)
                rig.take(rig.poll())
            if number % 97 == 0:
                rig.kill()
    rig.drain()
    written: list[bytes] = []
    for path in (logs / SESSION).glob("*.log.gz"):
        written += gzip.decompress(path.read_bytes()).splitlines()
    assert len(written) == 600
    assert rig.store.lines == dict.fromkeys(written, 1)
    # an inode is used again, as a rule, when a window was compressed: seen by the first line
    assert {entry.reason for entry in rig.tailer.ledger} <= {"file_rewritten"}
    assert rig.tailer.sessions()[0].writer == "gone" and rig.tailer.sessions()[0].caught_up


def test_copytruncate_takes_what_is_left_from_the_copy(logs: Path) -> None:
    active = put(logs / "app.device.log", lines(1, 2))
    rig = Rig(logs)
    rig.drain()
    put(active, lines(3), "ab")
    put(logs / "app.device.1.log", active.read_bytes())
    os.truncate(active, 0)
    put(active, lines(4), "ab")
    assert rig.drain() == texts(3, 4)
    assert rig.count("file_truncated") + rig.count("file_rewritten") == 1


@pytest.mark.parametrize("size", [len(lines(1)), len(lines(1)) - 1, len(lines(1, 2)) - 5])
@pytest.mark.parametrize("killed", [False, True])
def test_a_file_cut_off_in_its_middle_goes_on_with_what_is_new(logs: Path, size: int, killed: bool) -> None:
    active = put(logs / "app.device.log", lines(1, 2, 3))
    rig = Rig(logs)
    rig.drain()
    os.truncate(active, size)
    rig.take(rig.poll())
    if killed:
        rig.kill()
    rest = lines(2, 3)[size - len(lines(1)) :] if size > len(lines(1)) else b"\n" * (size < len(lines(1)))
    put(active, rest[: len(lines(2)) - (size - len(lines(1)))] if size > len(lines(1)) else rest, "ab")
    put(active, lines(7, 8), "ab")
    came = rig.drain()
    assert came[-2:] == texts(7, 8) and set(came) <= set(texts(2, 7, 8))
    assert rig.store.lines[line(1)] == rig.store.lines[line(7)] == rig.store.lines[line(8)] == 1


def test_two_different_windows_of_one_number_are_both_read(session: Path) -> None:
    pack(session / "device.1.log.gz", lines(1))
    put(session / ".tmp" / "device.1.log", lines(2))
    rig = Rig(session.parent)
    assert sorted(rig.drain()) == texts(1, 2)


def test_a_compressed_file_that_grows_slowly_is_not_given_up(session: Path) -> None:
    packed = gzip.compress(lines(*range(1, 200)), 9)
    path = put(session / "device.1.log.gz", b"")
    rig = Rig(session.parent, settle_s=15)
    for end in range(0, len(packed) - 1, 40):
        path.write_bytes(packed[:end])
        rig.take(rig.poll())
        rig.take(rig.poll())
    assert not list(rig.tailer.ledger)
    path.write_bytes(packed)
    rig.drain()
    assert rig.sink == texts(*range(1, 200)) and not list(rig.tailer.ledger)


@pytest.mark.parametrize("keep", [30, -9, 0])
def test_a_compressed_file_in_the_making_is_waited_for_a_cut_one_is_told(session: Path, keep: int) -> None:
    data = lines(*range(1, 200))
    packed = gzip.compress(data, 9)
    path = put(session / "device.1.log.gz", packed[:keep])
    rig = Rig(session.parent, settle_s=60)
    rig.take(rig.poll())
    assert rig.count("truncated_file") == rig.count("empty_file") == 0
    path.write_bytes(packed)
    rig.drain()
    assert rig.store.lines == dict.fromkeys(texts(*range(1, 200)), 1)
    cut = pack(session / "device.2.log.gz", data.replace(b'"n"', b'"m"'))
    os.truncate(cut, cut.stat().st_size - 9)
    rig.drain(10)
    assert rig.count("truncated_file") == 1
    assert rig.tailer.sessions()[0].caught_up


def test_a_corrupt_window_costs_what_comes_after_the_damage_only(session: Path) -> None:
    written = [b'{"n":%d,"pad":"%s"}' % (n, hashlib.sha256(b"%d" % n).hexdigest().encode() * 2) for n in range(40_000)]
    whole = pack(session / "device.1.log.gz", b"\n".join(written))
    data = bytearray(whole.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 200] = b"\xff" * 200
    whole.write_bytes(data)
    pack(session / "device.2.log.gz", lines(99_999))
    rig = Rig(session.parent)
    came = rig.drain()
    assert rig.count("corrupt_file") == 1 and came[-1] == line(99_999)
    assert len(came) > 5000 and came[:5000] == written[:5000]


def test_three_levels_and_several_folders(logs: Path, tmp_path: Path) -> None:
    put(logs / "20261130-010101_ab" / "run-app-12345678" / SESSION / ".tmp" / "device.log", lines(1))
    put(tmp_path / "other" / SESSION / "scope.1.log", lines(2))
    put(logs / "1" / "2" / "3" / "4" / "device.log", lines(3))  # too deep
    put(logs / ".hidden" / SESSION / "device.1.log", lines(4))
    tailer = Tailer([str(logs), str(tmp_path / "other")], settings=TailSettings(notify=False))
    chunks = tailer.poll()
    assert sorted(text for chunk in chunks for text in chunk.lines()) == texts(1, 2)
    assert len({chunk.source for chunk in chunks}) == 2
    tailer.close()


def test_folders_and_sessions_that_come_later(tmp_path: Path) -> None:
    folder = tmp_path / "later" / "logs"
    rig = Rig(folder, checkpoint=None)
    assert rig.drain() == []
    put(folder / SESSION / ".tmp" / "device.log", lines(1))
    assert rig.drain() == texts(1)
    put(folder / "run" / "second" / ".tmp" / "scope.log", lines(2))
    assert rig.drain() == texts(2)


def test_one_channel_only(session: Path) -> None:
    put(session / "device.1.log", lines(1))
    put(session / "scope.1.log", lines(2))
    rig = Rig(session.parent, channels=("scope",))
    assert rig.drain() == texts(2)


# --- limits ----------------------------------------------------------------------------------------------------------


def test_a_busy_session_does_not_keep_others_waiting(logs: Path) -> None:
    put(logs / "busy" / ".tmp" / "device.log", lines(*range(20_000)))
    for number in range(20):
        put(logs / f"quiet{number}" / ".tmp" / "device.log", lines(50_000 + number))
    rig = Rig(logs, chunk_bytes=10_000, poll_bytes=20_000)
    came: list[Any] = []
    for _ in range(3):
        chunks = rig.poll(0)
        came += chunks
        assert sum(len(chunk.data) for chunk in chunks) <= 30_000
    assert len({chunk.folder for chunk in came}) == 21


def test_what_is_not_committed_has_a_limit_in_all_and_per_channel(logs: Path) -> None:
    for name in ("a", "b", "c"):
        put(logs / name / ".tmp" / "device.log", lines(*range(10_000)))
    rig = Rig(
        logs,
        chunk_bytes=10_000,
        poll_bytes=1 << 30,
        max_uncommitted_bytes=150_000,
        max_uncommitted_bytes_per_channel=40_000,
    )
    held = []
    for _ in range(10):
        held += rig.poll()
    per_folder = {name: sum(len(c.data) for c in held if c.folder.endswith(name)) for name in ("a", "b", "c")}
    assert all(40_000 <= size < 50_000 for size in per_folder.values())
    assert rig.tailer.uncommitted_bytes == sum(per_folder.values())
    assert rig.poll() == []
    rig.take(held)
    rig.take(held)  # twice does nothing
    assert rig.tailer.uncommitted_bytes == 0
    rig.drain()
    assert len(rig.sink) == 30_000 + len([text for chunk in held for text in chunk.lines()])


@pytest.mark.parametrize("packed", [False, True])
def test_memory_does_not_grow_with_a_file(logs: Path, packed: bool) -> None:
    import tracemalloc

    data = b"".join(line(number, 1000) + b"\n" for number in range(40_000))
    (pack if packed else put)(logs / ("app.device.1.log" + ".gz" * packed), data)
    del data
    tailer = Tailer(str(logs), settings=TailSettings(notify=False, poll_bytes=1 << 20))
    tracemalloc.start()
    size = 0
    while chunks := tailer.poll():
        for chunk in chunks:
            size += len(chunk.data)
            tailer.commit(chunk)
        del chunk, chunks
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    tailer.close()
    assert size > 40_000_000 and peak < 12 << 20


def test_many_sessions_with_few_descriptors(logs: Path) -> None:
    for number in range(200):
        put(logs / f"s{number}" / ".tmp" / "device.log", lines(number))
    rig = Rig(logs, max_open_files=10)
    assert sorted(rig.drain()) == sorted(texts(*range(200)))
    assert len(descriptors_of(logs)) <= 10
    for number in range(200):
        put(logs / f"s{number}" / ".tmp" / "device.log", lines(1000 + number), "ab")
    assert sorted(rig.drain()) == sorted(texts(*range(1000, 1200)))


def test_idle_sessions_cost_few_questions(logs: Path) -> None:
    """By polling; with notification none at all between sweeps."""
    old = 1_700_000_000
    for number in range(100):
        for channel in ("device", "scope"):
            path = put(logs / f"s{number}" / ".tmp" / f"{channel}.log", lines(number))
            os.utime(path, (old, old))
        for window in range(1, 20):
            pack(logs / f"s{number}" / f"device.{window}.log.gz", lines(number * 1000 + window))
        for folder in (logs / f"s{number}" / ".tmp", logs / f"s{number}"):
            os.utime(folder, (old, old))
    os.utime(logs, (old, old))
    disk = FaultyDisk()
    rig = Rig(logs, disk=disk)
    rig.drain()
    disk.looks = disk.listings = 0
    for _ in range(40):
        assert rig.poll(0.25) == []
    # 10 s, every 20 s: a folder and its .tmp, two plain files; never the 1,900 finished ones
    assert disk.looks <= 100 * 4 + 10 and disk.listings == 0
    rig.tailer._watching.notifier = type(
        "Quiet", (), {"reason": "", "take": lambda self: {}, "close": lambda self: None}
    )()
    rig.poll(10)
    disk.looks = 0
    for _ in range(40):
        rig.poll(0.25)
    assert disk.looks == 0


# --- notification ----------------------------------------------------------------------------------------------------


def test_the_kernel_tells_of_changes(logs: Path) -> None:
    pytest.importorskip("watchfiles")
    active = put(logs / SESSION / ".tmp" / "device.log", lines(1))
    with Tailer(str(logs), settings=TailSettings(sweep_s=1e6, idle_poll_s=1e6, poll_interval_s=1e6)) as tailer:
        if not tailer.notified:
            pytest.skip("no inotify here")
        came: list[bytes] = []

        def until(count: int) -> None:
            for _ in range(200):
                chunks = tailer.poll()
                for chunk in chunks:
                    came.extend(chunk.lines())
                    tailer.commit(chunk)
                if len(came) >= count:
                    return
                tailer.wait(5)

        until(1)
        put(active, lines(2), "ab")
        until(2)
        os.rename(active, active.with_name("device.1.log"))
        put(active, lines(3))
        until(3)
        assert came == texts(1, 2, 3)


def test_without_the_extra_or_notification_it_looks_for_itself(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    active = put(logs / "app.device.log", lines(1))
    monkeypatch.setitem(sys.modules, "watchfiles", None)
    monkeypatch.setitem(sys.modules, "watchfiles._rust_notify", None)
    rig = Rig(logs, notify=True)
    assert not rig.tailer.notified
    assert rig.drain() == texts(1)
    put(active, lines(2), "ab")
    assert rig.drain() == texts(2)


def test_where_notification_ends_looking_goes_on(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    active = put(logs / "app.device.log", lines(1))
    ended = threading.Event()

    class Broken:
        def __init__(self, *_: Any) -> None: ...

        def watch(self, *_: Any) -> Any:
            ended.wait(10)
            raise RuntimeError("OS file watch limit reached")

        def close(self) -> None: ...

    watchfiles = pytest.importorskip("watchfiles")
    monkeypatch.setattr(watchfiles._rust_notify, "RustNotify", Broken)
    rig = Rig(logs, notify=True, sweep_s=1e6)
    assert rig.tailer.notified
    rig.drain()
    ended.set()
    assert rig.tailer.wait(10)
    assert not rig.tailer.notified
    put(active, lines(2), "ab")
    assert rig.drain() == texts(2)


def test_a_watch_limit_at_the_start_is_no_error(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise OSError("OS file watch limit reached")

    watchfiles = pytest.importorskip("watchfiles")
    monkeypatch.setattr(watchfiles._rust_notify, "RustNotify", full)
    assert "max_user_watches" in notification.Notifier([str(logs)]).reason
    rig = Rig(logs, notify=True)
    assert not rig.tailer.notified


def test_network_file_systems_are_not_watched(logs: Path) -> None:
    disk = FaultyDisk()
    disk.network = True
    rig = Rig(logs, notify=True, disk=disk)
    assert not rig.tailer.notified


# --- checkpoint and cursors ------------------------------------------------------------------------------------------


def test_a_checkpoint_belongs_to_one_tailer(logs: Path) -> None:
    rig = Rig(logs)
    with pytest.raises(InputError, match="another process"):
        rig.open()
    rig.tailer.close()
    rig.open().close()


def test_nothing_of_the_lines_is_in_the_checkpoint(logs: Path) -> None:
    put(logs / "app.device.log", b'{"secret":"hunter2"}\n')
    rig = Rig(logs)
    rig.drain()
    rig.tailer.close()
    assert b"hunter2" not in Path(rig.checkpoint or "").read_bytes()


CURSORS = {
    "clean": {"fileIndex": 12, "offset": 0, "fileKey": None, "fileSize": 0, "headSig": 0},
    "plain": {
        "fileIndex": 2,
        "offset": 0,
        "fileKey": "(dev=fe00,ino=2672280)",
        "fileSize": 67108627,
        "headSig": 1635841967,
    },
}
"""As gpufl-agent wrote them (fixtures of observed traffic)."""


def test_cursors_of_the_agent_are_read(tmp_path: Path) -> None:
    path = put(
        tmp_path / "cursor.json",
        json.dumps({"streams": {f"{k}.device": v for k, v in CURSORS.items()}}, indent=2).encode(),
    )
    found = read_cursors(str(path))
    assert (found["clean", "device"].file_index, found["clean", "device"].head_sig) == (12, 0)
    assert found["plain", "device"].file_size == 67108627
    for broken in (b"", b"{}", b"\0\0", b'{"streams":[]}'):
        path.write_bytes(broken)
        with pytest.raises(InputError, match="cursor"):
            read_cursors(str(path))


@pytest.mark.parametrize("as_checkpoint", [True, False])
def test_what_the_agent_has_sent_is_not_read_again(session: Path, tmp_path: Path, as_checkpoint: bool) -> None:
    for number in (1, 2, 4):
        pack(session / f"device.{number}.log.gz", lines(number * 10, number * 10 + 1))
    plain = put(session / "scope.1.log", lines(50, 51, 52))
    put(session / ".tmp" / "device.log", lines(60))
    streams = {
        f"{SESSION}.device": {"fileIndex": 4, "offset": len(lines(40)), "fileKey": None, "fileSize": 0, "headSig": 0},
        f"{SESSION}.scope": {
            "fileIndex": 1,
            "offset": len(lines(50)),
            "fileKey": "(dev=1,ino=2)",
            "fileSize": 3,
            "headSig": zlib.crc32(plain.read_bytes()[:512]),
        },
    }
    data = json.dumps({"streams": streams}, indent=2).encode()
    cursor = put(tmp_path / ("checkpoint/tail.json" if as_checkpoint else "cursor.json"), data)
    rig = Rig(session.parent)
    if not as_checkpoint:
        rig.tailer.close()
        rig.tailer = rig.open(cursors=str(cursor))
    assert sorted(rig.drain()) == texts(41, 51, 52, 60)
    assert rig.count("missing_window") == rig.count("acked_window") == 0
    rig.restart()
    assert rig.drain() == []


def test_a_cursor_about_another_file_is_not_used(session: Path, tmp_path: Path) -> None:
    put(session / "device.1.log", lines(1, 2))
    stream = {"fileIndex": 1, "offset": len(lines(1)), "fileKey": None, "fileSize": 9, "headSig": 5}
    cursor = put(tmp_path / "cursor.json", json.dumps({"streams": {f"{SESSION}.device": stream}}).encode())
    rig = Rig(session.parent)
    rig.tailer.close()
    rig.tailer = rig.open(cursors=str(cursor))
    assert rig.drain() == texts(1, 2)


def test_begin_at_the_end(session: Path) -> None:
    pack(session / "device.1.log.gz", lines(1))
    active = put(session / ".tmp" / "device.log", lines(2))
    rig = Rig(session.parent, begin="end")
    assert rig.drain() == []
    put(active, lines(3), "ab")
    put(session / ".tmp" / "scope.log", lines(4))
    assert sorted(rig.drain()) == texts(3, 4)
    rig.kill()
    rig.drain()
    assert rig.store.lines == dict.fromkeys(texts(3, 4), 1)


def test_the_event_store_takes_each_line_once(session: Path, tmp_path: Path) -> None:
    """The real store and decoder: killed, checkpoint lost, compressed meanwhile."""
    pytest.importorskip("duckdb")
    from gpuflight.events.format.decoder import Decoder
    from gpuflight.events.ledger import Ledger
    from gpuflight.events.store import EventStore, Overlap, Source

    def marker(number: int) -> bytes:
        return b'{"type":"memset_event","session_id":"%s","start_ns":%d,"end_ns":%d,"bytes":8,"corr_id":%d}\n' % (
            SESSION.encode(), 10**18 + number, 10**18 + number + 5, number
        )  # fmt: skip

    active = put(session / ".tmp" / "device.log", b"".join(map(marker, range(50))))
    rig = Rig(session.parent, chunk_bytes=1000)
    store = EventStore(str(tmp_path / "store"))

    def take(commit: bool) -> None:
        while chunks := rig.poll():
            for chunk in chunks:
                data, place = chunk.data, chunk.place
                start = chunk.start
                for _ in range(2):
                    ledger = Ledger()
                    batches = Decoder(chunk.session_id, ledger).feed(data, place)
                    try:
                        store.write(batches, Source(chunk.source, start, chunk.end, chunk.session_id), ledger)
                        break
                    except Overlap as overlap:
                        data, start = chunk.after(overlap.position), overlap.position
                if commit:
                    rig.tailer.commit(chunk)
            if not commit:
                return

    take(commit=False)
    rig.kill()
    take(commit=True)
    put(active, b"".join(map(marker, range(50, 80))), "ab")
    os.rename(active, session / ".tmp" / "device.1.log")
    compress(session / ".tmp" / "device.1.log")
    rig.tailer.close(save=False)
    Path(rig.checkpoint or "").unlink(missing_ok=True)
    rig.tailer = rig.open()
    take(commit=True)
    [known] = [store.session(SESSION)]
    assert known is not None
    [row] = store.rows(f"SELECT count(*) AS n FROM {store.relation('memset', [known]).sql}")
    assert row["n"] == 80
    store.close()


def test_nothing_is_left_open(logs: Path) -> None:
    put(logs / "app.device.log", lines(1))
    checkpoint = logs.parent / "c" / "t.json"
    threads = threading.active_count()
    for _ in range(10):
        tailer = Tailer(str(logs), str(checkpoint))
        for chunk in tailer.poll():
            tailer.commit(chunk)
        assert descriptors_of(checkpoint.parent)
        tailer.close()
        tailer.close()
        assert not descriptors_of(logs.parent)
    assert threading.active_count() == threads


@pytest.mark.parametrize("temporary", [True, False])
def test_a_folder_in_which_nothing_happens_is_listed_once(tmp_path: Path, temporary: bool) -> None:
    from gpuflight.events.tail.disk import Disk
    from gpuflight.events.tail.tree import Folder, has_changed, list_folder

    if temporary:
        (tmp_path / ".tmp").mkdir()
        os.utime(tmp_path / ".tmp", (10**9, 10**9))
    os.utime(tmp_path, (10**9, 10**9))
    folder = Folder(str(tmp_path), 0, True)
    list_folder(Disk(), folder, 2 * 10**18)
    assert not has_changed(Disk(), folder)
    if temporary:
        (tmp_path / ".tmp" / "device.log").touch()
    else:
        (tmp_path / ".tmp").mkdir()
    assert has_changed(Disk(), folder)
    list_folder(Disk(), folder, 2 * 10**18)
    assert not has_changed(Disk(), folder)
    shutil.rmtree(tmp_path / ".tmp")
    os.utime(tmp_path, (10**9, 10**9))
    assert has_changed(Disk(), folder)
