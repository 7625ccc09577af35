"""What one reading of the CUDA probe holds: plain rows, one struct per map of the kernel side.

All counters are cumulative since the probe was loaded: who wants rates keeps the last reading. Points in time are
CLOCK_MONOTONIC in ns (``time.monotonic_ns()``), durations ns too. ``pid`` is the process (thread group) as the initial
pid namespace numbers it. ``device`` is the ordinal that the program used: which GPU that is depends on its
CUDA_VISIBLE_DEVICES. Rows of a process stay until the reading that holds its exit or its exec; that reading is the last
with them. Rows of a destroyed stream, and of launches on it, are told once more and go: a handle that is used again
begins at 0.
"""

from __future__ import annotations

from msgspec import Struct, field

LEGACY_STREAM = 1
"""``stream`` of the legacy default stream: cudaStreamLegacy, or 0 in programs built without per-thread streams."""


def per_thread_stream(stream: int) -> int | None:
    """The thread whose per-thread default stream this is; None for any other stream."""
    return stream >> 32 if stream & 7 == 2 else None


class ProcessRow(Struct, frozen=True, gc=False):
    """A process that called a hooked function (or set one of the variables), and what holds for all of its threads."""

    pid: int
    first_ns: int  # first call seen; a process that started long before was attached late
    parent_pid: int  # process that it was forked from while it was watched; 0 if that was not seen
    runtime_calls: bool  # its libcudart was seen at work
    driver_calls: bool  # its libcuda was seen at work, by calls that no runtime call made
    set_device_calls: int  # 0: every device of its rows is assumed to be 0, CUDA's default
    launches: int  # launches of kernels and graphs, of all functions
    launches_lost: int  # of these, not in any LaunchRow, since its table was full
    launches_inner: int  # driver launches that were part of a counted runtime launch: counted once, as the outer
    event_records: int
    streams_created: int
    streams_destroyed: int
    events_created: int
    events_destroyed: int


class DeviceRow(Struct, frozen=True, gc=False):
    """A process on one device: the union of the spans of its streams.

    A span lasts from the first launch on an idle stream to the return of a call that waited for all of the stream's
    work, or found it done: an upper bound of the time in which kernels ran, as no event tells when one ended.
    """

    pid: int
    device: int
    device_assumed: bool  # the thread's cudaSetDevice was not seen: CUDA's default of 0 was taken
    busy_ns: int  # up to the time of this reading, a span still open included; union over streams
    open_since_ns: int  # begin of the span still open; 0: none
    spans: int  # closed ones
    last_launch_ns: int  # as LaunchRow.last_ns
    reset_ns: int  # last cudaDeviceReset, which frees all memory; 0: none


class StreamRow(Struct, frozen=True, gc=False):
    """One stream of a process: its spans (see DeviceRow), what is known of its making."""

    pid: int
    device: int
    stream: int  # handle, LEGACY_STREAM, or of a thread (per_thread_stream)
    busy_ns: int  # a span still open included
    open_since_ns: int
    spans: int
    created_ns: int  # 0: before the probe was attached, or a default stream
    blocking: bool | None  # waits for the legacy default stream; None: its making was not seen (taken as blocking)
    destroyed: bool


class LaunchRow(Struct, frozen=True, gc=False):
    """Launches of one function (or graph) on one stream: one row for (pid, device, stream, function, kind)."""

    pid: int
    device: int
    device_assumed: bool  # of one launch at least
    stream: int
    function: int  # address of the host stub, handle (cudaKernel_t, CUfunction), or cudaGraphExec_t
    kind: str  # "runtime" (host stub or cudaKernel_t), "driver" (CUfunction), "graph" (cudaGraphExec_t)
    launches: int
    threads: int  # sum over launches of grid × block
    blocks: int  # sum over launches of grid
    threads_max: int  # of one launch
    block_threads_max: int  # of one block
    shared_bytes_max: int  # dynamic shared memory of one block
    grid: tuple[int, int, int]  # of the last launch
    block: tuple[int, int, int]
    first_ns: int
    last_ns: int  # to the tick of the kernel's clock (1 to 10 ms)
    captured: int = 0  # of the launches, those that went into a graph being captured instead of to the GPU


class CallRow(Struct, frozen=True, gc=False):
    """Calls of one function: how long they kept the host; where it ``waits``, that is the time waited for the GPU."""

    pid: int
    api: str  # name without _ptsz/_ptds, as in the headers: "cudaStreamSynchronize"
    waits: bool  # a call whose purpose is to wait (synchronise), or a blocking copy
    calls: int
    total_ns: int
    max_ns: int
    buckets: tuple[
        int, ...
    ]  # bucket i counts durations in [2^i, 2^(i+1)) ns; 0 holds 0 and 1 ns, the last all longer ones


class ErrorRow(Struct, frozen=True, gc=False):
    """Calls that returned an error. cudaErrorNotReady (600) is an answer, not an error."""

    pid: int
    api: str
    code: int  # cudaError_t, CUresult or ncclResult_t, by the name of api
    errors: int
    last_ns: int


