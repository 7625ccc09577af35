"""Made-up rounds under the rule engine: what a rule's cases are told in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuflight.bottlenecks.engine import Engine, Judgement
from gpuflight.graph import Edge, Entity
from gpuflight.graph.store import LiveStore
from gpuflight.rounds import Coverage, Environment, OwnCost, Round

Elements = Sequence[Entity | Edge]


@dataclass
class Scene:
    """Rounds, each the elements that are there; ``step_s`` apart. ``repeat`` shows the last one again so many times.
    ``coverage``, ``own_cost`` and ``truncated_by`` are of every round; ``subscribers`` what their states say."""

    rounds: Sequence[Elements]
    step_s: float = 5.0
    repeat: int = 2
    coverage: Sequence[Coverage] = ()
    own_cost: OwnCost | None = None
    truncated_by: str = ""
    duration_s: float = 0.1
    subscribers: Sequence[Any] = ()


def steady(*elements: Entity | Edge, **other: Any) -> Scene:
    """The same elements in every round; ``seconds`` says for how long (default three rounds)."""
    step_s = other.setdefault("step_s", 5.0)
    seconds = other.pop("seconds", 0.0)
    other.setdefault("repeat", max(2, int(seconds / step_s) + 1))
    return Scene([elements], **other)


def changing(make: Callable[[int], Elements], count: int, **other: Any) -> Scene:
    """``count`` rounds, the elements of number n (from 0) made by ``make(n)``."""
    other.setdefault("repeat", 0)
    return Scene([make(n) for n in range(count)], **other)


@dataclass
class Case:
    """Of one rule: a scene in which it fires (about ``about``, an id, if given; with ``severity``, if given), one in
    which it is clear, and one in which it is unknown. ``also``: further scenes with the expected state by name."""

    fires: Scene
    clear: Scene
    unknown: Scene | None
    about: str = ""
    severity: str = ""
    never_unknown: str = ""
    """Why it has no ``unknown`` scene (what it reads is always there)."""
    also: dict[str, tuple[str, Scene]] = field(default_factory=dict)


class Player:
    """Plays scenes to an engine as the core would."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.store = LiveStore(tombstone_rounds=2)
        self.number = 0
        self.now_s = 1000.0
        self.wall_ns = 1_700_000_000_000_000_000

    def play(self, scene: Scene) -> list[Judgement]:
        """The judgement of every round of a scene."""
        rounds = [*scene.rounds, *[scene.rounds[-1]] * scene.repeat]
        return [self.round(elements, scene) for elements in rounds]

    def round(self, elements: Elements, scene: Scene) -> Judgement:
        """One round."""
        self.number += 1
        self.now_s += scene.step_s
        self.wall_ns += int(scene.step_s * 1e9)
        found = [e for e in elements if isinstance(e, Entity)]
        wires = [e for e in elements if isinstance(e, Edge)]
        advance = self.store.advance(self.number, [found], [wires])
        assert advance.dangling_count == 0, "an edge of the scene has an end that is not in it"
        done = Round(
            number=self.number, time_ns=self.wall_ns, duration_s=scene.duration_s, graph=advance.graph,
            diff=advance.diff, coverage=list(scene.coverage), env=Environment(hostname="h"), monotonic_s=self.now_s,
            own_cost=scene.own_cost, truncated_by=scene.truncated_by,
        )  # fmt: skip
        return self.engine.judge(done)
