"""The rules of collectors/base.py, on every registered collector: one that is added is tested the day it registers.

Each runs alone, through the real sources, over machines in memory: none at all, one with something of everything, and
that one with faults injected at every question that is asked of it.
"""

from __future__ import annotations

import errno
import inspect
import os
import random
import typing
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from tests.examples import every_second, examples
from tests.fakes.collecting import COLLECTORS, check, collect, every_collector, everything, gpus, make, two_rounds
from tests.fakes.machine import FakeMachine, add_process, empty_machine, rich_machine
from tests.fakes.machine_answers import SERVER, TRAINER, nvml_snapshot
from tests.fakes.memory_fs import MemoryFs

from gpuflight.collectors.base import Collector
from gpuflight.core.expansion import CollectorRunner, expand_world
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import Entity, Graph, nodes
from gpuflight.graph.codec import decode_graph, encode_graph
from gpuflight.graph.nodes import NODE_KINDS
from gpuflight.settings.model import Limits

ERRORS = (errno.EACCES, errno.ENOENT, errno.EIO, errno.ESRCH, errno.ENOSYS)
FILES = frozenset(("read", "list", "link", "real", "stat", "lstat", "statvfs"))
POSITIONS_AT_MOST = 40
CONTENTS = {"empty": b"", "garbage": b"\xff( 1\n", "long": b"a" * 70_000, "blank": b"\0\n\n:\n - \n"}


# --- what it declares ------------------------------------------------------------------------------------------------


def test_there_are_collectors_and_none_is_broken() -> None:
    assert len(COLLECTORS) >= 20
    assert [broken for broken in Collector.family.broken if broken.origin.startswith("gpuflight.")] == []


@every_collector
def test_declaration(name: str) -> None:
    cls = COLLECTORS[name]
    assert name == cls.name and name == name.lower() and name.isidentifier()
    assert cls.description and "\n" not in cls.description and len(cls.description) < 200
    assert cls.version and isinstance(cls.version, str)
    assert cls.stability in ("experimental", "beta", "stable")
    assert cls.seeds or cls.expands, "it would never be asked"
    assert all(kind in NODE_KINDS.values() for kind in cls.expands)
    assert 0 < cls.deadline_s <= 30


@every_collector
def test_settings(name: str) -> None:
    cls = COLLECTORS[name]
    if cls.settings_class is None:
        assert cls().settings is None
        return
    assert issubclass(cls.settings_class, BaseModel)
    assert cls().settings == cls.settings_class()
    for field, info in cls.settings_class.model_fields.items():
        assert info.description, f"{name}.{field} has no description"
    with pytest.raises(ValidationError):
        cls.settings_class(no_such_setting=1)


@every_collector
def test_constructing_and_closing_asks_nothing(name: str) -> None:
    """A collector is made before anyone knows whether it is wanted; ``close`` may come without a round."""
    collector = make(name)
    assert collector.losses == {} and collector.notes == {}
    collector.close()
    collector.close()


# --- what it answers -------------------------------------------------------------------------------------------------


@every_collector
def test_on_an_empty_machine(name: str) -> None:
    for outcome in two_rounds(name, FakeMachine(empty_machine(), tape=False)):
        assert outcome.edges == [] or outcome.ok
        assert not outcome.ok or outcome.nodes == [] or name == "host"  # a host is there even if nothing tells of it


@every_collector
def test_on_a_machine_with_something_of_everything(name: str) -> None:
    if name == "nvml" and nvml_snapshot() is None:
        pytest.skip("the fake NVML needs a C compiler")
    files = rich_machine()
    machine = FakeMachine(files)
    first, second = two_rounds(name, machine)
    assert first.ok and second.ok, first.reason or second.reason
    assert first.ids == second.ids, "nothing changed"
    if name == "top_cpu":  # somebody must use the CPU for that
        assert not second.nodes
        first, second = two_rounds(name, FakeMachine(busy(files)))
    assert first.nodes or second.nodes


def busy(files: MemoryFs) -> MemoryFs:
    """The machine with a trainer that uses two more seconds of CPU each time it is looked at."""
    files = files.copy()
    ticks = [90_000]
    path = f"/proc/{TRAINER}/stat"
    before = files.files[path]

    class Ticking(dict[str, bytes]):
        def __getitem__(self, key: str) -> bytes:
            if key != path:
                return super().__getitem__(key)
            ticks[0] += 200
            return before.replace(b" 90000 ", b" %d " % ticks[0], 1)

    files.files = Ticking(files.files)
    return files


@every_collector
def test_foreign_entities_are_left_alone(name: str) -> None:
    """Defect 4: what another host reported is never taken for ours."""
    collector = make(name)
    world = FakeMachine(rich_machine()).next_round()
    foreign = [nodes.Process(pid=TRAINER, start=1000 + TRAINER, ns="node-7"), nodes.Host(hostname="node1", ns="node-7")]
    outcome = collect(collector, world, [*foreign, *gpus()])
    check(outcome)
    assert not [edge for edge in outcome.edges if "ns=node-7" in edge.source + edge.target]