class MemoryRow(Struct, frozen=True, gc=False):
    """Memory that a process holds on one device, by kind. Only calls that returned success count."""

    pid: int
    device: int
    kind: str  # "device", "async", "managed", "host" (pinned by allocation), "registered" (pinned by cudaHostRegister)
    current_bytes: int  # of allocations seen: what was allocated before the probe was attached is not in it
    peak_bytes: int
    allocated_bytes: int  # ever
    allocations: int
    frees: int
    unknown_frees: int  # of addresses whose allocation was not seen; in the row of kind "device" or "host"


class AllocationRow(Struct, frozen=True, gc=False):
    """Memory not yet given back: of an exited process, a leak."""

    pid: int
    address: int
    size_bytes: int
    device: int
    kind: str
    api: str
    tid: int
    time_ns: int
    stack_id: int  # key of CudaRows.stacks; negative: none, an errno
    caller: int  # return address of the call


class CopyRow(Struct, frozen=True, gc=False):
    """Copies and fills of one direction that were accepted."""

    pid: int
    device: int
    direction: str  # "HtoH", "HtoD", "DtoH", "DtoD", "default" (left to the driver), "PtoP", "memset"
    asynchronous: bool
    copies: int
    bytes: int
    bytes_max: int
    last_ns: int


class ThreadRow(Struct, frozen=True, gc=False):
    """The device that a thread chose last."""

    pid: int
    tid: int
    device: int


class NcclRow(Struct, frozen=True, gc=False):
    """Calls of one NCCL operation on one communicator."""

    pid: int
    operation: str  # "ncclAllReduce", …
    communicator: int  # ncclComm_t
    datatype: str  # "float16", …; "unknown(N)" for one newer than our table: its bytes are not counted
    reduction: str  # "sum", "prod", "max", "min", "avg", "user(N)"; "" where there is none
    calls: int
    bytes: int  # count × size of datatype, as given to the call: of this rank
    bytes_unknown_calls: int  # calls whose datatype has no known size
    host_ns: int  # sum of the time in the call: NCCL is asynchronous, so not the time of the transfer
    host_ns_max: int
    errors: int
    last_ns: int
    small_calls: int = 0  # of less than 1 MB; none of an unknown datatype


class CommunicatorRow(Struct, frozen=True, gc=False):
    """A communicator whose making was seen."""

    pid: int
    communicator: int
    ranks: int
    rank: int  # -1: not told by the call (ncclCommSplit)
    device: int
    created_ns: int
    destroyed: bool


class NameRow(Struct, frozen=True, gc=False):
    """The name of a function, told once: when it is launched first, or found by name in a module."""

    pid: int
    function: int  # as LaunchRow.function
    name: str  # mangled
    truncated: bool  # longer than the probe reads (511 bytes)


class AliasRow(Struct, frozen=True, gc=False):
    """A handle made of another function whose name the kernel side does not know (``__cudaGetKernel``)."""

    pid: int
    function: int
    of: int


class EnvironmentRow(Struct, frozen=True, gc=False):
    """setenv/putenv/unsetenv of CUDA_VISIBLE_DEVICES or CUDA_DEVICE_ORDER while the program ran."""

    pid: int
    time_ns: int
    variable: str
    value: str | None  # None: removed
    overwrite: bool  # setenv's third argument: False changes nothing where the variable is set


class LifeRow(Struct, frozen=True, gc=False):
    """Fork, exec or exit of a process that has a ProcessRow (of the parent, for a fork)."""

    event: str  # "fork", "exec", "exit"
    pid: int
    child_pid: int  # of a fork; else 0
    time_ns: int
    exit_code: int  # as wait(2) gives it; 0 but for an exit


class CudaRows(Struct):
    """One reading. ``losses`` names every bound that was hit: see ``LOSSES`` for what each means."""

    time_ns: int
    processes: list[ProcessRow] = field(default_factory=list)
    devices: list[DeviceRow] = field(default_factory=list)
    streams: list[StreamRow] = field(default_factory=list)
    launches: list[LaunchRow] = field(default_factory=list)
    calls: list[CallRow] = field(default_factory=list)
    errors: list[ErrorRow] = field(default_factory=list)
    memory: list[MemoryRow] = field(default_factory=list)
    allocations: list[AllocationRow] = field(default_factory=list)
    copies: list[CopyRow] = field(default_factory=list)
    threads: list[ThreadRow] = field(default_factory=list)
    nccl: list[NcclRow] = field(default_factory=list)
    communicators: list[CommunicatorRow] = field(default_factory=list)
    names: list[NameRow] = field(default_factory=list)  # new since the last reading
    aliases: list[AliasRow] = field(default_factory=list)  # new since the last reading
    environment: list[EnvironmentRow] = field(default_factory=list)  # new since the last reading, in order
    life: list[LifeRow] = field(default_factory=list)  # new since the last reading, in order
    stacks: dict[int, tuple[int, ...]] = field(default_factory=dict)  # user addresses, innermost first
    # By Attachment.number: calls, and those launches that opened a span or might have. 0: the library was never called.
    hits: dict[int, int] = field(default_factory=dict)
    losses: dict[str, int] = field(default_factory=dict)  # cumulative, only those that are not 0
