"""Which GPU sessions a command works on: log folders, a store, read into one place to ask."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gpuflight.cli.output import clean, is_terminal, say
from gpuflight.errors import InputError

if TYPE_CHECKING:
    from gpuflight.events.files import SessionFolder
    from gpuflight.events.load import Loaded
    from gpuflight.events.store import EventStore
    from gpuflight.events.store.catalogue import Session

_BIG_BYTES = 8 << 20
"""From this size on reading takes long enough to say so."""


class Sessions:
    """Sessions to ask about. ``live``: ids of those that somebody still writes, None where only the store can tell;
    ``sources``: where each was read from."""

    def __init__(self, store: EventStore, sessions: list[Session]) -> None:
        self.store = store
        self.sessions = sessions
        self.live: set[str] | None = None
        self.sources: dict[str, str] = {}

    def state(self, session: Session) -> str:
        """``live``, ``ended``, ``died`` or ``silent``, if it is known better than the store can; else empty."""
        if self.live is None:
            return ""
        if session.end_ns is not None:
            return "died" if session.end_synthetic else "ended"
        return "live" if session.session_id in self.live else "silent"


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """``WHAT``, ``--store``, ``--session``."""
    parser.add_argument(
        "what", metavar="WHAT", help="a folder with logs, a trace of another profiler, or with --store a session's id"
    )
    parser.add_argument("--store", metavar="FOLDER", help="the event store that has the session")
    parser.add_argument(
        "--session", metavar="ID", help="of several sessions in DIR this one (its first characters do), or `all`"
    )


@contextmanager
def open_sessions(arguments: argparse.Namespace) -> Iterator[Sessions]:
    """The sessions that the arguments name. Raises InputError if there are none."""
    if arguments.store is not None:
        if arguments.session is not None:
            raise InputError("--session chooses in a folder of logs; with --store give the session's id itself")
        with _opened(arguments.store) as store:
            session = store.session(arguments.what)
            if session is None:
                raise InputError(f"{arguments.store}: no session {clean(arguments.what)}")
            yield Sessions(store, [session])
        return
    with _of_folder(arguments.what, arguments.session) as found:
        yield found


@contextmanager
def _opened(folder: str) -> Iterator[EventStore]:
    from gpuflight.events.store.choose import kind_of, open_store

    if kind_of(folder) is None:
        raise InputError(f"{folder}: no event store (it has a file sessions.sqlite, a fleet's a folder _gpuflight)")
    store = open_store(folder)
    try:
        yield store
    finally:
        store.close()


@contextmanager
def _of_folder(path: str, wanted: str | None) -> Iterator[Sessions]:
    from gpuflight.events.files import find_sessions

    if os.path.isfile(path):
        with temporary_store() as store:
            yield _import(store, path, wanted)
        return
    if not os.path.isdir(path):
        raise InputError(f"{path}: no such folder (a session of a store: give --store FOLDER)")
    folders = find_sessions(path)
    if not folders:
        raise InputError(f"{path}: no GPU session in this folder or three levels below it")
    if wanted not in (None, "all"):
        # The folders of a session have its name; flat files may have any.
        folders = [f for f in folders if not f.session_id or f.session_id.startswith(wanted or "")]
    with temporary_store() as store:
        yield _read(store, folders, path, wanted)


def _read(store: EventStore, folders: list[SessionFolder], path: str, wanted: str | None) -> Sessions:
    from gpuflight.events.load import load_folders, size_of

    with ReadProgress(f"reading {clean(path)}", size_of(folders)) as progress:
        loaded = load_folders(store, folders, progress.done)
    return _chosen(store, loaded, path, wanted)


def _import(store: EventStore, path: str, wanted: str | None) -> Sessions:
    from gpuflight.events.imports import open_import
    from gpuflight.events.load import load_import

    trace = open_import(path)
    with ReadProgress(f"reading {clean(path)} ({trace.kind})", os.path.getsize(path)) as progress:
        loaded = load_import(store, trace, progress.done)
    return _chosen(store, loaded, path, wanted)


def _chosen(store: EventStore, loaded: Loaded, path: str, wanted: str | None) -> Sessions:
    """The sessions that are wanted, in order of time."""
    ids = [i for i in loaded.sessions if wanted in (None, "all") or i.startswith(wanted or "")]
    if not ids:
        raise InputError(
            f"{path}: no session {clean(wanted)}" if wanted else f"{path}: there is no event of any session in it"
        )
    found = [session for session in map(store.session, ids) if session is not None]
    found.sort(key=lambda s: (s.start_ns or s.first_event_ns or 0, s.session_id))
    sessions = Sessions(store, found)
    sessions.live, sessions.sources = loaded.live, loaded.sources
    return sessions


@contextmanager
def temporary_store() -> Iterator[EventStore]:
    """A store of its own that is gone afterwards, also after SIGTERM."""
    from gpuflight.events.store import EventStore

    folder = tempfile.mkdtemp(prefix="gpuflight-")
    before = _end_on_terminate()
    store = None
    try:
        store = EventStore(folder)
        yield store
    finally:
        if store is not None:
            store.close()
        shutil.rmtree(folder, ignore_errors=True)
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _end_on_terminate() -> Any:
    """SIGTERM as an exception, so that temporary files are removed. The former handler, None off the main thread."""

    def terminated(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    try:
        return signal.signal(signal.SIGTERM, terminated)
    except ValueError:
        return None


class ReadProgress:
    """How much of some files is read: a bar on a terminal, one line at the start anywhere else, nothing for what is
    small."""

    def __init__(self, title: str, total_bytes: int) -> None:
        self._title = title
        self._total = total_bytes
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> ReadProgress:
        if self._total < _BIG_BYTES:
            return self
        if not is_terminal(sys.stderr) or os.environ.get("NO_COLOR"):
            say(f"{self._title} ({self._total / 1e6:.0f} MB)")
            return self
        from rich import progress

        from gpuflight.cli.output import console

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=20),
            progress.TaskProgressColumn(),
            progress.TimeRemainingColumn(),
            console=console(sys.stderr),
            transient=True,
        )
        self._bar.start()
        self._task = self._bar.add_task(self._title, total=self._total)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def done(self, done_bytes: int) -> None:
        """So many bytes are read."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done_bytes)
