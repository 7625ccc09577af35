"""The collector of other hosts, with what the peers answer written down: no network, no threads, no time."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from pydantic import ValidationError
from tests.conftest import ROOT
from tests.fakes.machine import FakeMachine, rich_machine
from tests.fakes.machine_answers import TRAINER

from gpuflight.collectors.remote import Remote, RemoteSettings
from gpuflight.collectors.sockets import Sockets
from gpuflight.core.expansion import CollectorRunner, expand_world
from gpuflight.errors import ConfigError
from gpuflight.graph import Entity, Graph, edges, nodes
from gpuflight.graph.codec import SCHEMA, encode_graph, time_text
from gpuflight.graph.namespaces import with_namespace
from gpuflight.registry import plugins
from gpuflight.settings import Settings
from gpuflight.settings.model import Limits
from gpuflight.sources.clock import ManualClock
from gpuflight.sources.http import Answer

ENV = {"hostname": "node-7", "machine_id": "m7", "boot_id": "b7", "version": "9.1"}
OWN = {"hostname": "node1", "machine_id": "0123456789abcdef", "boot_id": "b00t"}
"""Of the fake machine."""


class Script:
    """In place of the HTTP source: what each peer answers, as a recording would give it."""

    replaying = True
    recording = False

    def __init__(self, clock: ManualClock) -> None:
        self.answers: dict[str, Answer] = {}
        self.clock = clock

    def taped(self, key: str, live: Callable[[], Answer]) -> Answer:
        """As of now: whoever has an answer is asked, and confirms it, in every round."""
        answer = self.answers.get(key)
        if answer is None:
            return Answer(key, error="Connection refused")
        now_ns = self.clock.wall_ns()
        return replace(answer, sent_ns=now_ns - 2_000_000, received_ns=now_ns)


class Scene:
    """A machine, a collector, and peers by name."""

    def __init__(self, *names: str, named: bool = True, **options: Any) -> None:
        self.machine = FakeMachine(rich_machine())
        self.script = Script(self.machine.clock)
        self.machine.world.http = self.script  # type: ignore[assignment]
        peers = [{"url": self.url(name), **({"name": name} if named else {})} for name in names]
        self.collector = Remote(RemoteSettings.model_validate({"peers": peers, **options}))
        self.number = 0

    @staticmethod
    def url(name: str) -> str:
        return f"http://{name}:9477"

    def answers(self, name: str, graph: Graph, env: dict[str, str] | None = None, **headers: str) -> None:
        self.number += 1
        now_ns = self.machine.clock.wall_ns()
        environment = (
            {**ENV, "hostname": name, "machine_id": f"m-{name}", "boot_id": f"b-{name}"} if env is None else env
        )
        body = encode_graph(graph, round=self.number, time=time_text(now_ns), env=environment)
        self.says(name, 200, body, etag=f'"{self.number}"', **headers)

    def says(self, name: str, status: int, body: bytes = b"", **headers: str) -> None:
        self.script.answers[self.url(name)] = Answer(self.url(name), status, headers, body)

    def dies(self, name: str) -> None:
        self.script.answers.pop(self.url(name), None)

    def round(self, seconds: float = 1.0) -> Graph:
        self.collector.losses.clear()
        self.collector.notes.clear()
        world = self.machine.next_round(seconds)
        self.collector.observe(world)
        batch = self.collector.seed()
        return Graph(batch.nodes, batch.edges)

    @property
    def notes(self) -> list[str]:
        return list(self.collector.notes)


def host_graph(name: str, *more: Entity, **attributes: Any) -> Graph:
    return Graph([nodes.Host(hostname=name, attributes=attributes, metrics={"cpus_count": 8}), *more])


def hosts(graph: Graph) -> list[str]:
    return [entity.ns for entity in graph.of_kind(nodes.Host)]


def test_a_peers_graph_is_shown_in_its_namespace() -> None:
    scene = Scene("n7")
    process = nodes.Process(pid=1, start=5, attributes={"name": "init"})
    graph = host_graph("node-7", process)
    graph.try_add_edge(edges.Host("Host(node-7)", process.id))
    scene.answers("n7", graph, ENV)
    shown = scene.round()
    assert list(shown.nodes) == ["Host(ns=n7,node-7)", "Process(ns=n7,pid=1,start=5)"]
    assert list(shown.edges) == [("Host(ns=n7,node-7)", "Process(ns=n7,pid=1,start=5)", "Host")]
    host = shown.nodes["Host(ns=n7,node-7)"]
    assert host.attributes["machine_id"] == "m7" and host.attributes["gpuflight_version"] == "9.1"
    assert host.attributes["instance"] == "http://n7:9477" and "stale" not in host.attributes
    assert host.metrics["cpus_count"] == 8 and "stale_s" not in host.metrics
    assert scene.notes == []


def test_without_a_name_its_own_host_name_is_the_namespace() -> None:
    scene = Scene("x", named=False)
    scene.answers("x", host_graph("node 7"), {**ENV, "hostname": "node 7/α"})
    assert hosts(scene.round()) == ["node_7_"]


def test_d16_a_peer_that_is_down_at_the_start_comes_when_it_comes() -> None:
    scene = Scene("n7")
    for _ in range(3):
        assert not scene.round(3600.0).nodes
        assert scene.notes == ["n7: Connection refused"]
    scene.answers("n7", host_graph("node-7"))
    assert hosts(scene.round()) == ["n7"] and scene.notes == []


def test_d16_a_peer_that_dies_keeps_its_last_graph_marked_with_its_age_then_ends() -> None:
    scene = Scene("n7", end_after_s=60.0)
    scene.answers("n7", host_graph("node-7", nodes.Process(pid=1, start=5)))
    scene.round(0.0)
    scene.dies("n7")
    shown = scene.round(34.0)
    host = shown.nodes["Host(ns=n7,node-7)"]
    assert host.attributes["stale"] is True and host.metrics["stale_s"] == 34.0
    assert "Process(ns=n7,pid=1,start=5)" in shown
    assert scene.notes == ["n7: Connection refused; its last graph stands, 34 s old"]
    assert not scene.round(27.0).nodes
    assert scene.notes == ["n7: Connection refused; no answer for 61 s, so its graph has ended"]
    scene.answers("n7", host_graph("node-7"))
    host = scene.round().nodes["Host(ns=n7,node-7)"]
    assert "stale" not in host.attributes and "stale_s" not in host.metrics


def test_a_graph_that_nobody_confirmed_for_long_is_stale_too() -> None:
    """Rounds were stopped for a while, and nobody was asked."""
    scene = Scene("n7")
    scene.answers("n7", host_graph("node-7"))
    scene.round()
    view = scene.collector._peers[0].view
    scene.collector._peers[0].take = lambda answer, own: None  # type: ignore[method-assign]
    assert "stale" not in scene.round(15.0).nodes["Host(ns=n7,node-7)"].attributes
    host = scene.round(10.0).nodes["Host(ns=n7,node-7)"]
    assert host.attributes["stale"] is True and host.metrics["stale_s"] == 25.0
    assert scene.notes == ["n7: it was not asked for long; its last graph stands, 25 s old"]
    assert scene.collector._peers[0].view is view


def test_the_same_objects_stand_while_nothing_changes() -> None:
    scene = Scene("n7")
    scene.answers("n7", host_graph("node-7", nodes.Process(pid=1, start=5)))
    first, second = scene.round(), scene.round()
    assert first.nodes["Process(ns=n7,pid=1,start=5)"] is second.nodes["Process(ns=n7,pid=1,start=5)"]


def test_a_newer_schema_leaves_the_last_graph_and_says_what_to_do() -> None:
    scene = Scene("n7")
    scene.answers("n7", host_graph("node-7"))
    scene.round()
    scene.says("n7", 200, json.dumps({"schema": SCHEMA + 1, "nodes": [], "edges": []}).encode())
    assert hosts(scene.round()) == ["n7"]
    assert f"schema {SCHEMA + 1} is newer" in scene.notes[0] and "update gpuflight" in scene.notes[0]


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (401, b"", "it refuses our token (HTTP 401)"),
        (302, b"", "it redirects (HTTP 302)"),
        (500, b"oops", "HTTP 500"),
        (404, b"", "no graph under any path"),
        (200, b"<html>", "neither a graph|not JSON"),
        (200, b"", "empty"),
        (200, b'{"schema": 1, "nodes": [{"kind": 3}]}', r"nodes\[0\]"),
        (200, b"[" * 100_000, "nested too deeply|not JSON"),
    ],
)
def test_whatever_it_answers_is_a_note_and_no_more(status: int, body: bytes, expected: str) -> None:
    scene = Scene("n7")
    scene.says("n7", status, body)
    assert not scene.round().nodes
    (note,) = scene.notes
    assert note.startswith("n7: ") and any(part in note for part in expected.replace("\\", "").split("|")), note


def test_a_graph_of_the_reference_system_is_read() -> None:
    scene = Scene("npu")
    scene.says("npu", 200, (ROOT / "tests/data/witty/vllm-tp4-npu.json").read_bytes())
    shown = scene.round()
    assert len(shown.nodes) > 100 and not shown.dangling()
    assert {entity.ns.partition("/")[0] for entity in shown} == {"npu"}
    (host,) = [entity for entity in shown.of_kind(nodes.Host) if entity.ns == "npu"]
    assert host.attributes["instance_kind"] == "witty-profiler"


# --- circles and ways ------------------------------------------------------------------------------------------------


def from_peer(name: str, graph: Graph) -> Graph:
    return with_namespace(graph, name)


def whole(name: str) -> Graph:
    return host_graph(name, machine_id=f"m-{name}", boot_id=f"b-{name}")


def test_an_instance_that_pulls_itself_is_not_drawn_twice() -> None:
    scene = Scene("me")
    scene.answers("me", host_graph("node1"), OWN)
    for _ in range(2):
        assert not scene.round().nodes
        assert scene.notes == ["me: it is this very host; it is not drawn twice"]


def test_what_comes_back_of_ourselves_through_others_is_dropped() -> None:
    scene = Scene("a")
    ours = host_graph("node1", nodes.Process(pid=7, start=7), machine_id=OWN["machine_id"], boot_id=OWN["boot_id"])
    ours.try_add_edge(edges.Host("Host(node1)", "Process(pid=7,start=7)"))
    scene.answers("a", whole("a").merge(from_peer("home", ours.merge(from_peer("a", whole("a"))))))
    shown = scene.round()
    assert hosts(shown) == ["a"] and not shown.edges


def test_a_host_that_comes_two_ways_is_drawn_once_by_the_shorter() -> None:
    scene = Scene("b", "a")
    third = whole("a").merge(host_graph("a", nodes.Process(pid=3, start=3)))
    third.try_add_edge(edges.Host("Host(a)", "Process(pid=3,start=3)"))
    scene.answers("a", third)
    scene.answers("b", whole("b").merge(from_peer("a", third)))
    for _ in range(2):
        shown = scene.round()
        assert sorted(hosts(shown)) == ["a", "b"]
        assert [key[0] for key in shown.edges] == ["Host(ns=a,a)"]
    scene.dies("a")
    assert sorted(hosts(scene.round(1.0))) == ["a", "b"], "its last graph stands"
    assert sorted(hosts(scene.round(301.0))) == ["b", "b/a"], "then the longer way is the only one"


def test_the_same_host_under_two_urls() -> None:
    scene = Scene("a", "z")
    for name in ("a", "z"):
        scene.answers(name, whole("a"), {**ENV, "machine_id": "same"})
    assert hosts(scene.round()) == ["a"]
    assert scene.notes == ["z: the same host as a; it is drawn once"]


def test_two_peers_that_call_themselves_the_same() -> None:
    scene = Scene("a", "z", named=False)
    for name in ("a", "z"):
        scene.answers(name, whole(name), {**ENV, "machine_id": name})
    assert hosts(scene.round()) == ["node-7"]
    assert scene.notes == ["http://z:9477: another peer calls itself node-7 too"]


def test_chains_end_at_the_depth_limit_and_are_counted() -> None:
    scene = Scene("a", max_depth=2)
    chain = whole("a").merge(from_peer("b", whole("b").merge(from_peer("c", whole("c")))))
    scene.answers("a", chain)
    assert hosts(scene.round()) == ["a", "a/b"]
    assert scene.collector.losses == {"entities beyond the depth limit of instances": 1}


def test_peers_that_are_too_much_are_left_out_and_counted_smaller_ones_are_not() -> None:
    scene = Scene("a", "b", "c", max_entities=5)
    scene.answers("a", whole("a").merge(host_graph("a", nodes.Process(pid=1, start=1))))
    scene.answers("b", whole("b").merge(host_graph("b", *(nodes.Process(pid=pid, start=1) for pid in range(1, 5)))))
    scene.answers("c", whole("c"))
    assert hosts(scene.round()) == ["a", "c"]
    assert scene.notes == ["b: left out, since all peers together have more than max_entities"]
    assert scene.collector.losses == {"entities of peers beyond the limit": 5}


# --- with the other collectors ---------------------------------------------------------------------------------------


def all_together(scene: Scene) -> Graph:
    """One round of the core with every collector that works on this machine."""
    collectors = [scene.collector, *(cls() for name, cls in plugins(type(scene.collector).__bases__[0]).items()
                                     if name not in ("remote", "nvml"))]  # fmt: skip
    runners = [CollectorRunner(one) for one in sorted(collectors, key=lambda one: -one.precedence)]
    try:
        world = scene.machine.next_round()
        found = expand_world(world, runners, Limits())
        return Graph((n for part in found.nodes for n in part), (e for part in found.edges for e in part))
    finally:
        for runner in runners:
            runner.worker.close()


def test_d04_nothing_here_expands_what_a_peer_reported() -> None:
    """The peer has a process with the pid and start of one of ours, our GPUs' names, our host name, our sockets."""
    plain = Scene("n7")
    ours = all_together(plain)
    assert f"Process(pid={TRAINER},start={1000 + TRAINER})" in ours
    scene = Scene("n7")
    bare = [
        type(node)(
            **{
                name: getattr(node, name)
                for name in node.__struct_fields__
                if name not in ("attributes", "metrics", "unknown")
            }
        )
        for node in ours
    ]
    scene.answers("n7", Graph([node for node in bare if not node.ns]))
    both = all_together(scene)
    foreign = [entity for entity in both if entity.ns == "n7"]
    assert len(foreign) >= len(bare)
    for entity in foreign:
        if type(entity) is not nodes.Host:
            assert not entity.attributes and not entity.metrics, f"{entity.id} was expanded here"
    assert {key for key in both.edges if "ns=n7" in key[0] + key[1]} == set()
    assert {entity.id for entity in both if not entity.ns} == set(ours.nodes)
    assert set(both.edges) == set(ours.edges)


