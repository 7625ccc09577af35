"""Sessions from log folders, and traces of other profilers, into a store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import msgspec

from gpuflight.events.batch import Batch
from gpuflight.events.files import SessionFolder, SessionReader
from gpuflight.events.imports import Import
from gpuflight.events.ledger import Ledger
from gpuflight.events.store import EventStore, Source

_ROWS_AT_ONCE = 250_000
"""Rows of one transaction: each costs a sync of the disk, and their memory."""


class Loaded(msgspec.Struct, kw_only=True):
    """What was read. ``live``: sessions that somebody still writes; ``sources``: folder by session."""

    sessions: list[str] = msgspec.field(default_factory=list)
    live: set[str] = msgspec.field(default_factory=set)
    sources: dict[str, str] = msgspec.field(default_factory=dict)
    rows: int = 0


def size_of(folders: Iterable[SessionFolder]) -> int:
    """Bytes of all windows as they lie there; files that are gone count 0."""
    return sum(_size(window.path) for folder in folders for windows in folder.windows.values() for window in windows)


def load_folders(
    store: EventStore,
    folders: Iterable[SessionFolder],
    progress: Callable[[int], None] = lambda done_bytes: None,
    also: Callable[[list[Batch]], None] = lambda batches: None,
) -> Loaded:
    """Read folders (``events.files.find_sessions``) into a store that does not have them yet; their losses go with
    them. ``progress`` is told the bytes of the files that are done, ``also`` is given every batch."""
    loaded = Loaded()
    done = 0
    for folder in folders:
        reader = SessionReader(folder)
        waiting: list[Batch] = []
        rows = 0
        file = ""
        for batches in reader.blocks():
            for batch in batches:
                waiting.append(batch)
                rows += batch.count
            also(batches)
            if batches and batches[-1].place.file != file:
                done += _size(file)
                file = batches[-1].place.file
                progress(done)
            if rows >= _ROWS_AT_ONCE:
                loaded.rows += store.write(waiting).rows
                waiting, rows = [], 0
        loaded.rows += store.write(waiting).rows
        done += _size(file)
        progress(done)
        _finish(store, folder, reader, loaded)
    return loaded


def load_import(
    store: EventStore,
    trace: Import,
    progress: Callable[[int], None] = lambda done_bytes: None,
    also: Callable[[list[Batch]], None] = lambda batches: None,
) -> Loaded:
    """Read a file of another profiler (``events.imports``) into a store. What is there of it already, of an import
    before or one that was cut off, is not stored again. ``also`` is given every batch."""
    loaded = Loaded()
    for number, batches in enumerate(trace):
        also(batches)
        written = store.write(batches, Source(f"import {trace.identity}", number, number + 1))
        loaded.rows += written.rows
        for batch in batches:
            if batch.session_id not in loaded.sources:
                loaded.sessions.append(batch.session_id)
                loaded.sources[batch.session_id] = trace.path
        progress(trace.done_bytes)
    if loaded.sessions:
        store.write([], Source(f"losses of {trace.identity}", 0, 1, loaded.sessions[0]), trace.ledger)
    for session_id in loaded.sessions:
        store.complete(session_id)
    return loaded


def _finish(store: EventStore, folder: SessionFolder, reader: SessionReader, loaded: Loaded) -> None:
    """Losses, and which sessions there were. Those of flat files with several sessions are told for each: a damaged
    file may have held lines of any of them."""
    found = list(reader.decoder.sessions) or ([folder.session_id] if folder.session_id else [])
    live = folder.live()
    for session_id in found:
        place = os.path.join(folder.path, folder.base)
        store.write([], Source(f"losses of {place} for {session_id}", 0, 1, session_id), _of(reader.ledger, session_id))
        if session_id not in loaded.sources:
            loaded.sessions.append(session_id)
        loaded.sources[session_id] = place
        session = store.session(session_id)
        if live and session is not None and session.end_ns is None:
            loaded.live.add(session_id)


def _of(ledger: Ledger, session_id: str) -> Ledger:
    """What concerns a session: all but how other ones of the same files ended."""
    mine = Ledger()
    for entry in ledger:
        if entry.reason == "unclean_end" and entry.detail != session_id:
            continue
        mine.add(entry.reason, count=entry.count, size_bytes=entry.size_bytes, subject=entry.detail)
        for place in entry.places[:1]:
            mine.add(entry.reason, place, count=0, subject=entry.detail)
    return mine


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size if path else 0
    except OSError:
        return 0
