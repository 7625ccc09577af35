"""The ranks of distributed jobs, over all hosts that are in the picture, and by how much their clocks may differ.

A rank is a process with the attributes ``rank`` and ``job`` (collector ranks), or a session with them whose process is
not in the picture. Children that a rank forked inherit its environment and its open GPU; they are not ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct, field

from gpuflight.bottlenecks.base import Unknown
from gpuflight.bottlenecks.window import Window
from gpuflight.graph import Entity, edges, nodes
from gpuflight.graph.namespaces import SEPARATOR

MEMBERS: dict[type[Entity], str] = {nodes.Process: "rank"}
RELATIONS = (edges.Own, edges.Access)
"""What a rule that asks for jobs declares as ``members`` and among its ``relations``; it needs Session and Host too."""


_MOST_RANKS = 1 << 17
"""Of a job; a log or another instance may say anything."""


class Rank(Struct):
    """One rank. ``element``: its process, or its session if the process is not in the picture."""

    number: int
    element: Entity
    process: nodes.Process | None = None
    sessions: list[nodes.Session] = field(default_factory=list)
    known_gpus: list[nodes.GPU] | None = None

    @property
    def ns(self) -> str:
        """The host that it is on: empty for this one."""
        return self.element.ns

    def where(self) -> str:
        """`` on node-7``; empty for this host."""
        return f" on {self.ns}" if self.ns else ""

    def gpus(self, window: Window) -> list[nodes.GPU]:
        """The GPUs that it uses, by NVML or by what its session says."""
        if self.known_gpus is None:
            owners = (self.element, *self.sessions)
            self.known_gpus = list({gpu.id: gpu for owner in owners for gpu in window.gpus_of(owner)}.values())
        return self.known_gpus

    def metric(self, name: str) -> tuple[Entity, float] | None:
        """A metric of its process, else of the first of its sessions that has it; with whose it is."""
        for entity in (self.element, *self.sessions):
            if name in entity.metrics:
                return entity, entity.metrics[name]
        return None


class Job(Struct):
    """The ranks of one job that are seen. ``world_size``: how many there are, None if nobody says. ``stale``: hosts of
    which only an old picture is there; their ranks are left out. ``ranks`` are in the order of their numbers."""

    name: str
    world_size: int | None = None
    ranks: dict[int, Rank] = field(default_factory=dict)
    stale: list[str] = field(default_factory=list)

    @property
    def id(self) -> str:
        """What a finding about the whole job is about."""
        return f"Job({self.name})"

    def __iter__(self) -> Iterator[Rank]:
        return iter(self.ranks.values())

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def missing(self) -> list[int]:
        """Ranks that are not seen; empty where nobody says how many there are."""
        return [number for number in range(min(self.world_size or 0, _MOST_RANKS)) if number not in self.ranks]

    def seen(self) -> str:
        """``all 8 ranks``, ``3 of 8 ranks (not 3-7)``, for messages."""
        if self.world_size is None:
            return f"{len(self)} ranks (how many there are is not known)"
        missing = self.missing
        if not missing:
            return f"all {len(self)} ranks"
        return f"{len(self)} of {self.world_size} ranks (not {ranges(missing)})"

    @property
    def live(self) -> bool:
        """Whether it runs: it has a process, or a session that goes on."""
        return any(rank.process or any(s.attributes.get("state") == "live" for s in rank.sessions) for rank in self)

    def compared(self, count: int) -> str:
        """As ``seen``, where only so many of them told what was compared."""
        return self.seen() if count == len(self) else f"{count} of {self.world_size or len(self)} ranks"

    def whole(self) -> None:
        """Raises Unknown unless every rank is seen."""
        if self.world_size is None:
            raise Unknown(f"how many ranks the job has is not told; {len(self)} are seen")
        if self.missing:
            stale = f"; the picture of {', '.join(self.stale)} is old" if self.stale else ""
            raise Unknown(f"only {self.seen()} of the job are seen{stale}")


def jobs_of(window: Window) -> list[Job]:
    """All jobs of this round, in the order of their names."""
    return window.shared("jobs", _gather)


def _gather(window: Window) -> list[Job]:
    found: dict[str, Job] = {}
    old = {host.ns for host in window.all(nodes.Host) if host.ns and host.attributes.get("stale")}
    members = window.members(nodes.Process, "rank")
    pids: dict[tuple[str, object], nodes.Process] = {(process.ns, process.pid): process for process in members}
    for process in sorted(members, key=lambda each: (each.ns, each.start, each.pid)):
        parent = pids.get((process.ns, process.attributes.get("ppid")))
        if parent is not None and parent.attributes["rank"] == process.attributes["rank"]:
            continue  # it forked: a loader, a helper
        _add(found, process, old)
    of_process: dict[str, Rank] = {
        rank.process.id: rank for job in found.values() for rank in job.ranks.values() if rank.process is not None
    }
    for session in window.all(nodes.Session):
        owners = [edge.source for edge in window.into(session.id, edges.Own)]
        rank = next((of_process[owner] for owner in owners if owner in of_process), None)
        if rank is not None:
            rank.sessions.append(session)
        elif "rank" in session.attributes and not any(owner.startswith("Process(") for owner in owners):
            _add(found, session, old)
    for job in found.values():
        job.ranks = dict(sorted(job.ranks.items()))
        for rank in job:
            rank.sessions.sort(key=lambda each: (each.attributes.get("state") != "live", each.id))
    return [found[name] for name in sorted(found)]


def _add(found: dict[str, Job], entity: Entity, old: set[str]) -> None:
    name, number = entity.attributes.get("job"), entity.attributes["rank"]
    if not name or type(number) is not int:  # another instance, or a log, may say anything
        return
    job = found.setdefault(str(name), Job(str(name)))
    size = entity.attributes.get("world_size")
    if type(size) is int and number < size:
        job.world_size = max(job.world_size or 0, size)
    if entity.ns in old:
        if entity.ns not in job.stale:
            job.stale.append(entity.ns)
    elif number not in job.ranks:
        process = entity if isinstance(entity, nodes.Process) else None
        sessions = [entity] if isinstance(entity, nodes.Session) else []
        job.ranks[number] = Rank(number, entity, process, sessions)


class Clocks:
    """What clocks of hosts say against ours, as the collector remote measures it, at each host on the way."""

    def __init__(self, window: Window) -> None:
        self._hosts = {host.ns: host for host in window.all(nodes.Host)}

    def offset_s(self, ns: str) -> tuple[float, float]:
        """(their clock minus ours, the most by which that may be wrong), s. Raises Unknown."""
        offset_s = error_s = 0.0
        parts = ns.split(SEPARATOR) if ns else []
        for length in range(1, len(parts) + 1):
            way = SEPARATOR.join(parts[:length])
            host = self._hosts.get(way)
            metrics = host.metrics if host is not None else {}
            if "clock_offset_s" not in metrics or "clock_offset_error_s" not in metrics:
                why = (host.unknown or {}).get("clock_offset_s") if host is not None else None
                raise Unknown(f"the clock of {way} is not compared with ours: {why or 'not measured here'}")
            offset_s += metrics["clock_offset_s"]
            error_s += metrics["clock_offset_error_s"]
        return offset_s, error_s


def ranges(numbers: list[int]) -> str:
    """``0, 3-7``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    shown = ["-".join(map(str, part)) for part in parts[:8]]
    return ", ".join(shown) + (" …" if len(parts) > 8 else "")


def rank_names(ranks: list[Rank]) -> str:
    """``rank 3``, ``ranks 0-2, 7``."""
    return f"rank{'s' * (len(ranks) != 1)} {ranges([rank.number for rank in ranks])}"
