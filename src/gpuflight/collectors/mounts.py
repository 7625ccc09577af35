"""Mounted file systems: space, NFS behaviour, the disk below, and which processes use remote ones."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from pydantic import BaseModel, ConfigDict, Field

from gpuflight.collectors.base import Batch, Collector
from gpuflight.collectors.rates import Rates
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import edges, nodes
from gpuflight.redaction import is_secret_name, redact_text
from gpuflight.sources.fs import StatVfs
from gpuflight.sources.mounts import MountEntry, NfsStats, SpaceWatch
from gpuflight.sources.mounts import Mounts as MountSource
from gpuflight.sources.procfs.stat import printable
from gpuflight.sources.sysfs import SysFs, disk_of_device, disk_of_name, reason

if TYPE_CHECKING:
    from gpuflight.sources.procfs import ProcFs
    from gpuflight.sources.world import World

_KERNEL_TYPES = frozenset(
    (
        *("autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "devtmpfs", "efivarfs"),
        *("fusectl", "fuse.gvfsd-fuse", "fuse.lxcfs", "fuse.portal", "hugetlbfs", "mqueue", "nfsd", "nsfs", "proc"),
        *("pstore", "ramfs", "rpc_pipefs", "securityfs", "selinuxfs", "squashfs", "sysfs", "tracefs"),
    )
)
"""Types that hold no files of users, or are views of others."""

_TABLE_ROUNDS = 12  # after which the mount table of another mount namespace is read again
_TABLES_PER_ROUND = 64
_NFS_TYPES = ("nfs", "nfs4")


class MountSettings(BaseModel):
    """Which file systems are drawn, and how far processes are related to them."""

    model_config = ConfigDict(extra="forbid")

    tmpfs: list[str] = Field(["/dev/shm", "/tmp"], description="Memory file systems to draw.")  # noqa: S108
    overlays: bool = Field(False, description="Draw container overlays other than the root.")
    deadline_s: float = Field(0.5, gt=0, description="How long all remote file systems together may take to answer.")
    working_directories: bool = Field(True, description="Relate processes to remote mounts they work or run in.")
    open_files: bool = Field(False, description="Relate processes to remote mounts of their open files too (dear).")
    max_open_files: int = Field(4096, ge=1, description="Most descriptors of one process looked at for that.")


class _Table(Struct):
    """Mounts of one mount namespace, longest path first, and whether any is remote."""

    mounts: list[MountEntry]
    remote: bool
    round: int


class Mounts(Collector):
    """Mounted file systems with their space and disk; NFS round trips; processes working on remote ones."""

    seeds = True
    expands = (nodes.Process,)
    settings_class = MountSettings
    settings: MountSettings

    def __init__(self, settings: MountSettings | None = None) -> None:
        super().__init__(settings)
        self._rates = Rates()
        self._source: MountSource | None = None
        self._watch: SpaceWatch | None = None
        self._tables: dict[int, _Table] = {}
        self._round = 0

    def observe(self, world: World) -> None:
        self._round += 1
        self._sysfs: SysFs = world.sysfs
        self._procfs: ProcFs = world.procfs
        if self._source is None or self._watch is None:
            self._source = MountSource(world.fs)
            self._watch = SpaceWatch(world.fs, world.clock, self.settings.deadline_s)
        try:
            table = self._source.table()
        except OSError as error:
            raise SourceUnavailable(f"the mount table cannot be read: {reason(error)}", "mount /proc") from error
        self._rates.begin(world.clock.monotonic_s())
        self._mounts = self._choose(table)
        self._by_device = {mount.device: mount.path for mount in reversed(self._mounts)}
        self._space = self._watch.ask(self._mounts)
        nfs = any(mount.fstype in _NFS_TYPES for mount in self._mounts)
        self._nfs: dict[str, NfsStats] = self._source.nfs_stats() if nfs else {}
        self._own = _table(table, self._round)
        try:
            self._own_namespace: int | None = self._procfs.own_namespace("mnt")
        except (OSError, ValueError):
            self._own_namespace = None
        self._tables_left = _TABLES_PER_ROUND
        self._used: set[int] = set()
        # Namespaces that nobody was in for a while are gone.
        self._tables = {
            key: known for key, known in self._tables.items() if self._round - known.round < 2 * _TABLE_ROUNDS
        }

    def _choose(self, table: list[MountEntry]) -> list[MountEntry]:
        """Real file systems, each once: bind mounts of a part of one are left out where the whole is mounted."""
        assert self._source is not None  # noqa: S101 - observe sets it
        candidates = [mount for mount in table if self._worth_drawing(mount)]
        whole = {mount.device for mount in candidates if mount.root == "/"}
        chosen: dict[tuple[str, str], MountEntry] = {}
        for mount in sorted(candidates, key=lambda mount: len(mount.path)):
            if mount.root != "/":
                if mount.device in whole:
                    continue
                # Containers get single files bound in (/etc/hosts); only local file systems can be asked.
                if mount.local and not self._source.is_directory(mount.path):
                    continue
            chosen.setdefault((mount.device, mount.root), mount)
        return list(chosen.values())

    def _worth_drawing(self, mount: MountEntry) -> bool:
        if mount.fstype in _KERNEL_TYPES:
            return False
        if mount.fstype == "tmpfs":
            return mount.path in self.settings.tmpfs
        if mount.fstype == "overlay":
            return mount.path == "/" or self.settings.overlays
        return True

    # -- file systems ----------------------------------------------------------------------------------------------

    def seed(self) -> Batch:
        batch = Batch()
        for mount in self._mounts:
            entity = self._mount(mount)
            batch.nodes.append(entity)
            disk = self._disk_of(mount)
            if disk:
                batch.nodes.append(nodes.Disk(name=disk))
                batch.edges.append(edges.Access(entity.id, f"Disk({disk})"))
        return batch

    def _mount(self, mount: MountEntry) -> nodes.Mount:
        attributes: dict[str, Any] = {
            "source": redact_text(printable(mount.source)),
            "fstype": mount.fstype,
            "options": redact_options(printable(mount.options)),
        }
        metrics: dict[str, int | float] = {}
        unknown: dict[str, str] = {}
        if mount.remote:
            attributes["remote"] = True
            server = server_of(mount)
            if server:
                attributes["server"] = server
        space = self._space.get(mount.path)
        if isinstance(space, StatVfs):
            if not mount.local:
                attributes["responding"] = True
            _put_space(space, metrics, unknown)
        else:
            why = "not asked"
            if isinstance(space, OSError):
                why = reason(space)
                if space.errno == errno.EACCES:
                    self.note("file systems whose space may not be asked", "run as root")
            elif space is not None:
                attributes["responding"] = False
                why = f"no answer for {space:.1f} s: its server is slow or dead"
                self.note("file systems that do not answer", "check their servers")
            unknown |= dict.fromkeys(("size_bytes", "used_bytes", "free_bytes", "used_pct"), why)
        if mount.fstype in _NFS_TYPES:
            self._put_nfs(mount.path, metrics, unknown)
        return nodes.Mount(path=printable(mount.path), attributes=attributes, metrics=metrics, unknown=unknown or None)

    def _put_nfs(self, path: str, metrics: dict[str, int | float], unknown: dict[str, str]) -> None:
        """Round trip and execution time are means over the requests that ended in this round."""
        stats = self._nfs.get(path)
        if stats is None:
            unknown["rtt_ms"] = "mountstats does not list this mount"
            return
        rates = self._rates
        totals = [sum(column) for column in zip(*stats.operations.values(), strict=True)] or [0] * 6
        requests, sent, timeouts, queued_ms, rtt_ms, execute_ms = (
            rates.increase((path, index), value) for index, value in enumerate(totals)
        )
        retransmits = rates.increase((path, "retransmits"), max(0, totals[1] - totals[0]))
        why = rates.why
        for name, step in (
            ("operations_per_s", requests),
            ("retransmits_per_s", retransmits),
            ("timeouts_per_s", timeouts),
            ("read_bytes_per_s", rates.increase((path, "read"), stats.read_bytes)),
            ("write_bytes_per_s", rates.increase((path, "written"), stats.written_bytes)),
        ):
            if step is None:
                unknown[name] = why
            else:
                metrics[name] = step[0] / step[1]
        del sent
        for name, step in (("rtt_ms", rtt_ms), ("execute_ms", execute_ms), ("queue_ms", queued_ms)):
            if step is None or requests is None:
                unknown[name] = why
            elif requests[0] > 0:
                metrics[name] = step[0] / requests[0]
            else:
                unknown[name] = "no request in this round"

    def _disk_of(self, mount: MountEntry) -> str:
        if mount.remote:
            return ""
        try:
            return disk_of_device(self._sysfs, mount.device)
        except OSError:
            pass
        if mount.source.startswith("/dev/"):  # btrfs and the like have a device number of their own
            try:
                return disk_of_name(self._sysfs, mount.source.rpartition("/")[2])
            except OSError:
                pass
        return ""

    # -- processes -------------------------------------------------------------------------------------------------

    def expand(self, entities: Sequence[nodes.Process]) -> Batch:
        batch = Batch()
        if not self.settings.working_directories and not self.settings.open_files:
            return batch
        processes = self._procfs.processes()
        for entity in entities:
            stat = processes.get(entity.pid)
            if stat is None or stat.start != entity.start:
                self.lose("vanished processes")
                continue
            if stat.kernel_thread:
                continue
            try:
                namespace = self._procfs.namespace(entity.pid, "mnt")
                table = self._table_of(entity.pid, namespace)
                if table is None or not table.remote:
                    continue
                used = self._used_by(entity.pid, table)
            except PermissionError:
                self.note("files of other users' processes cannot be seen", "run as root or grant CAP_SYS_PTRACE")
                continue
            except (OSError, ValueError):
                self.lose("vanished processes")
                continue
            for mount, ways in used.items():
                target = self._entity_of(mount, namespace, batch)
                batch.edges.append(edges.Access(entity.id, target, {"via": sorted(ways)}))
        return batch

    def _table_of(self, pid: int, namespace: int) -> _Table | None:
        if namespace == self._own_namespace:
            return self._own
        known = self._tables.get(namespace)
        if known is not None and self._round - known.round < _TABLE_ROUNDS:
            return known
        if self._tables_left <= 0:
            self.note("mount tables of containers are read in turns", "", 1)
            return known
        self._tables_left -= 1
        assert self._source is not None  # noqa: S101
        known = self._tables[namespace] = _table(self._source.table(pid), self._round)
        return known

    def _used_by(self, pid: int, table: _Table) -> dict[MountEntry, set[str]]:
        assert self._source is not None  # noqa: S101
        used: dict[MountEntry, set[str]] = {}
        ways: list[tuple[str, list[str]]] = []
        if self.settings.working_directories:
            ways.append(("cwd", [self._source.working_directory(pid)]))
            ways.append(("exe", [self._procfs.exe(pid)]))
        if self.settings.open_files:
            paths, left_out = self._source.open_paths(pid, self.settings.max_open_files)
            ways.append(("open file", paths))
            if left_out:
                self.lose("open files not looked at", left_out)
        for way, paths in ways:
            for path in paths:
                mount = _holding(table, path)
                if mount is not None and mount.remote:
                    used.setdefault(mount, set()).add(way)
        return used

    def _entity_of(self, mount: MountEntry, namespace: int, batch: Batch) -> str:
        """The host's mount of the same file system; else one that only that mount namespace has."""
        path = self._by_device.get(mount.device)
        if path is not None:
            return f"Mount({printable(path)})"
        name = f"{printable(mount.path)} (mnt:{namespace})"
        attributes: dict[str, Any] = {
            "source": redact_text(printable(mount.source)),
            "fstype": mount.fstype,
            "remote": True,
        }
        server = server_of(mount)
        if server:
            attributes["server"] = server
        unknown = {"size_bytes": "mounted in another mount namespace only: not asked"}
        entity = nodes.Mount(path=name, attributes=attributes, unknown=unknown)
        batch.nodes.append(entity)
        return entity.id


