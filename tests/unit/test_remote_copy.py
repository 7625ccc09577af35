"""A parent's copy of a peer's graph, kept by differences: always what the peer has, put in its namespace."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.strategies import graphs

from gpuflight.collectors.remote_copy import Copy, Misfit
from gpuflight.collectors.remote_join import halves_of
from gpuflight.errors import InputError
from gpuflight.graph import Edge, Entity, Graph, edges, nodes
from gpuflight.graph.codec import SCHEMA, decode_graph, encode_diff, encode_graph
from gpuflight.graph.delta import decode_delta
from gpuflight.graph.diff import Diff, diff, merge_diffs
from gpuflight.graph.namespaces import with_namespace, without_namespaces
from gpuflight.graph.store import LiveStore

OWN = ("m-own", "b-own")


def copy_of(graph: Graph, number: int = 1, max_depth: int = 4) -> Copy:
    """As it comes over the wire."""
    return Copy(decode_graph(encode_graph(graph)), "n7", OWN, max_depth, number)


def sent(change: Diff, after: Graph, base: int, number: int, **fields: Any) -> Any:
    counts = {"nodes_count": len(after.nodes), "edges_count": len(after.edges), **fields}
    return decode_delta(encode_diff(change, number, base=base, **counts))


def shown(copy: Copy) -> Graph:
    """What a round would read of it; everything in it is known once only."""
    entities = [*([copy.host] if copy.host else []), *copy.lists().entities]
    connections = copy.lists().connections
    graph = Graph(entities, connections)
    assert len(graph.nodes) == len(entities) and len(graph.edges) == len(connections)
    return graph


def check(copy: Copy, peers: Graph) -> None:
    """The copy, and all that is derived of it, is what a whole graph would have given."""
    expected = with_namespace(decode_graph(encode_graph(peers)), "n7")
    assert shown(copy) == expected
    anew = copy_of(peers)
    assert {half.edge.key: half for half in copy.lists().halves if half.edge} == {
        half.edge.key: half for half in halves_of(expected.nodes, expected.edges.values()) if half.edge
    }
    assert copy.lists().stand_ins == anew.lists().stand_ins and copy.hosts == anew.hosts


class Wandering:
    """A host on which things come, change, go and come again, with a store that makes rounds of it."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.store = LiveStore(tombstone_rounds=self.chance.choice((0, 2)))
        self.nodes: dict[str, Entity] = {}
        self.edges: dict[Any, Edge] = {}
        self.number = 0
        self.put(nodes.Host(hostname="node-7", metrics={"load_1min": 0.0}))

    def put(self, entity: Entity) -> None:
        self.nodes[entity.id] = entity

    def entity(self) -> Entity:
        chance = self.chance
        number = chance.randrange(25)
        if chance.random() < 0.5:
            attributes: dict[str, Any] = {"name": f"p{chance.randrange(3)}"}
            if chance.random() < 0.3:
                attributes["source_processes"] = [f"Process(pid={chance.randrange(25)},start=1)"]
            unknown = {"rss_bytes": "no right"} if chance.random() < 0.3 else None
            return nodes.Process(
                pid=number, start=1, attributes=attributes, metrics={"cpu_pct": chance.random()}, unknown=unknown
            )
        return nodes.Socket(
            protocol="tcp",
            address=f"10.0.0.{chance.randrange(2)}:{number}",
            attributes={"remote": True} if chance.random() < 0.5 else {"state": chance.choice("AB")},
        )

    def round(self) -> Diff:
        chance = self.chance
        for _ in range(chance.randrange(6)):
            self.put(self.entity())
        for id_ in chance.sample(list(self.nodes), min(len(self.nodes), chance.randrange(4))):
            if not id_.startswith("Host("):
                del self.nodes[id_]
        sockets = [entity.id for entity in self.nodes.values() if type(entity) is nodes.Socket]
        for _ in range(chance.randrange(5)):
            link: Edge = edges.Own("Host(node-7)", chance.choice(list(self.nodes)))
            if len(sockets) > 1 and chance.random() < 0.7:
                metrics = {"rtt_ms": chance.random()} if chance.random() < 0.8 else {}
                link = edges.ConnectTo(*chance.sample(sockets, 2), {"half": True}, metrics)
            self.edges[link.key] = link
        for key in chance.sample(list(self.edges), min(len(self.edges), chance.randrange(3))):
            del self.edges[key]
        host = self.nodes["Host(node-7)"]
        self.put(replace(host, metrics={"load_1min": chance.random()}))
        self.edges = {key: edge for key, edge in self.edges.items() if key[0] in self.nodes and key[1] in self.nodes}
        self.number += 1
        return self.store.advance(self.number, [list(self.nodes.values())], [list(self.edges.values())]).diff


