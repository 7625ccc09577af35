"""Which network namespaces there are on this host, and through which process each is reached."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from gpuflight.sources.procfs import ProcFs

_DOORS = 3  # processes remembered per namespace: the first may end before it is used


class Namespace(Struct):
    """One network namespace. ``netns`` is 0 for gpuflight's own, else the inode.

    ``first_pid`` is a pid (or ``self``) whose /proc/PID/net shows it; ``paths`` are the ``ns/net`` files through which
    it can be entered."""

    netns: int
    first_pid: int | str
    paths: list[str]


class Namespaces:
    """Finds the namespaces that processes live in. One without a process holds no socket that anyone owns, except those
    of a process that opened a socket there and moved on, which are not seen."""

    def __init__(self, procfs: ProcFs) -> None:
        self._procfs = procfs
        self.unreadable = 0
        """Processes whose namespace may not be read, last time."""

    def find(self) -> list[Namespace]:
        """gpuflight's own first, then the others by the lowest pid in them. Raises SourceUnavailable."""
        procfs = self._procfs
        try:
            own = procfs.own_namespace("net")
        except OSError:
            own = 0  # a kernel without /proc/PID/ns: there is one namespace
        found: dict[int, list[int]] = {}
        self.unreadable = 0
        if own:
            for pid, stat in procfs.processes().items():
                if stat.kernel_thread:
                    continue
                try:
                    netns = procfs.namespace(pid, "net")
                except PermissionError:
                    self.unreadable += 1
                    continue
                except (OSError, ValueError):
                    continue  # it ended
                if netns != own:
                    pids = found.setdefault(netns, [])
                    if len(pids) < _DOORS:
                        pids.append(pid)
        root = procfs.root  # no other root: only a live machine's namespaces are entered
        return [
            Namespace(0, "self", []),
            *(Namespace(netns, pids[0], [f"{root}/{pid}/ns/net" for pid in pids]) for netns, pids in found.items()),
        ]