def test_sockets_of_two_hosts_join_across_the_namespaces() -> None:
    """The fake machine has a connection 10.0.0.5:50000 → 192.0.2.7:443 that it knows one end of."""
    scene = Scene("web")
    own = nodes.Socket(protocol="tcp", address="192.0.2.7:443", attributes={"state": "ESTABLISHED"})
    far = nodes.Socket(protocol="tcp", address="10.0.0.5:50000", attributes={"remote": True})
    other = nodes.Socket(protocol="tcp", address="10.0.0.5:50001", attributes={"remote": True})
    scene.answers(
        "web",
        Graph(
            [nodes.Host(hostname="web"), own, far, other],
            [edges.ConnectTo(far.id, own.id, {"half": True}, {"rtt_ms": 2.0}), edges.ConnectTo(other.id, own.id)],
        ),
    )
    graph = all_together(scene)
    crossing = [
        edge for edge in graph.edges_of_kind(edges.ConnectTo) if "ns=" in edge.target and "ns=" not in edge.source
    ]
    assert [(edge.source, edge.target) for edge in crossing] == [
        ("Socket(tcp,10.0.0.5:50000)", "Socket(ns=web,tcp,192.0.2.7:443)")
    ]
    assert crossing[0].metrics == {"rtt_ms": 2.0}
    stand_in = graph.nodes["Socket(tcp,192.0.2.7:443)"]
    assert stand_in.attributes["joined_to"] == "Socket(ns=web,tcp,192.0.2.7:443)"
    assert graph.nodes["Socket(ns=web,tcp,10.0.0.5:50000)"].attributes["joined_to"] == "Socket(tcp,10.0.0.5:50000)"
    assert "joined_to" not in graph.nodes["Socket(ns=web,tcp,10.0.0.5:50001)"].attributes, "nobody has that here"
    half = graph.edges["Socket(tcp,10.0.0.5:50000)", "Socket(tcp,192.0.2.7:443)", "ConnectTo"]
    assert half.attributes["half"] is True, "what we saw ourselves stays"
    assert not graph.dangling()


