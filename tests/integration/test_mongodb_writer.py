"""Rounds written into a database over the real wire, and read back: the graph, whatever happened in between."""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pymongo.monitoring
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.examples import examples
from tests.services.mongodb import MongoServer, new_database
from tests.strategies import graphs

from gpuflight.errors import DeliveryError
from gpuflight.graph import Entity, Graph, nodes
from gpuflight.graph.diff import diff
from gpuflight.graph.edges import SendTo
from gpuflight.round_documents import StoredRound
from gpuflight.sources.mongo_client import MongoOptions
from gpuflight.subscribers import mongo_batches, mongo_writer
from gpuflight.subscribers.mongo_writer import MongoWriter

TIMEOUT_S = 60.0


@pytest.fixture
def database() -> str:
    return new_database()


@pytest.fixture
def writer(mongodb: MongoServer, database: str) -> Iterator[MongoWriter]:
    made = MongoWriter(MongoOptions(uri=mongodb.uri, timeout_s=TIMEOUT_S), database)
    made.open()
    yield made
    made.close()


@pytest.fixture
def raw(mongodb: MongoServer, database: str) -> Iterator[Any]:
    """The database, as anybody sees it."""
    with mongodb.client() as client:
        yield client[database]


def process(pid: int, **metrics: float) -> Entity:
    return nodes.Process(pid=pid, start=1, attributes={"name": f"p{pid}"}, metrics=metrics)


def stored(number: int, graph: Graph, before: Graph | None = None, **values: Any) -> StoredRound:
    more: dict[str, Any] = {"instance": "run-1", "time_ns": number * 1_000_000_000, "namespace": "node-1", **values}
    if before is not None:
        more.update(diff=diff(before, graph), base=number - 1)
    return StoredRound(number=number, graph=graph, **more)


FIRST = Graph([process(1), process(2, cpu_pct=1.5)], [SendTo("Process(pid=1,start=1)", "Process(pid=2,start=1)")])
SECOND = Graph([process(2, cpu_pct=2.5), process(3)], [SendTo("Process(pid=2,start=1)", "Process(pid=3,start=1)")])


@pytest.mark.parametrize("with_difference", [True, False])
def test_only_what_changed_is_written(writer: MongoWriter, raw: Any, with_difference: bool) -> None:
    first = writer.write(stored(1, FIRST))
    assert (first.outcome, first.compared, first.entities_count, first.edges_count) == ("written", True, 2, 1)
    assert writer.graph("node-1") == FIRST
    second = writer.write(stored(2, SECOND, FIRST if with_difference else None))
    assert (second.outcome, second.compared) == ("written", False)
    assert (second.entities_count, second.edges_count, second.gone_count) == (2, 1, 2)
    assert writer.graph("node-1") == SECOND
    changed = raw.entities.find_one({"_id": "node-1/Process(pid=2,start=1)"})
    assert (changed["first_round"], changed["round"], changed["seq"]) == (1, 2, 2)
    gone = raw.entities.find_one({"_id": "node-1/Process(pid=1,start=1)"})
    assert gone["gone"] and gone["expire_at"] > dt.datetime(2026, 1, 1)
    untouched = writer.write(stored(3, SECOND, SECOND))
    assert (untouched.entities_count, untouched.edges_count, untouched.gone_count) == (0, 0, 0)
    back = writer.write(stored(4, FIRST, SECOND))
    assert back.outcome == "written" and writer.graph("node-1") == FIRST
    assert raw.entities.find_one({"_id": "node-1/Process(pid=1,start=1)"})["expire_at"] is None


def test_repeats_and_older_rounds_change_nothing(writer: MongoWriter, raw: Any) -> None:
    for number, graph in ((1, FIRST), (2, SECOND)):
        writer.write(stored(number, graph))

    def everything() -> list[Any]:
        return [
            list(raw[name].find().sort("_id")) for name in ("namespaces", "entities", "edges", "rounds", "findings")
        ]

    before = everything()
    assert writer.write(stored(2, SECOND)).outcome == "repeated"
    assert writer.write(stored(1, FIRST)).outcome == "older"
    assert writer.write(stored(9, FIRST, instance="run-0", time_ns=5)).outcome == "older"
    assert everything() == before
    newer = writer.write(stored(1, FIRST, instance="run-2", time_ns=3_000_000_000))
    assert newer.outcome == "written" and writer.graph("node-1") == FIRST
    assert writer.write(stored(3, SECOND, time_ns=9_000_000_000)).outcome == "older"  # of run-1, which run-2 replaced


