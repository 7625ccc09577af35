"""The devices that each process has, by what /proc, its container and the probes say about it.

The environment that a program was started with is in /proc/PID/environ. What it sets itself (``os.environ[…] = …``
calls setenv) the probe sees; it counts until the program first uses CUDA, is inherited by forked children, and is over
when another program is executed, whose environment /proc then shows. Of a process that ran before it was watched, the
environment is read from its memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.cuda_devices import (
    CudaGpu,
    CudaMig,
    Visible,
    allocated,
    minors_of,
    permitted_minors,
    visible_devices,
)
from gpuflight.sources.cuda_probe.rows import EnvironmentRow, LifeRow
from gpuflight.sources.live_environ import LiveEnviron

if TYPE_CHECKING:
    from gpuflight.sources.cgroups import Cgroups
    from gpuflight.sources.fs import FileSystem
    from gpuflight.sources.nvml.model import NvmlSnapshot
    from gpuflight.sources.procfs import ProcFs, ProcStat
    from gpuflight.sources.recording import Tape

DEVICES, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
REQUESTED = "NVIDIA_VISIBLE_DEVICES"


def gpus_of(snapshot: NvmlSnapshot) -> list[CudaGpu]:
    """What decides how CUDA numbers the GPUs that NVML lists."""
    return [
        CudaGpu(
            gpu.uuid,
            gpu.index,
            gpu.address,
            str(gpu.facts.get("name", "")),
            gpu.facts.get("minor"),
            gpu.facts.get("mig_mode") == "enabled",
            tuple(CudaMig(mig.uuid, mig.gpu_instance, mig.compute_instance) for mig in gpu.migs),
        )
        for gpu in snapshot.gpus
    ]


def disorder_of(snapshot: NvmlSnapshot) -> str:
    """Why the GPUs cannot be counted as CUDA does: a program that started before one was lost counts it, others do
    not."""
    lost = [str(gpu.index) for gpu in snapshot.gpus if gpu.state != "ok"]
    if lost or snapshot.nameless:
        which = ", ".join(lost) or str(snapshot.nameless[0][0])
        return f"GPU {which} is lost: programs count it or not, by when they started"
    return ""


class _Own(Struct):
    """What a process set while it ran: None is removed. ``used_ns``: when it first used CUDA, as far as was seen."""

    values: dict[str, str | None] = field(default_factory=dict)
    used_ns: int | None = None


class CudaVisibility:
    """``begin`` and ``hear`` once per round, then ``of`` for each process of interest."""

    def __init__(self, fs: FileSystem, procfs: ProcFs, cgroups: Cgroups, tape: Tape | None = None) -> None:
        self._fs = fs
        self._procfs = procfs
        self._cgroups = cgroups
        self._live = LiveEnviron(fs, procfs, tape)
        self._gpus: tuple[CudaGpu, ...] | None = None
        self._reason = ""
        self._disorder = ""
        self._own: dict[int, _Own] = {}
        self._kept: dict[int, tuple[object, Visible]] = {}

    def begin(self, gpus: Sequence[CudaGpu] | None, reason: str = "", disorder: str = "") -> None:
        """A round begins with these GPUs; None: they are not known, for ``reason``."""
        self._gpus, self._reason, self._disorder = (None if gpus is None else tuple(gpus)), reason, disorder

    def hear(
        self, environment: Iterable[EnvironmentRow], life: Iterable[LifeRow], used: Iterable[tuple[int, int]] = ()
    ) -> None:
        """What was seen since the last round. ``used``: (pid, ns) of processes at work with CUDA, since when at the
        latest."""
        for pid, time_ns in used:
            own = self._own.setdefault(pid, _Own())
            own.used_ns = time_ns if own.used_ns is None else min(own.used_ns, time_ns)
        events: list[EnvironmentRow | LifeRow] = sorted([*environment, *life], key=lambda row: row.time_ns)
        for row in events:
            if isinstance(row, EnvironmentRow):
                self._set(row)
            elif row.event == "fork":
                parent = self._own.get(row.pid)
                if parent is not None:  # a child must initialise CUDA anew
                    used_ns = self._own.get(row.child_pid, _Own()).used_ns
                    self._own[row.child_pid] = _Own(dict(parent.values), used_ns)
            else:
                self._own.pop(row.pid, None)
                self._kept.pop(row.pid, None)

    def _set(self, row: EnvironmentRow) -> None:
        own = self._own.setdefault(row.pid, _Own())
        if row.variable not in (DEVICES, ORDER) or (own.used_ns is not None and own.used_ns <= row.time_ns):
            return  # CUDA reads them once
        before = own.values.get(row.variable, self._started_with(row.pid).get(row.variable))
        if not row.overwrite and before is not None:
            return
        own.values[row.variable] = row.value

    def _started_with(self, pid: int) -> dict[str, str]:
        try:
            return self._procfs.environ(pid)
        except OSError:
            return {}

    def of(self, stat: ProcStat, *, late: bool = False) -> Visible:
        """The devices of a live process; ``late``: it ran before it was watched. Kept until something that decides them
        changes."""
        own = self._own.get(stat.pid)
        values = () if own is None else tuple(own.values.items())
        state = (stat.start, stat.image, self._gpus, self._reason, self._disorder, values, late)
        kept = self._kept.get(stat.pid)
        if kept is not None and kept[0] == state:
            return kept[1]
        visible = self._find(stat.pid, dict(values), late)
        self._kept[stat.pid] = (state, visible)
        return visible

    def drop(self, alive: Iterable[int]) -> None:
        """Forget all processes but these."""
        keep = set(alive)
        self._own = {pid: own for pid, own in self._own.items() if pid in keep}
        self._kept = {pid: kept for pid, kept in self._kept.items() if pid in keep}

    # --- inside ----------------------------------------------------------------------------------------------------

    def _find(self, pid: int, values: dict[str, str | None], late: bool) -> Visible:
        gpus = self._gpus
        if gpus is None:
            return Visible(beyond=self._reason or "the GPUs of this machine are not known", complete=False)
        try:
            environ = self._procfs.environ(pid)
        except OSError as error:
            why = f"the environment of the process cannot be read: {error.strerror}"
            return Visible(beyond=why, complete=False)
        files = self._device_files(pid)
        held = allocated(gpus, files=files, permitted=self._permitted(pid), requested=environ.get(REQUESTED))
        if held.reason:
            return Visible(beyond=held.reason, complete=False)
        now = self._live.read(pid, (DEVICES, ORDER)) if late else None
        chosen: dict[str, str | None] = {name: (environ if now is None else now).get(name) for name in (DEVICES, ORDER)}
        chosen.update(values)
        visible = visible_devices(held.gpus, chosen[DEVICES], chosen[ORDER], disorder=self._disorder)
        return replace(visible, sure=False) if late and now is None else visible

    def _device_files(self, pid: int) -> set[int] | None:
        """Minors of the /dev/nvidiaN that a process in a mount namespace of its own sees; None for one in ours, and
        where GPUs have no such files."""
        try:
            if self._procfs.namespace(pid, "mnt") == self._procfs.own_namespace("mnt"):
                return None
            if not minors_of(self._fs.listdir("/dev")):
                return None
            return minors_of(self._fs.listdir(f"{self._procfs.root}/{pid}/root/dev"))
        except (OSError, ValueError):
            return None

    def _permitted(self, pid: int) -> set[int] | None:
        """What a device cgroup of version 1 permits; version 2 does it by a program that cannot be read."""
        try:
            for controllers, path in self._cgroups.of(pid).groups:
                if "devices" in controllers.split(","):
                    raw = self._fs.read(f"/sys/fs/cgroup/devices{path.rstrip('/')}/devices.list")
                    return permitted_minors(raw.decode("ascii", "replace"))
        except (OSError, ValueError, SourceUnavailable):
            pass
        return None
