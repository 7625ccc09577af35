"""Which sessions there are and what is here of them; two of them compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("duckdb")
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.unit.event_rows import Rows, batches, fill, names
from tests.unit.gpufl_files import GEN

from gpuflight.errors import InputError
from gpuflight.events.files import SessionReader, find_sessions
from gpuflight.events.ledger import Ledger
from gpuflight.events.query.compare import compare
from gpuflight.events.query.reader import Reader
from gpuflight.events.query.sessions import LIVE_FOR_S, list_sessions
from gpuflight.events.store import EventStore, Source

BASE_NS = 10**18
MINUTE_NS = int(LIVE_FOR_S * 1e9)


class Clock:
    now = BASE_NS

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[EventStore]:
    made = EventStore(str(tmp_path / "store"), threads=1, wall_ns=clock)
    yield made
    made.close()


def begin(store: EventStore, session: str, time_ns: int = BASE_NS, **facts: Any) -> None:
    store.write(batches("session_start", [{"time_ns": time_ns, **facts}], session))


def end(store: EventStore, session: str, time_ns: int, synthetic: int | None = None) -> None:
    store.write(batches("session_end", [{"time_ns": time_ns, "synthetic": synthetic}], session))


def test_states(store: EventStore, clock: Clock) -> None:
    for session in ("live", "ended", "died", "silent"):
        begin(store, session)
    end(store, "ended", BASE_NS + 1)
    end(store, "died", BASE_NS + 1, synthetic=1)
    clock.now += MINUTE_NS + 1
    begin(store, "live")
    states = {line.session.session_id: line.state for line in list_sessions(store, clock.now).sessions}
    assert states == {"live": "live", "ended": "ended", "died": "died", "silent": "silent"}
    found = {
        live: [x.session.session_id for x in list_sessions(store, clock.now, live=live).sessions]
        for live in (True, False)
    }
    assert found[True] == ["live"]
    assert sorted(found[False]) == ["died", "ended", "silent"]
    assert list_sessions(store, clock.now, live=False).sessions_count == 3


def test_filters_order_and_pages(store: EventStore, clock: Clock) -> None:
    for number in range(5):
        begin(store, f"s{number}", BASE_NS + number, app=f"app{number % 2}", hostname="n1", run_id=f"r{number // 2}")
        end(store, f"s{number}", BASE_NS + number + 2)

    def asked(**only: Any) -> list[str]:
        return [line.session.session_id for line in list_sessions(store, clock.now, **only).sessions]

    assert asked() == ["s4", "s3", "s2", "s1", "s0"]
    assert asked(app="app1") == ["s3", "s1"]
    assert asked(hostname="n2") == []
    assert asked(run_id="r1") == ["s3", "s2"]
    assert asked(from_ns=BASE_NS + 4, to_ns=BASE_NS + 3) == ["s3", "s2"]
    page = list_sessions(store, clock.now, limit=2, offset=2)
    assert ([line.session.session_id for line in page.sessions], page.sessions_count) == (["s2", "s1"], 5)


def test_complete_means_nothing_lost(store: EventStore, clock: Clock) -> None:
    ledger = Ledger()
    ledger.add("corrupt_file", count=2)
    ledger.add("channel_copy", count=7)
    begin(store, "whole")
    begin(store, "holed")
    begin(store, "open")
    store.write(
        batches("kernel", [{"start_ns": 1, "kernel_id": 1, "duration_ns": 1}], "holed"),
        Source("f", 0, 1, "holed"),
        ledger,
    )
    store.complete("whole")
    store.complete("holed")
    lines = {line.session.session_id: line for line in list_sessions(store, clock.now).sessions}
    assert [(lines[s].complete, lines[s].lost_count) for s in ("whole", "holed", "open")] == [
        (True, 0),
        (False, 2),
        (False, 0),
    ]
    assert lines["holed"].records == {"kernel": 1}


def test_every_generation_of_the_fixtures(store: EventStore, clock: Clock) -> None:
    """What the catalogue and the counts say is what the batches hold."""
    wanted: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for folder in find_sessions(str(GEN)):
        reader = SessionReader(folder)
        found = list(reader)
        store.write(found, None, reader.ledger)
        for batch in found:
            wanted[batch.session_id][batch.table] += batch.count
    page = list_sessions(store, clock.now, limit=1000)
    assert page.sessions_count == len(page.sessions) == len(wanted)
    for line in page.sessions:
        for table, count in line.records.items():
            assert count == wanted[line.session.session_id][table]
        assert sum(wanted[line.session.session_id][t] for t in ("kernel", "memset")) == sum(
            line.records.get(t, 0) for t in ("kernel", "memset")
        )


runs = st.lists(st.tuples(st.integers(1, 4), st.none() | st.integers(0, 100)), max_size=15)


@given(runs, runs, st.integers(0, 4))
@settings(max_examples=examples(40), deadline=None)
def test_compare(shared: EventStore, one: list[Any], other: list[Any], offset: int) -> None:
    before_names, after_names = {1: "a", 2: "b", 3: "a"}, {1: "b", 2: "c", 4: "a"}  # two ids of one name

    def write(rows: list[Any], texts: dict[int, str]) -> tuple[Reader, dict[str, list[int]]]:
        grouped: dict[str, list[int]] = defaultdict(list)
        kernels: Rows = []
        for kernel, duration in rows:
            kernels.append({"start_ns": BASE_NS, "kernel_id": kernel, "duration_ns": duration})
            if duration is not None and kernel in texts:
                grouped[texts[kernel]].append(duration)
        return fill(shared, kernel=kernels, name=names("kernel", texts)), grouped

    (before, befores), (after, afters) = write(one, before_names), write(other, after_names)
    found = compare(before, after, offset=offset)
    assert found.before_total_ns == sum(map(sum, befores.values()))
    assert found.after_total_ns == sum(map(sum, afters.values()))
    assert found.before_count == sum(map(len, befores.values()))
    assert found.after_count == sum(map(len, afters.values()))
    everything = sorted(
        befores.keys() | afters.keys(), key=lambda n: (-abs(sum(afters.get(n, [])) - sum(befores.get(n, []))), n)
    )
    assert found.kernels_count == len(everything)
    assert [kernel.name for kernel in found.kernels] == everything[offset:]
    for kernel in found.kernels:
        b, a = befores.get(kernel.name, []), afters.get(kernel.name, [])
        assert (kernel.before_count, kernel.after_count) == (len(b), len(a))
        assert kernel.total_change_ns == sum(a) - sum(b)
        if b and a and sum(b):
            assert kernel.mean_ratio == pytest.approx(sum(a) / len(a) / (sum(b) / len(b)))
        else:
            assert kernel.mean_ratio is None


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EventStore]:
    made = EventStore(str(tmp_path_factory.mktemp("events") / "store"), threads=1)
    yield made
    made.close()


def test_sessions_of_two_stores_cannot_be_compared(store: EventStore, shared: EventStore) -> None:
    with pytest.raises(InputError, match="different stores"):
        compare(fill(store), fill(shared))
