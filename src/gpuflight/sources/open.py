"""Opening a World: this machine, a tree of fixtures, or a recording; and recording one while it is watched."""

from __future__ import annotations

import os

from gpuflight import __version__
from gpuflight.errors import InputError
from gpuflight.sources.bpf.probes import BackendChoice, Probes
from gpuflight.sources.cgroups import Cgroups
from gpuflight.sources.clock import Clock, SystemClock
from gpuflight.sources.fs import FileSystem, HostFs
from gpuflight.sources.http import Http
from gpuflight.sources.ipc import Ipc
from gpuflight.sources.mongodb import Mongo
from gpuflight.sources.nccl_ras import NcclRas
from gpuflight.sources.netlink import Netlink
from gpuflight.sources.nvml import Nvml
from gpuflight.sources.perf_events import PerfEvents
from gpuflight.sources.procfs import ProcFs
from gpuflight.sources.procfs.marks import TaskMarks
from gpuflight.sources.recording import Tape
from gpuflight.sources.session_logs import SessionLogs
from gpuflight.sources.sysfs import SysFs
from gpuflight.sources.taped_fs import RecordingFs, ReplayFs
from gpuflight.sources.tools import Tools
from gpuflight.sources.world import World


def open_world(
    root: str = "",
    *,
    replay: str | os.PathLike[str] | None = None,
    record: str | os.PathLike[str] | None = None,
    redact: bool = True,
    force: bool = False,
    clock: Clock | None = None,
    probes: BackendChoice = "auto",
    probe_costs: bool = True,
) -> World:
    """The sources of one machine.

    ``root``: a tree of fixtures laid out like a machine's files, instead of this machine; netlink, NVML and tools then
    answer nothing. ``replay``: a recording to answer from; it brings its own clock. ``record``: a file to record
    everything into that is read from now on; it appears when the world is closed, and replaces an existing file only
    with ``force``. With ``redact`` (the default) secrets in command lines are replaced, and of environments only a few
    harmless variables kept, before they reach the file. ``probes``: what loads probes;
    ``probe_costs``: whether the kernel counts what they cost. Raises InputError.
    """
    fs: FileSystem
    if replay is not None:
        if record is not None or root:
            raise InputError("a replay can neither be recorded again nor be combined with a tree of files")
        tape = Tape.replay(os.fspath(replay))
        fs = ReplayFs(tape)
        clock = clock if clock is not None else tape.clock
    else:
        clock = clock if clock is not None else SystemClock()
        fs = HostFs(root)
        tape = Tape()
        if record is not None:
            tape = _recorder(os.fspath(record), fs, clock, redact=redact, force=force)
            fs = RecordingFs(fs, tape)
    beside = Tape.blank() if root else tape  # beside a tree of files nothing may ask this machine
    procfs = ProcFs(fs, clock)
    opened = Probes(beside, backend=probes, own_cost=probe_costs)
    procfs.marks = TaskMarks(opened)
    return World(
        fs=fs,
        procfs=procfs,
        sysfs=SysFs(fs),
        cgroups=Cgroups(fs, procfs),
        netlink=Netlink(procfs, tape=beside),
        ipc=Ipc(fs, procfs, tape=beside),
        nvml=Nvml(tape=beside, clock=clock),
        tools=Tools(beside),
        clock=clock,
        tape=tape,
        http=Http(beside),
        mongo=Mongo(beside),
        session_logs=SessionLogs(tape, root),
        nccl_ras=NcclRas(beside),
        probes=opened,
        perf_events=PerfEvents(beside),
    )


def _recorder(path: str, fs: FileSystem, clock: Clock, *, redact: bool, force: bool) -> Tape:
    from gpuflight.sources.redact_recording import redact_answer

    try:
        hostname = fs.read("/proc/sys/kernel/hostname").decode("utf-8", "replace").strip()
    except OSError:
        hostname = ""
    return Tape.record(
        path, clock, hostname=hostname, redactor=redact_answer if redact else None, version=__version__, force=force
    )
