"""Runs one collector alone, as the core would, and says what came of it; checks that hold for every answer."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.fakes.machine import FakeMachine
from tests.fakes.machine_answers import DATABASE_URI, PEER_URL, TRAINER

from gpuflight.collectors.base import Collector
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import LOCAL, Edge, Entity, Graph, nodes
from gpuflight.graph.edges import EDGE_KINDS
from gpuflight.graph.nodes import NODE_KINDS
from gpuflight.registry import plugins
from gpuflight.rounds import Note
from gpuflight.sources.world import World

COLLECTORS = plugins(Collector)
OPTIONS: dict[str, dict[str, Any]] = {
    "kernel_ipc": {"system_calls": True},
    "perf_counters": {"watch": True},
    "nccl_ras": {"ask": True, "oldest_version": "0"},
    "static": {"pids": [TRAINER, 99_999]},
    "fleet": {"uri": DATABASE_URI},
    "remote": {"peers": [{"url": PEER_URL, "name": "web-1"}]},
}
"""Settings without which a collector has nothing to do."""

WAVES_AT_MOST = 12
every_collector = pytest.mark.parametrize("name", sorted(COLLECTORS))
_ID = re.compile(r"([A-Z]\w*)\((.+)\)", re.DOTALL)


@dataclass
class Outcome:
    """What a collector answered in one round. ``given`` are the ids of entities it was asked to expand from outside."""

    ok: bool
    reason: str = ""
    hint: str = ""
    nodes: list[Entity] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    given: set[str] = field(default_factory=set)
    losses: dict[str, int] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    @property
    def graph(self) -> Graph:
        return Graph(self.nodes, self.edges)

    @property
    def ids(self) -> tuple[set[str], set[Any]]:
        """Of the entities, and keys of the edges."""
        return {node.id for node in self.nodes}, {edge.key for edge in self.edges}


def collect(collector: Collector, world: World, frontier: list[Entity] | None = None) -> Outcome:
    """One round: observe, seed, then wave by wave. ``frontier`` (by default every process and the host) stands for what
    other collectors found. SourceUnavailable is an outcome; anything else that is raised comes through."""
    collector.losses.clear()
    collector.notes.clear()
    given = everything(world) if frontier is None else frontier
    outcome = Outcome(True, given={entity.id for entity in given})
    try:
        collector.observe(world)
        new = list(given)
        if collector.seeds:
            new += _take(outcome, collector.seed())
        seen: set[str] = set()
        for _ in range(WAVES_AT_MOST):
            wave: dict[type[Entity], list[Entity]] = {}
            for entity in new:
                if entity.id not in seen and entity.ns == LOCAL:
                    seen.add(entity.id)
                    wave.setdefault(type(entity), []).append(entity)
            new = []
            for kind in collector.expands:
                if kind in wave:
                    new += _take(outcome, collector.expand(wave[kind]))
            if not new:
                break
    except SourceUnavailable as error:
        return Outcome(False, error.reason, error.hint)
    outcome.losses = dict(collector.losses)
    outcome.notes = list(collector.notes.values())
    return outcome


def everything(world: World) -> list[Entity]:
    """Every process and the host: what the other collectors would hand to one that only expands."""
    try:
        processes = world.procfs.processes().values()
    except SourceUnavailable:
        return []
    found: list[Entity] = [nodes.Process(pid=stat.pid, start=stat.start, id=stat.id) for stat in processes]
    return [*found, nodes.Host(hostname=world.procfs.hostname)]


def make(name: str) -> Collector:
    cls = COLLECTORS[name]
    options = OPTIONS.get(name)
    made = cls() if options is None else cls(cls.settings_class(**options))
    assert isinstance(made, Collector)
    return made


def gpus() -> list[Entity]:
    """The GPUs of the rich machine, as the nvml collector would hand them to others."""
    addresses = [f"0000:{0x10 + number * 0x20 + 3 + port:02x}:00.0" for number in range(4) for port in range(2)]
    return [
        nodes.GPU(uuid=f"GPU-{index}", attributes={"pci_address": address, "index": index})
        for index, address in enumerate(addresses)
    ]


def two_rounds(name: str, machine: FakeMachine) -> tuple[Outcome, Outcome]:
    """Two rounds of one collector, both checked, and closed twice."""
    collector = make(name)
    outcomes = []
    for _ in range(2):
        world = machine.next_round()
        outcome = collect(collector, world, [*everything(world), *gpus()])
        check(outcome)
        outcomes.append(outcome)
    collector.close()
    collector.close()
    return outcomes[0], outcomes[1]


def _take(outcome: Outcome, batch: Any) -> list[Entity]:
    outcome.nodes += batch.nodes
    outcome.edges += batch.edges
    return list(batch.nodes)


def check(outcome: Outcome, losses: dict[str, int] | None = None) -> None:
    """What must hold whatever happened: sound values, ids of known kinds, no loose ends, reasons in words."""
    if not outcome.ok:
        assert outcome.reason and outcome.reason == outcome.reason.strip(), repr(outcome.reason)
        assert "\n" not in outcome.reason
        return
    assert all(isinstance(name, str) and name and count > 0 for name, count in outcome.losses.items()), outcome.losses
    assert all(note.reason and "\n" not in note.reason and note.count > 0 for note in outcome.notes), outcome.notes
    elements: list[Entity | Edge] = [*outcome.nodes, *outcome.edges]
    for element in elements:
        _check_values(element)
    for node in outcome.nodes:
        assert type(node) is NODE_KINDS[node.kind]
        check_id(node.id)
        assert node.id == node._render_id(), node.id
    known = {node.id for node in outcome.nodes} | outcome.given
    for edge in outcome.edges:
        assert type(edge) is EDGE_KINDS[edge.kind]
        for end in (edge.source, edge.target):
            check_id(end)
            assert end in known, f"{edge.id} hangs on nothing"


def check_id(text: str) -> None:
    match = _ID.fullmatch(text)
    assert match is not None, text
    assert match[1] in NODE_KINDS, text


def _check_values(element: Entity | Edge) -> None:
    where = element.id
    for name, value in element.metrics.items():
        assert isinstance(name, str) and name, where
        assert isinstance(value, int | float) and not isinstance(value, bool), (where, name, value)
        assert math.isfinite(value), (where, name, value)
    for name, value in element.attributes.items():
        for item in value if isinstance(value, list | tuple) else [value]:
            assert item is None or isinstance(item, str | int | float | bool), (where, name, value)
            assert not isinstance(item, float) or math.isfinite(item), (where, name, value)
    unknown = element.unknown or {}
    assert all(isinstance(why, str) and why for why in unknown.values()), (where, unknown)
    both = unknown.keys() & (element.metrics.keys() | element.attributes.keys())
    assert not both, (where, both)
