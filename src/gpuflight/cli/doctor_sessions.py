"""GPU sessions that were recorded, as the round that ``gpuflight doctor`` judges: whole logs, whatever their age.

The graph is that of the collector of sessions, made of the same sums; each session has the facts that need its records
side by side (``events.facts``) besides.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from gpuflight.cli.event_source import ReadProgress, temporary_store
from gpuflight.cli.output import clean
from gpuflight.collectors.base import Batch
from gpuflight.collectors.session_entities import Shown, add_sessions
from gpuflight.collectors.session_gpus import gpu_entities
from gpuflight.collectors.session_names import shown_name
from gpuflight.collectors.session_rates import Pace
from gpuflight.errors import InputError
from gpuflight.events.activity.session import Activity
from gpuflight.events.activity.summary import Summary
from gpuflight.events.facts import Facts, session_facts
from gpuflight.events.query.reader import Reader
from gpuflight.graph import Entity, nodes
from gpuflight.graph.store import LiveStore
from gpuflight.rounds import Coverage, Environment, Round

if TYPE_CHECKING:
    from gpuflight.events.batch import Batch as Records
    from gpuflight.events.files import SessionFolder
    from gpuflight.events.load import Loaded
    from gpuflight.events.store import EventStore

_KERNELS, _SCOPES, _STREAMS = 50, 50, 64
_WHY_NO_PROCESS = "it is over: read from its log"
_CALM = frozenset(("unclean_end", "open_window"))
"""What a ledger says of a session whose program still runs or was killed; nothing is missing for it."""


def recorded(path: str) -> Round:
    """All sessions of a folder, or of a trace of another profiler. Raises InputError, MissingExtra."""
    activities: dict[str, Activity] = {}

    def take(batches: list[Records]) -> None:
        for batch in batches:
            activity = activities.get(batch.session_id)
            if activity is None:
                activity = activities[batch.session_id] = Activity(batch.session_id)
            activity.add(batch)

    with temporary_store() as store:
        loaded = _load(store, path, take)
        sessions = [session for session in map(store.session, loaded.sessions) if session is not None]
        if not sessions:
            raise InputError(f"{path}: no graph.json, no rounds.jsonl and no GPU session in this folder")
        batch = Batch()
        losses: dict[str, int] = {}
        for session in sessions:
            activity = activities[session.session_id]
            for line in store.losses(session):
                if line["reason"] not in _CALM:
                    losses[line["reason"]] = losses.get(line["reason"], 0) + int(line["count"])
                    activity.lose(int(line["count"]))
            summary = activity.summary(most_kernels=_KERNELS, most_scopes=_SCOPES, most_streams=_STREAMS)
            summary.folder = loaded.sources.get(session.session_id, "")
            _add(batch, summary, session_facts(Reader(store, [session])))
    return _round(batch, losses, {session.session_id: session.hostname or "" for session in sessions})


def _load(store: EventStore, path: str, take: Callable[[list[Records]], None]) -> Loaded:
    from gpuflight.events.files import find_sessions
    from gpuflight.events.imports import open_import
    from gpuflight.events.load import load_folders, load_import, size_of

    if os.path.isfile(path):
        trace = open_import(path)
        with ReadProgress(f"reading {clean(path)} ({trace.kind})", os.path.getsize(path)) as progress:
            return load_import(store, trace, progress.done, take)
    folders = _one_of_each(find_sessions(path))
    with ReadProgress(f"reading {clean(path)}", size_of(folders)) as progress:
        return load_folders(store, folders, progress.done, take)


def _one_of_each(folders: list[SessionFolder]) -> list[SessionFolder]:
    """Of copies of one session the largest; flat files, which may hold any, as they are."""
    from gpuflight.events.load import size_of

    largest: dict[str, SessionFolder] = {}
    for folder in folders:
        key = folder.session_id or f"{folder.path}/{folder.base}"
        known = largest.get(key)
        if known is None or size_of([folder]) > size_of([known]):
            largest[key] = folder
    return list(largest.values())


def _add(batch: Batch, summary: Summary, facts: Facts) -> None:
    """The entities of a session, its own with the facts."""
    gpus = gpu_entities(summary.devices)
    shown = Shown(
        summary,
        Pace(summary, None, 0.0, quiet=True),
        f"Session({shown_name(summary.session_id)})",
        None,
        _WHY_NO_PROCESS,
        f"ended: {summary.end}" if summary.end else "recorded",
        gpus,
        unplaced=next(iter(gpus.values())) if len(gpus) == 1 else None,
    )
    made = Batch()
    add_sessions(made, [shown], nodes.Host(hostname=shown_name(summary.hostname) or "unknown"))
    batch.nodes += [_with(entity, facts) if isinstance(entity, nodes.Session) else entity for entity in made.nodes]
    batch.edges += made.edges


def _with(session: nodes.Session, facts: Facts) -> Entity:
    unknown = {name: why for name, why in (session.unknown or {}).items() if name not in facts.metrics}
    return msgspec.structs.replace(
        session,
        attributes={**session.attributes, **{name: shown_name(text) for name, text in facts.attributes.items()}},
        metrics={**session.metrics, **facts.metrics},
        unknown=unknown or None,
    )


def _round(batch: Batch, losses: dict[str, int], hosts: dict[str, str]) -> Round:
    """One round of all that was read."""
    advance = LiveStore().advance(1, [batch.nodes], [batch.edges])
    names = sorted({host for host in hosts.values() if host})
    return Round(
        number=1,
        time_ns=0,
        duration_s=0.0,
        graph=advance.graph,
        diff=advance.diff,
        coverage=[Coverage(collector="sessions", status="ok", losses=losses)],
        env=Environment(hostname=names[0] if len(names) == 1 else ""),
        monotonic_s=0.0,
    )
