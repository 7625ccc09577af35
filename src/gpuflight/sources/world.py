"""World: every source of one host, handed to the collectors each round."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpuflight.sources.bpf.probes import Probes
from gpuflight.sources.http import Http
from gpuflight.sources.mongodb import Mongo
from gpuflight.sources.nccl_ras import NcclRas
from gpuflight.sources.perf_events import PerfEvents
from gpuflight.sources.session_logs import SessionLogs

if TYPE_CHECKING:
    from gpuflight.sources.cgroups import Cgroups
    from gpuflight.sources.clock import Clock
    from gpuflight.sources.fs import FileSystem
    from gpuflight.sources.ipc import Ipc
    from gpuflight.sources.netlink import Netlink
    from gpuflight.sources.nvml import Nvml
    from gpuflight.sources.procfs import ProcFs
    from gpuflight.sources.recording import Tape
    from gpuflight.sources.sysfs import SysFs
    from gpuflight.sources.tools import Tools

_CAP_SYS_PTRACE = 19
"""Number of the capability (capabilities(7), linux/capability.h)."""


@dataclass
class World:
    """The sources of one machine: the real one, a fixture tree, or a recording."""

    fs: FileSystem
    procfs: ProcFs
    sysfs: SysFs
    cgroups: Cgroups
    netlink: Netlink
    ipc: Ipc
    nvml: Nvml
    tools: Tools
    clock: Clock
    tape: Tape | None = None  # set when this world is recorded or replayed
    http: Http = field(default_factory=Http)
    mongo: Mongo = field(default_factory=Mongo)
    session_logs: SessionLogs = field(default_factory=SessionLogs)
    nccl_ras: NcclRas = field(default_factory=NcclRas)
    probes: Probes = field(default_factory=Probes)
    perf_events: PerfEvents = field(default_factory=PerfEvents)

    def may_trace(self) -> bool:
        """Whether this process has CAP_SYS_PTRACE, the right to look into other users' processes."""
        try:
            text = self.fs.read_record("/proc/self/status").decode("ascii", "replace")
            return bool(int(text.partition("CapEff:")[2].split()[0], 16) >> _CAP_SYS_PTRACE & 1)
        except (OSError, ValueError, IndexError):
            return False

    def begin_round(self, number: int) -> None:
        """Forget what was read for the last round; sources read again at most once when first asked."""
        if self.tape is not None:
            self.tape.begin_round(number)
        for source in (
            self.procfs,
            self.sysfs,
            self.cgroups,
            self.netlink,
            self.ipc,
            self.nvml,
            self.tools,
            self.probes,
            self.perf_events,
        ):
            source.begin_round(number)

    def close(self) -> None:
        """Give back descriptors, library handles and threads."""
        for source in (self.probes, self.perf_events, self.netlink, self.nvml, self.procfs, self.http, self.nccl_ras):
            source.close()
        if self.tape is not None:
            self.tape.close()  # ends a recording: only now its file appears
