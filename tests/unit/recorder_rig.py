"""A recorder over a played CUPTI, and what is in its files afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.fakes.cupti_driver import FakeCupti

from gpuflight.events.files import SessionReader, find_sessions
from gpuflight.events.ledger import Ledger
from gpuflight.events.recorder.binding import Binding
from gpuflight.events.recorder.options import KINDS, Options
from gpuflight.events.recorder.recorder import Recorder

UUID = bytes(range(1, 17))
UUID_TEXT = "GPU-01020304-0506-0708-090a-0b0c0d0e0f10"


def options(folder: Path, **more: Any) -> Options:
    facts: dict[str, Any] = {"app": "train", "folder": str(folder), "wait_for_cuda": False, "kinds": KINDS}
    facts |= {"metrics_interval_s": 0.0, "quiet": True, "gc_ranges": False, **more}
    return Options(**facts).checked()


@contextmanager
def recording(folder: Path, fake: FakeCupti | None = None, **more: Any) -> Iterator[tuple[Recorder, FakeCupti]]:
    """A recorder that has started; closed at the end."""
    fake = FakeCupti() if fake is None else fake
    recorder = Recorder(options(folder, **more), lambda: Binding(fake))
    assert recorder.start(), recorder.problem
    try:
        yield recorder, fake
    finally:
        recorder.close()
    assert not recorder.problem


class Read:
    """Rows of a session's files by table, and what the reader noted as lost."""

    def __init__(self, folder: Path) -> None:
        (found,) = find_sessions(str(folder))
        self.session_id = found.session_id
        self.ledger = Ledger()
        self.tables: dict[str, list[dict[str, Any]]] = {}
        self.clocks: set[str] = set()
        for batch in SessionReader(found, self.ledger):
            self.tables.setdefault(batch.table, []).extend(batch.rows())
            self.clocks.add(batch.clock)

    def rows(self, table: str) -> list[dict[str, Any]]:
        return self.tables.get(table, [])

    def one(self, table: str) -> dict[str, Any]:
        (row,) = self.rows(table)
        return row

    def text(self, dictionary: str, identifier: int) -> str:
        (text,) = {r["text"] for r in self.rows("name") if (r["dictionary"], r["id"]) == (dictionary, identifier)}
        return str(text)

    def capability(self, feature: str) -> dict[str, Any]:
        """As it was told last."""
        return [row for row in self.rows("capability") if row["feature"] == feature][-1]

    @property
    def losses(self) -> dict[str, str]:
        """Reason → detail, of what is no repeat of an event for another channel."""
        return {entry.reason: entry.detail for entry in self.ledger if entry.reason != "channel_copy"}


def until(true: Callable[[], Any], patience_s: float = 10.0) -> None:
    """Wait for a thread to have done something."""
    end = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)
