"""This kernel's counters, on a child whose page faults are known; and what is said where the CPU has none.

Software events go the same way as those of the CPU (other ``type`` and ``config``), and every kernel counts them.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.kernel_rig import Puppet
from tests.integration.test_bpf_rights import as_nobody

from gpuflight.bottlenecks.diagnosis import Diagnosis, diagnose
from gpuflight.bottlenecks.engine import Engine
from gpuflight.bottlenecks.rules.process_cpu import CacheMisses
from gpuflight.collectors import perf_counters
from gpuflight.collectors.perf_counters import PerfCounters, PerfCountersSettings
from gpuflight.collectors.perf_events_choice import CYCLES, INSTRUCTIONS, MISSES, READS
from gpuflight.collectors.perf_sums import growth, rows_of
from gpuflight.collectors.process_tree import ProcessTree
from gpuflight.core.controller import Controller
from gpuflight.graph import nodes
from gpuflight.rounds import Coverage, Round
from gpuflight.settings import Settings
from gpuflight.sources.open import open_world
from gpuflight.sources.perf_events import HARDWARE, SOFTWARE, UNSUPPORTED, Answer, Event, EventSet, PerfEvents, Target

FAULTS = EventSet(
    "software",
    (
        Event(READS, SOFTWARE, 2),  # PERF_COUNT_SW_PAGE_FAULTS
        Event(MISSES, SOFTWARE, 5),  # … of them the minor ones
        Event(INSTRUCTIONS, SOFTWARE, 0),  # ns on a CPU
        Event(CYCLES, SOFTWARE, 1),
    ),
)
HARDWARE_SET = EventSet("hardware", (Event("cycles", HARDWARE, 0),))
TOUCH = (
    "import mmap, os, threading;;"
    "def touch(pages):;;"
    "    area = mmap.mmap(-1, 4096 * pages, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS);;"
    "    area.madvise(mmap.MADV_NOHUGEPAGE);;"
    "    for page in range(pages): area[4096 * page] = 1;;"
    "def in_thread(pages):;;"
    "    thread = threading.Thread(target=touch, args=(pages,)); thread.start(); thread.join();;"
    "def in_child(pages):;;"
    "    pid = os.fork();;"
    "    if not pid: touch(pages); os._exit(0);;"
    "    os.waitpid(pid, 0);;"
    "def spin(seconds):;;"
    "    import time;;"
    "    end = time.thread_time() + seconds;;"
    "    while time.thread_time() < end: pass;;"
)
DEVICE = f"/dev/shm/gpuflight-perf-{os.getpid()}"
HOLD = f"device = open('{DEVICE}', 'w'); os.unlink('{DEVICE}')"
OTHER_FAULTS = 150
"""Most that the child's interpreter makes by itself between two looks."""


@pytest.fixture
def child() -> Iterator[Puppet]:
    with Puppet() as puppet:
        puppet.do(TOUCH)
        yield puppet


class Watch:
    """The source, on one process."""

    def __init__(self, pid: int, events: EventSet = FAULTS) -> None:
        self.source = PerfEvents()
        self.events = events
        self.id = f"Process(pid={pid},start=1)"
        self.number = 0
        self.last: dict[int, tuple[int, ...]] = {}
        self.pid = pid

    def look(self) -> Answer:
        self.number += 1
        self.source.begin_round(self.number)
        tids = tuple(sorted(int(name) for name in os.listdir(f"/proc/{self.pid}/task")))
        found = self.source.count([self.events], [Target(self.id, tids)], descriptors_at_most=400, threads_at_most=50)
        if self.id in found.refused:
            pytest.skip(f"this machine lets us count nobody: {os.strerror(found.refused[self.id])}")
        return found

    def grown(self) -> dict[str, float]:
        """By how much each event grew since the last look."""
        found = self.look()
        rows = rows_of(found.processes[self.id], len(found.events))
        before, self.last = self.last, rows
        return growth(before, rows, found.events).events


@pytest.fixture
def watch(child: Puppet) -> Iterator[Watch]:
    made = Watch(child.pid)
    made.grown()
    yield made
    made.source.close()


def test_page_faults_of_a_child(child: Puppet, watch: Watch) -> None:
    child.do("touch(3000)")
    grown = watch.grown()
    assert 3000 <= grown[READS] <= 3000 + OTHER_FAULTS
    assert grown[MISSES] == grown[READS], "memory that is new needs no disk"
    assert watch.grown()[READS] <= OTHER_FAULTS


def test_threads_it_starts_count_with_it_and_processes_it_starts_do_not(child: Puppet, watch: Watch) -> None:
    if not watch.look().inherits:
        pytest.skip("before Linux 5.13 threads are opened one by one")
    child.do("in_thread(2000)")
    assert 2000 <= watch.grown()[READS] <= 2000 + OTHER_FAULTS
    child.do("in_child(3000)")
    assert watch.grown()[READS] < 2000
    assert watch.look().descriptors_count == 4


