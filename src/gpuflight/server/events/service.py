"""GPU sessions of one server: the store, opened when it is first needed, what takes events in, who may wait for it."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from gpuflight.errors import GpuflightError, InputError, MissingExtra
from gpuflight.server.events.figures import Figures
from gpuflight.server.events.publisher import SummaryPublisher
from gpuflight.server.events.settings import EventsSettings

if TYPE_CHECKING:
    from gpuflight.events.store import EventStore
    from gpuflight.events.store.catalogue import Session
    from gpuflight.server.events.ingest import Ingest
    from gpuflight.server.events.topics import Topics

log = logging.getLogger(__name__)

T = TypeVar("T")

_PACKAGES = ("duckdb", "numpy")
_RETRY_OPEN_S = 5.0
_IDLE_LOOK_S = 30.0


class EventsOff(GpuflightError):
    """There are no GPU sessions here, and why."""


class Busy(Exception):
    """More is being taken in than there is room for."""


def check_packages() -> None:
    """Raises MissingExtra, which names the extra, if something is not installed."""
    for package in _PACKAGES:
        if find_spec(package) is None:
            raise MissingExtra(package, "events", "GPU sessions")


class EventService:
    """``start``, ``stop``, and between them ``ingest`` and ``ask``. ``folder``: of the store."""

    def __init__(self, settings: EventsSettings, folder: str, *, wall_ns: Callable[[], int] = time.time_ns) -> None:
        self.settings = settings
        self.folder = folder
        self.figures = Figures()
        self.wall_ns = wall_ns
        self._lock = threading.Lock()
        self._store: EventStore | None = None
        self._ingest: Ingest | None = None
        self._refusal: tuple[float, str] | None = None
        self._stopping = threading.Event()
        self._timer: threading.Thread | None = None
        self._publisher: SummaryPublisher | None = None
        if settings.mongodb.uri is not None:
            self._publisher = SummaryPublisher(settings.mongodb, lambda: self._store)
        self._queries = ThreadPoolExecutor(settings.queries_count, thread_name_prefix="gpuflight-events-query")
        self.topics: Topics | None = None

    def start(self) -> None:
        """Begin to enforce retention. The store is opened when it is needed, or now if there is one. Raises
        MissingExtra."""
        check_packages()
        if self.settings.kafka is not None:
            from gpuflight.server.events.topics import make_topics

            self.topics = make_topics(self, self.settings.kafka)
            self.topics.start()
        self._timer = threading.Thread(target=self._keep_up, name="gpuflight-events-upkeep", daemon=True)
        self._timer.start()
        if self._publisher is not None:
            self._publisher.start()

    def stop(self, deadline_s: float) -> bool:
        """Store what is under way, and give the files back; False if that took too long."""
        until_s = time.monotonic() + deadline_s
        if self.topics is not None:
            self.topics.stop(deadline_s / 2)
        self._stopping.set()
        with self._lock:
            store, ingest = self._store, self._ingest
        in_time = ingest.close(max(0.1, deadline_s)) if ingest is not None else True
        # In a thread: a question that is being worked on may take longer than there is time.
        ending = threading.Thread(target=self._queries.shutdown, kwargs={"cancel_futures": True}, daemon=True)
        ending.start()
        ending.join(max(0.1, until_s - time.monotonic()))
        in_time = in_time and not ending.is_alive()
        if self._timer is not None:
            self._timer.join(max(0.1, until_s - time.monotonic()))
        if self._publisher is not None:
            in_time = self._publisher.stop(max(0.1, until_s - time.monotonic())) and in_time
        if store is not None and in_time:
            store.close()
        return in_time

    @property
    def store(self) -> EventStore:
        """The store. Raises EventsOff if it cannot be opened."""
        store = self._store
        return store if store is not None else self._open()[0]

    @property
    def ingest(self) -> Ingest:
        """What takes events in. Raises EventsOff."""
        ingest = self._ingest
        return ingest if ingest is not None else self._open()[1]

    @property
    def opened(self) -> Ingest | None:
        """What takes events in, if the store is open: opening it takes a moment."""
        return self._ingest

    def _open(self) -> tuple[EventStore, Ingest]:
        with self._lock:
            if self._store is not None and self._ingest is not None:
                return self._store, self._ingest
            if self._stopping.is_set():
                raise EventsOff("the server is stopping")
            if self._refusal is not None and time.monotonic() < self._refusal[0]:
                raise EventsOff(self._refusal[1])
            try:
                check_packages()
                from gpuflight.events.store import open_store
                from gpuflight.events.store.retention import RetentionSettings
                from gpuflight.server.events.ingest import Ingest

                keep = self.settings.retention
                retention = RetentionSettings(max_age_days=keep.max_age_days, max_bytes=keep.max_bytes)
                store = open_store(self.folder, self.settings.store, retention=retention, wall_ns=self.wall_ns)
            except (InputError, MissingExtra) as error:
                if self._refusal is None or self._refusal[1] != str(error):
                    log.error("%s", error)
                self._refusal = (time.monotonic() + _RETRY_OPEN_S, str(error))
                raise EventsOff(str(error)) from None
            self._refusal = None
            self._store, self._ingest = store, Ingest(store, self.settings, self.figures)
            return self._store, self._ingest

    async def ask(self, question: Callable[[EventStore], T]) -> T:
        """The answer to a question about what is stored, worked on in a thread."""
        return await self._in_thread(lambda: question(self.store))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        try:
            answer = asyncio.get_running_loop().run_in_executor(self._queries, work)
        except RuntimeError:  # the pool is shut
            raise EventsOff("the server is stopping") from None
        return await answer

    async def between_writes(self, work: Callable[[EventStore], T]) -> T:
        """Have something done while nothing is written, after all that waits to be."""
        ingest = await self._in_thread(lambda: self.ingest)
        done: T = await asyncio.wrap_future(ingest.writer.call(lambda: work(self.store)))
        return done

    def admit(self, size_bytes: int) -> None:
        """Make room for a request, or for more of its body. Raises Busy."""
        figures, settings = self.figures, self.settings
        if figures.waiting_bytes + size_bytes > settings.max_waiting_bytes and figures.waiting_bytes:
            raise Busy
        figures.waiting_bytes += size_bytes

    def enter(self) -> None:
        """One more request. Raises Busy."""
        if self.figures.waiting_requests >= self.settings.max_waiting_requests:
            raise Busy
        self.figures.waiting_requests += 1
        self.figures.requests += 1

    def leave(self, size_bytes: int) -> None:
        """A request is done with, its room is free."""
        self.figures.waiting_requests -= 1
        self.figures.waiting_bytes -= size_bytes

    def remove(self, store: EventStore, session: Session) -> None:
        """Delete a session. Only to be called by ``between_writes``."""
        self.ingest.decoders.forget_session(session.session_id)
        store.remove([session])
        self.figures.removed_sessions += 1

    def enforce_retention(self, store: EventStore) -> int:
        """Delete what is past its time. Only to be called by ``between_writes``, or the timer."""
        count = store.enforce_retention()
        if count:
            self.ingest.decoders.forget_all()
            self.figures.removed_sessions += count
            log.info("retention: %d sessions deleted", count)
        return count

    def state(self) -> dict[str, Any]:
        """What there is now, for metrics."""
        store, ingest, publisher = self._store, self._ingest, self._publisher
        return {
            "enabled": True,
            "summaries": (publisher.written_count, publisher.failed_count) if publisher is not None else None,
            "open": store is not None,
            "refusal": self._refusal[1] if self._refusal is not None else None,
            "store_bytes": _stored_bytes(store) if store is not None else None,
            "sessions": store.catalogue.count() if store is not None else None,
            "under_way": len(ingest.decoders) if ingest is not None else 0,
            "writes": ingest.writer.writes_count if ingest is not None else 0,
            "topics": [reader.figures for reader in self.topics.readers] if self.topics is not None else [],
            "failed_writes": ingest.writer.failed_count if ingest is not None else 0,
        }

    def _keep_up(self) -> None:
        """The timer's thread."""
        next_s = 0.0
        while not self._stopping.is_set():
            try:
                if time.monotonic() >= next_s and (self._store is not None or os.path.isdir(self.folder)):
                    next_s = time.monotonic() + self.settings.retention_interval_s
                    self.ingest.writer.call(lambda: self.enforce_retention(self.store)).result()
                if self._ingest is not None:
                    self._ingest.decoders.let_go_of_idle()
            except GpuflightError:
                pass  # told by who met it; tried again
            except Exception:
                log.exception("retention of events failed")
            self._stopping.wait(min(_IDLE_LOOK_S, self.settings.retention_interval_s))


def _stored_bytes(store: EventStore) -> int:
    """Records, and what was written last and is not yet among them."""
    try:
        log_bytes = os.path.getsize(store.records.path + ".wal")
    except OSError:
        log_bytes = 0
    return store.records.used_bytes() + log_bytes
