"""What the CUDA probe has counted on the machine of ``machine.py``: the trainer launches, copies and reduces."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from struct import Struct
from typing import Any

import msgspec
from tests.fakes.kernel_rows import Answers, Rows, drained, packed, probe_answers

from gpuflight.sources.bpf.base import Uprobe
from gpuflight.sources.bpf.taped import TapedLink, _Attached
from gpuflight.sources.clock import ManualClock
from gpuflight.sources.cuda_probe import layouts
from gpuflight.sources.cuda_probe.attachment import Attachment
from gpuflight.sources.cuda_probe.functions import API_NUMBERS, Layer
from gpuflight.sources.cuda_probe.probe import LIFE_PROGRAMS
from gpuflight.sources.cuda_probe.symbols import Found, Place

RUNTIME, NCCL = "/opt/venv/lib/libcudart.so.12", "/opt/venv/lib/libnccl.so.2"
MAPS = (
    f"7fa0-7fa1 r-xp 00001000 103:01 9001                 {RUNTIME}\n"
    f"7fa2-7fa3 r-xp 00001000 103:01 9002                 {NCCL}\n"
)
"""Lines of the trainer's memory map."""

STUB, STREAM, COMMUNICATOR, ADDRESS = 0x55D0_0000_1230, 0x7E00_0000_1010, 0x7C00, 0x7F00_0000_0000
_SECOND = 1_000_000_000


def cuda_answers(clock: ManualClock, *, trainer: int, first_round_s: float) -> Answers:
    """All that the tape holds of the probe."""
    found: Answers = probe_answers("cuda", LIFE_PROGRAMS, _maps(trainer))
    for number, (layer, path, mark, inode) in enumerate(
        (("runtime", RUNTIME, "cudaLaunchKernel", 9001), ("nccl", NCCL, "ncclAllReduce", 9002))
    ):
        opened = f"/proc/{trainer}/root{path}"
        found["elf", f"{os.makedev(0x103, 1)}:{inode} {path}"] = msgspec.json.encode([[mark], opened])
        places = Found([Place(mark, 0x1000)], [], [], False)
        found["cuda-probe", f"functions {layer} {opened}"] = packed(places)
        found |= _attached(opened, layer, number, places)
        found["bpf", f"cuda lookup hits {layouts.PID.pack(number).hex()}"] = packed([layouts.COUNT.pack(7)])
    found["bpf", f"cuda lookup stacks {layouts.PID.pack(5).hex()}"] = packed([layouts.COUNT.pack(STUB)])
    found["bpf", f"cuda delete names {layouts.HANDLE_KEY.pack(trainer, STUB).hex()}"] = packed(True)
    found["cuda-probe", "tick"] = layouts.COUNT.pack(4_000_000)
    found["cuda-probe", "now"] = lambda: layouts.COUNT.pack(round(clock.monotonic_s() * 1e9))
    found["bpf", "cuda lost life"] = packed(0)
    for question in ("cuda drain life", "cuda drain life 2"):  # the second: of a round that is observed twice
        found["bpf", question] = drained(clock, first_round_s, [])
    return found


def _maps(pid: int) -> dict[str, Rows]:
    stream = layouts.STREAM_KEY.pack(pid, 0xFFFFFFFF, STREAM), _filled(layouts.STREAM, _SECOND, 0, 9, 0, 1, 2, 0, 0, 0)
    name = b"_Z4gemmPf\0"
    launch = _filled(layouts.LAUNCH, 40, 40 * 4096, 640, 0, 4096, 1, 9, 0, 0, 1, 256, 64, 16, 1, 1, 256, 1, 1)
    wait = _filled(layouts.DURATION, 9, 9 * 5000, 6000, *[9 if index == 12 else 0 for index in range(40)])
    maps: dict[str, Rows] = {
        "processes": [
            (layouts.PID.pack(pid), _filled(layouts.PROCESS, 1, 1, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 2, 0, 0, 0))
        ],
        "launches": [(layouts.LAUNCH_KEY.pack(pid, 0, 0, STUB, STREAM), launch)],
        "devices": [
            (
                layouts.DEVICE_KEY.pack(pid, 0),
                _filled(layouts.DEVICE, _SECOND, 0, 9, 0) + bytes(layouts.DEVICE_BYTES - 32),
            )
        ],
        "streams": [stream],
        "names": [
            (
                layouts.HANDLE_KEY.pack(pid, STUB),
                layouts.NAME_LENGTH.pack(len(name)) + name.ljust(layouts.NAME_BYTES, b"\0"),
            )
        ],
        "durations": [(layouts.API_KEY.pack(pid, API_NUMBERS["runtime", "cudaStreamSynchronize"]), wait)],
        "errors": [
            (layouts.ERROR_KEY.pack(pid, API_NUMBERS["runtime", "cudaMalloc"], 2), _filled(layouts.ERROR, 3, 7)),
        ],
        "memory": [(layouts.MEMORY_KEY.pack(pid, 0, 0), _filled(layouts.MEMORY, 1 << 30, 1 << 31, 1 << 31, 2, 1, 0))],
        "copies": [
            (layouts.COPY_KEY.pack(pid, 0, 1, 0), _filled(layouts.COPY, 10, 1 << 20, 1 << 18, 5)),
            (layouts.COPY_KEY.pack(pid, 0, 2, 1), _filled(layouts.COPY, 3, 1 << 10, 1 << 10, 5)),
        ],
        "collectives": [
            (
                layouts.COLLECTIVE_KEY.pack(pid, API_NUMBERS["nccl", "ncclAllReduce"], 6, 0, COMMUNICATOR),
                _filled(layouts.COLLECTIVE, 4, 4096, 9000, 4000, 0, 6),
            )
        ],
        "communicators": [
            (layouts.HANDLE_KEY.pack(pid, COMMUNICATOR), _filled(layouts.COMMUNICATOR, 1, 8, 0, 0, 0)),
        ],
        "allocations": [
            (
                layouts.HANDLE_KEY.pack(pid, ADDRESS),
                _filled(layouts.ALLOCATION, 1 << 30, 1, STUB, 5, pid, 0, 0, API_NUMBERS["runtime", "cudaMalloc"]),
            )
        ],
        "threads": [],
    }
    return maps


def _filled(layout: Struct, *values: int) -> bytes:
    """A value of a map, with 0 in the fields at its end that are not given."""
    fields = len(layout.unpack(bytes(layout.size)))
    return layout.pack(*values[:fields], *[0] * (fields - len(values)))


class _Asked:
    """Stands for the loaded object while an attachment plans which program goes where."""

    def __init__(self) -> None:
        self.answers: Answers = {}

    def attach_uprobes(self, program: str, uprobes: Sequence[Uprobe], pid: int = 0) -> TapedLink:
        places = hashlib.blake2b(msgspec.msgpack.encode([list(uprobes), pid]), digest_size=8).hexdigest()
        self.answers["bpf", f"cuda attach {program} {places}"] = packed(_Attached(list(range(len(uprobes))), []))
        return TapedLink(list(uprobes), [], None, "")


def _attached(path: str, layer: Any, number: int, found: Found) -> Answers:
    asked = _Asked()
    chosen: Layer = layer
    Attachment(asked, path, chosen, number, found, 0, launch_codes=False)  # type: ignore[arg-type]
    return asked.answers
