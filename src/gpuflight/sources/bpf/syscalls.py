"""The bpf(2) and perf_event_open(2) calls that probes and counters need, by ctypes: no library's version matters.

Structures: include/uapi/linux/bpf.h (``union bpf_attr``) and linux/perf_event.h. Every function raises OSError.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform

MAP_LOOKUP, MAP_UPDATE, MAP_DELETE, MAP_NEXT_KEY = 1, 2, 3, 4
PROG_LOAD = 5
OBJ_GET_INFO_BY_FD = 15
LOOKUP_BATCH = 24
LINK_CREATE, ENABLE_STATS, ITER_CREATE = 28, 32, 33

PROG_TYPE_KPROBE = 2
PERF_EVENT, UPROBE_MULTI = 41, 48
"""Attach types."""

UPROBE_MULTI_RETURN = 1
ENOTSUPP = 524
"""What the kernel says, by mistake to users as well, of map types that have no such operation."""

_NUMBERS = {"x86_64": (321, 298), "aarch64": (280, 241)}
_ATTR_BYTES = 128
PERF_ATTR_BYTES = 128
_PERF_CLOEXEC = 8


@functools.cache
def _syscall() -> tuple[ctypes._NamedFuncPointer, int, int]:
    try:
        bpf_number, perf_number = _NUMBERS[platform.machine()]
    except KeyError:
        raise OSError(errno.ENOSYS, f"system calls of {platform.machine()} are not known to gpuflight") from None
    function = ctypes.CDLL(None, use_errno=True).syscall
    function.restype = ctypes.c_long
    return function, bpf_number, perf_number


def bpf(command: int, attr: ctypes.Structure | ctypes.Array[ctypes.c_char]) -> int:
    """bpf(2): its answer."""
    function, number, _ = _syscall()
    answer: int = function(
        ctypes.c_long(number), ctypes.c_long(command), ctypes.byref(attr), ctypes.c_ulong(ctypes.sizeof(attr))
    )
    if answer < 0:
        code = ctypes.get_errno()
        raise OSError(code, "operation not supported" if code == ENOTSUPP else os.strerror(code))
    return answer


class ElementAttr(ctypes.Structure):
    """``union bpf_attr`` of BPF_MAP_*_ELEM and BPF_MAP_GET_NEXT_KEY."""

    _fields_ = [
        ("map_fd", ctypes.c_uint32),
        ("key", ctypes.c_uint64),
        ("value", ctypes.c_uint64),  # or next_key
        ("flags", ctypes.c_uint64),
    ]


class BatchAttr(ctypes.Structure):
    """``union bpf_attr`` of BPF_MAP_*_BATCH."""

    _fields_ = [
        ("in_batch", ctypes.c_uint64),
        ("out_batch", ctypes.c_uint64),
        ("keys", ctypes.c_uint64),
        ("values", ctypes.c_uint64),
        ("count", ctypes.c_uint32),
        ("map_fd", ctypes.c_uint32),
        ("elem_flags", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
    ]


class _UprobeMultiAttr(ctypes.Structure):
    _fields_ = [
        ("prog_fd", ctypes.c_uint32),
        ("target_fd", ctypes.c_uint32),
        ("attach_type", ctypes.c_uint32),
        ("link_flags", ctypes.c_uint32),
        ("path", ctypes.c_uint64),
        ("offsets", ctypes.c_uint64),
        ("ref_ctr_offsets", ctypes.c_uint64),
        ("cookies", ctypes.c_uint64),
        ("count", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("pid", ctypes.c_uint32),
        ("padding", ctypes.c_uint32),
    ]


class _PerfLinkAttr(ctypes.Structure):
    _fields_ = [
        ("prog_fd", ctypes.c_uint32),
        ("target_fd", ctypes.c_uint32),
        ("attach_type", ctypes.c_uint32),
        ("link_flags", ctypes.c_uint32),
        ("cookie", ctypes.c_uint64),
    ]


class PerfEventAttr(ctypes.Structure):
    """``struct perf_event_attr``; ``flags`` are its bit field, from ``disabled`` (bit 0) on."""

    _fields_ = [
        ("type", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("config", ctypes.c_uint64),
        ("sample_period", ctypes.c_uint64),
        ("sample_type", ctypes.c_uint64),
        ("read_format", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("wakeup_events", ctypes.c_uint32),
        ("bp_type", ctypes.c_uint32),
        ("config1", ctypes.c_uint64),
        ("config2", ctypes.c_uint64),
        ("rest", ctypes.c_uint8 * (PERF_ATTR_BYTES - 72)),
    ]


def link_uprobe_multi(
    program_fd: int, path: str, offsets: list[int], cookies: list[int], *, returns: bool = False, pid: int = 0
) -> int:
    """One link of a program to many offsets of one file: its descriptor."""
    count = len(offsets)
    places = (ctypes.c_uint64 * count)(*offsets)
    marks = (ctypes.c_uint64 * count)(*cookies)
    name = ctypes.create_string_buffer(os.fsencode(path))
    attr = _UprobeMultiAttr(
        prog_fd=program_fd,
        attach_type=UPROBE_MULTI,
        path=ctypes.addressof(name),
        offsets=ctypes.addressof(places),
        cookies=ctypes.addressof(marks),
        count=count,
        flags=UPROBE_MULTI_RETURN if returns else 0,
        pid=pid,
    )
    return bpf(LINK_CREATE, attr)


def link_perf(program_fd: int, perf_fd: int, cookie: int) -> int:
    """A link of a program to a perf event, with its cookie (kernel ≥ 5.15): its descriptor. The event may be closed."""
    return bpf(LINK_CREATE, _PerfLinkAttr(prog_fd=program_fd, target_fd=perf_fd, attach_type=PERF_EVENT, cookie=cookie))


def open_uprobe_event(pmu_type: int, return_bit: int | None, path: str, offset: int, pid: int = 0) -> int:
    """A perf event of the PMU ``uprobe``, which needs no tracefs: its descriptor.

    ``return_bit``: the bit of config that asks for the return of the function, None for its entry.
    """
    config = 0 if return_bit is None else 1 << return_bit
    return open_perf_event(pmu_type, config, os.fsencode(path), offset, pid)


def open_perf_event(kind: int, config: int, name: bytes = b"", offset: int = 0, pid: int = 0) -> int:
    """A perf event: its descriptor. ``name`` (file or function) and ``offset`` are for the PMUs uprobe and kprobe."""
    place = ctypes.create_string_buffer(name)
    attr = PerfEventAttr(
        type=kind,
        size=PERF_ATTR_BYTES,
        config=config,
        config1=ctypes.addressof(place) if name else 0,
        config2=offset,
    )
    # The event of a file, not of a task: with pid -1 it has to name a CPU, and fires on all of them.
    return perf_event_open(attr, pid or -1, -1 if pid else 0)


def perf_event_open(attr: PerfEventAttr, pid: int, cpu: int = -1, group_fd: int = -1) -> int:
    """perf_event_open(2), closed on exec: its descriptor. ``pid`` is a thread's id; ``cpu`` -1: wherever it runs."""
    function, _, number = _syscall()
    answer: int = function(
        ctypes.c_long(number),
        ctypes.byref(attr),
        ctypes.c_long(pid),
        ctypes.c_long(cpu),
        ctypes.c_long(group_fd),
        ctypes.c_ulong(_PERF_CLOEXEC),
    )
    if answer < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return answer


