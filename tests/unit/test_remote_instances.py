"""Instances that pull instances, in chains and in circles, for many rounds."""

from __future__ import annotations

import pytest
from tests.fakes.instances import Instances

from gpuflight.graph import nodes

WAYS = {
    "a circle of two": {"a": ["b"], "b": ["a"]},
    "a circle of three": {"a": ["b"], "b": ["c"], "c": ["a"]},
    "all pull all": {"a": ["b", "c"], "b": ["a", "c"], "c": ["a", "b"]},
    "a circle behind one": {"a": ["b"], "b": ["c"], "c": ["b"]},
    "oneself and a circle": {"a": ["a", "b"], "b": ["b", "a"]},
}


@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS.keys())
def test_nothing_grows_and_nobody_is_there_twice(ways: dict[str, list[str]]) -> None:
    with Instances(**ways) as net:
        net.round(6)
        settled = [(instance.hosts, len(instance.graph.nodes), len(instance.graph.edges)) for instance in net]
        net.round(50)
        assert [(one.hosts, len(one.graph.nodes), len(one.graph.edges)) for one in net] == settled
        for instance in net:
            assert len(set(instance.hosts)) == len(instance.hosts)
            assert not instance.graph.dangling()
            assert all(peer.misfits_count == 0 and peer.wholes_count < 8 for peer in instance.remote._peers)
            assert sum(peer.diffs_count for peer in instance.remote._peers if not peer.view.is_self) > 40


def test_a_chain_names_the_way_and_each_host_is_whole() -> None:
    with Instances(a=["b"], b=["c"], c=["d"], d=[]) as net:
        net.round(6)
        graph = net["a"].graph
        assert sorted(host.ns for host in graph.of_kind(nodes.Host)) == ["", "b", "b/c", "b/c/d"]
        count = len(net["d"].graph.nodes)
        for ns in ("", "b", "b/c", "b/c/d"):
            assert sum(entity.ns == ns for entity in graph) == count, ns
        ours = {id_ for id_ in graph.nodes if "ns=" not in id_}
        crossing = [key for key in graph.edges if (key[0] in ours) != (key[1] in ours)]
        assert crossing == [] and len(ours) == count


def test_a_chain_ends_where_it_is_told_to() -> None:
    with Instances({"max_depth": 2}, a=["b"], b=["c"], c=["d"], d=[]) as net:
        net.round(8)
        assert net["a"].hosts == ["a", "b", "c"]
        coverage = net["a"].controller.latest.coverage  # type: ignore[union-attr]
        (line,) = [line for line in coverage if line.collector == "remote"]
        assert line.losses == {"entities beyond the depth limit of instances": len(net["d"].graph.nodes)}
        assert net["a"].remote._peers[0].misfits_count == 0


def test_who_dies_in_a_chain_is_stale_for_all_behind_and_ends_for_all() -> None:
    with Instances({"end_after_s": 1e9}, a=["b"], b=["c"], c=[]) as net:
        net.round(4)
        net["c"].alive = False
        net.round(3)
        for name, ns in (("b", "c"), ("a", "b/c")):
            (host,) = [host for host in net[name].graph.of_kind(nodes.Host) if host.ns == ns]
            assert host.attributes["stale"] is True and "stale_s" in host.metrics
        assert net["a"].hosts == ["a", "b", "c"]
        net["c"].alive = True
        net.round(3)
        hosts = net["a"].graph.of_kind(nodes.Host)
        assert len(hosts) == 3 and not any("stale" in host.attributes for host in hosts)
        net["b"].remote.settings.end_after_s = -1.0
        net["c"].alive = False
        net.round(3)
        assert net["a"].hosts == ["a", "b"]


def test_a_way_that_is_lost_is_replaced_by_the_longer_one() -> None:
    """a sees c itself and through b; then c's wire to a is cut."""
    with Instances(a=["b", "c"], b=["c"], c=[]) as net:

        def ways() -> list[str]:
            return sorted(host.ns for host in net["a"].graph.of_kind(nodes.Host))

        net.round(5)
        assert ways() == ["", "b", "c"]
        direct = net["a"].remote._peers[1]
        direct.poll = lambda http, own: None  # type: ignore[method-assign]
        net["a"].remote.settings.end_after_s = -1.0
        direct.view.error = "cut"
        net.round(2)
        assert ways() == ["", "b", "b/c"]


def test_clocks_are_compared_to_the_millisecond() -> None:
    with Instances(a=["b"], b=[]) as net:
        net.round(5)
        (host,) = [host for host in net["a"].graph.of_kind(nodes.Host) if host.ns == "b"]
        assert abs(host.metrics["clock_offset_s"]) <= host.metrics["clock_offset_error_s"] < 0.45
