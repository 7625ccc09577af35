"""What a cgroup path says about where a process runs: pod, container, systemd unit, Slurm job. Pure functions.

A path nests (docker in docker, systemd in a container, a container in a user session), so the answer is the list of
layers from the outermost to the innermost. Slices are resource groups, not places, and give no layer.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

LayerKind = Literal["pod", "container", "unit"]


class Layer(NamedTuple):
    """One thing that holds the process.

    ``identity``: pod uid with dashes, full container id, or the unit's cgroup path. ``path``: the cgroup path up to and
    including this layer. ``runtime``: docker, containerd, cri-o, podman, lxc, systemd-nspawn, ecs, buildkit, kubernetes
    (a pod, or a container of one whose runtime the path does not tell), slurm, or empty. ``qos`` (pods): guaranteed,
    burstable, besteffort.
    """

    kind: LayerKind
    identity: str
    name: str
    path: str
    runtime: str = ""
    qos: str = ""


_HEX64 = "[0-9a-f]{64}"
# docker-<id>.scope, cri-containerd-<id>.scope, libpod-<id>, crio-<id>, <id>: what stands before the id is the runtime.
_CONTAINER = re.compile(rf"(?:(?P<prefix>.+)-)?(?P<id>{_HEX64})(?:\.scope)?")
_UUID = "[0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}"
# Static pods (the kubelet's own manifests) have the hash of their manifest as uid: 32 digits without dashes.
_POD = re.compile(rf"(?:.*-)?pod(?P<uid>{_UUID}|[0-9a-f]{{32}})(?:\.slice)?")
_PODMAN_POD = re.compile(rf"(?:.*-)?libpod_pod_(?P<id>{_HEX64})(?:\.slice)?")
_ECS = re.compile(r"[0-9a-f]{32}-\d{5,}")
_SLURM_JOB = re.compile(r"job_(\d+)")
_MACHINE = re.compile(r"machine-(?P<name>.+)\.scope")
_ESCAPE = re.compile(r"\\x([0-9a-f]{2})")

_RUNTIME_OF_PREFIX = {
    "docker": "docker",
    "cri-containerd": "containerd",
    "containerd": "containerd",
    "nerdctl": "containerd",
    "crio": "cri-o",
    "libpod": "podman",
    "libpod-payload": "podman",
}
_RUNTIME_OF_PARENT = {"docker": "docker", "moby": "docker", "libpod_parent": "podman", "ecs": "ecs"}


def layers(path: str) -> tuple[Layer, ...]:
    """Layers of one cgroup path, outermost first. ``/..`` steps (outside the reader's cgroup namespace) are skipped."""
    found: list[Layer] = []
    segments = path.split("/")
    length = 0
    for index, segment in enumerate(segments):
        length += len(segment) + (index > 0)
        if not segment or segment == "..":
            continue
        for layer in _read(segment, segments[:index], path[:length]):
            # Podman nests its payload in a second group of the same id: one container all the same.
            if not any(layer.kind == known.kind and layer.identity == known.identity for known in found):
                found.append(layer)
    return tuple(found)


def unescape(name: str) -> str:
    r"""Undo systemd's escaping of unit names: ``\x2d`` → ``-``."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 16)), name)


def _read(segment: str, above: list[str], path: str) -> list[Layer]:
    if segment.count(":") == 2:
        # A systemd-style name given to a runtime that drives cgroupfs: "slice:prefix:id" as one directory.
        slice_, prefix, container_id = segment.split(":")
        if container_id:
            pod = _pod(slice_, above, path)
            runtime = _RUNTIME_OF_PREFIX.get(prefix, "kubernetes" if pod else "")
            return [*pod, Layer("container", container_id, "", path, runtime)]
    return _pod(segment, above, path) or _container(segment, above, path) or _unit(segment, above, path)


def _pod(segment: str, above: list[str], path: str) -> list[Layer]:
    if match := _POD.fullmatch(segment):
        uid = match["uid"].replace("_", "-")
        context = segment + "/".join(above)
        qos = "besteffort" if "besteffort" in context else "burstable" if "burstable" in context else "guaranteed"
        return [Layer("pod", uid, "", path, "kubernetes", qos)]
    if match := _PODMAN_POD.fullmatch(segment):
        return [Layer("pod", match["id"], "", path, "podman")]
    return []


def _container(segment: str, above: list[str], path: str) -> list[Layer]:
    parent = above[-1] if above else ""
    if match := _CONTAINER.fullmatch(segment):
        prefix = match["prefix"] or ""
        if prefix.endswith("conmon"):
            return []  # the monitor beside the container, not the container
        runtime = _RUNTIME_OF_PREFIX.get(prefix) or _RUNTIME_OF_PARENT.get(parent) or ""
        if not runtime and any(_POD.fullmatch(segment) for segment in above):
            runtime = "kubernetes"
        if not runtime and "ecs" in above:
            runtime = "ecs"
        return [Layer("container", match["id"], "", path, runtime)]
    if "ecs" in above and _ECS.fullmatch(segment):
        return [Layer("container", segment, "", path, "ecs")]
    if parent == "buildkit":
        return [Layer("container", segment, "", path, "buildkit")]
    if segment.startswith("lxc.payload."):
        name = segment.removeprefix("lxc.payload.")
        return [Layer("container", name, name, path, "lxc")]
    if parent in ("lxc", "lxc.payload"):
        return [Layer("container", segment, segment, path, "lxc")]
    if parent == "machine.slice" and (match := _MACHINE.fullmatch(segment)):
        name = unescape(match["name"])
        if name.startswith("lxc-"):
            return [Layer("container", name, name, path, "lxc")]
        if not name.startswith("qemu-"):  # a virtual machine is a unit, not a container
            return [Layer("container", name, name, path, "systemd-nspawn")]
    return []


def _unit(segment: str, above: list[str], path: str) -> list[Layer]:
    if segment.endswith((".service", ".scope")) and not segment.startswith("."):
        return [Layer("unit", path, segment, path)]
    if (match := _SLURM_JOB.fullmatch(segment)) and any(part.startswith("slurm") for part in above):
        return [Layer("unit", path, f"slurm job {match[1]}", path, "slurm")]
    return []


# What runtimes mount from the host into their containers lies there under the container's id.
_TARGETS = ("/etc/hostname", "/etc/hosts", "/etc/resolv.conf", "/run/.containerenv", "/run/secrets", "/dev/shm")  # noqa: S108
_MOUNTED = (
    (re.compile(rf"/overlay-containers/({_HEX64})/userdata/"), "podman"),
    (re.compile(rf"/nerdctl/.*/({_HEX64})/"), "containerd"),
    # No "/docker" before it where Docker's folder is a file system of its own: mountinfo gives paths within that.
    (re.compile(rf"(?:^|/)containers/({_HEX64})/"), "docker"),
    # What a pod's containers share belongs to its sandbox (the pause container).
    (re.compile(rf"/sandboxes/({_HEX64})/"), "containerd"),
)
_KUBELET_POD = re.compile(rf"(?:^|/)pods/({_UUID}|[0-9a-f]{{32}})/")
_KUBELET_CONTAINER = re.compile(r"(?:^|/)pods/[^/]+/containers/([^/]+)/")


def layers_of_mountinfo(raw: bytes) -> tuple[Layer, ...]:
    """Pod and container as the mounts of a process tell them, for when its cgroup path says ``/``.

    Inside a private cgroup namespace the path is cut off at the container, but the host paths of what the runtime
    mounted are not: the cgroup directories (v1), ``hostname``, ``resolv.conf``, the kubelet's ``etc-hosts``. Only what
    is mounted *onto* such files counts: a host has mounts below /var/lib/docker too, and is no container. The layers'
    path is ``/``: as seen from in there the container is the root of the hierarchy. In a pod whose runtime mounts only
    the sandbox's files, the container has the sandbox's id.
    """
    from_cgroups: tuple[Layer, ...] = ()
    hits: list[Layer] = []
    pod: Layer | None = None
    name = ""
    for line in raw.decode("utf-8", "backslashreplace").split("\n"):
        fields = line.split(" ")
        if len(fields) < 10:
            continue
        root, target = fields[3], fields[4]
        if target.startswith("/sys/fs/cgroup"):
            from_cgroups = max(from_cgroups, layers(root), key=len)
        elif target == "/dev/termination-log":
            match = _KUBELET_CONTAINER.search(root)
            name = match[1] if match else name
        elif target in _TARGETS:
            if match := _KUBELET_POD.search(root):
                pod = Layer("pod", match[1].replace("_", "-"), "", "/", "kubernetes")
            for pattern, runtime in _MOUNTED:
                if match := pattern.search(root):
                    hits.append(Layer("container", match[1], "", "/", runtime))
                    break
    if from_cgroups:
        return tuple(layer._replace(path="/") for layer in from_cgroups)
    found = [pod] if pod else []
    if hits:
        container = hits[0]
        if pod and container.runtime == "podman":
            container = container._replace(runtime="cri-o")  # CRI-O keeps its files where Podman does
        found.append(container._replace(name=name))
    return tuple(found)
