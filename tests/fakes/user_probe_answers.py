"""A user's probe on the machine of ``machine.py``: what lies in the folder, and rows about one thing of every kind."""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgspec
from tests.fakes.kernel_rows import Answers, Rows, packed, probe_answers

from gpuflight.sources.bpf.loaded import Shape
from gpuflight.sources.bpf.user_probe_folder import Found
from gpuflight.sources.clock import ManualClock

TOML = """\
description = "switches of everything"

[[attach]]
program = "on_switch"
raw_tracepoint = "sched_switch"

[[maps]]
name = "switches"
entity = "Process"
key = ["u32 pid", "u32 operation"]
value = ["u64 calls", "u64 time_ns", "u64 slots[4]"]
where = { operation = 1 }
[maps.metrics]
switches_per_s = { rate = "calls" }
switch_mean_us = { mean = ["time_ns", "calls"], scale = 0.001 }
switch_p50_ns = { quantile = 0.5, of = "slots" }

[[maps]]
name = "threads"
entity = "Thread"
key = ["u32 pid", "u32 tid"]
value = ["u64 calls"]
metrics = { thread_switches_per_s = { rate = "calls" } }

[[maps]]
name = "disks"
entity = "Disk"
key = ["u32 dev"]
value = ["u32 depth"]
metrics = { depth_count = { value = "depth" } }

[[maps]]
name = "nics"
entity = "Nic"
key = ["u32 ifindex"]
value = ["u64 calls"]
metrics = { nic_switches_per_s = { rate = "calls" } }

[[maps]]
name = "nodes"
entity = "Numa"
key = ["u32 node"]
value = ["u64 calls"]
metrics = { node_switches_per_s = { rate = "calls" } }

[[maps]]
name = "host"
entity = "Host"
key = ["u32 slot"]
value = ["u64 calls"]
metrics = { host_switches_per_s = { rate = "calls" } }

[losses]
0 = "switches that found no room"
"""

HASH, ARRAY, PERCPU_HASH = 1, 2, 5
SHAPES = {
    "switches": Shape(8, 48, 1024, HASH),
    "threads": Shape(8, 8, 1024, PERCPU_HASH),
    "disks": Shape(4, 4, 1024, HASH),
    "nics": Shape(4, 8, 1024, HASH),
    "nodes": Shape(4, 8, 64, ARRAY),
    "host": Shape(4, 8, 1, ARRAY),
    "gf_losses": Shape(4, 8, 32, 6),
}


def switches(pid: int, calls: int, operation: int = 1) -> tuple[bytes, bytes]:
    """A row of ``switches``: each call took 2 µs and counts in slot 1."""
    return struct.pack("=2I", pid, operation), struct.pack("=6Q", calls, calls * 2000, 0, calls, 0, 0)


def one(number: int, value: int, code: str = "Q") -> tuple[bytes, bytes]:
    """A row of the maps with one number as key."""
    return struct.pack("=I", number), struct.pack(f"={code}", value)


def thread(pid: int, tid: int, *calls: int) -> tuple[bytes, bytes]:
    """A row of ``threads``, with the calls on each CPU."""
    return struct.pack("=2I", pid, tid), struct.pack(f"={len(calls)}Q", *calls)


def found(toml: str = TOML, name: str = "switches") -> Found:
    """The probe as it lies in the folder."""
    return Found(name, f"{name}.toml", toml, f"{name}.c", "1")


def user_probe_answers(
    clock: ManualClock, *, trainer: int, disk: int, nic: int, losses: dict[int, int] | None = None
) -> Answers:
    """What the tape holds of it; what is counted grows by 10 a second."""

    def growing(rows: Callable[[int], Rows]) -> Callable[[], bytes]:
        return lambda: msgspec.msgpack.encode(rows(round(clock.monotonic_s() * 10)))

    name = "user/switches"
    maps: dict[str, Callable[[int], Rows]] = {
        "switches": lambda calls: [switches(trainer, calls), switches(trainer, 7, 2)],
        "threads": lambda calls: [thread(trainer, trainer, calls, calls)],
        "disks": lambda calls: [one(disk, 5, "I")],
        "nics": lambda calls: [one(nic, calls)],
        "nodes": lambda calls: [one(0, calls), one(1, 0)],
        "host": lambda calls: [one(0, calls)],
    }
    answers = probe_answers(name, ["on_switch"], {}, losses)
    answers |= {("bpf", f"{name} read {which}"): growing(rows) for which, rows in maps.items()}
    answers["user_probes", "folder"] = packed([found()])
    answers["user_probes", "maps switches"] = packed(SHAPES)
    return answers
