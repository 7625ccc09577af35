"""What NCCL's RAS says about the jobs whose ranks run here: who does not answer, and who is behind the others."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct, field
from pydantic import BaseModel, ConfigDict, Field

from gpuflight.collectors.base import Batch, Collector
from gpuflight.collectors.process_tree import ACCELERATORS
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import nodes
from gpuflight.sources.job_environment import job_facts
from gpuflight.sources.nccl_ras import PORT, Place, reachable, version_of
from gpuflight.sources.nccl_ras_report import Report, parse
from gpuflight.sources.procfs.stat import decode

if TYPE_CHECKING:
    from gpuflight.sources.netlink import InetTable
    from gpuflight.sources.procfs import ProcFs, ProcStat
    from gpuflight.sources.world import World

HEALTHY, ANSWERS = "healthy", "answers"
_FIRST_WAIT_S = 0.2  # for the first answer of a place, so that a capture of one round has it; later nobody waits
_STAND_INTERVALS = 4
_STAND_EXTRA_S = 30.0
_LOOK_AGAIN_ROUNDS = 16
_MOST_LINES = 16
_MOST_CHARS = 160
_LIBRARY = re.compile(rb"^\S+ \S+ \S+ \S+ \d+ +(/\S*/libnccl\.so[^\n]*)$", re.MULTILINE)
_OFF = "not asked (collectors.nccl_ras.ask)"
_NOT_ASKED = "NCCL's RAS listens and is not asked, as versions of NCCL before 2.29.2 can end their job at a question"
_OLD = "NCCL's RAS is not asked: its version is older than collectors.nccl_ras.oldest_version, or not known"

_Key = tuple[int, int]


class NcclRasSettings(BaseModel):
    """Whether and how RAS is asked."""

    model_config = ConfigDict(extra="forbid")

    ask: bool = Field(False, description="Ask; without, only who could be asked is said (docs/jobs.md has the risk).")
    interval_s: float = Field(30.0, ge=1, description="Least time between two questions to a job (s).")
    timeout_s: int = Field(5, ge=1, le=60, description="How long RAS waits for the other processes of the job (s).")
    port: int = Field(PORT, ge=1, le=65535, description="Where RAS listens if a rank's NCCL_RAS_ADDR says nothing.")
    oldest_version: str = Field(
        "2.29.2", pattern=r"^\d+(\.\d+)*$", description="Oldest NCCL that is asked; 0: any, and where none is known."
    )


class _Program(Struct):
    """A process with a GPU: what its environment and its memory map say. ``port`` is 0 where RAS is switched off."""

    image: tuple[object, ...]
    port: int
    job: str
    library: str = ""
    version: str = ""
    due: int = 0  # round in which its memory map is looked at again


class _Standing(Struct):
    """What an answer said of one process."""

    asked_s: float
    said: str
    version: str
    communicators: list[str] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)


class NcclRas(Collector):
    """NCCL jobs as NCCL's RAS in their ranks tells of them (on request): who does not answer, who is behind"""

    name = "nccl_ras"
    expands = (nodes.Process,)
    precedence = -10  # after the sockets collector: it decides how much is read about sockets
    settings_class = NcclRasSettings
    settings: NcclRasSettings

    def __init__(self, settings: NcclRasSettings | None = None) -> None:
        super().__init__(settings)
        self._round = 0
        self._now_s = 0.0
        oldest = _numbers(self.settings.oldest_version)
        self._oldest = oldest if any(oldest) else ()
        self._programs: dict[int, _Program] = {}
        self._standing: dict[_Key, _Standing] = {}
        self._unknown: dict[_Key, str] = {}
        self._due_s: dict[str, float] = {}
        self._asked_s: dict[Place, float] = {}
        self._taken_s: dict[Place, float] = {}

    def observe(self, world: World) -> None:
        self._round += 1
        self._now_s = world.clock.monotonic_s()
        self._unknown = {}
        processes = world.procfs.processes()
        holders = {pid: processes[pid] for pid in world.procfs.fds().holders(ACCELERATORS) if pid in processes}
        self._programs = {pid: known for pid, known in self._programs.items() if pid in holders}
        table = world.netlink.inet_sockets() if holders else None
        listeners = self._listeners(world, holders, table) if table is not None else {}
        asked = {place: stats for place, stats in listeners.items() if self._allowed(place, stats)}
        world.nccl_ras.keep(asked)
        for times_s in (self._asked_s, self._taken_s):
            for place in times_s.keys() - asked.keys():
                del times_s[place]
        self._forget(holders)
        if table is None or not asked:
            return
        if not world.nccl_ras.replaying:
            self._ask(world, asked)
        for place, stats in asked.items():
            self._take(world, place, stats, holders, table)

    def expand(self, entities: Sequence[nodes.Process]) -> Batch:
        batch = Batch()
        if not self._standing and not self._unknown:
            return batch
        for entity in entities:
            key = (entity.pid, entity.start)
            standing, why = self._standing.get(key), self._unknown.get(key)
            if standing is None and why is None:
                continue
            found = nodes.Process(pid=entity.pid, start=entity.start, id=entity.id)
            batch.nodes.append(found)
            if standing is None:
                found.unknown = {"nccl_ras": str(why)}
                continue
            found.attributes = {"nccl_ras": standing.said}
            for name, value in (
                ("nccl_ras_version", standing.version),
                ("nccl_ras_communicators", standing.communicators),
                ("nccl_ras_troubles", standing.troubles),
            ):
                if value:
                    found.attributes[name] = value
            found.metrics = {"nccl_ras_age_s": round(max(0.0, self._now_s - standing.asked_s), 1)}
        return batch

    # --- who listens -----------------------------------------------------------------------------------------------

    def _listeners(self, world: World, holders: dict[int, ProcStat], table: InetTable) -> dict[Place, list[ProcStat]]:
        procfs, sockets = world.procfs, world.procfs.fds().sockets
        ports = {program.port for stat in holders.values() if (program := self._program(procfs, stat)) is not None}
        found: dict[Place, list[ProcStat]] = {}
        for socket in [socket for socket in table.sockets if socket.local_port in ports]:  # of thousands
            if socket.state != "LISTEN":
                continue
            owners = [holders[ref.pid] for ref in sockets.get(socket.inode, ()) if ref.pid in holders]
            if not owners:
                continue
            eldest = min(owners, key=lambda stat: (stat.start, stat.pid))  # the others inherited it
            program = self._program(procfs, eldest)
            if program is None or program.port != socket.local_port:
                continue
            if self._has_nccl(world, eldest, program):
                place = Place(socket.netns, socket.local_address, socket.local_port)
                found.setdefault(place, []).append(eldest)
            else:
                self.note("processes with a GPU listen where RAS does, without libnccl in memory: not asked")
        return found

    def _program(self, procfs: ProcFs, stat: ProcStat) -> _Program | None:
        known = self._programs.get(stat.pid)
        image = (stat.start, *stat.image)
        if known is not None and known.image == image:
            return known
        try:
            environ = procfs.environ(stat.pid)
        except (OSError, ValueError):  # no right, which the collector ranks says; or it ends
            return None
        port = self.settings.port
        if environ.get("NCCL_RAS_ENABLE") == "0":
            port = 0
        elif address := environ.get("NCCL_RAS_ADDR"):
            last = address.rpartition(":")[2]
            port = int(last) if last.isascii() and last.isdecimal() and len(last) <= 5 else 0
        job = str(job_facts(environ, procfs.hostname).attributes.get("job", ""))
        known = self._programs[stat.pid] = _Program(image, port, job)
        return known

    def _has_nccl(self, world: World, stat: ProcStat, program: _Program) -> bool:
        if program.library or self._round < program.due:
            return bool(program.library)
        program.due = self._round + _LOOK_AGAIN_ROUNDS
        try:
            library = _LIBRARY.search(world.procfs.maps(stat.pid))
        except (OSError, ValueError):
            return False
        if library is not None:
            program.library = decode(library[1].removesuffix(b" (deleted)"))
            program.version = version_of(world.fs, f"{world.procfs.root}/{stat.pid}/root", program.library)
        return bool(program.library)

    def _allowed(self, place: Place, stats: list[ProcStat]) -> bool:
        """Whether this place is to be asked; else says why not."""
        why, hint = "", ""
        if not self.settings.ask:
            self.note(_NOT_ASKED, "set collectors.nccl_ras.ask to true where they are newer", len(stats))
            why = _OFF
        elif any(_numbers(self._programs[stat.pid].version) < self._oldest for stat in stats):
            hint = "set oldest_version to 0 to ask nonetheless"
            self.note(_OLD, hint, len(stats))
            versions = {self._programs[stat.pid].version or "of an unknown version" for stat in stats}
            why = f"not asked: its NCCL is {', '.join(sorted(versions))}"
        else:
            try:
                reachable(place.address)
            except SourceUnavailable as error:
                why = f"not asked: {error.reason}"
                self.note(f"NCCL's RAS at {place}: {error.reason}", error.hint, len(stats))
        if why:
            self._unknown |= {(stat.pid, stat.start): why for stat in stats}
            for stat in stats:
                self._standing.pop((stat.pid, stat.start), None)
        return not why

    def _forget(self, holders: dict[int, ProcStat]) -> None:
        oldest_s = self._now_s - self.settings.interval_s * _STAND_INTERVALS - _STAND_EXTRA_S
        self._standing = {
            key: standing
            for key, standing in self._standing.items()
            if standing.asked_s >= oldest_s and (stat := holders.get(key[0])) is not None and stat.start == key[1]
        }
        self._due_s = {job: due_s for job, due_s in self._due_s.items() if due_s > self._now_s}

    # --- asking ----------------------------------------------------------------------------------------------------

    def _ask(self, world: World, asked: dict[Place, list[ProcStat]]) -> None:
        """One question to each job that is due. Where several jobs share a place, the kernel chooses which is asked."""
        places: dict[str, list[Place]] = {}
        for place, stats in asked.items():
            for job in self._jobs(place, stats):
                places.setdefault(job, []).append(place)
        first = []
        for job, choice in places.items():
            if job in self._due_s:
                continue
            place = min(choice, key=lambda place: (self._asked_s.get(place, -1.0), place))
            doors = [f"{world.procfs.root}/{stat.pid}/ns/net" for stat in asked[place]]
            if world.nccl_ras.ask(place, doors, self._now_s, self.settings.timeout_s):
                self._due_s[job] = self._now_s + self.settings.interval_s
                if place not in self._asked_s:
                    first.append(place)
                self._asked_s[place] = self._now_s
        if first:
            world.nccl_ras.wait(first, _FIRST_WAIT_S)

    def _jobs(self, place: Place, stats: list[ProcStat]) -> set[str]:
        return {self._programs[stat.pid].job or str(place) for stat in stats}

    def _take(
        self, world: World, place: Place, stats: list[ProcStat], holders: dict[int, ProcStat], table: InetTable
    ) -> None:
        jobs = self._jobs(place, stats)
        why = "no answer yet"
        try:
            told = world.nccl_ras.told(place)
            if told is not None and told.error:
                raise SourceUnavailable(told.error, told.hint)
            if told is not None:
                if self._taken_s.get(place) != told.asked_s:
                    report = parse(told.body, structured=told.structured)
                    self._enter(world.procfs, report, told.asked_s, place, stats, holders, table)
                    self._taken_s[place] = told.asked_s
                why = "none of its answers names this process"
        except SourceUnavailable as error:
            why = f"{place}: {error.reason}"
            self.note(f"NCCL's RAS at {why}", error.hint)
            if len(jobs) == 1:  # of several, nobody knows which one was asked
                for stat in stats:
                    self._standing.pop((stat.pid, stat.start), None)
        for stat in stats:
            if (stat.pid, stat.start) not in self._standing:
                self._unknown[stat.pid, stat.start] = why

    # --- answers ---------------------------------------------------------------------------------------------------

    def _enter(
        self, procfs: ProcFs, report: Report, asked_s: float, place: Place, stats: list[ProcStat],
        holders: dict[int, ProcStat], table: InetTable,
    ) -> None:  # fmt: skip
        """Say of each process here what the answer says of it."""
        if report.strange_count:
            self.lose("lines of RAS that were not understood", report.strange_count)
        find = _Local(procfs, place, stats, holders, table)
        said: dict[_Key, list[str]] = {}
        communicators: dict[_Key, list[str]] = {}
        for member in report.members:
            key = find(member.host, member.pid)
            if key is not None:
                said.setdefault(key, [])
                communicators.setdefault(key, []).append(_clean(str(member)))
        for trouble in report.troubles:
            key = find(trouble.host, trouble.pid)
            if key is not None:
                said.setdefault(key, []).append(_clean(trouble.what))
        if not report.lists_all and len(self._jobs(place, stats)) == 1:  # all that listen there are of the job
            for stat in stats:
                said.setdefault((stat.pid, stat.start), [])
        if find.ambiguous_count:
            self.lose("processes named by RAS that could be several", find.ambiguous_count)
        troubles = [_clean(str(trouble)) for trouble in report.troubles[:_MOST_LINES]]
        if len(report.troubles) > _MOST_LINES:
            troubles.append(f"and {len(report.troubles) - _MOST_LINES} more")
        if report.timeouts_count:
            troubles.append(f"RAS waited for {report.timeouts_count} in vain")
        for key, parts in said.items():
            own = _clean("; ".join(dict.fromkeys(parts)))
            self._standing[key] = _Standing(
                asked_s,
                own or (ANSWERS if troubles else HEALTHY),
                _clean(report.version),
                communicators.get(key, [])[:_MOST_LINES],
                troubles,
            )


