"""The containers collector: boxes in boxes, rates, limits, names from the runtimes' files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from proc_fixture import FixtureWorld, ProcFixture

from gpuflight.collectors.containers import ContainersCollector
from gpuflight.graph import Graph, nodes
from gpuflight.sources.cgroups import Cgroups
from gpuflight.sources.container_files import ContainerFiles
from gpuflight.sources.fs import HostFs
from gpuflight.sources.redact_recording import redact_answer

A = "4f797c539e6c745de61a93ca3ff892358ecbcaccd8414d5db545c38428142970"
UID = "3e61c214-bc3e-4d0a-b0c9-2d5b1f2f2f7b"
POD = f"/kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice"
V2_MOUNT = "35 24 0:28 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
CRI = {
    "annotations": {
        "io.kubernetes.cri.container-type": "container",
        "io.kubernetes.cri.container-name": "trainer",
        "io.kubernetes.cri.sandbox-name": "train-0",
        "io.kubernetes.cri.sandbox-namespace": "ml",
        "io.kubernetes.cri.image-name": "example/train:7",
    },
    "process": {"env": ["TOKEN=secret"]},
}


@pytest.fixture
def machine(tmp_path: Path) -> ProcFixture:
    machine = ProcFixture(tmp_path)
    machine.own(mountinfo=V2_MOUNT)
    return machine


class Rounds:
    """A collector that lives through several rounds of one machine."""

    def __init__(self, machine: ProcFixture) -> None:
        self.machine = machine
        self.world: Any = FixtureWorld(machine, cgroups=Cgroups(machine.fs, machine.procfs))
        self.collector = ContainersCollector()
        self.number = 0

    def look(self) -> Graph:
        self.number += 1
        self.world.begin_round(self.number)
        self.collector.losses.clear()
        self.collector.notes.clear()
        self.collector.observe(self.world)
        frontier = [nodes.Process(pid=stat.pid, start=stat.start) for stat in self.world.procfs.processes().values()]
        batch = self.collector.expand(frontier)
        return Graph(batch.nodes, batch.edges)


def hosts(graph: Graph) -> set[tuple[str, str]]:
    assert all(edge.kind == "Host" for edge in graph.edges.values())
    return {(edge.source, edge.target) for edge in graph.edges.values()}


def group(
    machine: ProcFixture, path: str, *, usage_us: int = 0, quota: str = "max", periods: int = 0, throttled: int = 0
) -> None:
    root = f"/sys/fs/cgroup{path}"
    machine.write(
        f"{root}/cpu.stat", f"usage_usec {usage_us}\nnr_periods {periods}\nnr_throttled {throttled}\nthrottled_usec 0\n"
    )
    machine.write(f"{root}/cpu.max", f"{quota} 100000\n")
    machine.write(f"{root}/memory.current", "4096\n")
    machine.write(f"{root}/memory.max", "max\n")
    machine.write(f"{root}/memory.events", "oom_kill 0\n")
    machine.write(f"{root}/pids.current", "1\n")
    machine.write(f"{root}/pids.max", "max\n")


def test_host_pod_container_process(machine: ProcFixture) -> None:
    path = f"{POD}/cri-containerd-{A}.scope"
    machine.process(10, cgroup=f"0::{path}\n")
    group(machine, POD)
    group(machine, path)
    machine.write(f"/run/containerd/io.containerd.runtime.v2.task/k8s.io/{A}/config.json", json.dumps(CRI))
    graph = Rounds(machine).look()
    assert hosts(graph) == {
        ("Host(box)", f"Pod({UID})"),
        (f"Pod({UID})", f"Container({A})"),
        (f"Container({A})", "Process(pid=10,start=1000)"),
    }
    container = graph.nodes[f"Container({A})"]
    assert container.attributes == {
        "name": "trainer",
        "image": "example/train:7",
        "runtime": "containerd",
        "pod_uid": UID,
        "cgroup": path,
    }
    pod = graph.nodes[f"Pod({UID})"]
    assert pod.attributes == {
        "name": "train-0",
        "namespace": "ml",
        "qos": "guaranteed",
        "runtime": "kubernetes",
        "cgroup": POD,
    }
    assert "secret" not in str(graph.model_dump())


def test_docker_in_docker_and_a_unit_inside(machine: ProcFixture) -> None:
    b = "9" * 64
    machine.process(10, cgroup=f"0::/docker/{A}/docker/{b}\n")
    machine.process(11, cgroup=f"0::/docker/{A}/system.slice/sshd.service\n")
    graph = Rounds(machine).look()
    unit = f"Unit(/docker/{A}/system.slice/sshd.service)"
    assert hosts(graph) == {
        ("Host(box)", f"Container({A})"),
        (f"Container({A})", f"Container({b})"),
        (f"Container({A})", unit),
        (f"Container({b})", "Process(pid=10,start=1000)"),
        (unit, "Process(pid=11,start=1000)"),
    }


def test_processes_at_the_root_and_kernel_threads_have_no_holder(machine: ProcFixture) -> None:
    machine.process(10, cgroup="0::/\n")
    machine.process(11, cgroup="0::/user.slice\n")
    machine.process(12, cgroup="0::/system.slice/x.service\n", flags=0x200000)
    graph = Rounds(machine).look()
    assert len(graph.nodes) == len(graph.edges) == 0


def test_cpu_is_a_rate_and_unknown_at_first(machine: ProcFixture) -> None:
    path = f"/docker/{A}"
    machine.process(10, cgroup=f"0::{path}\n")
    group(machine, path, usage_us=10_000_000)
    rounds = Rounds(machine)
    first = rounds.look().nodes[f"Container({A})"]
    assert "cpu_pct" not in first.metrics
    assert first.unknown is not None
    assert "two readings" in first.unknown["cpu_pct"]
    assert first.metrics["memory_used_bytes"] == 4096
    assert "memory_limit_bytes" not in first.metrics
    assert "memory_limit_bytes" not in first.unknown  # there is none: nothing is unknown about that
    machine.clock.advance(5.0)
    group(machine, path, usage_us=20_000_000)
    second = rounds.look().nodes[f"Container({A})"]
    assert second.metrics["cpu_pct"] == 200.0
    assert second.unknown is None


def test_throttling_is_the_share_of_the_periods_since_the_last_round(machine: ProcFixture) -> None:
    path = f"/docker/{A}"
    machine.process(10, cgroup=f"0::{path}\n")
    group(machine, path, quota="50000", periods=100, throttled=90)
    rounds = Rounds(machine)
    first = rounds.look().nodes[f"Container({A})"]
    assert first.metrics["cpu_quota_cores"] == 0.5
    assert first.unknown is not None
    assert "throttled_pct" in first.unknown
    machine.clock.advance(5.0)
    group(machine, path, quota="50000", periods=150, throttled=100)
    assert rounds.look().nodes[f"Container({A})"].metrics["throttled_pct"] == 20.0
    machine.clock.advance(5.0)
    idle = rounds.look().nodes[f"Container({A})"]
    assert "throttled_pct" not in idle.metrics
    assert idle.unknown is not None
    assert "no enforcement period" in idle.unknown["throttled_pct"]


def test_a_container_without_a_readable_name_shows_its_runtime_and_short_id(machine: ProcFixture) -> None:
    machine.process(10, cgroup=f"0::/machine.slice/libpod-{A}.scope\n")
    rounds = Rounds(machine)
    graph = rounds.look()
    assert graph.nodes[f"Container({A})"].label == f"podman-{A[:12]}"  # the id itself is whole (T32)
    assert any("name of some containers" in reason for reason in rounds.collector.notes)


def test_a_process_that_ends_between_two_readings_costs_only_itself(machine: ProcFixture) -> None:
    machine.process(10, cgroup="0::/system.slice/a.service\n")
    machine.process(11, cgroup="0::/system.slice/b.service\n")
    (machine.root / "proc/10/cgroup").unlink()
    rounds = Rounds(machine)
    graph = rounds.look()
    assert "Unit(/system.slice/b.service)" in graph.nodes
    assert rounds.collector.losses == {"vanished processes": 1}


def test_docker_names(machine: ProcFixture) -> None:
    config = {"ID": A, "Name": "/train", "Config": {"Image": "example/train:7", "Env": ["TOKEN=secret"]}}
    machine.write(f"/srv/docker/containers/{A}/config.v2.json", json.dumps(config))
    machine.write("/etc/docker/daemon.json", '{"data-root": "/srv/docker"}')
    facts = ContainerFiles(machine.fs).facts(A, "docker")
    assert (facts.name, facts.image, facts.reason) == ("train", "example/train:7", "")


def test_podman_names_of_root_and_of_a_user(machine: ProcFixture) -> None:
    b = "9" * 64
    for root, identity, name in (
        ("/var/lib/containers/storage", A, "web"),
        ("/home/u/.local/share/containers/storage", b, "mine"),
    ):
        stored = [{"id": identity, "names": [name], "metadata": json.dumps({"image-name": "example/x", "name": name})}]
        machine.write(f"{root}/overlay-containers/containers.json", json.dumps(stored))
    machine.write("/etc/passwd", "root:x:0:0:root:/root:/bin/sh\nu:x:1000:1000::/home/u:/bin/sh\n")
    files = ContainerFiles(machine.fs)
    assert files.facts(A, "podman").name == "web"
    assert files.facts(b, "podman", 1000).name == "mine"
    assert files.facts(b, "podman").reason


def test_crio_names(machine: ProcFixture) -> None:
    annotations = {
        "io.kubernetes.container.name": "server",
        "io.kubernetes.pod.name": "web-1",
        "io.kubernetes.pod.namespace": "prod",
        "io.kubernetes.cri-o.ImageName": "example/web:1",
    }
    machine.write(
        f"/run/containers/storage/overlay-containers/{A}/userdata/config.json", json.dumps({"annotations": annotations})
    )
    facts = ContainerFiles(machine.fs).facts(A, "cri-o")
    assert (facts.name, facts.pod_name, facts.pod_namespace) == ("server", "web-1", "prod")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"Name": 7}'])
def test_a_damaged_file_is_as_none(machine: ProcFixture, content: str) -> None:
    machine.write(f"/var/lib/docker/containers/{A}/config.v2.json", content)
    assert ContainerFiles(machine.fs).facts(A, "docker").reason


def test_what_may_not_be_read_is_said(machine: ProcFixture) -> None:
    class Denying(HostFs):
        def read(self, path: str) -> bytes:
            raise PermissionError(13, "denied", path)

    assert "may not be read" in ContainerFiles(Denying()).facts(A, "docker").reason


def test_names_are_read_once_per_container(machine: ProcFixture) -> None:
    machine.process(10, cgroup=f"0::/docker/{A}\n")
    reads: list[str] = []

    class Counting(HostFs):
        def read(self, path: str) -> bytes:
            reads.append(path)
            return super().read(path)

    rounds = Rounds(machine)
    rounds.world.cgroups = Cgroups(Counting(str(machine.root)), machine.procfs)
    machine.write(f"/var/lib/docker/containers/{A}/config.v2.json", json.dumps({"Name": "/x"}))
    for _ in range(3):
        assert rounds.look().nodes[f"Container({A})"].label == "x"
    assert sum(path.endswith("config.v2.json") for path in reads) == 1


@pytest.mark.parametrize(
    ("path", "content"),
    [
        (
            f"/var/lib/docker/containers/{A}/config.v2.json",
            {"Name": "/x", "Args": ["--key=secret"], "Config": {"Env": ["T=secret"], "Labels": {"own": "secret"}}},
        ),
        (f"/run/containerd/io.containerd.runtime.v2.task/k8s.io/{A}/config.json", CRI),
        (
            "/var/lib/containers/storage/overlay-containers/containers.json",
            [
                {
                    "id": A,
                    "names": ["x"],
                    "metadata": json.dumps({"name": "x", "secret": "secret"}),
                    "flags": {"a": "secret"},
                }
            ],
        ),
        (f"/var/lib/docker/containers/{A}/config.v2.json", "secret"),
    ],
)
def test_a_recording_gets_the_names_and_not_the_secrets(tmp_path: Path, path: str, content: Any) -> None:
    raw = json.dumps(content).encode()
    assert b"secret" in raw
    stored = redact_answer("files", f"read {path}", raw)
    assert b"secret" not in stored
    before, after = ProcFixture(tmp_path / "before"), ProcFixture(tmp_path / "after")
    before.write(path, raw)
    after.write(path, stored)
    assert ContainerFiles(after.fs).facts(A, "") == ContainerFiles(before.fs).facts(A, "")


def test_other_files_are_recorded_as_they_are() -> None:
    raw = b'{"anything": 1}'
    for path in ("/etc/os-release", "/opt/app/config.json", "/opt/app/containers.json"):
        assert redact_answer("files", f"read {path}", raw) == raw
