"""Attaching a loaded program to places in files: one link for all of them, or one perf event each."""

from __future__ import annotations

import errno
import functools
import os
import threading
from collections.abc import Callable, Sequence

from gpuflight.sources.bpf import syscalls
from gpuflight.sources.bpf.base import Link, Uprobe

_MOST_THREADS = 64
_PMU = "/sys/bus/event_source/devices/uprobe"


class UprobeLink(Link):
    """Links of one program, by their descriptors."""

    def __init__(self, *, one_by_one: bool = False) -> None:
        """``one_by_one``: many links that the kernel lets go of one after the other: nobody can wait for that."""
        self.closed = False
        self.attached: list[Uprobe] = []
        self.failed: list[tuple[Uprobe, str]] = []
        self._fds: list[int] = []
        self._one_by_one = one_by_one

    def add(self, fd: int, uprobes: Sequence[Uprobe]) -> None:
        self._fds.append(fd)
        self.attached += uprobes

    def close(self) -> None:
        fds, self._fds = self._fds, []
        self.attached = []
        self.closed = True
        if self._one_by_one and len(fds) > 1:
            _in_thread(lambda: _close_all(fds))
        else:
            together([lambda fd=fd: os.close(fd) for fd in fds])  # type: ignore[misc]


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def together(works: Sequence[Callable[[], None]]) -> None:
    """Detach several things at once: each waits for a grace period of the kernel, and they wait for the same one."""
    threads = [_in_thread(work) for work in works[1:_MOST_THREADS]]
    for work in (*works[:1], *works[_MOST_THREADS:]):
        work()
    for thread in threads:
        if thread is not None:
            thread.join()


def _in_thread(work: Callable[[], None]) -> threading.Thread | None:
    """Do it in a thread, or here and now where no thread can be had any more (the interpreter ends)."""
    thread = threading.Thread(target=work, name="gpuflight-detach", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        work()
        return None
    return thread


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
    link = UprobeLink(one_by_one=True)
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
    with open(f"{_PMU}/type", encoding="utf-8") as file:
        pmu_type = int(file.read())
    with open(f"{_PMU}/format/retprobe", encoding="utf-8") as file:
        return pmu_type, int(file.read().strip().removeprefix("config:"))


def _reason(error: OSError) -> str:
    if error.errno == errno.EMFILE:
        return "too many open files: raise LimitNOFILE"
    return error.strerror or str(error)
