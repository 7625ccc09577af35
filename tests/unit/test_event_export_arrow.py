"""Tables and answers as Arrow IPC streams, read back by a reader of our own and, where it is installed, by PyArrow."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("duckdb")
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.unit import arrow_reader
from tests.unit.event_rows import both, fill
from tests.unit.gpufl_files import CLEAN, GEN

from gpuflight.errors import InputError
from gpuflight.events.export import arrow
from gpuflight.events.export.tables import QUERIES, columns_of, text_of
from gpuflight.events.files import find_sessions
from gpuflight.events.load import load_folders
from gpuflight.events.query.reader import Reader
from gpuflight.events.store import EventStore
from gpuflight.events.tables import TABLES

TYPES = {"BIGINT": "int64", "UBIGINT": "uint64", "DOUBLE": "float64", "VARCHAR": "large_utf8"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EventStore]:
    made = EventStore(str(tmp_path_factory.mktemp("events") / "store"), threads=1)
    load_folders(made, find_sessions(str(GEN)))
    yield made
    made.close()


def streamed(reader: Reader, what: str) -> bytes:
    assert isinstance(reader.store, EventStore)
    data = b"".join(arrow.arrow_stream(reader.store, reader.sessions, what))
    try:
        import pyarrow
    except ImportError:
        return data
    pyarrow.ipc.open_stream(data).read_all().validate(full=True)
    return data


def bag(rows: list[dict[str, Any]]) -> Counter[str]:
    return Counter(repr(sorted(row.items())) for row in rows)


@pytest.mark.parametrize("table", TABLES)
def test_every_table(store: EventStore, table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "ROWS_AT_ONCE", 10)
    reader = both(*(Reader(store, [session]) for session in store.catalogue.find()[0]))
    columns, rows, batches = arrow_reader.read(streamed(reader, table))
    assert columns == [(name, TYPES[kind]) for name, kind in columns_of(table)]
    lines = [json.loads(line) for line in b"".join(text_of(reader, table, "ndjson")).splitlines()]
    assert bag(rows) == bag(lines)
    if table == "kernel":
        assert batches >= len(rows) // 10


@pytest.mark.parametrize("query", QUERIES)
def test_every_answer(store: EventStore, query: str) -> None:
    session = store.session(CLEAN.name)
    assert session is not None
    reader = Reader(store, [session])
    columns, rows, _ = arrow_reader.read(streamed(reader, query))
    lines = [json.loads(line) for line in b"".join(text_of(reader, query, "ndjson")).splitlines()]
    assert len(rows) == len(lines)
    kinds = dict(columns)
    for row, line in zip(rows, lines, strict=True):
        assert row == {k: float(v) if kinds[k] == "float64" else v for k, v in line.items()}


cells = {
    "start_ns": st.integers(10**18, 10**18 + 99),
    "memory_op": st.none() | st.integers(-(2**63), 2**63 - 1),
    "address": st.none() | st.integers(0, 2**64 - 1),
    "device_id": st.none() | st.integers(0, 1),
}


@given(st.lists(st.fixed_dictionaries(cells), max_size=30))
@settings(max_examples=examples(30), deadline=None)
def test_unknown_and_extreme_numbers(store: EventStore, rows: list[dict[str, Any]]) -> None:
    reader = fill(store, allocation=rows)
    _, found, _ = arrow_reader.read(streamed(reader, "allocation"))
    told = [{k: v for k, v in row.items() if k in cells} for row in found]
    assert bag(told) == bag([{k: v for k, v in row.items() if v is not None} for row in rows])


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), max_size=12, unique=True))
@settings(max_examples=examples(30), deadline=None)
def test_any_text(store: EventStore, texts: list[str]) -> None:
    rows = [{"dictionary": "kernel", "id": n, "text": text} for n, text in enumerate(texts)]
    _, found, _ = arrow_reader.read(streamed(fill(store, name=rows), "name"))
    assert [(row["id"], row["text"]) for row in found] == list(enumerate(texts))


def test_what_there_is_not_is_refused(store: EventStore) -> None:
    with pytest.raises(InputError, match="there is no table"):
        streamed(fill(store), "nope")


def test_command(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    from gpuflight.cli import main

    assert main(["export", str(CLEAN), "--as", "arrow", "--table", "memset"]) == 0
    _, rows, _ = arrow_reader.read(capsysbinary.readouterr().out)
    assert len(rows) == 6 and {row["bytes"] for row in rows} == {65536}