def test_another_process_goes_on_with_what_is_there(writer: MongoWriter, mongodb: MongoServer, database: str) -> None:
    writer.write(stored(1, FIRST))
    other = MongoWriter(MongoOptions(uri=mongodb.uri, timeout_s=TIMEOUT_S), database)
    other.open()
    try:
        assert other.head("node-1") is not None and other.head("node-2") is None
        whole = other.write(stored(2, SECOND))
        assert whole.compared and (whole.entities_count, whole.edges_count, whole.gone_count) == (2, 1, 2)
        # What the first one remembers is not what is there any more.
        assert writer.write(stored(3, FIRST)).compared
        assert writer.graph("node-1") == FIRST
        assert not other.write(stored(4, SECOND, FIRST)).compared  # a difference to the very round that is there
        assert writer.graph("node-1") == SECOND
    finally:
        other.close()


def test_namespaces_are_apart(writer: MongoWriter) -> None:
    writer.write(stored(1, FIRST))
    writer.write(stored(1, SECOND, namespace="node-10"))
    writer.write(stored(2, Graph()))
    assert writer.graph("node-1") == Graph() and writer.graph("node-10") == SECOND


@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(graphs(), min_size=2, max_size=4), st.booleans())
def test_whatever_rounds_hold(writer: MongoWriter, rounds: list[Graph], with_difference: bool) -> None:
    namespace = new_database()
    before = None
    for number, graph in enumerate(rounds, 1):
        writer.write(stored(number, graph, before if with_difference else None, namespace=namespace))
        before = graph
        assert writer.graph(namespace) == graph


def test_elements_beyond_16_mb(writer: MongoWriter, raw: Any) -> None:
    def graph(size: int) -> Graph:
        big = nodes.Device(name="big", attributes={"text": "x" * size})
        return Graph([big, process(1)], [SendTo(big.id, "Process(pid=1,start=1)", {"text": "y" * size})])

    sizes = [20_000_000, 10, 9_000_000]
    for number, size in enumerate(sizes, 1):
        writer.write(stored(number, graph(size)))
        assert writer.graph("node-1") == graph(size)
        left = list(raw.parts.find())
        assert bool(left) == (size > 10_000) and sum(len(part["data"]) for part in left) < 2 * size + 10_000
    writer.write(stored(4, Graph()))
    raw.entities.delete_many({})  # as the index on expire_at does, some time
    raw.edges.delete_many({})
    writer.write(stored(5, Graph()))
    assert not list(raw.parts.find())


def test_many_more_than_one_batch(writer: MongoWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mongo_batches, "BATCH_COUNT", 7)
    monkeypatch.setattr(mongo_batches, "BATCH_BYTES", 2000)
    graphs_of = [Graph([process(pid, v=number) for pid in range(number, number + 60)]) for number in range(3)]
    for number, graph in enumerate(graphs_of, 1):
        writer.write(stored(number, graph))
        assert writer.graph("node-1") == graph


def test_findings_begin_and_end(writer: MongoWriter, raw: Any) -> None:
    finding = {
        "id": "H11(GPU(GPU-1))",
        "rule": "H11",
        "severity": "critical",
        "message": "lost",
        "evidence": {"a.b": 1},
    }
    writer.write(stored(1, FIRST, findings=[finding]))
    writer.write(stored(2, FIRST, FIRST, findings=[finding]))
    [found] = raw.findings.find()
    assert (found["first_round"], found["round"], found["gone"], found["severity"]) == (1, 2, False, "critical")
    writer.write(stored(3, FIRST, FIRST))
    [found] = raw.findings.find()
    assert found["gone"] and found["expire_at"] is not None


def test_rounds_are_kept_for_a_while_with_their_coverage(writer: MongoWriter, raw: Any) -> None:
    writer.write(stored(1, FIRST, coverage=[{"collector": "nvml", "status": "skipped"}], env={"hostname": "h"}))
    [found] = raw.rounds.find()
    assert found["_id"] == "node-1/run-1/1" and found["coverage"][0]["collector"] == "nvml"
    left = found["expire_at"] - dt.datetime.now(dt.UTC).replace(tzinfo=None)
    assert dt.timedelta(days=6.9) < left < dt.timedelta(days=7.1)