def test_threads_that_were_there_before_have_groups_of_their_own(child: Puppet) -> None:
    child.do("go = [threading.Event() for _ in range(3)]")
    child.do("def wait(event):;;    event.wait();;    touch(1000);;    event.clear();;    event.wait()")
    child.do("for event in go: threading.Thread(target=wait, args=(event,), daemon=True).start()")
    watch = Watch(child.pid)
    watch.grown()
    child.do("go[1].set()")
    child.do("import time;;while go[1].is_set(): time.sleep(0.001)")
    found = watch.look()
    rows = rows_of(found.processes[watch.id], 4)
    by_thread = sorted(row[2] - watch.last[tid][2] for tid, row in rows.items())
    assert len(rows) == 4 and 1000 <= by_thread[-1] <= 1000 + OTHER_FAULTS
    assert max(by_thread[:-1]) <= OTHER_FAULTS
    watch.source.close()


def test_time_on_a_cpu_is_what_the_thread_used(child: Puppet, watch: Watch) -> None:
    """And ns enabled pass while it is on a CPU only, so a sleeping process has none."""
    child.do("spin(0.05)")
    found = watch.look()
    (row,) = rows_of(found.processes[watch.id], 4).values()
    grown = [now - then for now, then in zip(row, next(iter(watch.last.values())), strict=True)]
    enabled, running, *_, task_clock = grown
    assert 50e6 <= task_clock <= 150e6 and enabled == running == pytest.approx(task_clock, rel=0.2)
    time.sleep(0.05)
    assert watch.look().processes[watch.id].raw[8:24] == watch.look().processes[watch.id].raw[8:24]


def test_descriptors_are_given_back_when_it_ends(child: Puppet) -> None:
    before = len(os.listdir("/proc/self/fd"))
    watch = Watch(child.pid)
    assert watch.look().descriptors_count == 4
    assert len(os.listdir("/proc/self/fd")) == before + 4
    child.process.kill()
    child.process.wait()
    assert len(watch.source.count([FAULTS], [], descriptors_at_most=9, threads_at_most=9).processes) == 0
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_process_that_is_gone() -> None:
    with Puppet() as puppet:
        watch = Watch(puppet.pid)
        watch.look()
        watch.source.close()
        pid = puppet.pid
    found = watch.source.count([FAULTS], [Target(watch.id, (pid,))], descriptors_at_most=9, threads_at_most=9)
    assert (found.processes, found.refused, found.unsupported) == ({}, {}, 0)


def test_an_event_that_this_kernel_does_not_know(child: Puppet) -> None:
    unknown = EventSet("no such", (Event("x", 0x7FFFFFFF, 0),))
    source = PerfEvents()
    target = Target("Process(pid=1,start=1)", (child.pid,))
    assert source.count([unknown], [target], descriptors_at_most=9, threads_at_most=9).unsupported in UNSUPPORTED
    source.begin_round(1)
    source.begin_round(2)  # nobody asked: it begins anew
    found = source.count([unknown, FAULTS], [target], descriptors_at_most=9, threads_at_most=9)
    assert found.set == "software"
    source.close()


_AS_ANOTHER = """
import json, os, sys
from gpuflight.sources.perf_events import SOFTWARE, Event, EventSet, PerfEvents, Target
source = PerfEvents()
faults = EventSet("faults", (Event("faults", SOFTWARE, 2), Event("minor", SOFTWARE, 5)))
targets = [Target(name, (pid,)) for name, pid in (("other", int(sys.argv[1])), ("self", os.getpid()))]
found = source.count([faults], targets, descriptors_at_most=100, threads_at_most=9)
print(json.dumps([sorted(found.processes), found.refused, found.user_only, found.short]))
"""


