"""Two openings of a fleet's store against a model that is two dicts: whatever is done by whom, in which order."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter

import pytest

pytest.importorskip("duckdb")
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.unit.test_event_store import kernels, names

from gpuflight.events.store import Source
from gpuflight.events.store.parquet import ParquetStore

which = st.integers(0, 1)
session = st.sampled_from(["a", "b"])


class Fleet(RuleBasedStateMachine):
    """``batches``: numbers that are stored, by session; ``texts``: the last text of the name 1; ``positions``: of the
    sources, each of which belongs to a session."""

    @initialize()
    def begin(self) -> None:
        self.now = 10**18
        self.folder = tempfile.mkdtemp()
        self.stores = [self.open(), self.open()]
        self.batches: dict[str, set[int]] = {}
        self.texts: dict[str, str] = {}
        self.positions: dict[str, int] = {}
        self.writes = 0

    def open(self) -> ParquetStore:
        return ParquetStore(self.folder, threads=1, upkeep_interval_s=0, wall_ns=lambda: self.now)

    @rule(at=which, to=session, number=st.integers(1, 6))
    def write(self, at: int, to: str, number: int) -> None:
        self.writes += 1
        text = f"text {self.writes}"
        done = self.stores[at].write(
            [kernels((number, number, 1), batch_id=number, session=to), names((1, text), session=to)]
        )
        new = number not in self.batches.get(to, set())
        assert done.rows == 1 + new
        self.batches.setdefault(to, set()).add(number)
        self.texts[to] = text

    @rule(at=which, to=session, end=st.integers(1, 4))
    def write_part(self, at: int, to: str, end: int) -> None:
        """Of a source, from where it is stored up to; or what is stored already."""
        start = self.positions.get(to, 0)
        source = Source(f"source of {to}", min(start, end - 1), end, session_id=to)
        if start > source.start and end > start:
            return
        batch = kernels((100 + end, 100 + end, 1), batch_id=None, session=to)
        done = self.stores[at].write([batch], source)
        assert done.repeated == (end <= start)
        if not done.repeated:
            self.batches.setdefault(to, set()).add(100 + end)
            self.positions[to] = end

    @rule(at=which, to=session)
    def remove(self, at: int, to: str) -> None:
        self.stores[at].records.fleet.refresh()
        found = self.stores[at].session(to)
        assert (found is not None) == (to in self.batches)
        if found is not None:
            self.stores[at].remove([found])
        for known in (self.batches, self.texts, self.positions):
            known.pop(to, None)  # type: ignore[attr-defined]

    @rule(at=which, wait=st.booleans())
    def maintain(self, at: int, wait: bool) -> None:
        self.now += 10**12 * wait
        self.stores[at].maintain()

    @rule(at=which)
    def snapshot(self, at: int) -> None:
        self.stores[at].records.fleet.snapshot()

    @rule(at=which)
    def reopen(self, at: int) -> None:
        self.stores[at].close()
        self.stores[at] = self.open()

    @rule(at=which)
    def look(self, at: int) -> None:
        self.stores[at].records.fleet.refresh()

    @rule(at=which, to=session)
    def ask(self, at: int, to: str) -> None:
        """A store may be behind, but never says what never was: no row twice, none of a session that is gone."""
        store = self.stores[at]
        known = store.catalogue.known(to)
        if known is not None:
            self.check(store, to, behind=True)

    def check(self, store: ParquetStore, to: str, *, behind: bool = False) -> None:
        found = store.catalogue.known(to)
        assert found is not None
        sql = f"SELECT kernel_id FROM {store.relation('kernel', [found]).sql}"
        rows: Counter[int] = Counter(row["kernel_id"] for row in store.rows(sql))
        assert set(rows.values()) <= {1}
        if not behind:
            assert set(rows) == self.batches[to]
            sql = f"SELECT text FROM {store.relation('name', [found]).sql}"
            assert [row["text"] for row in store.rows(sql)] == ([self.texts[to]] if to in self.texts else [])

    @invariant()
    def all_is_there(self) -> None:
        if not hasattr(self, "stores"):
            return
        fresh = self.open()
        try:
            assert {s.session_id for s in fresh.catalogue.find()[0]} == set(self.batches)
            for to in self.batches:
                self.check(fresh, to)
                assert fresh.records.position(f"source of {to}") == self.positions.get(to)
            assert fresh.records.used_bytes() >= 0
            assert (fresh.records.used_bytes() == 0) == (not self.batches)
        finally:
            fresh.close()

    def teardown(self) -> None:
        if not hasattr(self, "stores"):
            return
        for store in self.stores:
            store.records.fleet.refresh()
            for to in self.batches:
                self.check(store, to)
            store.close()
        shutil.rmtree(self.folder)


def test_whatever_is_done_by_whom() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    deep = settings.default is not None and settings.default.max_examples > 1000
    run_state_machine_as_test(
        Fleet,
        settings=settings(
            max_examples=200 if deep else 8,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
