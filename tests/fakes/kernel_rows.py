"""Rows as the programs in the kernel write them, and how a tape holds them."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterable

import msgspec

from gpuflight.collectors.kernel_histograms import SLOTS
from gpuflight.sources.bpf.base import ProgramCost
from gpuflight.sources.bpf.taped import Drained, Opened
from gpuflight.sources.clock import ManualClock

TICK_NS = 10_000_000
CLIENT, SERVER_ROLE = 1, 2
TCP, UDP = 6, 17

Rows = list[tuple[bytes, bytes]]


def start_ns(ticks: int) -> int:
    """What the kernel keeps of a process that /proc says was started ``ticks`` after boot."""
    return ticks * TICK_NS + 7_654_321


def cookie(number: int) -> bytes:
    return struct.pack("=Q", number)


def traffic(number: int, tid: int, pid: int, start: int, sent: tuple[int, int] = (0, 0),
            received: tuple[int, int] = (0, 0), failures: int = 0,
            thread_start: int | None = None) -> tuple[bytes, bytes]:  # fmt: skip
    """One row of ``traffic``: socket ``number``; (bytes, calls) each way."""
    own = start if thread_start is None else thread_start
    return (
        struct.pack("=QQ", number, pid << 32 | tid),
        struct.pack("=7Q2I", *sent, *received, failures, start_ns(start), start_ns(own), pid, tid),
    )


def internet(number: int, local: tuple[str, int], remote: tuple[str, int] | None, *, protocol: int = TCP, role: int = 0,
             opened_ms: float = 1000, established_ms: float = 0, accepted_ms: float = 0, ended_ms: float = 0,
             sent: int = 0, received: int = 0, retransmits: int = 0, segments: tuple[int, int] = (0, 0),
             rtt_us: int = 0, pid: int = 0, start: int = 0,
             netns: int = 4026531840) -> tuple[bytes, bytes]:  # fmt: skip
    """One row of ``sockets``."""
    family = socket.AF_INET6 if ":" in local[0] else socket.AF_INET
    times = [int(value * 1e6) for value in (opened_ms, established_ms, accepted_ms, ended_ms)]
    return cookie(number), struct.pack(
        "=9Q6I16s16s3H2B", *times, sent, received, 0, 0, start_ns(start) if pid else 0, pid, netns, retransmits,
        *segments, rtt_us, socket.inet_pton(family, local[0]), socket.inet_pton(family, remote[0]) if remote else b"",
        local[1], remote[1] if remote else 0, family, protocol, role,
    )  # fmt: skip


def unix(number: int, inode: int, peer_inode: int, netns: int = 4026531840) -> tuple[bytes, bytes]:
    """One row of ``sockets`` of a unix socket."""
    return cookie(number), struct.pack(
        "=9Q6I16s16s3H2B", 10**9, 0, 0, 0, 0, 0, inode, peer_inode, 0, 0, netns, 0, 0, 0, 0, b"", b"", 0, 0, 1, 0, 0
    )


def histogram(us: Iterable[int]) -> bytes:
    """struct gf_histogram of these values."""
    values = list(us)
    slots = [0] * SLOTS
    for value in values:
        slots[min(value.bit_length(), SLOTS - 1)] += 1
    return struct.pack(f"={3 + SLOTS}Q", len(values), sum(values), max(values, default=0), *slots)


def wait(pid: int, kind: int, start: int, us: Iterable[int]) -> tuple[bytes, bytes]:
    """One row of ``waits`` of net.bpf.c."""
    return struct.pack("=II", pid, kind), struct.pack("=Q", start_ns(start)) + histogram(us)


def thread(pid: int, tid: int, start: int, values: tuple[int, int, int, int, int, int], thread_start: int = 0) -> bytes:
    """One record of the iterator: ns on a CPU, ns waiting, switches voluntary and not, faults minor and major."""
    return struct.pack("=8Q2I", start_ns(start), start_ns(thread_start or start), *values, pid, tid)


def sched_waits(pid: int, start: int, queue_us: Iterable[int], sleep_us: Iterable[int]) -> tuple[bytes, bytes]:
    """One row of ``waits`` of sched.bpf.c."""
    return struct.pack("=I", pid), struct.pack("=Q", start_ns(start)) + histogram(queue_us) + histogram(sleep_us)


def executed(pid: int, start: int, argv: list[bytes], parent: tuple[int, int] = (0, 0), length: int | None = None,
             uid: int = 0, comm: bytes = b"tool") -> bytes:  # fmt: skip
    """One record of a program that was started. ``length``: of all its arguments, if it is cut."""
    arguments = b"".join(word + b"\0" for word in argv)
    length = len(arguments) if length is None else length
    begun = start_ns(start)
    head = struct.pack("=4I3Q16s2I", 1, pid, parent[0], uid, begun, start_ns(parent[1]), begun, comm, length, 0)
    return head + arguments


def ended(pid: int, start: int, status: int, parent: tuple[int, int] = (0, 0), lifetime_ms: float = 5.0,
          used: tuple[int, int, int, int, int] = (1_000_000, 10, 1, 0, 0), uid: int = 0,
          comm: bytes = b"tool") -> bytes:  # fmt: skip
    """One record of a process that ended: ``status`` as wait(2) tells it."""
    begun = start_ns(start)
    head = struct.pack("=4I3Q16s2I", 2, pid, parent[0], uid, begun, start_ns(parent[1]), begun + int(lifetime_ms * 1e6),
                       comm, status, 0)  # fmt: skip
    return head + struct.pack("=5Q", *used)


def block(pid: int, start: int, operation: int, disk: bytes, size: int, us: Iterable[int]) -> tuple[bytes, bytes]:
    """One row of ``io``."""
    return struct.pack("=2I32s", pid, operation, disk), struct.pack("=2Q", start_ns(start), size) + histogram(us)


def ipc(kind: int, number: int, scope: int, pid: int, start: int, read: tuple[int, int],
        written: tuple[int, int]) -> tuple[bytes, bytes]:  # fmt: skip
    """One row of ``ipc``: (bytes, calls) each way."""
    return struct.pack("=Q4I", number, scope, kind, pid, 0), struct.pack(
        "=5Q2I", start_ns(start), *read, *written, pid, 0
    )


def packed(value: object) -> bytes:
    """As the tape keeps answers."""
    return msgspec.msgpack.encode(value)


Answers = dict[tuple[str, str], "bytes | Callable[[], bytes]"]


def probe_answers(
    name: str, programs: Iterable[str], maps: dict[str, Rows], losses: dict[int, int] | None = None
) -> Answers:
    """What the tape holds of one object."""
    found: Answers = {("bpf", f"open {name}"): packed(Opened("libbpf", ""))}
    found |= {("bpf", f"{name} attach {program}"): packed(True) for program in programs}
    found |= {("bpf", f"{name} read {which}"): packed(rows) for which, rows in maps.items()}
    found["bpf", f"{name} losses"] = packed(losses or {})
    found["bpf", f"{name} costs"] = packed([ProgramCost(program, 10, 5000, 0) for program in programs])
    return found


def drained(clock: ManualClock, first_round_s: float, records: list[bytes]) -> Callable[[], bytes]:
    """A ring buffer that holds these records in every round; rounds are 1 s apart."""
    return lambda: msgspec.msgpack.encode(Drained(round(clock.monotonic_s() - first_round_s), records))