def test_an_endpoint_that_is_not_in_the_picture_is_not_dragged_in() -> None:
    scene = Scene("web")
    own = nodes.Socket(protocol="tcp", address="192.0.2.7:443")
    far = nodes.Socket(protocol="tcp", address="10.0.0.5:50000", attributes={"remote": True})
    scene.answers("web", Graph([nodes.Host(hostname="web"), own, far], [edges.ConnectTo(far.id, own.id)]))
    shown = scene.round()
    assert not [key for key in shown.edges if "ns=" not in key[0] or "ns=" not in key[1]]
    assert not scene.collector.expand([nodes.Socket(protocol="tcp", address="10.0.0.5:8000")]).edges


def test_peers_are_joined_with_each_other() -> None:
    scene = Scene("a", "b")
    ends = ("10.1.0.1:40000", "10.1.0.2:29500")
    for name, at in (("a", 0), ("b", 1)):
        sockets = [
            nodes.Socket(protocol="tcp", address=address, attributes={} if index == at else {"remote": True})
            for index, address in enumerate(ends)
        ]
        link = edges.ConnectTo(sockets[0].id, sockets[1].id, {"half": True})
        scene.answers(name, Graph([nodes.Host(hostname=name), *sockets], [link]))
    for _ in range(2):
        graph = scene.round()
        assert ("Socket(ns=a,tcp,10.1.0.1:40000)", "Socket(ns=b,tcp,10.1.0.2:29500)", "ConnectTo") in graph.edges
        assert len(graph.edges) == 3
    scene.dies("b")
    left = scene.round(301.0)
    assert len(left.edges) == 1 and hosts(left) == ["a"], "the half of the one that is left"