class _Local:
    """The processes here, by what RAS names them: an address of the host, and the pid in their own pid namespace.

    Only those of the users who listen: what a process answers must say nothing of another user's."""

    def __init__(
        self, procfs: ProcFs, place: Place, stats: list[ProcStat], holders: dict[int, ProcStat], table: InetTable
    ) -> None:
        self._place = place
        self._addresses = table.addresses
        self._found: dict[tuple[int, int], list[_Key]] = {}
        self.ambiguous_count = 0
        try:
            own = procfs.own_namespace("net")
        except (OSError, ValueError):
            own = 0
        users = set()
        for stat in stats:
            with contextlib.suppress(OSError, ValueError):
                users.add(procfs.uid(stat.pid))
        for pid, stat in holders.items():
            try:
                if procfs.uid(pid) not in users:
                    continue
                netns, inner = procfs.namespace(pid, "net") if own else 0, procfs.nspids(pid)[-1]
            except (OSError, ValueError):
                continue  # it ends
            self._found.setdefault((0 if netns == own else netns, inner), []).append((pid, stat.start))

    def __call__(self, host: str, pid: int) -> _Key | None:
        if not pid:
            return None
        netns = self._place.netns
        if host not in self._addresses.get(netns, ()):
            others = [other for other, addresses in self._addresses.items() if host in addresses]
            if len(others) != 1 or host.startswith("127.") or host == "::1":
                return None  # another host
            netns = others[0]
        keys = self._found.get((netns, pid), [])
        if len(keys) > 1:
            self.ambiguous_count += 1
        return keys[0] if len(keys) == 1 else None


def _clean(text: str) -> str:
    """What others wrote, as one short line without control characters."""
    text = "".join(character if character.isprintable() else "?" for character in text[: 2 * _MOST_CHARS])
    return text if len(text) <= _MOST_CHARS else text[: _MOST_CHARS - 1] + "…"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal() and len(part) < 10) if version else ()
