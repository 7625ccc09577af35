"""Two hosts as two network namespaces with a veth between them: one pulls the other, and sees the very connection that
it pulls with as one edge from machine to machine; or, through a router that translates addresses, as two halves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gpuflight.graph.load import parse_graph
from gpuflight.vis.base import LayoutOptions
from gpuflight.vis.layout.default import DefaultLayout

pytestmark = pytest.mark.rig
SERVER = str(Path(sys.executable).with_name("gpuflight-server"))
PORT = 9477
ROUTER = "10.213.78.254"
TOKEN = "a-token-of-the-rig-0123456789"
PATIENCE_S = 60.0
_LIKE_A_MACHINE = 'mount --bind "$1" /etc/machine-id; hostname "$2"; shift 2; exec "$@"'


class Host:
    """A network namespace with processes, a host name and a machine id of its own."""

    def __init__(self, stack: ExitStack, folder: Path, name: str, address: str) -> None:
        self.name, self.address = name, address
        self.netns = f"gf-{uuid.uuid4().hex[:8]}"
        self.folder = folder / name
        self.folder.mkdir()
        (self.folder / "machine-id").write_text(uuid.uuid4().hex + "\n")
        command("ip", "netns", "add", self.netns)
        stack.callback(subprocess.run, ["ip", "netns", "del", self.netns], check=False)
        command("ip", "-n", self.netns, "link", "set", "lo", "up")

    def serve(self, stack: ExitStack, host: str, **config: Any) -> None:
        server = {"host": host, "port": PORT, "auth": {"token": TOKEN}}
        # These hosts share one kernel, so its probes would see the sockets of both: no two real hosts do.
        own = {"static": {"pids": [1]}, "kernel_net": {"enabled": False}}
        collectors = {**own, **config.pop("collectors", {})}
        path = self.folder / "server.json"
        path.write_text(json.dumps({"interval_s": 0.3, "server": server, "collectors": collectors, **config}))
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(self.folder)}
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.netns, "unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc",
             "--kill-child", "sh", "-c", _LIKE_A_MACHINE, "sh", str(self.folder / "machine-id"), self.name,
             SERVER, "--config", str(path)],
            env=environment, stderr=(self.folder / "log").open("wb"),
        )  # fmt: skip
        stack.callback(process.wait)
        stack.callback(process.kill)

    def graph(self) -> dict[str, Any]:
        """What its own server says, asked from within."""
        code = (
            "import httpx,sys;sys.stdout.write(httpx.get(sys.argv[1],headers={'Authorization':'Bearer '+sys.argv[2]},"
            "trust_env=False).raise_for_status().text)"
        )
        url = f"http://{self.address}:{PORT}/api/v1/graph"
        done = subprocess.run(
            ["ip", "netns", "exec", self.netns, sys.executable, "-c", code, url, TOKEN], capture_output=True
        )
        found: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
        return found


def command(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the rig cannot run here: {' '.join(words)}: {done.stderr.strip()}")


def check_rig() -> None:
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("unshare")):
        pytest.skip("making hosts needs root, ip and unshare")
    if not Path("/etc/machine-id").exists():
        pytest.skip("there is no /etc/machine-id to put another over")


def wire(one: str, one_address: str, other: str, other_address: str) -> None:
    """A veth between two network namespaces, with an address (and length of prefix) at each end."""
    ends = [f"gfv{uuid.uuid4().hex[:8]}" for _ in range(2)]
    command("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
    for netns, end, address in ((one, ends[0], one_address), (other, ends[1], other_address)):
        command("ip", "link", "set", end, "netns", netns)
        command("ip", "-n", netns, "addr", "add", address, "dev", end)
        command("ip", "-n", netns, "link", "set", end, "up")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host, ExitStack]]:
    check_rig()
    with ExitStack() as stack:
        one, other = (Host(stack, tmp_path, f"node-{n}", f"10.213.77.{n}") for n in (1, 2))
        wire(one.netns, f"{one.address}/24", other.netns, f"{other.address}/24")
        yield one, other, stack


@pytest.fixture
def hosts_behind_nat(tmp_path: Path) -> Iterator[tuple[Host, Host, ExitStack]]:
    """The second one reaches the first through a router that shows its own address in place of that one's."""
    check_rig()
    if not shutil.which("iptables"):
        pytest.skip("making a router that translates needs iptables; tests/unit/test_remote_join.py has it in memory")
    with ExitStack() as stack:
        outer, inner = Host(stack, tmp_path, "node-1", "10.213.78.1"), Host(stack, tmp_path, "node-2", "10.213.79.2")
        router = Host(stack, tmp_path, "router", ROUTER)
        wire(outer.netns, f"{outer.address}/24", router.netns, f"{ROUTER}/24")
        wire(inner.netns, f"{inner.address}/24", router.netns, "10.213.79.254/24")
        command("ip", "-n", inner.netns, "route", "add", "default", "via", "10.213.79.254")
        within = ("ip", "netns", "exec", router.netns)
        command(*within, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        command(*within, "iptables", "-t", "nat", "-A", "POSTROUTING", "-s", f"{inner.address}/32", "-j", "MASQUERADE")
        yield outer, inner, stack


def both_serve(child: Host, parent: Host, stack: ExitStack) -> None:
    child.serve(stack, child.address)
    remotes = [{"url": f"http://{child.address}:{PORT}", "token": TOKEN}]
    parent.serve(stack, parent.address, remotes=remotes, collectors={"remote": {"interval_s": 0.3}})


def wait_for(child: Host, parent: Host, found: Callable[[dict[str, Any]], Any]) -> Any:
    """What ``found`` finds in a graph of the parent, sooner or later."""
    end_s = time.monotonic() + PATIENCE_S
    while not (result := found(parent.graph())):
        assert time.monotonic() < end_s, (parent.folder / "log").read_text() + (child.folder / "log").read_text()
        time.sleep(0.05)
    return result


def joined(graph: dict[str, Any]) -> list[dict[str, Any]]:
    return [edge for edge in graph.get("edges", []) if edge.get("attributes", {}).get("join") == "both_ends"]


def test_the_picture_crosses_the_machines(hosts: tuple[Host, Host, ExitStack], tmp_path: Path) -> None:
    child, parent, stack = hosts
    both_serve(child, parent, stack)
    graph = wait_for(child, parent, lambda graph: graph if joined(graph) else None)
    crossing = joined(graph)
    at_child = f"Socket(ns=node-1,tcp,{child.address}:{PORT})"
    assert {edge["target"] for edge in crossing} == {at_child}, "it opened the connection, the other one accepted it"
    assert all(edge["source"].startswith(f"Socket(tcp,{parent.address}:") for edge in crossing)
    nodes = {node["id"]: node for node in graph["nodes"]}
    owners = {edge["target"] for edge in graph["edges"] if edge["kind"] == "Belong" and edge["source"] == at_child}
    assert len(owners) == 1 and nodes[owners.pop()]["attributes"]["name"].startswith("gpuflight"), "down to the process"
    stand_in = nodes[f"Socket(tcp,{child.address}:{PORT})"]
    assert stand_in["attributes"]["remote"] is True and stand_in["attributes"]["joined_to"] == at_child
    metrics = nodes["Host(ns=node-1,node-1)"]["metrics"]
    assert abs(metrics["clock_offset_s"]) <= metrics["clock_offset_error_s"], "two hosts with one clock"
    wait_for(child, parent, lambda graph: clock_error_s(graph) < 0.05)
    check_picture(graph, {(edge["source"], edge["target"]) for edge in crossing}, tmp_path)


def clock_error_s(graph: dict[str, Any]) -> float:
    """A Date header alone would leave half a second at best."""
    hosts = [node for node in graph.get("nodes", []) if node["id"] == "Host(ns=node-1,node-1)"]
    return min((host["metrics"].get("clock_offset_error_s", 9.9) for host in hosts), default=9.9)


def check_picture(graph: dict[str, Any], crossing: set[tuple[str, str]], folder: Path) -> None:
    """As gpuflight-vis draws it: each connection of the two hosts once, in the very places of its ends."""
    file = folder / "graph.json"
    file.write_text(json.dumps(graph))
    vis = str(Path(sys.executable).with_name("gpuflight-vis"))
    subprocess.run([vis, str(file), "-o", str(folder / "picture.html")], check=True, capture_output=True)
    assert (folder / "picture.html").stat().st_size > 10_000
    picture = DefaultLayout().layout(parse_graph(file.read_bytes()).graph, LayoutOptions())
    drawn = [(link.source, link.target) for link in picture.links if link.kind == "ConnectTo"]
    for source, target in crossing:
        assert drawn.count((source, target)) == 1
        assert [other for one, other in drawn if one == source] == [target], "not to the stand-in as well"


def test_what_a_router_translates_is_not_joined_and_both_ends_stay(
    hosts_behind_nat: tuple[Host, Host, ExitStack],
) -> None:
    child, parent, stack = hosts_behind_nat
    both_serve(child, parent, stack)
    seen = f"Socket(ns=node-1,tcp,{ROUTER}:"
    there = f"Socket(ns=node-1,tcp,{child.address}:{PORT})"
    here = f"Socket(tcp,{child.address}:{PORT})"

    def halves(graph: dict[str, Any]) -> tuple[dict[str, Any], list[Any], list[Any]] | None:
        links = [edge for edge in graph.get("edges", []) if edge["kind"] == "ConnectTo"]
        of_child = [edge for edge in links if edge["source"].startswith(seen) and edge["target"] == there]
        of_parent = [edge for edge in links if edge["target"] == here]
        return (graph, of_child, of_parent) if of_child and of_parent else None

    graph, of_child, of_parent = wait_for(child, parent, halves)
    assert joined(graph) == [], "no one can know that these are one connection"
    nodes = {node["id"]: node for node in graph["nodes"]}
    for edge in of_child + of_parent:
        assert edge["attributes"]["half"] is True
    for id_ in [edge["source"] for edge in of_child] + [here]:
        assert nodes[id_]["attributes"]["remote"] is True and "joined_to" not in nodes[id_]["attributes"]
    assert all(edge["source"].startswith(f"Socket(tcp,{parent.address}:") for edge in of_parent), "its own address"