@pytest.mark.parametrize("seed", range(12))
def test_after_many_rounds_the_copy_is_the_peers_graph(seed: int) -> None:
    """Asked after each round, or after several, whose differences are told as one."""
    host = Wandering(seed)
    host.round()
    copy, base, pending = copy_of(host.store.graph), 1, []
    for _ in range(120):
        pending.append(host.round())
        if host.chance.random() < 0.4:
            continue
        copy.apply(sent(merge_diffs(*pending), host.store.graph, base, host.number))
        base, pending = host.number, []
        check(copy, host.store.graph)


@given(graphs(), graphs())
def test_any_graph_becomes_any_other_or_it_does_not_fit(a: Graph, b: Graph) -> None:
    """Hosts that come or go, and new namespaces, are left to the whole graph; all else must be exact."""
    a, b = decode_graph(encode_graph(a)), decode_graph(encode_graph(b))
    copy = Copy(decode_graph(encode_graph(a)), "n7", OWN, 10**6, 1)
    try:
        copy.apply(sent(diff(a, b), b, 1, 2))
    except Misfit:
        before, after = ({e.id for e in graph.of_kind(nodes.Host)} for graph in (a, b))
        spaces = [{entity.ns for entity in graph} for graph in (a, b)]
        twice = any(len(with_namespace(graph, "n7").nodes) < len(graph.nodes) for graph in (a, b))
        assert before != after or not spaces[1] <= spaces[0] or twice
        return
    assert shown(copy) == with_namespace(b, "n7")


def pair() -> tuple[Graph, Graph]:
    """A graph of one host and what became of it."""
    host, one, two = nodes.Host(hostname="node-7"), nodes.Process(pid=1, start=1), nodes.Process(pid=2, start=1)
    a = Graph([host, one, two], [edges.Own(host.id, one.id), edges.Own(host.id, two.id)])
    b = Graph([host, replace(one, metrics={"cpu_pct": 2.0})], [edges.Own(host.id, one.id)])
    return a, b


def test_what_does_not_lead_on_does_not_fit() -> None:
    a, b = pair()
    change = diff(a, b)
    copy_of(a).apply(sent(change, b, 1, 2))
    wrong = [
        sent(change, b, 2, 3),  # another round
        sent(change, b, 1, 2, nodes_count=3),
        sent(change, b, 1, 2, edges_count=2),
        sent(diff(b, a), a, 1, 2),  # comes, but is there
        sent(Diff(nodes_removed=["Process(pid=9,start=1)"]), a, 1, 2),
        sent(Diff(edges_removed=[("Host(node-7)", "Process(pid=9,start=1)", "Own")]), a, 1, 2),
        sent(Diff(nodes_removed=["Host(node-7)"]), b, 1, 2),
        sent(Diff(nodes_added=[nodes.Host(hostname="x")]), a, 1, 2),
        sent(Diff(nodes_added=[nodes.Process(pid=5, start=5, ns="elsewhere")]), a, 1, 2),
    ]
    for delta in wrong[:3] + wrong[4:]:
        with pytest.raises(Misfit):
            copy_of(a).apply(delta)
    copy = copy_of(a)
    copy.apply(wrong[3])  # the same elements again: taken for what it says, and the numbers are right
    check(copy, a)


