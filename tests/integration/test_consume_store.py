"""What the consumer reads back from a real database: graphs that differences start from, also after a writer died."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.fakes.topic import round_of
from tests.services.mongodb import MongoServer, new_database

from gpuflight.graph import Graph, edges, nodes
from gpuflight.round_codec import encode_round, encode_round_diff
from gpuflight.round_documents import StoredRound
from gpuflight.server.consume.merge import Merger
from gpuflight.server.consume.settings import ConsumeMongo
from gpuflight.server.consume.store import FleetWriter
from gpuflight.subscribers.kafka_wire import RoundMessage

ONE = nodes.Process(pid=1, start=1, attributes={"name": "init", "$odd.name": [1, 2]}, metrics={"cpu_pct": 1.5})
TWO = nodes.Process(pid=2, start=1, unknown={"cpu_pct": "not yet"})
LARGE = nodes.Process(pid=3, start=1, attributes={"cmdline": ["x" * 1000] * 700})
FIRST = Graph([ONE, TWO, LARGE], [edges.Own(ONE.id, TWO.id)])
SECOND = Graph([ONE, LARGE, nodes.Process(pid=4, start=1)], [edges.Own(ONE.id, LARGE.id)])


@pytest.fixture
def options(mongodb: MongoServer) -> Iterator[ConsumeMongo]:
    made = ConsumeMongo(uri=mongodb.uri, database=new_database(), timeout_s=20.0)  # type: ignore[arg-type]
    yield made
    with mongodb.client() as client:
        client.drop_database(made.database)


def message(number: int, graph: Graph, before: Graph | None = None) -> RoundMessage:
    done = round_of(number, graph, before)
    return RoundMessage(
        namespace="a",
        instance="i",
        number=number,
        time_ns=number,
        content="graph" if before is None else "diff",
        base=None if before is None else number - 1,
        data=encode_round(done) if before is None else encode_round_diff(done),
    )


def merger(options: ConsumeMongo) -> Merger:
    return Merger(FleetWriter(options.options(), options.database))


def stored(options: ConsumeMongo) -> StoredRound | None:
    writer = FleetWriter(options.options(), options.database)
    writer.open()
    try:
        return writer.load("a")
    finally:
        writer.close()


def test_a_graph_comes_back_as_it_was_also_what_is_too_large_for_a_document(options: ConsumeMongo) -> None:
    assert stored(options) is None
    first = merger(options)
    assert first.take(message(1, FIRST)) == "written"
    found = stored(options)
    assert found is not None and found.graph == FIRST and (found.instance, found.number) == ("i", 1)
    assert found.env["hostname"] == "box"
    first.close()
    # One that holds nothing yet applies the difference on what it reads.
    second = merger(options)
    assert second.take(message(2, SECOND, FIRST)) == "written"
    found = stored(options)
    assert found is not None and found.graph == SECOND and found.number == 2
    assert second.take(message(2, SECOND, FIRST)) == "duplicate"
    assert second.take(message(1, FIRST)) == "older"
    second.close()


def test_a_difference_is_finished_that_a_writer_died_at(mongodb: MongoServer, options: ConsumeMongo) -> None:
    first = merger(options)
    assert first.take(message(1, FIRST)) == "written"
    first.close()
    with mongodb.client() as client:  # as a writer leaves it that claimed the next round, and got half way
        database = client[options.database]
        database["namespaces"].update_one({"_id": "a"}, {"$inc": {"seq": 1}})
        database["entities"].update_one({"_id": f"a/{TWO.id}"}, {"$set": {"gone": True}, "$inc": {"seq": 1}})
    again = merger(options)
    assert again.take(message(2, SECOND, FIRST)) == "written"
    found = stored(options)
    assert found is not None and found.graph == SECOND and found.number == 2
    again.close()


def test_what_cannot_be_read_back_waits_for_a_whole_graph_which_repairs_it(
    mongodb: MongoServer, options: ConsumeMongo
) -> None:
    first = merger(options)
    assert first.take(message(1, FIRST)) == "written"
    first.close()
    with mongodb.client() as client:
        client[options.database]["parts"].delete_many({})
    again = merger(options)
    assert again.take(message(2, SECOND, FIRST)) == "waiting"
    whole = Graph([ONE, nodes.Process(pid=3, start=1, attributes={"cmdline": ["y" * 1000] * 700})])
    assert again.take(message(3, whole)) == "written"
    found = stored(options)
    assert found is not None and found.graph == whole
    again.close()
