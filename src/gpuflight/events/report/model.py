"""What a report says, as data. Units are in the names; None is unknown, never 0; ``share`` is 0 to 1."""

from __future__ import annotations

from typing import Any

import msgspec

from gpuflight.events.query.allocations import Held, MemoryLine, MemoryPoint
from gpuflight.events.query.copies import CopyLine, FillLine
from gpuflight.events.query.kernels import Bucket, KernelLine
from gpuflight.events.query.profile import ProfileLine
from gpuflight.events.query.scopes import ScopeNode
from gpuflight.events.query.series import Series
from gpuflight.events.query.waits import WaitLine


class Head(msgspec.Struct, kw_only=True):
    """Which session, and how it ended. ``state``: live, ended, died (the launcher wrote the end), silent (no end, and
    nobody writes). ``span_ns``: from the first to the last thing that is known of it."""

    session_id: str
    source: str
    app: str | None
    hostname: str | None
    pid: int | None
    session_kind: str | None
    profiling_engine: str | None
    run_id: str | None
    segment_index: int | None
    state: str
    first_ns: int | None
    last_ns: int | None
    span_ns: int | None
    records: dict[str, int]


class Device(msgspec.Struct, kw_only=True):
    """A GPU as the session describes it."""

    device_id: int
    name: str | None = None
    uuid: str | None = None
    architecture: str | None = None
    compute_capability: str | None = None
    total_mib: int | None = None
    multi_processor_count: int | None = None
    l2_cache_size_bytes: int | None = None
    shared_mem_per_block_bytes: int | None = None


class Capability(msgspec.Struct, kw_only=True):
    """What was asked for of the capture and what came of it."""

    feature: str
    requested: bool | None
    status: str | None
    mode: str | None
    reason_code: str | None
    message: str | None


class KernelSummary(msgspec.Struct, kw_only=True):
    """All kernels. Durations are exact quantiles (nearest rank) of those that are known (``timed_count``).

    ``busy_ns``: time in which at least one kernel ran, overlaps counted once; ``busy_share`` of the session's span.
    None for synthetic kernels, whose durations are gaps between launches.
    """

    count: int
    timed_count: int
    unique_count: int
    synthetic: bool
    total_ns: int
    busy_ns: int | None = None
    busy_share: float | None = None
    mean_ns: float | None = None
    min_ns: int | None = None
    median_ns: int | None = None
    p90_ns: int | None = None
    p99_ns: int | None = None
    max_ns: int | None = None


class KernelDetail(msgspec.Struct, kw_only=True):
    """How a kernel was launched, in its most frequent configuration; ``details_count`` launches told theirs,
    ``shapes_count`` different ones. ``shape``: names and units of the table kernel_shape. ``waves_per_sm``: blocks of
    the grid over the blocks that all multiprocessors hold at once, grid / (max_active_blocks x multiprocessors)."""

    kernel_id: int
    name: str | None
    details_count: int
    shapes_count: int
    shape_count: int
    shape: dict[str, Any]
    num_regs: int | None
    dyn_shared_bytes: int | None
    waves_per_sm: float | None


class Metric(msgspec.Struct, kw_only=True):
    """A value over the session; ``device_id`` None: of the host. ``scope``: where it was sampled, if that is told."""

    metric: str
    device_id: int | None
    samples_count: int
    mean: float
    min: float
    max: float
    last: float | None = None
    scope: str | None = None


class Energy(msgspec.Struct, kw_only=True):
    """Energy of a device from its first to its last reading. ``how``: counter (the device's own), or trapezoid (power
    between readings taken as changing evenly)."""

    device_id: int
    joules: float
    seconds: float
    how: str


class CounterLine(msgspec.Struct, kw_only=True):
    """Counters of a scope (range profiler) or kernel (replay): the mean of each that was available, bytes as sums."""

    of: str
    kind: str
    count: int
    values: dict[str, float]


class Hint(msgspec.Struct, kw_only=True):
    """A rule that fired. ``threshold`` and ``source``: why this number."""

    rule: str
    severity: str
    about: str
    text: str
    value: float
    threshold: float
    source: str


class Unseen(msgspec.Struct, kw_only=True):
    """What this report cannot say, and why."""

    what: str
    reason: str


class Loss(msgspec.Struct, kw_only=True):
    """Lines, rows, names, files or windows that did not simply become records. ``effect``: lost, kept, repeat."""

    reason: str
    about: str
    effect: str
    text: str
    count: int
    size_bytes: int
    place: str


class Report(msgspec.Struct, kw_only=True):
    """Everything, in the order in which it is shown. Lists are cut to what was asked for; ``…_count`` say how many."""

    head: Head
    devices: list[Device]
    capabilities: list[Capability]
    kernels: KernelSummary
    top_kernels: list[KernelLine]
    top_kernels_count: int
    kernel_details: list[KernelDetail]
    durations: list[Bucket]
    copies: list[CopyLine]
    fills: list[FillLine]
    waits: list[WaitLine]
    memory: list[MemoryLine]
    held: list[Held]
    memory_series: list[MemoryPoint]
    metrics: list[Metric]
    energy: list[Energy]
    series: list[Series]
    scopes: list[ScopeNode]
    scopes_count: int
    counters: list[CounterLine]
    pm_sampling: list[Metric]
    stalls: list[ProfileLine]
    sass: list[ProfileLine]
    hints: list[Hint]
    losses: list[Loss]
    unseen: list[Unseen]
