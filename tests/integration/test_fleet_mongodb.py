"""A fleet out of a database, over the real wire: what hosts wrote is what a server shows, each in its namespace."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.fakes.machine import FakeMachine, empty_machine
from tests.integration.test_mongodb_sink import large
from tests.services.mongodb import MongoServer, new_database
from tests.services.service import free_port
from tests.strategies import graphs

from gpuflight.collectors import fleet_namespace
from gpuflight.collectors.base import Collector
from gpuflight.collectors.fleet import Fleet, FleetSettings
from gpuflight.core.controller import Controller
from gpuflight.graph import Graph, edges, nodes
from gpuflight.graph.diff import diff
from gpuflight.graph.namespaces import with_namespace
from gpuflight.registry import plugins
from gpuflight.round_documents import StoredRound
from gpuflight.server.app import create_app
from gpuflight.server.hub import StreamHub
from gpuflight.server.state import ServerState
from gpuflight.server.subscriber_manager import SubscriberManager
from gpuflight.server.tokens import TokenStore
from gpuflight.settings import Settings
from gpuflight.sources.mongo_client import MongoOptions
from gpuflight.sources.open import open_world
from gpuflight.subscribers.mongo_writer import MongoWriter

TIMEOUT_S = 60.0
SHOWN = ("name", "database", "machine_id", "boot_id", "gpuflight_version", "stale")
AGES = ("round_age_s", "stale_s")


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
def fleet(mongodb: MongoServer, database: str) -> Iterator[Fleet]:
    made = make(mongodb, database)
    yield made
    made.close()


def make(server: MongoServer, database: str, **settings: Any) -> Fleet:
    """It looks when it is told to."""
    fleet = Fleet(FleetSettings(**{"uri": server.uri, "database": database, "timeout_s": TIMEOUT_S, **settings}))
    fleet._poll = lambda _: None  # type: ignore[method-assign]
    return fleet


def stored(namespace: str, number: int, graph: Graph, before: Graph | None = None, **values: Any) -> StoredRound:
    if before is not None:
        values.update(diff=diff(before, graph), base=number - 1)
    return StoredRound(
        namespace=namespace, number=number, graph=graph, **{"instance": "run", "time_ns": number * 10**9, **values}
    )


def shown(fleet: Fleet, machine: Any = None) -> Graph:
    """What the next round has of it, less what is said of the reading."""
    fleet.notes.clear()
    fleet.losses.clear()
    fleet.observe(machine or live())
    batch = fleet.seed()
    found = Graph()
    for entity in batch.nodes:
        if type(entity) is nodes.Host and "database" in entity.attributes:
            attributes = {name: value for name, value in entity.attributes.items() if name not in SHOWN}
            metrics = {name: value for name, value in entity.metrics.items() if name not in AGES}
            if not attributes and not metrics and "cpus_count" not in entity.metrics:
                continue  # made for a namespace without a host
            entity = type(entity)(hostname=entity.hostname, ns=entity.ns, attributes=attributes, metrics=metrics)
        found.try_add_node(entity)
    for edge in batch.edges:
        found.try_add_edge(edge)
    return found


def live() -> Any:
    """A world that may ask a database, and nothing else."""
    world = FakeMachine(empty_machine(), tape=False).next_round()
    world.mongo = type(world.mongo)()
    return world


def expected(**graphs_of: Graph) -> Graph:
    whole = Graph()
    for name, graph in graphs_of.items():
        dangling = {edge.key for edge in graph.dangling()}
        kept = {key: edge for key, edge in graph.edges.items() if key not in dangling}
        whole = whole + with_namespace(Graph.of(graph.nodes, kept), name)
    return whole


def some(*pids: int, **metrics: float) -> Graph:
    host = nodes.Host(hostname="h", metrics={"cpus_count": 4})
    processes = [nodes.Process(pid=pid, start=1, metrics=metrics) for pid in pids]
    return Graph([host, *processes], [edges.Host(host.id, process.id) for process in processes])


def test_every_host_in_its_namespace_and_only_what_changed_is_read(
    writer: MongoWriter, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = some(*range(1, 40)), some(*range(2, 41))
    for name in ("a", "b"):
        writer.write(stored(name, 1, first))
    fleet.look()
    assert shown(fleet) == expected(a=first, b=first)
    assert not fleet.notes
    read: list[str] = []
    monkeypatch.setattr(fleet_namespace, "sound", lambda element: read.append(element.id) or element)
    writer.write(stored("b", 2, second, first))
    fleet.look()
    assert shown(fleet) == expected(a=first, b=second)
    assert sorted(read) == ["Host(Host(h)->Process(pid=40,start=1))", "Process(pid=40,start=1)"]
    fleet.look()
    assert len(read) == 2, "nothing changed, nothing was read"


def test_nothing_is_made_anew_for_what_did_not_change(writer: MongoWriter, fleet: Fleet) -> None:
    """The store of a round tells by identity what is as it was."""
    writer.write(stored("a", 1, some(1, 2)))
    fleet.look()
    fleet.observe(live())
    before = list(fleet.seed().nodes)
    writer.write(stored("a", 2, some(1, 2, 3)))
    fleet.look()
    fleet.observe(live())
    fresh = [entity.kind for entity in fleet.seed().nodes if not any(entity is old for old in before)]
    assert sorted(fresh) == ["Host", "Process"]  # its host tells the age, and the new process


@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(graphs(), st.booleans(), st.booleans()), min_size=1, max_size=4))
def test_whatever_rounds_hold(
    writer: MongoWriter, mongodb: MongoServer, database: str, rounds: list[tuple[Graph, bool, bool]]
) -> None:
    """Looked at after each round, or only after some, with and without comparing everything."""
    name = new_database()
    fleet = make(mongodb, database, namespaces=[name])
    try:
        for number, (graph, look, full) in enumerate(rounds, 1):
            writer.write(stored(name, number, graph))
            if full:
                for known in fleet._namespaces.values():
                    known.full_s = float("-inf")
            if look or number == len(rounds):
                fleet.look()
                found, wanted = shown(fleet), expected(**{name: graph})
                assert found.edges == wanted.edges
                hosts = {id_ for id_, entity in (found + wanted).nodes.items() if type(entity) is nodes.Host}
                assert found.nodes.keys() - hosts == wanted.nodes.keys() - hosts
                assert all(found.nodes[id_] == wanted.nodes[id_] for id_ in found.nodes if id_ not in hosts)
    finally:
        fleet.close()


def test_this_machine_seen_through_a_database(writer: MongoWriter, fleet: Fleet) -> None:
    collectors: list[Collector] = [cls() for cls in plugins(Collector).values()]
    controller = Controller(open_world(), settings=Settings(tombstone_rounds=0), collectors=collectors)
    try:
        for number in (1, 2):
            graph = controller.run_round().graph
            writer.write(stored("node-1", number, graph))
            fleet.look()
            found, wanted = shown(fleet), expected(**{"node-1": graph})
            joined = {edge.key for edge in found.edges.values() if "join" in edge.attributes}
            assert found.edges.keys() - joined == wanted.edges.keys()
            assert found.nodes.keys() == wanted.nodes.keys()
            assert sum(found.nodes[id_] != wanted.nodes[id_] for id_ in wanted.nodes) <= 1  # its host says more
    finally:
        controller.close()


@pytest.mark.undisturbed
def test_ten_thousand_nodes(writer: MongoWriter, fleet: Fleet) -> None:
    first, second = large(10_000, 40_000, 1), large(10_000, 40_000, 2)
    for number, graph in ((1, first), (2, second)):
        writer.write(stored("big", number, graph))
        fleet.look()
        assert shown(fleet) == expected(big=graph)


def test_elements_in_parts(writer: MongoWriter, fleet: Fleet) -> None:
    graph = Graph([nodes.Device(name="d", attributes={"text": "x" * 9_000_000}), *some(1).nodes.values()])
    writer.write(stored("a", 1, graph))
    fleet.look()
    assert shown(fleet) == expected(a=graph)


def test_what_disappeared_behind_our_back_is_found_by_comparing(
    writer: MongoWriter, fleet: Fleet, mongodb: MongoServer, database: str
) -> None:
    writer.write(stored("a", 1, some(1, 2)))
    fleet.look()
    with mongodb.client() as client:
        client[database].entities.delete_one({"_id": "a/Process(pid=1,start=1)"})
        client[database].entities.insert_one({"_id": "a/odd", "namespace": "a", "gone": False, "hash": b"x", "seq": 1})
    fleet.look()
    assert "Process(ns=a,pid=1,start=1)" in shown(fleet)
    fleet._namespaces["a"].full_s = float("-inf")
    fleet.look()
    found = shown(fleet)
    assert set(found.nodes) == {"Host(ns=a,h)", "Process(ns=a,pid=2,start=1)"} and not found.dangling()
    assert fleet.losses == {"documents that cannot be read": 1}
    with mongodb.client() as client:
        client[database].namespaces.delete_one({"_id": "a"})
    fleet.look()
    assert not shown(fleet).nodes


def test_a_half_written_round_is_waited_for(
    writer: MongoWriter, fleet: Fleet, mongodb: MongoServer, database: str
) -> None:
    writer.write(stored("a", 1, some(1)))
    fleet.look()
    with mongodb.client() as client:
        client[database].namespaces.update_one({"_id": "a"}, {"$set": {"seq": 2}})
        client[database].entities.update_one({"_id": "a/Process(pid=1,start=1)"}, {"$set": {"seq": 2, "gone": True}})
        fleet.look()
        assert shown(fleet) == expected(a=some(1))
        client[database].namespaces.update_one({"_id": "a"}, {"$set": {"complete_seq": 2}})
    fleet.look()
    assert "Process(ns=a,pid=1,start=1)" not in shown(fleet)


def test_the_sockets_of_two_hosts_join(writer: MongoWriter, fleet: Fleet) -> None:
    def end(own: str, far: str, opened: bool) -> Graph:
        here = nodes.Socket(protocol="tcp", address=own)
        there = nodes.Socket(protocol="tcp", address=far, attributes={"remote": True})
        ends = (here.id, there.id) if opened else (there.id, here.id)
        return Graph([here, there], [edges.ConnectTo(*ends, {"half": True})])

    writer.write(stored("a", 1, end("10.0.0.1:40000", "10.0.0.2:80", True)))
    writer.write(stored("b", 1, end("10.0.0.2:80", "10.0.0.1:40000", False)))
    fleet.look()
    found = shown(fleet)
    joined = [edge for edge in found.edges.values() if edge.attributes.get("join") == "both_ends"]
    assert [edge.key[:2] for edge in joined] == [("Socket(ns=a,tcp,10.0.0.1:40000)", "Socket(ns=b,tcp,10.0.0.2:80)")]


def test_a_namespace_without_rounds_is_stale_then_ends(
    writer: MongoWriter, mongodb: MongoServer, database: str
) -> None:
    fleet = make(mongodb, database, stale_after_s=10.0, end_after_s=100.0)
    writer.write(stored("a", 1, some(1)))
    fleet.look()
    world = live()
    now_ns = time.time_ns()
    for later_s, stale in ((5, False), (50, True)):
        world.clock._wall_ns = now_ns + later_s * 10**9
        fleet.observe(world)
        host = next(entity for entity in fleet.seed().nodes if type(entity) is nodes.Host)
        assert host.attributes.get("stale", False) is stale
        assert ("stale_s" in host.metrics) is stale and later_s - 1 < host.metrics["round_age_s"] < later_s + 30
    world.clock._wall_ns = now_ns + 200 * 10**9
    fleet.notes.clear()
    fleet.observe(world)
    assert not fleet.seed().nodes and "its graph has ended" in next(iter(fleet.notes))
    fleet.close()


def test_this_very_host_is_not_drawn_twice(writer: MongoWriter, fleet: Fleet) -> None:
    writer.write(stored("me", 1, some(1), env={"machine_id": "m", "boot_id": "b"}))
    writer.write(stored("other", 1, some(1), env={"machine_id": "m", "boot_id": "c"}))
    fleet.look()
    world = live()
    world.fs.files["/etc/machine-id"] = b"m\n"
    world.fs.files["/proc/sys/kernel/random/boot_id"] = b"b\n"
    assert {entity.ns for entity in shown(fleet, world).nodes.values()} == {"other"}


def test_more_than_there_is_room_for(writer: MongoWriter, mongodb: MongoServer, database: str) -> None:
    fleet = make(mongodb, database, max_entities=10)
    writer.write(stored("a", 1, some(*range(5))))
    writer.write(stored("b", 1, some(*range(50))))
    fleet.look()
    assert {entity.ns for entity in shown(fleet).nodes.values()} == {"a"}
    assert fleet.losses == {"entities of namespaces beyond the limit": 51}
    fleet.close()


def test_a_database_that_dies_and_returns(own_mongodb: Callable[[], MongoServer]) -> None:
    server, database = own_mongodb(), new_database()
    server.start()
    writer = MongoWriter(MongoOptions(uri=server.uri, timeout_s=TIMEOUT_S), database)
    writer.open()
    fleet = make(server, database, timeout_s=1.0)
    try:
        writer.write(stored("a", 1, some(1)))
        fleet.look()
        server.kill()
        fleet.look()
        assert shown(fleet) == expected(a=some(1)), "what was read stands"
        [note] = fleet.notes
        assert "what was read stands" in note and fleet.failures_count == 1
        server.start()
        writer.write(stored("a", 2, some(1, 2)))
        deadline_s = time.monotonic() + TIMEOUT_S
        while fleet.failures_count and time.monotonic() < deadline_s:
            fleet.look()  # the first may still find it unknown
        assert shown(fleet) == expected(a=some(1, 2)) and not fleet.notes
    finally:
        fleet.close()
        writer.close()


def test_nobody_there_and_nothing_configured() -> None:
    fleet = Fleet(FleetSettings(uri=f"mongodb://u:s3cret@127.0.0.1:{free_port()}", timeout_s=0.5))  # type: ignore[arg-type]
    fleet.look()
    fleet.observe(live())
    [note] = fleet.notes
    assert "no server answers" in note and "s3cret" not in note and not fleet.seed().nodes
    fleet.close()
    off = Fleet()
    off.observe(live())
    assert not off.notes and not off.seed().nodes
    off.close()


def test_recorded_and_replayed(writer: MongoWriter, mongodb: MongoServer, database: str, tmp_path: Path) -> None:
    path = str(tmp_path / "recording.tar.zst")
    seen = []
    fleet = make(mongodb, database)
    world = open_world(record=path)
    for number in (1, 2):
        writer.write(stored("a", number, some(1, number)))
        fleet.look()
        world.begin_round(number)
        seen.append(shown(fleet, world))
    fleet.close()
    world.close()
    again = Fleet(FleetSettings(uri=mongodb.uri, database=database))  # type: ignore[arg-type]
    replay = open_world(replay=path)
    for number in (1, 2):
        replay.begin_round(number)
        assert shown(again, replay) == seen[number - 1]
    assert again._pool is None, "a replay asks nobody"
    again.close()
    replay.close()
    with open(path, "rb") as file:
        assert b"mongodb://" not in file.read(64)


def test_a_server_serves_the_fleet(writer: MongoWriter, mongodb: MongoServer, database: str) -> None:
    """By its own polling, with the usual routes."""
    for name in ("node-1", "node-2"):
        writer.write(stored(name, 1, some(1, 2)))
    subscribers = SubscriberManager()
    fleet = Fleet(FleetSettings(uri=mongodb.uri, database=database, interval_s=0.1))  # type: ignore[arg-type]
    settings_ = Settings(interval_s=3600, tombstone_rounds=0)
    controller = Controller(open_world(), settings=settings_, collectors=[fleet], subscribers=subscribers)
    state = ServerState(
        controller=controller,
        settings=settings_,
        subscribers=subscribers,
        tokens=TokenStore(),
        hub=StreamHub(),
        plugins=lambda: {"collectors": []},
    )
    client = TestClient(create_app(state), base_url="http://127.0.0.1", client=("127.0.0.1", 50_000))
    try:
        deadline_s = time.monotonic() + TIMEOUT_S
        while len(controller.run_round().graph.nodes) < 6 and time.monotonic() < deadline_s:
            time.sleep(0.05)
        found = client.get("/api/v1/graph", params={"namespace": "node-2"}).json()
        assert {node["id"] for node in found["nodes"]} >= {
            "Host(ns=node-2,h)", "Process(ns=node-2,pid=1,start=1)", "Process(ns=node-2,pid=2,start=1)"
        }  # fmt: skip
        assert all(node["ns"] == "node-2" for node in found["nodes"])
        assert client.get("/api/v1/entities/Process(ns=node-1,pid=1,start=1)").status_code == 200
    finally:
        controller.close()
