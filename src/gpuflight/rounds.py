"""The Round: the only thing that travels from the core to anyone else, and what it is made of."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, field

from gpuflight.graph.diff import Diff
from gpuflight.graph.graph import Graph

CoverageStatus = Literal["ok", "stale", "skipped", "failed"]
Severity = Literal["info", "warn", "critical"]


class Coverage(Struct, kw_only=True, omit_defaults=True):
    """What one collector could see in one round, what it cost and what it lost.

    ``status``: *ok* it answered; *stale* it passed its deadline and its last answer stands, with its age; *skipped* it
    cannot work here (no right, no library, nothing of the kind); *failed* it raised. ``reason`` and ``hint`` are for
    people. ``notes`` are partial limits of an *ok* answer, each ``{reason, hint, count}``.
    """

    collector: str
    status: CoverageStatus
    reason: str = ""
    hint: str = ""
    wall_ms: float = 0.0
    cpu_ms: float = 0.0
    nodes_count: int = 0
    edges_count: int = 0
    age_rounds: int = 0
    losses: dict[str, int] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)


class Note(Struct, kw_only=True, omit_defaults=True):
    """A partial limit: something a collector that works could not see, how often, and how to see it."""

    reason: str
    hint: str = ""
    count: int = 1


class Finding(Struct, kw_only=True, omit_defaults=True):
    """One judgement of one rule about some entities and edges (design.md §6); made by the bottleneck rules."""

    id: str
    rule: str
    severity: Severity
    message: str
    entities: list[str] = field(default_factory=list)
    edges: list[str] = field(default_factory=list)
    evidence: dict[str, Any] = field(default_factory=dict)
    cost: str = ""
    advice: str = ""
    explains: list[str] = field(default_factory=list)
    opened_round: int = 0


class Environment(Struct, kw_only=True, omit_defaults=True):
    """The host that a round was taken on."""

    hostname: str = ""
    machine_id: str = ""
    boot_id: str = ""
    version: str = ""
    kernel: str = ""


class OwnCost(Struct, kw_only=True, omit_defaults=True):
    """What gpuflight itself used: ``cpu_pct`` of one core by the whole process since the round before (None at the
    first), resident memory, threads and open descriptors at the end of the round."""

    cpu_pct: float | None = None
    rss_bytes: int = 0
    threads_count: int = 0
    fds_count: int = 0


class Round(Struct, kw_only=True):
    """One completed round. ``graph`` is shared and must not be changed.

    ``time_ns`` is the wall clock (ns since the epoch) at the start of the round, ``duration_s`` what it took,
    ``truncated_by`` names the limit (depth, nodes, time) that ended the expansion early, empty if none did.
    """

    number: int
    time_ns: int
    duration_s: float
    graph: Graph
    diff: Diff
    coverage: list[Coverage]
    env: Environment
    findings: list[Finding] = field(default_factory=list)
    truncated_by: str = ""
    own_cost: OwnCost | None = None
