"""Orders to many recorders of this host at once: which are meant, and what came of it, one by one.

Only recorders below the folders that are given, and only those of this process's user, or any for root: the kernel sees
to that at the recorder's socket (``control``).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from gpuflight.errors import SourceUnavailable
from gpuflight.events.recorder.control import Answer, Request, ask, find_recorders
from gpuflight.sources.job_environment import job_facts

_AT_ONCE = 16
_ENVIRONMENT_BYTES = 1 << 20


class Choice(msgspec.Struct, frozen=True):
    """Which recorders are meant: those that any of these names. ``names``: of programs; ``jobs``: as launchers number
    them (the attribute ``job`` of a process)."""

    everything: bool = False
    pids: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    sessions: tuple[str, ...] = ()

    def words(self) -> list[tuple[str, str]]:
        """What was named: kind and value."""
        parts = (("pid", self.pids), ("name", self.names), ("job", self.jobs), ("session", self.sessions))
        return [(kind, str(value)) for kind, values in parts for value in values]


class Outcome(msgspec.Struct, omit_defaults=True):
    """Of one recorder. ``status``: done, or failed with a ``reason``; a recorder that did as told but records nothing
    says so in ``state`` and ``why``."""

    status: str
    session_id: str
    folder: str
    pid: int | None = None
    app: str = ""
    job: str = ""
    reason: str = ""
    state: str = ""
    why: str = ""
    counts: dict[str, int] = msgspec.field(default_factory=dict)
    lost: int = 0


class Result(msgspec.Struct):
    """``unmatched``: what was chosen and is recorded nowhere here, as ``kind value``."""

    outcomes: list[Outcome]
    unmatched: list[str]


def recorders(folders: Iterable[str], within_s: float = 5.0) -> list[Outcome]:
    """All recorders that live below these folders; those that do not answer have failed."""
    return trigger(folders, Choice(everything=True), Request("status"), within_s).outcomes


def trigger(folders: Iterable[str], choice: Choice, request: Request, within_s: float = 5.0) -> Result:
    """Tell every recorder that is meant, at the same time, ``within_s`` for each answer. Never raises: whatever goes
    wrong is the outcome of one recorder."""
    found = find_recorders(folders)
    wanted = set(choice.words())
    met: set[tuple[str, str]] = set()
    with ThreadPoolExecutor(min(_AT_ONCE, len(found)) or 1, thread_name_prefix="gpuflight-trigger") as pool:
        outcomes = list(pool.map(lambda folder: _told(folder, Request("status"), within_s), found))
        meant = []
        for outcome in outcomes:
            named = wanted & _words_of(outcome)
            met |= named
            if choice.everything or named:
                meant.append(outcome)
        if request.do != "status":
            reached = [outcome for outcome in meant if outcome.status == "done"]
            again = pool.map(lambda one: _told(one.folder, request, within_s, job=one.job), reached)
            replaced = {outcome.folder: outcome for outcome in again}
            meant = [replaced.get(outcome.folder, outcome) for outcome in meant]
    if wanted - met:  # those that do not answer may be the ones
        meant += [outcome for outcome in outcomes if outcome.status == "failed" and outcome not in meant]
    return Result(meant, sorted(" ".join(word) for word in wanted - met))


def _told(folder: str, request: Request, within_s: float, *, job: str = "") -> Outcome:
    session = os.path.basename(folder)
    try:
        answer = ask(folder, request, within_s)
    except SourceUnavailable as error:
        return Outcome("failed", session, folder, job=job, reason=str(error).splitlines()[0])
    return Outcome(
        "done" if answer.ok else "failed",
        answer.session_id or session,
        folder,
        pid=answer.here_pid or answer.pid or None,
        app=answer.app,
        job=job or _job(answer),
        reason=answer.error,
        state=answer.state,
        why=answer.why,
        counts=answer.counts,
        lost=answer.lost,
    )


def _words_of(outcome: Outcome) -> set[tuple[str, str]]:
    words = {("session", outcome.session_id), ("name", outcome.app), ("job", outcome.job)}
    return words | ({("pid", str(outcome.pid))} if outcome.pid is not None else set())


def _job(answer: Answer) -> str:
    """Of the launcher that started the process; empty if none did, or it may not be looked into."""
    try:
        with open(f"/proc/{answer.here_pid}/environ", "rb") as file:
            entries = file.read(_ENVIRONMENT_BYTES).split(b"\0")
    except OSError:
        return ""
    texts = (entry.decode("utf-8", "replace").partition("=") for entry in entries)
    facts = job_facts({name: value for name, _, value in texts}, socket.gethostname())
    return str(facts.attributes.get("job", ""))
