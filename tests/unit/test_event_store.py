"""The event store: whole or not at all, once, exact, and gone when it should be."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from gpuflight.errors import InputError
from gpuflight.events.batch import Batch
from gpuflight.events.ledger import Ledger, Place
from gpuflight.events.store import EventStore, Overlap, Source
from gpuflight.events.store.retention import RetentionSettings
from gpuflight.events.tables import TABLES

np = pytest.importorskip("numpy")
pytest.importorskip("duckdb")

DAY_NS = 86_400 * 10**9


def kernels(*rows: tuple[int, int, int], session: str = "s", batch_id: int | None = 1, **more: Any) -> Batch:
    """A batch of (start, kernel id, duration)."""
    columns = {
        name: np.array([row[i] for row in rows]) for i, name in enumerate(("start_ns", "kernel_id", "duration_ns"))
    }
    return Batch("kernel", session, len(rows), columns, "kernel_event_batch", batch_id, **more)


def names(*pairs: tuple[int, str], session: str = "s") -> Batch:
    columns = {
        "dictionary": ["kernel"] * len(pairs),
        "id": np.array([pair[0] for pair in pairs]),
        "text": [pair[1] for pair in pairs],
    }
    return Batch("name", session, len(pairs), columns, "dictionary_update")


def start(session: str = "s", time_ns: int = 5, **facts: Any) -> Batch:
    columns = {"time_ns": np.array([time_ns]), **{name: [value] for name, value in facts.items()}}
    return Batch("session_start", session, 1, columns, "job_start")


@pytest.fixture
def store(tmp_path: Path) -> Any:
    made = EventStore(str(tmp_path / "store"))
    yield made
    made.close()


def count(store: EventStore, table: str = "kernel", session: str = "s") -> int:
    found = store.session(session)
    assert found is not None
    relation = store.relation(table, [found])
    return int(store.records.rows(f"SELECT count(*) AS n FROM {relation.sql}")[0]["n"])


def test_a_numbered_batch_is_stored_once(store: EventStore) -> None:
    assert store.write([kernels((1, 1, 10), (2, 1, 20))]).rows == 2
    again = store.write([kernels((1, 1, 10), (2, 1, 20)), kernels((3, 1, 5), batch_id=2)])
    assert again.rows == 1
    assert again.ledger.count("repeated_batch") == 1
    assert count(store) == 3


def test_two_batches_of_one_number_are_both_kept_and_told(store: EventStore) -> None:
    store.write([kernels((1, 1, 10))])
    other = store.write([kernels((1, 1, 11))])
    assert other.ledger.count("batch_conflict") == 1
    assert count(store) == 2


def test_parts_of_one_batch_on_the_wire_belong_together(store: EventStore) -> None:
    parts = [kernels((1, 1, 10)), kernels((2, 1, 10))]
    assert store.write(parts).rows == 2
    assert store.write(parts).rows == 0
    assert count(store) == 2


def test_batch_numbers_are_remembered_over_a_restart(store: EventStore) -> None:
    store.write([kernels((1, 1, 10))], Source("f", 0, 100))
    store.close()
    again = EventStore(store.folder)
    try:
        assert again.write([kernels((1, 1, 10))]).ledger.count("repeated_batch") == 1
        assert again.write([kernels((9, 9, 9), batch_id=7)], Source("f", 0, 100)).repeated
        assert again.records.position("f") == 100
        assert count(again) == 1
    finally:
        again.close()


def test_a_source_is_stored_up_to_a_position(store: EventStore) -> None:
    loose = kernels((1, 1, 10), batch_id=None)
    assert store.write([loose], Source("f", 0, 10)).rows == 1
    assert store.write([loose], Source("f", 0, 10)).repeated
    assert store.write([loose], Source("f", 3, 9)).repeated
    with pytest.raises(Overlap) as caught:
        store.write([loose], Source("f", 5, 20))
    assert caught.value.position == 10
    assert store.write([loose], Source("f", 10, 20)).rows == 1
    assert store.write([loose], Source("f", 0, 5, renew=True)).rows == 1  # truncated, and written anew
    assert store.records.position("f") == 5
    assert count(store) == 3


def test_what_is_unknown_stays_unknown(store: EventStore) -> None:
    with_stream = kernels((1, 1, 10), batch_id=None)
    with_stream.columns["stream_id"] = np.array([0])
    store.write([with_stream, kernels((2, 1, 10), batch_id=None)])
    found = store.session("s")
    assert found is not None
    rows = store.records.rows(f"SELECT start_ns, stream_id FROM {store.relation('kernel', [found]).sql} ORDER BY 1")
    assert rows == [{"start_ns": 1, "stream_id": 0}, {"start_ns": 2, "stream_id": None}]


def test_a_later_name_replaces_an_earlier_one_and_devices_complete_each_other(store: EventStore) -> None:
    store.write([names((1, "a"), (2, "b"), (1, "c"))])
    store.write([names((2, "d")), names((3, "e"))])
    one = Batch("device", "s", 1, {"device_id": np.array([0]), "name": ["H100"]}, "job_start")
    two = Batch("device", "s", 1, {"device_id": np.array([0]), "total_mib": np.array([81559])}, "job_start")
    store.write([one])
    store.write([two])
    found = store.session("s")
    assert found is not None
    assert store.records.rows(f"SELECT id, text FROM {store.relation('name', [found]).sql} ORDER BY id") == [
        {"id": 1, "text": "c"},
        {"id": 2, "text": "d"},
        {"id": 3, "text": "e"},
    ]
    assert store.records.rows(f"SELECT name, total_mib FROM {store.relation('device', [found]).sql}") == [
        {"name": "H100", "total_mib": 81559}
    ]


def test_the_catalogue_knows_what_the_records_say(store: EventStore) -> None:
    end = Batch("session_end", "s", 1, {"time_ns": np.array([900]), "synthetic": np.array([1])}, "shutdown")
    store.write([kernels((20, 1, 10), (40, 1, 3))])
    store.write([start(time_ns=7, app="train", hostname="n1"), end])
    store.write([start(time_ns=6, app="train", hostname="n1")])  # once more, by another channel
    found = store.session("s")
    assert found is not None
    assert (found.app, found.hostname, found.start_ns, found.end_ns, found.end_synthetic) == (
        "train",
        "n1",
        6,
        900,
        True,
    )
    assert (found.first_event_ns, found.last_event_ns, found.completed_ns) == (6, 900, None)
    store.complete("s")
    assert store.session("s").completed_ns is not None  # type: ignore[union-attr]
    assert [s.session_id for s in store.catalogue.find(app="train")[0]] == ["s"]
    assert store.catalogue.find(app="other") == ([], 0)


def test_times_that_are_not_on_the_timeline_tell_nothing_of_the_session(store: EventStore) -> None:
    store.write([kernels((20, 1, 10), clock="steady")])
    found = store.session("s")
    assert found is not None
    assert found.first_event_ns is None
    rows = store.records.rows(f"SELECT clock FROM {store.relation('kernel', [found]).sql}")
    assert rows == [{"clock": 1}]


def test_losses_are_kept_with_the_session(store: EventStore) -> None:
    ledger = Ledger()
    ledger.add("bad_row", Place("f", offset=3), count=2, subject="kernel_event_batch")
    store.write([kernels((1, 1, 10))], Source("f", 0, 10), ledger)
    more = Ledger()
    more.add("bad_row", Place("g"), count=1, subject="kernel_event_batch")
    store.write([], Source("g", 0, 10, session_id="s"), more)  # nothing but losses
    found = store.session("s")
    assert found is not None
    assert [(line["reason"], line["about"], line["count"]) for line in store.losses(found)] == [
        ("bad_row", "kernel_event_batch", 3)
    ]


def test_unknown_columns_are_kept_raw(store: EventStore) -> None:
    store.write([kernels((1, 1, 10), extra={"colour": ["red"]})])
    found = store.session("s")
    assert found is not None
    assert store.records.rows(f"SELECT columns FROM {store.relation('extra', [found]).sql}") == [
        {"columns": '{"colour":["red"]}'}
    ]


def test_a_failed_write_leaves_nothing(store: EventStore) -> None:
    broken = kernels((2, 1, 10), batch_id=5)
    broken.columns["no_such_column"] = np.array([1])
    with pytest.raises(KeyError):
        store.write([kernels((1, 1, 10), batch_id=4), broken], Source("f", 0, 10))
    assert count(store) == 0
    assert store.records.position("f") is None
    assert store.write([kernels((1, 1, 10), batch_id=4)], Source("f", 0, 10)).rows == 1


def test_age_size_and_a_sessions_own_rule(tmp_path: Path) -> None:
    now = [100 * DAY_NS]
    store = EventStore(str(tmp_path / "store"), retention=RetentionSettings(max_age_days=30), wall_ns=lambda: now[0])
    try:
        for name, days in (("short", 1.0), ("rule", None), ("ever", 0.0)):
            store.write([kernels((1, 1, 10), session=name)])
            found = store.session(name)
            assert found is not None
            store.catalogue.learn(found.session_no, now[0], {"retention_days": days})
        now[0] += 2 * DAY_NS
        assert store.enforce_retention() == 1
        assert store.session("short") is None
        now[0] += 40 * DAY_NS
        assert store.enforce_retention() == 1
        assert [s.session_id for s in store.catalogue.find()[0]] == ["ever"]
        assert count(store, session="ever") == 1
        assert store.write([kernels((1, 1, 10), session="rule")]).rows == 1  # forgotten with its batch numbers
    finally:
        store.close()


def test_room_of_what_went_is_used_again(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)

    def big(session: str) -> Batch:
        size = 200_000
        return Batch(
            "kernel",
            session,
            size,
            {name: rng.integers(0, 1 << 60, size) for name in ("start_ns", "kernel_id", "duration_ns")},
            "kernel_event_batch",
            1,
        )

    store = EventStore(str(tmp_path / "store"), retention=RetentionSettings(max_bytes=12_000_000))
    try:
        sizes = []
        for turn in range(8):
            store.write([big(f"s{turn}")])
            store.enforce_retention()
            sizes.append(os.path.getsize(tmp_path / "store" / "records.duckdb"))
        assert store.records.used_bytes() <= 12_000_000
        assert store.session("s7") is not None or store.catalogue.find()[1] > 0
        assert store.session("s0") is None
        assert sizes[-1] <= sizes[3] * 1.3
    finally:
        store.close()


def test_a_second_process_is_told_who_has_it(store: EventStore) -> None:
    program = f"from gpuflight.events.store import EventStore; EventStore({store.folder!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "another process has it open" in done.stderr.splitlines()[-1]


def test_no_store_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "records.duckdb").write_bytes(b"something else" * 1000)
    with pytest.raises(InputError, match=r"records\.duckdb: "):
        EventStore(str(tmp_path))
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InputError, match="cannot be opened"):
        EventStore(str(tmp_path / "file" / "below"))


_WRITER = textwrap.dedent(
    """
    import sys
    import numpy as np
    from gpuflight.events.batch import Batch
    from gpuflight.events.store import EventStore, Source
    store = EventStore(sys.argv[1])
    for number in range(1, 10_000):
        rows = 3000
        columns = {"start_ns": np.arange(rows) + number * rows, "kernel_id": np.full(rows, number)}
        batch = Batch("kernel", "s", rows, columns, "kernel_event_batch", number)
        store.write([batch], Source("f", number - 1, number))
        print(number, flush=True)
    """
)


def test_kill_in_the_middle_loses_nothing_acknowledged_and_doubles_nothing(tmp_path: Path) -> None:
    folder, acknowledged = str(tmp_path / "store"), 0
    for turn in range(3):
        with subprocess.Popen([sys.executable, "-c", _WRITER, folder], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                acknowledged = max(acknowledged, int(line))
                if acknowledged >= 15 * (turn + 1):
                    break
            process.send_signal(signal.SIGKILL)
            acknowledged = max([acknowledged, *map(int, process.stdout.read().split())])
        store = EventStore(folder)
        try:
            position = store.records.position("f")
            assert position is not None
            assert position >= acknowledged
            found = store.session("s")
            assert found is not None
            relation = store.relation("kernel", [found]).sql
            rows = store.records.rows(f"SELECT kernel_id, count(*) AS n FROM {relation} GROUP BY 1 ORDER BY 1")
            assert [(row["kernel_id"], row["n"]) for row in rows] == [(n, 3000) for n in range(1, position + 1)]
        finally:
            store.close()


_VALUES = {
    "i64": st.integers(-(2**63), 2**63 - 1),
    "u64": st.integers(0, 2**64 - 1),
    "f64": st.floats(allow_nan=False, allow_infinity=False),
    "text": st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    "json": st.just("[]"),
}
_DTYPES = {"i64": "int64", "u64": "uint64", "f64": "float64"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = EventStore(str(tmp_path_factory.mktemp("store")))
    yield made
    made.close()


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_every_value_of_every_table_comes_back_exactly(shared: EventStore, data: st.DataObject) -> None:
    table = TABLES[data.draw(st.sampled_from(sorted(TABLES)))]
    chosen = [c for c in table.columns if c.name in table.key or data.draw(st.booleans())]
    if not chosen:
        return
    size = data.draw(st.integers(1, 4))
    values = {c.name: data.draw(st.lists(_VALUES[c.kind], min_size=size, max_size=size)) for c in chosen}
    columns = {
        c.name: values[c.name] if c.kind in ("text", "json") else np.array(values[c.name], dtype=_DTYPES[c.kind])
        for c in chosen
    }
    shared.write([Batch(table.name, "s", size, columns, "x")])
    found = shared.session("s")
    assert found is not None
    got = shared.records.rows(f"SELECT * FROM {shared.relation(table.name, [found]).sql}")
    shared.remove([found])
    expected = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    if table.key:
        expected = list({tuple(row[name] for name in table.key): row for row in expected}.values())
    assert sorted(map(_shown, got), key=repr) == sorted(
        (_shown({c.name: None for c in table.columns} | row) for row in expected), key=repr
    )


def _shown(row: dict[str, Any]) -> list[tuple[str, Any]]:
    kept = {name: value for name, value in row.items() if name not in ("session_no", "clock")}
    return sorted(
        ((n, math.copysign(v, v) if isinstance(v, float) else v) for n, v in kept.items()), key=lambda p: p[0]
    )
