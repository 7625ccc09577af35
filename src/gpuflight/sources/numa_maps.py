"""/proc/PID/numa_maps: on which NUMA node each mapping's pages lie (proc(5), Documentation/filesystems/proc.rst)."""

from __future__ import annotations

import re

# One pass over the whole file. The kernel escapes blanks and "=" in file names, so that a name cannot imitate a count.
_TOKEN = re.compile(rb" N(\d+)=(\d+)| kernelpagesize_kB=(\d+)|(\n)")


def parse_numa_maps(data: bytes, page_size: int = 4096) -> dict[int, int]:
    """Resident bytes per node: pages times the mapping's own page size (huge pages count as what they are).

    ``page_size`` (bytes) stands in for a mapping without ``kernelpagesize_kB``.
    """
    sizes: dict[int, int] = {}
    pending: list[tuple[int, int]] = []
    for node, pages, kilobytes, _ in _TOKEN.findall(data):
        if node:
            pending.append((int(node), int(pages)))
        elif pending:
            # The page size comes after the counts; a line end without one means the base page size.
            unit = int(kilobytes) * 1024 if kilobytes else page_size
            for index, count in pending:
                sizes[index] = sizes.get(index, 0) + count * unit
            pending.clear()
    for index, count in pending:
        sizes[index] = sizes.get(index, 0) + count * page_size
    return sizes
