"""Steps of a program, and what in them is no work: loading data, collecting garbage. Told by the names of its scopes.

A step is what frameworks and people name so: ``ProfilerStep#12``, ``train_step``, ``step 7``, ``iteration``. Steps
whose names differ in their number only are one series.
"""

from __future__ import annotations

import re
from collections import deque
from functools import lru_cache

import msgspec

_STEP = re.compile(
    r"profilerstep|((train|training|eval|validation|inference|decode|prefill|global|mini|optimi[sz]er)[ _.:/-]*)?"
    r"(step|iteration|iter|batch)",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"[\s#_:.\-\[(]*\d+[\])]?$")
_LOADER = re.compile(
    r"data[ _-]?loader|data[ _-]?load|load[ _-](data|batch)|data[ _-]?(wait|fetch|time)|(next|fetch|get)[ _-]batch"
    r"|input[ _-]pipeline",
    re.IGNORECASE,
)
_GC = re.compile(r"(^|[^a-z])(gc|garbage[ _-]collect\w*)($|[^a-z])", re.IGNORECASE)
_KEPT = 4096
"""Latest steps of a series whose durations are kept."""
_MOST_SERIES = 64
LONG_PAUSE_NS = 1_000_000
"""A pause for collecting garbage that counts; as in msprof's ``gc.yaml``."""


class StepSum(msgspec.Struct):
    """Steps of one name. ``first_end_ns``: when the first one was done. Of the latest ``judged``: their median,
    and ``outliers`` that took longer than the mean and three standard deviations."""

    name: str
    count: int
    total_ns: int
    max_ns: int
    first_end_ns: int
    judged: int = 0
    p50_ns: int = 0
    outliers: int = 0


class PauseSum(msgspec.Struct):
    """Times in which the program did something else; ``long``: of them, those of 1 ms or more."""

    count: int = 0
    total_ns: int = 0
    long: int = 0
    max_ns: int = 0


@lru_cache(maxsize=4096)
def kind_of(name: str) -> tuple[str, str]:
    """(``step``, ``loader``, ``gc`` or nothing, name of the series)."""
    series = _NUMBER.sub("", name)
    if _STEP.fullmatch(series):
        return "step", series
    if _GC.search(name):
        return "gc", "gc"
    if _LOADER.search(name):
        return "loader", "loader"
    return "", ""


class Steps:
    """Takes runs of scopes and ranges as they end."""

    def __init__(self) -> None:
        self.loader = PauseSum()
        self.gc = PauseSum()
        self._series: dict[str, tuple[StepSum, deque[int]]] = {}

    def take(self, name: str, began_ns: int, took_ns: int) -> None:
        """A run of a scope of this name; of other names than those of steps and pauses nothing is kept."""
        kind, series = kind_of(name)
        if kind == "step":
            known = self._series.get(series)
            if known is None:
                if len(self._series) >= _MOST_SERIES:
                    return
                known = self._series[series] = (StepSum(series, 0, 0, 0, began_ns + took_ns), deque(maxlen=_KEPT))
            line, latest = known
            line.count += 1
            line.total_ns += took_ns
            line.max_ns = max(line.max_ns, took_ns)
            latest.append(took_ns)
        elif kind:
            pause = self.gc if kind == "gc" else self.loader
            pause.count += 1
            pause.total_ns += took_ns
            pause.max_ns = max(pause.max_ns, took_ns)
            pause.long += took_ns >= LONG_PAUSE_NS

    def result(self) -> StepSum | None:
        """The series that took the most time; of nested ones that is the outer one."""
        if not self._series:
            return None
        line, latest = max(self._series.values(), key=lambda known: (known[0].total_ns, known[0].name))
        made = StepSum(line.name, line.count, line.total_ns, line.max_ns, line.first_end_ns)
        made.judged, made.p50_ns, made.outliers = spread(list(latest))
        return made


def spread(durations: list[int]) -> tuple[int, int, int]:
    """(number, median, how many are longer than the mean and three standard deviations)."""
    count = len(durations)
    if not count:
        return 0, 0, 0
    mean = sum(durations) / count
    limit = mean + 3 * (sum((each - mean) ** 2 for each in durations) / count) ** 0.5
    return count, sorted(durations)[count // 2], sum(each > limit for each in durations)
