"""Writes a small /proc (and whatever else) into a folder, for sources that read it through ``HostFs(root)``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpuflight.sources.clock import ManualClock
from gpuflight.sources.fs import HostFs
from gpuflight.sources.procfs import ProcFs

BOOT_S = 1_700_000_000
TICKS = 100
OWN_NAMESPACE = 4026531835


class ProcFixture:
    """One machine under ``root``. Its ``self`` is process 1 unless told otherwise."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("/proc/stat", f"cpu 0 0 0 0\nbtime {BOOT_S}\n")
        self.write("/proc/sys/kernel/hostname", "box\n")
        self.write("/proc/sys/kernel/arch", "x86_64\n")
        self.clock = ManualClock()
        self.fs = HostFs(str(root))
        self.procfs = ProcFs(self.fs, self.clock)
        self._start: dict[int, int] = {}

    def write(self, path: str, text: str | bytes) -> None:
        """Write one file; the root folder stands for ``/``."""
        target = Path(f"{self.root}{path}")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.encode() if isinstance(text, str) else text)

    def link(self, path: str, target: str) -> None:
        """Make a symbolic link that points nowhere in particular."""
        place = Path(f"{self.root}{path}")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        place.symlink_to(target)

    def process(
        self,
        pid: int,
        *,
        start: int = 1000,
        ppid: int = 1,
        ticks: int = 0,
        state: str = "S",
        flags: int = 0x400000,
        cgroup: str = "0::/\n",
        mountinfo: str | None = None,
        namespaces: dict[str, int] | None = None,
        files: dict[str, str] | None = None,
        fds: dict[int, str] | None = None,
    ) -> int:
        """One process; ``files`` are further files of its folder (maps, status, syscall)."""
        fields = [state, ppid, pid, pid, 0, -1, flags, 0, 0, 0, 0, ticks, 0, 0, 0, 20, 0, 1, 0, start, 0, 10]
        fields += [0] * (37 + 2 - len(fields))
        self.write(f"/proc/{pid}/stat", f"{pid} (p{pid}) " + " ".join(map(str, fields)) + "\n")
        self.write(f"/proc/{pid}/cgroup", cgroup)
        if mountinfo is not None:
            self.write(f"/proc/{pid}/mountinfo", mountinfo)
        for kind in ("ipc", "mnt", "cgroup"):
            number = (namespaces or {}).get(kind, OWN_NAMESPACE)
            self.link(f"/proc/{pid}/ns/{kind}", f"{kind}:[{number}]")
        (self.root / f"proc/{pid}/fd").mkdir(exist_ok=True)
        for number, target in (fds or {}).items():
            self.link(f"/proc/{pid}/fd/{number}", target)
        for name, text in (files or {}).items():
            self.write(f"/proc/{pid}/{name}", text)
        return pid

    def own(self, *, mountinfo: str = "", namespaces: dict[str, int] | None = None) -> None:
        """What /proc/self shows: the gpuflight process."""
        self.write("/proc/self/mountinfo", mountinfo)
        for kind in ("ipc", "mnt", "cgroup"):
            self.link(f"/proc/self/ns/{kind}", f"{kind}:[{(namespaces or {}).get(kind, OWN_NAMESPACE)}]")


class FixtureWorld:
    """As much of a World as the collectors of containers and IPC use."""

    def __init__(self, machine: ProcFixture, **sources: Any) -> None:
        self.procfs: Any = machine.procfs
        self.clock = machine.clock
        self.__dict__.update(sources)

    def begin_round(self, number: int) -> None:
        for source in self.__dict__.values():
            if hasattr(source, "begin_round"):
                source.begin_round(number)
