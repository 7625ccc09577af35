"""The kernel's list of tasks tells whose /proc record need not be read: what is taken as unchanged is unchanged."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.kernel_rig import Puppet, needs_probes

from gpuflight.sources.open import open_world
from gpuflight.sources.procfs import marks
from gpuflight.sources.procfs.marks import TaskMarks
from gpuflight.sources.world import World

pytestmark = needs_probes


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(marks, "LEAST_PROCESSES", 1)
    opened = open_world()
    yield opened
    opened.close()


def records() -> dict[int, bytes]:
    found = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            found[int(name)] = Path(f"/proc/{name}/stat").read_bytes()
        except OSError:
            continue
    return found


def spied(world: World) -> list[str]:
    """The records that are read from now on."""
    asked: list[str] = []
    read = world.fs.read_record

    def spy(path: str) -> bytes:
        asked.append(path)
        return read(path)

    world.fs.read_record = spy  # type: ignore[method-assign]
    return asked


def test_a_record_taken_as_unchanged_is_what_it_was_byte_for_byte(world: World) -> None:
    """Read between three looks at the marks: who is quiet from the first to the last has one record, whoever he is.

    Fields that ProcFs does not use (wait channel, CPU sets …) are left out.
    """
    from gpuflight.sources.procfs.stat import parse_stat

    own = world.procfs.own_namespace("pid")
    found = world.procfs.marks
    assert found is not None
    compared = 0
    found.quiet(10, own)
    first = records()
    quiet = found.quiet(10, own)
    for _ in range(20):
        second = records()
        still = found.quiet(10, own)
        for pid in quiet & still & first.keys() & second.keys():
            assert parse_stat(first[pid]) == parse_stat(second[pid])
            compared += 1
        first, quiet = second, still
    assert not found.why_not
    assert compared > 100


def test_what_moved_is_read_again_and_what_slept_is_not(world: World) -> None:
    with Puppet() as child, Puppet() as other:
        child.do("import time")
        for number in range(1, 4):
            world.begin_round(number)
            world.procfs.processes()
        before = world.procfs.processes()[child.pid], world.procfs.processes()[other.pid]
        child.do("end = time.process_time() + 0.05;;while time.process_time() < end: pass")
        asked = spied(world)
        world.begin_round(4)
        now = world.procfs.processes()
        assert now[child.pid] is not before[0] and now[child.pid].cpu_ticks > before[0].cpu_ticks
        assert now[other.pid] is before[1]
        assert f"/proc/{child.pid}/stat" in asked and f"/proc/{other.pid}/stat" not in asked


def test_a_thread_that_works_moves_its_process(world: World) -> None:
    """Its record may even read the same: less than a tick, and no fault. It is read."""
    with Puppet() as child:
        child.do("import threading; go = threading.Event(); done = threading.Event()")
        child.do(
            "work = lambda: (go.wait(), done.set(), go.clear(), go.wait());"
            "t = threading.Thread(target=work, daemon=True); t.start()"
        )
        for number in range(1, 4):
            world.begin_round(number)
            world.procfs.processes()
        child.do("go.set(); done.wait()")
        asked = spied(world)
        world.begin_round(4)
        assert child.pid in world.procfs.processes()
        assert f"/proc/{child.pid}/stat" in asked


def test_ends_and_orphans_are_seen(world: World) -> None:
    """Neither moves by itself: one is a zombie, one gets another parent."""
    parent = subprocess.Popen(
        ["/bin/sh", "-c", "sleep 60 & echo $!; read x"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    orphan = int(parent.stdout.readline())
    for number in range(1, 4):
        world.begin_round(number)
        assert world.procfs.processes()[orphan].ppid == parent.pid
    parent.kill()
    os.waitid(os.P_PID, parent.pid, os.WEXITED | os.WNOWAIT)
    world.begin_round(4)
    assert world.procfs.processes()[orphan].ppid != parent.pid
    assert world.procfs.processes()[parent.pid].state == "Z"
    parent.wait()
    world.begin_round(5)
    assert parent.pid not in world.procfs.processes()
    os.kill(orphan, 9)


def test_a_recording_of_it_gives_the_same_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "LEAST_PROCESSES", 1)
    live, seen = open_world(record=tmp_path / "tape"), []
    for number in range(1, 5):
        live.begin_round(number)
        seen.append(dict(live.procfs.processes()))
    live.close()
    again = open_world(replay=tmp_path / "tape")
    for number, expected in enumerate(seen, 1):
        again.begin_round(number)
        assert again.procfs.processes() == expected
    again.close()


def test_where_it_is_not_to_be_had_everything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "LEAST_PROCESSES", 1)
    off = open_world(probes="off")
    for number in range(1, 4):
        off.begin_round(number)
        assert os.getpid() in off.procfs.processes()
    assert off.procfs.marks is not None and "switched off" in off.procfs.marks.why_not
    off.close()


def test_few_processes_are_read_without_it() -> None:
    class Never:
        def open(self, *_: object, **__: object) -> None:
            raise AssertionError("it is not worth it")

    assert TaskMarks(Never()).quiet(marks.LEAST_PROCESSES - 1, 0) == frozenset()  # type: ignore[arg-type]
