"""Which live process writes a GPU session.

A log tells the pid that the program has in its own pid namespace, and the name of the host as the program sees it,
which in a container is the container's. Several processes of a host may have that pid, each in its namespace, and logs
of other hosts lie in shared folders. So a process is taken only if its innermost pid (NSpid) is the one, it began
before the session, and the name is its host's or its container's; if several are left, the one that has a GPU open.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuflight.errors import SourceUnavailable

if TYPE_CHECKING:
    from gpuflight.events.activity.summary import Summary
    from gpuflight.sources.procfs import ProcStat
    from gpuflight.sources.world import World

SLACK_S = 3.0
"""A process's start is known to the second only (btime in /proc/stat), and clocks are corrected."""

_NOBODY = 65534

_GPU_FILES = ("/dev/nvidia", "/dev/dxg", "/dev/kfd")

NO_PID = "the log does not name its process (its first line was not read)"
NO_START = "the log does not say when the session began, so that its pid may be another process's by now"
OTHER_HOST = "the log was written on another host, or in a container that cannot be told"
NOT_FOUND = "no live process of this host has its pid and began before it"
SEVERAL = "several processes, in different pid namespaces, may have written it"
OTHER_USER = "its log belongs to another user than the process that has its pid"
NO_HOST_NAME = "the log names no host, and no process with its pid has a GPU open"


class SessionProcesses:
    """Remembers what was found: a session's process is looked for until it is known, and then only whether it lives."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, int]] = {}
        self._world: World | None = None
        self._by_inner: dict[int, list[ProcStat]] | None = None
        self._holders: set[int] | None = None

    def begin(self, world: World) -> None:
        """A round begins."""
        self._world = world
        self._by_inner = self._holders = None

    def drop(self, keep: set[str]) -> None:
        """Forget all sessions but these."""
        self._known = {session: found for session, found in self._known.items() if session in keep}

    def was_found(self, session_id: str) -> tuple[int, int] | None:
        """(pid, start) of the process that a session was found to be of, live or not."""
        return self._known.get(session_id)

    def find(self, session: Summary) -> tuple[ProcStat | None, str]:
        """The live process, or None and why. Of one that was found before: None once it is gone."""
        assert self._world is not None  # noqa: S101 - begin() comes first
        processes = self._world.procfs.processes()
        known = self._known.get(session.session_id)
        if known is not None:
            stat = processes.get(known[0])
            alive = stat is not None and stat.start == known[1]
            return (stat, "") if alive else (None, "its process has ended")
        if session.pid is None:
            return None, NO_PID
        if session.start_ns is None:
            return None, NO_START
        found, why = self._candidates(session, session.pid, session.start_ns / 1e9)
        if len(found) > 1:
            holders = [stat for stat in found if stat.pid in self._gpu_users()]
            found, why = (holders, "") if len(holders) == 1 else ([], SEVERAL)
        if not found:
            return None, why
        self._known[session.session_id] = (found[0].pid, found[0].start)
        return found[0], ""

    def _candidates(self, session: Summary, pid: int, began_s: float) -> tuple[list[ProcStat], str]:
        assert self._world is not None  # noqa: S101
        procfs = self._world.procfs
        right, elsewhere, others = [], 0, 0
        candidates = self._inner().get(pid, ())
        try:
            boot_s, ticks = (procfs.boot_time_s, procfs.ticks_per_second) if candidates else (0.0, 1)
        except (SourceUnavailable, ValueError):
            return [], "the time when this host was started is not known"
        for stat in candidates:
            if boot_s + stat.start / ticks > began_s + SLACK_S:
                continue
            if session.hostname and not self._is_called(stat, session.hostname):
                elsewhere += 1
            elif not self._may_write(stat, session.uid):
                others += 1
            elif (not session.hostname or session.devices) and not self._may_use_gpus(stat, not session.hostname):
                continue
            else:
                right.append(stat)
        if right:
            return right, ""
        if others:
            return [], OTHER_USER
        if not session.hostname:
            return [], NO_HOST_NAME
        own = session.hostname == procfs.hostname
        return [], NOT_FOUND if own and not elsewhere else OTHER_HOST

    def _inner(self) -> dict[int, list[ProcStat]]:
        """Processes by their pid in the innermost namespace, threads of the kernel excepted."""
        if self._by_inner is None:
            assert self._world is not None  # noqa: S101
            self._by_inner = {}
            procfs = self._world.procfs
            for pid, stat in procfs.processes().items():
                if stat.kernel_thread:
                    continue
                try:
                    inner = procfs.nspids(pid)[-1]
                except (OSError, ValueError, SourceUnavailable):  # it ended, or may not be looked into
                    continue
                self._by_inner.setdefault(inner, []).append(stat)
        return self._by_inner

    def _is_called(self, stat: ProcStat, name: str) -> bool:
        """Whether the host is called so where this process runs."""
        assert self._world is not None  # noqa: S101
        procfs, cgroups = self._world.procfs, self._world.cgroups
        try:
            if procfs.namespace(stat.pid, "uts") == procfs.own_namespace("uts"):
                return name == procfs.hostname
        except (OSError, ValueError, SourceUnavailable):
            if len(self._nspids(stat)) == 1:  # not allowed to look: without a pid namespace of its own it is ours
                return name == procfs.hostname
        try:
            for layer in cgroups.of(stat.pid).layers:
                if layer.kind != "container":
                    continue
                facts = cgroups.facts(layer)
                if (len(name) >= 12 and layer.identity.startswith(name)) or name in (facts.name, facts.pod_name):
                    return True
        except (OSError, ValueError, SourceUnavailable):
            pass
        try:
            return procfs.environ(stat.pid).get("HOSTNAME") == name
        except (OSError, ValueError, SourceUnavailable):
            return False

    def _may_write(self, stat: ProcStat, uid: int | None) -> bool:
        """Whether the log can be this process's: nobody is told to do what somebody else has written. What root owns is
        believed; what a file server made nobody's may be root's."""
        assert self._world is not None  # noqa: S101
        if uid in (None, 0):
            return True
        try:
            own = self._world.procfs.uid(stat.pid)
        except (OSError, ValueError, SourceUnavailable):
            return False
        return own == uid or (own == 0 and uid == _NOBODY)

    def _nspids(self, stat: ProcStat) -> list[int]:
        assert self._world is not None  # noqa: S101
        try:
            return self._world.procfs.nspids(stat.pid)
        except (OSError, ValueError, SourceUnavailable):
            return [stat.pid]

    def _may_use_gpus(self, stat: ProcStat, must: bool) -> bool:
        """Whether a process has a GPU open; where nobody's open files show one, any may (``must``: none may)."""
        holders = self._gpu_users()
        return stat.pid in holders or (not holders and not must)

    def _gpu_users(self) -> set[int]:
        if self._holders is None:
            assert self._world is not None  # noqa: S101
            try:
                paths = self._world.procfs.fds().paths
            except (OSError, SourceUnavailable):
                paths = {}
            self._holders = {ref.pid for path, refs in paths.items() if path.startswith(_GPU_FILES) for ref in refs}
        return self._holders
