"""Rows of the CUDA probe with everything that a test does not care about, and a probe that tells them."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.bpf.base import ProgramCost
from gpuflight.sources.cuda_probe.rows import (
    AllocationRow,
    CallRow,
    CopyRow,
    CudaRows,
    DeviceRow,
    EnvironmentRow,
    ErrorRow,
    LaunchRow,
    LifeRow,
    MemoryRow,
    NameRow,
    ProcessRow,
    StreamRow,
)

SECOND = 1_000_000_000
STREAM = 0x7E00_0000_1010
STUB = 0x55D0_0000_1230


def process(pid: int, **more: Any) -> ProcessRow:
    return _row(ProcessRow, pid=pid, first_ns=1, runtime_calls=True, set_device_calls=1, **more)


def launch(pid: int, launches: int, **more: Any) -> LaunchRow:
    """Of 1,024 threads each, unless told otherwise."""
    shape = {"threads": launches * 1024, "threads_max": 1024, "block_threads_max": 256}
    shape |= {"grid": (4, 1, 1), "block": (256, 1, 1)}
    where = {"stream": STREAM, "function": STUB, "kind": "runtime", "first_ns": 5}
    return _row(LaunchRow, pid=pid, launches=launches, **{**shape, **where, **more})


def stream(pid: int, **more: Any) -> StreamRow:
    return _row(StreamRow, pid=pid, **{"stream": STREAM, "blocking": True, "created_ns": 4, **more})


def device(pid: int, **more: Any) -> DeviceRow:
    return _row(DeviceRow, pid=pid, **more)


def call(pid: int, api: str, counts: dict[int, int], total_ns: int, **more: Any) -> CallRow:
    """``counts``: by bucket."""
    buckets = tuple(counts.get(index, 0) for index in range(40))
    return _row(
        CallRow,
        pid=pid,
        api=api,
        calls=sum(counts.values()),
        total_ns=total_ns,
        buckets=buckets,
        **{"waits": True, **more},
    )


def memory(pid: int, current: int, peak: int, **more: Any) -> MemoryRow:
    return _row(MemoryRow, pid=pid, current_bytes=current, peak_bytes=peak, **{"kind": "device", **more})


def copy(pid: int, direction: str, size: int, **more: Any) -> CopyRow:
    return _row(CopyRow, pid=pid, direction=direction, bytes=size, **{"copies": 1, **more})


def error(pid: int, api: str, code: int, errors: int) -> ErrorRow:
    return ErrorRow(pid, api, code, errors, 1)


def allocation(pid: int, address: int, size: int, **more: Any) -> AllocationRow:
    return _row(
        AllocationRow, pid=pid, address=address, size_bytes=size, **{"kind": "device", "api": "cudaMalloc",
        "stack_id": -1, "time_ns": 3, **more},
    )  # fmt: skip


def name(pid: int, text: str, function: int = STUB) -> NameRow:
    return NameRow(pid, function, text, False)


def setenv(pid: int, value: str | None, time_ns: int, **more: Any) -> EnvironmentRow:
    return EnvironmentRow(
        pid, time_ns, more.pop("variable", "CUDA_VISIBLE_DEVICES"), value, more.pop("overwrite", True)
    )


def life(event: str, pid: int, time_ns: int = 0, child_pid: int = 0, exit_code: int = 0) -> LifeRow:
    return LifeRow(event, pid, child_pid, time_ns, exit_code)


_EMPTY: dict[Any, Any] = {"int": 0, "bool": False, "str": "", "bool | None": None}


def _row(row: type[Any], /, **values: Any) -> Any:
    """A row with 0, empty or False in every field that is not given."""
    for field, annotation in row.__annotations__.items():
        if field not in values:
            values[field] = (0, 0, 0) if annotation.startswith("tuple[int, int, int]") else _EMPTY.get(annotation, 0)
    return row(**values)


class FakeAttachment(Struct):
    """One hooked file."""

    number: int
    path: str
    layer: str
    hooked: bool = True
    closed: bool = False
    failed: list[tuple[str, str]] = []

    def pause_launches(self) -> None:
        self.hooked = False

    def resume_launches(self) -> None:
        self.hooked = True

    def close(self) -> None:
        self.closed = True


class FakeProbe:
    """Tells what it is given. ``refuses``: paths that cannot be hooked, with the reason."""

    def __init__(self) -> None:
        self.reading = CudaRows(0)
        self.attachments: dict[int, FakeAttachment] = {}
        self.detached: list[str] = []
        self.refuses: dict[str, str] = {}
        self.without: dict[str, str] = {}
        self.why_classic = ""
        self.forgotten: set[int] = set()
        self.asked_allocations: list[bool] = []
        self.runs = 0
        self.closed = False
        self.hits: dict[int, int] | None = None  # None: all were called

    def attach(self, path: str, layer: str, pid: int = 0) -> FakeAttachment:
        if path in self.refuses:
            raise SourceUnavailable(self.refuses[path], "do something")
        number = len(self.attachments)
        made = self.attachments[number] = FakeAttachment(number, path, layer)
        return made

    def detach(self, attachment: FakeAttachment) -> None:
        self.detached.append(attachment.path)
        attachment.close()

    def read(self, *, allocations: bool = False) -> CudaRows:
        self.asked_allocations.append(allocations)
        self.reading.hits = dict.fromkeys(self.attachments, 1) if self.hits is None else self.hits
        return self.reading

    def forget(self, pids: set[int]) -> None:
        self.forgotten.update(pids)

    def costs(self) -> list[ProgramCost]:
        self.runs += 10
        return [ProgramCost("cuda_launch", self.runs, self.runs * 1000), ProgramCost("cuda_call", None, None)]

    def close(self) -> None:
        self.closed = True
