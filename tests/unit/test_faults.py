"""The faults of docs/faults.md that no other test covers, on whole machines; and that the table there is whole.

Rows: D01 to D20 are the defects of the reference system, T, L, N and F come from reports on comparable systems.
"""

from __future__ import annotations

import ast
import errno
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.collecting import COLLECTORS, check, collect, every_collector, everything, gpus, make
from tests.fakes.machine import FakeMachine, add_process, rich_machine
from tests.fakes.machine_answers import POD_NETNS, RANK, SERVER, TRAINER, WORKER

from gpuflight.core.controller import Controller
from gpuflight.core.expansion import CollectorRunner, expand_world
from gpuflight.graph import nodes
from gpuflight.rounds import Coverage
from gpuflight.settings.model import Limits, Settings
from gpuflight.subscribers.delivery import SubscriberSet
from gpuflight.subscribers.memory import Memory

ROWS = (
    *(f"D{number:02}" for number in range(1, 21)),
    *(f"T{number:02}" for number in range(1, 34) if number not in (5, 13, 18, 21, 24, 26, 31)),
    *(f"L{number:02}" for number in range(1, 40) if number not in (5, 15, 18, 21, 24, 27, 33, 37, 38)),
    *(f"N{number:02}" for number in range(1, 33) if number not in (2, 5, 7, 10, 17, 21)),
    *(f"F{number:02}" for number in range(1, 23) if number not in (2, 6, 10, 14, 16)),
    *(f"G{number:02}" for number in range(1, 19)),
    *(f"R{number:02}" for number in range(1, 22) if number not in (2, 3, 5, 13, 16)),
)
"""What the list of reports has; the numbers left out were never given, or merged into others."""


# --- the table -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table() -> dict[str, tuple[str, list[str]]]:
    """Row → (what we do, tests)."""
    text = (Path(__file__).parents[2] / "docs" / "faults.md").read_text("utf-8")
    found: dict[str, tuple[str, list[str]]] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)]
        if len(cells) == 5 and re.match(r"[DTLNFGR]\d\d ", cells[1]):
            row = cells[1][:3]
            assert row not in found, f"{row} twice"
            assert not re.sub(r"`[^`]*`|\s", "", cells[3]), f"{row}: the last cell holds tests only"
            found[row] = (cells[2], re.findall(r"`([^`]*)`", cells[3]))
    return found


def test_every_row_is_answered_by_a_test_or_an_issue(table: dict[str, tuple[str, list[str]]]) -> None:
    assert list(table) == list(ROWS)
    for row, (answer, tests) in table.items():
        assert answer, row
        assert tests or re.search(r"\bissue [3-7]\b", answer), f"{row} has neither a test nor an issue"


def test_every_test_that_the_table_names_exists(table: dict[str, tuple[str, list[str]]]) -> None:
    root = Path(__file__).parents[2]
    defined: dict[str, set[str]] = {}
    for row, (_, tests) in table.items():
        for test in tests:
            file, _, name = test.partition("::")
            if file not in defined:
                tree = ast.parse((root / file).read_text("utf-8"))
                functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
                defined[file] = {function.name for function in functions}
            assert name in defined[file], f"{row}: there is no {test}"
            assert name.startswith("test_"), f"{row}: {name} is no test"


# --- the reference system's defects ----------------------------------------------------------------------------------


def core(machine: FakeMachine, *names: str, **more: Any) -> Controller:
    return Controller(machine.world, settings=Settings(), collectors=[make(name) for name in names], **more)


def test_d09_the_last_round_belongs_to_the_core() -> None:
    """No subscriber that anyone may remove holds the graph."""
    subscribers = SubscriberSet()
    subscribers.add(Memory())
    controller = core(FakeMachine(rich_machine()), "host", subscribers=subscribers)
    first = controller.run_round()
    assert subscribers.remove("memory")
    second = controller.run_round()
    assert controller.latest is second and second.number == first.number + 1
    assert "Host(node1)" in second.graph.nodes
    assert controller.history.at(second.time_ns) is not None
    controller.close()


def test_d12_one_unreadable_process_costs_only_itself() -> None:
    """The lowest pid that shares memory may not be looked into: all others are found, and it is said."""
    files = rich_machine()
    machine = FakeMachine(files)

    def deny(what: str, path: str) -> None:
        if path.startswith((f"/proc/{SERVER}/maps", f"/proc/{SERVER}/fd")):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    machine.fs.fault = deny
    outcome = collect(make("shared_memory"), machine.next_round())
    check(outcome)
    users = {edge.source for edge in outcome.edges if edge.kind == "Access"}
    assert {process(TRAINER), process(RANK), process(WORKER)} <= users
    assert process(SERVER) not in users
    assert any(note.count == 1 and "CAP_SYS_PTRACE" in note.hint for note in outcome.notes)


def process(pid: int) -> str:
    return f"Process(pid={pid},start={1000 + pid})"


