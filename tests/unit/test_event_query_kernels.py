"""Questions about kernels, answered by the store and by loops over the same rows."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("duckdb")
import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.unit.event_rows import Rows, both, fill, names
from tests.unit.gpufl_files import CLEAN

from gpuflight.errors import InputError
from gpuflight.events.files import read_session
from gpuflight.events.names import text_id
from gpuflight.events.query.kernels import KernelFilter, duration_histogram, launches, top_kernels
from gpuflight.events.query.reader import MAX_ROWS, Reader
from gpuflight.events.store import EventStore

SCOPES = ("global|step", "global|step|forward", "global|stepper", "global")
KERNELS = {1: "gemm_a", 2: "gemm_b", 3: "relu"}  # 4 has no name


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EventStore]:
    made = EventStore(str(tmp_path_factory.mktemp("events") / "store"), threads=1)
    yield made
    made.close()


def maybe(values: st.SearchStrategy[int]) -> st.SearchStrategy[int | None]:
    return st.none() | values


times = st.integers(10**18, 10**18 + 50)
kernel = st.fixed_dictionaries(
    {
        "start_ns": times,
        "duration_ns": maybe(st.integers(0, 30)),
        "kernel_id": st.integers(1, 4),
        "stream_id": maybe(st.integers(7, 9)),
        "device_id": maybe(st.integers(0, 1)),
        "scope_id": maybe(st.sampled_from([0, *(text_id(scope) for scope in SCOPES)])),
    }
)


@st.composite
def sessions(draw: st.DrawFn) -> tuple[Rows, Rows]:
    """Kernels with their own corr_id, and details of some of them, one of them told twice."""
    rows = draw(st.lists(kernel, max_size=25))
    details = []
    for number, row in enumerate(rows):
        row["corr_id"] = number
        if draw(st.booleans()):
            details.append({"corr_id": number, "scope_id": text_id(draw(st.sampled_from(SCOPES))), "shape_id": 5})
    return rows, details + details[:1]


def write(store: EventStore, rows: Rows, details: Rows) -> Reader:
    return fill(
        store,
        kernel=rows,
        kernel_detail=details,
        kernel_shape=[{"shape_id": 5, "grid_x": 64, "occupancy": 0.5, "limiting_resource": "registers"}],
        name=names("kernel", KERNELS) + names("user_scope", {text_id(scope): scope for scope in SCOPES}),
    )


def with_scopes(rows: Rows, details: Rows) -> Rows:
    told = {row["corr_id"]: row["scope_id"] for row in details}
    texts = {text_id(scope): scope for scope in SCOPES}
    return [{**row, "scope": texts.get(row["scope_id"] or told.get(row["corr_id"]) or 0)} for row in rows]


def nearest_rank(values: list[int], q: float) -> int:
    return sorted(values)[max(math.ceil(q * len(values)) - 1, 0)]


@given(sessions(), st.sampled_from([None, "stream_id", "device_id", "scope_id"]))
@settings(max_examples=examples(40), deadline=None)
def test_top_kernels(store: EventStore, session: tuple[Rows, Rows], by: Any) -> None:
    reader = write(store, *session)
    groups: dict[tuple[int, Any], list[int]] = defaultdict(list)
    for row in with_scopes(*session):
        if row["duration_ns"] is not None:
            key = row["scope"] if by == "scope_id" else row[by] if by else None
            groups[row["kernel_id"], key].append(row["duration_ns"])
    for order in ("total_ns", "count", "mean_ns", "max_ns", "p99_ns"):
        found = top_kernels(reader, order=order, by=by, quantiles=True, limit=MAX_ROWS)
        assert found.lines_count == len(found.lines)
        everything = sum(map(sum, groups.values()))
        assert (found.count, found.total_ns) == (sum(map(len, groups.values())), everything)
        merged: dict[tuple[int, Any], list[int]] = defaultdict(lambda: [0, 0, 10**9, -1])
        for line in found.lines:
            assert line.kernel_id is not None
            assert line.name == KERNELS.get(line.kernel_id)
            cell = merged[line.kernel_id, line.by]
            cell[0] += line.count
            cell[1] += line.total_ns
            cell[2] = min(cell[2], line.min_ns)
            cell[3] = max(cell[3], line.max_ns)
            assert line.mean_ns == pytest.approx(line.total_ns / line.count)
            assert line.share == (line.total_ns / everything if everything else None)
        assert dict(merged) == {key: [len(v), sum(v), min(v), max(v)] for key, v in groups.items()}
        ordered = [getattr(line, order) for line in found.lines]
        assert ordered == sorted(ordered, reverse=True)
        if by != "scope_id":
            for line in found.lines:
                durations = groups[line.kernel_id or 0, line.by]
                assert (line.p50_ns, line.p99_ns) == (nearest_rank(durations, 0.5), nearest_rank(durations, 0.99))


filters = st.builds(
    KernelFilter,
    kernel_id=maybe(st.integers(1, 4)),
    stream_id=maybe(st.integers(7, 9)),
    device_id=maybe(st.integers(0, 1)),
    corr_id=maybe(st.integers(0, 3)),
    from_ns=maybe(times),
    to_ns=maybe(times),
    name_contains=st.none() | st.sampled_from(["gemm", "_b", "%", "none such"]),
    scope=st.none() | st.sampled_from([*SCOPES, "glob"]),
)


def matches(row: dict[str, Any], only: KernelFilter) -> bool:
    name, scope = KERNELS.get(row["kernel_id"]), row["scope"]
    return (
        all(
            wanted is None or row[column] == wanted
            for column, wanted in (
                ("kernel_id", only.kernel_id),
                ("stream_id", only.stream_id),
                ("device_id", only.device_id),
                ("corr_id", only.corr_id),
            )
        )
        and (only.from_ns is None or row["start_ns"] + (row["duration_ns"] or 0) >= only.from_ns)
        and (only.to_ns is None or row["start_ns"] < only.to_ns)
        and (only.name_contains is None or (name is not None and only.name_contains in name))
        and (only.scope is None or (scope is not None and (scope == only.scope or scope.startswith(only.scope + "|"))))
    )


@given(sessions(), filters, st.booleans())
@settings(max_examples=examples(60), deadline=None)
def test_launches_of_a_filter(store: EventStore, session: tuple[Rows, Rows], only: KernelFilter, longest: bool) -> None:
    reader = write(store, *session)
    told = {row["corr_id"] for row in session[1]}
    wanted = [row for row in with_scopes(*session) if matches(row, only)]
    if longest:
        wanted.sort(key=lambda r: (r["duration_ns"] is None, -(r["duration_ns"] or 0), r["start_ns"], r["corr_id"]))
    else:
        wanted.sort(key=lambda r: (r["start_ns"], r["corr_id"]))
    found = launches(reader, only=only, longest_first=longest, limit=MAX_ROWS)
    assert [launch.corr_id for launch in found] == [row["corr_id"] for row in wanted]
    for launch, row in zip(found, wanted, strict=True):
        for column in ("start_ns", "duration_ns", "kernel_id", "stream_id", "device_id", "scope"):
            assert getattr(launch, column) == row[column], column
        assert launch.name == KERNELS.get(row["kernel_id"])
        shape = {"grid_x": 64, "occupancy": 0.5, "limiting_resource": "registers"}
        assert launch.shape == (shape if row["corr_id"] in told else None)
        assert not launch.synthetic
    pages = [launches(reader, only=only, longest_first=longest, limit=3, offset=at) for at in range(0, len(wanted), 3)]
    assert [launch for page in pages for launch in page] == found
    top = top_kernels(reader, only=only, limit=MAX_ROWS)
    assert top.count == sum(row["duration_ns"] is not None for row in wanted)


@given(st.lists(st.integers(0, 2**40) | st.integers(0, 40)), st.integers(1, 16))
@settings(max_examples=examples(40), deadline=None)
def test_histogram(store: EventStore, durations: list[int], per_octave: int) -> None:
    rows = [{"start_ns": 10**18, "kernel_id": 1, "duration_ns": duration} for duration in durations]
    buckets = duration_histogram(fill(store, kernel=rows), per_octave=per_octave)
    assert sum(bucket.count for bucket in buckets) == len(durations)
    assert sum(bucket.total_ns for bucket in buckets) == sum(durations)
    for bucket, following in itertools.pairwise(buckets):
        assert bucket.to_ns <= following.from_ns
    for bucket in buckets:
        inside = [d for d in durations if bucket.from_ns <= d < bucket.to_ns]
        assert (bucket.count, bucket.total_ns) == (len(inside), sum(inside))
        assert bucket.to_ns <= max(1, math.ceil(bucket.from_ns * 2 ** (1 / per_octave)) + 1)


def test_kernels_of_several_sessions_stay_apart(store: EventStore) -> None:
    one = fill(
        store, kernel=[{"start_ns": 1, "kernel_id": 1, "duration_ns": 5, "corr_id": 1}], name=names("kernel", {1: "a"})
    )
    two = fill(
        store, kernel=[{"start_ns": 1, "kernel_id": 1, "duration_ns": 7, "corr_id": 1}], name=names("kernel", {1: "b"})
    )
    found = top_kernels(both(one, two))
    assert [(line.name, line.total_ns) for line in found.lines] == [("b", 7), ("a", 5)]
    ids = {launch.name: launch.session_id for launch in launches(both(one, two))}
    assert ids == {"a": one.sessions[0].session_id, "b": two.sessions[0].session_id}


def test_a_page_beyond_the_end_still_tells_how_many(store: EventStore) -> None:
    reader = fill(store, kernel=[{"start_ns": 1, "kernel_id": k, "duration_ns": k} for k in range(5)])
    found = top_kernels(reader, limit=2, offset=10, order="p99_ns")
    assert (found.lines, found.lines_count, found.count, found.total_ns) == ([], 5, 5, 10)


def test_synthetic_kernels_are_marked(store: EventStore) -> None:
    capability = {"feature": "kernel_events", "status": "fallback", "mode": "launch_callbacks_synthetic"}
    reader = fill(store, kernel=[{"start_ns": 1, "kernel_id": 1, "duration_ns": 1}], capability=[capability])
    assert launches(reader)[0].synthetic


def test_unplaced_kernels_count_but_have_no_time_to_look_at(store: EventStore) -> None:
    reader = fill(
        store,
        {"kernel": [{"start_ns": 4, "kernel_id": 1, "duration_ns": 3}]},
        kernel=[{"start_ns": 10**18, "kernel_id": 1, "duration_ns": 4}],
    )
    assert top_kernels(reader).count == 2
    assert top_kernels(reader, only=KernelFilter(from_ns=0)).count == 1


def test_bounds(store: EventStore) -> None:
    reader = fill(store)
    for call in (
        lambda: top_kernels(reader, limit=0),
        lambda: top_kernels(reader, limit=MAX_ROWS + 1),
        lambda: launches(reader, offset=-1),
        lambda: launches(reader, offset=2**63),
        lambda: top_kernels(reader, order="name"),  # type: ignore[arg-type]
        lambda: top_kernels(reader, by="name"),  # type: ignore[arg-type]
        lambda: duration_histogram(reader, per_octave=0),
    ):
        with pytest.raises(InputError):
            call()
    assert top_kernels(reader).lines == []
    assert launches(reader) == []
    assert duration_histogram(reader) == []


def test_hostile_words_are_values(store: EventStore) -> None:
    reader = fill(
        store, kernel=[{"start_ns": 1, "kernel_id": 1, "duration_ns": 1}], name=names("kernel", {1: "'); DROP"})
    )
    assert top_kernels(reader, only=KernelFilter(name_contains="'); DROP")).count == 1
    assert top_kernels(reader, only=KernelFilter(scope="' OR 1=1 --")).count == 0


def test_the_fixture_of_the_newest_generation(store: EventStore) -> None:
    found = list(read_session(str(CLEAN)))
    store.write(found)
    session = store.session(CLEAN.name)
    assert session is not None
    durations: dict[int, list[int]] = defaultdict(list)
    for batch in found:
        if batch.table == "kernel":
            for row in batch.rows():
                durations[row["kernel_id"]].append(row["duration_ns"])
    page = top_kernels(Reader(store, [session]), quantiles=True)
    assert page.count == sum(map(len, durations.values())) > 0
    assert {line.kernel_id: (line.count, line.total_ns, line.p99_ns) for line in page.lines} == {
        k: (len(v), sum(v), nearest_rank(v, 0.99)) for k, v in durations.items()
    }
    assert all(line.name for line in page.lines)
