"""Every question about events, answered by the store of a fleet: the tests of the queries once more, with its files."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("duckdb")
from tests.unit import (
    test_event_query_kernels,
    test_event_query_memory,
    test_event_query_scopes,
    test_event_query_time,
)

from gpuflight.events.store.parquet import ParquetStore

for _module in (
    test_event_query_kernels,
    test_event_query_memory,
    test_event_query_scopes,
    test_event_query_time,
):
    _about = _module.__name__.rpartition("_")[2]
    for _name, _test in vars(_module).items():
        if _name.startswith("test_"):
            globals()[f"test_{_about}_{_name[5:]}"] = _test


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ParquetStore]:
    made = ParquetStore(str(tmp_path_factory.mktemp("events") / "store"), threads=1, upkeep_interval_s=0)
    yield made
    made.close()
