"""What cgroup paths and mounts of every runtime say about where a process runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuflight.sources.cgroup_paths import layers, layers_of_mountinfo, unescape

A = "4f797c539e6c745de61a93ca3ff892358ecbcaccd8414d5db545c38428142970"
B = "9f4c3c1d2f0e8b7a6d5c4b3a29181706f5e4d3c2b1a09f8e7d6c5b4a39281706"
P = "2c7c52a8d0f04f9d89ab3f1c4e5d6a7b8c9dae0f1a2b3c4d5e6f708192a3b4c5"
UID = "3e61c214-bc3e-4d0a-b0c9-2d5b1f2f2f7b"
UID_ = UID.replace("-", "_")
STATIC = "b2f5a1c3d4e5f60718293a4b5c6d7e8f"

# path → (kind, identity, runtime) of each layer, outermost first
CASES: dict[str, list[tuple[str, str, str]]] = {
    "/": [],
    "/user.slice": [],
    "/system.slice": [],
    "/init.scope": [("unit", "/init.scope", "")],
    "/system.slice/nginx.service": [("unit", "/system.slice/nginx.service", "")],
    "/system.slice/system-getty.slice/getty@tty1.service": [
        ("unit", "/system.slice/system-getty.slice/getty@tty1.service", "")
    ],
    "/user.slice/user-1000.slice/session-3.scope": [("unit", "/user.slice/user-1000.slice/session-3.scope", "")],
    "/user.slice/user-1000.slice/user@1000.service/app.slice/app-jupyter.service": [
        ("unit", "/user.slice/user-1000.slice/user@1000.service", ""),
        ("unit", "/user.slice/user-1000.slice/user@1000.service/app.slice/app-jupyter.service", ""),
    ],
    # docker: cgroupfs and systemd drivers, the daemon's own unit, very old flat names
    f"/docker/{A}": [("container", A, "docker")],
    f"/system.slice/docker-{A}.scope": [("container", A, "docker")],
    f"/{A}": [("container", A, "")],
    f"/moby/{A}": [("container", A, "docker")],
    f"/docker/{A}/system.slice/sshd.service": [
        ("container", A, "docker"),
        ("unit", f"/docker/{A}/system.slice/sshd.service", ""),
    ],
    f"/docker/{A}/docker/{B}": [("container", A, "docker"), ("container", B, "docker")],
    f"/system.slice/docker-{A}.scope/docker/{B}": [("container", A, "docker"), ("container", B, "docker")],
    "/docker/buildkit/k3v0ub1xhcqxp6wb3n0sf0c2e": [("container", "k3v0ub1xhcqxp6wb3n0sf0c2e", "buildkit")],
    f"/user.slice/user-1000.slice/user@1000.service/user.slice/docker-{A}.scope": [
        ("unit", "/user.slice/user-1000.slice/user@1000.service", ""),
        ("container", A, "docker"),
    ],
    # kubernetes: three QoS classes, both drivers, static pods, docker, containerd and CRI-O below it
    f"/kubepods/burstable/pod{UID}/{A}": [("pod", UID, "kubernetes"), ("container", A, "kubernetes")],
    f"/kubepods/besteffort/pod{UID}/{A}": [("pod", UID, "kubernetes"), ("container", A, "kubernetes")],
    f"/kubepods/pod{UID}/{A}": [("pod", UID, "kubernetes"), ("container", A, "kubernetes")],
    f"/kubepods/burstable/pod{STATIC}/{A}": [("pod", STATIC, "kubernetes"), ("container", A, "kubernetes")],
    f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID_}.slice/cri-containerd-{A}.scope": [
        ("pod", UID, "kubernetes"),
        ("container", A, "containerd"),
    ],
    f"/kubepods.slice/kubepods-pod{UID_}.slice/crio-{A}.scope": [
        ("pod", UID, "kubernetes"),
        ("container", A, "cri-o"),
    ],
    f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{UID_}.slice/docker-{A}.scope": [
        ("pod", UID, "kubernetes"),
        ("container", A, "docker"),
    ],
    f"/kubepods.slice/kubepods-pod{UID_}.slice/crio-conmon-{A}.scope": [
        ("pod", UID, "kubernetes"),
        ("unit", f"/kubepods.slice/kubepods-pod{UID_}.slice/crio-conmon-{A}.scope", ""),
    ],
    f"/system.slice/containerd.service/kubepods-burstable-pod{UID_}.slice:cri-containerd:{A}": [
        ("unit", "/system.slice/containerd.service", ""),
        ("pod", UID, "kubernetes"),
        ("container", A, "containerd"),
    ],
    f"/kubepods-burstable-pod{UID_}.slice:cri-containerd:{A}": [
        ("pod", UID, "kubernetes"),
        ("container", A, "containerd"),
    ],
    f"/docker/{A}/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{UID_}.slice/cri-containerd-{B}.scope": [
        ("container", A, "docker"),
        ("pod", UID, "kubernetes"),
        ("container", B, "containerd"),
    ],
    f"/kubepods/burstable/pod{UID}/{A}/docker/{B}": [
        ("pod", UID, "kubernetes"),
        ("container", A, "kubernetes"),
        ("container", B, "docker"),
    ],
    # podman: rootful, rootless, pods, split groups, its monitor
    f"/machine.slice/libpod-{A}.scope": [("container", A, "podman")],
    f"/machine.slice/libpod-{A}.scope/container": [("container", A, "podman")],
    f"/machine.slice/libpod-conmon-{A}.scope": [("unit", f"/machine.slice/libpod-conmon-{A}.scope", "")],
    f"/libpod_parent/libpod-{A}": [("container", A, "podman")],
    f"/machine.slice/machine-libpod_pod_{P}.slice/libpod-{A}.scope": [("pod", P, "podman"), ("container", A, "podman")],
    f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{A}.scope/container": [
        ("unit", "/user.slice/user-1000.slice/user@1000.service", ""),
        ("container", A, "podman"),
    ],
    f"/system.slice/web.service/libpod-payload-{A}": [
        ("unit", "/system.slice/web.service", ""),
        ("container", A, "podman"),
    ],
    # containerd without Kubernetes, ECS, LXC, nspawn, virtual machines, Slurm
    f"/system.slice/nerdctl-{A}.scope": [("container", A, "containerd")],
    f"/default/{A}": [("container", A, "")],
    f"/ecs/55091c13-b8cf-4801-b527-f4601742204d/{A}": [("container", A, "ecs")],
    "/ecs/0123456789abcdef0123456789abcdef/0123456789abcdef0123456789abcdef-1234567890": [
        ("container", "0123456789abcdef0123456789abcdef-1234567890", "ecs")
    ],
    "/lxc/web1": [("container", "web1", "lxc")],
    "/lxc.payload/web1": [("container", "web1", "lxc")],
    "/lxc.payload.web1/system.slice/ssh.service": [
        ("container", "web1", "lxc"),
        ("unit", "/lxc.payload.web1/system.slice/ssh.service", ""),
    ],
    "/lxc.monitor.web1": [],
    r"/machine.slice/machine-my\x2dbox.scope/payload": [("container", "my-box", "systemd-nspawn")],
    r"/machine.slice/machine-qemu\x2d1\x2dvm.scope/emulator": [
        ("unit", r"/machine.slice/machine-qemu\x2d1\x2dvm.scope", "")
    ],
    "/slurm/uid_1000/job_4711/step_0/task_0": [("unit", "/slurm/uid_1000/job_4711", "slurm")],
    "/system.slice/slurmstepd.scope/job_4711/step_batch/user/task_0": [
        ("unit", "/system.slice/slurmstepd.scope", ""),
        ("unit", "/system.slice/slurmstepd.scope/job_4711", "slurm"),
    ],
    # seen from inside a private cgroup namespace
    f"/../{A}": [("container", A, "")],
    f"/../../system.slice/docker-{A}.scope": [("container", A, "docker")],
    # looks like one, is none
    "/process_api/8e6a289ab8b29dc364dfc3144c801fa6": [],
    "/podcast/pod-2": [],
    f"/{A}ff": [],
}


@pytest.mark.parametrize("path", CASES)
def test_layers(path: str) -> None:
    found = layers(path)
    assert [(layer.kind, layer.identity, layer.runtime) for layer in found] == CASES[path]
    for layer in found:
        assert path.startswith(layer.path)
        assert path[len(layer.path) :][:1] in ("", "/")


@pytest.mark.parametrize(
    ("path", "qos"),
    [
        (f"/kubepods/burstable/pod{UID}/{A}", "burstable"),
        (f"/kubepods/besteffort/pod{UID}/{A}", "besteffort"),
        (f"/kubepods/pod{UID}/{A}", "guaranteed"),
        (f"/kubepods.slice/kubepods-pod{UID_}.slice/crio-{A}.scope", "guaranteed"),
        (f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID_}.slice/crio-{A}.scope", "burstable"),
    ],
)
def test_quality_of_service(path: str, qos: str) -> None:
    assert layers(path)[0].qos == qos


def test_the_group_of_a_podman_container_is_its_scope_not_the_folder_in_it() -> None:
    (layer,) = layers(f"/machine.slice/libpod-{A}.scope/container")
    assert layer.path == f"/machine.slice/libpod-{A}.scope"


@given(st.text(alphabet="/ab09-_.:podlxcscope" + "é\\", max_size=200))
def test_any_path_gives_an_answer(path: str) -> None:
    for layer in layers(path):
        assert path.startswith(layer.path)


def test_unescape() -> None:
    assert unescape(r"my\x2dbox") == "my-box"
    assert unescape("plain") == "plain"


MOUNTS: dict[str, list[tuple[str, str, str, str]]] = {
    "docker-v2-private": [("container", A, "docker", "")],
    "docker-own-filesystem": [("container", A, "docker", "")],
    "docker-v1": [("container", A, "docker", "")],
    "containerd-kubernetes": [("pod", UID, "kubernetes", ""), ("container", B, "containerd", "trainer")],
    "podman-rootless": [("container", P, "podman", "")],
    "crio-kubernetes": [
        ("pod", "8d2f3c1e-11aa-4bbb-8ccc-0123456789ab", "kubernetes", ""),
        ("container", P, "cri-o", "server"),
    ],
    "nerdctl": [("container", P, "containerd", "")],
    "host-with-docker": [],
}


@pytest.mark.parametrize("name", MOUNTS)
def test_layers_of_mounts(name: str, data_dir: Path) -> None:
    """T16, T17: with cgroup v2 and a private namespace the path says nothing; the mounts do."""
    found = layers_of_mountinfo((data_dir / "cgroup_mountinfo" / f"{name}.txt").read_bytes())
    assert [(layer.kind, layer.identity, layer.runtime, layer.name) for layer in found] == MOUNTS[name]
    assert all(layer.path == "/" for layer in found)


def test_mounts_that_are_cut_short_are_skipped() -> None:
    assert layers_of_mountinfo(b"") == ()
    assert layers_of_mountinfo(b"583 534 0:50 / /etc/hostname\n\xff\xfe garbage\n") == ()
