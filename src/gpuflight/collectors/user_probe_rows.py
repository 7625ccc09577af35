"""From the rows of a user's map to metrics: what was counted since the last round, and what that means."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import sub

from msgspec import Struct

from gpuflight.collectors.rates import FIRST_READING
from gpuflight.graph import Metric as Number
from gpuflight.sources.bpf.loaded import Shape
from gpuflight.sources.bpf.user_probe_spec import MapSpec, Metric

NOTHING = "nothing was counted in this round"

Values = tuple[int | bytes, ...]


class Row(Struct, gc=False):
    """One key of a map. ``key``: its numbers by name. ``values``: of all fields; ``increase``: since the last round."""

    raw_key: bytes
    key: dict[str, int]
    values: Values
    increase: Values


class Rows:
    """One ``[[maps]]`` from round to round. A row that was not there in the last round counts from zero."""

    def __init__(self, spec: MapSpec, shape: Shape) -> None:
        self.spec = spec
        self._unpack = spec.value.total if shape.per_cpu else spec.value.unpack
        self._numbers = [
            (field.name, field.index) for field in spec.key.fields.values() if field.length and not field.array
        ]
        self._gauges = {spec.value.fields[metric.value].index for metric in spec.metrics.values() if metric.value}
        self._texts = [field.index for field in spec.value.fields.values() if not field.length]
        self._last: dict[bytes, Values] = {}
        self._last_s: float | None = None
        self._subjects: dict[bytes, str] = {}  # id of the entity that a row was about when it was first seen
        self.elapsed_s = 0.0
        self.restarted = 0

    def read(self, raw: Iterable[tuple[bytes, bytes]], now_s: float) -> list[Row]:
        """The rows that ``where`` chooses. ``elapsed_s`` is then the time since the last reading (0 at the first);
        ``restarted`` counts those that went back: the map dropped them, and they began again.

        Raises struct.error if a row does not have the bytes that the fields say.
        """
        self.elapsed_s = now_s - self._last_s if self._last_s is not None else 0.0
        self._last_s = now_s
        self.restarted = 0
        before, self._last = self._last, {}
        where = self.spec.where
        found: list[Row] = []
        for raw_key, raw_value in raw:
            parts = self.spec.key.unpack(raw_key)
            key: dict[str, int] = {name: parts[index] for name, index in self._numbers}  # type: ignore[misc]
            if where and any(key[name] != wanted for name, wanted in where.items()):
                continue
            values = self._unpack(raw_value)
            found.append(Row(raw_key, key, values, self._increase(values, before.get(raw_key))))
            self._last[raw_key] = values
        self._subjects = {key: subject for key, subject in self._subjects.items() if key in self._last}
        return found

    def belongs(self, row: Row, entity_id: str) -> bool:
        """Whether a row is still about what it was about at first: a pid may be given to another process."""
        return self._subjects.setdefault(row.raw_key, entity_id) == entity_id

    def _increase(self, values: Values, before: Values | None) -> Values:
        if before is None:
            return values
        if self._texts:
            values, before = self._numbers_of(values), self._numbers_of(before)
        steps = tuple(map(sub, values, before))
        if min(steps) < 0 and any(step < 0 and at not in self._gauges for at, step in enumerate(steps)):
            self.restarted += 1
            return values
        return steps

    def _numbers_of(self, values: Values) -> Values:
        """Without the texts, which have no increase."""
        return tuple(0 if isinstance(value, bytes) else value for value in values)

    def forget(self, raw_key: bytes) -> None:
        """The row was deleted; should it come again, it counts from zero."""
        self._last.pop(raw_key, None)
        self._subjects.pop(raw_key, None)


def metrics_of(spec: MapSpec, rows: Sequence[Row], elapsed_s: float) -> tuple[dict[str, Number], dict[str, str]]:
    """The metrics of one entity from all rows about it, and why others are unknown."""
    metrics: dict[str, Number] = {}
    unknown: dict[str, str] = {}
    for name, metric in spec.metrics.items():
        if metric.value:
            at = spec.value.fields[metric.value].index
            numbers: list[int] = [row.values[at] for row in rows]  # type: ignore[misc]
            metrics[name] = _scaled(max(numbers) if spec.combine == "max" else sum(numbers), metric)
        elif elapsed_s <= 0:
            unknown[name] = FIRST_READING
        else:
            value = _of_increases(spec, metric, rows, elapsed_s)
            if value is None:
                unknown[name] = NOTHING
            else:
                metrics[name] = value
    return metrics, unknown


def _of_increases(spec: MapSpec, metric: Metric, rows: Sequence[Row], elapsed_s: float) -> Number | None:
    if metric.rate:
        return _sum(spec, metric.rate, rows) / elapsed_s * metric.scale
    if metric.mean:
        upper, lower = (_sum(spec, field, rows) for field in metric.mean)
        return upper / lower * metric.scale if lower > 0 else None
    field = spec.value.fields[metric.of]
    slots: list[int] = [
        sum(row.increase[at] for row in rows)  # type: ignore[misc]
        for at in range(field.index, field.index + field.length)
    ]
    bound = quantile_bound(slots, metric.quantile)
    return None if bound is None else _scaled(bound, metric)


def quantile_bound(slots: Sequence[int], quantile: float) -> int | None:
    """Upper bound of the slot of a log2 histogram in which a quantile lies (slot n: below 2ⁿ⁺¹); None if empty."""
    total = sum(slots)
    if total <= 0:
        return None
    counted = 0
    for slot, count in enumerate(slots):
        counted += count
        if counted >= quantile * total:
            return 1 << slot + 1
    return 1 << len(slots)


def _sum(spec: MapSpec, field: str, rows: Sequence[Row]) -> int:
    at = spec.value.fields[field].index
    return sum(row.increase[at] for row in rows)  # type: ignore[misc] # the spec lets numbers only be counted


def _scaled(value: int, metric: Metric) -> Number:
    return value if metric.scale == 1.0 else value * metric.scale
