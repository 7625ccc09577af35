"""GPU sessions as what a picture is made of: a graph of the session, its streams, scopes and kernels, and its timeline.

``load_session_picture`` reads a folder of logs, a trace of another profiler, or an event store.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from gpuflight.errors import InputError
from gpuflight.graph import Graph, edges, nodes
from gpuflight.vis.base import LayoutOptions
from gpuflight.vis.timeline import Timeline

if TYPE_CHECKING:
    from gpuflight.events.load import Loaded
    from gpuflight.events.query.reader import Reader
    from gpuflight.events.store import EventStore, Session

KERNELS_SHOWN = 30
SESSIONS_SHOWN = 16
"""Sessions in one picture, at most; the first ones."""
_SCOPES_SHOWN = 200
_open_stores: dict[str, EventStore] = {}
"""By folder: those of the pictures that are open. A picture is plain data, and DuckDB opens a file only once."""


class SessionPicture(msgspec.Struct):
    """What ``load_session_picture`` found: a graph to place and the timelines for ``LayoutOptions.timelines``."""

    graph: Graph
    timelines: list[Timeline]
    notes: list[str]


def with_sessions(options: LayoutOptions, pictures: Sequence[SessionPicture]) -> LayoutOptions:
    """Options that also draw the timelines of sessions; without a title they give one."""
    if not pictures:
        return options
    timelines = [timeline for picture in pictures for timeline in picture.timelines]
    label = timelines[0].label if len(timelines) == 1 else f"{len(timelines)} GPU sessions"
    return msgspec.structs.replace(
        options,
        title=options.title or label,
        notes=[*options.notes, *(note for picture in pictures for note in picture.notes)],
        timelines=[*options.timelines, *timelines],
    )


def is_session_input(path: str) -> bool:
    """Whether a path holds GPU sessions: a folder of logs, an event store, an export of Nsight Systems. Looks at names
    and first bytes only; False for what cannot be read."""
    from gpuflight.events.files import find_sessions
    from gpuflight.events.store.choose import kind_of

    try:
        if os.path.isdir(path):
            if os.path.exists(os.path.join(path, "graph.json")):
                return False  # a run folder, which may hold logs beside its graph
            return kind_of(path) is not None or bool(find_sessions(path))
        with open(path, "rb") as file:
            return file.read(16) == b"SQLite format 3\x00"
    except OSError:
        return False


@contextmanager
def load_session_picture(
    path: str, session: str | None = None, progress: Callable[[int], None] = lambda done_bytes: None
) -> Iterator[SessionPicture]:
    """The sessions at ``path``: a folder of logs, an event store, or a file of another profiler. ``session`` chooses by
    the first characters of an id. While it is open, renderers can read all records (``Timeline.store``).

    Raises InputError if there is no session, MissingExtra without DuckDB.
    """
    from gpuflight.events.store.choose import kind_of

    if os.path.isdir(path) and kind_of(path) is not None:
        with _open(path) as store:
            yield _picture(store, store.catalogue.find()[0], path, session)
        return
    folder = tempfile.mkdtemp(prefix="gpuflight-")
    try:
        with _open(folder) as store:
            loaded = _load(store, path, session, progress)
            found = [each for each in map(store.session, loaded.sessions) if each is not None]
            yield _picture(store, found, path, session)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _open(folder: str) -> Iterator[EventStore]:
    from gpuflight.events.store.choose import kind_of, open_store

    store = open_store(folder, kind_of(folder) or "duckdb")
    _open_stores[folder] = store
    try:
        yield store
    finally:
        del _open_stores[folder]
        store.close()


def records_of(timeline: Timeline) -> Reader | None:
    """All records of the session of a timeline; None if its picture is closed, or it is of no store."""
    from gpuflight.events.query.reader import Reader

    store = _open_stores.get(timeline.store)
    session = store.session(timeline.session_id) if store is not None else None
    return Reader(store, [session]) if store is not None and session is not None else None


def _load(store: EventStore, path: str, session: str | None, progress: Callable[[int], None]) -> Loaded:
    from gpuflight.events.files import find_sessions
    from gpuflight.events.imports import open_import
    from gpuflight.events.load import load_folders, load_import

    if os.path.isfile(path):
        return load_import(store, open_import(path), progress)
    folders = find_sessions(path) if os.path.isdir(path) else []
    if not folders:
        raise InputError(f"{path}: no GPU session in this folder or three levels below it")
    if session:
        folders = [folder for folder in folders if not folder.session_id or folder.session_id.startswith(session)]
    return load_folders(store, folders, progress)


def _picture(store: EventStore, found: Sequence[Session], path: str, wanted: str | None) -> SessionPicture:
    from gpuflight.events.query.reader import Reader

    chosen = [each for each in found if each.session_id.startswith(wanted or "")]
    if not chosen:
        raise InputError(
            f"{path}: no session {wanted}" if wanted else f"{path}: there is no event of any session in it"
        )
    chosen.sort(key=lambda each: (each.start_ns or each.first_event_ns or 0, each.session_id))
    notes = []
    if len(chosen) > SESSIONS_SHOWN:
        notes.append(f"only the first {SESSIONS_SHOWN} sessions are drawn: choose others by their id")
        del chosen[SESSIONS_SHOWN:]
    graph = Graph()
    timelines = [_add(graph, Reader(store, [each])) for each in chosen]
    for timeline in timelines:
        timeline.store = store.folder
        notes += timeline.notes if len(timelines) == 1 else [f"{timeline.label}: {note}" for note in timeline.notes]
    return SessionPicture(graph, timelines, notes)


def _add(graph: Graph, reader: Reader) -> Timeline:
    """Add a session with its streams, scopes and kernels to a graph; returns its timeline."""
    from gpuflight.events.query.kernels import top_kernels
    from gpuflight.events.query.scopes import scope_tree
    from gpuflight.vis.session_lanes import read_timeline, streams_of

    session = reader.sessions[0]
    facts = {name: getattr(session, name) for name in ("app", "hostname", "pid", "session_kind", "run_id")}
    known = {name: value for name, value in facts.items() if value not in (None, "")}
    entity = nodes.Session(session_id=session.session_id, attributes={"name": session.app or "", **known})
    page = top_kernels(reader, limit=KERNELS_SHOWN)
    entity.metrics = {
        "kernels_count": page.lines_count,
        "launches_count": page.count,
        "gpu_time_ms": page.total_ns / 1e6,
    }
    graph.try_add_node(entity)
    if session.app:
        application = nodes.Application(name=session.app)
        if application.id not in graph.nodes:
            graph.try_add_node(application)
        graph.try_add_edge(edges.Belong(entity.id, application.id))
    ids: dict[tuple[int | None, int | None], str] = {}
    for row in streams_of(reader):
        device, number = row["device_id"], row["stream_id"]
        if number is None:
            continue
        stream = nodes.Stream(
            process=entity.id if device is None else f"{entity.id},GPU {device}",
            stream=number,
            metrics={"launches_count": row["launches"], "copies_count": row["copies"]},
        )
        for name, value, factor in (("gpu_time_ms", row["kernels_ns"], 1e-6), ("copied_bytes", row["copied_bytes"], 1)):
            if value is not None:
                stream.metrics[name] = round(float(value) * factor, 6) if factor != 1 else int(value)
        ids[device, number] = stream.id
        graph.try_add_node(stream)
        graph.try_add_edge(edges.Belong(stream.id, entity.id))
    for line in page.lines:
        kernel = nodes.Kernel(
            process=entity.id,
            name=line.name or f"kernel #{line.kernel_id}",
            metrics={"launches_count": line.count, "gpu_time_ms": line.total_ns / 1e6, "mean_us": line.mean_ns / 1e3},
        )
        if line.share is not None:
            kernel.metrics["session_share_pct"] = 100 * line.share
        if graph.try_add_node(kernel):
            graph.try_add_edge(edges.Belong(kernel.id, entity.id))
    for scope in scope_tree(reader).nodes[:_SCOPES_SHOWN]:
        made = nodes.Scope(
            session_id=session.session_id,
            path=scope.path,
            attributes={"name": scope.name or "", "depth": scope.depth},
            metrics={"runs_count": scope.count, "open_count": scope.open_count, "time_ms": scope.inclusive_ns / 1e6},
        )
        if graph.try_add_node(made):
            graph.try_add_edge(edges.Belong(made.id, entity.id))
    label = f"{session.app or 'session'} · {session.session_id[:8]}"
    return read_timeline(reader, entity.id, label, ids)