def as_another(pid: int, *prefix: str) -> tuple[list[str], dict[str, int], bool, int]:
    """(counted, refused, without the kernel, short) of the child and of itself, by a process started by ``prefix``."""
    command = [*prefix, sys.executable, "-c", _AS_ANOTHER, str(pid)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/")
    if any(words in done.stderr for words in ("ModuleNotFoundError", "can't open file", "setpriv", "shared libraries")):
        pytest.skip("another user cannot use this Python or this repository")
    assert done.returncode == 0, done.stderr
    counted, refused, user_only, short = json.loads(done.stdout)
    return counted, refused, user_only, short


@pytest.mark.skipif(os.geteuid() != 0, reason="giving up rights needs them")
def test_without_rights_only_what_is_ones_own(child: Puppet) -> None:
    paranoid = int(Path("/proc/sys/kernel/perf_event_paranoid").read_text())
    counted, refused, user_only, _ = as_another(child.pid, *as_nobody())
    assert refused.keys() >= {"other"} and refused["other"] in (errno.EACCES, errno.EPERM)
    if paranoid <= 2:
        assert (counted, user_only) == (["self"], paranoid == 2)
    assert as_another(child.pid, *as_nobody("perfmon")) == (["other", "self"], {}, False, 0)


def test_few_descriptors(child: Puppet) -> None:
    counted, refused, _, short = as_another(child.pid, "sh", "-c", 'ulimit -n 7; exec "$0" "$@"')
    if not refused:
        assert (counted, short) == (["other"], errno.EMFILE), "half of seven: one group of two"


# --- through the collector --------------------------------------------------------------------------------------------


class Rounds:
    """Rounds of the collector beside the process tree; rule S19 judges."""

    def __init__(self, **world: Any) -> None:
        self.engine = Engine([CacheMisses()])
        collectors = [ProcessTree(), PerfCounters(PerfCountersSettings(watch=True, top_count=0))]
        self.core = Controller(open_world(**world), settings=Settings(), collectors=collectors, judge=self.engine)

    def round(self) -> Round:
        return self.core.run_round()

    def close(self) -> None:
        self.core.close()


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rounds]]:
    """Programs that hold ``DEVICE`` are taken for those with a GPU."""
    monkeypatch.setattr(perf_counters, "ACCELERATORS", (DEVICE,))
    made: list[Rounds] = []

    def make(**world: Any) -> Rounds:
        made.append(Rounds(**world))
        return made[-1]

    yield make
    for each in made:
        each.close()


def line_of(done: Round) -> Coverage:
    (line,) = [line for line in done.coverage if line.collector == "perf_counters"]
    return line


def entity_of(done: Round, pid: int) -> nodes.Process:
    (found,) = [e for e in done.graph.nodes.values() if isinstance(e, nodes.Process) and e.pid == pid]
    return found


def counted(done: Round, pid: int) -> list[dict[str, Any]]:
    """What the collector says of a process; the process tree's rates are by the clock, which a replay tells less
    finely."""
    entity = entity_of(done, pid)
    ours = ("llc_", "perf_", "instructions_")
    tables: list[dict[str, Any]] = [entity.metrics, entity.attributes, entity.unknown or {}]
    return [{name: value for name, value in table.items() if name.startswith(ours)} for table in tables]


def test_figures_of_a_real_process_and_their_replay(
    child: Puppet, rounds: Callable[..., Rounds], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(perf_counters, "event_sets", lambda cpu, instructions: [FAULTS])
    child.do(HOLD)
    path = tmp_path / "machine.tar.zst"
    recording = rounds(record=path)
    first = recording.round()
    if line_of(first).status != "ok":
        pytest.skip(line_of(first).reason)
    child.do("touch(2500)")
    told = [first, recording.round(), recording.round()]
    recording.close()
    metrics = entity_of(told[1], child.pid).metrics
    assert metrics["llc_miss_pct"] == 100.0 and metrics["perf_running_pct"] == 100.0
    assert metrics["instructions_per_cycle"] == pytest.approx(1.0, rel=0.2)
    assert metrics["llc_misses_per_s"] > 0 and metrics["perf_threads_count"] == 1
    assert entity_of(told[1], child.pid).attributes["perf_events"] == "software"
    replaying = rounds(replay=path)
    for before in told:
        after = replaying.round()
        assert counted(after, child.pid) == counted(before, child.pid)
        assert (line_of(after).status, line_of(after).notes) == (line_of(before).status, line_of(before).notes)


def test_what_this_machine_says_of_its_own_counters(child: Puppet, rounds: Callable[..., Rounds]) -> None:
    """Either it has them, and tells something of the child, or it says why not, and so does the doctor."""
    child.do(HOLD)
    watch = Watch(child.pid, HARDWARE_SET)
    unsupported = watch.look().unsupported
    watch.source.close()
    here = rounds()
    for _ in range(2):
        done = here.round()
        child.do("spin(0.02)")
    done = here.round()
    line = line_of(done)
    if not unsupported:
        assert line.status == "ok"
        assert entity_of(done, child.pid).metrics["perf_running_pct"] >= 0
        return
    assert line.status == "skipped" and "machine without a PMU" in line.reason and "PMU" in line.hint
    diagnosis: Diagnosis = diagnose(here.engine, "this machine", done.findings, done.graph, done.coverage)
    (unjudged,) = diagnosis.unjudged
    assert unjudged.rules == ["cache_misses"] and "llc_miss_pct" in unjudged.reason and unjudged.hint == line.hint
    assert not any("anon_inode:[perf_event]" in os.readlink(f"/proc/self/fd/{fd}") for fd in _open_descriptors())


def _open_descriptors() -> list[str]:
    return [name for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")]
