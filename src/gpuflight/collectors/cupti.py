"""Programs that our recorder records now (``gpuflight.init``, ``gpuflight run -- python …``): what CUPTI tells of them.

The same entities as those of ``collectors.sessions``, from the same files; but only of recorders that live, wherever
they write, up to this very round (they are asked to write out what they hold), and with what they say of themselves.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec
from pydantic import Field

from gpuflight.collectors.session_names import shown_name
from gpuflight.collectors.sessions import Sessions, SessionsSettings
from gpuflight.errors import MissingExtra, SourceUnavailable
from gpuflight.events.reading import Reading, folders_of
from gpuflight.graph import nodes

if TYPE_CHECKING:
    from gpuflight.events.live import LiveSessions
    from gpuflight.events.recorder.control import Answer
    from gpuflight.sources.world import World

WELL_KNOWN = ("~/.gpufl/traces",)
_ASKING_S = 2.0
"""Longer than this no recorder is waited for in one round."""


class CuptiSettings(SessionsSettings):
    """Whose recorders are asked, and what of them is shown."""

    folders: list[str] | None = Field(
        default=None,
        description="folders below which recorders write (up to three levels), `*` and `~` allowed; null:"
        " `~/.gpufl/traces`; that of a recorder in this very process is known",
    )
    answer_within_s: float = Field(default=0.5, gt=0, le=5, description="how long a recorder may take to answer (s)")


class _Told(msgspec.Struct):
    """What a recorder says of itself."""

    state: str
    why: str = ""
    lost: int = 0


class _Round(msgspec.Struct):
    """What is taped: the sums, and what the recorders say, by session."""

    reading: Reading
    told: dict[str, _Told]
    silent: int = 0
    beyond: int = 0


class Cupti(Sessions):
    """Programs that record themselves with CUPTI now: kernels, copies, waits, memory, scopes, state of the recorder"""

    settings_class = CuptiSettings
    settings: CuptiSettings
    precedence = 1

    def __init__(self, settings: CuptiSettings | None = None) -> None:
        super().__init__(settings)
        self._told: dict[str, _Told] = {}
        self._readers: dict[str, LiveSessions] = {}
        self._recorded: set[str] = set()

    def observe(self, world: World) -> None:
        self._told = {}
        super().observe(world)
        for session_id, told in self._told.items():
            attributes = {"recorder": told.state}
            if told.why:
                attributes["recorder_why"] = told.why
            self._batch.nodes.append(
                nodes.Session(
                    session_id=shown_name(session_id),
                    attributes=attributes,
                    metrics={"recorder_lost_count": told.lost},
                )
            )

    def close(self) -> None:
        readers, self._readers = self._readers, {}
        for reader in readers.values():
            reader.close()
        super().close()

    def _reading(self, world: World) -> Reading:
        found = world.session_logs.taped(lambda: self._ask_and_read(world), _Round, key="recorders")
        self._told = found.told
        if found.silent:
            self.note(
                "recorders that live do not answer in time", "raise collectors.cupti.answer_within_s", found.silent
            )
        if found.beyond:
            self.lose("recorders that were not asked in this round", found.beyond)
        return found.reading

    def _drop(self, session_id: str) -> None:
        self._recorded.discard(session_id)
        for reader in self._readers.values():
            reader.forget(session_id)

    def _ask_and_read(self, world: World) -> _Round:
        """Have the recorders write out what they hold, and read it. Raises SourceUnavailable where there are none."""
        from gpuflight.events.recorder.control import find_recorders

        patterns = WELL_KNOWN if self.settings.folders is None else self.settings.folders
        recorders = find_recorders(folders_of(patterns, world.session_logs.root))
        own = _own_recorder()
        if own and own not in recorders:
            recorders.insert(0, own)
        if not recorders and not self._readers:
            raise SourceUnavailable(
                "no program of this host is being recorded",
                "start it with `gpuflight run -- python …`, or call gpuflight.init() in it",
            )
        done = _Round(Reading(), {})
        until_s = world.clock.monotonic_s() + _ASKING_S
        for folder in recorders:
            in_time = world.clock.monotonic_s() < until_s
            answer = _flushed(folder, self.settings.answer_within_s) if in_time else None
            if not in_time:
                done.beyond += 1
            elif answer is None:
                done.silent += 1
            else:
                done.told[answer.session_id] = _Told(answer.state, answer.why, answer.lost)
            self._recorded.add(os.path.basename(folder))
            self._follow(os.path.dirname(folder), world)
        for reader in self._readers.values():
            _add(done.reading, reader.read(), self._recorded)
        return done

    def _follow(self, folder: str, world: World) -> None:
        from gpuflight.events.live import LiveSessions

        if folder not in self._readers:
            try:
                self._readers[folder] = LiveSessions(
                    [folder],
                    self.settings,
                    monotonic_s=world.clock.monotonic_s,
                    wall_s=lambda: world.clock.wall_ns() / 1e9,
                )
            except MissingExtra as error:
                raise SourceUnavailable(
                    f"recorded sessions cannot be read: the package {error.package} is not installed",
                    f"pip install 'gpuflight[{error.extra}]'",
                ) from None


def _own_recorder() -> str:
    """The session's folder of a recorder in this process, empty if there is none."""
    import sys

    process = sys.modules.get("gpuflight.events.recorder.process")
    recorder = process.running() if process is not None else None
    return recorder.path if recorder is not None and recorder.state != "closed" else ""


def _flushed(folder: str, patience_s: float) -> Answer | None:
    """What a recorder says after it wrote everything out; None if it does not answer."""
    from gpuflight.events.recorder.control import Request, ask

    try:
        answer = ask(folder, Request("flush"), patience_s)
    except SourceUnavailable:
        return None
    return answer if answer.ok else None


def _add(into: Reading, more: Reading, sessions: set[str]) -> None:
    """Of the sessions that are, or in a round before were, of a recorder that could be asked."""
    into.sessions += [session for session in more.sessions if session.session_id in sessions]
    into.folders += more.folders
    into.lag_bytes += more.lag_bytes
    for name in ("lost", "hidden", "dropped", "waiting", "closed"):
        setattr(into, name, getattr(into, name) + getattr(more, name))
