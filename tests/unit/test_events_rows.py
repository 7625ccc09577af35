"""Rows of a batch read at once are the rows read cell by cell, or are left to be read that way."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from gpuflight.events.batch import Batch
from gpuflight.events.format import rows as rows_module
from gpuflight.events.format.decoder import Decoder
from gpuflight.events.format.rows import integers

np = pytest.importorskip("numpy")

NAMES = ["dt_ns", "kernel_id", "stream_id", "duration_ns", "corr_id", "external_id", "new_column"]
EDGES = [0, 1, 9, 10, 99_999_999, 100_000_000, 10**16 - 1, 10**16, 2**63 - 1]


def line(text: str) -> bytes:
    event = {"type": "kernel_event_batch", "session_id": "s", "batch_id": 1, "base_time_ns": 10**18, "columns": NAMES}
    return json.dumps(event, separators=(",", ":")).encode()[:-1] + b',"rows":' + text.encode() + b"}\n"


def some_rows(chance: random.Random, count: int) -> list[list[int]]:
    def number() -> int:
        return chance.choice(EDGES) if chance.random() < 0.2 else chance.randrange(10 ** chance.randrange(1, 18))

    def row() -> list[int]:
        sign = chance.choice([-1, 1])
        return [sign * chance.randrange(10**9), 7, number(), number(), -number(), 2**64 - 1 - number() % 2, sign]

    return [row() for _ in range(count)]


def outcome(text: str, monkeypatch: pytest.MonkeyPatch, fewest: int) -> tuple[list[Any], dict[str, tuple[int, int]]]:
    monkeypatch.setattr(rows_module, "_FEWEST_BYTES", fewest)
    decoder = Decoder()
    batches: list[Batch] = decoder.feed(line(text))
    told = {entry.reason: (entry.count, entry.size_bytes) for entry in decoder.ledger}
    return [(b.table, b.batch_id, b.rows(), b.extra) for b in batches], told


@pytest.mark.parametrize("seed", range(4))
def test_at_once_as_cell_by_cell(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = some_rows(random.Random(seed), 200)
    text = json.dumps(rows, separators=(",", ":"))
    found = integers(text.encode(), len(NAMES))
    assert found is not None
    values, negative = found
    signed = [
        [-int(v) if n else int(v) for v, n in zip(*pair, strict=True)] for pair in zip(values, negative, strict=True)
    ]
    assert [list(row) for row in zip(*signed, strict=True)] == rows
    assert outcome(text, monkeypatch, 0) == outcome(text, monkeypatch, 1 << 40)


@pytest.mark.parametrize(
    "cell",
    [
        "-0",
        "007",
        "00",
        "1.0",
        "1e3",
        "null",
        '"5"',
        "true",
        "-",
        "--1",
        "1-2",
        "",
        "[1]",
        " 1",
        "18446744073709551615",
        "18446744073709551616",
        "9223372036854775808",
        "-9223372036854775808",
        "-9223372036854775809",
        "111111111111111111111",
        "1,2",
        ",",
    ],
)
@pytest.mark.parametrize("column", [0, 2, 5, 6])
def test_what_is_no_plain_integer(cell: str, column: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[str(v) for v in row] for row in some_rows(random.Random(9), 30)]
    rows[17][column] = cell
    text = "[" + ",".join("[" + ",".join(row) + "]" for row in rows) + "]"
    assert outcome(text, monkeypatch, 0) == outcome(text, monkeypatch, 1 << 40)


@pytest.mark.parametrize(
    "text", ["[[1,2]1,[3,4]]", "[[1,2],5[3,4]]", "[[1,2][3,4]]", "[[1,2],[3]]", "[]", "[[]]", "1", ""]
)
def test_brackets_must_be_those_of_rows(text: str) -> None:
    assert integers(text.encode(), 2) is None


def test_fields_may_come_after_the_rows_or_twice() -> None:
    whole = line(json.dumps(some_rows(random.Random(3), 400), separators=(",", ":")))
    for changed in (whole[:-2] + b',"later":[[1]]}\n', whole.replace(b'{"type"', b'{"rows":[[1,2]],"type"')):
        assert sum(b.count for b in Decoder().feed(changed) if b.table == "kernel") == 400
