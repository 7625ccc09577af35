"""From keys and values of the maps to rows. Nothing here asks the kernel."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Generic, TypeVar

from msgspec import Struct

from gpuflight.sources.cuda_probe import layouts, nccl
from gpuflight.sources.cuda_probe.functions import API_NAMES, WAITING_APIS
from gpuflight.sources.cuda_probe.rows import (
    AliasRow,
    AllocationRow,
    CallRow,
    CommunicatorRow,
    CopyRow,
    DeviceRow,
    EnvironmentRow,
    ErrorRow,
    LaunchRow,
    LifeRow,
    MemoryRow,
    NameRow,
    NcclRow,
    ProcessRow,
    StreamRow,
    ThreadRow,
)

Pairs = Iterable[tuple[bytes, bytes]]
R = TypeVar("R")

LAUNCH_KINDS = ("runtime", "driver", "graph")
MEMORY_KINDS = ("device", "async", "managed", "host", "registered")
DIRECTIONS = ("HtoH", "HtoD", "DtoH", "DtoD", "default", "PtoP", "memset")
_LIFE_EVENTS = {layouts.FORK: "fork", layouts.EXEC: "exec", layouts.EXIT: "exit"}


class Kept(Generic[R]):
    """Rows by key, decoded again only when their value changed: most processes are idle in most rounds."""

    def __init__(self, decode: Callable[[bytes, bytes], R]) -> None:
        self._decode = decode
        self._rows: dict[bytes, tuple[bytes, R]] = {}

    def rows(self, pairs: Pairs) -> list[R]:
        """One row for each pair, in their order; what is not among them is forgotten."""
        get, decode = self._rows.get, self._decode
        after: dict[bytes, tuple[bytes, R]] = {}
        for key, value in pairs:
            known = get(key)
            after[key] = known if known is not None and known[0] == value else (value, decode(key, value))
        self._rows = after
        return [row for _, row in after.values()]


def api_name(number: int) -> str:
    """The name of a function by its number; ``api(N)`` for one that this version does not know."""
    return API_NAMES.get(number, f"api({number})")


def _at(names: tuple[str, ...], number: int) -> str:
    return names[number] if number < len(names) else f"unknown({number})"


def processes(pairs: Pairs, launches: dict[int, int]) -> list[ProcessRow]:
    """``launches``: those that are in launch rows, by process."""
    rows = []
    for key, value in pairs:
        (pid,) = layouts.PID.unpack(key)
        first, _, lost, inner, chosen, records, made, ended, events_made, events_ended, parent, _, flags, *_ = (
            layouts.PROCESS.unpack(value)
        )
        rows.append(
            ProcessRow(
                pid=pid,
                first_ns=first,
                parent_pid=parent,
                runtime_calls=bool(flags & layouts.RUNTIME),
                driver_calls=bool(flags & layouts.DRIVER),
                set_device_calls=chosen,
                launches=launches.get(pid, 0) + lost,
                launches_lost=lost,
                launches_inner=inner,
                event_records=records,
                streams_created=made,
                streams_destroyed=ended,
                events_created=events_made,
                events_destroyed=events_ended,
            )
        )
    return rows


def flags(pairs: Pairs) -> dict[int, int]:
    """The flags of processes (``layouts.MANY_DEVICES`` …)."""
    return {layouts.PID.unpack(key)[0]: layouts.PROCESS.unpack(value)[12] for key, value in pairs}


def inherited_names(pairs: Pairs) -> dict[int, int]:
    """Process → the one whose registered functions it has since it was forked."""
    return {layouts.PID.unpack(key)[0]: of for key, value in pairs if (of := layouts.PROCESS.unpack(value)[11])}


class Launches(Struct):
    """Rows of launches, and what other rows take from them: launches by process; the last one by (process, device);
    (process, device) of launches that took CUDA's default device."""

    rows: list[LaunchRow]
    counts: dict[int, int]
    last_ns: dict[tuple[int, int], int]
    assumed: set[tuple[int, int]]


