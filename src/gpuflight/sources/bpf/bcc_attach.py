"""Attaching what bcc compiled: by its section, and uprobes where the kernel has no cookies."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.bpf import bcc_load, features, syscalls
from gpuflight.sources.bpf.base import Uprobe
from gpuflight.sources.bpf.uprobes import UprobeLink, uprobe_pmu

_LOADERS = 16
_PERF_TRACEPOINT = 2
_IOC_ENABLE, _IOC_SET_BPF = 0x2400, 0x40042408  # linux/perf_event.h
_KPROBE_PMU = "/sys/bus/event_source/devices/kprobe"
_TRACEFS_HINT = "mount -t tracefs nodev /sys/kernel/tracing"


def attach_without_cookies(load: Callable[[int], int], uprobes: Sequence[Uprobe], pid: int = 0) -> UprobeLink:
    """One perf event each, with the program that holds the place's cookie itself (``load(cookie)``, thread-safe).

    The verifier looks at each of these programs, on as many processors as there are.
    """
    link = UprobeLink(one_by_one=True)
    with ThreadPoolExecutor(min(_LOADERS, os.cpu_count() or 1), "gpuflight-load") as pool:
        loading = {cookie: pool.submit(load, cookie) for cookie in {uprobe.cookie for uprobe in uprobes}}
    for uprobe in uprobes:
        try:
            program = loading[uprobe.cookie].result()
            pmu_type, return_bit = uprobe_pmu()
            event = syscalls.open_uprobe_event(
                pmu_type, return_bit if uprobe.ret else None, uprobe.path, uprobe.offset, pid
            )
            link.add(_run(event, program), [uprobe])
        except (OSError, SourceUnavailable) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            link.failed.append((uprobe, reason or str(error)))
    return link


def attach_section(program_fd: int, section: str) -> UprobeLink:
    """Attach to ``raw_tp/EVENT``, ``tracepoint/GROUP/EVENT``, ``kprobe/FUNCTION`` or ``kretprobe/FUNCTION``.

    Raises SourceUnavailable(reason, hint).
    """
    kind, _, target = section.partition("/")
    try:
        if kind == "raw_tp":
            fd = bcc_load.open_raw_tracepoint(program_fd, target)
        elif kind == "tracepoint":
            fd = _run(syscalls.open_perf_event(_PERF_TRACEPOINT, _tracepoint_id(target)), program_fd)
        elif kind in ("kprobe", "kretprobe"):
            fd = _run(_open_kprobe(target, returns=kind == "kretprobe"), program_fd)
        else:
            raise SourceUnavailable(f"a program of section {section} is not attached by its section")
    except OSError as error:
        reason = "there is no such place in this kernel" if isinstance(error, FileNotFoundError) else error.strerror
        raise SourceUnavailable(f"{section} cannot be attached: {reason}") from error
    link = UprobeLink()
    link.add(fd, [])
    return link


def _run(event: int, program_fd: int) -> int:
    """Have a perf event run a program, without a link (which Linux 5.15 brought): the event's descriptor."""
    try:
        fcntl.ioctl(event, _IOC_SET_BPF, program_fd)
        fcntl.ioctl(event, _IOC_ENABLE, 0)
    except OSError:
        os.close(event)
        raise
    return event


def _tracepoint_id(target: str) -> int:
    root = features.tracefs()
    if root is None:
        raise SourceUnavailable(f"tracepoint/{target} cannot be attached: tracefs is not mounted", _TRACEFS_HINT)
    with open(f"{root}/events/{target}/id", encoding="utf-8") as file:
        return int(file.read())


def _open_kprobe(function: str, *, returns: bool) -> int:
    try:
        with open(f"{_KPROBE_PMU}/type", encoding="utf-8") as file:
            pmu_type = int(file.read())
        with open(f"{_KPROBE_PMU}/format/retprobe", encoding="utf-8") as file:
            bit = int(file.read().strip().removeprefix("config:"))
    except OSError:
        raise SourceUnavailable(
            f"kprobe/{function} cannot be attached: the kernel has no kprobes", "use a tracepoint or a raw tracepoint"
        ) from None
    return syscalls.open_perf_event(pmu_type, 1 << bit if returns else 0, function.encode())
