"""What NVML said in one round, as plain data: it is recorded and replayed as it stands, without NVML.

Names of facts, metrics and counters are those that the GPU entity carries. A reading that NVML refused is absent and
has its reason in ``unknown``; nothing here is ever 0 for want of knowledge.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, field

Number = int | float


class Link(Struct, omit_defaults=True):
    """One NVLink of a GPU. ``active`` is None where NVML did not say; ``version`` is ``4.0``, ``""`` if unknown;
    ``remote_address`` the PCI address of the other end, ``""`` if unknown; ``errors_count`` the sum of replays,
    recoveries and CRC errors since they were last reset."""

    number: int
    active: bool | None
    version: str = ""
    remote: Literal["gpu", "switch", "npu", "unknown"] = "unknown"
    remote_address: str = ""
    errors_count: int | None = None


class GpuProcess(Struct, omit_defaults=True):
    """A process as NVML lists it: the pid may be one of another pid namespace. Utilisation is that since the last
    round; ``util_reason`` says why it is None. ``kinds``: compute, graphics, mps."""

    pid: int
    kinds: list[str]
    memory_used_bytes: int | None = None
    gpu_instance: int | None = None
    compute_instance: int | None = None
    sm_util_pct: float | None = None
    memory_util_pct: float | None = None
    util_reason: str = ""


class Mig(Struct, omit_defaults=True):
    """One MIG device."""

    uuid: str
    gpu_instance: int | None = None
    compute_instance: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Number] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)


class Gpu(Struct, omit_defaults=True, kw_only=True):
    """One GPU. Of a lost one only what was known before it was lost is there, and ``reason``.

    ``counters`` only grow; whoever wants a rate takes the difference of two rounds (``NvmlSnapshot.monotonic_s``).
    ``processes_reason`` says why the list of processes is not known; ``processes_garbled_count`` how many entries of
    it could not be understood.
    """

    uuid: str
    index: int
    state: Literal["ok", "lost"] = "ok"
    reason: str = ""
    address: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Number] = field(default_factory=dict)
    counters: dict[str, Number] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    links: list[Link] = field(default_factory=list)
    migs: list[Mig] = field(default_factory=list)
    processes: list[GpuProcess] = field(default_factory=list)
    processes_reason: str = ""
    processes_garbled_count: int = 0


class Pair(Struct, omit_defaults=True):
    """Two GPUs: the nearest PCIe ancestor they share (PIX, PXB, PHB, NODE, SYS), and peer access by capability
    (``read``, ``write``, ``nvlink``, ``atomics``): ``ok`` or why not."""

    a: str
    b: str
    distance: str = ""
    p2p: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)


class Event(Struct, omit_defaults=True):
    """Something that happened to a GPU since the last round. ``kind``: xid, ecc_double_bit …; ``code`` of an XID is its
    number. ``wall_ns`` is when it was read, for NVML gives no time."""

    uuid: str
    kind: str
    code: int
    wall_ns: int


class NvmlSnapshot(Struct, omit_defaults=True, kw_only=True):
    """One round of NVML. ``stale_reason`` is set when NVML did not answer: everything is then ``age_s`` old.

    ``nameless`` are GPUs that NVML counts but gives no handle to and that were never seen before, as (index, reason).
    """

    wall_ns: int = 0
    monotonic_s: float = 0.0
    driver_version: str = ""
    nvml_version: str = ""
    cuda_version: str = ""
    gpus: list[Gpu] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    events_reason: str = ""
    nameless: list[tuple[int, str]] = field(default_factory=list)
    age_s: float = 0.0
    stale_reason: str = ""