def test_indexes_are_made_once_and_documents_end_by_themselves(
    writer: MongoWriter, mongodb: MongoServer, database: str, raw: Any
) -> None:
    for collection in mongo_writer.INDEXES:
        [ending] = [i for i in raw[collection].index_information().values() if "expireAfterSeconds" in i]
        assert ending["key"] == [("expire_at", 1)] and ending["expireAfterSeconds"] == 0
    before = {name: raw[name].index_information() for name in mongo_writer.INDEXES}
    again = MongoWriter(MongoOptions(uri=mongodb.uri, timeout_s=TIMEOUT_S), database)
    again.open()
    again.close()
    assert {name: raw[name].index_information() for name in mongo_writer.INDEXES} == before


def test_a_database_that_was_emptied_set_back_or_lost_its_heads(writer: MongoWriter, raw: Any) -> None:
    for number, graph in ((1, FIRST), (2, SECOND), (3, FIRST)):
        writer.write(stored(number, graph))
    raw.namespaces.delete_many({})
    assert writer.write(stored(4, SECOND, FIRST)).compared
    assert writer.graph("node-1") == SECOND
    for name in ("namespaces", "entities", "edges", "rounds"):
        raw[name].delete_many({})
    assert writer.write(stored(5, FIRST, SECOND)).compared
    assert writer.graph("node-1") == FIRST
    kept = {name: list(raw[name].find()) for name in ("namespaces", "entities", "edges")}
    writer.write(stored(6, SECOND, FIRST))
    for name, documents in kept.items():
        raw[name].delete_many({})
        raw[name].insert_many(documents)
    writer.write(stored(6, FIRST, instance="run-2", time_ns=9 * 10**9))  # counted as 2 again
    raw.namespaces.update_one({}, {"$set": {"instance": "run-1", "round": 6}})
    assert writer.write(stored(7, SECOND)).outcome == "written"
    assert writer.graph("node-1") == SECOND


# --- several writers, and writers that die ---------------------------------------------------------------------------


class Died(Exception):
    """Stands for kill -9."""


