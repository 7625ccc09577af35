"""The sums of one session as plain data: JSON, msgpack, and comparable by ``==``.

All numbers are since the session's beginning, as far as its log was read. None is unknown, never 0: a table of which
nothing came is None, since not every kind of capture records everything.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from gpuflight.events.activity.communication import CommunicationSum
from gpuflight.events.activity.work import WorkSum
from gpuflight.redaction import redact_text


@lru_cache(maxsize=8192)
def without_secrets(text: str) -> str:
    """A name that a program gave, without secrets: sums are recorded and shown."""
    return redact_text(text)


class DeviceFacts(msgspec.Struct):
    """A GPU as the session names it."""

    device_id: int
    uuid: str = ""
    name: str = ""
    vendor: str = ""
    sm_count: int | None = None
    compute_major: int | None = None


class LaunchShape(msgspec.Struct):
    """A launch configuration: blocks of the grid, threads of a block, occupancies (0-1), what limits them, blocks that
    an SM runs at once, local memory per thread. None: not told."""

    grid: int | None = None
    block: int | None = None
    occupancy: float | None = None
    reg_occupancy: float | None = None
    limiter: str = ""
    blocks_per_sm: int | None = None
    local_bytes: int | None = None


class KernelSum(msgspec.Struct):
    """All launches of one kernel. ``name`` None: its dictionary entry never came.

    ``lanes``: (stream, launches, ns) of each stream it ran on. Quantiles are within 0.8 %. ``occupancy``: mean of the
    theoretical one (0-1) over ``details`` launches. ``registers``: per thread. ``shape``: how most of these
    launches were configured.
    """

    kernel_id: int
    name: str | None
    count: int
    total_ns: int
    min_ns: int
    max_ns: int
    p50_ns: int
    p99_ns: int
    lanes: list[tuple[int, int, int]]
    details: int = 0
    occupancy: float | None = None
    registers: int | None = None
    shape: LaunchShape | None = None


class StreamSum(msgspec.Struct):
    """What ran on one stream. ``device_id`` None: no row of it names its GPU."""

    stream_id: int
    device_id: int | None
    launches: int = 0
    kernel_ns: int = 0
    copies: int = 0
    copied_bytes: int = 0


class CopySum(msgspec.Struct):
    """Copies of one kind (``tables.COPY_KINDS``) on one GPU (None: not told)."""

    kind: str
    device_id: int | None
    count: int
    bytes: int
    total_ns: int


class WaitSum(msgspec.Struct):
    """Waits of the host of one kind (``tables.SYNC_TYPES``)."""

    kind: str
    count: int
    total_ns: int
    max_ns: int


class MemorySum(msgspec.Struct):
    """Memory of one place: of a GPU, of a GPU that is not told (``device_id`` None), or pinned memory of the host."""

    device_id: int | None
    pinned: bool
    allocations: int
    frees: int
    unmatched_frees: int
    held_bytes: int
    peak_bytes: int


class ScopeSum(msgspec.Struct):
    """All runs of a scope at one place of the tree; ``path``: names from the outermost, joined by ``|``."""

    path: str
    name: str
    depth: int
    count: int
    open: int
    total_ns: int
    max_ns: int


class Summary(msgspec.Struct, kw_only=True):
    """One session. Times are UNIX ns.

    ``end``: empty while it runs; ``shutdown``, or ``launcher`` where that wrote the end after the program died.
    ``synthetic``: kernel times are those of launches (True), of the GPU (False), or not said (None). ``busy_ns``: some
    kernel ran. ``device_latest_ns``, ``host_latest_ns``: up to when kernels and copies, and waits, are told.
    ``kernels`` and ``scopes`` are the longest; ``kernels_count`` and ``scopes_count`` say how many there are.
    ``job``: which rank of which job the program is, where its recorder tells (``sources.job_environment``).
    ``work``: how what it does comes about. ``uid``: who owns its log. ``partial``: earlier lines of it were read and
    forgotten again.
    """

    session_id: str
    folder: str = ""
    uid: int | None = None
    app: str = ""
    hostname: str = ""
    pid: int | None = None
    kind: str = ""
    engine: str = ""
    run_id: str = ""
    segment_index: int | None = None
    start_ns: int | None = None
    end_ns: int | None = None
    end: str = ""
    last_event_ns: int | None = None
    synthetic: bool | None = None
    partial: bool = False
    devices: list[DeviceFacts] = msgspec.field(default_factory=list)
    launches: int | None = None
    kernel_ns: int = 0
    busy_ns: int | None = None
    device_latest_ns: int = 0
    host_latest_ns: int = 0
    kernels: list[KernelSum] = msgspec.field(default_factory=list)
    kernels_count: int = 0
    unnamed_count: int = 0
    streams: list[StreamSum] = msgspec.field(default_factory=list)
    streams_count: int = 0
    copies: list[CopySum] | None = None
    memsets: int | None = None
    memset_bytes: int = 0
    waits: list[WaitSum] | None = None
    memory: list[MemorySum] | None = None
    scopes: list[ScopeSum] | None = None
    scopes_count: int = 0
    graph_launches: int | None = None
    communication: CommunicationSum | None = None
    job: dict[str, str | int] = msgspec.field(default_factory=dict)
    work: WorkSum | None = None
    events: int = 0
    losses: int = 0
    lag_bytes: int = 0
    read_ns: int = 0
    writer: str = "unknown"
