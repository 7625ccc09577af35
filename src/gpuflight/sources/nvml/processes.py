"""Processes on a GPU, read with the structure that the driver really writes.

Drivers write three layouts: 16 bytes (the first version), 24 (v2 and v3), and 32 (some of the 535 branch, under the
symbol of v3); a client that reads one as another sees made-up pids. So the buffer is filled with a pattern first: how
far the driver wrote, divided by how many entries it says it wrote, is the size of its entry.
"""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from gpuflight.sources.nvml.library import INSUFFICIENT_SIZE, NOT_FOUND, Refused
from gpuflight.sources.nvml.model import GpuProcess

if TYPE_CHECKING:
    from gpuflight.sources.nvml.library import Library

_KINDS = (
    ("compute", "nvmlDeviceGetComputeRunningProcesses"),
    ("graphics", "nvmlDeviceGetGraphicsRunningProcesses"),
    ("mps", "nvmlDeviceGetMPSComputeRunningProcesses"),
)
_VERSIONS = ("_v3", "_v2", "")
_SIZES = (16, 24, 32)
_ENTRY = {16: struct.Struct("=I4xQ"), 24: struct.Struct("=I4xQII"), 32: struct.Struct("=I4xQIIQ")}
_USUAL_SIZE = {"_v3": 24, "_v2": 24, "": 16}
_PATTERN = 0xA5
_LARGEST = max(_SIZES)
_PID_MAX_LIMIT = 4_194_304  # include/linux/threads.h
_NOT_AVAILABLE = 0xFFFF_FFFF_FFFF_FFFF
_NO_INSTANCE = 0xFFFF_FFFF
_ATTEMPTS = 4


class _Raw(NamedTuple):
    pid: int
    used: int
    gpu_instance: int
    compute_instance: int


def list_processes(
    library: Library, handle: Any, what: str, total_bytes: int | None
) -> tuple[list[GpuProcess], int, str]:
    """Every process on a GPU or MIG device, merged over compute, graphics and MPS; how many entries made no sense; and
    why nothing is known, if so. Raises Lost and Broken."""
    merged: dict[tuple[int, int, int], GpuProcess] = {}
    garbled = 0
    reason = ""
    for kind, function in _KINDS:
        try:
            entries, bad = _list(library, function, handle, what, total_bytes)
        except Refused as refused:
            if kind == "compute":  # graphics and MPS lists may well be missing; without this one nothing is known
                reason = refused.reason
            continue
        garbled += bad
        for entry in entries:
            process = merged.get((entry.pid, entry.gpu_instance, entry.compute_instance))
            if process is None:
                process = GpuProcess(
                    pid=entry.pid,
                    kinds=[],
                    memory_used_bytes=None if entry.used == _NOT_AVAILABLE else entry.used,
                    gpu_instance=None if entry.gpu_instance == _NO_INSTANCE else entry.gpu_instance,
                    compute_instance=None if entry.compute_instance == _NO_INSTANCE else entry.compute_instance,
                )
                merged[entry.pid, entry.gpu_instance, entry.compute_instance] = process
            process.kinds.append(kind)
    return list(merged.values()), garbled, reason


def _list(library: Library, function: str, handle: Any, what: str, total: int | None) -> tuple[list[_Raw], int]:
    refused = Refused(13)
    for version in _VERSIONS:
        try:
            count, raw = _ask(library, function + version, handle, what)
        except Refused as error:
            refused = error
            if error.code in (13, 25, 26):  # not in this driver, or not in this version
                continue
            raise
        return _decode(raw, count, _USUAL_SIZE[version], total)
    raise refused


def _ask(library: Library, function: str, handle: Any, what: str) -> tuple[int, bytes]:
    count = ctypes.c_uint(0)
    code = library.raw(function, handle, ctypes.byref(count), None, what=what)
    for _ in range(_ATTEMPTS):
        if code == 0:
            return 0, b""
        if code != INSUFFICIENT_SIZE:
            raise Refused(code)
        room = count.value * 2 + 5  # more processes may have begun meanwhile
        buffer = (ctypes.c_ubyte * (room * _LARGEST))()
        ctypes.memset(buffer, _PATTERN, len(buffer))
        count.value = room
        code = library.raw(function, handle, ctypes.byref(count), buffer, what=what)
        if code == 0:
            return count.value, bytes(buffer)
    raise Refused(INSUFFICIENT_SIZE)


def _decode(raw: bytes, count: int, usual: int, total: int | None) -> tuple[list[_Raw], int]:
    if count == 0:
        return [], 0
    written = len(raw.rstrip(bytes((_PATTERN,))))
    size = next((size for size in _SIZES if written <= size * count), usual)
    entries = _unpack(raw, count, size)
    sound = [entry for entry in entries if _plausible(entry, total)]
    if len(sound) < count and size != usual:  # the driver filled the buffer in a way of its own
        other = [entry for entry in _unpack(raw, count, usual) if _plausible(entry, total)]
        sound = max(sound, other, key=len)
    return sound, count - len(sound)


def _unpack(raw: bytes, count: int, size: int) -> list[_Raw]:
    layout = _ENTRY[size]
    found = []
    for number in range(count):
        pid, used, *instances = layout.unpack_from(raw, number * size)
        gpu_instance, compute_instance = instances[:2] if instances else (_NO_INSTANCE, _NO_INSTANCE)
        found.append(_Raw(pid, used, gpu_instance, compute_instance))
    return found


def _plausible(entry: _Raw, total: int | None) -> bool:
    fits = entry.used == _NOT_AVAILABLE or total is None or entry.used <= total
    return 0 < entry.pid <= _PID_MAX_LIMIT and fits


class Utilisation:
    """Per-process utilisation of one GPU between rounds.

    NVML gives samples of processes that were not idle since a time in µs; a process that it lists and does not give
    while giving others was idle: 0 was measured. If it gives none at all, all were idle if the GPU was, else that is
    not known. MIG devices have no such samples.
    """

    def __init__(self) -> None:
        self._since_us = 0

    def apply(
        self, library: Library, handle: Any, what: str, processes: list[GpuProcess], now_us: int, gpu_util: object
    ) -> None:
        """Fill in ``sm_util_pct`` and ``memory_util_pct`` (mean of the samples) or ``util_reason``."""
        if not processes:
            return
        since_us = self._since_us or now_us - 2_000_000
        try:
            samples = library.call("nvmlDeviceGetProcessUtilization", handle, since_us, what=what)
            reason = ""
        except Refused as refused:
            samples = []
            idle = refused.code in (0, NOT_FOUND, 21) and gpu_util == 0
            reason = "" if idle else "NVML gave no samples" if refused.code in (0, NOT_FOUND, 21) else refused.reason
        by_pid: dict[int, list[tuple[int, int]]] = {}
        for sample in samples:
            if sample.pid and sample.smUtil <= 100 and sample.timeStamp > since_us:
                by_pid.setdefault(sample.pid, []).append((sample.smUtil, sample.memUtil))
                self._since_us = max(self._since_us, sample.timeStamp)
        if samples and not by_pid:
            reason = "no sample since the last round"
        for process in processes:
            mine = by_pid.get(process.pid, [(0, 0)] if not reason else [])
            if mine:
                process.sm_util_pct = sum(sm for sm, _ in mine) / len(mine)
                process.memory_util_pct = sum(memory for _, memory in mine) / len(mine)
            else:
                process.util_reason = reason
