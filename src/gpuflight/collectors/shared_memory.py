"""Shared memory: POSIX, System V, memfd, anonymous and files, with the processes that map or hold it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpuflight.collectors.base import Batch, Collector
from gpuflight.collectors.ipc_users import (
    ObjectGraph,
    Usage,
    device_text,
    note_foreign_namespaces,
    note_no_sysv,
    note_unreadable_descriptors,
    note_unseen_maps,
)
from gpuflight.graph import Edge, Entity, edges, nodes
from gpuflight.sources.segments import ShmMount, is_semaphore, shared

if TYPE_CHECKING:
    from gpuflight.sources.segments import Segment, Use
    from gpuflight.sources.world import World

_UNUSED_FILES_SHOWN = 16
"""Largest files of /dev/shm without a user that get an entity of their own; people keep whole data sets there."""


class SharedMemoryCollector(Collector):
    """Shared memory segments with who maps or holds them, and how full each /dev/shm is.

    POSIX and System V segments are always drawn, memfds and anonymous ones when processes share them, files when
    processes share them and one may write. Segments that nobody uses hang on the host.
    """

    expands = (nodes.Process, nodes.SharedMemory, nodes.Host)

    def __init__(self, settings: Any = None) -> None:
        super().__init__(settings)
        self._graph = ObjectGraph()
        self._host_id = ""
        self._own_mount: nodes.Mount | None = None

    def observe(self, world: World) -> None:
        self._host_id = nodes.Host(hostname=world.procfs.hostname).id
        self._graph = ObjectGraph(self._host_id)
        segments = world.ipc.segments()
        mounts = _Mounts(world)
        self._add_segments(world, [segment for segment in segments.values() if not is_semaphore(segment)], mounts)
        note_unreadable_descriptors(self, world, "shared memory")
        note_unseen_maps(self, world)
        self._own_mount = mounts.own(self._unused_files(world, mounts))
        note_foreign_namespaces(self, world, "shared memory that nobody maps")

    def expand(self, entities: Sequence[Entity]) -> Batch:
        batch = self._graph.expand(entities)
        if self._own_mount is not None and any(entity.id == self._host_id for entity in entities):
            batch.nodes.append(self._own_mount)
            batch.edges.append(edges.Host(self._host_id, self._own_mount.id))
        return batch

    def _add_segments(self, world: World, segments: list[Segment], mounts: _Mounts) -> None:
        processes = world.procfs.processes()
        try:
            table = dict(world.ipc.sysv_shared_memory())
        except OSError as error:
            table = {}
            note_no_sysv(self, error, "shared memory")
        for segment in shared(segments):
            users = {(pid, processes[pid].start): _usage(use) for pid, use in segment.users.items() if pid in processes}
            key = f"ino={segment.inode},dev={device_text(segment.device)}"
            attributes: dict[str, Any] = {}
            metrics: dict[str, int | float] = {
                "attached_count": sum(use.mapped_bytes > 0 for use in segment.users.values())
            }
            size_bytes: int | None = None
            if segment.mechanism == "sysv":
                key = str(segment.inode) + (f",ipcns={segment.ipc_namespace}" if segment.ipc_namespace else "")
                row = table.pop(segment.inode, None) if not segment.ipc_namespace else None
                if row is not None:
                    size_bytes = row.size_bytes
                    _describe_sysv(row, attributes, metrics)
            elif segment.mechanism != "anonymous":
                attributes["name"] = segment.name.rpartition("/")[2].removeprefix("memfd:")
                attributes["path"] = segment.name
                if segment.deleted and segment.mechanism != "memfd":
                    attributes["deleted"] = True
            if size_bytes is None:
                size_bytes = world.ipc.size_of(segment)
            unknown = None
            if size_bytes is None:
                metrics["mapped_bytes"] = segment.extent_bytes
                unknown = {
                    "size_bytes": "neither a name, a descriptor nor a mapping of it may be asked; see mapped_bytes"
                }
            else:
                metrics["size_bytes"] = size_bytes
            node = nodes.SharedMemory(
                mechanism=segment.mechanism, key=key, attributes=attributes, metrics=metrics, unknown=unknown
            )
            beside_edges, beside_nodes = mounts.beside(segment, node) if segment.mechanism == "posix" else ([], [])
            self._graph.add(node, users, beside_edges, beside_nodes)
        for row in table.values():
            if row.attached and (world.ipc.maps.unreadable or world.ipc.maps.pending):
                self.lose("System V segments whose users cannot be seen")
            attributes, metrics = {}, {"size_bytes": row.size_bytes}
            _describe_sysv(row, attributes, metrics)
            self._graph.add(
                nodes.SharedMemory(mechanism="sysv", key=str(row.shmid), attributes=attributes, metrics=metrics), {}
            )

    def _unused_files(self, world: World, mounts: _Mounts) -> dict[str, int | float]:
        """Draw the largest files of our /dev/shm that no process uses; metrics of them all, if that can be told."""
        maps = world.ipc.maps
        if maps.unreadable or maps.pending or world.procfs.fds().unreadable_pids:
            return {}  # whoever uses them may be among those that cannot be seen
        used = {(segment.device, segment.inode) for segment in world.ipc.segments().values()}
        files = world.ipc.shm_files()
        unused = sorted(
            ((file, inode) for inode, file in files.items() if inode not in used),
            key=lambda item: (-item[0].size_bytes, item[0].name),
        )
        if world.ipc.shm_files_left:
            self.lose("files of /dev/shm not looked at", world.ipc.shm_files_left)
        for file, (device, inode) in unused[:_UNUSED_FILES_SHOWN]:
            if file.name.startswith("sem."):
                continue
            node = nodes.SharedMemory(
                mechanism="posix",
                key=f"ino={inode},dev={device_text(device)}",
                attributes={"name": file.name, "path": f"/dev/shm/{file.name}", "owner_uid": file.uid},  # noqa: S108
                metrics={"size_bytes": file.size_bytes, "attached_count": 0},
            )
            self._graph.add(node, {})
        return {"unused_files_count": len(unused), "unused_bytes": sum(file.size_bytes for file, _ in unused)}


class _Mounts:
    """The /dev/shm of each device, asked once per round through a process that has a segment there."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._known: dict[int, tuple[nodes.Mount, list[Edge]] | None] = {}
        self._own: ShmMount | None = None
        try:
            self._own = world.ipc.shm_mount()
        except OSError:
            pass

    def own(self, more: dict[str, int | float]) -> nodes.Mount | None:
        """Our own /dev/shm."""
        return _mount_node(self._own, more) if self._own is not None else None

    def beside(self, segment: Segment, node: Entity) -> tuple[list[Edge], list[Entity]]:
        """The edge from a segment to the file system that it takes space of, and what goes with it."""
        device = segment.device
        if device not in self._known:
            self._known[device] = self._find(segment)
        known = self._known[device]
        if known is None:
            return [], []
        mount, holders = known
        return [edges.Belong(node.id, mount.id), *holders], [mount]

    def _find(self, segment: Segment) -> tuple[nodes.Mount, list[Edge]] | None:
        if self._own is not None and self._own.device == segment.device:
            return _mount_node(self._own, {}), []
        for pid in list(segment.users)[:3]:
            try:
                mount = self._world.ipc.shm_mount(pid)
                if mount is None or mount.device != segment.device:
                    continue
                node = _mount_node(mount, {})
                container_id = self._world.cgroups.of(pid).container_id
            except OSError:
                continue
            return node, [edges.Host(f"Container({container_id})", node.id)] if container_id else []
        return None


