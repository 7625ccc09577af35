"""Names and images of containers from the files their runtimes keep, without asking a daemon.

| runtime | file |
|---|---|
| docker | ``<data-root>/containers/<id>/config.v2.json`` |
| containerd, with Kubernetes too | ``/run/containerd/io.containerd.runtime.v2.task/<namespace>/<id>/config.json`` |
| podman | ``<storage>/overlay-containers/containers.json``, of root and of each user |
| cri-o | ``<storage>/overlay-containers/<id>/userdata/config.json`` |

These files hold the container's environment too: only the fields below are decoded, nothing else leaves this module.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct, field

from gpuflight.sources.fs import FileSystem


class ContainerFacts(Struct, frozen=True):
    """What the runtime's files say; empty where they do not. ``reason``: why nothing could be read, if nothing was."""

    name: str = ""
    image: str = ""
    pod_name: str = ""
    pod_namespace: str = ""
    sandbox: bool = False
    reason: str = ""


class _DockerInner(Struct):
    Image: str = ""
    Labels: dict[str, str] | None = None


class _Docker(Struct):
    Name: str = ""
    Config: _DockerInner = field(default_factory=_DockerInner)


class _DockerDaemon(Struct):
    data_root: str = field(default="", name="data-root")


class _Oci(Struct):
    annotations: dict[str, str] | None = None
    hostname: str = ""


class _Stored(Struct):
    id: str = ""
    names: list[str] | None = None
    metadata: str = ""


_CONTAINERD_TASKS = "/run/containerd/io.containerd.runtime.v2.task"
_CONTAINERD_NAMESPACES = ("k8s.io", "default", "moby")
_STORAGES = ("/run/containers/storage", "/var/lib/containers/storage")

# The same three facts under each runtime's annotation: containerd's CRI plugin, CRI-O, dockershim.
_NAME_KEYS = ("io.kubernetes.cri.container-name", "io.kubernetes.container.name", "nerdctl/name")
_POD_KEYS = ("io.kubernetes.cri.sandbox-name", "io.kubernetes.cri-o.KubeName", "io.kubernetes.pod.name")
_POD_NAMESPACE_KEYS = ("io.kubernetes.cri.sandbox-namespace", "io.kubernetes.pod.namespace")
_IMAGE_KEYS = ("io.kubernetes.cri.image-name", "io.kubernetes.cri-o.ImageName")
_TYPE_KEYS = ("io.kubernetes.cri.container-type", "io.kubernetes.cri-o.ContainerType", "io.kubernetes.docker.type")


