"""Watches this machine with collectors of kernel probes, on a clock that goes one second per round: rates are then what
happened within a round, to the byte. And children that do as they are told."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpuflight.collectors.base import Collector
from gpuflight.core.expansion import CollectorRunner, expand_world
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import Edge, Graph
from gpuflight.registry import plugins
from gpuflight.settings.model import Limits
from gpuflight.sources.bpf.probes import Probes
from gpuflight.sources.clock import ManualClock
from gpuflight.sources.open import open_world
from gpuflight.sources.world import World

PATIENCE_S = 120.0


@functools.cache
def why_not() -> str:
    """Why kernel probes cannot be loaded here; empty if they can."""
    probes = Probes()
    try:
        probes.open("tasks", programs=["each_thread"]).close()
    except SourceUnavailable as error:
        return str(error)
    finally:
        probes.close()
    return ""


needs_probes = pytest.mark.skipif(bool(why_not()), reason=why_not())


class Watch:
    """Rounds of some collectors. ``graph`` is the last round's."""

    def __init__(self, world: World, collectors: Sequence[Collector], clock: ManualClock | None) -> None:
        self.world = world
        self.collectors = sorted(collectors, key=lambda one: -one.precedence)
        self.graph = Graph()
        for one in self.collectors:
            one.deadline_s = PATIENCE_S  # type: ignore[misc]  # a test machine may stand still for a while
        self._runners = [CollectorRunner(one) for one in self.collectors]
        self._clock = clock
        self._number = 0

    def round(self) -> Graph:
        """One more."""
        self._number += 1
        if self._clock is not None:
            self._clock.advance(1.0)
        self.world.begin_round(self._number)
        found = expand_world(self.world, self._runners, Limits(round_deadline_s=PATIENCE_S))
        failed = [line for line in found.coverage if line.status != "ok"]
        assert not failed, failed
        self.graph = Graph(
            (node for batch in found.nodes for node in batch), (edge for batch in found.edges for edge in batch)
        )
        return self.graph

    def close(self) -> None:
        for runner in self._runners:
            runner.close()
        self.world.close()

    def of(self, name: str) -> Collector:
        """One of the collectors."""
        return next(one for one in self.collectors if one.name == name)

    def process(self, pid: int) -> str:
        """The id of a live process."""
        found = self.world.procfs.id_of(pid)
        assert found is not None
        return found

    def edge(self, kind: str, source: str, target: str) -> Edge:
        return self.graph.edges[source, target, kind]

    def edges(self, kind: str, **attributes: Any) -> list[Edge]:
        """Those of a kind with these attributes."""
        return [
            edge
            for edge in self.graph.edges.values()
            if edge.kind == kind and all(edge.attributes.get(name) == value for name, value in attributes.items())
        ]


@contextmanager
def watching(
    *names: str, record: Path | None = None, replay: Path | None = None, **settings: dict[str, Any]
) -> Iterator[Watch]:
    """Collectors by name, with settings by name; two rounds have passed, so that rates are known."""
    clock = ManualClock() if replay is None else None  # a replay has its own
    world = open_world(record=record, replay=replay, clock=clock)
    known = plugins(Collector)
    collectors = []
    for name in names:
        cls = known[name]
        collectors.append(cls(cls.settings_class(**settings.get(name, {})) if cls.settings_class else None))
    watch = Watch(world, collectors, clock)
    try:
        watch.round()
        watch.round()
        yield watch
    finally:
        watch.close()


class Puppet:
    """A Python process that executes the lines it is given, in one namespace, and answers when each is done."""

    def __init__(self, *prefix: str) -> None:
        program = (
            "import sys\nspace = {}\nprint('ready', flush=True)\n"
            "for line in sys.stdin:\n    exec(line.strip().replace(';;', chr(10)), space)\n"
            "    print(space.pop('answer', ''), flush=True)\n"
        )
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-I", "-u", "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if self._line() != "ready":
            self.end()
            pytest.skip(f"{' '.join(prefix)} does not work here")
        self.pid = int(self.do("import os; answer = os.getpid()"))

    def do(self, line: str) -> str:
        """Execute a line (``;;`` begins a new one); what it put into ``answer``."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> Puppet:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
