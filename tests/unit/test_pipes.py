"""The pipes collector on made-up descriptor tables."""

from __future__ import annotations

from typing import Any

from gpuflight.collectors.pipes import PipesCollector
from gpuflight.graph import nodes
from gpuflight.sources.procfs import FdIndex, FdRef


class Stat:
    def __init__(self, pid: int) -> None:
        self.pid, self.start = pid, 10 * pid
        self.id = f"Process(pid={pid},start={10 * pid})"


class World:
    """Processes with their pipes; both in the shape that ProcFs gives them."""

    def __init__(self, *pids: int) -> None:
        self.procfs = self
        self.index = FdIndex()
        self.stats = {pid: Stat(pid) for pid in pids}

    def fds(self) -> FdIndex:
        return self.index

    def processes(self) -> dict[int, Stat]:
        return self.stats

    def pipe(self, inode: int, *refs: tuple[int, str]) -> None:
        self.index.pipes[inode] = [FdRef(pid, fd, "r" in ends, "w" in ends) for fd, (pid, ends) in enumerate(refs)]

    def fifo(self, device: int, inode: int, path: str, *refs: tuple[int, str]) -> None:
        key = (device, inode)
        self.index.fifos[key] = [FdRef(pid, fd, "r" in ends, "w" in ends) for fd, (pid, ends) in enumerate(refs)]
        self.index.fifo_paths[key] = path


def look(
    world: Any, collector: PipesCollector | None = None
) -> tuple[PipesCollector, dict[tuple[str, str], str], set[str]]:
    """(collector, ends by (source, target) with short names, ids of the pipes)."""
    collector = collector or PipesCollector()
    collector.observe(world)
    frontier = [nodes.Process(pid=pid, start=10 * pid) for pid in world.stats]
    batch = collector.expand(frontier)
    assert len({edge.key for edge in batch.edges}) == len(batch.edges)
    short = {stat.id: f"p{stat.pid}" for stat in world.stats.values()}
    edges = {(short.get(e.source, e.source), short.get(e.target, e.target)): e.attributes["ends"] for e in batch.edges}
    assert {edge.kind for edge in batch.edges} <= {"SendTo"}
    return collector, edges, {node.id for node in batch.nodes}


def test_writer_to_reader() -> None:
    world = World(1, 2)
    world.pipe(7, (1, "w"), (2, "r"))
    assert look(world)[1:] == ({("p1", "Pipe(ino=7)"): "w", ("Pipe(ino=7)", "p2"): "r"}, {"Pipe(ino=7)"})


def test_a_pipe_within_one_process_or_with_one_known_end_is_not_drawn() -> None:
    world = World(1, 2)
    world.pipe(7, (1, "w"), (1, "r"))
    world.pipe(8, (2, "r"))
    assert look(world)[1:] == ({}, set())


def test_inherited_ends_belong_to_every_holder() -> None:
    """A shell that kept its copies, and two workers with the same stdout."""
    world = World(1, 2, 3, 4)
    world.pipe(7, (1, "r"), (1, "w"), (2, "w"), (3, "w"), (3, "w"), (4, "r"))
    pipe = "Pipe(ino=7)"
    assert look(world)[1] == {
        ("p1", pipe): "rw",
        (pipe, "p1"): "rw",
        ("p2", pipe): "w",
        ("p3", pipe): "w",
        (pipe, "p4"): "r",
    }


def test_fifos_go_by_device_and_inode() -> None:
    world = World(1, 2, 3)
    world.fifo(9, 7, "/tmp/a (deleted)", (1, "w"), (2, "r"))
    world.pipe(7, (2, "w"), (3, "r"))  # the same inode number in the pipe file system
    collector, edges, pipes = look(world)
    assert pipes == {"Pipe(ino=7,dev=9)", "Pipe(ino=7)"}
    assert edges["p1", "Pipe(ino=7,dev=9)"] == "w"
    fifo = next(node for node in collector.expand([nodes.Process(pid=1, start=10)]).nodes)
    assert fifo.attributes == {"name": "a", "path": "/tmp/a"}


def test_a_holder_that_ended_is_left_out() -> None:
    world = World(1, 2)
    world.pipe(7, (1, "w"), (99, "r"))
    assert look(world)[1] == {}


def test_a_pipe_expands_to_all_its_holders() -> None:
    world = World(1, 2, 3)
    world.pipe(7, (1, "w"), (2, "r"), (3, "r"))
    collector, _, _ = look(world)
    batch = collector.expand([nodes.Pipe(inode=7), nodes.Pipe(inode=99)])
    assert {node.id for node in batch.nodes} == {f"Process(pid={pid},start={10 * pid})" for pid in (1, 2, 3)}
    assert len(batch.edges) == 3


def test_a_reused_pid_gets_nothing() -> None:
    world = World(1, 2)
    world.pipe(7, (1, "w"), (2, "r"))
    collector, _, _ = look(world)
    assert collector.expand([nodes.Process(pid=1, start=11)]).edges == []


def test_an_unchanged_index_is_not_gone_through_again() -> None:
    world = World(1, 2)
    world.pipe(7, (1, "w"), (2, "r"))
    collector, before, _ = look(world)
    world.index.pipes.clear()  # would change the answer, if it were looked at
    assert look(world, collector)[1] == before
    world.index = FdIndex()
    assert look(world, collector)[1] == {}


def test_what_may_not_be_read_is_said_every_round() -> None:
    world = World(1)
    world.index.unreadable_pids = 4
    collector, _, _ = look(world)
    for _ in range(2):
        collector.notes.clear()
        look(world, collector)
        (note,) = collector.notes.values()
        assert note.count == 4
        assert "CAP_SYS_PTRACE" in note.hint


def test_a_pipe_leaked_to_hundreds_of_children_is_bounded_and_the_rest_counted() -> None:
    world = World(*range(1, 301))
    world.pipe(7, (1, "r"), *((pid, "w") for pid in range(2, 301)))
    collector = PipesCollector()
    for _ in range(2):  # in every round, though the table is gone through once
        collector.losses.clear()
        _, edges, _ = look(world, collector)
        assert len(edges) == 256
        assert ("Pipe(ino=7)", "p1") in edges  # the oldest stay
        assert collector.losses == {"holders of pipes with very many holders": 44}
