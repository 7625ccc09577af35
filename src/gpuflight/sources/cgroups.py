"""Cgroups: which pod, container or unit a process runs in, and the counters of those groups (v1, v2 and hybrid)."""

from __future__ import annotations

import re

from msgspec import Struct, field

from gpuflight.sources.cgroup_paths import Layer, layers, layers_of_mountinfo
from gpuflight.sources.container_files import ContainerFacts, ContainerFiles
from gpuflight.sources.fs import FileSystem
from gpuflight.sources.procfs import ProcFs

_INITIAL_CGROUP_NAMESPACE = 0xEFFFFFFB  # PROC_CGROUP_INIT_INO of include/linux/proc_ns.h
_UNLIMITED_BYTES = 1 << 62  # cgroup v1 writes LONG_MAX rounded down to a page for "no limit"
_ANY_ORDER = ("", "name=systemd", "memory", "cpu", "cpuacct", "pids", "devices")
_USER_SLICE = re.compile(r"/user-(\d+)\.slice/")
_MAX_PARSED_PATHS = 8192


class CgroupInfo(Struct, frozen=True):
    """Where a process runs. ``path`` is the cgroup path that told most, ``layers`` what holds the process, outermost
    first, ``groups`` the (controllers, path) lines of /proc/PID/cgroup. The other fields are those of the innermost
    container, pod and unit; empty without one."""

    path: str
    layers: tuple[Layer, ...]
    groups: tuple[tuple[str, str], ...]
    container_id: str = ""
    runtime: str = ""
    pod_uid: str = ""
    unit: str = ""


class CgroupCounters(Struct):
    """Counters of one cgroup since it was made; None where the kernel has none or no limit is set.

    ``cpu_usage_s`` CPU time of all its tasks; ``cpu_quota_cores`` CPU time allowed per time; ``periods`` and
    ``throttled_periods`` enforcement periods in which it ran, and in which it was stopped for the rest. ``unknown``
    names what could not be read and why; an absent limit is not unknown: there is none.
    """

    cpu_usage_s: float | None = None
    cpu_quota_cores: float | None = None
    periods: int | None = None
    throttled_periods: int | None = None
    throttled_s: float | None = None
    memory_used_bytes: int | None = None
    memory_limit_bytes: int | None = None
    oom_kills: int | None = None
    pids: int | None = None
    pids_limit: int | None = None
    unknown: dict[str, str] = field(default_factory=dict)


class _Mount(Struct, frozen=True):
    point: str
    root: str
    v2: bool