def server_of(mount: MountEntry) -> str:
    """The machine that serves a mount: ``host:/export``, ``[v6]:/export``, ``//host/share``; empty if not told."""
    source = printable(mount.source)
    if source.startswith("//"):
        return source[2:].partition("/")[0].rpartition("@")[2]
    host, colon, path = source.rpartition(":/")
    return host.strip("[]") if colon and path is not None and "/" not in host else ""


def redact_options(options: str) -> str:
    """Mount options, each once, with the values of secrets replaced."""
    parts = []
    for option in dict.fromkeys(options.split(",")):
        name, equals, value = option.partition("=")
        hide = equals and value and (is_secret_name(name) or name in ("pass", "passwd", "credentials", "cred"))
        parts.append(f"{name}=***" if hide else option)
    return redact_text(",".join(parts))


def _put_space(space: StatVfs, metrics: dict[str, int | float], unknown: dict[str, str]) -> None:
    """``used_pct`` is that of df(1): of what ordinary users can have, so that 100 means full for them."""
    if not space.size_bytes:
        unknown["size_bytes"] = "the file system says 0: it has no size"
        return
    used = space.size_bytes - space.free_bytes
    metrics["size_bytes"] = space.size_bytes
    metrics["used_bytes"] = used
    metrics["free_bytes"] = space.available_bytes
    if used + space.available_bytes > 0:
        metrics["used_pct"] = 100 * used / (used + space.available_bytes)
    if space.files > 0:
        metrics["inodes_used_pct"] = 100 * (space.files - space.files_free) / space.files


def _table(mounts: list[MountEntry], number: int) -> _Table:
    ordered = sorted(mounts, key=lambda mount: len(mount.path), reverse=True)
    return _Table(ordered, any(mount.remote and mount.fstype not in _KERNEL_TYPES for mount in mounts), number)


def _holding(table: _Table, path: str) -> MountEntry | None:
    for mount in table.mounts:
        point = mount.path
        if path == point or path.startswith(point if point.endswith("/") else point + "/"):
            return mount
    return None
