"""Which store a folder has, or is to have."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Literal

from gpuflight.errors import InputError
from gpuflight.events.store.retention import RetentionSettings
from gpuflight.events.store.store import EventStore

Kind = Literal["duckdb", "parquet"]


def kind_of(folder: str) -> Kind | None:
    """Which store lies in a folder; None: none does."""
    from gpuflight.events.store.commits import FOLDER

    if os.path.isdir(os.path.join(folder, FOLDER)):
        return "parquet"
    return "duckdb" if os.path.exists(os.path.join(folder, "sessions.sqlite")) else None


def open_store(
    folder: str,
    kind: Kind | None = None,
    *,
    retention: RetentionSettings | None = None,
    wall_ns: Callable[[], int] = time.time_ns,
    threads: int | None = None,
) -> EventStore:
    """Open a store: ``duckdb`` for one process (``EventStore``), ``parquet`` for a fleet (``ParquetStore``), None: the
    one that is there, else ``duckdb``. Raises InputError, also if one of the other kind is there."""
    there = kind_of(folder)
    if kind is not None and there is not None and kind != there:
        raise InputError(f"{folder}: an event store of the kind {there} is here; {kind} is asked for")
    if (kind or there) == "parquet":
        from gpuflight.events.store.parquet import ParquetStore

        return ParquetStore(folder, retention=retention, wall_ns=wall_ns, threads=threads)
    return EventStore(folder, retention=retention, wall_ns=wall_ns, threads=threads)
