"""Summaries of GPU sessions in a real MongoDB: what the store says, once, whoever writes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("duckdb")
from pydantic import SecretStr
from tests.services.mongodb import MongoServer, new_database
from tests.unit.event_rows import batches, names
from tests.unit.events_fixture import SESSION, EventServer

from gpuflight.errors import DeliveryError
from gpuflight.events.store import EventStore
from gpuflight.events.store.parquet import ParquetStore
from gpuflight.server.events.settings import EventSummaries
from gpuflight.server.events.summaries import KERNELS, SESSIONS, Summaries, store_name
from gpuflight.sources.mongo_client import MongoOptions

DAY_NS = 86_400 * 10**9
START_NS = 20_000 * DAY_NS


@pytest.fixture
def database() -> str:
    return new_database()


@pytest.fixture
def summaries(mongodb: MongoServer, database: str) -> Iterator[Summaries]:
    made = Summaries(MongoOptions(uri=mongodb.uri, timeout_s=30), database)
    yield made
    made.close()


class Clock:
    now = START_NS

    def __call__(self) -> int:
        return self.now


def fill(store: EventStore, session: str, durations: list[int | None], **facts: Any) -> None:
    rows = [
        {"start_ns": START_NS + i, "duration_ns": duration, "kernel_id": 1, "stream_id": 7, "device_id": 0}
        for i, duration in enumerate(durations)
    ]
    store.write(
        [
            *batches("session_start", [{"time_ns": START_NS, **facts}], session),
            *batches("kernel", rows, session),
            *batches("name", names("kernel", {1: "gemm"}), session),
        ]
    )


def test_a_session_and_its_kernels_are_as_the_store_has_them(tmp_path: Path, summaries: Summaries) -> None:
    clock = Clock()
    store = EventStore(str(tmp_path / "store"), wall_ns=clock)
    try:
        fill(store, "one", [10, 20, None, 90], hostname="n1", app="train")
        assert summaries.publish(store) == 1
        found, count = summaries.sessions(hostname="n1", app="train")
        assert count == 1
        session = found[0]
        assert (session["_id"], session["start_ns"], session["records"]["kernel"]) == ("one", START_NS, 4)
        assert (session["complete"], session["end_ns"], session["kernel_lines_count"]) == (False, None, 1)
        assert summaries.sessions(hostname="n2") == ([], 0)
        line = summaries.kernels(session_id="one")[0]
        told = ("name", "stream_id", "device_id", "count", "durations_count", "total_ns", "min_ns", "max_ns", "p50_ns")
        assert [line[name] for name in (*told, "p99_ns")] == ["gemm", 7, 0, 4, 3, 120, 10, 90, 20, 90]
        assert summaries.publish(store) == 0  # nothing is new
        clock.now += 10
        fill(store, "one", [5])
        fill(store, "two", [1], hostname="n2")
        assert summaries.publish(store) == 2
        assert summaries.kernels(session_id="one")[0]["total_ns"] == 125
        assert [line["session_id"] for line in summaries.kernels(name="gemm")] == ["one", "two"]
        store.complete("two")
        assert summaries.publish(store) == 1
        store.remove([store.session("two")])  # type: ignore[list-item]
        assert summaries.publish(store) == 0
        assert [session["_id"] for session in summaries.sessions()[0]] == ["one"]
        assert summaries.kernels(session_id="two") == []
    finally:
        store.close()


def test_two_servers_of_one_store_write_each_session_once(
    tmp_path: Path, summaries: Summaries, mongodb: MongoServer, database: str
) -> None:
    stores = [ParquetStore(str(tmp_path / "store"), upkeep_interval_s=0) for _ in range(2)]
    other = EventStore(str(tmp_path / "other"))
    try:
        assert store_name(stores[0]) == store_name(stores[1]) != store_name(other)
        fill(stores[0], "one", [10], hostname="n1")
        fill(other, "far", [10], hostname="n9")
        stores[1].records.fleet.refresh()
        assert [summaries.publish(store) for store in (*stores, other)] == [1, 0, 1]
        stores[0].remove([stores[0].session("one")])  # type: ignore[list-item]
        assert summaries.publish(stores[0]) == 0
        assert [session["_id"] for session in summaries.sessions()[0]] == ["far"]  # of another store: stays
    finally:
        for store in (*stores, other):
            store.close()


def test_what_a_slower_server_still_writes_changes_nothing(
    tmp_path: Path, summaries: Summaries, mongodb: MongoServer, database: str
) -> None:
    clock = Clock()
    store = EventStore(str(tmp_path / "store"), wall_ns=clock)
    try:
        fill(store, "one", [10])
        old = store.session("one")
        assert old is not None
        clock.now += 10
        fill(store, "one", [20])
        summaries.publish(store)
        summaries._write(store, store_name(store), old, clock.now)
        with mongodb.client() as client:
            assert [d["received_ns"] for d in client[database][SESSIONS].find()] == [clock.now]
            assert [d["stamp"] for d in client[database][KERNELS].find()] == [clock.now]
    finally:
        store.close()


def test_a_server_keeps_them_up_to_date(tmp_path: Path, mongodb: MongoServer, database: str) -> None:
    settings = EventSummaries(uri=SecretStr(mongodb.uri), database=database, interval_s=3600)
    with EventServer(tmp_path, mongodb=settings.model_dump()) as server:
        server.events.start()
        assert server.window("device", 1)["window_acknowledged"]
        text = server.client.get("/metrics").text
        assert "gpuflight_events_failed_summaries_total 0" in text
        server.events._publisher._stopping.set()  # type: ignore[union-attr]
        server.events._publisher._thread.join(30)  # type: ignore[union-attr]
        assert "gpuflight_events_summaries_total 1" in server.client.get("/metrics").text
    with mongodb.client() as client:
        assert [document["_id"] for document in client[database][SESSIONS].find()] == [SESSION]
        assert client[database][KERNELS].count_documents({"session_id": SESSION}) > 0


def test_a_database_that_is_away_is_one_line_without_the_password(tmp_path: Path) -> None:
    store = EventStore(str(tmp_path / "store"))
    away = Summaries(MongoOptions(uri="mongodb://me:hush-hush@127.0.0.1:1", timeout_s=0.5), "gpuflight")
    try:
        fill(store, "one", [10])
        with pytest.raises(DeliveryError) as caught:
            away.publish(store)
        assert caught.value.retryable
        assert "hush" not in str(caught.value)
        assert "\n" not in str(caught.value)
    finally:
        away.close()
        store.close()
