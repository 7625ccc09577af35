"""The MongoDB subscriber on the real wire: what arrives is the graph, whatever happens to the store meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import pytest
from tests.services.mongodb import PASSWORD, USER, MongoServer, new_database
from tests.services.service import free_port
from tests.unit.server_fixture import small

from gpuflight.collectors.base import Collector
from gpuflight.core.controller import Controller
from gpuflight.errors import DeliveryError
from gpuflight.graph import Graph, edges, nodes
from gpuflight.graph.diff import diff
from gpuflight.registry import plugins
from gpuflight.round_documents import graph_from
from gpuflight.rounds import Environment, Round
from gpuflight.server.subscriber_manager import SubscriberManager
from gpuflight.settings import Settings
from gpuflight.sources.open import open_world
from gpuflight.subscribers.base import INSTANCE_ID
from gpuflight.subscribers.delivery import SubscriberSet
from gpuflight.subscribers.mongodb import MongoDB, MongoDBSettings
from gpuflight.subscribers.netguard import Rules

LONG_S = 90.0


@pytest.fixture
def members() -> Iterator[SubscriberSet]:
    members = SubscriberSet()
    yield members
    members.close(5.0)


def sink(server: MongoServer, database: str, **settings: Any) -> MongoDB:
    values = {"uri": server.uri, "database": database, "namespace": "node-1", "retry_first_s": 0.05, "retry_max_s": 0.2}
    return MongoDB(MongoDBSettings(**{**values, **settings}))


def read(server: MongoServer, database: str) -> Graph:
    with server.client() as client:
        return graph_from(client[database].entities.find(), client[database].edges.find())


def rounds_of(*graphs: Graph) -> list[Round]:
    made, before = [], Graph()
    for number, graph in enumerate(graphs, 1):
        made.append(
            Round(
                number=number,
                time_ns=time.time_ns(),
                duration_s=0.1,
                graph=graph,
                diff=diff(before, graph),
                coverage=[],
                env=Environment(hostname="h"),
            )
        )
        before = graph
    return made


def small_rounds(count: int) -> list[Round]:
    return rounds_of(*(Graph([nodes.Process(pid=pid, start=1) for pid in range(at, at + 5)]) for at in range(count)))


def large(nodes_count: int, edges_count: int, version: int) -> Graph:
    """1 % of it differs from version to version."""
    members: list[Any] = [
        nodes.Process(pid=pid, start=1, attributes={"name": f"w{pid}"}, metrics={"v": version if pid % 100 == 0 else 0})
        for pid in range(1, nodes_count + 1)
    ]
    links: list[Any] = [
        edges.SendTo(
            members[at % nodes_count].id,
            members[(at * 7 + at // nodes_count + 1) % nodes_count].id,
            {},
            {"v": version if at % 100 == 0 else 0},
        )
        for at in range(edges_count)
    ]
    return Graph(members, links)


def test_what_this_machine_shows_arrives_round_by_round(mongodb: MongoServer, members: SubscriberSet) -> None:
    database = new_database()
    members.add(sink(mongodb, database, namespace=None, policy="block", block_timeout_s=LONG_S, synchronous=True))
    collectors: list[Collector] = [cls() for cls in plugins(Collector).values()]
    controller = Controller(
        open_world(), settings=Settings(tombstone_rounds=1), collectors=collectors, subscribers=members
    )
    try:
        for _ in range(3):
            done = controller.run_round()
            assert members.flush(LONG_S)
            assert done.graph.nodes and read(mongodb, database) == done.graph
    finally:
        controller.close()
    [status] = members.status()
    assert status.statistics.sent == 3 and not status.statistics.last_error
    with mongodb.client() as client:
        heads = list(client[database].namespaces.find())
        assert [head["_id"] for head in heads] == [done.env.hostname] and heads[0]["round"] == 3
        assert client[database].rounds.count_documents({"instance": INSTANCE_ID}) == 3
        assert {line["collector"] for line in client[database].rounds.find_one()["coverage"]} >= {"host", "sockets"}


@pytest.mark.undisturbed
@pytest.mark.parametrize("policy", ["latest", "spool"])
def test_ten_thousand_nodes_and_forty_thousand_edges(
    mongodb: MongoServer, members: SubscriberSet, tmp_path: Path, policy: str
) -> None:
    database = new_database()
    members.add(sink(mongodb, database, policy=policy, spool_folder=str(tmp_path), deliver_deadline_s=120.0))
    first, second = rounds_of(large(10_000, 40_000, 1), large(10_000, 40_000, 2))
    for completed in (first, second):
        members.publish(completed)
        assert members.flush(2 * LONG_S), members.status()
        assert read(mongodb, database) == completed.graph
    changed_count = len(second.diff.nodes_changed) + len(second.diff.edges_changed)
    with mongodb.client() as client:
        written = [client[database][name].count_documents({"round": 2}) for name in ("entities", "edges")]
    assert sum(written) == changed_count == 500


def test_a_round_that_comes_twice_changes_nothing(mongodb: MongoServer) -> None:
    database = new_database()
    subscriber = sink(mongodb, database)
    subscriber.start()
    one, two = small_rounds(2)
    parcels = [subscriber.pack(completed, None) for completed in (one, two)]
    for parcel in (*parcels, *parcels, parcels[0]):
        subscriber.send(parcel)
    subscriber.deliver(one)
    subscriber.close()
    assert read(mongodb, database) == two.graph
    with mongodb.client() as client:
        assert client[database].namespaces.find_one()["seq"] == 2


def test_a_store_that_is_killed_gets_every_round_when_it_is_back(
    own_mongodb: Callable[[], MongoServer], members: SubscriberSet, tmp_path: Path
) -> None:
    server, database = own_mongodb(), new_database()
    server.start()
    members.add(
        sink(server, database, policy="spool", spool_folder=str(tmp_path), deliver_deadline_s=2.0, retention_days=0)
    )
    completed = small_rounds(12)
    for number, one in enumerate(completed, 1):
        if number in (4, 8):
            server.kill()
        if number in (6, 11):
            server.start()
        members.publish(one)
    assert members.flush(LONG_S), members.status()
    assert read(server, database) == completed[-1].graph
    with server.client() as client:
        assert sorted(found["round"] for found in client[database].rounds.find()) == list(range(1, 13))
        assert client[database].namespaces.find_one()["round"] == 12
    [status] = members.status()
    assert (status.statistics.sent, status.statistics.dropped) == (12, 0)


def test_what_waits_in_a_spool_is_of_the_run_that_made_it(mongodb: MongoServer) -> None:
    """A later process sends it; it still is the earlier one's round."""
    database = new_database()
    subscriber = sink(mongodb, database)
    subscriber.start()
    parcel = subscriber.pack(small_rounds(1)[0], None)
    subscriber.send(type(parcel)(number=7, time_ns=5, key="f00-7", data=parcel.data))
    subscriber.close()
    with mongodb.client() as client:
        head = client[database].namespaces.find_one()
    assert (head["instance"], head["time_ns"]) == ("f00", 5)


