"""The tests of sessions and of their comparison once more, with the store of a fleet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("duckdb")
from tests.unit import test_event_query_sessions
from tests.unit.test_event_query_sessions import Clock

from gpuflight.events.store.parquet import ParquetStore

for _name, _test in vars(test_event_query_sessions).items():
    if _name.startswith("test_"):
        globals()[_name] = _test


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[ParquetStore]:
    made = ParquetStore(str(tmp_path / "store"), threads=1, wall_ns=clock, upkeep_interval_s=0)
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ParquetStore]:
    made = ParquetStore(str(tmp_path_factory.mktemp("events") / "store"), threads=1, upkeep_interval_s=0)
    yield made
    made.close()