def test_it_comes_after_the_sockets_collector() -> None:
    """Who asks for sockets first decides how many closed ones are read."""
    assert Remote.precedence < Sockets.precedence


# --- settings --------------------------------------------------------------------------------------------------------


def test_names_of_peers_are_unique_and_can_stand_in_ids() -> None:
    for peers in (
        [{"url": "http://a", "name": "x"}, {"url": "http://b", "name": "x"}],
        [{"url": "http://a", "name": "x/y"}],
        [{"url": "ftp://a"}],
        [{"url": "http://user:pw@a"}],
        [{"url": "http://a?token=x"}],
    ):
        with pytest.raises(ValidationError):
            RemoteSettings.model_validate({"peers": peers})


def test_remotes_of_the_settings_are_the_collectors_peers() -> None:
    from gpuflight.cli.plugin_settings import effective, make_collectors

    remotes = [{"url": "http://a:1", "name": "a", "token": "hush", "timeout_s": 2.0}, {"url": "http://b:1"}]
    settings = Settings.model_validate({"remotes": remotes, "collectors": {"remote": {"interval_s": 7.0}}})
    (made,) = [one for one in make_collectors(settings) if isinstance(one, Remote)]
    options = [peer.options for peer in made._peers]
    assert [(one.url, one.name, one.token, one.timeout_s, one.interval_s) for one in options] == [
        ("http://a:1", "a", "hush", 2.0, 7.0),
        ("http://b:1", "", "", 5.0, 7.0),
    ]
    assert "hush" not in repr(made.settings) and "hush" not in json.dumps(effective(settings))
    made.close()
    wrong = [{"url": "http://a:1", "name": "a"}, {"url": "b"}, {"url": "http://c", "name": "a"}]
    with pytest.raises(ConfigError) as caught:
        make_collectors(Settings.model_validate({"remotes": wrong}))
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == ["remotes[1].url", "remotes[2].name"]
