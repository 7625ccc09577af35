"""What a collector is: one observation domain, turned into entities and edges, in batches.

Each round the core calls ``observe`` once on every collector, then ``seed`` on those that have ``seeds``, then
``expand`` with the whole frontier of one kind at a time, breadth first. Rules that hold for every collector (checked
by tests/unit/test_collector_conformance.py on all registered ones):

* ``observe`` reads the source once and keeps an index; ``seed`` and ``expand`` answer from it. No reading per entity.
* It raises SourceUnavailable(reason, hint) when it cannot work here; that costs it the round, nothing else.
* A thing that vanished, or may not be read, costs that thing only: count it with ``lose`` or say it with ``note``.
* It is called by one thread at a time, each round with the same World; it keeps what it needs between rounds itself and
  forgets what is gone. Rates come from the difference to the round before; at first sight a rate is *unknown*.
* It never expands entities of a foreign namespace; the core does not hand them over.
* No NaN, no infinity, no 0 for unknown, no secrets (``gpuflight.redaction``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec import Struct, field

from gpuflight.graph import Edge, Entity
from gpuflight.registry import Plugin
from gpuflight.rounds import Note, ProgramTime

if TYPE_CHECKING:
    from gpuflight.sources.world import World


class Batch(Struct):
    """Entities and edges as one collector reports them; duplicates are welcome."""

    nodes: list[Entity] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)


class Collector(Plugin, family="collectors", package="gpuflight.collectors"):
    """Base of every collector. ``settings`` is an instance of ``settings_class`` (or None)."""

    seeds: ClassVar[bool] = False
    """Whether ``seed`` gives starting points."""

    expands: ClassVar[tuple[type[Entity], ...]] = ()
    """Kinds that ``expand`` takes."""

    describes: ClassVar[tuple[type[Entity], ...]] = ()
    """Kinds of ``expands`` that it names. Where the depth limit ends an expansion it is asked about these once more,
    and only what it says about things already in the picture is taken: nothing at the edge is a bare number."""

    precedence: ClassVar[int] = 0
    """Whose attributes and metrics stand when two collectors report the same entity: the higher one's."""

    deadline_s: ClassVar[float] = 5.0
    """How long one call may take before the round goes on without it."""

    def __init__(self, settings: Any = None) -> None:
        self.settings = settings if settings is not None or self.settings_class is None else self.settings_class()
        self.losses: dict[str, int] = {}
        self.notes: dict[str, Note] = {}
        self.programs: dict[str, ProgramTime] = {}

    def observe(self, world: World) -> None:
        """Read the source once for this round. Raises SourceUnavailable, OSError."""

    def seed(self) -> Batch:
        """Where the picture starts."""
        return Batch()

    def expand(self, entities: Sequence[Any]) -> Batch:
        """What belongs to, or is connected with, each of ``entities`` (all of one kind of ``expands``)."""
        return Batch()

    def close(self) -> None:
        """Give back descriptors and threads. May be called twice."""

    def lose(self, what: str, count: int = 1) -> None:
        """Count something that could not be reported this round; ``what`` is a plural noun (``vanished processes``)."""
        self.losses[what] = self.losses.get(what, 0) + count

    def note(self, reason: str, hint: str = "", count: int = 1) -> None:
        """Say a partial limit of this round once per reason, with how often it was met."""
        known = self.notes.get(reason)
        if known is None:
            self.notes[reason] = Note(reason=reason, hint=hint, count=count)
        else:
            known.count += count

    def spend(self, program: str, runs_count: int, run_ms: float) -> None:
        """Say what a program of this collector in the kernel cost since the round before."""
        known = self.programs.setdefault(program, ProgramTime(program=program))
        known.runs_count += runs_count
        known.run_ms += run_ms
