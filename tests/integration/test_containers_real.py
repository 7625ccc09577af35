"""Containers on the real kernel: groups and namespaces made by hand, as a runtime makes them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuflight.collectors.containers import ContainersCollector
from gpuflight.graph import Graph, nodes
from gpuflight.sources.cgroups import Cgroups
from gpuflight.sources.clock import ManualClock
from gpuflight.sources.fs import HostFs
from gpuflight.sources.procfs import ProcFs

pytestmark = [
    pytest.mark.rig,
    pytest.mark.skipif(os.geteuid() != 0, reason="makes cgroups and mounts: needs root"),
]

ID = f"{os.getpid():08x}" + "4f797c539e6c745de61a93ca3ff892358ecbcaccd8414d5db545c381"
assert len(ID) == 64

# Memory is charged to the group in which it is first touched: so only after being moved.
CHILD = "import sys\nsys.stdin.readline()\nblock = b'x' * (8 << 20)\nprint('up', flush=True)\nsys.stdin.read()\n"


def hierarchies() -> list[Path]:
    """Where this machine's cgroup hierarchies are mounted."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if after.split()[0] in ("cgroup", "cgroup2"):
            found.append(Path(before.split()[4]))
    return found


@pytest.fixture
def group() -> Iterator[list[Path]]:
    """A group ``docker/<id>`` in every hierarchy; skips where none can be made."""
    made: list[Path] = []
    own: list[Path] = []
    try:
        for hierarchy in hierarchies():
            for place in (hierarchy / "docker", hierarchy / "docker" / ID):
                if not place.exists():
                    place.mkdir()
                    own.append(place)
            made.append(hierarchy / "docker" / ID)
    except OSError as error:
        for place in reversed(own):
            place.rmdir()
        pytest.skip(f"no cgroup can be made here: {error}")
    if not made:
        pytest.skip("no cgroup hierarchy is mounted here")
    yield made
    deadline_s = time.monotonic() + 10
    for place in reversed(own):
        while place.exists():
            try:
                place.rmdir()
            except OSError:  # the kernel has not let go of the ended process yet
                if place.name == "docker":
                    break  # someone else's container came into it
                assert time.monotonic() < deadline_s
                os.sched_yield()


class Looker:
    """Rounds of the containers collector on the real machine, with a clock that moves when told."""

    def __init__(self) -> None:
        fs = HostFs()
        self.clock = ManualClock()
        self.procfs = ProcFs(fs, self.clock)
        self.cgroups = Cgroups(fs, self.procfs)
        self.collector = ContainersCollector()
        self.number = 0

    def look(self, pid: int) -> Graph:
        self.number += 1
        self.procfs.begin_round(self.number)
        self.cgroups.begin_round(self.number)
        self.clock.advance(1.0)
        world: Any = self
        self.collector.observe(world)
        stat = self.procfs.processes()[pid]
        batch = self.collector.expand([nodes.Process(pid=pid, start=stat.start)])
        return Graph(batch.nodes, batch.edges)


def put(group: list[Path], pid: int) -> None:
    for place in group:
        try:
            (place / "cgroup.procs").write_text(str(pid))
        except OSError:  # a cpuset without CPUs takes nobody; the other hierarchies do
            continue


def test_a_container_s_group_is_found_with_its_counters(group: list[Path]) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        put(group, child.pid)
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write("go\n")
        child.stdin.flush()
        assert child.stdout.readline() == "up\n"
        limits = [place / name for place in group for name in ("memory.limit_in_bytes", "memory.max")]
        limit = next((file for file in limits if file.exists()), None)
        if limit is not None:
            limit.write_text(str(64 << 20))
        looker = Looker()
        looker.look(child.pid)
        graph = looker.look(child.pid)
        container = graph.nodes[f"Container({ID})"]
        host = f"Host({os.uname().nodename})"
        assert {(e.source, e.target) for e in graph.edges.values()} == {
            (host, container.id),
            (container.id, f"Process(pid={child.pid},start={looker.procfs.processes()[child.pid].start})"),
        }
        assert container.attributes["runtime"] == "docker"
        if limit is not None:
            assert container.metrics["memory_limit_bytes"] == 64 << 20
            assert 8 << 20 <= container.metrics["memory_used_bytes"] <= 64 << 20
        for name, file in (("pids_count", "pids.current"), ("cpu_pct", "cpuacct.usage")):
            if any((place / file).exists() for place in group):
                assert name in container.metrics
        # Everything that is not there has a reason, and nothing is both.
        for name in ("cpu_pct", "memory_used_bytes", "pids_count"):
            assert (name in container.metrics) != (name in (container.unknown or {}))
        assert "cpu_quota_cores" not in container.metrics
    finally:
        child.communicate(timeout=20)


IN_NAMESPACES = """
import ctypes, json, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def check(result):
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
CLONE_NEWNS, CLONE_NEWCGROUP, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 0x02000000, 4096, 16384, 1 << 18
check(libc.unshare(CLONE_NEWNS | CLONE_NEWCGROUP))
check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
check(libc.mount(sys.argv[1].encode(), b"/etc/hostname", None, MS_BIND, None))
from gpuflight.sources.cgroups import Cgroups
from gpuflight.sources.clock import ManualClock
from gpuflight.sources.fs import HostFs
from gpuflight.sources.procfs import ProcFs
fs = HostFs()
procfs = ProcFs(fs, ManualClock())
info = Cgroups(fs, procfs).of(os.getpid())
print(json.dumps([info.container_id, info.runtime]))
"""


def test_inside_a_private_cgroup_namespace_the_mounts_tell_the_container(tmp_path: Path) -> None:
    """T16, T17, with real namespaces and a real mount table."""
    if not Path("/etc/hostname").exists():
        pytest.skip("there is no /etc/hostname to mount over")
    mounted = tmp_path / "var/lib/docker/containers" / ID / "hostname"
    mounted.parent.mkdir(parents=True)
    mounted.write_text("inner\n")
    done = subprocess.run(
        [sys.executable, "-c", IN_NAMESPACES, str(mounted)], capture_output=True, text=True, timeout=60
    )
    if "Operation not permitted" in done.stderr:
        pytest.skip("namespaces cannot be made here")
    assert done.stderr == ""
    assert json.loads(done.stdout) == [ID, "docker"]
