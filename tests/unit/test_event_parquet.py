"""The event store of a fleet: whole or not at all, once over all hosts, read by others as it is, and tidy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("duckdb")
import duckdb
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.unit.test_event_store import DAY_NS, count, kernels, names, start

from gpuflight.errors import InputError
from gpuflight.events.batch import Batch
from gpuflight.events.ledger import Ledger, Place
from gpuflight.events.store import Overlap, Source, parquet_files
from gpuflight.events.store.commits import FOLDER
from gpuflight.events.store.parquet import MERGE_AT, ParquetStore
from gpuflight.events.store.partitions import NO_VALUE, date_of, escaped, home
from gpuflight.events.store.retention import RetentionSettings

HOUR_NS = 3600 * 10**9
Open = Callable[..., ParquetStore]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens the store of this test, as often as one likes."""
    made: list[ParquetStore] = []

    def open_(**options: Any) -> ParquetStore:
        made.append(ParquetStore(str(tmp_path / "store"), **{"upkeep_interval_s": 0, "threads": 1, **options}))
        return made[-1]

    yield open_
    for store in made:
        store.close()


def visible(store: ParquetStore) -> list[str]:
    """Files that other programs see, relative to the root."""
    found = []
    for folder, folders, files in os.walk(store.folder):
        folders[:] = [name for name in folders if not name.startswith(("_", "."))]
        found += [os.path.relpath(os.path.join(folder, name), store.folder) for name in files]
    return sorted(found)


def plain(store: ParquetStore, sql: str) -> list[tuple[Any, ...]]:
    """What DuckDB finds without us; ``{files}``: all kernels."""
    files = f"'{store.folder}/*/*/*/type=kernel/*.parquet'"
    answer: list[tuple[Any, ...]] = duckdb.connect().execute(sql.replace("{files}", files)).fetchall()
    return answer


# --- once ----------------------------------------------------------------------------------------------------------


def test_what_repeats_is_stored_once_by_batch_and_by_source(opened: Open) -> None:
    store = opened()
    loose = kernels((5, 1, 10), batch_id=None)
    assert store.write([kernels((1, 1, 10), (2, 1, 20)), loose], Source("f", 0, 10)).rows == 3
    assert store.write([loose], Source("f", 0, 10)).repeated
    with pytest.raises(Overlap) as caught:
        store.write([loose], Source("f", 5, 20))
    assert caught.value.position == 10
    again = store.write([kernels((1, 1, 10), (2, 1, 20)), kernels((3, 1, 5), batch_id=2)], Source("f", 10, 20))
    assert (again.rows, again.ledger.count("repeated_batch")) == (1, 1)
    other = store.write([kernels((9, 9, 9))])
    assert other.ledger.count("batch_conflict") == 1
    assert count(store) == 5


def test_another_opening_knows_all_of_it(opened: Open) -> None:
    first = opened()
    first.write([kernels((1, 1, 10)), start(app="train", hostname="n1")], Source("f", 0, 100))
    first.close()
    second = opened()
    assert second.write([kernels((1, 1, 10))]).ledger.count("repeated_batch") == 1
    assert second.write([kernels((9, 9, 9), batch_id=7)], Source("f", 0, 100)).repeated
    assert second.records.position("f") == 100
    found = second.session("s")
    assert found is not None
    assert (found.app, found.hostname, found.first_event_ns) == ("train", "n1", 1)
    assert count(second) == 1


def test_two_servers_store_what_is_sent_to_both_once(opened: Open) -> None:
    one, two = opened(), opened()
    assert one.write([kernels((1, 1, 10))], Source("f", 0, 10)).rows == 1
    assert two.write([kernels((1, 1, 10))]).ledger.count("repeated_batch") == 1
    assert two.write([kernels((2, 1, 10), batch_id=2)], Source("f", 0, 10)).repeated
    assert two.write([kernels((2, 1, 10), batch_id=2)], Source("f", 10, 20)).rows == 1
    one.records.fleet.refresh()
    assert (count(one), count(two)) == (2, 2)
    assert one.records.position("f") == 20


