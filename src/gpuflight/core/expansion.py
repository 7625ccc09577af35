"""One round's expansion: observe, seed, then breadth first over kinds in waves.

In each wave every collector gets, once per kind that it expands, all entities of that kind that the wave before
brought. So a source is read once per round however large the graph, and a collector that fails, hangs or lacks a right
costs the round nothing but its own answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Protocol, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from gpuflight.collectors.base import Batch, Collector
from gpuflight.core.worker import Busy, DeadlineExceeded, Worker
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import LOCAL, Edge, Entity
from gpuflight.graph.element import EMPTY
from gpuflight.rounds import Coverage, CoverageStatus, Note
from gpuflight.sources.world import World

log = logging.getLogger(__name__)
T = TypeVar("T")

KEEP_LAST_ANSWER_ROUNDS = 3
"""For how many rounds the last answer of a collector that fails or hangs stands in for it, marked with its age."""

_LEAST_PATIENCE_S = 0.1
_id_of = attrgetter("id")


class ExpansionLimits(Protocol):
    """How far one round may go."""

    max_depth: int
    max_nodes: int
    max_edges: int
    round_deadline_s: float


class Expansion(Struct):
    """What one round's collectors reported: batches with the most trusted collector's first."""

    nodes: list[list[Entity]] = field(default_factory=list)
    edges: list[list[Edge]] = field(default_factory=list)
    coverage: list[Coverage] = field(default_factory=list)
    truncated_by: str = ""
    depth: int = 0


class CollectorRunner:
    """A collector with its thread, its state from round to round, and its answer of the current round."""

    def __init__(self, collector: Collector) -> None:
        self.collector = collector
        self.worker = Worker(collector.name)
        self.batch = Batch()
        self.status: CoverageStatus = "ok"
        self.reason = ""
        self.hint = ""
        self.wall_s = 0.0
        self.cpu_s = 0.0
        self._last_good: Batch | None = None
        self._age_rounds = 0
        self._patience_s = collector.deadline_s

    def begin(self) -> None:
        """Start a round."""
        self.batch = Batch()
        self.status, self.reason, self.hint = "ok", "", ""
        self.wall_s = self.cpu_s = 0.0
        if not self.worker.busy:
            self.collector.losses.clear()
            self.collector.notes.clear()
            self.collector.programs.clear()

    def forget(self) -> None:
        """Let no answer of an earlier round stand in for the next one."""
        self._last_good, self._age_rounds = None, 0

    def attempt(self, work: Callable[[], T], left_s: float) -> T | None:
        """Run one call of the collector; None when it did not answer, with status and reason set."""
        if self.status != "ok":
            return None
        started = time.monotonic()
        try:
            return self.worker.call(work, max(0.0, min(self._patience_s, left_s)))
        except SourceUnavailable as error:
            self.status, self.reason, self.hint = "skipped", error.reason, error.hint
        except DeadlineExceeded as error:
            # Wait less for it next time: a collector that always needs too long must not stretch every round.
            self._patience_s = max(_LEAST_PATIENCE_S, self._patience_s / 2)
            self.status, self.reason = "stale", str(error)
            self.hint = "a device, a file system or a driver does not answer; see dmesg"
        except Busy:
            self.status, self.reason = "stale", "still waiting for an answer from an earlier round"
            self.hint = "a device, a file system or a driver does not answer; see dmesg"
        except (Exception, SystemExit) as error:  # of anybody's collector: not even that ends the rounds
            log.debug("collector %s failed", self.collector.name, exc_info=True)
            text = str(error).strip().splitlines()
            self.status = "failed"
            self.reason = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
            self.hint = "GPUFLIGHT_DEBUG=1 shows where; please report it"
        finally:
            self.wall_s += time.monotonic() - started
            self.cpu_s += self.worker.cpu_s
        return None

    def add(self, batch: Batch) -> None:
        """Take over a part of the answer."""
        self.batch.nodes.extend(batch.nodes)
        self.batch.edges.extend(batch.edges)

    def finish(self) -> Coverage:
        """End the round: decide which answer stands, and say what was covered."""
        if self.status == "ok":
            self._last_good, self._age_rounds = self.batch, 0
            self._patience_s = self.collector.deadline_s
        else:
            self.batch = Batch()
            self._age_rounds += 1
            if self.status == "skipped" or self._age_rounds > KEEP_LAST_ANSWER_ROUNDS:
                self._last_good = None
            elif self._last_good is not None:
                self.batch = self._last_good
        return Coverage(
            collector=self.collector.name,
            status=self.status,
            reason=self.reason,
            hint=self.hint,
            wall_ms=round(self.wall_s * 1e3, 3),
            cpu_ms=round(self.cpu_s * 1e3, 3),
            nodes_count=len(self.batch.nodes),
            edges_count=len(self.batch.edges),
            age_rounds=self._age_rounds,
            losses=dict(self.collector.losses) if not self.worker.busy else {},
            notes=list(self.collector.notes.values()) if not self.worker.busy else [],
            programs=list(self.collector.programs.values()) if not self.worker.busy else [],
        )

    def close(self) -> None:
        """Close the collector, unless it hangs; its thread ends when it can."""
        if not self.worker.busy:
            try:
                self.worker.call(self.collector.close, self.collector.deadline_s)
            except Exception as error:  # noqa: BLE001 - closing goes on with the next one
                log.warning("collector %s did not close: %s", self.collector.name, error)
        self.worker.close()


def expand_world(world: World, runners: Sequence[CollectorRunner], limits: ExpansionLimits) -> Expansion:
    """Run one round of all collectors. ``runners`` are in order of precedence, the most trusted first."""
    deadline_s = time.monotonic() + limits.round_deadline_s
    frontier = _Frontier(limits.max_nodes)
    edges_count = 0
    for runner in runners:
        runner.begin()
    for runner in runners:
        batch = runner.attempt(partial(_observe_and_seed, runner.collector, world), _left(deadline_s))
        if batch is not None:
            runner.add(batch)
            frontier.add(batch.nodes)
            edges_count += len(batch.edges)

    depth = 0
    truncated_by = ""
    while wave := frontier.take():
        if depth >= limits.max_depth:
            truncated_by = "depth"
        elif frontier.full:
            truncated_by = "nodes"
        elif edges_count > limits.max_edges:
            truncated_by = "edges"
        elif _left(deadline_s) <= 0:
            truncated_by = "time"
        if truncated_by:
            break
        depth += 1
        for runner in runners:
            if wave.keys().isdisjoint(runner.collector.expands):
                continue
            for batch in runner.attempt(partial(_expand_wave, runner.collector, wave), _left(deadline_s)) or ():
                runner.add(batch)
                frontier.add(batch.nodes)
                edges_count += len(batch.edges)

    if truncated_by == "depth":
        for runner in runners:
            if not wave.keys().isdisjoint(runner.collector.describes):
                named = {kind: wave[kind] for kind in runner.collector.describes if kind in wave}
                for batch in runner.attempt(partial(_expand_wave, runner.collector, named), _left(deadline_s)) or ():
                    runner.add(frontier.known_part(batch))

    result = Expansion(truncated_by=truncated_by, depth=depth)
    for runner in runners:
        result.coverage.append(_with_fitting_hints(runner.finish(), world))
        result.nodes.append(runner.batch.nodes)
        result.edges.append(runner.batch.edges)
    if truncated_by:
        expandable = {kind for runner in runners for kind in runner.collector.expands}
        result.nodes.append(
            [_truncated(entity, truncated_by) for kind in expandable & wave.keys() for entity in wave[kind]]
        )
    return result


def _with_fitting_hints(line: Coverage, world: World) -> Coverage:
    """Do not tell somebody who has a right to get that right: what is closed then is closed by something else."""
    told: list[Coverage | Note] = [line, *line.notes]
    hints = [item for item in told if "CAP_SYS_PTRACE" in item.hint]
    if hints and world.may_trace():
        for item in hints:
            item.hint = "closed even to root here: by a security module, a sandbox, or an outer user namespace"
    return line


def _observe_and_seed(collector: Collector, world: World) -> Batch:
    collector.observe(world)
    return collector.seed() if collector.seeds else Batch()


def _expand_wave(collector: Collector, wave: dict[type[Entity], list[Any]]) -> list[Batch]:
    return [collector.expand(wave[kind]) for kind in collector.expands if kind in wave]


class _Frontier:
    """Entities seen so far, and those of them that no collector has been asked about yet."""

    def __init__(self, max_nodes: int) -> None:
        self._seen: set[str] = set()
        self._new: dict[type[Entity], list[Any]] = {}
        self._max_nodes = max_nodes

    @property
    def full(self) -> bool:
        return len(self._seen) > self._max_nodes

    def add(self, entities: list[Entity]) -> None:
        seen, new = self._seen, self._new
        if seen.issuperset(map(_id_of, entities)):  # most answers name only what is known: the edges are what they add
            return
        for entity in entities:
            if entity.id not in seen:
                seen.add(entity.id)
                # Nothing here knows anything about another host's entities, nor about what is over.
                if entity.ns == LOCAL and entity.attributes.get("ended") is not True:
                    new.setdefault(type(entity), []).append(entity)

    def known_part(self, batch: Batch) -> Batch:
        """What of a batch is about entities seen already."""
        seen = self._seen
        return Batch(
            [entity for entity in batch.nodes if entity.id in seen],
            [edge for edge in batch.edges if edge.source in seen and edge.target in seen],
        )

    def take(self) -> dict[type[Entity], list[Any]]:
        wave, self._new = self._new, {}
        return wave


def _truncated(entity: Entity, limit: str) -> Entity:
    return replace(entity, attributes={"truncated_by": limit}, metrics=EMPTY, unknown=None)


def _left(deadline_s: float) -> float:
    return deadline_s - time.monotonic()
