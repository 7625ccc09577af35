"""GPU sessions of this host: programs whose logs in the GPU Flight format are being written, and what they do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec
from pydantic import Field

from gpuflight.collectors.base import Batch, Collector
from gpuflight.collectors.job_facts import JobReader
from gpuflight.collectors.session_entities import Shown, add_sessions
from gpuflight.collectors.session_gpus import SessionGpus, gpu_entities
from gpuflight.collectors.session_names import shown_name
from gpuflight.collectors.session_processes import OTHER_HOST, SessionProcesses
from gpuflight.collectors.session_rates import QUIET_S, Pace
from gpuflight.errors import MissingExtra, SourceUnavailable
from gpuflight.events.activity.summary import Summary
from gpuflight.events.reading import LiveSettings, Reading, folders_of
from gpuflight.graph import Entity, nodes

if TYPE_CHECKING:
    from gpuflight.events.live import LiveSessions
    from gpuflight.sources.world import World

WELL_KNOWN = ("~/.gpufl/traces", "~/.gpufl/monitor", "/var/gpufl/monitor")
"""Where the programs of the format write to if nothing else is said."""


class SessionsSettings(LiveSettings):
    """Which logs are followed, and what of them is shown."""

    folders: list[str] | None = Field(
        default=None,
        description="folders with session logs, `*` and `~` allowed; null: `~/.gpufl/traces`, `~/.gpufl/monitor` and"
        " `/var/gpufl/monitor`, those that are there",
    )
    keep_ended_s: float = Field(default=300.0, ge=0, description="how long a session that ended is still shown (s)")
    other_hosts: bool = Field(default=False, description="show sessions of other hosts too (shared folders)")
    detailed_sessions: int = Field(
        default=200, ge=0, description="sessions shown with kernels, streams and scopes; those that wrote last"
    )


class _Known(msgspec.Struct):
    """A session between two rounds."""

    summary: Summary
    ended_s: float | None = None
    gpus: dict[int, Entity] = msgspec.field(default_factory=dict)


class _Piece(msgspec.Struct):
    """What the sessions of one owner looked like in the last round, and what that followed from."""

    key: list[Any]
    batch: Batch


class Sessions(Collector):
    """GPU sessions from logs in the GPU Flight format: kernels, streams, copies, waits, memory and scopes"""

    seeds = True
    settings_class = SessionsSettings
    settings: SessionsSettings

    def __init__(self, settings: SessionsSettings | None = None) -> None:
        super().__init__(settings)
        self._live: LiveSessions | None = None
        self._processes = SessionProcesses()
        self._gpus = SessionGpus()
        self._jobs = JobReader()
        self._known: dict[str, _Known] = {}
        self._over: dict[str, int] = {}  # sessions not shown any more, with the number of events they had
        self._pieces: dict[str, _Piece] = {}
        self._last_s = 0.0
        self._world: World | None = None
        self._batch = Batch()

    def observe(self, world: World) -> None:
        self._batch = Batch()
        reading = self._reading(world)
        now_s = world.clock.monotonic_s()
        elapsed_s, self._last_s = now_s - self._last_s, now_s
        self._world = world
        self._processes.begin(world)
        self._gpus.begin(world)
        owners: dict[str, list[tuple[Shown, list[Any]]]] = {}
        host = nodes.Host(hostname=world.procfs.hostname)
        sessions = [session for session in reading.sessions if self._is_wanted(session)]
        first_detailed = len(sessions) - self.settings.detailed_sessions
        for number, session in enumerate(sessions):
            shown, key = self._look_at(session, now_s, elapsed_s, world.clock.wall_ns(), number >= first_detailed)
            if shown is not None:
                owners.setdefault(shown.owner, []).append((shown, key))
        self._show(owners, host)
        self._forget({session.session_id for session in reading.sessions})
        self._say(reading, max(first_detailed, 0), owners)

    def seed(self) -> Batch:
        return self._batch

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.close()

    def _reading(self, world: World) -> Reading:
        """This round's, or what was recorded of it. Raises SourceUnavailable."""
        return world.session_logs.taped(lambda: self._read(world), Reading)

    def _read(self, world: World) -> Reading:
        """Follow the logs. Raises SourceUnavailable where their records cannot be read."""
        if self._live is None:
            patterns = WELL_KNOWN if self.settings.folders is None else self.settings.folders
            if not folders_of(patterns, world.session_logs.root):
                raise SourceUnavailable(
                    "no folder with GPU session logs is there", "name them in the setting collectors.sessions.folders"
                )
            from gpuflight.events.live import LiveSessions  # what reads logs is heavy, and most hosts have none

            try:
                self._live = LiveSessions(
                    patterns,
                    self.settings,
                    root=world.session_logs.root,
                    monotonic_s=world.clock.monotonic_s,
                    wall_s=lambda: world.clock.wall_ns() / 1e9,
                )
            except MissingExtra as error:
                raise SourceUnavailable(
                    f"GPU session logs cannot be read: the package {error.package} is not installed",
                    f"pip install 'gpuflight[{error.extra}]'",
                ) from None
        return self._live.read()

    # --- one session -------------------------------------------------------------------------------------------------

    def _is_wanted(self, session: Summary) -> bool:
        """Not one that is over, unless its log goes on after all."""
        return self._over.get(session.session_id) != session.events or session.partial

    def _look_at(
        self, session: Summary, now_s: float, elapsed_s: float, wall_ns: int, detailed: bool
    ) -> tuple[Shown | None, list[Any]]:
        """The session as it is shown, if it is, and what that follows from."""
        known = self._known.get(session.session_id)
        process, why = self._processes.find(session)
        if process is None and why == OTHER_HOST and not self.settings.other_hosts:
            self.note(
                "sessions of other hosts, or of containers that cannot be told, lie in these folders",
                "set collectors.sessions.other_hosts to see them",
            )
            return None, []
        found = self._processes.was_found(session.session_id)
        state = _state(session, process is not None, found is not None, wall_ns, self.settings.recent_s)
        before = None if known is None else known.summary
        if known is None:
            known = self._known[session.session_id] = _Known(session)
        if before is None or before.devices != session.devices:
            known.gpus = gpu_entities(session.devices)
        known.summary = session
        if state == "live":
            known.ended_s = None
        elif known.ended_s is None:
            known.ended_s = now_s
        if known.ended_s is not None and now_s - known.ended_s >= self.settings.keep_ended_s:
            self._end(session)
            return None, []
        latest_ns = max(session.last_event_ns or 0, session.device_latest_ns)
        quiet = state != "live" or wall_ns - max(latest_ns, session.read_ns) > QUIET_S * 1e9
        owner = (
            f"Session({shown_name(session.session_id)})"
            if found is None
            else f"Process(pid={found[0]},start={found[1]})"
        )
        foreign = why == OTHER_HOST
        shown = Shown(
            session,
            Pace(session, before, elapsed_s, quiet),
            owner,
            None if process is None else process.id,
            why,
            state,
            {} if foreign else known.gpus,
            detailed=detailed,
            foreign=foreign,
        )
        if detailed and not foreign:
            uuid = self._gpus.unplaced(session, shown.process)
            shown.unplaced = next((gpu for gpu in shown.gpus.values() if getattr(gpu, "uuid", "") == uuid), None)
        unplaced = None if shown.unplaced is None else shown.unplaced.id
        return shown, [session, before is session, shown.process, why, state, quiet, unplaced, detailed]

    def _end(self, session: Summary) -> None:
        """It is shown no more."""
        self._over[session.session_id] = session.events
        self._known.pop(session.session_id, None)
        self._drop(session.session_id)

    def _drop(self, session_id: str) -> None:
        """Read it no more."""
        if self._live is not None:
            self._live.forget(session_id)

    def _show(self, owners: dict[str, list[tuple[Shown, list[Any]]]], host: nodes.Host) -> None:
        """Pieces of the picture; the very ones of the last round where nothing changed."""
        pieces: dict[str, _Piece] = {}
        for owner, members in owners.items():
            key = [host.id, *(key for _, key in members)]
            piece = self._pieces.get(owner)
            if piece is None or not _same(piece.key, key):
                piece = _Piece(key, Batch())
                add_sessions(piece.batch, [shown for shown, _ in members], host)
                live = members[0][0].process
                if live is not None:
                    pid, start = self._processes.was_found(members[0][0].summary.session_id) or (0, 0)
                    process = nodes.Process(pid=pid, start=start, id=live)
                    piece.batch.nodes.append(process)
                    self._add_rank(process, piece.batch)
            pieces[owner] = piece
            self._batch.nodes += piece.batch.nodes
            self._batch.edges += piece.batch.edges
        self._pieces = pieces

    def _add_rank(self, process: nodes.Process, batch: Batch) -> None:
        """Which rank of which job the program is, at the process and at its sessions."""
        assert self._world is not None  # noqa: S101 - observe sets it
        stat = self._world.procfs.processes().get(process.pid)
        if stat is None or stat.start != process.start:
            return
        facts = self._jobs.read(self._world.procfs, stat)
        process.attributes, process.unknown = {**facts.attributes}, {**facts.unknown} or None
        for entity in batch.nodes:
            if isinstance(entity, nodes.Session):
                entity.attributes.update(facts.attributes)

    def _forget(self, read: set[str]) -> None:
        live = (self._processes.was_found(session) for session in read)
        self._jobs.keep({found[0] for found in live if found is not None})
        self._known = {session: known for session, known in self._known.items() if session in read}
        self._over = {session: events for session, events in self._over.items() if session in read}
        self._processes.drop(read)
        self._gpus.drop(read)

    def _say(self, reading: Reading, not_detailed: int, owners: dict[str, list[tuple[Shown, list[Any]]]]) -> None:
        """What is not in the picture."""
        shown = [one for members in owners.values() for one, _ in members]
        if reading.lag_bytes:
            self.note(
                "session logs are written faster than they are read: what is shown lags behind",
                "raise collectors.sessions.bytes_per_round",
                sum(one.summary.lag_bytes > 0 for one in shown) or 1,
            )
        if reading.closed:
            self.note(
                "folders or files of session logs may not be read", "run as root, or as their owner", reading.closed
            )
        if reading.lost:
            self.lose("lines and windows of session logs", reading.lost)
        if reading.dropped:
            self.lose("sessions beyond collectors.sessions.max_sessions", reading.dropped)
        if reading.waiting:
            self.note(
                "sums of sessions are of an earlier round: there are too many that write",
                "raise interval_s, or name fewer folders in collectors.sessions.folders",
                reading.waiting,
            )
        if not_detailed:
            self.note(
                "sessions are shown without kernels, streams and scopes",
                "raise collectors.sessions.detailed_sessions",
                not_detailed,
            )
        for what, left in (
            ("kernels", sum(one.summary.kernels_count - len(one.summary.kernels) for one in shown)),
            ("streams", sum(one.summary.streams_count - len(one.summary.streams) for one in shown)),
            ("scopes", sum(one.summary.scopes_count - len(one.summary.scopes or ()) for one in shown)),
        ):
            if left > 0:
                self.note(f"{what} are told in sum only", f"raise collectors.sessions.{what}_per_session", left)


def _state(session: Summary, alive: bool, was_found: bool, wall_ns: int, silent_s: float) -> str:
    """``live``, or how it ended."""
    if session.end:
        return f"ended: {session.end}"
    if alive:
        return "live"
    if was_found:
        return "ended: process gone"
    if session.writer == "gone":
        return "ended: writer gone"
    if session.writer == "unknown" and wall_ns - session.read_ns > silent_s * 1e9:
        return "ended: silent"
    return "live"


def _same(before: Iterable[Any], now: Iterable[Any]) -> bool:
    """Whether nothing came and nothing else changed: by the objects of the summaries, not by their content."""
    one, other = list(before), list(now)
    if len(one) != len(other) or one[0] != other[0]:
        return False
    return all(
        len(a) == len(b) and a[0] is b[0] and a[1] is True and b[1] is True and a[2:] == b[2:]
        for a, b in zip(one[1:], other[1:], strict=True)
    )