def launches(keys: bytes, values: bytes, tick_ns: int) -> Launches:
    """Entries of the table of launches. ``tick_ns``: length of a jiffy.

    There may be thousands a round: this is the loop of the reader, written for speed.
    """
    rows: list[LaunchRow] = []
    counts: dict[int, int] = {}
    last_of: dict[tuple[int, int], int] = {}
    defaults: set[tuple[int, int]] = set()
    kinds, add = LAUNCH_KINDS, rows.append
    for key, value in zip(layouts.LAUNCH_KEY.iter_unpack(keys), layouts.LAUNCH_READ.iter_unpack(values), strict=True):
        pid, device, kind, function, stream = key
        count, threads, blocks, captured, most, first, last, looked, now, block, shared, x, y, z, u, v, w, assumed = (
            value
        )
        if now > looked:
            last += (now - looked) * tick_ns
        add(
            LaunchRow(
                pid,
                device,
                assumed != 0,
                stream,
                function,
                kinds[kind] if kind < 3 else f"unknown({kind})",
                count,
                threads,
                blocks,
                most,
                block,
                shared,
                (x, y, z),
                (u, v, w),
                first,
                last,
                captured,
            )
        )
        counts[pid] = counts.get(pid, 0) + count
        at = pid, device
        if last > last_of.get(at, 0):
            last_of[at] = last
        if assumed:
            defaults.add(at)
    return Launches(rows, counts, last_of, defaults)