def test_a_damaged_parcel_costs_itself(mongodb: MongoServer) -> None:
    subscriber = sink(mongodb, new_database())
    subscriber.start()
    parcel = subscriber.pack(small_rounds(1)[0], None)
    for data in (b"", b"rubbish", parcel.data[:-5]):
        with pytest.raises(DeliveryError, match="stored round 1") as caught:
            subscriber.send(type(parcel)(number=1, time_ns=5, key="f00-1", data=data))
        assert not caught.value.retryable
    subscriber.close()


# --- who cannot deliver ----------------------------------------------------------------------------------------------


def one_line(subscriber: MongoDB) -> tuple[str, bool]:
    with pytest.raises(DeliveryError) as caught:
        subscriber.start()
        subscriber.deliver(small_rounds(1)[0])
    subscriber.close()
    text = str(caught.value)
    assert "\n" not in text and len(text) < 300 and "127.0.0.1" in text
    return text, caught.value.retryable


def test_nobody_there() -> None:
    subscriber = MongoDB(MongoDBSettings(uri=f"mongodb://127.0.0.1:{free_port()}", deliver_deadline_s=0.5))  # type: ignore[arg-type]
    started_s = time.monotonic()
    text, retryable = one_line(subscriber)
    assert retryable and "no server answers" in text and "refused" in text
    assert time.monotonic() - started_s < 10


def test_login(own_mongodb: Callable[[], MongoServer]) -> None:
    server, database = own_mongodb(), new_database()
    server.require_login()

    def with_login(login: str) -> MongoDB:
        return sink(server, database, uri=f"mongodb://{login}{server.address}/?authSource=admin")

    text, retryable = one_line(with_login(""))
    assert not retryable and "uthenticat" in text
    text, retryable = one_line(with_login(f"{USER}:{quote_plus(PASSWORD + 'x')}@"))
    assert (
        not retryable
        and "user or password refused" in text
        and PASSWORD not in text
        and quote_plus(PASSWORD) not in text
    )
    right = with_login(f"{USER}:{quote_plus(PASSWORD)}@")
    right.start()
    right.trial(small_rounds(1)[0])
    right.deliver(small_rounds(1)[0])
    right.close()


