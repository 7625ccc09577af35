"""pytest fixtures around the fake NVML; a test module names this one in ``pytest_plugins``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.nvml.build import FakeNvml, NoCompiler, fake_nvml
from tests.fakes.nvml.world import Tree

from gpuflight.collectors.gpu import NvmlCollector
from gpuflight.graph import Graph
from gpuflight.sources.clock import ManualClock
from gpuflight.sources.nvml import Nvml, NvmlSnapshot

MakeFake = Callable[..., FakeNvml]
MakeRig = Callable[..., "Rig"]


class Rig:
    """The collector on a fake NVML and a tree of files, round by round. Real time passes for deadlines only."""

    def __init__(self, fake: FakeNvml | None, tree: Tree, **options: Any) -> None:
        self.fake: Any = fake
        self.tree = tree
        self.clock = ManualClock()
        library = fake.library if fake is not None else str(tree.root / "libnvidia-ml.so.1")
        self.nvml = Nvml(library, clock=self.clock, **options)
        self.world = tree.world(self.nvml, self.clock)
        self.collector = NvmlCollector()
        self.number = 0

    def next(self, seconds: float = 5.0) -> None:
        """Begin another round, ``seconds`` after the last."""
        self.number += 1
        self.clock.advance(seconds)
        for source in (self.world.procfs, self.world.sysfs, self.world.nvml):
            source.begin_round(self.number)
        self.collector.losses, self.collector.notes = {}, {}

    def snapshot(self, seconds: float = 5.0) -> NvmlSnapshot:
        """The source's answer in a round of its own."""
        self.next(seconds)
        return self.nvml.snapshot()

    def graph(self, seconds: float = 5.0) -> Graph:
        """What the collector reports in a round of its own."""
        self.next(seconds)
        self.collector.observe(self.world)
        batch = self.collector.seed()
        return Graph(batch.nodes, batch.edges)

    @property
    def noted(self) -> str:
        """Reasons and hints of this round's notes."""
        return "\n".join(f"{note.reason} | {note.hint}" for note in self.collector.notes.values())


@pytest.fixture
def make_fake(tmp_path: Path) -> Iterator[MakeFake]:
    """Builds a fake NVML that this process then answers from; skips without a C compiler."""
    with ExitStack() as stack:

        def make(machine: str, **sections: Mapping[str, str]) -> FakeNvml:
            folder = tmp_path / machine
            folder.mkdir()
            try:
                fake = fake_nvml(machine, folder, **sections)
            except NoCompiler as error:
                pytest.skip(str(error))
            return stack.enter_context(fake.activated())

        yield make


@pytest.fixture
def make_rig(make_fake: MakeFake, tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Builds a Rig on a machine (None: no NVML library at all); options go to ``Nvml``, sections to the fake."""
    rigs: list[Rig] = []

    def make(machine: str | None, sections: Mapping[str, Mapping[str, str]] | None = None, **options: Any) -> Rig:
        root = tmp_path / f"root{len(rigs)}"
        root.mkdir()
        fake = make_fake(machine, **(sections or {})) if machine is not None else None
        rigs.append(Rig(fake, Tree(root), **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.nvml.close()
