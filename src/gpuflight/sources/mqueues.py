"""POSIX message queues: those that processes have open, and those that /dev/mqueue lists where it is mounted."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from gpuflight.sources.fs import FileSystem
from gpuflight.sources.procfs import FdRef, ProcFs

_FILE_BYTES = 80  # FILENT_SIZE of ipc/mqueue.c: the size that stat gives of every queue
_REGULAR, _FILE_TYPE = 0o100000, 0o170000


class PosixQueue(NamedTuple):
    """A POSIX message queue: open in a process, or listed in /dev/mqueue (then ``users`` may be empty).

    ``ipc_namespace`` is 0 for our own. ``notify_pid`` is who asked to be told of the next message (0: nobody).
    """

    name: str
    device: int
    inode: int
    deleted: bool
    ipc_namespace: int
    queued_bytes: int | None
    notify_pid: int
    users: list[FdRef]

    @property
    def key(self) -> str:
        """What tells it from every other queue: its name, of a deleted one its inode too, since the name may be another
        queue's by now; and the namespace, if it is not ours."""
        key = self.name
        if self.deleted:
            key += f",ino={self.inode}"
        if self.ipc_namespace:
            key += f",ipcns={self.ipc_namespace}"
        return key


class MessageQueueFiles:
    """Finds the queues anew each round; keeps only which files were found to be none."""

    def __init__(self, fs: FileSystem, procfs: ProcFs, ipc_namespace: Callable[[int], int]) -> None:
        self._fs = fs
        self._procfs = procfs
        self._ipc_namespace = ipc_namespace
        self._others: set[tuple[int, int]] = set()

    def queues(self) -> dict[tuple[int, int], PosixQueue]:
        """All queues by (device, inode)."""
        found = self._open()
        for queue in self._listed():
            found.setdefault((queue.device, queue.inode), queue)
        return found

    def _open(self) -> dict[tuple[int, int], PosixQueue]:
        index = self._procfs.fds()
        queues: dict[tuple[int, int], PosixQueue] = {}
        seen: set[tuple[int, int]] = set()
        for path, refs in index.paths.items():
            plain = path.removesuffix(" (deleted)")
            # mq_open(3) gives descriptors that show as /name, those opened through the mount as /dev/mqueue/name.
            if plain.count("/") > 1 and "mqueue" not in plain:
                continue
            for ref in refs:
                inode = index.inodes.get(ref)
                if inode is None:
                    continue
                seen.add(inode)
                queue = queues.get(inode)
                if queue is not None:
                    queue.users.append(ref)
                elif inode not in self._others:
                    queue = self._queue(inode, plain, path != plain, ref)
                    if queue is not None:
                        queues[inode] = queue
        self._others &= seen
        return queues

    def _queue(self, inode: tuple[int, int], path: str, deleted: bool, ref: FdRef) -> PosixQueue | None:
        descriptor = f"/proc/{ref.pid}/fd/{ref.fd}"
        try:
            stat = self._fs.stat(descriptor)
            # Looked at before it is opened: opening a fifo would block, and an ordinary file is not ours to read.
            ordinary = path.count("/") == 1 and stat.device == self._fs.stat(f"/proc/{ref.pid}/root").device
            if ordinary or stat.mode & _FILE_TYPE != _REGULAR or stat.size != _FILE_BYTES:
                self._others.add(inode)
                return None
            status = parse_mqueue(self._fs.read_record(descriptor))
            if status is None:
                self._others.add(inode)
                return None
        except PermissionError:  # the queue's own mode refuses it: it is one all the same
            status = {}
        except OSError:
            return None
        try:
            namespace = self._ipc_namespace(ref.pid)
        except OSError:
            namespace = 0
        name = "/" + path.rpartition("/")[2]
        size, notify = status.get("QSIZE"), status.get("NOTIFY_PID", 0)
        return PosixQueue(name, *inode, deleted, namespace, size, notify, users=[ref])

    def _listed(self) -> list[PosixQueue]:
        try:
            names = self._fs.listdir("/dev/mqueue")
        except OSError:  # not mounted
            return []
        queues = []
        for name in names:
            path = f"/dev/mqueue/{name}"
            try:
                stat = self._fs.stat(path)
                status = parse_mqueue(self._fs.read_record(path)) if stat.size == _FILE_BYTES else None
            except PermissionError:
                status = {}
            except OSError:
                continue
            if status is not None:
                size, notify = status.get("QSIZE"), status.get("NOTIFY_PID", 0)
                queues.append(PosixQueue("/" + name, stat.device, stat.inode, False, 0, size, notify, users=[]))
        return queues


def parse_mqueue(raw: bytes) -> dict[str, int] | None:
    """The status text of a POSIX queue, ``QSIZE:129 NOTIFY:0 …``, as numbers; None if it is not one."""
    if not raw.startswith(b"QSIZE:"):
        return None
    fields = {}
    for item in raw.decode("ascii", "replace").split():
        name, _, value = item.partition(":")
        if value.isdigit():
            fields[name] = int(value)
    return fields
