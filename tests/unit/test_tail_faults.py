"""What users of log tailers reported (rows L of docs/faults.md): each of it, and that it does not happen here."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.tailing import SESSION, FaultyDisk, Rig, compress, descriptors_of, line, lines, pack, put

from gpuflight.events.format import windows as durable


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    Rig.close_all()


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    """A folder of generation A or B."""
    folder = tmp_path / "logs"
    folder.mkdir()
    return folder


def texts(*numbers: int) -> list[bytes]:
    return [line(number) for number in numbers]


def test_l01_l13_a_file_of_ten_bytes_is_read_and_followed_as_it_grows(
    flat: Path, caplog: pytest.LogCaptureFixture
) -> None:
    active = put(flat / "app.device.log", b'{"n":1}\n')
    rig = Rig(flat)
    assert rig.drain() == [b'{"n":1}']
    put(active, b'{"n":2}\n' * 1 + lines(*range(3, 500)), "ab")
    assert len(rig.drain()) == 498
    assert len({chunk.source for chunk in rig.chunks}) == 1
    assert not caplog.records and not list(rig.tailer.ledger)


def test_l02_empty_files_are_not_taken_for_one_another(flat: Path) -> None:
    first, second = put(flat / "a.device.log", b""), put(flat / "b.device.log", b"")
    for name in ("c.device.0.log", "c.device.1.log"):
        put(flat / name, b"")
    rig = Rig(flat)
    assert rig.drain() == []
    put(second, lines(2))
    put(first, lines(1))
    put(flat / "c.device.1.log", lines(4))
    put(flat / "c.device.0.log", lines(3))
    assert sorted(rig.drain()) == texts(1, 2, 3, 4)
    assert len({chunk.source for chunk in rig.chunks}) == 4


def test_l03_a_warning_is_given_once_per_file_and_reason(flat: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(flat / "a.device.log", lines(1))
    put(flat / "b.device.log", lines(2))
    disk = FaultyDisk()

    def deny(what: str, path: str) -> None:
        if what == "open":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    disk.fault = deny
    rig = Rig(flat, disk=disk)
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            rig.take(rig.poll())
    assert sorted(record.args[0] for record in caplog.records if record.args) == [  # type: ignore[index]
        str(flat / "a.device.log"),
        str(flat / "b.device.log"),
    ]
    disk.fault = lambda what, path: None
    assert sorted(rig.drain()) == texts(1, 2)


@pytest.mark.parametrize("network", [False, True])
@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("damaged", [False, True])
def test_l04_the_compressed_file_of_a_window_is_the_same_window(
    flat: Path, network: bool, restarted: bool, damaged: bool
) -> None:
    active = put(flat / "app.device.log", lines(1, 2))
    rig = Rig(flat, network=network)
    assert rig.drain() == texts(1, 2)
    if restarted:
        rig.restart()
    put(active, lines(3) + line(4), "ab")  # not seen before it is compressed
    os.rename(active, flat / "app.device.1.log")
    compress(flat / "app.device.1.log")
    put(active, lines(5))
    if damaged:
        rig.tailer.close()
        put(Path(rig.checkpoint or ""), b"\0" * 100)
        rig.tailer = rig.open()
    rig.drain()
    assert rig.store.lines == dict.fromkeys(texts(1, 2, 3, 4, 5), 1)
    if not damaged:
        assert rig.sink == texts(1, 2, 3, 4, 5)
    looked = len(rig.sink)
    os.rename(flat / "app.device.1.log.gz", flat / "app.device.2.log.gz")
    rig.drain()
    assert len(rig.sink) == looked


@pytest.mark.parametrize("kept_open", [True, False])
@pytest.mark.parametrize("restarted", [False, True])
def test_l06_l07_l20_a_new_file_with_an_old_inode_is_read_from_its_beginning(
    flat: Path, kept_open: bool, restarted: bool
) -> None:
    active = put(flat / "app.device.log", lines(*range(1, 6)))
    rig = Rig(flat, max_open_files=1)
    rig.drain()
    inode = active.stat().st_ino
    if restarted:
        rig.tailer.close()
    elif not kept_open:
        rig.tailer._shared.close_all()
    # Written over in place: inode, device and name stay, as where an inode is used again.
    with open(active, "r+b") as file:
        file.write(lines(*range(10, 30)))
    assert active.stat().st_ino == inode
    if restarted:
        rig.tailer = rig.open()
    assert rig.drain() == texts(*range(10, 30))
    assert rig.count("file_rewritten") == 1
    assert all(count == 1 for count in rig.store.lines.values())


def test_l06_deleted_and_made_anew_until_the_inode_is_the_same(flat: Path) -> None:
    active = put(flat / "app.device.log", lines(1, 2, 3))
    rig = Rig(flat)
    rig.drain()
    rig.tailer._shared.close_all()  # nobody keeps the inode from being used again
    inode = active.stat().st_ino
    for attempt in range(200):
        active.unlink()
        put(active, lines(*range(100, 110)))
        if active.stat().st_ino == inode:
            break
        os.rename(active, flat / f"away{attempt}")
        put(active, lines(*range(100, 110)))
    assert rig.drain() == texts(*range(100, 110))


def test_l08_l39_ten_thousand_rotations_leave_a_bounded_state(flat: Path) -> None:
    """Only files that are gone are forgotten; how many of them are kept has an end, and an age."""
    stays = put(flat / "stays.device.log", lines(0))
    active = flat / "app.device.log"
    rig = Rig(flat, max_gone=50, gone_wait_s=1, save_interval_s=1e9)
    for number in range(1, 10_001):
        put(active, lines(number))
        if number % 5 == 0:
            rig.take(rig.poll(2))
        active.unlink()
        if number % 1000 == 0:
            rig.tailer.save()
    rig.drain()
    rig.tailer.save()
    path = Path(rig.checkpoint or "")
    assert len(path.read_bytes()) < 60 * 500
    rig.clock.ahead_s = 90_000
    rig.restart()
    rig.tailer.save()
    assert path.read_bytes().count(b'"head"') == 1
    put(stays, lines(10_001), "ab")
    assert rig.drain() == texts(10_001)


def test_l09_a_deleted_file_is_read_to_its_end_and_given_back(flat: Path) -> None:
    active = put(flat / "app.device.log", lines(1))
    rig = Rig(flat, gone_wait_s=30)
    rig.drain(1)
    with open(active, "ab") as writer:
        active.unlink()
        writer.write(lines(2))
        writer.flush()
        assert rig.drain(1) == texts(2)
        assert descriptors_of(flat)
        writer.write(lines(3))
        writer.flush()
        assert rig.drain(4) == texts(3)  # the writer has not noticed: as long as it writes, it is followed
    rig.drain(12)
    assert not descriptors_of(flat)
    assert rig.count("cut_line") == rig.count("vanished_file") == 0


@pytest.mark.parametrize("held", [True, False])
def test_l10_l14_what_is_written_between_the_last_look_and_the_rotation_is_read(flat: Path, held: bool) -> None:
    active = put(flat / "app.device.log", lines(1))
    rig = Rig(flat)
    rig.drain()
    if not held:
        rig.tailer._shared.close_all()
    put(active, lines(2), "ab")
    os.rename(active, flat / "app.device.1.log")
    put(active, lines(4))
    put(flat / "app.device.1.log", lines(3), "ab")  # the writer still has the old one
    assert rig.drain() == texts(1, 2, 3, 4)[1:]
    put(flat / "app.device.1.log", lines(5), "ab")
    assert rig.drain() == texts(5)


def test_l10_a_descriptor_is_drained_when_no_name_is_left(flat: Path) -> None:
    active = put(flat / "app.device.log", lines(1))
    rig = Rig(flat)
    rig.drain()
    put(active, lines(2), "ab")
    active.unlink()
    put(active, lines(3))
    assert rig.drain() == texts(2, 3)


@pytest.mark.parametrize("alter", [1, 77])
def test_l11_l32_on_nfs_numbers_of_files_and_devices_mean_nothing(flat: Path, alter: int) -> None:
    active = put(flat / "app.device.log", lines(1))
    disk = FaultyDisk()
    disk.network = True
    rig = Rig(flat, disk=disk)
    assert rig.drain() == texts(1)
    disk.shift = alter  # all numbers are others, as after a remount
    put(active, lines(2), "ab")
    assert rig.drain() == texts(2)
    os.rename(active, flat / "app.device.1.log")
    put(active, lines(3))
    disk.shift = alter + 1
    rig.restart()
    assert rig.drain() == texts(3)
    assert not descriptors_of(flat)


@pytest.mark.parametrize("network", [False, True])
def test_l12_files_that_begin_alike_are_told_apart_or_it_is_said(flat: Path, network: bool) -> None:
    """Two files have the same first KiB, two the same first line."""
    same = b'{"head":"' + b"h" * 1024 + b'","n":'
    put(flat / "a.device.0.log", same + b"1}\n")
    put(flat / "a.device.1.log", same + b"2}\n")
    put(flat / "b.device.0.log", lines(7, 1))
    put(flat / "b.device.1.log", lines(7, 2, 3))
    rig = Rig(flat, network=network)
    assert len(rig.drain()) == 7
    assert len({chunk.source for chunk in rig.chunks}) == 4
    assert rig.count("ambiguous_file") == 1
    rig.restart()
    assert rig.drain() == []
    rig.tailer.close()
    put(Path(rig.checkpoint or ""), b"\0")
    rig.tailer = rig.open()
    rig.drain()
    assert sum(rig.store.lines.values()) == 7


@pytest.mark.parametrize("count", [1, 40_000])
def test_l12_a_compressed_file_that_only_begins_like_a_window_is_another(flat: Path, count: int) -> None:
    """Also where the difference comes late: it is seen when reading gets to where the window was read to."""
    active = put(flat / "app.device.log", lines(7, *range(10_000, 10_000 + count)))
    rig = Rig(flat)
    rig.drain()
    active.unlink()
    pack(flat / "app.device.1.log.gz", lines(7, *range(90_000, 90_000 + count), 9))
    assert rig.drain() == texts(7, *range(90_000, 90_000 + count), 9)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("limit", [1000, 3 << 20])
def test_l16_a_line_above_the_limit_costs_itself_only(flat: Path, limit: int, packed: bool) -> None:
    data = (
        lines(1)
        + line(2, 2 * limit)
        + b"\n"
        + lines(3)
        + line(4, limit)
        + b"\n"
        + line(5, limit + 1)
        + b"\n"
        + lines(6)
    )
    (pack if packed else put)(flat / ("app.device.1.log" + ".gz" * packed), data)
    rig = Rig(flat, max_line_bytes=limit)
    assert rig.drain() == [line(1), line(3), line(4, limit), line(6)]
    [entry] = [entry for entry in rig.tailer.ledger if entry.reason == "line_too_long"]
    assert (entry.count, entry.size_bytes) == (2, 3 * limit + 3)


def test_l16_a_line_above_the_limit_that_is_still_written(flat: Path) -> None:
    active = put(flat / "app.device.log", lines(1) + line(2, 50_000)[:20_000])
    rig = Rig(flat, max_line_bytes=10_000, chunk_bytes=4096)
    assert rig.drain() == texts(1)
    put(active, line(2, 50_000)[20_000:], "ab")
    assert rig.drain() == []
    rig.restart()
    put(active, b"\n" + lines(3), "ab")
    assert rig.drain() == texts(3)
    assert rig.count("line_too_long") == 1


def test_l17_killed_between_handing_out_and_saving(flat: Path) -> None:
    active = put(flat / "app.device.log", lines(1, 2))
    rig = Rig(flat)
    for chunk in rig.poll():
        rig.store.write(chunk)  # not committed
    rig.kill()
    assert rig.drain() == texts(1, 2)
    put(active, lines(3), "ab")
    chunks = rig.poll()
    rig.store.write(chunks[0])
    rig.tailer.commit(chunks[0])  # committed, not saved
    rig.kill()
    rig.drain()
    assert rig.store.lines == dict.fromkeys(texts(1, 2, 3), 1)
    rig.tailer.save()
    rig.kill()
    assert rig.drain() == []


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("inside", [1, 5, 20])
def test_l19_a_checkpoint_inside_a_line_goes_on_at_the_next(flat: Path, packed: bool, inside: int) -> None:
    from gpuflight.events.tail.checkpoint import Checkpoint

    active = put(flat / "app.device.1.log", lines(1, 2))
    rig = Rig(flat)
    rig.drain()
    put(active, lines(3), "ab")
    if packed:
        compress(active)
    rig.tailer.close()
    checkpoint = Checkpoint(rig.checkpoint or "")
    streams = checkpoint.load().streams
    [window] = streams[0].windows
    window.committed += inside
    window.mark_size = window.mark_crc32 = 0
    checkpoint.save(streams)
    checkpoint.close()
    put(active, lines(4), "ab") if not packed else None
    rig.tailer = rig.open()
    assert rig.drain() == ([] if packed else texts(4))
    [entry] = [entry for entry in rig.tailer.ledger if entry.reason == "resynchronised"]
    assert entry.size_bytes == len(lines(3)) - inside


def test_l22_bytes_that_are_no_utf8_are_handed_on_as_they_are(flat: Path) -> None:
    bad = b'{"type":"x","name":"\xff\xfe\x80"}'
    put(flat / "app.device.log", lines(1) + bad + b"\n" + lines(2) + b"\xff\n" + lines(3))
    rig = Rig(flat)
    assert rig.drain() == [line(1), bad, line(2), b"\xff", line(3)]


@pytest.mark.parametrize("shift", range(4))
def test_l23_a_character_on_the_edge_of_a_piece_stays_whole(flat: Path, shift: int) -> None:
    text = b'{"type":"x","name":"' + b"n" * shift + "€".encode() * 50_000 + b'"}'
    active = put(flat / "app.device.log", lines(1) + text[: (64 << 10) + shift])
    rig = Rig(flat, chunk_bytes=64 << 10)
    assert rig.drain() == texts(1)
    put(active, text[(64 << 10) + shift :] + b"\n", "ab")
    assert rig.drain() == [text]


DAMAGED = {
    "nul": b"\0" * 500,
    "cut": b"gpuflight tail 1 0000",
    "other json": b"[1, 2]",
    "wrong json": b'{"streams": 5}',
    "garbage": bytes(range(256)),
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("how", DAMAGED)
@pytest.mark.parametrize("policy", ["beginning", "end"])
def test_l25_a_damaged_checkpoint_is_put_aside_and_the_policy_holds(
    flat: Path, how: str, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    active = put(flat / "app.device.log", lines(1, 2))
    pack(flat / "app.device.1.log.gz", lines(0))
    rig = Rig(flat, after_damage=policy)
    rig.drain()
    rig.tailer.close()
    path = Path(rig.checkpoint or "")
    path.write_bytes(DAMAGED[how])
    with caplog.at_level(logging.WARNING):
        rig.tailer = rig.open()
    aside = path.with_name(path.name + ".damaged-1")
    assert aside.read_bytes() == DAMAGED[how] and str(aside) in caplog.text and policy in caplog.text
    assert rig.count("bad_checkpoint") == 1
    before = len(rig.sink)
    rig.take(rig.poll())
    put(active, lines(3), "ab")
    rig.drain()
    again = rig.sink[before:]
    assert again[-1:] == texts(3)
    assert (len(again) == 1) == (policy == "end")
    assert rig.store.lines == dict.fromkeys(texts(0, 1, 2, 3), 1)
    rig.restart()
    assert rig.drain() == [] and rig.count("bad_checkpoint") == 0


def test_l26_an_empty_checkpoint_is_a_state_like_any_other(flat: Path) -> None:
    put(flat / "app.device.log", lines(1))
    path = put(flat.parent / "checkpoint" / "tail.json", b"")
    rig = Rig(flat)
    assert rig.drain() == texts(1)
    assert rig.count("bad_checkpoint") == 0 and not path.with_name("tail.json.damaged-1").exists()
    rig.tailer.close()
    rig.folder = flat.parent / "none"
    rig.tailer = rig.open()  # a state without any file
    assert rig.drain() == []
    rig.restart()


def test_l28_a_stale_handle_is_opened_again(flat: Path, caplog: pytest.LogCaptureFixture) -> None:
    active = put(flat / "app.device.log", lines(1))
    disk = FaultyDisk()
    rig = Rig(flat, disk=disk)
    rig.drain()
    put(active, lines(2), "ab")
    for what in ("read", "open", "look", "list"):
        asked: list[str] = []

        def stale(asking: str, path: str, what: str = what, asked: list[str] = asked) -> None:
            if asking == what and len(asked) < 3:
                asked.append(path)
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)

        rig.tailer._shared.close_all()
        disk.fault = stale
        put(active, line(100 + len(what)) + b"\n", "ab")
        put(flat / "new", b"")
        expected = texts(100 + len(what)) if what != "read" else texts(2, 104)
        assert rig.drain(12) == expected
        assert asked
        (flat / "new").unlink()
    assert rig.count("unreadable_file") == rig.count("vanished_file") == 0


@pytest.mark.parametrize(
    "size", [16_383, 16_384, 16_385, 65_535, 65_536, 65_537, (1 << 20) - 1, 1 << 20, (1 << 20) + 1]
)
@pytest.mark.parametrize("packed", [False, True])
def test_l29_a_line_is_never_split_at_the_size_of_a_buffer(flat: Path, size: int, packed: bool) -> None:
    data = line(1, size) + b"\n" + line(2, size) + b"\n" + lines(3)
    (pack if packed else put)(flat / ("app.device.1.log" + ".gz" * packed), data)
    for chunk_bytes in (16_384, 1 << 20):
        rig = Rig(flat, checkpoint=None, chunk_bytes=chunk_bytes)
        assert rig.drain() == [line(1, size), line(2, size), line(3)]
        assert b"".join(chunk.data for chunk in rig.chunks) == data
        rig.tailer.close()


@given(
    data=st.lists(st.one_of(st.binary(max_size=80), st.integers(0, 99).map(line)), max_size=20).map(b"\n".join),
    cuts=st.lists(st.integers(0, 2000), max_size=8),
    chunk_bytes=st.integers(64, 200),
)
def test_l30_whatever_the_pieces_the_bytes_are_the_same(data: bytes, cuts: list[int], chunk_bytes: int) -> None:
    """Handed out are the lines of the file, byte by byte, however it was written and read."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        data = b" " + data
    root = Path(tempfile.mkdtemp(prefix="gpuflight-tail-"))
    try:
        active = put(root / "logs" / "app.device.log", b"")
        rig = Rig(active.parent, checkpoint=None, chunk_bytes=chunk_bytes)
        begin = 0
        for end in [*sorted(cut for cut in cuts if cut < len(data)), len(data)]:
            put(active, data[begin:end], "ab")
            rig.take(rig.poll())
            begin = end
        put(active, b"\n", "ab")
        rig.drain()
        rig.tailer.close()
        whole = data + b"\n"
        position = 0
        for chunk in rig.chunks:
            assert whole[position : chunk.start].strip() == b""  # newlines of lines that came before them
            assert chunk.data == whole[chunk.start : chunk.end]
            position = chunk.end
        assert whole[position:].strip() == b""
    finally:
        shutil.rmtree(root)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("packed", [False, True])