def _mount_node(mount: ShmMount, more: dict[str, int | float]) -> nodes.Mount:
    path = "/dev/shm" if mount.own else f"/dev/shm,dev={device_text(mount.device)}"  # noqa: S108
    used_bytes = mount.size_bytes - mount.free_bytes
    metrics: dict[str, int | float] = {
        "size_bytes": mount.size_bytes,
        "used_bytes": used_bytes,
        "free_bytes": mount.free_bytes,
        **more,
    }
    if mount.size_bytes:
        metrics["used_pct"] = round(100 * used_bytes / mount.size_bytes, 2)
    attributes = {"name": "/dev/shm", "fstype": "tmpfs"}  # noqa: S108
    return nodes.Mount(path=path, attributes=attributes, metrics=metrics)


def _usage(use: Use) -> Usage:
    how = [name for name, holds in (("mapped", use.mapped_bytes), ("open", use.descriptors)) if holds]
    return Usage(
        {"how": ", ".join(how), "ends": "r" * use.readable + "w" * use.writable},
        {"mapped_bytes": use.mapped_bytes} if use.mapped_bytes else {},
    )


def _describe_sysv(row: Any, attributes: dict[str, Any], metrics: dict[str, int | float]) -> None:
    attributes["sysv_key"] = f"0x{row.key & 0xFFFFFFFF:08x}"
    attributes["owner_uid"] = row.uid
    attributes["creator_pid"] = row.creator_pid
    metrics["attached_count"] = row.attached
    if row.resident_bytes is not None:
        metrics["resident_bytes"] = row.resident_bytes
