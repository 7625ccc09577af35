"""The table of kernels: the same numbers as the plain way, whatever the order and size of batches."""

from __future__ import annotations

import random
import statistics
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuflight.events import aggregate
from gpuflight.events.aggregate import KernelTable
from gpuflight.events.batch import Batch

np = pytest.importorskip("numpy")

ROW = st.tuples(
    st.one_of(st.integers(0, 5), st.just((1 << 52) + 7)),
    st.integers(-1, 70_000),
    st.integers(-1, 3),
    st.integers(-10, 10**12),
)


def batch(rows: list[tuple[int, int, int, int]], session: str = "s", **more: Any) -> Batch:
    names = ("kernel_id", "stream_id", "device_id", "duration_ns")
    columns = {name: np.array([row[i] for row in rows], dtype=np.int64) for i, name in enumerate(names)}
    return Batch("kernel", session, len(rows), columns | more)


@given(st.lists(st.lists(ROW, min_size=1, max_size=30), max_size=8), st.integers(1, 50))
@settings(deadline=None)
def test_sums_are_those_of_the_plain_way(groups: list[list[tuple[int, int, int, int]]], at_once: int) -> None:
    expected: dict[tuple[int, int, int], list[int]] = {}
    for group in groups:
        for kernel, stream, device, duration in group:
            expected.setdefault((kernel, stream, device), []).append(duration)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aggregate, "_ROWS_AT_ONCE", at_once)
        table = KernelTable()
        for group in groups:
            table.add(batch(group))
        found = table.stats()
    assert {
        (s.kernel_id, -1 if s.stream_id is None else s.stream_id, -1 if s.device_id is None else s.device_id): (
            s.count,
            s.total_ns,
            s.min_ns,
            s.max_ns,
        )
        for s in found
    } == {key: (len(v), sum(v), min(v), max(v)) for key, v in expected.items()}
    assert [s.total_ns for s in found] == sorted((s.total_ns for s in found), reverse=True)


def test_quantiles_are_within_their_promise() -> None:
    chance = random.Random(4)
    values = [int(chance.lognormvariate(10, 2)) + 1 for _ in range(20_000)]
    table = KernelTable()
    for i in range(0, len(values), 500):
        table.add(batch([(1, 7, 0, v) for v in values[i : i + 500]]))
    (found,) = table.stats()
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    assert found.p99_ns == pytest.approx(cuts[98], rel=0.02)
    assert found.p50_ns == pytest.approx(cuts[49], rel=0.02)
    single = KernelTable()
    single.add(batch([(1, 7, 0, 123_456_789)]))
    assert single.stats()[0].p99_ns == 123_456_789


def test_columns_that_are_not_there_are_unknown() -> None:
    table = KernelTable()
    table.add(Batch("kernel", "s", 1, {"kernel_id": np.array([1]), "duration_ns": np.array([5])}))
    (found,) = table.stats()
    assert (found.stream_id, found.device_id, found.name, found.details, found.occupancy) == (None, None, None, 0, None)
    table.add(Batch("kernel", "s", 1, {"kernel_id": np.array([1])}))
    assert table.stats()[0].count == 1


@given(st.permutations(list(range(12))), st.integers(1, 5))
@settings(deadline=None)
def test_details_join_in_any_order(order: list[int], at_once: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aggregate, "_ROWS_AT_ONCE", at_once)
        table = KernelTable()
        table.add(Batch("kernel_shape", "s", 2, {"shape_id": np.array([1, 2]), "occupancy": np.array([0.25, 0.75])}))
        for i in order:
            corr = np.array([i % 6])
            if i < 6:
                table.add(batch([(i % 2, 7, 0, 5)], corr_id=corr))
            else:
                table.add(Batch("kernel_detail", "s", 1, {"corr_id": corr, "shape_id": np.array([1 + i % 2])}))
        found = {s.kernel_id: (s.count, s.details, s.occupancy, s.shape_id) for s in table.stats()}
        assert found == {0: (3, 3, 0.25, 1), 1: (3, 3, 0.75, 2)} and table.waiting() == 0


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregate, "_ROWS_AT_ONCE", 10)
    monkeypatch.setattr(aggregate, "_WAITING_DETAILS", 20)
    table = KernelTable()
    for i in range(100):
        table.add(batch([(1, 7, 0, 5)], corr_id=np.array([i])))
        table.add(Batch("kernel_detail", "s", 1, {"corr_id": np.array([1000 + i]), "shape_id": np.array([1])}))
    assert table.waiting() <= 20
    assert len(table._sessions["s"]._waiting_kernels[0]) <= 20


@pytest.mark.parametrize("kernels_ahead", [1, 40, 64])
def test_details_that_follow_their_batch_all_join_however_long_the_session(
    monkeypatch: pytest.MonkeyPatch, kernels_ahead: int
) -> None:
    """Kernels are not forgotten before the details that came with them were looked at."""
    monkeypatch.setattr(aggregate, "_ROWS_AT_ONCE", 64)
    monkeypatch.setattr(aggregate, "_WAITING_DETAILS", 64)
    table = KernelTable()
    for first in range(0, 40 * kernels_ahead, kernels_ahead):
        corr = np.arange(first, first + kernels_ahead)
        table.add(batch([(1, 7, 0, 5)] * kernels_ahead, corr_id=corr))
        table.add(Batch("kernel_detail", "s", len(corr), {"corr_id": corr, "shape_id": np.ones(len(corr), np.int64)}))
    (found,) = table.stats()
    assert found.count == found.details == 40 * kernels_ahead


@given(
    st.lists(st.tuples(st.integers(-9, 30), st.integers(0, 3)), min_size=1, max_size=60),
    st.lists(st.tuples(st.integers(-9, 40), st.sampled_from([1, 2, (1 << 52) + 1, (1 << 52) + 2])), max_size=60),
    st.sampled_from(["as they come", "in order", "one after the other"]),
    st.sampled_from([0, 1 << 20]),
)
@settings(deadline=None)
def test_each_launch_has_one_detail(
    launches: list[tuple[int, int]], details: list[tuple[int, int]], order: str, combinations: int
) -> None:
    if order == "in order":
        launches, details = sorted(launches), sorted(details)
    elif order == "one after the other":
        launches = [(i, kernel) for i, (_, kernel) in enumerate(launches)]
    kernel_of = dict(reversed(launches))  # the first of those with one number
    shape_of = dict(reversed(details))
    expected: dict[int, list[int]] = {}
    for corr, shape in shape_of.items():
        if corr in kernel_of:
            expected.setdefault(kernel_of[corr], []).append(shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aggregate, "_COMBINATIONS", combinations)
        table = KernelTable()
        table.add(batch([(kernel, 7, 0, 5) for _, kernel in launches], corr_id=np.array([c for c, _ in launches])))
        for corr, shape in details:
            table.add(Batch("kernel_detail", "s", 1, {"corr_id": np.array([corr]), "shape_id": np.array([shape])}))
        for line in table.stats():
            mine = expected.get(line.kernel_id, [])
            assert line.details == len(mine) and (line.shape_id in mine if mine else line.shape_id is None)
            assert not mine or mine.count(line.shape_id or 0) == max(mine.count(shape) for shape in mine)
        assert table.waiting() == sum(corr not in kernel_of for corr, _ in details)