def test_our_own_host_and_what_is_too_deep_stay_out_of_it() -> None:
    """As they come and change in others' graphs."""

    def graph(step: int) -> Graph:
        own = Graph(
            [nodes.Host(hostname="me", attributes={"machine_id": OWN[0], "boot_id": OWN[1]}, metrics={"x": step}),
             *(nodes.Process(pid=pid, start=1, metrics={"cpu_pct": step}) for pid in range(step, step + 3))],
        )  # fmt: skip
        own.try_add_edge(edges.Own("Host(me)", f"Process(pid={step},start=1)"))
        far = with_namespace(Graph([nodes.Host(hostname="far", metrics={"x": step})]), "b")
        merged = Graph([nodes.Host(hostname="node-7"), nodes.Process(pid=step, start=1)])
        return (
            merged.merge(with_namespace(own, "home"))
            .merge(with_namespace(far, "a"))
            .merge(with_namespace(Graph([nodes.Host(hostname="c", metrics={"x": step})]), "c"))
        )

    before = graph(0)
    copy = copy_of(before, max_depth=2)
    assert copy.too_deep_count == 1 and list(copy.hosts) == ["n7/c"]
    for step in range(1, 50):
        after = graph(step)
        copy.apply(sent(diff(before, after), after, step, step + 1))
        assert shown(copy) == with_namespace(without_namespaces(after, {"home", "a/b"}), "n7")
        before = after
    other = Graph([replace(before.nodes["Host(ns=home,me)"], attributes={"machine_id": "x", "boot_id": "y"})])
    changed = Graph(before.nodes.values(), before.edges.values())
    changed.nodes["Host(ns=home,me)"] = other.nodes["Host(ns=home,me)"]
    with pytest.raises(Misfit, match="another one"):
        copy.apply(sent(diff(before, changed), changed, 50, 51))


def test_nothing_changed_keeps_the_very_lists() -> None:
    a, _ = pair()
    copy = copy_of(a)
    first = copy.lists()
    copy.apply(sent(Diff(), a, 1, 2))
    assert copy.lists() is first
    copy.apply(sent(Diff(nodes_changed=diff(a, pair()[1]).nodes_changed), a, 2, 3))
    second = copy.lists()
    assert second.entities is not first.entities
    assert second.connections is first.connections and second.halves is first.halves


def test_what_does_not_fit_leaves_what_was_shown() -> None:
    """It is found at the end, after half of it was taken in."""
    a, b = pair()
    copy = copy_of(a)
    first = copy.lists()
    with pytest.raises(Misfit):
        copy.apply(sent(diff(a, b), b, 1, 2, nodes_count=7))
    assert copy.lists() is first and shown(copy) == with_namespace(a, "n7")
    with pytest.raises(Misfit):
        copy.apply(sent(diff(a, b), b, 1, 2))


@pytest.mark.parametrize(
    "data",
    [
        b'{"type":"diff","schema":1,"round":2,"nodes_changed":[{"id":"x","metrics":{"a":"text"}}]}',
        b'{"type":"diff","schema":1,"round":2,"nodes_added":[{"kind":"Unheard","id":"x"}]}',
        b'{"type":"diff","schema":1,"round":2,"nodes_changed":[{"id":"x","metrics":{"a":null}}]}',
        b'{"type":"diff","schema":1',
        b'{"type":"diff"' + b"[" * 100_000,
    ],
)
def test_what_is_no_difference_is_refused(data: bytes) -> None:
    with pytest.raises(InputError):
        decode_delta(data)


def test_a_newer_schema_is_said_even_if_it_cannot_be_read() -> None:
    for rest in (b"}", b',"nodes_changed":7}'):
        with pytest.raises(InputError, match="update gpuflight"):
            decode_delta(b'{"type":"diff","schema":%d,"round":2%b' % (SCHEMA + 1, rest))


@given(st.integers(0, 10**6))
def test_a_difference_after_the_other_is_the_same_as_both_in_one(seed: int) -> None:
    host = Wandering(seed)
    host.round()
    apart, together, changes = copy_of(host.store.graph), copy_of(host.store.graph), []
    for _ in range(4):
        changes.append(host.round())
        apart.apply(sent(changes[-1], host.store.graph, host.number - 1, host.number))
    together.apply(sent(merge_diffs(*changes), host.store.graph, 1, host.number))
    assert shown(apart) == shown(together)