def test_l31_utf16_is_said_once_and_nothing_of_it_is_read(
    flat: Path, encoding: str, packed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    data = ("\ufeff" + lines(1, 2).decode()).encode(encoding)
    path = flat / ("app.device.1.log" + ".gz" * packed)
    (pack if packed else put)(path, data)
    put(flat / "app.scope.log", lines(3))
    rig = Rig(flat)
    assert rig.drain() == texts(3)
    if not packed:
        put(path, data[2:], "ab")
    assert rig.drain() == []
    assert rig.count("utf16_file") == 1
    assert len([record for record in caplog.records if "utf16" in record.getMessage()]) == 1
    if not packed:
        put(path, lines(4))
        assert rig.drain() == texts(4)


def test_l34_a_line_in_three_writes_is_whole(flat: Path) -> None:
    active = put(flat / "app.device.log", b"")
    rig = Rig(flat)
    text = line(1, 300)
    for part in (text[:100], text[100:200], text[200:] + b"\n"):
        assert rig.poll() == []
        put(active, part, "ab")
    assert rig.drain() == [text]


def test_l34_the_rest_of_an_old_file_is_never_glued_to_a_new_one(flat: Path) -> None:
    active = put(flat / "app.device.log", lines(1) + line(2)[:10])
    rig = Rig(flat)
    assert rig.drain() == texts(1)
    os.rename(active, flat / "app.device.1.log")
    put(active, line(3) + b"\n")
    assert rig.drain() == texts(3)
    compress(flat / "app.device.1.log")
    assert rig.drain() == []
    assert rig.count("cut_line") == 1


@pytest.mark.parametrize("step", ["write", "fsync", "rename", "folder"])
def test_l35_there_is_a_whole_checkpoint_at_every_moment(
    flat: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash at any step of saving leaves the old one or the new one; and its folder is synced after the renaming."""
    active = put(flat / "app.device.log", lines(1))
    rig = Rig(flat, save_interval_s=1e9)
    rig.drain()
    rig.tailer.save()
    path = Path(rig.checkpoint or "")
    old = path.read_bytes()
    put(active, lines(2), "ab")
    rig.drain()
    order: list[str] = []
    steps = ["fsync", "rename", "folder"]
    real_rename, real_fsync = os.rename, os.fsync

    def crash(name: str) -> None:
        order.append(name)
        assert path.read_bytes() == old or name == "folder"
        if name == step:
            raise OSError(errno.EIO, "power is gone")

    def fsync(descriptor: int) -> None:
        crash("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "fsync")
        real_fsync(descriptor)

    def rename(source: Any, target: Any) -> None:
        crash("rename")
        real_rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(durable.os, "fsync", fsync)
        patch.setattr(durable.os, "rename", rename)
        if step == "write":
            patch.setattr(durable, "open", lambda *a, **k: crash("write"), raising=False)
        with pytest.raises(OSError, match="power"):
            rig.tailer.save()
    assert order == {"write": ["write"], "fsync": steps[:1], "rename": steps[:2], "folder": steps}[step]
    if step != "folder":
        assert path.read_bytes() == old
    rig.kill()
    rig.drain()
    assert rig.store.lines == dict.fromkeys(texts(1, 2), 1)


def test_l36_a_target_that_goes_and_comes_back_is_not_read_again(flat: Path) -> None:
    session = flat / SESSION
    pack(session / "device.1.log.gz", lines(1, 2))
    put(session / ".tmp" / "device.log", lines(3))
    rig = Rig(flat)
    rig.drain()
    os.rename(session, flat.parent / "away")
    rig.drain()
    rig.restart()
    rig.drain()
    rig.restart()
    os.rename(flat.parent / "away", session)
    put(session / ".tmp" / "device.log", lines(4), "ab")
    assert rig.drain() == texts(4)
    os.rename(session, flat.parent / "away")
    rig.drain()
    rig.clock.ahead_s = 90_000  # longer than it is remembered
    rig.restart()
    rig.restart()
    os.rename(flat.parent / "away", session)
    assert sorted(rig.drain()) == texts(1, 2, 3, 4)
    assert all(count == 1 for count in rig.store.lines.values())
