"""World: every source of one host, handed to the collectors each round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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

    def begin_round(self, number: int) -> None:
        """Forget what was read for the last round; sources read again at most once when first asked."""
        if self.tape is not None:
            self.tape.begin_round(number)
        for source in (self.procfs, self.sysfs, self.cgroups, self.netlink, self.ipc, self.nvml, self.tools):
            source.begin_round(number)

    def close(self) -> None:
        """Give back descriptors, library handles and threads."""
        for source in (self.netlink, self.nvml, self.procfs):
            source.close()
        if self.tape is not None:
            self.tape.close()  # ends a recording: only now its file appears