def stranger(kind: type[Entity]) -> Entity:
    """An entity of a kind that nothing on the machine knows: another collector's, or gone since it was reported."""
    hints = typing.get_type_hints(kind)
    own = [field for field in kind.__struct_fields__ if field not in Entity.__struct_fields__]
    identity: dict[str, Any] = {field: 987_654 if hints[field] is int else "zz" for field in own}
    return kind(**identity)


@every_collector
def test_what_it_does_not_know_is_no_matter(name: str) -> None:
    collector = make(name)
    strangers = [stranger(kind) for kind in collector.expands]
    for files in (rich_machine(), empty_machine()):
        outcome = collect(collector, FakeMachine(files).next_round(), strangers)
        check(outcome)
        ids = {entity.id for entity in strangers}
        assert not [edge for edge in outcome.edges if {edge.source, edge.target} & ids]


@every_collector
def test_answers_encode_and_decode(name: str) -> None:
    first, _ = two_rounds(name, FakeMachine(rich_machine()))
    graph = first.graph
    assert decode_graph(encode_graph(graph)) == graph
    assert graph.describe()


@every_collector
def test_observing_twice_in_a_round_changes_nothing(name: str) -> None:
    """As after a round that was cut off: the same World, read already."""
    machine = FakeMachine(rich_machine())
    collector = make(name)
    world = machine.next_round()
    frontier = [*everything(world), *gpus()]
    first = collect(collector, world, frontier)
    again = collect(collector, world, frontier)
    check(again)
    assert first.ids == again.ids


# --- faults ----------------------------------------------------------------------------------------------------------

Fault = Callable[[str, str], "bytes | None"]


class Faults:
    """Counts the questions that are asked of a machine and answers some of them with a fault."""

    def __init__(self, machine: FakeMachine, wanted: Callable[[int], bool], fault: Fault) -> None:
        self.asked = 0
        self._wanted = wanted
        self._fault = fault
        machine.fs.fault = machine.tape.fault = self

    def __call__(self, what: str, which: str) -> bytes | None:
        self.asked += 1
        return self._fault(what, which) if self._wanted(self.asked) else None


def failing(code: int) -> Fault:
    """What the sources really raise: OSError for files and netlink; NVML and tools are never there in part."""

    def fault(what: str, which: str) -> bytes | None:
        if what in FILES or what in ("netlink", "ipc"):
            raise OSError(code, os.strerror(code), which)
        raise SourceUnavailable(f"{what} failed")

    return fault


def missing(what: str, which: str) -> bytes | None:
    """Not part of the recording, or refused: SourceUnavailable where sources may raise it."""
    if what in FILES:
        raise FileNotFoundError(errno.ENOENT, "not in this recording", which)
    raise SourceUnavailable(f"the recording holds no answer of {what}")


def answering(content: bytes) -> Fault:
    """Another content than expected, of a file or from the kernel."""
    return lambda what, which: content if what in ("read", "netlink") else None


def questions_of(name: str) -> int:
    machine = FakeMachine(rich_machine())
    faults = Faults(machine, lambda number: False, missing)
    two_rounds(name, machine)
    return faults.asked


