"""The controller with collectors made for the test: what goes wrong in one of them stays there."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from gpuflight.collectors.base import Batch, Collector
from gpuflight.core.controller import Controller
from gpuflight.core.lockfile import AlreadyRunning, LockFile
from gpuflight.errors import GpuflightError, SourceUnavailable
from gpuflight.graph import edges, nodes
from gpuflight.graph.diff import apply
from gpuflight.graph.store import ENDED
from gpuflight.sources.clock import ManualClock
from gpuflight.sources.procfs.machine import Machine


class Files:
    def read(self, path: str) -> bytes:
        if path == "/proc/sys/kernel/hostname":
            return b"box\n"
        raise FileNotFoundError(path)


class FakeWorld:
    def __init__(self) -> None:
        self.fs = Files()
        self.procfs = Machine(self.fs)  # type: ignore[arg-type]
        self.clock = ManualClock()
        self.rounds: list[int] = []
        self.closed = 0
        self.rights = False

    def begin_round(self, number: int) -> None:
        self.rounds.append(number)

    def close(self) -> None:
        self.closed += 1

    def may_trace(self) -> bool:
        return self.rights


def settings(**changes: Any) -> Any:
    limits = {"max_depth": 16, "max_nodes": 10_000, "max_edges": 100_000, "round_deadline_s": 30.0}
    limits.update((key, changes.pop(key)) for key in list(changes) if key in limits)
    values = {"interval_s": 3600.0, "tombstone_rounds": 2, "history": SimpleNamespace(max_bytes=10_000_000)}
    return SimpleNamespace(limits=SimpleNamespace(**limits), **{**values, **changes})


class _Test(Collector):
    abstract = True  # keeps the test's collectors out of the registry


def process(pid: int, **metrics: float) -> nodes.Process:
    return nodes.Process(pid=pid, start=pid * 10, metrics=metrics)


class Seeder(_Test):
    """Seeds what it is told to."""

    abstract = True
    seeds = True

    def __init__(self, *found: Any, links: Sequence[Any] = (), name: str = "seeder", precedence: int = 0) -> None:
        super().__init__()
        self.name = name  # type: ignore[misc]
        self.precedence = precedence  # type: ignore[misc]
        self.found: list[Any] = list(found)
        self.links = list(links)
        self.error: BaseException | None = None
        self.block: threading.Event | None = None
        self.calls = 0

    def observe(self, world: Any) -> None:
        self.calls += 1
        if self.block is not None:
            self.block.wait()
        if self.error is not None:
            raise self.error

    def seed(self) -> Batch:
        return Batch(list(self.found), list(self.links))


class Chain(_Test):
    """Expands each process with the one of the next pid; counts how it is asked."""

    abstract = True
    expands = (nodes.Process,)

    def __init__(self, last: int, ns: str = "") -> None:
        super().__init__()
        self.last = last
        self.ns = ns
        self.asked: list[list[int]] = []

    def expand(self, entities: Sequence[Any]) -> Batch:
        self.asked.append([entity.pid for entity in entities])
        found = [
            nodes.Process(pid=entity.pid + 1, start=(entity.pid + 1) * 10, ns=self.ns)
            for entity in entities
            if entity.pid < self.last
        ]
        return Batch(list(found), [edges.Own(e.id, f.id) for e, f in zip(entities, found, strict=False)])


def controller(*collectors: Collector, **changes: Any) -> Controller:
    return Controller(FakeWorld(), settings=settings(**changes), collectors=collectors)  # type: ignore[arg-type]


def coverage(done: Any, name: str) -> Any:
    return next(item for item in done.coverage if item.collector == name)


def test_round_carries_graph_diff_coverage_and_environment() -> None:
    done = controller(Seeder(process(1), process(2), links=[edges.Own(process(1).id, process(2).id)])).run_round()
    assert done.number == 1
    assert done.env.hostname == "box"
    assert [entity.pid for entity in done.graph] == [1, 2]
    assert done.diff.counts()["nodes_added"] == 2
    assert coverage(done, "seeder").nodes_count == 2
    assert coverage(done, "core").status == "ok"


@pytest.mark.parametrize(("rights", "hint"), [(False, "grant CAP_SYS_PTRACE"), (True, "closed even to root")])
def test_nobody_is_told_to_get_a_right_that_he_has(rights: bool, hint: str) -> None:
    blind = Seeder(name="blind")
    core = controller(blind)
    core.world.rights = rights  # type: ignore[attr-defined]
    real = blind.seed

    def seed() -> Batch:
        blind.note("some processes may not be read", "run as root or grant CAP_SYS_PTRACE")
        return real()

    blind.seed = seed  # type: ignore[method-assign]
    assert hint in coverage(core.run_round(), "blind").notes[0].hint


def test_each_round_says_what_gpuflight_itself_costs() -> None:
    core = controller(Seeder(process(1)))
    first, second = core.run_round().own_cost, core.run_round().own_cost
    assert first is not None
    assert second is not None
    assert first.cpu_pct is None
    assert second.cpu_pct is not None
    assert second.rss_bytes > 1_000_000
    assert second.threads_count >= 1
    assert second.fds_count >= 3


def test_expansion_goes_in_waves_each_entity_once_and_whole_frontier_at_a_time() -> None:
    chain = Chain(last=5)
    done = controller(Seeder(process(1), process(3), process(3)), chain).run_round()
    assert chain.asked == [[1, 3], [2, 4], [5]]
    assert sorted(entity.pid for entity in done.graph) == [1, 2, 3, 4, 5]


def test_foreign_entities_are_never_expanded() -> None:
    chain = Chain(last=9, ns="node-7")
    done = controller(Seeder(process(1)), chain).run_round()
    assert chain.asked == [[1]]
    assert "Process(ns=node-7,pid=2,start=20)" in done.graph


@pytest.mark.parametrize(
    ("limit", "name"), [({"max_depth": 2}, "depth"), ({"max_nodes": 1}, "nodes"), ({"max_edges": 0}, "edges")]
)
def test_a_limit_ends_the_expansion_and_says_so_on_the_frontier(limit: dict[str, int], name: str) -> None:
    done = controller(Seeder(process(1)), Chain(last=50), **limit).run_round()
    assert done.truncated_by == name
    cut = [entity for entity in done.graph if entity.attributes.get("truncated_by") == name]
    assert len(cut) == 1
    assert len(done.graph.nodes) < 10


def test_what_stands_at_the_depth_limit_is_still_named() -> None:
    class Namer(Chain):
        abstract = True
        describes = (nodes.Process,)
        name = "namer"

        def expand(self, entities: Sequence[Any]) -> Batch:
            found = super().expand(entities)
            named = [nodes.Process(pid=e.pid, start=e.start, attributes={"name": f"p{e.pid}"}) for e in entities]
            return Batch([*named, *found.nodes], found.edges)

    done = controller(Seeder(process(1)), Namer(last=9), max_depth=2).run_round()
    assert {entity.pid: entity.attributes["name"] for entity in done.graph} == {1: "p1", 2: "p2", 3: "p3"}
    assert done.graph.nodes[process(3).id].attributes["truncated_by"] == "depth"
    assert len(done.graph.edges) == 2


def test_the_more_trusted_collector_names_things_and_others_fill_in() -> None:
    strong = nodes.Process(pid=1, start=10, attributes={"name": "strong"})
    weak = nodes.Process(pid=1, start=10, attributes={"name": "weak", "exe": "/bin/x"}, metrics={"cpu_pct": 3.0})
    done = controller(Seeder(weak, name="a"), Seeder(strong, name="b", precedence=5)).run_round()
    merged = done.graph.nodes[strong.id]
    assert merged.attributes == {"name": "strong", "exe": "/bin/x"}
    assert merged.metrics == {"cpu_pct": 3.0}


@pytest.mark.parametrize("error", [KeyError("x"), ValueError("two\nlines"), ZeroDivisionError(), OSError(5, "io")])
def test_any_exception_costs_that_collector_one_round_and_its_last_answer_stands(error: Exception) -> None:
    bad, good = Seeder(process(1), name="bad"), Seeder(process(2), name="good")
    core = controller(bad, good)
    core.run_round()
    bad.error = error
    done = core.run_round()
    assert coverage(done, "bad").status == "failed"
    assert type(error).__name__ in coverage(done, "bad").reason
    assert "\n" not in coverage(done, "bad").reason
    assert coverage(done, "bad").age_rounds == 1
    assert {entity.pid for entity in done.graph} == {1, 2}
    assert not any(ENDED in entity.attributes for entity in done.graph)
    bad.error = None
    assert coverage(core.run_round(), "bad").status == "ok"


def test_the_last_answer_of_a_failing_collector_expires() -> None:
    bad = Seeder(process(1), name="bad")
    core = controller(bad, tombstone_rounds=0)
    core.run_round()
    bad.error = RuntimeError("gone for good")
    sizes = [len(core.run_round().graph.nodes) for _ in range(5)]
    assert sizes == [1, 1, 1, 0, 0]


def test_a_missing_source_is_skipped_with_reason_and_hint_and_comes_back() -> None:
    gpu = Seeder(process(1), name="gpu")
    gpu.error = SourceUnavailable("no library", "install it")
    core = controller(gpu)
    line = coverage(core.run_round(), "gpu")
    assert (line.status, line.reason, line.hint) == ("skipped", "no library", "install it")
    gpu.error = None
    assert coverage(core.run_round(), "gpu").status == "ok"


def test_a_collector_that_hangs_is_left_behind_and_threads_do_not_pile_up() -> None:
    hung, good = Seeder(process(1), name="hung"), Seeder(process(2), name="good")
    hung.deadline_s = 0.05  # type: ignore[misc]
    core = controller(hung, good)
    core.run_round()
    hung.block = threading.Event()
    before = threading.active_count()
    lines = [core.run_round() for _ in range(5)]
    assert [coverage(done, "hung").status for done in lines] == ["stale"] * 5
    assert [coverage(done, "hung").age_rounds for done in lines] == [1, 2, 3, 4, 5]
    assert hung.calls == 2
    assert threading.active_count() <= before
    assert {entity.pid for entity in lines[0].graph} == {1, 2}
    hung.block.set()
    hung.block = None
    deadline = threading.Event()
    while coverage(core.run_round(), "hung").status != "ok":  # the thread needs a moment to come back
        deadline.wait(0.01)
    core.close()


def test_vanished_things_stay_as_ended_for_some_rounds_then_go() -> None:
    seeder = Seeder(process(1, cpu_pct=1.0), process(2), links=[edges.Own(process(1).id, process(2).id)])
    core = controller(seeder, tombstone_rounds=2)
    core.run_round()
    seeder.found, seeder.links = [process(2)], []
    done = core.run_round()
    ended = done.graph.nodes[process(1).id]
    assert ended.attributes[ENDED] == 2
    assert ended.metrics == {}
    assert done.graph.edges_of_kind(edges.Own)[0].attributes[ENDED] == 2
    core.run_round()
    done = core.run_round()
    assert process(1).id not in done.graph
    assert done.graph.edges == {}
    assert process(1).id in done.diff.nodes_removed


def test_something_missing_for_one_round_does_not_flap() -> None:
    seeder = Seeder(process(1))
    core = controller(seeder)
    core.run_round()
    seeder.found = []
    core.run_round()
    seeder.found = [process(1)]
    done = core.run_round()
    assert done.graph.nodes[process(1).id] == process(1)
    assert not done.diff.nodes_added
    assert not done.diff.nodes_removed


def test_metrics_move_with_every_round() -> None:
    seeder = Seeder(process(1, cpu_pct=1.0))
    core = controller(seeder)
    core.run_round()
    seeder.found = [process(1, cpu_pct=2.0)]
    assert core.run_round().graph.nodes[process(1).id].metrics == {"cpu_pct": 2.0}


def test_edges_without_an_end_are_dropped_and_counted() -> None:
    core = controller(Seeder(process(1), links=[edges.Own(process(1).id, "Process(pid=99,start=1)")]))
    for _ in range(2):
        done = core.run_round()
        assert done.graph.edges == {}
        assert sum(coverage(done, "core").losses.values()) == 1


def test_published_graphs_never_change_and_diffs_connect_them() -> None:
    seeder = Seeder(process(1, cpu_pct=0.0))
    core = controller(seeder, tombstone_rounds=1)
    rounds = [core.run_round()]
    frozen = [(dict(rounds[0].graph.nodes), dict(rounds[0].graph.edges))]
    for number in range(1, 8):
        seeder.found = [process(pid, cpu_pct=float(number)) for pid in range(1, 2 + number % 3)]
        seeder.links = [edges.Own(process(1).id, item.id) for item in seeder.found[1:]]
        rounds.append(core.run_round())
        frozen.append((dict(rounds[-1].graph.nodes), dict(rounds[-1].graph.edges)))
        assert apply(rounds[-1].diff, rounds[-2].graph) == rounds[-1].graph
    assert [(done.graph.nodes, done.graph.edges) for done in rounds] == frozen
    for done in rounds:
        past = core.history.get(done.number)
        assert past is not None
        assert past.graph == done.graph


def test_history_stays_within_its_bytes_and_keeps_the_newest() -> None:
    seeder = Seeder(*(process(pid, cpu_pct=0.0) for pid in range(100)))
    core = controller(seeder, history=SimpleNamespace(max_bytes=300_000))
    for number in range(20):
        seeder.found = [process(pid, cpu_pct=float(number)) for pid in range(100)]
        done = core.run_round()
    kept = core.history.numbers()
    assert kept[-1] == 20
    assert 1 < len(kept) < 20
    assert core.history.used_bytes <= 300_000
    assert core.history.dropped_count == 20 - len(kept)
    assert core.history.get(kept[0]) is not None
    assert core.history.get(1) is None
    newest = core.history.get(20)
    assert newest is not None
    assert newest.graph == done.graph


def test_history_answers_for_a_time_and_not_for_one_before_it_began() -> None:
    core = controller(Seeder(process(1)))
    first = core.run_round()
    core.world.clock.advance(10)  # type: ignore[attr-defined]
    core.run_round()
    found = core.history.at(first.time_ns + 5_000_000_000)
    assert found is not None
    assert found.number == 1
    assert core.history.at(first.time_ns - 1) is None


def test_start_and_stop_count_references() -> None:
    core = controller(Seeder(process(1)))
    assert core.stop() == 0
    assert core.start() == 1
    assert core.start() == 2
    assert core.stop() == 1
    assert core.running
    assert core.stop() == 0
    assert not core.running
    assert core.stop() == 0
    assert core.start() == 1
    core.close()
    core.close()
    assert core.world.closed == 1  # type: ignore[attr-defined]
    with pytest.raises(GpuflightError):
        core.start()


def test_trigger_gives_a_round_that_began_after_the_call() -> None:
    core = controller(Seeder(process(1)))
    assert core.trigger().number == 1
    core.start()
    try:
        first = core.trigger(10).number
        assert core.trigger(10).number > first
    finally:
        core.close()


def test_a_second_instance_is_refused_names_the_holder_and_changes_nothing(tmp_path: Any) -> None:
    path = str(tmp_path / "lock")
    first = Controller(FakeWorld(), settings=settings(), collectors=[], lock_path=path)  # type: ignore[arg-type]
    second = Controller(FakeWorld(), settings=settings(), collectors=[], lock_path=path)  # type: ignore[arg-type]
    first.start()
    content = (tmp_path / "lock").read_bytes()
    with pytest.raises(AlreadyRunning, match=r"pid \d+"):
        second.start()
    assert (tmp_path / "lock").read_bytes() == content
    assert second.references_count == 0
    assert not second.running
    assert first.running
    first.close()
    assert second.start() == 1
    second.close()


def test_a_lock_that_goes_with_its_holder(tmp_path: Any) -> None:
    path = str(tmp_path / "lock")
    first, second = LockFile(path, remove=True), LockFile(path, remove=True)
    first.acquire()
    with pytest.raises(AlreadyRunning):
        second.acquire()
    first.release()
    assert not (tmp_path / "lock").exists()
    second.acquire()
    with pytest.raises(AlreadyRunning):
        first.acquire()
    second.release()
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_one_shared_controller_per_process() -> None:
    made = Controller.shared(lambda: controller())
    assert Controller.shared() is made
    made.close()
    other = Controller.shared(lambda: controller())
    assert other is not made
    other.close()
    with pytest.raises(GpuflightError):
        Controller.shared()


def test_a_subscriber_set_gets_every_round_and_a_failing_round_is_not_the_last(monkeypatch: Any) -> None:
    seen: list[int] = []
    publisher = SimpleNamespace(publish=lambda done: seen.append(done.number))
    core = Controller(
        FakeWorld(),  # type: ignore[arg-type]
        settings=settings(interval_s=0.001),
        collectors=[Seeder(process(1))],
        subscribers=publisher,
    )
    broken = threading.Event()
    real = core._store.advance

    def sometimes(*args: Any) -> Any:
        if args[0] == 2:
            broken.set()
            raise RuntimeError("a defect in the core")
        return real(*args)

    monkeypatch.setattr(core._store, "advance", sometimes)
    core.start()
    core.trigger(10)
    while not broken.is_set() or len(seen) < 3:
        core.trigger(10)
    core.close()
    assert core.failed_rounds_count == 1
    assert 2 not in seen