def test_many_writers_at_once_double_nothing(opened: Open) -> None:
    """Every batch is handed to every store, by threads that race."""
    stores = [opened() for _ in range(3)]
    rows: list[int] = []

    def work(store: ParquetStore, order: list[int]) -> None:
        for number in order:
            done = store.write([kernels((number, number, 1), batch_id=number)], Source(f"w{number}", 0, 1))
            rows.append(done.rows)

    orders = [list(range(12)), list(reversed(range(12))), [*range(6, 12), *range(6)]]
    threads = [threading.Thread(target=work, args=pair) for pair in zip(stores, orders, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(rows), sum(rows)) == (36, 12)
    for store in stores:
        store.records.fleet.refresh()
        assert count(store) == 12
    assert plain(stores[0], "SELECT count(*), count(DISTINCT kernel_id) FROM read_parquet({files})") == [(12, 12)]


def test_a_later_name_wins_over_files_and_hosts(opened: Open) -> None:
    late, early = opened(wall_ns=lambda: 2000), opened(wall_ns=lambda: 1000)  # clocks that disagree
    late.write([names((1, "a"), (2, "b"), (1, "c"))])
    early.write([names((2, "d")), names((3, "e"))])
    devices = [{"name": ["H100"]}, {"total_mib": np.array([81559])}]
    for store, columns in zip((late, early), devices, strict=True):
        store.write([Batch("device", "s", 1, {"device_id": np.array([0]), **columns}, "job_start")])
    for store in (late, early):
        store.records.fleet.refresh()
        found = store.session("s")
        assert found is not None
        sql = f"SELECT id, text FROM {store.relation('name', [found]).sql} ORDER BY id"
        assert [tuple(row.values()) for row in store.rows(sql)] == [(1, "c"), (2, "d"), (3, "e")]
        sql = f"SELECT name, total_mib FROM {store.relation('device', [found]).sql}"
        assert store.rows(sql) == [{"name": "H100", "total_mib": 81559}]


def test_a_failed_write_leaves_nothing(opened: Open) -> None:
    store = opened()
    broken = kernels((2, 1, 10), batch_id=5)
    broken.columns["no_such_column"] = np.array([1])
    with pytest.raises(KeyError):
        store.write([names((1, "a")), kernels((1, 1, 10), batch_id=4), broken], Source("f", 0, 10))
    assert visible(store) == []
    assert os.listdir(store.records._log.tmp) == []
    assert store.records.position("f") is None
    assert store.write([kernels((1, 1, 10), batch_id=4)], Source("f", 0, 10)).rows == 1


def test_a_full_disk_is_told_and_what_it_cut_off_is_not_stored(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened()
    store.write([kernels((1, 1, 10))], Source("f", 0, 10))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(InputError, match="No space left"):
            store.write([kernels((2, 1, 10), batch_id=2)], Source("f", 10, 20))
    assert (count(store), store.records.position("f")) == (1, 10)
    assert store.write([kernels((2, 1, 10), batch_id=2)], Source("f", 10, 20)).rows == 1
    assert count(store) == 2


def test_a_file_that_cannot_be_moved_is_read_where_it_is(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    store, rename = opened(), os.rename

    def stuck(source: str, target: str) -> None:
        if target.endswith(".parquet"):
            raise OSError(28, "No space left on device")
        rename(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", stuck)
        assert store.write([kernels((1, 1, 10))]).rows == 1
    assert visible(store) == []
    assert count(store) == 1
    store.records.fleet.snapshot()
    assert len(visible(store)) == 1
    assert count(store) == 1


# --- sessions ------------------------------------------------------------------------------------------------------


def test_losses_and_unknown_columns_are_kept_with_the_session(opened: Open) -> None:
    store = opened()
    for file, times in (("f", 2), ("g", 1)):
        ledger = Ledger()
        ledger.add("bad_row", Place(file, offset=3), count=times, subject="kernel_event_batch")
        store.write([kernels((times, 1, 10), batch_id=times, extra={"colour": ["red"]})], Source(file, 0, 1), ledger)
    store.records.fleet.snapshot()
    store.write([], Source("h", 0, 10, session_id="s"), ledger)
    for reader in (store, opened()):
        found = reader.session("s")
        assert found is not None
        lines = [(line["reason"], line["about"], line["count"]) for line in reader.losses(found)]
        assert lines == [("bad_row", "kernel_event_batch", 4)]
        rows = reader.rows(f"SELECT columns, batch_id FROM {reader.relation('extra', [found]).sql} ORDER BY 2")
        assert rows == [{"columns": '{"colour":["red"]}', "batch_id": number} for number in (1, 2)]


def test_what_is_said_of_a_session_reaches_the_others(opened: Open) -> None:
    one, two = opened(), opened()
    one.write([kernels((1, 1, 10)), start(hostname="n1")])
    two.records.fleet.refresh()
    found = two.session("s")
    assert found is not None
    received_ns = found.received_ns
    two.catalogue.set_retention(found.session_no, 7.0)
    one.records.fleet.refresh()
    assert one.session("s").retention_days == 7.0  # type: ignore[union-attr]
    assert one.session("s").received_ns == received_ns  # type: ignore[union-attr]
    one.complete("s")
    one.catalogue.set_retention(one.session("s").session_no, None)  # type: ignore[union-attr]
    two.records.fleet.refresh()
    again = two.session("s")
    assert again is not None
    assert again.completed_ns is not None
    assert again.retention_days is None


# --- what others see -----------------------------------------------------------------------------------------------


def test_the_files_lie_where_their_partitions_say(opened: Open) -> None:
    store = opened()
    day = 20_000 * DAY_NS
    store.write([start(time_ns=day + 5, app="train", hostname="gpu-7")])
    store.write([kernels((day + 9, 1, 10)), names((1, "gemm"))])
    folder = "date=2024-10-04/host=gpu-7/session=s"
    assert [os.path.dirname(path) for path in visible(store)] == [
        f"{folder}/type={table}" for table in ("kernel", "name", "session_start")
    ]
    found = plain(
        store,
        "SELECT date, host, session, type, session_id, start_ns, duration_ns, stream_id"
        " FROM read_parquet({files}, hive_partitioning = true, hive_types_autocast = false)",
    )
    assert found == [("2024-10-04", "gpu-7", "s", "kernel", "s", day + 9, 10, None)]


@pytest.mark.parametrize(
    "session", ["../../up", "a/b=c", "", "ä€ %41", "x" * 400, "'; DROP TABLE loss; --", ".", "*?["]
)
def test_hostile_names_stay_in_their_place(opened: Open, session: str) -> None:
    store = opened()
    store.write([kernels((1, 1, 10), session=session), start(session, hostname="../../../etc")])
    assert count(store, session=session) == 1
    assert count(opened(), session=session) == 1
    for path in visible(store):
        assert path.split("/")[1] == "host=..%2F..%2F..%2Fetc"
        assert len(path.split("/")) == 5


@given(st.text(), st.text())
@settings(max_examples=examples(100))
def test_no_two_names_are_one(one: str, other: str) -> None:
    assert (escaped(one) == escaped(other)) == (one == other)
    assert len(escaped(one)) <= 255
    assert not set(escaped(one * 50)) & set("/*?[]='\"\\\0 ")


def test_days() -> None:
    assert date_of(None, -5, 0, 86_400 * 10**9) == "1970-01-02"
    assert date_of(None, 1 << 64) == NO_VALUE
    assert home(NO_VALUE, None, "a") == f"date={NO_VALUE}/host={NO_VALUE}/session=a"


def test_queries_cannot_leave_the_root(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "secret.csv").write_text("a\n1\n")
    store = opened()
    for what in (f"'{tmp_path}/secret.csv'", "read_csv('/etc/passwd')", f"read_text('{tmp_path}/secret.csv')"):
        with pytest.raises(duckdb.Error, match="disabled by configuration"):
            store.rows(f"SELECT * FROM {what}")
    with pytest.raises(duckdb.Error, match="locked"):
        store.rows("SET enable_external_access = true")


def test_no_store_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InputError, match="cannot be opened as an event store: Not a directory"):
        ParquetStore(str(tmp_path / "file" / "below"))
    with pytest.raises(InputError, match="Parquet"):
        ParquetStore(str(tmp_path / "what*"))
    (tmp_path / FOLDER / "writers" / "w").mkdir(parents=True)
    (tmp_path / FOLDER / "writers" / "w" / "000000000001.json").write_text('{"version": 99}')
    with pytest.raises(InputError, match="newer gpuflight"):
        ParquetStore(str(tmp_path))
    (tmp_path / FOLDER / "writers" / "w" / "000000000001.json").write_text('{"vers')
    with pytest.raises(InputError, match="no commit of an event store"):
        ParquetStore(str(tmp_path))


# --- upkeep --------------------------------------------------------------------------------------------------------


def test_small_files_become_one_and_the_rows_stay(opened: Open) -> None:
    now = [10 * DAY_NS]
    store, other = opened(wall_ns=lambda: now[0]), opened(wall_ns=lambda: now[0])
    for number in range(MERGE_AT):
        store.write([kernels((number, 1, 10), batch_id=number), names((1, f"v{number}"), (number + 2, "x"))])
    assert len(visible(store)) == 2 * MERGE_AT
    other.records.fleet.refresh()
    assert store.maintain() == 2
    assert len(visible(store)) == 2
    store.write([kernels((100, 1, 10), batch_id=100)])
    assert store.maintain() == 0  # too few while it runs
    now[0] += HOUR_NS
    received_ns = store.session("s").received_ns  # type: ignore[union-attr]
    assert store.maintain() == 1
    assert store.session("s").received_ns == received_ns  # type: ignore[union-attr]
    assert len(visible(store)) == 2
    assert store.maintain() == 0
    for reader in (store, other, opened()):  # the second one still believes in files that are gone
        assert count(reader) == MERGE_AT + 1
        assert count(reader, "name") == MERGE_AT + 1
        found = reader.session("s")
        assert found is not None
        sql = f"SELECT text FROM {reader.relation('name', [found]).sql} WHERE id = 1"
        assert reader.rows(sql) == [{"text": f"v{MERGE_AT - 1}"}]
        assert reader.write([kernels((0, 1, 10), batch_id=0)]).rows == 0
    rows = plain(store, "SELECT start_ns FROM read_parquet({files})")
    assert rows == sorted(rows)


def test_who_reads_while_files_are_merged_sees_each_row_once(opened: Open) -> None:
    writer, reader = opened(), opened()
    writer.write([kernels((0, 1, 1), batch_id=0)])
    reader.records.fleet.refresh()
    counts: list[int] = []
    over = threading.Event()
    failed: list[Exception] = []

    def read() -> None:
        try:
            while not over.is_set():
                counts.append(count(reader))
            reader.records.fleet.refresh()
            counts.append(count(reader))
        except Exception as error:  # noqa: BLE001 - told below
            failed.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    for number in range(1, 4 * MERGE_AT):
        writer.write([kernels((number, 1, 1), batch_id=number)])
        if number % MERGE_AT == MERGE_AT - 1:
            assert writer.maintain() == 1
            writer.records.fleet.snapshot()
    over.set()
    thread.join()
    assert failed == []
    assert counts == sorted(counts)
    assert counts[-1] == 4 * MERGE_AT


def test_files_of_other_versions_are_read(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that did not know a column yet, and one that knows a column more."""
    now = [10 * DAY_NS]
    store = opened(wall_ns=lambda: now[0])
    known = parquet_files.columns_of
    regs = kernels((1, 1, 10), batch_id=1)
    regs.columns["num_regs"] = np.array([32])
    with monkeypatch.context() as older:
        older.setattr(parquet_files, "columns_of", lambda table: [c for c in known(table) if c[0] != "num_regs"])
        parquet_files.layout_of.cache_clear()
        store.write([kernels((0, 1, 10), batch_id=0)])
    parquet_files.layout_of.cache_clear()
    store.write([regs])
    with monkeypatch.context() as newer:
        newer.setattr(parquet_files, "columns_of", lambda table: [*known(table), ("colour", "VARCHAR")])
        parquet_files.layout_of.cache_clear()
        store.write([kernels((2, 1, 10), batch_id=2), names((1, "gemm"))])
    parquet_files.layout_of.cache_clear()
    store.write([kernels((3, 1, 10), session="other")])
    expected = [(0, None), (1, 32), (2, None), (3, None)]
    for _ in range(2):
        found = [store.session(name) for name in ("s", "other")]
        relation = store.relation("kernel", found).sql  # type: ignore[arg-type]
        rows = store.rows(f"SELECT * FROM {relation} ORDER BY start_ns")
        assert [(row["start_ns"], row["num_regs"]) for row in rows] == expected
        assert "colour" not in rows[0]
        assert store.rows(f"SELECT text FROM {store.relation('name', [found[0]]).sql}") == [{"text": "gemm"}]  # type: ignore[list-item]
        now[0] += HOUR_NS
        store.maintain()
    assert len(visible(store)) == 5  # none was merged: what the newer one knew would be gone
    files = plain(store, "SELECT count(*) FROM read_parquet({files}, union_by_name = true) WHERE colour IS NULL")
    assert files == [(4,)]


def test_a_session_moves_to_where_it_belongs_when_that_is_known(opened: Open) -> None:
    now = [10 * DAY_NS]
    store = opened(wall_ns=lambda: now[0])
    store.write([kernels((9 * DAY_NS, 1, 10))])
    store.write([start(hostname="n1", time_ns=8 * DAY_NS)])
    assert visible(store)[0].startswith(f"date=1970-01-10/host={NO_VALUE}/")
    now[0] += HOUR_NS
    store.maintain()
    assert [os.path.dirname(path) for path in visible(store)] == [
        f"date=1970-01-09/host=n1/session=s/type={table}" for table in ("kernel", "session_start")
    ]
    assert os.listdir(store.folder) and not os.path.exists(os.path.join(store.folder, "date=1970-01-10"))
    assert count(store) == 1


def test_a_snapshot_tells_what_the_commits_told(opened: Open) -> None:
    store, behind = opened(), opened()
    for number in range(5):
        store.write([kernels((number, 1, 10), batch_id=number), start(hostname="n1")], Source("f", number, number + 1))
    assert store.records.fleet.snapshot()
    log = Path(store.folder, FOLDER)
    assert [path.suffix for path in log.glob("writers/*/*.json")] == []
    store.write([kernels((5, 1, 10), batch_id=5)], Source("f", 5, 6))
    for reader in (behind, opened()):
        reader.records.fleet.refresh()
        assert count(reader) == 6
        assert reader.records.position("f") == 6
        assert reader.write([kernels((2, 1, 10), batch_id=2)]).ledger.count("repeated_batch") == 1
        assert reader.session("s").hostname == "n1"  # type: ignore[union-attr]
    store.records.fleet.refresh()
    store.remove([store.session("s")])  # type: ignore[list-item]
    store.records.fleet.snapshot()
    behind.records.fleet.refresh()
    assert behind.session("s") is None


def test_folders_of_writers_that_are_gone_go_with_the_next_snapshot(opened: Open) -> None:
    for number in range(3):
        store = opened()
        store.write([kernels((number, 1, 10), batch_id=number)])
        (Path(store.records._log.tmp) / "part-half-written.parquet").write_bytes(b"PAR1")
        store.close()
    last, alive = opened(), opened()
    alive.write([kernels((9, 1, 10), batch_id=9)])
    last.maintain()
    writers = os.listdir(Path(last.folder, FOLDER, "writers"))
    assert sorted(writers) == sorted(store.records._log.writer for store in (last, alive))
    assert count(opened()) == 4


def test_age_size_and_a_sessions_own_rule(opened: Open) -> None:
    now = [100 * DAY_NS]
    store = opened(retention=RetentionSettings(max_age_days=30), wall_ns=lambda: now[0])
    other = opened(wall_ns=lambda: now[0])
    for name, days in (("short", 1.0), ("rule", None), ("ever", 0.0)):
        store.write([kernels((1, 1, 10), session=name)])
        store.catalogue.set_retention(store.session(name).session_no, days)  # type: ignore[union-attr]
    now[0] += 2 * DAY_NS
    assert store.enforce_retention() == 1
    assert store.session("short") is None
    now[0] += 40 * DAY_NS
    assert store.enforce_retention() == 1
    other.records.fleet.refresh()
    assert [session.session_id for session in other.catalogue.find()[0]] == ["ever"]
    assert {path.split("/")[2] for path in visible(store)} == {"session=ever"}
    assert other.write([kernels((1, 1, 10), session="rule")]).rows == 1  # forgotten with its batch numbers
    store.records.fleet.refresh()
    now[0] += 1
    store.retention = RetentionSettings(max_age_days=0, max_bytes=1)
    assert store.enforce_retention() == 1  # what is kept for ever stays
    assert [session.session_id for session in store.catalogue.find()[0]] == ["ever"]


def test_a_session_that_was_deleted_elsewhere_may_come_again(opened: Open) -> None:
    one, two = opened(), opened()
    one.write([kernels((1, 1, 10))], Source("f", 0, 10, session_id="s"))
    two.records.fleet.refresh()
    two.remove([two.session("s")])  # type: ignore[list-item]
    assert one.write([kernels((1, 1, 10))], Source("f", 0, 10, session_id="s")).rows == 1
    two.records.fleet.refresh()
    assert (count(one), count(two), count(opened())) == (1, 1, 1)


# --- crashes -------------------------------------------------------------------------------------------------------

_WRITER = textwrap.dedent(
    """
    import sys
    import numpy as np
    from gpuflight.events.batch import Batch
    from gpuflight.events.store import Source
    from gpuflight.events.store import parquet
    parquet._SNAPSHOT_AFTER = 3
    store = parquet.ParquetStore(sys.argv[1], threads=1, upkeep_interval_s=0.05)
    for number in range((store.records.position("f") or 0) + 1, 10_000):
        rows = 3000
        columns = {"start_ns": np.arange(rows) + number * rows, "kernel_id": np.full(rows, number)}
        batch = Batch("kernel", "s", rows, columns, "kernel_event_batch", number)
        store.write([batch], Source("f", number - 1, number))
        print(number, flush=True)
    """
)


def check_whole(store: ParquetStore, acknowledged: int) -> int:
    position = store.records.position("f") or 0
    assert position >= acknowledged
    found = store.session("s")
    if position:
        assert found is not None
        relation = store.relation("kernel", [found]).sql
        rows = store.rows(f"SELECT kernel_id, count(*) AS n FROM {relation} GROUP BY 1 ORDER BY 1")
        assert [(row["kernel_id"], row["n"]) for row in rows] == [(n, 3000) for n in range(1, position + 1)]
        seen = plain(store, "SELECT kernel_id, count(*) FROM read_parquet({files}) GROUP BY 1 ORDER BY 1")
        assert seen == [(n, 3000) for n in range(1, position + 1)]
    return position


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
        store = ParquetStore(folder, upkeep_interval_s=0)
        try:
            check_whole(store, acknowledged)
        finally:
            store.close()


_BREAKING = textwrap.dedent(
    """
    import os, sys
    left = int(sys.argv[2])

    def counted(call):
        def instead(*arguments, **named):
            global left
            left -= 1
            if left == 0:
                os._exit(9)
            return call(*arguments, **named)
        return instead

    import numpy as np
    from gpuflight.events.batch import Batch
    from gpuflight.events.store import Source
    from gpuflight.events.store.parquet import ParquetStore
    store = ParquetStore(sys.argv[1], threads=1, upkeep_interval_s=0)
    for name in ("rename", "fsync", "unlink", "makedirs", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    for number in range((store.records.position("f") or 0) + 1, 10):
        rows = 3000
        columns = {"start_ns": np.arange(rows) + number * rows, "kernel_id": np.full(rows, number)}
        batch = Batch("kernel", "s", rows, columns, "kernel_event_batch", number)
        store.write([batch], Source("f", number - 1, number))
        print(number, flush=True)
    store.maintain()
    store.records.fleet.snapshot()
    print("done", flush=True)
    """
)


@pytest.mark.parametrize("step", [1, 2, 6, 7, 8, 9, 10, 66, 67, 70, 71, 72, 73, 74, 75, 83, 92, 94, 95, 97, 101])
def test_it_may_end_before_any_step(tmp_path: Path, step: int) -> None:
    """Steps 1 to 10 are the first write, 67 to 91 the merging of files, then comes the snapshot."""
    folder = str(tmp_path / "store")
    done = subprocess.run(
        [sys.executable, "-c", _BREAKING, folder, str(step)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 9, done.stderr
    told = [int(word) for word in done.stdout.split() if word != "done"]
    store = ParquetStore(folder, upkeep_interval_s=0)
    try:
        position = check_whole(store, max(told, default=0))
        for number in range(max(position, 1), position + 2):  # its sender did not hear of the last one, and goes on
            rows = 3000
            columns = {"start_ns": np.arange(rows) + number * rows, "kernel_id": np.full(rows, number)}
            batch = Batch("kernel", "s", rows, columns, "kernel_event_batch", number)
            store.write([batch], Source("f", number - 1, number))
        store.maintain()
        check_whole(store, position + 1)
        assert len(os.listdir(Path(folder, FOLDER, "writers"))) == 1
    finally:
        store.close()