def positions_of(name: str) -> list[int]:
    count = questions_of(name)
    return list(range(1, count + 1, max(1, count // POSITIONS_AT_MOST)))


@every_collector
def test_one_question_fails(name: str) -> None:
    """Whichever it is: the answer is partial and sound, or the source is unavailable with a reason."""
    for turn, position in enumerate(positions_of(name)):
        machine = FakeMachine(rich_machine())
        Faults(machine, lambda number, at=position: number == at, failing(ERRORS[turn % len(ERRORS)]))  # type: ignore[misc]
        two_rounds(name, machine)


@every_collector
def test_everything_fails_from_some_question_on(name: str) -> None:
    for turn, position in enumerate(positions_of(name)):
        machine = FakeMachine(rich_machine())
        fault = missing if turn % 6 == 5 else failing(ERRORS[turn % 6])
        Faults(machine, lambda number, at=position: number >= at, fault)  # type: ignore[misc]
        two_rounds(name, machine)


@every_collector
@pytest.mark.parametrize("code", ERRORS, ids=[errno.errorcode[code] for code in ERRORS])
def test_every_question_fails(name: str, code: int) -> None:
    machine = FakeMachine(rich_machine())
    Faults(machine, lambda number: True, failing(code))
    for outcome in two_rounds(name, machine):
        assert not outcome.edges


@every_collector
@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS.keys())
def test_one_file_holds_something_else(name: str, content: bytes) -> None:
    """A record of a process that just ended is empty; other kernels, drivers and file systems write other things."""
    for position in every_second(positions_of(name), list(CONTENTS.values()).index(content)):
        machine = FakeMachine(rich_machine())
        Faults(machine, lambda number, at=position: number == at, answering(content))  # type: ignore[misc]
        two_rounds(name, machine)


@every_collector
def test_all_files_hold_something_else(name: str) -> None:
    for content in (b"", b"\xff( 1\n", b"0\n", b"1 (x) S 1"):
        machine = FakeMachine(rich_machine())
        Faults(machine, lambda number: True, answering(content))
        two_rounds(name, machine)


@pytest.mark.parametrize("seed", range(12))
def test_all_together_with_faults_at_random(seed: int) -> None:
    """T15: through the core's own runners. None fails, whatever the mix; the machine recovers when the faults end."""
    chance = random.Random(seed)
    machine = FakeMachine(rich_machine())
    share = chance.choice((0.01, 0.1, 0.5))
    everyone = [failing(code) for code in ERRORS] + [missing, answering(b""), answering(b"\xff( 1\n")]
    Faults(machine, lambda number: chance.random() < share, lambda what, which: chance.choice(everyone)(what, which))
    runners = [CollectorRunner(make(name)) for name in COLLECTORS]
    try:
        for _ in range(4):
            coverage = expand_world(machine.next_round(), runners, Limits()).coverage
            assert {line.status for line in coverage} <= {"ok", "skipped"}, [
                c for c in coverage if c.status == "failed"
            ]
        machine.fs.fault = machine.tape.fault = lambda what, which: None
        # Then static files and tools are looked at again; and whoever waits before he asks again has waited.
        machine.number = 239
        for _ in range(14):
            coverage = expand_world(machine.next_round(seconds=400.0), runners, Limits()).coverage
        expected = {line.collector for line in coverage} - ({"nvml"} if nvml_snapshot() is None else set())
        assert {line.collector for line in coverage if line.status == "ok"} >= expected
    finally:
        for runner in runners:
            runner.close()


# --- hostile text ----------------------------------------------------------------------------------------------------

SECRET = "hUsH7xQ29vLm4Tz8"
SECRETS = (
    (f"--password={SECRET}",),
    ("--token", SECRET),
    (f"--api-key={SECRET}",),
    (f"postgres://user:{SECRET}@db.example/x",),
    (f"https://{SECRET}:x-oauth@git.example/r",),
    (f"AWS_SECRET_ACCESS_KEY={SECRET}",),
    ("-H", f"Authorization: Bearer {SECRET}"),
)
HOSTILE = (
    *(b"", b"\n", b") S 1 (", b"\xff\xfe\x80", "\u202edesrever".encode(), b"x" * 65_536, b"\x1b[2J\x07", b'"\\'),
    *(b"</script><script>alert(1)</script>", b"a\nUid:\t0\t0\t0\t0\nNSpid:\t1"),
)
texts = st.one_of(st.sampled_from(HOSTILE), st.binary(max_size=40)).map(lambda text: text.replace(b"\0", b""))


@settings(max_examples=examples(25))
@given(
    comm=texts, before=st.lists(texts, max_size=3), secret=st.sampled_from(SECRETS), after=st.lists(texts, max_size=2)
)
def test_no_name_leaks_a_secret_or_breaks_the_answer(
    comm: bytes, before: list[bytes], secret: tuple[str, ...], after: list[bytes]
) -> None:
    files = rich_machine().copy()
    arguments = [b"tool", *before, *(word.encode() for word in secret), *after]
    add_process(
        files, 5001, comm, ppid=SERVER, argv=b"\0".join(arguments) + b"\0", threads=2, ticks=7000,
        exe=os.fsdecode(b"/opt/" + comm.replace(b"/", b"")), cwd=os.fsdecode(b"/mnt/data/" + comm),
        fds={3: "/dev/nvidia0", 5: "w:pipe:[7001]"}, cgroup="/user.slice/" + os.fsdecode(comm.replace(b"\n", b"")[:40]),
    )  # fmt: skip
    machine = FakeMachine(files)
    collectors = [make(name) for name in COLLECTORS]
    graph = Graph()
    for _ in range(2):
        world = machine.next_round()
        for collector in collectors:
            outcome = collect(collector, world, [*everything(world), *gpus()])
            check(outcome)
            assert SECRET not in repr(outcome.notes) and SECRET not in repr(outcome.losses) + outcome.reason
            graph = graph.merge(outcome.graph)
    assert "Process(pid=5001,start=6001)" in graph.nodes
    dumped = encode_graph(graph)
    assert SECRET.encode() not in dumped
    assert decode_graph(dumped) == graph
    assert SECRET not in graph.describe()
    for node in graph.nodes.values():
        for value in node.attributes.values():
            assert not isinstance(value, str) or len(value) <= 66_000


def test_secrets_of_the_rich_machine_stay_there() -> None:
    """Command lines, environments, mount options and containers' configurations of it hold words with HUSH."""
    machine = FakeMachine(rich_machine())
    assert any(b"HUSH" in content for content in machine.fs.files.values())
    world = machine.next_round()
    for name in COLLECTORS:
        outcome = collect(make(name), world, [*everything(world), *gpus()])
        assert b"HUSH" not in encode_graph(outcome.graph), name
        assert "HUSH" not in repr(outcome.notes), name


def test_base_documents_where_its_rules_are_checked() -> None:
    from gpuflight.collectors import base

    assert "tests/unit/test_collector_conformance.py" in inspect.getdoc(base)  # type: ignore[operator]
