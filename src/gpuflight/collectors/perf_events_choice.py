"""Which events tell of the last-level cache on which CPU.

The generic events do not mean the same everywhere. ``LLC-loads`` and ``LLC-load-misses`` are the last level where a CPU
has them (Intel, Arm with LL_CACHE_RD). ``cache-references`` and ``cache-misses`` are the last level on Intel
(LONGEST_LAT_CACHE), but level 2 on AMD since Zen (arch/x86/events/amd/core.c: 0xff60, 0x0964) and level 1 on Arm
(drivers/perf/arm_pmuv3.c: L1D_CACHE, L1D_CACHE_REFILL), so they stand in on Intel only. AMD counts its level 3 for
a whole core complex, not per process; what a process has is where its demand data-cache fills came from (PMCx043,
ls_dmnd_fills_from_sys): 0x02 the level 3 of its complex, 0x04 and 0x10 another complex's cache, near and far, 0x08 and
0x40 memory, near and far.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpuflight.sources.perf_events import HARDWARE, HW_CACHE, RAW, Event, EventSet

READS, MISSES, INSTRUCTIONS, CYCLES = "llc_reads", "llc_misses", "instructions", "cycles"

_LL, _MISS = 2, 1 << 16  # PERF_COUNT_HW_CACHE_LL; its reads (operation 0) that miss
_LLC = (Event(READS, HW_CACHE, _LL), Event(MISSES, HW_CACHE, _LL | _MISS))
_FILLS = (Event(READS, RAW, 0x5E43), Event(MISSES, RAW, 0x5C43))
_REFERENCES = (Event(READS, HARDWARE, 2), Event(MISSES, HARDWARE, 3))
_WORK = (Event(INSTRUCTIONS, HARDWARE, 1), Event(CYCLES, HARDWARE, 0))

_ZEN = 0x17


def event_sets(cpu: Mapping[str, str], *, instructions: bool) -> list[EventSet]:
    """What to try to count, the best first. ``cpu``: the fields of /proc/cpuinfo. ``instructions``: these and cycles
    too, if they fit beside the cache's events, and alone if the CPU counts nothing of that cache."""
    vendor = cpu.get("vendor_id", "")
    if vendor in ("AuthenticAMD", "HygonGenuine") and _number(cpu.get("cpu family", "")) >= _ZEN:
        pairs = [("data-cache-fills", _FILLS)]
    elif vendor == "GenuineIntel":
        pairs = [("LLC-loads", _LLC), ("cache-references", _REFERENCES)]
    else:
        pairs = [("LLC-loads", _LLC)]
    sets = []
    for name, pair in pairs:
        if instructions:
            sets.append(EventSet(name, pair + _WORK))
        sets.append(EventSet(name, pair))
    if instructions:
        sets.append(EventSet("instructions", _WORK))
    return sets


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0
