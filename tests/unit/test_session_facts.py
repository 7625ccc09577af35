"""Facts of whole sessions: against sets of moments, and by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.event_rows import fill, names

from gpuflight.events.facts import covered, session_facts, union
from gpuflight.events.store import EventStore

BASE = 1_790_000_000_000_000_000
MS = 1_000_000

spans = st.lists(st.tuples(st.integers(1, 200), st.integers(0, 40)), max_size=30)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EventStore]:
    made = EventStore(str(tmp_path))
    yield made
    made.close()


def _table(rows: list[tuple[int, int]]) -> dict[str, Any]:
    rows = sorted(rows)
    starts = np.array([start for start, _ in rows], np.int64)
    return {"s": starts, "e": starts + np.array([took for _, took in rows], np.int64)}


@given(spans, spans)
def test_cover_is_that_of_the_moments(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    moments = {t for start, took in one for t in range(start, start + took)}
    table = _table(other)
    found = covered(union([_table(one)]), table["s"], table["e"])
    assert found.tolist() == [len(moments & set(range(start, start + took))) for start, took in sorted(other)]


def _kernel(at_ms: float, took_ms: float, call_ms: float | None = None, stream: int = 7, **more: Any) -> dict[str, Any]:
    row = {"start_ns": BASE + int(at_ms * MS), "duration_ns": int(took_ms * MS), "stream_id": stream, "kernel_id": 1}
    if call_ms is not None:
        row |= {"api_start_ns": BASE + int(call_ms * MS), "api_exit_ns": BASE + int(call_ms * MS) + 5_000}
    return {**row, **more}


def _scope(at_ms: float, instance: int, name: int, event: int) -> dict[str, Any]:
    return {"time_ns": BASE + int(at_ms * MS), "scope_instance_id": instance, "name_id": name, "event_type": event}


def test_copies_that_kernels_hide(store: EventStore) -> None:
    copies = [{"start_ns": BASE + at * MS, "duration_ns": 4 * MS, "copy_kind": 1} for at in (1, 8, 30)]
    facts = session_facts(fill(store, kernel=[_kernel(0, 10), _kernel(5, 3)], memcpy=copies))
    assert facts.metrics["copies_overlapped_pct"] == 50.0  # 4 of the first, 2 of the second, none of the third


def test_launches_onto_an_empty_stream(store: EventStore) -> None:
    kernels = [
        _kernel(1, 2, 0.99), _kernel(3, 1, 1.5), _kernel(10, 1, 9.5), _kernel(2.5, 1, 2.49, stream=8),
        _kernel(20, 1), _kernel(21, 1, 30),
    ]  # fmt: skip
    copies = [{"start_ns": BASE + 30 * MS, "duration_ns": 5 * MS, "stream_id": 7, "copy_kind": 1}]
    kernels.append(_kernel(35, 1, 33))  # waits for the copy, not for its launch
    facts = session_facts(fill(store, kernel=kernels, memcpy=copies))
    assert facts.metrics["idle_launches_count"] == 3  # the first of stream 7, the one at 10 ms, and that of stream 8
    assert facts.metrics["delayed_launches_count"] == 1
    assert facts.metrics["launch_delay_p50_us"] == 10.0


def test_the_longest_gaps_with_what_the_host_did(store: EventStore) -> None:
    facts = session_facts(
        fill(
            store,
            kernel=[_kernel(0, 10, 0), _kernel(710, 10, 700), _kernel(1_500, 1, 715), _kernel(1_600, 1)],
            name=names("scope", {1: "train_step", 2: "load_batch"}),
            scope=[_scope(0, 1, 1, 0), _scope(15, 2, 2, 0), _scope(690, 2, 2, 1), _scope(720, 1, 1, 1)],
            sync=[
                {"start_ns": BASE + 725 * MS, "duration_ns": 700 * MS, "sync_type": 3},
                {"start_ns": BASE + 10 * MS, "duration_ns": 600 * MS, "sync_type": 2},
            ],
        )
    )
    assert [(gap.duration_ns, gap.host, gap.called) for gap in facts.gaps] == [
        (780 * MS, "waiting (stream)", True),
        (700 * MS, "in load_batch", False),
        (99 * MS, "", None),
    ]
    assert facts.attributes["longest_gap"] == "780 ms, 0.7 s after the first work, the host waiting (stream)"


def test_steps_that_hold_copies_that_block(store: EventStore) -> None:
    scopes = [_scope(100 * n + at, n + 1, 1, event) for n in range(4) for at, event in ((0, 0), (80, 1))]
    copies = [
        {"start_ns": BASE + at * MS, "duration_ns": 10 * MS, "api_start_ns": BASE + (at - 1) * MS,
         "api_exit_ns": BASE + (at + back) * MS}
        for at, back in ((110, 11), (120, 11), (210, 1), (390, 11))
    ]  # fmt: skip
    kernels = [_kernel(100 * n, 40) for n in range(4)]
    facts = session_facts(fill(store, name=names("scope", {1: "step"}), scope=scopes, memcpy=copies, kernel=kernels))
    assert facts.metrics["steps_with_blocking_copies_pct"] == 25.0  # two in the second; the last is after the step
    assert facts.metrics["steps_idle_pct"] == 50.0


def test_ranges_make_steps_where_there_are_no_scopes(store: EventStore) -> None:
    ranges = [
        {"start_ns": BASE + n * 100 * MS, "duration_ns": 80 * MS, "name_id": n + 1, "marker_id": n} for n in range(3)
    ]
    texts = {n + 1: f"ProfilerStep#{n}" for n in range(3)}
    facts = session_facts(fill(store, name=names("marker", texts), nvtx=ranges, kernel=[_kernel(0, 40)]))
    assert facts.metrics["steps_idle_pct"] == pytest.approx(100 * 200 / 240, abs=0.01)


def test_a_session_without_anything_has_no_facts(store: EventStore) -> None:
    facts = session_facts(fill(store, session_start=[{"time_ns": BASE}]))
    assert (facts.metrics, facts.attributes, facts.gaps) == ({}, {}, [])


def test_rows_without_a_place_on_the_timeline_make_no_gaps(store: EventStore) -> None:
    facts = session_facts(fill(store, {"kernel": [{"start_ns": n, "duration_ns": 1} for n in range(5)]}))
    assert facts.gaps == []
