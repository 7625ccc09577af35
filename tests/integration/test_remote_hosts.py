"""Two hosts as two network namespaces with a veth between them: one pulls the other, and sees the very connection that
it pulls with as one edge from machine to machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.rig
SERVER = str(Path(sys.executable).with_name("gpuflight-server"))
PORT = 9477
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
        collectors = {"static": {"pids": [1]}, **config.pop("collectors", {})}
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


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host, ExitStack]]:
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("unshare")):
        pytest.skip("making hosts needs root, ip and unshare")
    if not Path("/etc/machine-id").exists():
        pytest.skip("there is no /etc/machine-id to put another over")
    with ExitStack() as stack:
        one, other = (Host(stack, tmp_path, f"node-{n}", f"10.213.77.{n}") for n in (1, 2))
        ends = [f"gfv{uuid.uuid4().hex[:8]}" for _ in range(2)]
        command("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for host, end in zip((one, other), ends, strict=True):
            command("ip", "link", "set", end, "netns", host.netns)
            command("ip", "-n", host.netns, "addr", "add", f"{host.address}/24", "dev", end)
            command("ip", "-n", host.netns, "link", "set", end, "up")
        yield one, other, stack


def test_the_picture_crosses_the_machines(hosts: tuple[Host, Host, ExitStack]) -> None:
    child, parent, stack = hosts
    child.serve(stack, child.address)
    remotes = [{"url": f"http://{child.address}:{PORT}", "token": TOKEN}]
    parent.serve(stack, parent.address, remotes=remotes, collectors={"remote": {"interval_s": 0.3}})
    end_s = time.monotonic() + PATIENCE_S
    crossing: list[dict[str, Any]] = []
    graph: dict[str, Any] = {}
    while not crossing:
        assert time.monotonic() < end_s, (parent.folder / "log").read_text() + (child.folder / "log").read_text()
        graph = parent.graph()
        crossing = [edge for edge in graph.get("edges", []) if edge.get("attributes", {}).get("join") == "both_ends"]
        time.sleep(0.05)
    at_child = f"Socket(ns=node-1,tcp,{child.address}:{PORT})"
    assert {edge["target"] for edge in crossing} == {at_child}, "it opened the connection, the other one accepted it"
    assert all(edge["source"].startswith(f"Socket(tcp,{parent.address}:") for edge in crossing)
    nodes = {node["id"]: node for node in graph["nodes"]}
    owners = {edge["target"] for edge in graph["edges"] if edge["kind"] == "Belong" and edge["source"] == at_child}
    assert len(owners) == 1 and nodes[owners.pop()]["attributes"]["name"].startswith("gpuflight"), "down to the process"
    assert nodes["Host(ns=node-1,node-1)"]["metrics"]["clock_offset_error_s"] < 1.5
    stand_in = nodes[f"Socket(tcp,{child.address}:{PORT})"]
    assert stand_in["attributes"]["remote"] is True and stand_in["attributes"]["joined_to"] == at_child
