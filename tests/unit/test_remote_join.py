"""Which half connections of different hosts are one."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuflight.collectors.remote_join import Half, halves_of, join_hosts, joinable
from gpuflight.graph import Graph, edges, nodes
from gpuflight.graph.namespaces import with_namespace


def sees(client: str, server: str, *, at: str, ns: str = "", guessed: bool = False, **metrics: float) -> Graph:
    """What the host of one end (``at``) reports of a connection, in its namespace."""
    ends = [
        nodes.Socket(protocol="tcp", address=address, attributes={"remote": True} if address != at else {})
        for address in (client, server)
    ]
    attributes = {"half": True, **({"direction": "guessed"} if guessed else {})}
    graph = Graph(ends, [edges.ConnectTo(ends[0].id, ends[1].id, attributes, dict(metrics))])
    return with_namespace(graph, ns) if ns else graph


def halves(graph: Graph) -> list[Half]:
    return halves_of(graph.nodes, graph.edges.values())


A, B = "10.0.0.5:40000", "10.0.0.7:5432"


def test_two_halves_make_one_edge_across_the_hosts() -> None:
    ours, theirs = sees(A, B, at=A, rtt_ms=0.5), sees(A, B, at=B, ns="node-7", rtt_ms=9.0, peer_recv_queue_bytes=3)
    joined = join_hosts(halves(ours), {"node-7": halves(theirs)}, {**ours.nodes, **theirs.nodes})
    (edge,) = joined.edges
    assert (edge.source, edge.target) == (f"Socket(tcp,{A})", f"Socket(ns=node-7,tcp,{B})")
    assert edge.attributes == {"join": "both_ends"}
    assert edge.metrics == {"rtt_ms": 0.5, "peer_recv_queue_bytes": 3}, "the client's word stands"
    assert {node.id: node.attributes for node in joined.nodes} == {
        f"Socket(tcp,{B})": {"remote": True, "joined_to": f"Socket(ns=node-7,tcp,{B})"},
        f"Socket(ns=node-7,tcp,{A})": {"remote": True, "joined_to": f"Socket(tcp,{A})"},
    }
    assert joined.joined_to == {node.id: node.attributes["joined_to"] for node in joined.nodes}


def test_the_server_here_and_the_client_there() -> None:
    joined = join_hosts(halves(sees(A, B, at=B)), {"n": halves(sees(A, B, at=A, ns="n"))})
    assert [(edge.source, edge.target) for edge in joined.edges] == [(f"Socket(ns=n,tcp,{A})", f"Socket(tcp,{B})")]


def test_peers_are_joined_with_each_other() -> None:
    peers = {ns: halves(sees(A, B, at=at, ns=ns)) for ns, at in (("a", A), ("b", B))}
    joined = join_hosts([], peers)
    assert [edge.id for edge in joined.edges] == [f"ConnectTo(Socket(ns=a,tcp,{A})->Socket(ns=b,tcp,{B}))"]


@pytest.mark.parametrize("theirs", [("10.0.0.5:40001", B), ("10.0.0.9:40000", B), (A, "10.0.0.7:5433")])
def test_half_known_and_translated_ends_stay_alone(theirs: tuple[str, str]) -> None:
    """NAT: the server sees another client address than the client has."""
    there = sees(*theirs, at=theirs[1], ns="n")
    joined = join_hosts(halves(sees(A, B, at=A)), {"n": halves(there)}, there.nodes)
    assert not joined.edges and not joined.nodes


def test_the_same_private_addresses_on_two_hosts_do_not_join() -> None:
    """Both hosts have a container 172.17.0.2 that talks to a database: two ends of two connections, not of one."""
    a = sees("172.17.0.2:40000", "10.9.9.9:5432", at="172.17.0.2:40000", ns="a")
    b = sees("172.17.0.2:40000", "10.9.9.9:5432", at="172.17.0.2:40000", ns="b")
    assert not join_hosts([], {"a": halves(a), "b": halves(b)}).edges


@pytest.mark.parametrize("address", ["127.0.0.1:5432", "[::1]:5432", "127.9.9.9:1", "[::ffff:127.0.0.1]:5432"])
def test_loopback_never_joins(address: str) -> None:
    assert not joinable(address) and joinable("[fe80::1]:5") and not joinable("")
    near, far = sees("127.0.0.1:40000", address, at="127.0.0.1:40000"), sees("127.0.0.1:40000", address, at=address)
    assert halves(near) == [] and halves(far) == []


def test_a_connection_that_three_hosts_claim_is_nobodys() -> None:
    claims = {ns: halves(sees(A, B, at=at, ns=ns)) for ns, at in (("x", A), ("y", B), ("z", B))}
    joined = join_hosts([], claims)
    assert not joined.edges and joined.ambiguous_count == 1


def test_one_host_that_shows_both_halves_is_not_joined_with_itself() -> None:
    both = halves(sees(A, B, at=A, ns="n")) + halves(sees(A, B, at=B, ns="n"))
    assert not join_hosts([], {"n": both}).edges


@pytest.mark.parametrize(("here", "there", "client"), [(True, False, A), (False, True, A), (True, True, None)])
def test_who_knows_the_direction_says_it(here: bool, there: bool, client: str | None) -> None:
    """``here`` and ``there``: whether that side only guessed; the one that guessed has it the wrong way round."""
    ours = sees(*((B, A) if here else (A, B)), at=A, guessed=here)
    theirs = sees(*((B, A) if there else (A, B)), at=B, ns="n", guessed=there)
    (edge,) = join_hosts(halves(ours), {"n": halves(theirs)}).edges
    assert (edge.attributes.get("direction") == "guessed") is (client is None)
    if client is not None:
        assert edge.source == f"Socket(tcp,{client})"


def test_what_is_no_half_is_left_alone() -> None:
    local = [nodes.Socket(protocol="tcp", address=address) for address in (A, B)]
    mixed = [local[0], nodes.Socket(protocol="udp", address=B, attributes={"remote": True})]
    process = nodes.Process(pid=1, start=1)
    for ends in (local, mixed):
        assert halves(Graph(ends, [edges.ConnectTo(ends[0].id, ends[1].id)])) == []
    assert halves(Graph([local[0], process], [edges.Belong(local[0].id, process.id)])) == []


ADDRESSES = st.builds(
    "{}:{}".format, st.sampled_from(("10.0.0.1", "10.0.0.2", "10.0.0.3", "127.0.0.1", "[::1]")), st.integers(1, 4)
)


@given(
    st.lists(st.tuples(ADDRESSES, ADDRESSES, st.sampled_from(("", "a", "b", "c")), st.booleans()), max_size=30),
    st.randoms(use_true_random=False),
)
def test_only_mirrored_halves_join_each_once_whatever_the_order(
    rows: list[tuple[str, str, str, bool]], chance: random.Random
) -> None:
    by_host: dict[str, dict[tuple[str, str], Half]] = {ns: {} for ns in ("", "a", "b", "c")}
    for own, far, ns, opened in rows:
        prefix = f"ns={ns}," if ns else ""
        half = Half("tcp", own, far, f"Socket({prefix}tcp,{own})", f"Socket({prefix}tcp,{far})", opened)
        by_host[ns][own, far] = half

    def run() -> tuple[set[str], int]:
        shuffled = {ns: chance.sample(list(found.values()), len(found)) for ns, found in by_host.items()}
        joined = join_hosts(shuffled.pop(""), shuffled)
        pairs = [frozenset((edge.source, edge.target)) for edge in joined.edges]
        assert len(set(pairs)) == len(pairs)
        return {"|".join(sorted(pair)) for pair in pairs}, joined.ambiguous_count

    found, ambiguous = run()
    assert run() == (found, ambiguous)
    expected = set()
    for ns, halves_there in by_host.items():
        for (own, far), half in halves_there.items():
            mirrors = [other[far, own] for name, other in by_host.items() if name != ns and (far, own) in other]
            claims = sum(((own, far) in other) + ((far, own) in other) for other in by_host.values())
            if len(mirrors) == 1 and claims == 2 and joinable(own) and joinable(far) and own != far:
                expected.add("|".join(sorted((half.own, mirrors[0].own))))
    assert found == expected


@given(st.randoms(use_true_random=False))
def test_what_was_made_before_is_the_same_as_made_anew_and_the_very_object_where_nothing_changed(
    chance: random.Random,
) -> None:
    """Connections that come, go and get other metrics, from round to round."""
    before = None
    ports = dict.fromkeys(range(6), 0)
    graphs: dict[tuple[int, str, int], Graph] = {}
    for _ in range(8):
        for port in chance.sample(list(ports), 2):
            ports[port] += 1
        here: list[Half] = []
        there: list[Half] = []
        named = {}
        for port, version in ports.items():
            for ns, found in (("a", here), ("b", there)):
                if chance.random() < 0.2:
                    continue
                ends = (f"10.0.0.5:{port}", B)
                at = ends[0] if ns == "a" else B
                graph = graphs.setdefault((port, ns, version), sees(*ends, at=at, ns=ns, rtt_ms=version))
                named.update(graph.nodes)
                found += _same_halves(graph)
        joined = join_hosts([], {"a": here, "b": there}, named, before)
        anew = join_hosts([], {"a": here, "b": there}, named)
        assert (joined.edges, joined.nodes, joined.joined_to) == (anew.edges, anew.nodes, anew.joined_to)
        if before is not None:
            again = join_hosts([], {"a": here, "b": there}, named, joined)
            assert all(one is other for one, other in zip(again.edges, joined.edges, strict=True))
            assert all(one is other for one, other in zip(again.nodes, joined.nodes, strict=True))
        before = joined


_HALVES: dict[int, tuple[Graph, list[Half]]] = {}


def _same_halves(graph: Graph) -> list[Half]:
    """The very objects for the very graph, as a copy of a peer has them."""
    return _HALVES.setdefault(id(graph), (graph, halves(graph)))[1]


def test_work_is_linear_in_the_halves() -> None:
    """Counted, not timed: every half is keyed once."""

    class Counting(Half, gc=False):
        @property
        def key(self) -> tuple[str, str, str]:
            counted.append(1)
            return super().key

    steps = []
    for size in (100, 200, 400):
        counted: list[int] = []
        rows = [(f"10.0.0.1:{port}", f"10.0.0.2:{port}") for port in range(1, size + 1)]
        local = [Counting("tcp", own, far, f"Socket(tcp,{own})", f"Socket(tcp,{far})") for own, far in rows]
        there = [Counting("tcp", far, own, f"Socket(ns=n,tcp,{far})", f"Socket(ns=n,tcp,{own})") for own, far in rows]
        assert len(join_hosts(local, {"n": there}).edges) == size
        steps.append(len(counted))
    assert all(second == 2 * first for first, second in pairwise(steps))