def test_a_writer_that_died_in_the_middle(
    writer: MongoWriter, mongodb: MongoServer, database: str, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.write(stored(1, FIRST))
    sent: list[str] = []

    def dying(table: Any, batch: Any) -> Any:
        sent.append(table.name)
        if table.name == "edges":
            raise Died
        return whole(table, batch)

    whole = mongo_batches.bulk
    monkeypatch.setattr(mongo_batches, "bulk", dying)
    with pytest.raises(Died):
        writer.write(stored(2, SECOND, FIRST))
    monkeypatch.undo()
    assert sent == ["entities", "entities", "edges"]
    head = raw.namespaces.find_one()
    assert head["seq"] == 2 and head["complete_seq"] == 1, "a reader can tell that a round is half written"
    other = MongoWriter(MongoOptions(uri=mongodb.uri, timeout_s=TIMEOUT_S), database)
    other.open()
    try:
        assert other.write(stored(2, SECOND, FIRST)).compared
        assert other.graph("node-1") == SECOND
        assert other.write(stored(3, FIRST, SECOND)).compared, "what the dead one sent may still arrive"
    finally:
        other.close()


def test_a_slow_writer_overwrites_nothing_newer(
    writer: MongoWriter, mongodb: MongoServer, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hangs after it took its number; another writes the next round; then it goes on."""
    writer.write(stored(1, FIRST))
    third = Graph([process(2, cpu_pct=9.5)])
    other = MongoWriter(MongoOptions(uri=mongodb.uri, timeout_s=TIMEOUT_S), database)
    other.open()
    whole = mongo_batches.bulk
    hangs, goes_on = threading.Event(), threading.Event()

    def slow(table: Any, batch: Any) -> Any:
        if threading.current_thread() is thread and not goes_on.is_set():
            hangs.set()
            assert goes_on.wait(TIMEOUT_S)
        return whole(table, batch)

    failed: list[DeliveryError] = []

    def write() -> None:
        try:
            writer.write(stored(2, SECOND, FIRST))
        except DeliveryError as error:
            failed.append(error)

    thread = threading.Thread(target=write)
    monkeypatch.setattr(mongo_batches, "bulk", slow)
    try:
        thread.start()
        assert hangs.wait(TIMEOUT_S)
        assert other.write(stored(3, third)).compared
        goes_on.set()
        thread.join(TIMEOUT_S)
        [error] = failed
        assert error.retryable and "another writer" in str(error)
        assert writer.write(stored(2, SECOND, FIRST)).outcome == "older"
        # An element that the slow one wrote and the other had no reason to is put right by the next round.
        fourth = replace(process(2, cpu_pct=9.5), attributes={"name": "again"})
        assert other.write(stored(4, Graph([fourth]), third)).compared
        assert other.graph("node-1") == Graph([fourth])
    finally:
        goes_on.set()
        other.close()


def test_many_writers_of_one_namespace_at_once(mongodb: MongoServer, database: str) -> None:
    """As two consumers around a rebalance: the newest round stands at the end, whole."""
    rounds = [Graph([process(pid, v=number) for pid in range(number, number + 8)]) for number in range(12)]
    writers = [MongoWriter(MongoOptions(uri=mongodb.uri, timeout_s=TIMEOUT_S), database) for _ in range(3)]

    def write_all(writer: MongoWriter) -> None:
        writer.open()
        for number, graph in enumerate(rounds, 1):
            deadline_s = time.monotonic() + TIMEOUT_S
            while time.monotonic() < deadline_s:
                try:
                    writer.write(stored(number, graph))
                    break
                except DeliveryError as error:
                    assert error.retryable, error

    threads = [threading.Thread(target=write_all, args=(writer,)) for writer in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * TIMEOUT_S)
    # Whoever was last to take over makes sure with the next round.
    writers[0].write(stored(len(rounds) + 1, rounds[-1]))
    assert writers[0].graph("node-1") == rounds[-1]
    head = writers[0].head("node-1")
    assert head is not None and head.complete and head.round == len(rounds) + 1
    for writer in writers:
        writer.close()


def test_every_filter_leads_to_one_shard(mongodb: MongoServer, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cluster runs here; that each write has the shard key (namespace and ``_id``), each read its first part, can be
    seen all the same, and that no write sets a shard key anew."""
    seen: list[tuple[str, str, dict[str, Any]]] = []
    changed: list[tuple[str, set[str]]] = []

    class Listener(pymongo.monitoring.CommandListener):
        def started(self, event: Any) -> None:
            name, command = event.command_name, event.command
            if name == "find":
                seen.append((name, command["find"], command["filter"]))
            for item in command.get("updates", ()):
                seen.append((name, command[name], item["q"]))
                changed.append((command[name], set(item["u"]["$set"])))
            for item in command.get("deletes", ()):
                seen.append((name, command[name], item["q"]))
            for item in command.get("documents", ()):
                seen.append((name, command[name], item))

        def succeeded(self, event: Any) -> None:
            pass

        failed = succeeded

    monkeypatch.setattr(pymongo, "MongoClient", partial(pymongo.MongoClient, event_listeners=[Listener()]))
    watched = MongoWriter(MongoOptions(uri=mongodb.uri, timeout_s=TIMEOUT_S), database)
    watched.open()
    big = nodes.Device(name="d", attributes={"text": "x" * 700_000})
    finding = {"id": "f", "rule": "H1", "severity": "warn"}
    watched.write(stored(1, Graph([*FIRST.nodes.values(), big]), findings=[finding]))
    watched.write(stored(2, SECOND))
    watched.graph("node-1")
    watched.close()
    assert {name for name, _, _ in seen} >= {"find", "insert", "update"}
    assert {collection for _, collection, _ in seen} == {*mongo_writer.INDEXES, "namespaces"}
    for name, collection, wanted in seen:
        if collection == "namespaces":
            assert wanted["_id"] == "node-1"
            continue
        assert wanted["namespace"] == "node-1", (name, collection, wanted)
        if name in ("insert", "update") and collection != "findings":
            assert isinstance(wanted["_id"], str), (name, collection, wanted)
    for collection, names in changed:
        assert collection == "namespaces" or not names & {"_id", "namespace"}, (collection, names)