class ContainerFiles:
    """Looks containers up in the files of all runtimes, the likely one first."""

    def __init__(self, fs: FileSystem) -> None:
        self._fs = fs
        self._docker_root: str | None = None

    def facts(self, container_id: str, runtime: str, uid: int = 0) -> ContainerFacts:
        """Facts of one container. ``uid``: whose rootless storage to look into besides root's (0: no one's)."""
        denied = False
        lookups = [self._docker, self._containerd, self._oci_storage, self._podman]
        if runtime in ("podman", "cri-o"):
            lookups.reverse()
        elif runtime == "containerd":
            lookups[0], lookups[1] = lookups[1], lookups[0]
        for lookup in lookups:
            try:
                facts = lookup(container_id, uid)
            except PermissionError:
                denied = True
                continue
            except (OSError, msgspec.MsgspecError):
                continue
            if facts is not None:
                return facts
        reason = "the runtime's files may not be read" if denied else "no runtime's file about it is visible here"
        return ContainerFacts(reason=reason)

    def _docker(self, container_id: str, _uid: int) -> ContainerFacts | None:
        raw = self._fs.read(f"{self._docker_data_root()}/containers/{container_id}/config.v2.json")
        config = msgspec.json.decode(raw, type=_Docker)
        return _from_labels(config.Config.Labels or {}, config.Name.lstrip("/"), config.Config.Image)

    def _docker_data_root(self) -> str:
        if self._docker_root is None:
            try:
                self._docker_root = msgspec.json.decode(
                    self._fs.read("/etc/docker/daemon.json"), type=_DockerDaemon
                ).data_root.rstrip("/")
            except (OSError, msgspec.MsgspecError):
                self._docker_root = ""
        return self._docker_root or "/var/lib/docker"

    def _containerd(self, container_id: str, _uid: int) -> ContainerFacts | None:
        return self._first_oci([f"{_CONTAINERD_TASKS}/{space}/{container_id}" for space in _CONTAINERD_NAMESPACES])

    def _oci_storage(self, container_id: str, _uid: int) -> ContainerFacts | None:
        return self._first_oci([f"{root}/overlay-containers/{container_id}/userdata" for root in _STORAGES])

    def _first_oci(self, bundles: list[str]) -> ContainerFacts | None:
        denied: PermissionError | None = None
        for bundle in bundles:
            try:
                config = msgspec.json.decode(self._fs.read(f"{bundle}/config.json"), type=_Oci)
            except PermissionError as error:
                denied = error
                continue
            except OSError:
                continue
            facts = _from_labels(config.annotations or {}, "", "")
            if facts.name or facts.pod_name:
                return facts
        if denied:
            raise denied
        return None

    def _podman(self, container_id: str, uid: int) -> ContainerFacts | None:
        storages = list(_STORAGES[1:])
        if uid and (home := self._home(uid)):
            storages.insert(0, f"{home}/.local/share/containers/storage")
        denied: PermissionError | None = None
        for storage in storages:
            try:
                raw = self._fs.read(f"{storage}/overlay-containers/containers.json")
            except PermissionError as error:
                denied = error
                continue
            except OSError:
                continue
            for stored in msgspec.json.decode(raw, type=list[_Stored]):
                if stored.id == container_id:
                    metadata = _loads(stored.metadata)
                    name = str(metadata.get("name") or (stored.names or [""])[0])
                    return ContainerFacts(name=name, image=str(metadata.get("image-name") or ""))
        if denied:
            raise denied
        return None

    def _home(self, uid: int) -> str:
        for line in self._fs.read("/etc/passwd").decode("utf-8", "replace").split("\n"):
            fields = line.split(":")
            if len(fields) >= 6 and fields[2] == str(uid):
                return fields[5]
        return ""


def without_secrets(path: str, raw: bytes) -> bytes:
    """The content of one of these files with only the fields that are used here; anything else as it is.

    For recordings: the files hold the environment and command line of the container. What cannot be decoded becomes
    empty.
    """
    name = path.rpartition("/")[2]
    kind: Any = {"config.v2.json": _Docker, "config.json": _Oci, "containers.json": list[_Stored]}.get(name)
    if kind is None or not any(part in path for part in ("/containers/", "/overlay-containers/", "/io.containerd.")):
        return raw
    try:
        decoded = msgspec.json.decode(raw, type=kind)
    except msgspec.MsgspecError:
        return b""
    if isinstance(decoded, _Docker):
        decoded.Config.Labels = _used(decoded.Config.Labels)
    elif isinstance(decoded, _Oci):
        decoded.annotations = _used(decoded.annotations)
    else:
        for stored in decoded:
            metadata = _loads(stored.metadata)
            kept = {key: metadata[key] for key in ("name", "image-name") if key in metadata}
            stored.metadata = msgspec.json.encode(kept).decode()
    return msgspec.json.encode(decoded)


_USED_LABELS = frozenset((*_NAME_KEYS, *_POD_KEYS, *_POD_NAMESPACE_KEYS, *_IMAGE_KEYS, *_TYPE_KEYS))


def _used(labels: dict[str, str] | None) -> dict[str, str]:
    return {key: value for key, value in (labels or {}).items() if key in _USED_LABELS}


def _from_labels(labels: dict[str, str], name: str, image: str) -> ContainerFacts:
    kind = _first(labels, _TYPE_KEYS)
    return ContainerFacts(
        name=_first(labels, _NAME_KEYS) or name,
        image=_first(labels, _IMAGE_KEYS) or image,
        pod_name=_first(labels, _POD_KEYS),
        pod_namespace=_first(labels, _POD_NAMESPACE_KEYS),
        sandbox=kind in ("sandbox", "podsandbox"),
    )


def _first(labels: dict[str, str], keys: tuple[str, ...]) -> str:
    return next((labels[key] for key in keys if labels.get(key)), "")


def _loads(text: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text)
    except msgspec.MsgspecError:
        return {}
    return value if isinstance(value, dict) else {}
