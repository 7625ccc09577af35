"""The thread that keeps the summaries of the sessions in MongoDB up to date."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from gpuflight.errors import GpuflightError
from gpuflight.server.events.settings import EventSummaries
from gpuflight.sources.mongo_client import MongoOptions

if TYPE_CHECKING:
    from gpuflight.events.store import EventStore

log = logging.getLogger(__name__)


class SummaryPublisher:
    """Writes what changed every ``settings.interval_s``. ``store``: the store, None while there is none. A database
    that is away is told once and tried again; what it missed it gets then, since what is written is what differs."""

    def __init__(self, settings: EventSummaries, store: Callable[[], EventStore | None]) -> None:
        self._settings = settings
        self._store = store
        self.written_count = 0
        self.failed_count = 0
        self._told = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpuflight-events-summaries", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, deadline_s: float) -> bool:
        """Write what changed last, and end; False if that took too long."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        from gpuflight.server.events.summaries import Summaries

        settings = self._settings
        if settings.uri is None:
            return
        options = MongoOptions(
            uri=settings.uri.get_secret_value(),
            timeout_s=settings.timeout_s,
            tls_ca_file=settings.tls_ca_file or "",
            tls_certificate_key_file=settings.tls_certificate_key_file or "",
        )
        summaries = Summaries(options, settings.database)
        last = False
        while not last:
            last = self._stopping.wait(settings.interval_s)
            try:
                store = self._store()
                if store is not None:
                    self.written_count += summaries.publish(store)
                    self._told = ""
            except GpuflightError as error:
                self.failed_count += 1
                if str(error) != self._told:
                    log.warning("summaries of GPU sessions: %s", error)
                self._told = str(error)
            except Exception:
                self.failed_count += 1
                log.exception("summaries of GPU sessions failed")
        summaries.close()
