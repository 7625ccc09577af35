"""Waits, telemetry over time, profiles: the store against loops over the same rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("duckdb")
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.unit.event_rows import Rows, fill, names

from gpuflight.errors import InputError
from gpuflight.events.names import text_id
from gpuflight.events.query.profile import profile
from gpuflight.events.query.reader import MAX_ROWS
from gpuflight.events.query.series import hardware_counters, metrics_of, telemetry
from gpuflight.events.query.waits import waits
from gpuflight.events.store import EventStore
from gpuflight.events.tables import SYNC_TYPES

BASE_NS = 10**18


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EventStore]:
    made = EventStore(str(tmp_path_factory.mktemp("events") / "store"), threads=1)
    yield made
    made.close()


def maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


STACKS = {text_id(text): text for text in ("main|sync", "main|step|sync")}
sync = st.fixed_dictionaries(
    {
        "start_ns": st.integers(BASE_NS, BASE_NS + 100),
        "duration_ns": maybe(st.integers(0, 50)),
        "sync_type": maybe(st.integers(0, 5)),
        "function_id": maybe(st.integers(0, 2)),
        "stack_id": maybe(st.sampled_from([0, *STACKS])),
    }
)


@given(st.lists(sync, max_size=25), st.booleans(), maybe(st.integers(BASE_NS, BASE_NS + 150)))
@settings(max_examples=examples(50), deadline=None)
def test_waits(store: EventStore, rows: Rows, by_place: bool, to_ns: int | None) -> None:
    functions = {1: "main|f"}  # 2 never came
    groups: dict[Any, list[int]] = defaultdict(list)
    for r in rows:
        if r["duration_ns"] is not None and (to_ns is None or r["start_ns"] < to_ns):
            place = (r["function_id"] or r["stack_id"] or 0) if by_place else 0
            groups[r["sync_type"] or 0, place].append(r["duration_ns"])
    reader = fill(
        store,
        sync=rows,
        session_start=[{"time_ns": BASE_NS}],
        session_end=[{"time_ns": BASE_NS + 200}],
        name=names("function", functions) + names("stack", STACKS),
    )
    texts = {**functions, **STACKS}
    found = [
        (w.kind, w.place, w.count, w.total_ns, w.mean_ns, w.max_ns, w.share)
        for w in waits(reader, by_place=by_place, to_ns=to_ns)
    ]
    wanted = [
        (SYNC_TYPES.get(kind, str(kind)), texts.get(place), len(v), sum(v), sum(v) / len(v), max(v), sum(v) / 200)
        for (kind, place), v in groups.items()
    ]
    assert sorted(map(repr, found)) == sorted(map(repr, wanted))
    assert [w[3] for w in found] == sorted((w[3] for w in found), reverse=True)


def test_share_of_an_unknown_time_is_unknown(store: EventStore) -> None:
    (wait,) = waits(fill(store, {"sync": [{"start_ns": 1, "duration_ns": 5, "sync_type": 1}]}))
    assert wait.share is None


sample = st.fixed_dictionaries(
    {
        "time_ns": st.integers(BASE_NS, BASE_NS + 10**6),
        "device_id": st.integers(0, 1),
        "gpu_util_pct": maybe(st.integers(0, 100)),
        "power_mw": maybe(st.integers(0, 10**6)),
        "energy_uj": maybe(st.integers(2**63, 2**64 - 1)),
    }
)


@given(
    st.lists(sample, max_size=40),
    st.integers(1, 20),
    maybe(st.integers(0, 1)),
    maybe(st.integers(BASE_NS, BASE_NS + 10**6)),
)
@settings(max_examples=examples(50), deadline=None)
def test_telemetry(store: EventStore, rows: Rows, points: int, device: int | None, from_ns: int | None) -> None:
    reader = fill(store, {"device_metric": [{"time_ns": 0, "device_id": 0, "power_mw": 1}]}, device_metric=rows)
    kept = [
        r for r in rows if (device is None or r["device_id"] == device) and (from_ns is None or r["time_ns"] >= from_ns)
    ]
    first = min((r["time_ns"] for r in kept), default=0)
    length = max((r["time_ns"] for r in kept), default=0) - first + 1
    steps: dict[Any, dict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
    begins: dict[Any, int] = {}
    for r in kept:
        step = (r["time_ns"] - first) * points // length
        begins[r["device_id"], step] = min(begins.get((r["device_id"], step), r["time_ns"]), r["time_ns"])
        for metric in ("gpu_util_pct", "power_mw", "energy_uj"):
            if r[metric] is not None:
                steps[metric, r["device_id"]][step].append(r[metric])
    found = telemetry(reader, "device_metric", device_id=device, from_ns=from_ns, points=points)
    assert {(s.metric, s.device_id) for s in found} == set(steps)
    for series in found:
        wanted = sorted(steps[series.metric, series.device_id].items())
        assert len(series.times_ns) <= points
        assert series.times_ns == [begins[series.device_id, step] for step, _ in wanted]
        assert series.counts == [len(v) for _, v in wanted]
        assert series.mins == [float(min(v)) for _, v in wanted]
        assert series.maxs == [float(max(v)) for _, v in wanted]
        assert series.means == pytest.approx([sum(v) / len(v) for _, v in wanted])


def test_only_the_metrics_asked_for(store: EventStore) -> None:
    reader = fill(store, host_metric=[{"time_ns": BASE_NS, "cpu_pct": 12.5, "ram_used_mib": 3}])
    (series,) = telemetry(reader, "host_metric", metrics=["cpu_pct"])
    assert (series.metric, series.device_id, series.means) == ("cpu_pct", None, [12.5])
    assert telemetry(reader, "host_metric", metrics=[]) == []
    assert "cpu_pct" in metrics_of("host_metric") and "time_ns" not in metrics_of("host_metric")
    for bad in ({"metrics": ["nope"]}, {"points": 0}, {"points": MAX_ROWS + 1}):
        with pytest.raises(InputError):
            telemetry(reader, "host_metric", **bad)  # type: ignore[arg-type]


def test_hardware_counters(store: EventStore) -> None:
    rows = [
        {"time_ns": BASE_NS + t, "device_id": 0, "metric_id": m, "value": v}
        for t, m, v in ((0, 1, 2.5), (1, 1, 3.5), (99, 1, 7.0), (99, 2, 1.0))
    ]
    reader = fill(store, pm_sample=rows, name=names("metric", {1: "sm__warps_launched.sum"}))
    found = {s.metric: (s.times_ns, s.means, s.counts) for s in hardware_counters(reader, points=2)}
    assert found == {
        "sm__warps_launched.sum": ([BASE_NS, BASE_NS + 99], [3.0, 7.0], [2, 1]),
        "#2": ([BASE_NS + 99], [1.0], [1]),
    }


FUNCTIONS = {1: "gemm(float*)@a.cu", 2: "relu(float*)@b.cu"}
METRICS = {1: "smsp__pcsamp_warps_issue_stalled_wait", 2: "smsp__sass_inst_executed"}
profiled = st.fixed_dictionaries(
    {
        "function_id": maybe(st.integers(0, 3)),
        "metric_id": maybe(st.integers(0, 3)),
        "metric_value": st.integers(0, 1000),
        "stall_reason": maybe(st.integers(0, 3)),
        "sample_kind": maybe(st.integers(0, 2)),
        "source_file_id": maybe(st.integers(0, 1)),
        "source_line": maybe(st.integers(0, 2)),
        "pc_offset": maybe(st.sampled_from([0, 16])),
    }
)


@given(
    st.lists(profiled, max_size=30),
    st.sampled_from(["pc_sampling", "sass_metric"]),
    st.sampled_from(["function", "line", "instruction"]),
    st.sampled_from([None, "gemm", "float"]),
)
@settings(max_examples=examples(60), deadline=None)
def test_profile(store: EventStore, rows: Rows, kind: str, per: str, contains: str | None) -> None:
    code = {"pc_sampling": 0, "sass_metric": 1}[kind]
    groups: dict[Any, list[int]] = defaultdict(list)
    totals: dict[int, int] = defaultdict(int)
    for r in rows:
        function = r["function_id"] or 0
        if (r["sample_kind"] or 0) != code or (contains and contains not in FUNCTIONS.get(function, "")):
            continue
        metric = METRICS.get(r["metric_id"] or 0)
        stall = r["stall_reason"] or 0 if not r["metric_id"] else 0
        key: tuple[Any, ...] = (function, r["metric_id"] or 0, metric or f"stall_reason_{stall}")
        if per != "function":
            key += ("a.cu" if r["source_file_id"] else None, r["source_line"])
        if per == "instruction":
            key += (r["pc_offset"],)
        groups[key].append(r["metric_value"])
        totals[function] += r["metric_value"]
    rows_in = fill(
        store,
        profile_sample=rows,
        name=names("function", FUNCTIONS) + names("metric", METRICS) + names("source_file", {1: "a.cu"}),
    )
    found = profile(rows_in, kind=kind, per=per, function_contains=contains, limit=MAX_ROWS)
    wanted = []
    for key, values in groups.items():
        file, line = (key[3], key[4] or None) if per != "function" else (None, None)
        share = sum(values) / totals[key[0]] if code == 0 and totals[key[0]] else None
        pc = key[5] if per == "instruction" else None
        wanted.append((FUNCTIONS.get(key[0]), key[2], file, line, pc, sum(values), len(values), share))
    told = [
        (p.function, p.metric, p.source_file, p.source_line, p.pc_offset, p.value, p.samples_count, p.share)
        for p in found
    ]
    assert sorted(map(repr, told)) == sorted(map(repr, wanted))
    assert [p.value for p in found] == sorted((p.value for p in found), reverse=True)


def test_a_profile_of_another_kind_is_refused(store: EventStore) -> None:
    reader = fill(store)
    with pytest.raises(InputError, match="pc_sampling, sass_metric"):
        profile(reader, kind="all")
    with pytest.raises(InputError, match="function, line, instruction"):
        profile(reader, per="file")