def test_tls(own_mongodb: Callable[[], MongoServer], tmp_path: Path) -> None:
    server, database = own_mongodb(), new_database()
    server.tls = True
    server.start()
    trusting = sink(server, database, tls_ca_file=str(server.ca_path))
    trusting.start()
    trusting.deliver(small_rounds(1)[0])
    trusting.close()
    text, retryable = one_line(sink(server, database, uri=f"{server.uri}/?tls=true", deliver_deadline_s=1.0))
    assert retryable and "certificate" in text.lower()
    text, retryable = one_line(sink(server, database, tls_ca_file=str(tmp_path / "absent.pem")))
    assert "absent.pem" in text or "No such file" in text


def test_a_trial_leaves_what_is_there_as_it_is(mongodb: MongoServer) -> None:
    database = new_database()
    subscriber = sink(mongodb, database)
    subscriber.start()
    one, two = small_rounds(2)
    subscriber.deliver(one)
    subscriber.trial(two)
    subscriber.close()
    assert read(mongodb, database) == one.graph
    with mongodb.client() as client:
        assert client[database].trials.count_documents({}) == 0 and client[database].rounds.count_documents({}) == 1


# --- set up from afar ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uri", "rules", "why"),
    [
        ("mongodb://localhost:{port}", Rules(url_hosts=("example.org",)), "not among"),
        ("mongodb://127.0.0.1:{port}", Rules(url_hosts=("127.0.0.1:1",)), "not|loopback"),
        ("mongodb://localhost:{port}/?tls=true", Rules(url_hosts=("localhost",), loopback=True), "TLS to a name"),
        (
            "mongodb://127.0.0.1:{port},127.0.0.1",
            Rules(url_hosts=("127.0.0.1",), loopback=True),
            "only the configuration",
        ),
    ],
)
def test_only_what_the_rules_allow(mongodb: MongoServer, uri: str, rules: Rules, why: str) -> None:
    subscriber = sink(mongodb, new_database(), uri=uri.format(port=mongodb.ports["main"]))
    subscriber.rules = rules
    with pytest.raises(DeliveryError, match=why) as caught:
        subscriber.start()
    assert not caught.value.retryable
    subscriber.close()


def test_from_afar_it_goes_to_the_address_that_was_checked(mongodb: MongoServer) -> None:
    database = new_database()
    subscriber = sink(mongodb, database, uri=f"mongodb://localhost:{mongodb.ports['main']}")
    subscriber.rules = Rules(url_hosts=("localhost",), loopback=True)
    subscriber.start()
    subscriber.deliver(small_rounds(1)[0])
    subscriber.close()
    assert len(read(mongodb, database).nodes) == 5


@pytest.mark.parametrize("host", ["169.254.169.254", "[fd00:ec2::254]", "0.0.0.0"])
def test_metadata_addresses_are_never_called(host: str) -> None:
    """Also not if the configuration says so."""
    subscriber = MongoDB(MongoDBSettings(uri=f"mongodb://{host}", deliver_deadline_s=0.5))  # type: ignore[arg-type]
    with pytest.raises(DeliveryError, match=r"never called|not the address") as caught:
        subscriber.start()
    assert not caught.value.retryable


def test_over_rest(mongodb: MongoServer, tmp_path: Path) -> None:
    """Made, tried, delivered to, shown without its connection string, brought back by the next process."""
    database, password = new_database(), "hunter2hunter2"
    body = {"type": "mongodb", "name": "db", "uri": mongodb.uri, "database": database, "namespace": "node-1"}
    with small() as served:
        served.subscribers.rules = Rules(url_hosts=("127.0.0.1",))
        served.subscribers.path = str(tmp_path / "subscribers.json")
        root = "/api/v1/subscribers"
        made = served.send("POST", root, 201, body).json()
        assert made["settings"]["uri"] == "********" and made["settings"]["database"] == database
        assert served.send("POST", f"{root}/db/test", 200).json()["ok"] is True
        served.round()
        assert served.subscribers.flush(LONG_S)
        assert read(mongodb, database).nodes.keys() == served.controller.latest.graph.nodes.keys()
        served.send("PATCH", f"{root}/db", 200, {"retention_days": 1})
        served.round()
        assert served.subscribers.flush(LONG_S), "the connection string is still known"
        for uri in (f"mongodb://u:{password}@10.9.9.9", f"mongodb://u:{password}@a,b", f"mongodb://u:{password}@h:x"):
            answer = served.client.post(root, json={**body, "name": "other", "uri": uri})
            assert answer.status_code in (403, 422), answer.text
            assert password not in answer.text
        [status] = served.get(root).json()["subscribers"]
        assert status["statistics"]["sent"] == 1 and mongodb.uri not in str(status)  # since it was changed
        again = SubscriberManager(served.subscribers.rules, served.subscribers.path)
        again.restore()
        assert again.names() == ["db"]
        again.close(5.0)
