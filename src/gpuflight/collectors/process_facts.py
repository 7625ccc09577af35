"""What rarely changes about a process, as attributes: kept while it runs one program, redacted once."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from gpuflight.redaction import redact_argv
from gpuflight.sources.procfs import ProcFs, ProcStat

NO_RIGHT = "no right to look into this process"


class ProcessFacts(Struct, gc=False):
    """Attributes of one process but state and ppid, and the reasons for those that are missing."""

    image: tuple[str, int, int]
    argv: list[str]
    attributes: dict[str, Any]
    unknown: dict[str, str]


class FactReader:
    """Reads ``ProcessFacts`` through a ProcFs and knows when they have to be read again."""

    def __init__(self, cmdline_max_chars: int) -> None:
        self._cmdline_max_chars = cmdline_max_chars
        self._own_netns: int | None = None

    def begin(self, procfs: ProcFs) -> None:
        """Open a round."""
        self._procfs = procfs
        try:
            self._own_netns = procfs.own_namespace("net")
        except (OSError, ValueError):
            self._own_netns = None

    def read(self, stat: ProcStat, known: ProcessFacts | None) -> ProcessFacts:
        """The facts of a process; ``known`` itself as long as it holds.

        Raises OSError if the process ended meanwhile.
        """
        if known is not None and known.image == stat.image and stat.pid not in self._procfs.refreshed:
            return known
        facts = self._read(stat, known)
        return known if known is not None and facts == known else facts

    def _read(self, stat: ProcStat, known: ProcessFacts | None) -> ProcessFacts:
        procfs, pid = self._procfs, stat.pid
        attributes: dict[str, Any] = {"name": stat.comm}
        unknown: dict[str, str] = {}
        argv = procfs.cmdline(pid)  # readable by everyone: an error here means that the process ended
        if known is not None and known.argv == argv:
            cmdline = known.attributes.get("cmdline", "")
        else:
            cmdline = redacted_cmdline(argv, self._cmdline_max_chars)
        if cmdline:
            attributes["cmdline"] = cmdline
        if not stat.kernel_thread and stat.state not in "ZX":
            try:
                attributes["exe"] = procfs.exe(pid)
            except PermissionError:
                unknown["exe"] = NO_RIGHT
        self._owner(pid, attributes, unknown)
        try:
            attributes["cgroup"] = main_cgroup(procfs.cgroup(pid))
        except OSError as error:
            unknown["cgroup"] = error.strerror or "cannot be read"
        if self._own_netns is not None and not stat.kernel_thread:
            try:
                netns = procfs.namespace(pid, "net")
                if netns != self._own_netns:
                    attributes["netns"] = netns
            except (OSError, ValueError):
                unknown["netns"] = NO_RIGHT
        return ProcessFacts(stat.image, argv, attributes, unknown)

    def _owner(self, pid: int, attributes: dict[str, Any], unknown: dict[str, str]) -> None:
        """From the status file: the owner, where it may run, its pids in inner namespaces."""
        procfs = self._procfs
        try:
            uid = procfs.uid(pid)
            attributes["uid"] = uid
            user = procfs.user(uid)
            if user is not None:
                attributes["user"] = user
            cpus = procfs.cpus_allowed(pid)
            if cpus:
                attributes["cpus_allowed"] = cpus
            nspids = procfs.nspids(pid)
            if len(nspids) > 1:
                attributes["nspids"] = nspids
        except PermissionError:
            unknown["uid"] = NO_RIGHT
        except (KeyError, ValueError, IndexError):
            unknown["uid"] = "the status file has no Uid line"


def redacted_cmdline(argv: list[str], max_chars: int) -> str:
    """The command line as it may be shown: without secrets, cut to ``max_chars``."""
    text = " ".join(redact_argv(argv))
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


def main_cgroup(groups: list[tuple[str, str]]) -> str:
    """The one path that says most: of cgroup v2, else of memory, else the first that is not the root."""
    paths = dict(groups)
    for controllers in ("", "memory"):
        path = paths.get(controllers, "/")
        if path != "/":
            return path
    return next((path for path in paths.values() if path != "/"), "/")