def split(keys: bytes, values: bytes, key_size: int, value_size: int) -> list[tuple[bytes, bytes]]:
    """Pairs of what was read packed."""
    return [
        (keys[at * key_size : (at + 1) * key_size], values[at * value_size : (at + 1) * value_size])
        for at in range(len(keys) // key_size)
    ]


def devices(
    pairs: Pairs, assumed: Collection[tuple[int, int]], last: dict[tuple[int, int], int], now_of: Callable[[int], int]
) -> list[DeviceRow]:
    """``assumed``: (pid, device) of launches that took the default; ``now_of``: the time a process' open spans end."""
    rows = []
    for key, value in pairs:
        pid, device = at = layouts.DEVICE_KEY.unpack(key)
        busy, since, spans, reset = layouts.DEVICE.unpack_from(value)
        busy += max(0, now_of(pid) - since) if since else 0
        rows.append(DeviceRow(pid, device, at in assumed, busy, since, spans, last.get(at, 0), reset))
    return rows


def streams(pairs: Pairs, now_of: Callable[[int], int]) -> list[StreamRow]:
    """``now_of``: as for devices."""
    rows = []
    for key, value in pairs:
        pid, _, stream = layouts.STREAM_KEY.unpack(key)
        busy, since, spans, _, created, flags, _, device, _ = layouts.STREAM.unpack(value)
        busy += max(0, now_of(pid) - since) if since else 0
        seen = flags & layouts.MAKING_SEEN or stream == 1 or stream & 7 == 2
        blocking = not flags & layouts.NONBLOCKING if seen else None
        destroyed = bool(flags & layouts.DESTROYED)
        rows.append(StreamRow(pid, device, stream, busy, since, spans, created, blocking, destroyed))
    return rows


def call(key: bytes, value: bytes) -> CallRow:
    """One row of durations."""
    pid, api = layouts.API_KEY.unpack(key)
    count, total, longest, *buckets = layouts.DURATION.unpack(value)
    return CallRow(pid, api_name(api), api in WAITING_APIS, count, total, longest, tuple(buckets))


def error(key: bytes, value: bytes) -> ErrorRow:
    """One row of errors."""
    pid, api, code = layouts.ERROR_KEY.unpack(key)
    return ErrorRow(pid, api_name(api), code, *layouts.ERROR.unpack(value))


def memory(key: bytes, value: bytes) -> MemoryRow:
    """One row of memory. What was freed twice as seen from here (a reused address) never makes it negative."""
    pid, device, kind = layouts.MEMORY_KEY.unpack(key)
    current, *rest = layouts.MEMORY.unpack(value)
    return MemoryRow(pid, device, _at(MEMORY_KINDS, kind), max(0, current), *rest)


def allocations(pairs: Pairs, resets: dict[tuple[int, int], int], pids: Collection[int] | None) -> list[AllocationRow]:
    """``resets``: (pid, device) → time of the last reset: memory from before is gone. ``pids``: only these."""
    rows = []
    for key, value in pairs:
        pid, address = layouts.HANDLE_KEY.unpack(key)
        if pids is not None and pid not in pids:
            continue
        size, time_ns, caller, stack, tid, device, kind, api = layouts.ALLOCATION.unpack(value)
        if time_ns < resets.get((pid, device), 0):
            continue
        rows.append(
            AllocationRow(
                pid, address, size, device, _at(MEMORY_KINDS, kind), api_name(api), tid, time_ns, stack, caller
            )
        )
    return rows


def copy(key: bytes, value: bytes) -> CopyRow:
    """One row of copies."""
    pid, device, direction, asynchronous = layouts.COPY_KEY.unpack(key)
    return CopyRow(pid, device, _at(DIRECTIONS, direction), asynchronous != 0, *layouts.COPY.unpack(value))


def threads(pairs: Pairs) -> list[ThreadRow]:
    """Only threads whose choice was seen."""
    rows = []
    for key, value in pairs:
        device, seen = layouts.THREAD_DEVICE.unpack_from(value, layouts.THREAD_DEVICE_AT)
        if seen:
            (both,) = layouts.THREAD_ID.unpack(key)
            rows.append(ThreadRow(both >> 32, both & 0xFFFFFFFF, device))
    return rows


def collective(key: bytes, value: bytes) -> NcclRow:
    """One row of NCCL calls."""
    pid, api, datatype, reduction, communicator = layouts.COLLECTIVE_KEY.unpack(key)
    calls, elements, host_ns, longest, errors, last, small = layouts.COLLECTIVE.unpack(value)
    size = nccl.DATATYPE_BYTES.get(datatype)
    return NcclRow(
        pid=pid,
        operation=api_name(api),
        communicator=communicator,
        datatype=nccl.datatype_name(datatype),
        reduction="" if reduction == layouts.NO_REDUCTION else nccl.reduction_name(reduction),
        calls=calls,
        bytes=elements * (size or 0),
        bytes_unknown_calls=0 if size else calls,
        host_ns=host_ns,
        host_ns_max=longest,
        errors=errors,
        last_ns=last,
        small_calls=small,
    )


def communicator(key: bytes, value: bytes) -> CommunicatorRow:
    """One row of communicators."""
    pid, handle = layouts.HANDLE_KEY.unpack(key)
    created, ranks, rank, device, destroyed = layouts.COMMUNICATOR.unpack(value)
    return CommunicatorRow(pid, handle, ranks, rank, device, created, destroyed != 0)


def names(pairs: Pairs) -> list[NameRow]:
    """Names that are complete: one that is being written has no length yet."""
    rows = []
    for key, value in pairs:
        (length,) = layouts.NAME_LENGTH.unpack_from(value)
        if length:
            pid, function = layouts.HANDLE_KEY.unpack(key)
            text = value[8 : 8 + max(0, length - 1)].decode("utf-8", "replace")
            rows.append(NameRow(pid, function, text, length >= layouts.NAME_BYTES))
    return rows


def events(records: Iterable[bytes]) -> tuple[list[LifeRow], list[EnvironmentRow], list[AliasRow]]:
    """The records of the ring buffer."""
    life: list[LifeRow] = []
    environment: list[EnvironmentRow] = []
    aliases: list[AliasRow] = []
    for record in records:
        if len(record) < layouts.LIFE.size:
            continue
        time_ns, kind, pid, a, b = layouts.LIFE.unpack_from(record)
        if kind == layouts.ALIAS:
            aliases.append(AliasRow(pid, a, b))
        elif kind in (layouts.SETENV, layouts.UNSETENV):
            value = record[layouts.LIFE.size :].partition(b"\0")[0].decode("utf-8", "replace")
            variable = layouts.VARIABLES.get(a, f"variable({a})")
            environment.append(
                EnvironmentRow(pid, time_ns, variable, None if kind == layouts.UNSETENV else value, b != 0)
            )
        elif kind in _LIFE_EVENTS:
            child, code = (a, 0) if kind == layouts.FORK else (0, a)
            life.append(LifeRow(_LIFE_EVENTS[kind], pid, child, time_ns, code))
    return life, environment, aliases