class Cgroups:
    """The cgroup hierarchies of one machine, as seen from the gpuflight process's cgroup namespace."""

    def __init__(self, fs: FileSystem, procfs: ProcFs) -> None:
        self._fs = fs
        self._procfs = procfs
        self._files = ContainerFiles(fs)
        self._of: dict[int, tuple[list[tuple[str, str]], CgroupInfo]] = {}
        self._parsed: dict[tuple[tuple[str, str], ...], CgroupInfo] = {}
        self._of_mount_namespace: dict[int, tuple[int, int, tuple[Layer, ...]]] = {}
        self._facts: dict[str, ContainerFacts] = {}
        self._facts_asked: set[str] = set()
        self._mounts: dict[str, _Mount] | None = None
        self._private: bool | None = None
        self._counters: dict[tuple[str, str], CgroupCounters] = {}
        self._tidy_up = False

    def begin_round(self, number: int) -> None:
        """Forget counters, and what is known of processes and containers that are gone."""
        self._counters = {}
        if number % 64 == 0:
            self._mounts = None  # a hierarchy may have been mounted meanwhile
            self._tidy_up = True  # when first asked: the processes may not be there to read, and this must not fail
        if number % 8 == 0:
            self._of_mount_namespace = {}  # the runtime may have been mounting when we looked
        if len(self._parsed) > _MAX_PARSED_PATHS:
            self._parsed = {}

    def _forget_what_is_gone(self) -> None:
        live = self._procfs.processes()
        self._of = {pid: entry for pid, entry in self._of.items() if pid in live}
        used = {info.groups for _, info in self._of.values()}
        self._parsed = {groups: info for groups, info in self._parsed.items() if groups in used}
        self._facts = {key: value for key, value in self._facts.items() if key in self._facts_asked}
        self._facts_asked = set()
        self._tidy_up = False

    def of(self, pid: int) -> CgroupInfo:
        """Where a process runs. Raises OSError if it ended or its cgroup may not be read."""
        if self._tidy_up:
            self._forget_what_is_gone()
        groups = self._procfs.cgroup(pid)
        known = self._of.get(pid)
        if known is not None and known[0] is groups:  # ProcFs gives the same list until it reads the file again
            return known[1]
        info = self._parse(tuple(groups))
        if not info.container_id and not info.pod_uid:
            info = self._by_mounts(pid, info)
        self._of[pid] = (groups, info)
        return info

    def facts(self, layer: Layer) -> ContainerFacts:
        """Name, image and pod of a container, from its runtime's files; read once per container."""
        self._facts_asked.add(layer.identity)
        facts = self._facts.get(layer.identity)
        if facts is None:
            user = _USER_SLICE.search(layer.path)
            facts = self._files.facts(layer.identity, layer.runtime, int(user[1]) if user else 0)
            self._facts[layer.identity] = facts
        return facts

    def counters(self, info: CgroupInfo, layer: Layer) -> CgroupCounters:
        """CPU, memory and pid counters of one of the layers of ``info``; read once per round and layer."""
        key = (layer.kind, layer.identity)
        counters = self._counters.get(key)
        if counters is None:
            counters = self._counters[key] = self._read_counters(info, layer)
        return counters

    # --- identity ----------------------------------------------------------------------------------------------------

    def _parse(self, groups: tuple[tuple[str, str], ...]) -> CgroupInfo:
        info = self._parsed.get(groups)
        if info is None:
            # Hierarchies disagree (v1 accounts memory per container but not per unit): the one that tells most is it.
            paths = dict(reversed([(name, path) for names, path in groups for name in names.split(",")]))
            ordered = [paths.pop(name) for name in _ANY_ORDER if name in paths] + list(paths.values())
            found = [(path, layers(path)) for path in dict.fromkeys(ordered)]
            path, best = max(found, key=lambda item: _rank(item[1]), default=("/", ()))
            info = self._parsed[groups] = _info(path, best, groups)
        return info

    def _by_mounts(self, pid: int, info: CgroupInfo) -> CgroupInfo:
        """``info`` completed by what the process's mounts tell; one look per mount namespace."""
        live = self._procfs.processes()
        try:
            namespace = self._procfs.namespace(pid, "mnt")
            anchor, start, found = self._of_mount_namespace.get(namespace, (0, 0, ()))
            # The kernel reuses the numbers of namespaces: what was read holds while the process it was read from lives.
            if anchor not in live or live[anchor].start != start:
                found = layers_of_mountinfo(self._procfs.mountinfo(pid))
                if pid in live:
                    self._of_mount_namespace[namespace] = (pid, live[pid].start, found)
        except OSError:  # no right to look: the path is all there is
            return info
        if not found:
            return info
        if not self._in_private_namespace() or info.path != "/":
            # A container without a cgroup of its own (rootless without delegation): no counters are its own.
            found = tuple(layer._replace(path="") for layer in found)
        return _info(info.path, (*info.layers, *found), info.groups)

    def _in_private_namespace(self) -> bool:
        if self._private is None:
            try:
                self._private = self._procfs.own_namespace("cgroup") != _INITIAL_CGROUP_NAMESPACE
            except OSError:
                self._private = False
        return self._private

    # --- counters ----------------------------------------------------------------------------------------------------

    def _read_counters(self, info: CgroupInfo, layer: Layer) -> CgroupCounters:
        counters = CgroupCounters()
        for controller, read in (("cpu", self._cpu), ("memory", self._memory), ("pids", self._pids)):
            try:
                directory, v2 = self._directory(info, layer, controller)
                read(counters, directory, v2)
            except OSError as error:
                reason = error.strerror or str(error)
            except ValueError as error:
                reason = str(error)
            else:
                continue
            measured, limit = _METRICS[controller]
            names = [name for name, counter in measured.items() if getattr(counters, counter) is None]
            if next(iter(measured)) not in names:  # what is used was read, and then its limit could not be
                names.append(limit)
            for name in names:
                counters.unknown.setdefault(name, reason)
        return counters

    def _directory(self, info: CgroupInfo, layer: Layer, controller: str) -> tuple[str, bool]:
        """The group's directory under a controller and whether that is cgroup v2. Raises ValueError with the reason."""
        mount = self._hierarchies().get(controller) or self._hierarchies().get("")
        if mount is None:
            raise ValueError(f"no cgroup hierarchy with the {controller} controller is mounted here")
        path = layer.path
        if path != "/":
            path = self._layer_path(info, layer, "" if mount.v2 else controller)
        if mount.root != "/" and path != "/":
            if path != mount.root and not path.startswith(mount.root + "/"):
                raise ValueError("the group lies outside the cgroups visible here")
            path = path[len(mount.root) :] or "/"
        if "/.." in path:
            raise ValueError("the group lies outside the cgroup namespace of gpuflight")
        return (mount.point + path).rstrip("/"), mount.v2

    def _layer_path(self, info: CgroupInfo, layer: Layer, controller: str) -> str:
        if not layer.path:
            raise ValueError("it has no cgroup of its own")
        for names, path in info.groups:
            if controller not in names.split(","):
                continue
            for candidate in layers(path):
                if (candidate.kind, candidate.identity) == (layer.kind, layer.identity):
                    return candidate.path
        raise ValueError(f"{controller or 'cgroup v2'} is not accounted for it separately")

    def _hierarchies(self) -> dict[str, _Mount]:
        """Controller → where it is mounted; ``""`` is cgroup v2."""
        if self._mounts is None:
            self._mounts = {}
            try:
                raw = self._procfs.mountinfo("self")
            except OSError:
                raw = b""
            for line in raw.decode("utf-8", "replace").split("\n"):
                before, dash, after = line.partition(" - ")
                filesystem, _, rest = after.partition(" ")
                if not dash or filesystem not in ("cgroup", "cgroup2"):
                    continue
                fields = before.split(" ")
                mount = _Mount(fields[4], fields[3], filesystem == "cgroup2")
                options = rest.rpartition(" ")[2].split(",")
                for name in [""] if mount.v2 else options:
                    self._mounts[name] = mount
        return self._mounts

    def _cpu(self, counters: CgroupCounters, directory: str, v2: bool) -> None:
        fields = _flat(self._fs.read_record(f"{directory}/cpu.stat"))
        counters.periods = fields.get("nr_periods")
        counters.throttled_periods = fields.get("nr_throttled")
        if v2:
            if "usage_usec" in fields:
                counters.cpu_usage_s = fields["usage_usec"] / 1e6
            if "throttled_usec" in fields:
                counters.throttled_s = fields["throttled_usec"] / 1e6
            # Without the cpu controller in this group there is no cpu.max, but the usage is there all the same.
            quota, _, period = self._optional(f"{directory}/cpu.max").partition(" ")
            if quota and quota != "max":
                counters.cpu_quota_cores = int(quota) / int(period)
            return
        if "throttled_time" in fields:
            counters.throttled_s = fields["throttled_time"] / 1e9
        quota_us = int(self._optional(f"{directory}/cpu.cfs_quota_us") or -1)
        if quota_us > 0:
            counters.cpu_quota_cores = quota_us / int(self._fs.read_record(f"{directory}/cpu.cfs_period_us"))
        accounting = self._hierarchies().get("cpuacct")
        cpu = self._hierarchies()["cpu"]
        if accounting is None:
            raise ValueError("the cpuacct controller is not mounted here")
        usage = accounting.point + directory[len(cpu.point) :] + "/cpuacct.usage"
        counters.cpu_usage_s = int(self._fs.read_record(usage)) / 1e9

    def _memory(self, counters: CgroupCounters, directory: str, v2: bool) -> None:
        if v2:
            counters.memory_used_bytes = int(self._fs.read_record(f"{directory}/memory.current"))
            limit = self._optional(f"{directory}/memory.max")
            counters.memory_limit_bytes = int(limit) if limit and limit != "max" else None
            counters.oom_kills = _flat(self._optional(f"{directory}/memory.events").encode()).get("oom_kill")
            return
        counters.memory_used_bytes = int(self._fs.read_record(f"{directory}/memory.usage_in_bytes"))
        limit_bytes = int(self._fs.read_record(f"{directory}/memory.limit_in_bytes"))
        counters.memory_limit_bytes = limit_bytes if limit_bytes < _UNLIMITED_BYTES else None
        counters.oom_kills = _flat(self._optional(f"{directory}/memory.oom_control").encode()).get("oom_kill")

    def _pids(self, counters: CgroupCounters, directory: str, _v2: bool) -> None:
        counters.pids = int(self._fs.read_record(f"{directory}/pids.current"))
        limit = self._optional(f"{directory}/pids.max")
        counters.pids_limit = int(limit) if limit and limit != "max" else None

    def _optional(self, path: str) -> str:
        try:
            return self._fs.read_record(path).decode("ascii", "replace").strip()
        except FileNotFoundError:
            return ""


