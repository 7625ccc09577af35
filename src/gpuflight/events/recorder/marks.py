"""NVTX ranges out of markers: a start with a name, an end without one, joined by their id."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

_INSTANT, _START, _END = 1, 2, 4
_OPEN_KEPT = 100_000


class Marks:
    """Ranges that are open. ``lost_starts``: that did not fit; ``lost_ends``: ends whose start was not seen."""

    def __init__(self) -> None:
        self.lost_starts = 0
        self.lost_ends = 0
        self._open: OrderedDict[int, tuple[str, str, int]] = OrderedDict()

    def feed(
        self, flags: list[int], times: list[int], ids: list[int], names: list[str], domains: list[str]
    ) -> Iterator[dict[str, Any]]:
        """Fields of the ranges that these end, and of marks without a duration."""
        for flag, time_ns, identifier, name, domain in zip(flags, times, ids, names, domains, strict=True):
            if flag & _START:
                self._open[identifier] = (name, domain, time_ns)
                if len(self._open) > _OPEN_KEPT:
                    self._open.popitem(last=False)
                    self.lost_starts += 1
            elif flag & _END:
                begun = self._open.pop(identifier, None)
                if begun is None:
                    self.lost_ends += 1
                else:
                    yield _fields(begun[0], begun[1], begun[2], time_ns, identifier)
            elif flag & _INSTANT:
                yield _fields(name, domain, time_ns, time_ns, identifier)

    @property
    def open_count(self) -> int:
        return len(self._open)


def _fields(name: str, domain: str, start_ns: int, end_ns: int, identifier: int) -> dict[str, Any]:
    return {
        "name": name,
        "domain": domain,
        "start_ns": start_ns,
        "end_ns": end_ns,
        "duration_ns": end_ns - start_ns,
        "marker_id": identifier,
    }


def texts_of(texts: Mapping[str, Any], name: str, pointers: Any, count: int) -> list[str]:
    """A text per record: by pointer, or as they were read one by one."""
    told = texts.get(name)
    if told is None:
        return [""] * count
    if isinstance(told, list):
        return told
    return [told.get(pointer, "") for pointer in pointers.tolist()]