def test_d15_a_start_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "lock"
    controller = core(FakeMachine(rich_machine()), "host", lock_path=str(lock))

    def no_threads(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_threads)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="new thread"):
                controller.start()
            assert (controller.running, controller.references_count, controller.stop()) == (False, 0, 0)
    other = core(FakeMachine(rich_machine()), "host", lock_path=str(lock))
    assert other.start() == 1  # the lock was given back
    other.close()
    assert controller.start() == 1 and controller.running
    assert controller.stop() == 0 and not controller.running
    controller.close()


def test_d19_an_ordinary_user_on_a_bare_machine_gets_what_there_is() -> None:
    """Not root, netlink refused, no NVML, no tools, no cgroups to read: processes are there, and the rest is said."""
    machine = FakeMachine(rich_machine(), tape=False)
    private = re.compile(r"/proc/\d+/(exe|cwd|root|environ|io|maps|numa_maps|syscall|fd|ns)(/|$)")

    def refuse(what: str, path: str) -> None:
        if private.match(path) or path.startswith(("/run/", "/sys/fs/cgroup")):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    machine.fs.fault = refuse
    runners = [CollectorRunner(make(name)) for name in COLLECTORS]
    expansion = expand_world(machine.next_round(), runners, Limits())
    lines = {line.collector: line for line in expansion.coverage}
    assert {line.status for line in lines.values()} == {"ok", "skipped"}
    for line in lines.values():
        assert line.status == "ok" or line.reason, line
    assert lines["process_tree"].status == "ok" and lines["nvml"].status == "skipped"
    seen = {node.id for batch in expansion.nodes for node in batch}
    assert {process(TRAINER), process(RANK), process(SERVER), process(WORKER), "Host(node1)"} <= seen
    assert limits_told(expansion.coverage) >= {"process_tree", "pipes", "shared_memory", "message_queues"}
    for runner in runners:
        runner.close()


def limits_told(coverage: list[Coverage]) -> set[str]:
    """The collectors that say what to do to see more."""
    return {line.collector for line in coverage if any("CAP_SYS_PTRACE" in note.hint for note in line.notes)}


# --- T ---------------------------------------------------------------------------------------------------------------


def test_t08_a_thousand_processes_cost_few_questions_a_round() -> None:
    """All collectors together, every process idle: the kernel is asked a handful of things about each, on average."""
    machine = FakeMachine(rich_machine(1000))
    collectors = [make(name) for name in COLLECTORS]
    totals = []
    for _ in range(5):
        world = machine.next_round()
        machine.fs.asked.clear()
        for collector in collectors:
            collect(collector, world, [*everything(world), *gpus()])
        totals.append(sum(machine.fs.asked.values()))
    assert totals[0] < 30 * 1000 + 2000
    assert max(totals[1:]) < 8 * 1000 + 1000, totals


def test_t09_socket_tables_are_read_once_per_namespace() -> None:
    """Netlink is refused, so /proc/PID/net it is: once for each of the two namespaces, not for each of 60 processes."""
    files = rich_machine(60).copy()
    for number in range(20):
        add_process(files, 30_000 + number, "sidecar", netns=POD_NETNS)
    machine = FakeMachine(files)

    def refuse(source: str, key: str) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    machine.tape.fault = refuse
    world = machine.next_round()
    for name in ("sockets", "unix_sockets"):
        check(collect(make(name), world))
    for table in ("tcp", "udp", "unix", "sockstat"):
        assert machine.fs.count("read", "/proc/", f"/net/{table}") == 2, table


@every_collector
def test_t12_t15_a_process_may_end_at_any_point_of_a_round(name: str) -> None:
    """After whichever question: its files are gone, all at once. The others stay in the picture."""
    whole = FakeMachine(rich_machine())
    steady = collect(make(name), whole.next_round())
    count = sum(whole.fs.asked.values())
    for position in range(1, count + 1, max(1, count // 40)):
        machine = FakeMachine(rich_machine().copy())
        asked = 0

        def end(what: str, path: str, at: int = position, machine: FakeMachine = machine) -> None:
            nonlocal asked
            asked += 1
            if asked == at:
                machine.fs.remove(f"/proc/{TRAINER}")

        machine.fs.fault = end
        collector = make(name)
        outcome = collect(collector, machine.next_round())
        check(outcome)
        assert outcome.ok
        others = {key for key in steady.ids[0] if key.startswith("Process(") and key != process(TRAINER)}
        if name in ("process_tree", "sockets", "threads"):
            assert others - {process(RANK)} <= outcome.ids[0]
        machine.fs.fault = lambda what, path: None
        after = collect(collector, machine.next_round())
        check(after)
        assert process(TRAINER) not in after.ids[0]


def test_t32_containers_with_the_same_beginning_are_two() -> None:
    files = rich_machine().copy()
    ids = [beginning + "c" * 52 for beginning in ("ab" * 5 + "cd", "ab" * 5 + "ce")]
    for number, container in enumerate(ids):
        add_process(files, 7000 + number, "app", cgroup=f"/docker/{container}")
    outcome = collect(make("containers"), FakeMachine(files).next_round())
    found = {node.container_id: node for node in outcome.nodes if isinstance(node, nodes.Container)}
    assert set(ids) <= set(found)
    assert all(len(container) == 64 for container in found)
    assert {edge.source for edge in outcome.edges if edge.target in (process(7000), process(7001))} == {
        f"Container({container})" for container in ids
    }