# controller → (metric and the counter that it needs, metric of the limit)
_METRICS = {
    "cpu": ({"cpu_pct": "cpu_usage_s", "throttled_pct": "throttled_periods"}, "cpu_quota_cores"),
    "memory": ({"memory_used_bytes": "memory_used_bytes"}, "memory_limit_bytes"),
    "pids": ({"pids_count": "pids"}, "pids_limit_count"),
}


def _rank(found: tuple[Layer, ...]) -> tuple[int, int]:
    return (sum(layer.kind != "unit" for layer in found), len(found))


def _info(path: str, found: tuple[Layer, ...], groups: tuple[tuple[str, str], ...]) -> CgroupInfo:
    last = {layer.kind: layer for layer in found}
    container, pod, unit = last.get("container"), last.get("pod"), last.get("unit")
    return CgroupInfo(
        path=path,
        layers=found,
        groups=groups,
        container_id=container.identity if container else "",
        runtime=container.runtime if container else pod.runtime if pod else "",
        pod_uid=pod.identity if pod else "",
        unit=unit.identity if unit else "",
    )


def _flat(raw: bytes) -> dict[str, int]:
    """``name value`` lines."""
    fields = {}
    for line in raw.decode("ascii", "replace").split("\n"):
        name, _, value = line.partition(" ")
        if value.strip().isdigit():
            fields[name] = int(value)
    return fields
