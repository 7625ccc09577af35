"""Attaching a loaded program to places in files: one link for all of them, or one perf event each."""

from __future__ import annotations

import errno
import functools
import os
import threading
from collections.abc import Sequence

from gpuflight.sources.bpf import syscalls
from gpuflight.sources.bpf.base import Link, Uprobe

_PMU = "/sys/bus/event_source/devices/uprobe"


class UprobeLink(Link):
    """Links of one program, by their descriptors."""

    def __init__(self) -> None:
        self.attached: list[Uprobe] = []
        self.failed: list[tuple[Uprobe, str]] = []
        self._fds: list[int] = []

    def add(self, fd: int, uprobes: Sequence[Uprobe]) -> None:
        self._fds.append(fd)
        self.attached += uprobes

    def close(self) -> None:
        fds, self._fds = self._fds, []
        self.attached = []
        if len(fds) <= 2:
            _close_all(fds)
            return
        # The kernel lets go of one after the other, each after a grace period: several threads would not be faster.
        threading.Thread(target=_close_all, args=(fds,), name="gpuflight-detach", daemon=True).start()


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def attach_multi(program_fd: int, uprobes: Sequence[Uprobe], pid: int = 0) -> UprobeLink:
    """One uprobe_multi link per file and direction. The program was loaded with the attach type UPROBE_MULTI.

    The kernel takes all places of a link or none: after a refusal the halves are tried, so that one bad symbol costs
    itself only.
    """
    link = UprobeLink()
    groups: dict[tuple[str, bool], list[Uprobe]] = {}
    for uprobe in uprobes:
        groups.setdefault((uprobe.path, uprobe.ret), []).append(uprobe)
    for (path, returns), members in groups.items():
        waiting = [members]
        while waiting:
            part = waiting.pop()
            try:
                fd = syscalls.link_uprobe_multi(
                    program_fd,
                    path,
                    [uprobe.offset for uprobe in part],
                    [uprobe.cookie for uprobe in part],
                    returns=returns,
                    pid=pid,
                )
            except OSError as error:
                if len(part) == 1 or error.errno in (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EBADF, errno.ESRCH):
                    link.failed += [(uprobe, _reason(error)) for uprobe in part]
                else:
                    waiting += [part[len(part) // 2 :], part[: len(part) // 2]]
            else:
                link.add(fd, part)
    return link


def attach_classic(program_fd: int, uprobes: Sequence[Uprobe], pid: int = 0) -> UprobeLink:
    """A perf event and a link with a cookie for each place."""
    link = UprobeLink()
    for uprobe in uprobes:
        try:
            pmu_type, return_bit = uprobe_pmu()
            event = syscalls.open_uprobe_event(
                pmu_type, return_bit if uprobe.ret else None, uprobe.path, uprobe.offset, pid
            )
            try:
                link.add(syscalls.link_perf(program_fd, event, uprobe.cookie), [uprobe])
            finally:
                os.close(event)  # the link holds it
        except OSError as error:
            link.failed.append((uprobe, _reason(error)))
    return link


@functools.cache
def uprobe_pmu() -> tuple[int, int]:
    """Type of the kernel's PMU ``uprobe``, and the bit that asks for returns. Raises OSError without one."""
    with open(f"{_PMU}/type", encoding="ascii") as file:
        pmu_type = int(file.read())
    with open(f"{_PMU}/format/retprobe", encoding="ascii") as file:
        return pmu_type, int(file.read().strip().removeprefix("config:"))


def _reason(error: OSError) -> str:
    if error.errno == errno.EMFILE:
        return "too many open files: raise LimitNOFILE"
    return error.strerror or str(error)
