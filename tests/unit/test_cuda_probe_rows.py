"""The CUDA probe without a kernel: cookies, which function of a file is hooked, rows of entries, what is taken out."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence

import pytest

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.bpf.base import Link, ProbeObject, ProgramCost, Uprobe
from gpuflight.sources.bpf.elf import Elf, Symbol
from gpuflight.sources.bpf.probes import Probes
from gpuflight.sources.cuda_probe import cookies, decode, layouts
from gpuflight.sources.cuda_probe.functions import API_NUMBERS, SYMBOLS
from gpuflight.sources.cuda_probe.probe import LIFE_PROGRAMS, LOSSES, CudaProbe
from gpuflight.sources.cuda_probe.symbols import choose

X86_64, ARM64 = 62, 183


class FakeLink(Link):
    """Says that everything is attached, but for what is to fail."""

    def __init__(self, uprobes: Sequence[Uprobe], fails: Iterable[str] = ()) -> None:
        self.attached = [uprobe for uprobe in uprobes if uprobe.symbol not in fails]
        self.failed = [(uprobe, "no room") for uprobe in uprobes if uprobe.symbol in fails]
        self.closed = False

    def close(self) -> None:
        self.closed = True


class FakeObject(ProbeObject):
    """Maps as dictionaries."""

    name, backend, why_classic = "cuda", "fake", ""

    def __init__(self, hooks: bool = True) -> None:
        self.maps: dict[str, dict[bytes, bytes]] = {}
        self.records: list[bytes] = []
        self.lost_records = 0
        self.counted: dict[int, int] = {}
        self.hooks = hooks
        self.fails: set[str] = set()
        self.links: list[FakeLink] = []

    def attach_uprobes(self, program: str, uprobes: Sequence[Uprobe], pid: int = 0) -> Link:
        self.links.append(FakeLink(uprobes, self.fails))
        return self.links[-1]

    def attach(self, program: str) -> Link:
        if not self.hooks:
            raise SourceUnavailable("the kernel has no BTF")
        self.links.append(FakeLink([]))
        return self.links[-1]

    def read(self, map_name: str) -> list[tuple[bytes, bytes]]:
        return list(self.maps.get(map_name, {}).items())

    def lookup(self, map_name: str, key: bytes) -> bytes | None:
        return self.maps.get(map_name, {}).get(key)

    def update(self, map_name: str, key: bytes, value: bytes) -> None:
        self.maps.setdefault(map_name, {})[key] = value

    def delete(self, map_name: str, key: bytes) -> bool:
        return self.maps.get(map_name, {}).pop(key, None) is not None

    def clear(self, map_name: str) -> None:
        self.maps.pop(map_name, None)

    def drain(self, map_name: str, limit: int = 65536) -> list[bytes]:
        drained, self.records = self.records, []
        return drained

    def lost(self, map_name: str) -> int:
        return self.lost_records

    def losses(self) -> dict[int, int]:
        return self.counted

    def run_iter(self, link: Link) -> bytes:
        return b""

    def costs(self) -> list[ProgramCost]:
        return []

    def close(self) -> None:
        pass


class FakeProbes(Probes):
    """Opens the fake, perhaps only without the hooks of the kernel."""

    def __init__(self, inside: FakeObject, *, whole: bool = True, refuses: bool = False) -> None:
        super().__init__()
        self.inside, self.whole, self.refuses = inside, whole, refuses

    def open(
        self,
        name: str,
        *,
        programs: Sequence[str] | None = None,
        map_entries: Mapping[str, int] | None = None,
        constants: Mapping[str, int] | None = None,
    ) -> ProbeObject:
        if self.refuses or (programs is None and not self.whole):
            raise SourceUnavailable("the kernel refuses the probe cuda", "a newer kernel")
        return self.inside


def _elf(symbols: list[Symbol], machine: int = X86_64) -> Elf:
    return Elf(machine, False, symbols, [])


def _symbol(name: str, offset: int, kind: str = "function", table: str = "dynsym") -> Symbol:
    return Symbol(name, offset, 16, offset, kind, table)  # type: ignore[arg-type]


def test_a_function_that_jumps_to_another_is_left_out() -> None:
    symbols = [_symbol("cudaLaunchKernel", 0x1000), _symbol("__cudaLaunchKernel", 0x2000), _symbol("other", 0x3000)]
    jump = b"\x55\x48\x89\xe5\x5d\xe9" + struct.pack("<i", 0x1000 - 0x200A)
    found = choose(_elf(symbols), "runtime", {0x2000: jump})
    assert [place.symbol for place in found.places] == ["cudaLaunchKernel"]
    assert found.tails == ["__cudaLaunchKernel"]
    elsewhere = choose(_elf(symbols), "runtime", {0x2000: b"\xe9" + struct.pack("<i", 0x40)})
    assert [place.symbol for place in elsewhere.places] == ["cudaLaunchKernel", "__cudaLaunchKernel"]


@pytest.mark.parametrize(("back", "tails"), [(0x1000, ["__cudaLaunchKernel"]), (0x1004, [])])
def test_a_jump_of_arm64(back: int, tails: list[str]) -> None:
    symbols = [_symbol("cudaLaunchKernel", 0x1000), _symbol("__cudaLaunchKernel", 0x2000)]
    word = 0x14000000 | ((back - 0x2000) // 4 & 0x3FFFFFF)
    assert choose(_elf(symbols, ARM64), "runtime", {0x2000: struct.pack("<I", word)}).tails == tails


def test_two_names_of_one_place_are_hooked_once_and_ifuncs_are_told() -> None:
    symbols = [
        _symbol("ncclAllReduce", 0x10),
        _symbol("ncclAllReduce", 0x10, table="symtab"),
        _symbol("ncclSend", 0x20, "ifunc"),
    ]
    found = choose(_elf(symbols), "nccl", {})
    assert ([place.symbol for place in found.places], found.ifuncs, found.static) == (
        ["ncclAllReduce"],
        ["ncclSend"],
        False,
    )
    static = choose(_elf([_symbol("cudaMalloc", 0x30, table="symtab")]), "runtime", {})
    assert static.static


def test_a_cookie_says_what_a_function_is() -> None:
    function, per_thread = SYMBOLS["runtime"]["cudaMemcpy2D_ptds"]
    cookie = function.cookie(API_NUMBERS["runtime", "cudaMemcpy2D"], "runtime", per_thread=per_thread, file_number=5)
    assert cookie & 0x3FF == API_NUMBERS["runtime", "cudaMemcpy2D"]
    assert cookie >> 10 & 0x3F == cookies.Class.COPY
    assert cookie >> 16 & 0xF == 0b1101  # per thread, not of the driver, blocks, has arguments on the stack
    assert [cookie >> at & 0xF for at in (20, 24, 28, 32)] == [5, 6, 0, 7]
    assert cookie >> 48 == 5
    launch, _ = SYMBOLS["driver"]["cuLaunchKernel"]
    assert launch.cookie(1, "driver", per_thread=False, file_number=0) >> 16 & 0xF == 0b0010


def _event(kind: int, pid: int, a: int = 0, b: int = 0, time_ns: int = 9, value: bytes = b"") -> bytes:
    return layouts.LIFE.pack(time_ns, kind, pid, a, b) + value


def test_events_of_the_ring_buffer() -> None:
    life, environment, aliases = decode.events(
        [
            _event(layouts.FORK, 1, 2),
            _event(layouts.EXIT, 2, 256),
            _event(layouts.SETENV, 1, 1, 1, value=b"0,1\0rubbish"),
            _event(layouts.UNSETENV, 1, 2),
            _event(layouts.ALIAS, 1, 0x10, 0x20),
            _event(99, 1),
            b"short",
        ]
    )
    assert [(row.event, row.pid, row.child_pid, row.exit_code) for row in life] == [
        ("fork", 1, 2, 0),
        ("exit", 2, 0, 256),
    ]
    assert [(row.variable, row.value, row.overwrite) for row in environment] == [
        ("CUDA_VISIBLE_DEVICES", "0,1", True),
        ("CUDA_DEVICE_ORDER", None, False),
    ]
    assert [(row.function, row.of) for row in aliases] == [(0x10, 0x20)]


def test_rows_are_decoded_again_only_when_they_changed() -> None:
    decoded: list[bytes] = []

    def make(key: bytes, value: bytes) -> bytes:
        decoded.append(key)
        return key + value

    kept = decode.Kept(make)
    assert kept.rows([(b"a", b"1"), (b"b", b"1")]) == [b"a1", b"b1"]
    assert kept.rows([(b"a", b"1"), (b"b", b"2")]) == [b"a1", b"b2"]
    assert kept.rows([(b"a", b"1")]) == [b"a1"]
    assert kept.rows([(b"b", b"2")]) == [b"b2"]
    assert decoded == [b"a", b"b", b"b", b"b"]


def _process(pid: int, flags: int = layouts.RUNTIME, names_of: int = 0) -> tuple[bytes, bytes]:
    return layouts.PID.pack(pid), layouts.PROCESS.pack(5, 1, *[0] * 8, 0, names_of, flags, 0, 0, 0)


def _launch(pid: int, function: int, stream: int = 1, looked_at: int = 0, last_at: int = 0) -> tuple[bytes, bytes]:
    values = (3, 96, 3, 0, 32, 100, 200, looked_at, last_at, 1)
    key = layouts.LAUNCH_KEY.pack(pid, 0, 0, function, stream)
    return key, layouts.LAUNCH.pack(*values, 32, 0, 1, 1, 1, 32, 1, 1, 1, 0)


def test_the_time_of_a_launch_goes_by_ticks() -> None:
    entries = [_launch(1, 2, looked_at=50, last_at=53), _launch(1, 3, looked_at=50, last_at=50)]
    read = decode.launches(b"".join(key for key, _ in entries), b"".join(value for _, value in entries), 1_000_000)
    assert [row.last_ns for row in read.rows] == [200 + 3_000_000, 200]
    assert (read.counts, read.last_ns, read.assumed) == ({1: 6}, {(1, 0): 3_000_200}, set())


def test_an_unknown_function_or_kind_is_named_by_its_number() -> None:
    key = layouts.ERROR_KEY.pack(1, 1023, 2)
    assert decode.error(key, layouts.ERROR.pack(1, 2)).api == "api(1023)"
    assert decode.copy(layouts.COPY_KEY.pack(1, 0, 77, 0), layouts.COPY.pack(1, 2, 3, 4)).direction == "unknown(77)"


def test_what_ended_is_told_once_more_and_taken_out() -> None:
    inside = FakeObject()
    probe = CudaProbe(FakeProbes(inside))
    for pid, flags, names_of in ((1, layouts.REGISTERED, 0), (2, layouts.RUNTIME, 1), (3, layouts.RUNTIME, 0)):
        inside.update("processes", *_process(pid, flags, names_of))
        inside.update("launches", *_launch(pid, 0x10))
        inside.update("events", layouts.HANDLE_KEY.pack(pid, 7), bytes(24))
        inside.update("threads", layouts.THREAD_ID.pack(pid << 32 | 99), bytes(layouts.THREAD_BYTES))
    inside.update("registered", layouts.HANDLE_KEY.pack(1, 0x10), bytes(8))
    inside.records = [_event(layouts.EXIT, 1)]
    assert {row.pid for row in probe.read().launches} == {1, 2, 3}
    assert {row.pid for row in probe.read().launches} == {2, 3}
    assert len(inside.maps["events"]) == len(inside.maps["threads"]) == 2
    assert inside.maps["registered"]  # its child goes by them
    inside.records = [_event(layouts.EXIT, 2)]
    probe.read()
    assert not inside.maps["registered"]
    inside.records = [_event(layouts.EXEC, 3)]
    probe.read()
    rows = probe.read()
    assert [row.pid for row in rows.processes] == [3] and not rows.launches


def test_launches_on_destroyed_streams_stay_in_the_sum_of_the_process() -> None:
    inside = FakeObject()
    probe = CudaProbe(FakeProbes(inside))
    inside.update("processes", *_process(1))
    inside.update("launches", *_launch(1, 0x10, stream=0x7000))
    flags = layouts.MAKING_SEEN | layouts.DESTROYED
    inside.update(
        "streams", layouts.STREAM_KEY.pack(1, 0xFFFFFFFF, 0x7000), layouts.STREAM.pack(9, 0, 1, 0, 5, flags, 0, 0, 0)
    )
    first, second = probe.read(), probe.read()
    assert [row.destroyed for row in first.streams] == [True] and not second.streams
    assert len(first.launches) == 1 and not second.launches
    assert [row.launches for row in (*first.processes, *second.processes)] == [3, 3]


def test_losses_by_name_and_a_meaning_for_each() -> None:
    inside = FakeObject()
    probe = CudaProbe(FakeProbes(inside))
    inside.counted, inside.lost_records = {2: 5, 17: 1, 31: 9}, 4
    assert probe.read().losses == {"launches": 5, "stacks": 1, "life": 4}
    assert all(LOSSES[name] for name in ("launches", "stacks", "life"))


def test_without_hooks_of_the_kernel_the_probe_works_and_says_so() -> None:
    probe = CudaProbe(FakeProbes(FakeObject(hooks=False), whole=False))
    assert probe.without == dict.fromkeys(LIFE_PROGRAMS, "the kernel has no BTF")
    with pytest.raises(SourceUnavailable, match="refuses"):
        CudaProbe(FakeProbes(FakeObject(), refuses=True))
