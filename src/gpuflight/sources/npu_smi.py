"""Parsers of what ``npu-smi`` prints: the only way to Ascend NPUs that every driver version has.

The tables differ by product and version: one or two chips a card, with or without a physical id, DDR only or DDR and
HBM, ``NA`` or ``-`` where a figure does not apply. Sizes are printed as MB and are MiB (a 64 GiB card reads 65536).
"""

from __future__ import annotations

import re

from msgspec import Struct

from gpuflight.sources.sysfs import pci_address

_PAIR = re.compile(r"(\d+)\s*/\s*(\d+)")
_VERSION = re.compile(r"npu-smi\s+(\S+)")
_TOPOLOGY_LABEL = re.compile(r"(?:NPU|Phy-ID|Device)\s?(\d+)", re.IGNORECASE)
_TOPOLOGY_KINDS = frozenset(("X", "HCCS", "HCCS_SW", "PIX", "PXB", "PIB", "PHB", "SYS", "SIO", "NA"))
_MIB = 1 << 20


class NpuChip(Struct, gc=False):
    """One chip as ``npu-smi info`` shows it; None where it prints no figure."""

    card: int
    chip: int
    index: int
    name: str
    health: str
    pci_address: str
    power_watts: float | None = None
    temperature_celsius: float | None = None
    util_pct: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    memory_kind: str = ""


class NpuProcess(Struct, gc=False):
    """A process on a chip; the pid is the host's, also inside a container."""

    card: int
    chip: int
    pid: int
    name: str
    memory_bytes: int


class NpuInfo(Struct, gc=False):
    """Everything ``npu-smi info`` says. ``unparsed`` counts lines of its tables that could not be understood."""

    version: str
    chips: list[NpuChip]
    processes: list[NpuProcess]
    unparsed: int


class NpuTopology(Struct, gc=False):
    """How two NPUs are linked (``HCCS``, ``PIX``, ``PHB``, ``SYS`` …) by pair (lower index first), and local CPUs."""

    links: dict[tuple[int, int], str]
    cpus: dict[int, str]


def parse_info(text: str) -> NpuInfo:
    """``npu-smi info``: each chip is a pair of rows, then a table of processes."""
    version = _VERSION.search(text)
    chips: list[NpuChip] = []
    processes: list[NpuProcess] = []
    unparsed = 0
    in_processes = False
    second_column = False
    above: list[str] | None = None
    for line in text.splitlines():
        line = line.strip()
        if not line.startswith("|"):
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if "Process id" in line:
            in_processes = True
            continue
        if cells[0].startswith("Chip"):
            second_column = len(cells[0].split()) > 1  # "Chip  Phy-ID" or "Chip  Device"
            continue
        if not cells[0][:1].isdigit():
            continue  # headings, the version line, "No running processes found in NPU 0"
        if in_processes:
            process = _process(cells)
            if process is None:
                unparsed += 1
            else:
                processes.append(process)
        elif above is None:
            above = cells
        else:
            chip = _chip(above, cells, second_column)
            above = None
            if chip is None:
                unparsed += 1
            else:
                chips.append(chip)
    _number_chips(chips)
    return NpuInfo(version[1] if version else "", chips, processes, unparsed)


def _chip(above: list[str], below: list[str], second_column: bool) -> NpuChip | None:
    first, second = above[0].split(), below[0].split()
    if len(above) < 3 or len(below) < 3 or len(first) < 2 or not second[0].isdigit():
        return None
    index = int(second[1]) if second_column and len(second) > 1 and second[1].isdigit() else -1
    power, temperature = ([*above[2].split(), "", ""])[:2]
    # "12  2006 / 15039  1024 / 32768": utilisation, DDR, HBM. The card's own memory is the HBM where there is any.
    pairs = [(int(used), int(total)) for used, total in _PAIR.findall(below[2])]
    kind, used, total = "", None, None
    if len(pairs) > 1 and pairs[1][1]:
        kind, (used, total) = "HBM", pairs[1]
    elif pairs and pairs[0][1]:
        kind, (used, total) = "DDR", pairs[0]
    return NpuChip(
        card=int(first[0]),
        chip=int(second[0]),
        index=index,
        name=" ".join(first[1:]),
        health=above[1],
        pci_address=pci_address(below[1]),
        power_watts=_number(power),
        temperature_celsius=_number(temperature),
        util_pct=_number(below[2].split()[0]) if below[2] else None,
        memory_used_bytes=None if used is None else used * _MIB,
        memory_total_bytes=None if total is None else total * _MIB,
        memory_kind=kind,
    )


def _number_chips(chips: list[NpuChip]) -> None:
    """Give an index to chips without a physical id: the card's number where a card has one chip, else their order."""
    if all(chip.index >= 0 for chip in chips) and len({chip.index for chip in chips}) == len(chips):
        return
    single = len({chip.card for chip in chips}) == len(chips)
    for position, chip in enumerate(chips):
        chip.index = chip.card if single else position


def _process(cells: list[str]) -> NpuProcess | None:
    place = cells[0].split()
    try:
        return NpuProcess(int(place[0]), int(place[1]), int(cells[1]), cells[2], int(cells[3]) * _MIB)
    except (ValueError, IndexError):
        return None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def parse_topology(text: str) -> NpuTopology:
    """``npu-smi info -t topo``: a matrix with the local CPUs in its last column, then a legend."""
    links: dict[tuple[int, int], str] = {}
    cpus: dict[int, str] = {}
    columns: list[int] = []
    for line in text.splitlines():
        labels = [int(number) for number in _TOPOLOGY_LABEL.findall(line)]
        words = line.split()
        if len(labels) > 1 or (not columns and "Affinity" in line and labels):
            columns = labels
            continue
        if not columns or len(labels) != 1 or not _TOPOLOGY_LABEL.match(line.strip()):
            continue
        values = words[1:] if _TOPOLOGY_LABEL.fullmatch(words[0]) else words[2:]
        if len(values) < len(columns) or any(value.upper() not in _TOPOLOGY_KINDS for value in values[: len(columns)]):
            continue
        row = labels[0]
        for column, value in zip(columns, values, strict=False):
            if row < column and value.upper() not in ("X", "NA"):
                links[row, column] = value.upper()
        if len(values) > len(columns) and re.fullmatch(r"[\d,-]+", values[len(columns)]):
            cpus[row] = values[len(columns)]
    return NpuTopology(links, cpus)