class _IterAttr(ctypes.Structure):
    _fields_ = [("link_fd", ctypes.c_uint32), ("flags", ctypes.c_uint32)]


def create_iter(link_fd: int) -> int:
    """A descriptor that reads the iterator of a link from its beginning."""
    return bpf(ITER_CREATE, _IterAttr(link_fd=link_fd))


class _StatsAttr(ctypes.Structure):
    _fields_ = [("type", ctypes.c_uint32)]


def enable_stats() -> int:
    """A descriptor; while it is open the kernel counts runs and run time of every program (needs CAP_SYS_ADMIN)."""
    return bpf(ENABLE_STATS, _StatsAttr(type=0))


class _InfoAttr(ctypes.Structure):
    _fields_ = [("fd", ctypes.c_uint32), ("length", ctypes.c_uint32), ("info", ctypes.c_uint64)]


class MapInfo(ctypes.Structure):
    """The beginning of ``struct bpf_map_info``."""

    _fields_ = [
        ("type", ctypes.c_uint32),
        ("id", ctypes.c_uint32),
        ("key_size", ctypes.c_uint32),
        ("value_size", ctypes.c_uint32),
        ("max_entries", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
    ]


def map_info(map_fd: int) -> MapInfo:
    """What a map is."""
    info = MapInfo()
    bpf(OBJ_GET_INFO_BY_FD, _InfoAttr(fd=map_fd, length=ctypes.sizeof(info), info=ctypes.addressof(info)))
    return info


class ProgramAttr(ctypes.Structure):
    """What PROG_LOAD is told; ``instructions``, ``license`` and ``log`` are addresses."""

    _fields_ = [
        ("type", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("instructions", ctypes.c_uint64),
        ("license", ctypes.c_uint64),
        ("log_level", ctypes.c_uint32),
        ("log_size", ctypes.c_uint32),
        ("log", ctypes.c_uint64),
        ("kernel_version", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("name", ctypes.c_char * 16),
        ("interface", ctypes.c_uint32),
        ("expected_attach_type", ctypes.c_uint32),
    ]


def load_nothing(expected_attach_type: int = 0) -> int:
    """A uprobe program that returns 0, to learn whether programs may be loaded at all: its descriptor."""
    code = (ctypes.c_uint64 * 2)(0xB7, 0x95)  # r0 = 0; exit
    licence = ctypes.create_string_buffer(b"GPL")
    attr = ProgramAttr(
        type=PROG_TYPE_KPROBE,
        count=2,
        instructions=ctypes.addressof(code),
        license=ctypes.addressof(licence),
        name=b"gf_nothing",
        expected_attach_type=expected_attach_type,
    )
    return bpf(PROG_LOAD, attr)
