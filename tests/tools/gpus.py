"""A made-up machine with eight GPUs under the fake NVML, of which each test says what is wrong with it."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.nvml.build import MACHINES

_PCI = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
BUSY = {
    "utilization": "93 41", "clocks": "1965 1965 2619 1545", "clock_event_reasons": "0", "power_mw": "560000",
    "temperature": "58", "gpm.1": "93", "gpm.2": "78", "gpm.3": "40", "gpm.5": "55", "gpm.10": "60",
}  # fmt: skip


def uuid(number: int) -> str:
    """Of a GPU by its index."""
    return f"GPU-fa4e0000-0000-4000-8000-00000000000{number}"


def description(folder: Path, users: dict[int, int]) -> Path:
    """The machine ``h100x8`` with nothing wrong with it; ``users``: index of a GPU → pid of who computes on it."""
    text, _, _ = (MACHINES / "h100x8.conf").read_text(encoding="utf-8").partition("[gpu 0]\n")
    for number, bus in enumerate(_PCI):
        text += f"[gpu {number}]\npci = 0000:{bus}:00.0\n"
        if number in users:
            text += "".join(f"{key} = {value}\n" for key, value in BUSY.items())
            text += f"process = {users[number]}:40960:C:::87:41\n"
    path = folder / "machine.conf"
    path.write_text(text, encoding="utf-8")
    return path
