"""Logs of running sessions, followed round by round: seen at once, within a budget, old ones left alone."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.tailing import Clock
from tests.unit.gpufl_files import START_NS, kernels, line, shutdown, start

from gpuflight.events import live as live_module
from gpuflight.events.activity.summary import Summary
from gpuflight.events.format.writer import SessionWriter
from gpuflight.events.live import LiveSessions
from gpuflight.events.reading import LiveSettings, Reading
from gpuflight.events.tail.disk import Disk, Entry, Stamp
from gpuflight.events.tail.recent import RecentDisk

ROUND_S = 5.0


class Rig:
    """Live sessions of a folder, with a clock moved by hand."""

    def __init__(self, folder: Path | str, disk: type[RecentDisk] = RecentDisk, **settings: Any) -> None:
        self.clock = Clock()
        self.settings = LiveSettings(**{"notify": False, **settings})
        self.disks: list[RecentDisk] = []

        def make() -> RecentDisk:
            self.disks.append(disk(self.settings.recent_s, self.clock.wall, self.clock.monotonic))
            return self.disks[-1]

        self.live = LiveSessions(
            [str(folder)], self.settings, monotonic_s=self.clock.monotonic, wall_s=self.clock.wall, make_disk=make
        )
        self.reading = Reading()

    def round(self, seconds: float = ROUND_S) -> dict[str, Summary]:
        self.clock.pass_s(seconds)
        self.reading = self.live.read()
        return {session.session_id: session for session in self.reading.sessions}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "logs"
    path.mkdir()
    return path


def put(folder: Path, name: str, data: bytes, session: str = "s") -> Path:
    path = folder / session / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        file.write(data)
    return path


def age(folder: Path, seconds: float) -> None:
    """Everything in a folder, and it, was last changed so long ago."""
    for path in [*folder.rglob("*"), folder]:
        then = path.stat().st_mtime - seconds
        os.utime(path, (then, then))


def test_what_is_written_is_seen_in_the_next_round(folder: Path) -> None:
    rig = Rig(folder)
    assert rig.round() == {}
    with SessionWriter(str(folder), "11111111-1111-4111-8111-111111111111") as writer:
        writer.event("job_start", {"pid": 7, "app": "a", "ts_ns": START_NS, "hostname": "n1"})
        gemm = writer.text("kernel", "gemm")
        for number in range(1, 4):
            writer.rows("kernel_event_batch", {"dt_ns": [START_NS + number], "kernel_id": [gemm], "stream_id": [7],
                                               "duration_ns": [50], "corr_id": [number]})  # fmt: skip
            writer.flush(sync=False)
            found = rig.round()[writer.session_id]
            assert (found.launches, found.pid, found.kernels[0].name, found.end) == (number, 7, "gemm", "")
            assert found.writer == "alive"
        unchanged = rig.round()[writer.session_id]
        assert rig.round()[writer.session_id] is unchanged
        writer.event("shutdown", {"pid": 7, "app": "a", "ts_ns": START_NS + 10})
    rig.round()
    found = rig.round()[writer.session_id]
    assert (found.end, found.launches, found.losses) == ("shutdown", 3, 0)
    rig.live.close()
    rig.live.close()


def test_a_folder_that_comes_later_is_found(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "*" / "traces")
    assert rig.round() == {} and rig.reading.folders == []
    put(tmp_path / "user" / "traces", "device.log", start() + kernels([[0, 1, 7, 5, 1]]))
    for _ in range(13):
        found = rig.round()
    assert found["s"].launches == 1
    assert rig.reading.folders == [str(tmp_path / "user" / "traces")]


def test_a_round_reads_no_more_than_its_budget_and_says_what_is_left(folder: Path) -> None:
    lines = [start()] + [kernels([[0, 1, 7, 5, n]], number=n) for n in range(400)]
    path = put(folder, "device.log", b"".join(lines))
    rig = Rig(folder, bytes_per_round=8192)
    launches = []
    for _ in range(20):
        found = rig.round()["s"]
        launches.append(found.launches or 0)
        assert rig.reading.lag_bytes == found.lag_bytes
        if not found.lag_bytes:
            break
        assert 0 < found.lag_bytes < path.stat().st_size
    assert launches[0] < 70 and launches == sorted(set(launches)) and launches[-1] == 400
    assert rig.round()["s"].lag_bytes == 0


def test_a_busy_folder_does_not_take_the_budget_of_the_others(tmp_path: Path) -> None:
    busy = tmp_path / "a"
    put(
        busy,
        "device.log",
        start("busy") + b"".join(kernels([[0, 1, 7, 5, n]], number=n, session="busy") for n in range(999)),
    )
    put(tmp_path / "b", "device.log", start("quiet") + kernels([[0, 1, 7, 5, 1]], session="quiet"), "quiet")
    rig = Rig(tmp_path / "*", bytes_per_round=4096)
    assert "quiet" in rig.round() | rig.round()


def test_sessions_of_long_ago_are_not_read(folder: Path) -> None:
    put(folder, "device.1.log.gz", b"no gzip at all", "old")
    put(folder, "device.log", start("older") + shutdown("older"), "older")
    put(folder, "p.device.0.log", start("flat"), "")
    age(folder, 3600)
    put(folder, "device.log", start("new"), "new")
    put(folder, "q.device.0.log", start("newflat"), "")
    rig = Rig(folder)
    assert rig.round().keys() == {"new", "newflat"}
    assert (rig.reading.hidden, rig.reading.lost) == (3, 0)


def test_one_that_goes_on_comes_into_sight(folder: Path) -> None:
    put(folder, ".tmp/device.log", start("silent"), "silent")
    put(folder, "p.device.0.log", start("flat"), "")
    age(folder, 3600)
    rig = Rig(folder)
    assert rig.round() == {}
    put(folder, ".tmp/device.log", kernels([[0, 1, 7, 5, 1]], session="silent"), "silent")
    put(folder, "p.device.0.log", kernels([[0, 1, 7, 5, 1]], session="flat"), "")
    for _ in range(4):
        found = rig.round(40)
    assert {name: session.launches for name, session in found.items()} == {"silent": 1, "flat": 1}
    assert found["silent"].pid == 1  # from its beginning


def test_one_whose_writer_lives_is_seen_however_silent(folder: Path) -> None:
    with SessionWriter(str(folder), "11111111-1111-4111-8111-111111111111") as writer:
        writer.event("job_start", {"pid": 7, "app": "a", "ts_ns": START_NS})
        writer.flush()
        age(folder, 3600)
        assert writer.session_id in Rig(folder).round()


def test_the_writer_is_gone(folder: Path) -> None:
    with SessionWriter(str(folder), "11111111-1111-4111-8111-111111111111") as writer:
        writer.event("job_start", {"pid": 7, "app": "a", "ts_ns": START_NS})
    rig = Rig(folder)
    rig.round()
    assert rig.round()[writer.session_id].writer == "gone"


def test_a_forgotten_session_that_goes_on_is_partial(folder: Path) -> None:
    put(folder, "device.log", start() + kernels([[0, 1, 7, 5, 1]]))
    rig = Rig(folder)
    assert rig.round()["s"].launches == 1
    rig.live.forget("s")
    rig.live.forget("s")
    assert rig.round() == {}
    put(folder, "device.log", kernels([[9, 1, 7, 5, 2]], number=2))
    found = rig.round()["s"]
    assert (found.launches, found.partial, found.pid) == (1, True, None)


def test_of_too_many_the_longest_quiet_go(folder: Path) -> None:
    rig = Rig(folder, max_sessions=3)
    for number in range(5):
        put(folder, "device.log", start(f"s{number}"), f"s{number}")
        rig.round()
    assert rig.round().keys() == {"s2", "s3", "s4"}


def test_losses_are_counted_at_their_session(folder: Path) -> None:
    put(folder, "device.log", start() + b"{broken\n" + kernels([[0, 1, 7, 5, 1]]))
    put(folder, "device.1.log.gz", b"\x1f\x8b no gzip", "t")
    put(folder, "scope.log", start("t"), "t")
    rig = Rig(folder)
    found = rig.round()
    assert (found["s"].losses, found["s"].launches) == (1, 1)
    for _ in range(20):
        lost = rig.reading.lost
        if lost:
            break
        rig.round()
    assert lost > 0  # the file: of nobody's lines
    rig.round()
    assert rig.reading.lost == 0  # and once


def test_several_sessions_in_one_file(folder: Path) -> None:
    data = start("one") + kernels([[0, 1, 7, 5, 1]], session="one") + start("two") + b"[broken\n"
    put(folder, "p.device.0.log", data + kernels([[0, 1, 7, 5, 1]] * 3, session="two"), "")
    found = Rig(folder).round()
    assert {name: session.launches for name, session in found.items()} == {"one": 1, "two": 3}
    assert sum(session.losses for session in found.values()) == 1


def test_thousand_idle_sessions_cost_no_more_than_looks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(50):
        put(folder, ".tmp/device.log", start(f"s{number}"), f"s{number}")
    age(folder, 100)
    rig = Rig(folder)
    first = rig.round()
    made = []
    monkeypatch.setattr(live_module.Activity, "summary", lambda *_, **__: made.append(1))
    for _ in range(6):
        assert all(session is first[name] for name, session in rig.round().items())
    assert not made


class FaultyDisk(RecentDisk):
    """Fails the ``number``-th question that it is asked, and all after it if ``lasting``."""

    number = 0
    code = errno.EIO
    lasting = False
    asked = 0

    def _fault(self) -> None:
        type(self).asked += 1
        if self.asked == self.number or (self.lasting and self.asked > self.number > 0):
            raise OSError(self.code, os.strerror(self.code))

    def open(self, path: str) -> int:
        self._fault()
        return super().open(path)

    def read(self, descriptor: int, size: int, offset: int) -> bytes:
        self._fault()
        return super().read(descriptor, size, offset)

    def look(self, path: str) -> Stamp:
        self._fault()
        return super().look(path)

    def status(self, descriptor: int) -> Stamp:
        self._fault()
        return super().status(descriptor)

    def entries(self, folder: str) -> list[Entry]:
        self._fault()
        return super().entries(folder)


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOENT, errno.EIO, errno.ESTALE, errno.EMFILE])
def test_every_question_to_the_disk_may_fail(folder: Path, code: int) -> None:
    """Whichever fails: no round does, and when the fault is over, all is there; but for what was said not to be there,
    which is looked for again only when its folder changes."""
    number = 1
    while True:
        target = folder / str(number)
        put(target, ".tmp/device.log", start() + kernels([[0, 1, 7, 5, 1]]))
        put(target, "p.scope.0.log", start("flat"), "")
        FaultyDisk.number, FaultyDisk.code, FaultyDisk.asked = number, code, 0
        rig = Rig(target, FaultyDisk)
        rig.round()
        reached = FaultyDisk.asked >= number
        for _ in range(1 if code == errno.ENOENT else 30):
            found = rig.round(40)
            if len(found) == 2 and found["s"].launches == 1:
                break
        assert code == errno.ENOENT or (found["s"].launches == 1 and "flat" in found), number
        rig.live.close()
        if not reached:
            break
        number += 1
    assert number > 5


def test_a_disk_that_is_gone_for_good(folder: Path) -> None:
    put(folder, "device.log", start())
    FaultyDisk.number, FaultyDisk.code, FaultyDisk.asked, FaultyDisk.lasting = 1, errno.EIO, 0, True
    try:
        rig = Rig(folder, FaultyDisk)
        for _ in range(3):
            assert rig.round() == {}
        rig.live.close()
    finally:
        FaultyDisk.lasting = False


def test_paths_of_a_tree_of_fixtures(tmp_path: Path) -> None:
    put(tmp_path / "var" / "gpufl" / "monitor", "device.log", start())
    live = LiveSessions(["/var/gpufl/monitor"], LiveSettings(notify=False), root=str(tmp_path))
    assert [session.session_id for session in live.read().sessions] == ["s"]
    live.close()


@pytest.mark.parametrize("what", ["open", "entries"])
def test_what_may_not_be_read_is_counted_until_it_may(folder: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    path = put(folder, "device.log", start())
    closed = [True]
    real = getattr(Disk, what)

    def ask(self: Disk, asked: str) -> Any:
        if closed[0] and asked in (str(path), str(path.parent)):
            raise PermissionError(errno.EACCES, "closed", asked)
        return real(self, asked)

    monkeypatch.setattr(Disk, what, ask)
    rig = Rig(folder)
    rig.round()
    assert rig.reading.closed == 1
    closed[0] = False
    for _ in range(20):
        found = rig.round(40)
    assert "s" in found and rig.reading.closed == 0


def test_line_of_nobody(folder: Path) -> None:
    """A line without a session in a flat folder is lost, and counted."""
    put(folder, "p.device.0.log", line("shutdown", "", ts_ns=START_NS), "")
    rig = Rig(folder)
    assert rig.round() == {} and rig.reading.lost == 1


def test_where_the_time_runs_out_all_have_their_turn(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Summing up takes 0.4 s a session here: three in a round. Who waits is told, with the sums that he had."""
    for number in range(7):
        put(folder, "device.log", start(f"s{number}"), f"s{number}")
    rig = Rig(folder)
    summary = live_module.Activity.summary

    def slow(self: Any, **most: int) -> Summary:
        rig.clock.pass_s(0.4)
        return summary(self, **most)

    monkeypatch.setattr(live_module.Activity, "summary", slow)
    assert len(rig.round()) == 3 and rig.reading.waiting == 4
    assert len(rig.round()) == 6 and rig.reading.waiting == 1
    assert len(rig.round()) == 7 and rig.reading.waiting == 0
    for number in range(7):
        put(folder, "device.log", kernels([[0, 1, 7, 5, 1]], session=f"s{number}"), f"s{number}")
    assert [session.launches for session in rig.round().values()].count(1) == 3
    rig.round()
    assert [session.launches for session in rig.round().values()] == [1] * 7
