"""What the log of the fake runtime says the CUDA probe has to find: written from CUDA's rules, not from our programs.

Times of a probe lie around those of the log: a call is seen when it begins, after the call before it ended; its return
after it ended, before the next call began. So each span has a shortest and a longest length, and both are exact.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

LEGACY = 1
NOT_READY = 600
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchCooperativeKernel", "cudaLaunchKernelExC")
ALLOCATIONS = {
    "cudaMalloc": "device",
    "cudaMallocPitch": "device",
    "cudaMalloc3D": "device",
    "cudaMallocAsync": "async",
    "cudaMallocManaged": "managed",
    "cudaMallocHost": "host",
    "cudaHostRegister": "registered",
}
FREES = ("cudaFree", "cudaFreeAsync", "cudaFreeHost", "cudaHostUnregister")
BLOCKING_COPIES = ("cudaMemcpy", "cudaMemcpy2D", "cudaMemcpy3D")
COPIES = (*BLOCKING_COPIES, "cudaMemcpyAsync", "cudaMemcpy2DAsync", "cudaMemcpyBatchAsync")
FILLS = {"cudaMemset": False, "cudaMemsetAsync": True, "cudaMemset3D": False}
DIRECTIONS = ("HtoH", "HtoD", "DtoH", "DtoD", "default")
DTOD = 3


@dataclass(frozen=True)
class Call:
    """One line of the log. ``before``: end of the call before it; ``after``: begin of the one after it."""

    pid: int
    tid: int
    begin: int
    end: int
    name: str
    result: int
    arguments: list[str]
    before: int
    after: int

    @property
    def base(self) -> str:
        """The name as in the headers."""
        return self.name.removesuffix("_ptsz").removesuffix("_ptds")

    def number(self, at: int) -> int:
        """An argument."""
        return int(self.arguments[at])

    def stream(self, at: int) -> int:
        """A stream as rows name it."""
        handle = self.number(at)
        if handle == 2 or (handle == 0 and self.name.endswith("_ptsz")):
            return self.tid << 32 | 2
        return handle or LEGACY


def read_log(path: Path, last: int) -> list[Call]:
    """All calls of the runtime in order; its calls of the driver are part of them. ``last``: a time after the end."""
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    lines = [words for words in lines if words[4].startswith(("cuda", "__cuda"))]
    lines.sort(key=lambda words: int(words[2]))
    calls = []
    for at, words in enumerate(lines):
        before = int(lines[at - 1][3]) if at else 0
        after = int(lines[at + 1][2]) if at + 1 < len(lines) else last
        pid, tid, begin, end = (int(word) for word in words[:4])
        calls.append(Call(pid, tid, begin, end, words[4], int(words[5]), words[6:], before, after))
    return calls


@dataclass
class Lane:
    """A stream: index of the call that opened its span, and of its last launch."""

    device: int
    blocking: bool = True
    opened: int | None = None
    launched: int = -1
    capture: int = 0
    shortest: int = 0
    longest: int = 0
    spans: int = 0


@dataclass
class Launches:
    """Sums of one function on one stream."""

    count: int = 0
    threads: int = 0
    blocks: int = 0
    captured: int = 0
    threads_max: int = 0
    block_max: int = 0
    shared_max: int = 0
    grid: tuple[int, ...] = (0, 0, 0)
    block: tuple[int, ...] = (0, 0, 0)


@dataclass
class Memory:
    """Sums of one kind of memory on one device."""

    current: int = 0
    peak: int = 0
    allocated: int = 0
    allocations: int = 0
    frees: int = 0


@dataclass
class Expected:
    """All aggregates of one process."""

    launches: dict[tuple[int, int, int, str], Launches] = field(default_factory=lambda: defaultdict(Launches))
    calls: Counter[str] = field(default_factory=Counter)
    call_ns: Counter[str] = field(default_factory=Counter)  # at least
    errors: Counter[tuple[str, int]] = field(default_factory=Counter)
    memory: dict[tuple[int, str], Memory] = field(default_factory=lambda: defaultdict(Memory))
    allocations: dict[int, tuple[int, int, str, str]] = field(default_factory=dict)
    copies: dict[tuple[int, str, bool], tuple[int, int, int]] = field(default_factory=dict)
    lanes: dict[tuple[int, int], Lane] = field(default_factory=dict)
    devices: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # spans, shortest, longest
    streams_created: int = 0
    streams_destroyed: int = 0
    event_records: int = 0
    set_device_calls: int = 0


class _Model:
    """One process, call by call."""

    def __init__(self, calls: list[Call], ended: int) -> None:
        self.calls = calls
        self.ended = ended
        self.found = Expected()
        self.events: dict[int, tuple[int, int, int, int]] = {}  # handle → record index, stream, device, capture
        self.capturing = self.captures = 0
        self.busy: dict[int, int] = {}  # device → index of the call that made it busy
        for at, call in enumerate(calls):
            self.take(at, call)
        self.end()

    def lane(self, stream: int, device: int) -> Lane:
        default = stream == LEGACY or stream & 7 == 2
        return self.found.lanes.setdefault((stream, device if default else -1), Lane(device))

    def take(self, at: int, call: Call) -> None:
        name, found = call.base, self.found
        if name in LAUNCHES:
            self.launch(at, call, kind="runtime", device=call.number(9), stream=call.stream(8))
            return
        if name == "cudaGraphLaunch":
            self.launch(at, call, kind="graph", device=call.number(2), stream=call.stream(1))
            return
        if name == "__cudaRegisterFunction":
            return
        found.calls[name] += 1
        found.call_ns[name] += call.end - call.begin
        if call.result and call.result != NOT_READY:
            found.errors[name, call.result] += 1
        self.wait(at, call)
        if not call.result:
            self.succeed(at, call)

    def launch(self, at: int, call: Call, *, kind: str, device: int, stream: int) -> None:
        sums = self.found.launches[device, stream, call.number(0), kind]
        sums.count += 1
        if kind == "runtime":
            gx, gy, gz, bx, by, bz, shared = (call.number(i) for i in range(1, 8))
            blocks, block = gx * gy * gz, bx * by * bz
            sums.threads += blocks * block
            sums.blocks += blocks
            sums.threads_max = max(sums.threads_max, blocks * block)
            sums.block_max = max(sums.block_max, block)
            sums.shared_max = max(sums.shared_max, shared)
            sums.grid, sums.block = (gx, gy, gz), (bx, by, bz)
        lane = self.lane(stream, device)
        if lane.capture and lane.capture == self.capturing:
            sums.captured += 1
            return
        lane.launched = at
        if lane.opened is None:
            lane.opened = at
            self.busy.setdefault(lane.device, at)

    def wait(self, at: int, call: Call) -> None:
        """What a call that waits has waited for; an error ends spans too."""
        name = call.base
        if name in ("cudaDeviceSynchronize", "cudaDeviceReset"):
            device = call.number(0)
            self.close([lane for lane in self.found.lanes.values() if lane.device == device], at, at)
        elif name in ("cudaStreamSynchronize", "cudaStreamQuery") and call.result != NOT_READY:
            self.waited(call.stream(0), call.number(1), at, at)
        elif name in ("cudaEventSynchronize", "cudaEventQuery") and call.result != NOT_READY:
            if call.number(0) in self.events:
                recorded, stream, device, _ = self.events[call.number(0)]
                self.waited(stream, device, recorded, at)
        elif name in BLOCKING_COPIES and not call.result and call.number(1) != DTOD:
            self.waited(call.stream(2), call.number(3), at, at)

    def waited(self, stream: int, device: int, before: int, at: int) -> None:
        if stream == LEGACY:  # blocking streams wait for it and it for them
            lanes = [lane for lane in self.found.lanes.values() if lane.device == device and lane.blocking]
        else:
            known = self.found.lanes.get((stream, device if stream & 7 == 2 else -1))
            lanes = [known] if known else []
        self.close(lanes, before, at)

    def close(self, lanes: list[Lane], before: int, at: int) -> None:
        closing, call = set(), self.calls[at]
        for lane in lanes:
            if lane.opened is None or lane.launched > before:
                continue
            opening = self.calls[lane.opened]
            lane.shortest += call.end - opening.begin
            lane.longest += call.after - opening.before
            lane.spans += 1
            lane.opened = None
            closing.add(lane.device)
        for device in closing:
            self.idle(device, call.end, call.after)

    def idle(self, device: int, earliest: int, latest: int, *, spans: int = 1) -> None:
        if any(lane.opened is not None for lane in self.found.lanes.values() if lane.device == device):
            return
        opening = self.calls[self.busy.pop(device)]
        count, shortest, longest = self.found.devices.get(device, (0, 0, 0))
        self.found.devices[device] = (
            count + spans,
            shortest + earliest - opening.begin,
            longest + latest - opening.before,
        )

    def end(self) -> None:
        """Spans that are open last until the process ended."""
        for lane in self.found.lanes.values():
            if lane.opened is not None:
                opening = self.calls[lane.opened]
                lane.shortest += self.ended - opening.begin
                lane.longest += self.ended - opening.before
                lane.opened = None
        for device in list(self.busy):
            self.idle(device, self.ended, self.ended, spans=0)

    def succeed(self, at: int, call: Call) -> None:
        name, found = call.base, self.found
        if name == "cudaStreamCreateWithFlags":
            found.streams_created += 1
            self.found.lanes[call.number(0), -1] = Lane(call.number(2), not call.number(1) & 1)
        elif name == "cudaStreamDestroy":
            found.streams_destroyed += 1
        elif name == "cudaSetDevice":
            found.set_device_calls += 1
        elif name == "cudaEventRecord":
            found.event_records += 1
            stream, device = call.stream(1), call.number(2)
            known = found.lanes.get((stream, device if stream == LEGACY or stream & 7 == 2 else -1))
            capture = known.capture if known and known.capture == self.capturing else 0
            self.events[call.number(0)] = at, stream, known.device if known else device, capture
        elif name == "cudaEventDestroy":
            self.events.pop(call.number(0), None)
        elif name == "cudaStreamBeginCapture":
            self.captures += 1
            self.capturing = self.captures
            self.lane(call.stream(0), 0).capture = self.capturing
        elif name == "cudaStreamEndCapture":
            self.capturing = 0
        elif name == "cudaStreamWaitEvent":
            capture = self.events.get(call.number(1), (0, 0, 0, 0))[3]
            if capture and capture == self.capturing:
                self.lane(call.stream(0), 0).capture = capture
        elif name in ALLOCATIONS or name in FREES or name == "cudaDeviceReset":
            self.remember(call)
        elif name in COPIES or name in FILLS:
            direction = "memset" if name in FILLS else DIRECTIONS[call.number(1)]
            later = FILLS.get(name, name.endswith("Async"))
            count, total, most = found.copies.get((call.number(3), direction, later), (0, 0, 0))
            size = call.number(0)
            found.copies[call.number(3), direction, later] = count + 1, total + size, max(most, size)

    def remember(self, call: Call) -> None:
        name, found = call.base, self.found
        if name == "cudaDeviceReset":
            for (device, _), sums in found.memory.items():
                sums.current = 0 if device == call.number(0) else sums.current
            found.allocations = {
                address: what for address, what in found.allocations.items() if what[1] != call.number(0)
            }
        elif name in FREES:
            if gone := found.allocations.pop(call.number(0), None):
                size, device, kind, _ = gone
                found.memory[device, kind].current -= size
                found.memory[device, kind].frees += 1
        elif call.number(0) and call.number(1):
            address, size, device = (call.number(i) for i in range(3))
            kind = ALLOCATIONS[name]
            found.allocations[address] = size, device, kind, name
            sums = found.memory[device, kind]
            sums.current += size
            sums.peak = max(sums.peak, sums.current)
            sums.allocated += size
            sums.allocations += 1


def expect(calls: list[Call], pid: int, ended: int) -> Expected:
    """The aggregates of one process that ended at a known time (ns)."""
    return _Model([call for call in calls if call.pid == pid], ended).found
