"""The Round: the only thing that travels from the core to anyone else, and what it is made of."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

from gpuflight.graph.diff import Diff
from gpuflight.graph.graph import Graph

CoverageStatus = Literal["ok", "stale", "skipped", "failed"]
Severity = Literal["info", "warn", "critical"]


class Coverage(Struct, kw_only=True, omit_defaults=True):
    """What one collector could see in one round, what it cost and what it lost.

    ``status``: *ok* it answered; *stale* it passed its deadline and its last answer stands, with its age; *skipped* it
    cannot work here (no right, no library, nothing of the kind); *failed* it raised. ``reason`` and ``hint`` are for
    people. ``notes`` are partial limits of an *ok* answer, each ``{reason, hint, count}``. ``programs`` is what its
    probes in the kernel cost since the round before, beside its own time.
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
    programs: list[ProgramTime] = field(default_factory=list)


class ProgramTime(Struct, kw_only=True, omit_defaults=True):
    """How often a program of ours ran in the kernel since the round before, and how long in all (ms of CPU time)."""

    program: str
    runs_count: int = 0
    run_ms: float = 0.0


class Note(Struct, kw_only=True, omit_defaults=True):
    """A partial limit: something a collector that works could not see, how often, and how to see it."""

    reason: str
    hint: str = ""
    count: int = 1


class Evidence(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One number (or state) that a finding rests on: which metric or attribute of which element (id), over how many
    samples and how long. ``unit`` is "" where ``value`` is a text or a plain count."""

    element: str
    metric: str
    value: float | str
    unit: str = ""
    samples_count: int = 1
    window_s: float = 0.0


class Finding(Struct, kw_only=True, omit_defaults=True):
    """One judgement of one rule about some entities and edges (design.md §6); made by the bottleneck rules.

    ``id`` is ``rule@subject`` and stays the same for as long as the finding is open, and when it comes back.
    ``cost_gpu_s`` are GPU-seconds lost per second of wall time (so at most the number of GPUs concerned), None if
    unknown; ``cost`` says it in words. ``explains`` are ids of findings that are symptoms of this one, ``explained_by``
    the root that this one is folded under. ``change`` says what this round did to it: ``opened``, ``updated`` (another
    severity or other elements), ``cleared`` (only in ``Round.cleared``), or "" . ``confirmed`` is False where the
    condition was met, but not for as long as the rule demands (one saved graph, a short look). ``flapping``: it opened
    and cleared so often that it is held open until it has been calm for a while.
    """

    id: str
    rule: str
    severity: Severity
    message: str
    entities: list[str] = field(default_factory=list)
    edges: list[str] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)
    cost: str = ""
    cost_gpu_s: float | None = None
    advice: str = ""
    verify: str = ""
    explains: list[str] = field(default_factory=list)
    explained_by: str = ""
    opened_round: int = 0
    opened_time_ns: int = 0
    change: Literal["", "opened", "updated", "cleared"] = ""
    confirmed: bool = True
    flapping: bool = False


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
    ``findings`` are those that are open, roots first; ``cleared`` those that ended with this round. ``monotonic_s`` is
    the clock that never steps, at the same moment as ``time_ns``: durations are told by it where it is known.
    """

    number: int
    time_ns: int
    duration_s: float
    graph: Graph
    diff: Diff
    coverage: list[Coverage]
    env: Environment
    findings: list[Finding] = field(default_factory=list)
    cleared: list[Finding] = field(default_factory=list)
    monotonic_s: float | None = None
    truncated_by: str = ""
    own_cost: OwnCost | None = None
