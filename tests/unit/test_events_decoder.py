"""Decoder of log lines: exact, complete, and it raises for nothing."""

from __future__ import annotations

import json
import random
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.unit.gpufl_files import (
    CLEAN,
    COLUMNS,
    GEN,
    START_NS,
    counts,
    decode,
    detail,
    kernels,
    line,
    losses,
    naive,
    read,
    rows,
    shutdown,
    start,
)

from gpuflight.events.format.decoder import Decoder
from gpuflight.events.format.lines import Lines
from gpuflight.events.ledger import Ledger, Place
from gpuflight.events.names import text_id
from gpuflight.events.tables import TABLES

pytest.importorskip("numpy")

U64 = (1 << 64) - 1
I64 = (1 << 63) - 1


# --- every type ------------------------------------------------------------------------------------------------------


def test_every_type_of_the_newest_generation_becomes_rows_of_its_table() -> None:
    batches, ledger = read(CLEAN)
    assert not losses(ledger)
    found = counts(batches)
    unseen = {"segment_start", "segment_end", "run_end", "kernel_start", "kernel_end", "unknown"}
    assert set(TABLES) - set(found) == unseen | {"source_file", "disassembly", "ptx"}
    for batch in batches:
        table = TABLES[batch.table]
        assert set(batch.columns) <= {column.name for column in table.columns}
        assert all(len(column) == batch.count for column in batch.columns.values())
        for column in table.columns:
            if column.name in batch.columns:
                values = batch.columns[column.name]
                kind = {"i64": "int64", "u64": "uint64", "f64": "float64"}.get(column.kind)
                assert isinstance(values, list) if kind is None else str(values.dtype) == kind, column


def test_values_of_the_newest_generation() -> None:
    batches, _ = read(CLEAN)
    first = next(row for row in rows(batches, "kernel") if row["corr_id"] == 2)
    assert first == {
        "start_ns": 1790000000005005892 + 8988,
        "kernel_id": 2,
        "stream_id": 9,
        "duration_ns": 23658,
        "corr_id": 2,
        "dyn_shared_bytes": 0,
        "num_regs": 104,
        "has_details": 1,
        "external_kind": 4,
        "external_id": 14695981039346656041,
    }
    names = {(r["dictionary"], r["id"]): r["text"] for r in rows(batches, "name")}
    assert names["kernel", 2] == 'λ_unicode_kernel "quoted"\\path'
    launched = next(row for row in rows(batches, "kernel_detail") if row["corr_id"] == 2)
    shape = next(row for row in rows(batches, "kernel_shape") if row["shape_id"] == launched["shape_id"])
    assert (shape["grid_x"], shape["block_x"], shape["occupancy"], shape["const_bytes"]) == (128, 256, 0.85, 352)
    assert names["user_scope", launched["scope_id"]] == "global|train_step"
    filled = rows(batches, "memset")[0]
    assert (filled["device_id"], filled["stream_id"], filled["duration_ns"], filled["bytes"]) == (0, 7, 800, 65536)
    allocated = rows(batches, "allocation")[0]
    assert (allocated["memory_op"], allocated["address"]) == (1, 139637976727552)
    assert rows(batches, "execution_signature")[0]["signature"] == 12345678901234567890
    counters = rows(batches, "kernel_perf_metric")[0]
    assert counters["sm_throughput_pct"] == 75.25
    assert "l1_hit_rate_pct" not in counters and "dram_read_bytes" not in counters, "-1 is not available"
    assert rows(batches, "pm_sample")[0]["value"] == 7217.67
    device = rows(batches, "device")[0]
    assert device["name"] == "Fixture GPU" and device["compute_major"]
    assert rows(batches, "deep_window")[0]["engines"] == '["pm_sampling"]'


@pytest.mark.parametrize("generation", sorted(path.name for path in GEN.iterdir()))
def test_kernels_of_every_generation_are_those_a_simple_reader_finds(generation: str) -> None:
    expected = []
    for event in naive(GEN / generation):
        if event["type"] == "kernel_event_batch":
            for row in event["rows"]:
                cells = dict(zip(event["columns"], row, strict=True))
                key = (event["base_time_ns"] + cells["dt_ns"], cells["duration_ns"], cells["corr_id"])
                expected.append((event["session_id"], *key, cells["stream_id"]))
        elif event["type"] == "kernel_event":
            key = (event["start_ns"], event["end_ns"] - event["start_ns"], event["corr_id"])
            expected.append((event["session_id"], *key, int(event["stream_id"])))
    batches, _ = read(GEN / generation)
    found = [
        (batch.session_id, row["start_ns"], row["duration_ns"], row["corr_id"], row["stream_id"])
        for batch in batches
        if batch.table == "kernel"
        for row in batch.rows()
    ]
    assert sorted(found) == sorted(expected)
    details = [e["corr_id"] for e in naive(GEN / generation) if e["type"] in ("kernel_detail", "kernel_event")]
    assert sorted(r["corr_id"] for r in rows(batches, "kernel_detail")) == sorted(details)


def test_lines_of_the_first_generation() -> None:
    batches, ledger = read(GEN / "v0-per-event-5cbcf7d")
    assert not losses(ledger)
    names = {(r["dictionary"], r["id"]): r["text"] for r in rows(batches, "name")}
    kernel = rows(batches, "kernel")[0]
    assert names["kernel", kernel["kernel_id"]] == "vectorAdd(int*)"
    assert (kernel["device_id"], kernel["duration_ns"], kernel["num_regs"]) == (0, 700, 32)
    sample = rows(batches, "profile_sample")
    assert {names["metric", s["metric_id"]] for s in sample} >= {"Long Scoreboard"}
    hexadecimal = line("profile_sample", ts_ns=1, pc_offset="0x1f0", metric_name="m", metric_value=3)
    (other,) = rows(decode(hexadecimal)[0], "profile_sample")
    assert (other["pc_offset"], other["sample_kind"], other["metric_value"]) == (0x1F0, 1, 3)
    device = rows(batches, "device")[0]
    assert (device["compute_major"], device["l2_cache_size_bytes"]) == (8, 3145728)
    reading = rows(batches, "device_metric")[0]
    assert (reading["gpu_util_pct"], reading["clock_sm_mhz"], reading["pcie_rx_bytes_per_s"]) == (40, 1500, 1024)
    assert {(s["event_type"], s["tag"]) for s in rows(batches, "scope")} == {(0, "train"), (1, "train")}
    oldest = line("kernel_start", ts_ns=5, corr_id=1, grid="(1,1,1)", uuid="x") + line(
        "kernel_end", ts_ns=9, corr_id=1, cuda_error="cudaSuccess"
    )
    batches, _ = decode(oldest)
    assert rows(batches, "kernel_start")[0]["time_ns"] == 5
    assert rows(batches, "kernel_end")[0]["cuda_error"] == "cudaSuccess"


# --- numbers ---------------------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.integers(-(1 << 40), 1 << 40), st.integers(0, 1 << 31), st.integers(-5, I64), st.integers(0, U64)),
        min_size=1,
        max_size=20,
    )
)
def test_integers_are_exact_whatever_their_size_and_sign(values: list[tuple[int, int, int, int]]) -> None:
    data = line(
        "kernel_event_batch",
        base_time_ns=START_NS,
        columns=["dt_ns", "kernel_id", "duration_ns", "external_id"],
        rows=[list(row) for row in values],
    )
    batches, ledger = decode(data)
    found = [
        (r["start_ns"] - START_NS, r["kernel_id"], r["duration_ns"], r["external_id"]) for r in rows(batches, "kernel")
    ]
    assert sorted(found) == sorted(values)
    assert not losses(ledger)


@pytest.mark.parametrize("value", [U64 + 1, 1 << 63, -(1 << 63) - 1, 10**400, 1e300, "x", [1], {"a": 1}, 0.5])
def test_what_is_no_number_of_the_column_is_unknown_and_counted(value: Any) -> None:
    batches, ledger = decode(kernels([[0, 1, 7, value, 1], [0, 1, 7, 5, 2]]))
    found = {r["corr_id"]: r for r in rows(batches, "kernel")}
    assert "duration_ns" not in found[1] and found[2]["duration_ns"] == 5
    assert losses(ledger) == {"bad_cell": 1}


def test_sums_beyond_the_range_of_times_are_unknown_not_wrapped() -> None:
    batches, ledger = decode(kernels([[I64, 1, 7, 5, 1]], base=START_NS))
    assert "start_ns" not in rows(batches, "kernel")[0]
    assert losses(ledger) == {"bad_cell": 1}


def test_numbers_that_only_look_plain_take_the_exact_way() -> None:
    """The parser of the fast way answers 2^64-1 for anything larger, and a negative for more than 2^63."""
    columns = ["dt_ns", "external_id"]
    for value, expected in ((U64, U64), (U64 + 5, None)):
        batches, _ = decode(line("kernel_event_batch", base_time_ns=1, columns=columns, rows=[[0, value]]))
        assert rows(batches, "kernel")[0].get("external_id") == expected
    for value in ("18446744073709551616", "9223372036854775808"):
        event = line("memset_event", start_ns=1, end_ns=2, corr_id=3, bytes=4)
        batches, ledger = decode(event + event.replace(b'"bytes":4', b'"bytes":' + value.encode()))
        assert [r.get("bytes") for r in rows(batches, "memset")] == [4, None]
        assert losses(ledger) == {"bad_cell": 1}


def test_numbers_too_large_among_lines_that_are_cut() -> None:
    allocated = line("memory_alloc_event", start_ns=1, end_ns=2, address=7, bytes=4, corr_id=1)
    for value, expected in ((U64, U64), (U64 + 1, None), (1 << 63, 1 << 63)):
        text = b'"address":' + str(value).encode()
        batches, ledger = decode(allocated * 2 + allocated.replace(b'"address":7', text) * 2)
        assert [r.get("address") for r in rows(batches, "allocation")] == [7, 7, expected, expected]
        assert losses(ledger) == ({} if expected else {"bad_cell": 2})
    decoder = Decoder()
    decoder.feed(detail(1) + detail(2))
    found = decoder.feed(detail(3) + detail(1 << 63) + detail(I64))
    assert sorted(r.get("corr_id", -1) for r in rows(found, "kernel_detail")) == [-1, 3, I64]
    assert losses(decoder.ledger) == {"bad_cell": 1}


# --- single events, one by one and together --------------------------------------------------------------------------


def _variants(seed: int) -> list[bytes]:
    """Lines of single events with everything that makes the fast way miss: other layouts, texts, signs, null."""
    chance = random.Random(seed)
    lines = []
    for i in range(60):
        event = {
            "type": chance.choice(
                ["memset_event", "memcpy_event", "kernel_event", "nvtx_marker_event", "kernel_detail"]
            ),
            "session_id": chance.choice(["s", "t"]),
            "name": chance.choice(["a", 'b"c', ',"corr_id":1', "λ"]),
            "user_scope": chance.choice(["", "global", "global|x"]),
            "start_ns": START_NS + chance.randrange(1000) if chance.random() < 0.9 else -5,
            "end_ns": START_NS + 1000 + chance.randrange(1000),
            "corr_id": chance.choice([i, str(i), 0]),
            "bytes": chance.randrange(1 << 40),
            "grid": f"({chance.randrange(1, 4)},1,1)",
        }
        if chance.random() < 0.3:
            event["future"] = chance.randrange(9)
        if chance.random() < 0.2:
            event["bytes"] = None
        if chance.random() < 0.2:
            event = dict(chance.sample(list(event.items()), len(event)))
        lines.append(json.dumps(event, separators=(",", ":") if chance.random() < 0.9 else None).encode() + b"\n")
    return lines


@given(st.integers(0, 10**6))
@settings(deadline=None)
def test_lines_together_say_what_they_say_one_by_one(seed: int) -> None:
    lines = _variants(seed)
    alone = [batch for item in lines * 2 for batch in Decoder().feed(item)]
    decoder = Decoder()
    together = decoder.feed(b"".join(lines)) + decoder.feed(b"".join(lines))

    def facts(batches: list[Any]) -> list[str]:
        found = []
        for batch in batches:
            extra = batch.extra or {}
            for i, row in enumerate(batch.rows()):
                more = {k: v[i] for k, v in extra.items()}
                if batch.table not in ("name", "kernel_shape"):
                    found.append(json.dumps([batch.table, batch.session_id, batch.clock, row, more], sort_keys=True))
        return sorted(found)

    assert facts(together) == facts(alone)
    assert decoder.lines == 2 * len(lines)
    told = {(b.session_id, r["dictionary"], r["id"]) for b in together if b.table == "name" for r in b.rows()}
    assert told == {(b.session_id, r["dictionary"], r["id"]) for b in alone if b.table == "name" for r in b.rows()}


def test_texts_and_shapes_come_before_what_uses_them_and_once() -> None:
    decoder = Decoder()
    first = decoder.feed(b"".join(detail(i) for i in range(100)))
    assert [b.table for b in first[:2]] == ["kernel_shape", "kernel_detail"]
    assert counts(first) == {"kernel_shape": 1, "kernel_detail": 100}
    assert counts(decoder.feed(detail(100) + detail(101, grid="(9,9,9)"))) == {"kernel_shape": 1, "kernel_detail": 2}


def test_blocks_of_details_are_one_batch_each_that_knows_its_place() -> None:
    decoder = Decoder()
    offset = 0
    for block in range(3):
        data = b"".join(detail(block * 50 + i) for i in range(50)) + kernels([[0, 1, 7, 5, block]], number=block)
        found = [b for b in decoder.feed(data, Place("f", "device", 1, offset)) if b.table == "kernel_detail"]
        assert [b.count for b in found] == ([50] if block else [1, 49]), (
            "the first line is what the others are known by"
        )
        assert found[0].place.offset == offset and found[-1].place.offset == (offset if block else len(detail(0)))
        assert [r["corr_id"] for b in found for r in b.rows()] == list(range(block * 50, block * 50 + 50))
        offset += len(data)
    assert decoder.lines == 153


def test_ids_of_inline_texts_need_no_state_and_are_exact_in_doubles() -> None:
    assert text_id("") == 0
    assert text_id("a") == text_id("a") != text_id("b")
    assert all(1 << 52 <= text_id(str(i)) < 1 << 53 for i in range(100))


# --- whatever the bytes ----------------------------------------------------------------------------------------------

_PIECES = [
    CLEAN.name.encode(),
    kernels([[0, 1, 7, 5, 1]]),
    kernels([[0, 1, 7, 5, 1]])[:-40],
    detail(1),
    detail(2)[:60],
    start(),
    shutdown(),
    line("memset_event", start_ns=1, end_ns=2, corr_id=3, bytes=4),
    b'{"type":"kernel_event_batch","session_id":"s","columns":[1],"rows":{}}\n',
    b'{"type":"kernel_event_batch","session_id":"s","columns":["dt_ns"],"rows":[[1],2,"x",null]}\n',
    b'{"type":"dictionary_update","session_id":"s","kernel_dict":[1],"x_dict":{"a":1,"2":"t"}}\n',
    b'{"type":"job_start","session_id":"s","devices":[1,{"id":{}}],"host":5}\n',
    b'{"type":"capture_capabilities","session_id":"s","capabilities":[1,{"feature":["x"]}]}\n',
    b'{"type":[],"session_id":"s"}\n',
    b"\xff\xfe\n",
    b"\xef\xbb\xbf",
    b"[" * 3000 + b"\n",
    b'{"type":"x","session_id":"\\ud800","v":NaN}\n',
    b"\r\n",
    b"\0",
    b"nan",
    b"1e999",
    b"null\n",
]


@given(st.lists(st.one_of(st.sampled_from(_PIECES), st.binary(max_size=30)), max_size=25), st.booleans())
@settings(deadline=None, max_examples=examples(300))
def test_no_bytes_whatever_raise(pieces: list[bytes], again: bool) -> None:
    decoder = Decoder("folder")
    for _ in range(1 + again):
        for batch in decoder.feed(b"".join(pieces)):
            assert all(len(column) == batch.count for column in batch.columns.values())


@given(st.data())
@settings(deadline=None, max_examples=examples(200))
def test_no_damage_to_a_real_file_raises(data: st.DataObject) -> None:
    text = b"".join(json.dumps(e, separators=(",", ":")).encode() + b"\n" for e in _CLEAN_EVENTS)
    damaged = bytearray(text)
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    decoder = Decoder()
    for batch in decoder.feed(bytes(damaged)):
        assert all(len(column) == batch.count for column in batch.columns.values())


_CLEAN_EVENTS = [event for event in naive(CLEAN) if event["type"] != "dictionary_update"][:60]


@given(st.lists(st.integers(0, 400), max_size=30), st.integers(20, 300))
def test_lines_put_together_from_any_chunks_are_those_of_the_whole(cuts: list[int], limit: int) -> None:
    data = b"".join(bytes([65 + i % 26]) * (i * 7 % 90) + b"\n" for i in range(12)) + b"tail"
    edges = sorted({min(c, len(data)) for c in cuts} | {0, len(data)})
    ledger = Ledger()
    lines = Lines(Place("f", "device", 1, 0), ledger, limit)
    found, offsets = [], []
    for a, b in pairwise(edges):
        got, place = lines.push(data[a:b])
        if got:
            found.append(got)
            offsets.append(place.offset)
            assert data[place.offset : place.offset + len(got)] == got
    rest, place = lines.rest()
    whole = data.splitlines(keepends=True)
    kept = b"".join(found).splitlines(keepends=True)
    assert set(kept) <= set(whole)
    skipped = sum(e.size_bytes for e in ledger)
    assert len(b"".join(found)) + len(rest) + skipped == len(data)
    if limit >= 90:
        assert kept == whole[:-1] and rest == b"tail"


def test_missing_numpy_is_one_line_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from gpuflight.errors import MissingExtra

    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(MissingExtra, match=re.escape("pip install 'gpuflight[events]'")):
        decode(kernels([[0, 1, 7, 5, 1]]))


def test_columns_constant_is_what_clients_wrote_first() -> None:
    batches, _ = decode(kernels([[3, 1, 7, 5, 1]]))
    assert list(batches[0].columns) == ["start_ns", *COLUMNS[1:]]


@pytest.mark.parametrize(
    "text",
    [
        '{"type":"kernel_event_batch","session_id":"s","columns":["dt_ns","kernel_id"],"rows":[[1,2]],"base_time_ns":5}',
        '{"type":"kernel_event_batch","session_id":"s","base_time_ns":5,"columns":["dt_ns","kernel_id"],'
        '"rows":[[1,2]],"version":[[3]]}',
        '{"type":"kernel_event_batch","session_id":"s","base_time_ns":5,"columns":["dt_ns","kernel_id"],'
        '"rows":[[1,"2"]]}',
        '{"type":"kernel_event_batch","session_id":"s","base_time_ns":5,"columns":["dt_ns","kernel_id"],'
        '"rows":[[1, 2]]}',
        '{"rows":[[1,2]],"columns":["dt_ns","kernel_id"],"base_time_ns":5,"session_id":"s","type":"kernel_event_batch"}',
    ],
)
def test_batches_may_be_laid_out_in_any_way(text: str) -> None:
    batches, ledger = decode(text.encode())
    assert rows(batches, "kernel") == [{"start_ns": 6, "kernel_id": 2}]
    assert not losses(ledger)


@pytest.mark.parametrize(
    "text", ["[[1,,2]]", "[[,2]]", "[[1,]]", "[[1,2]", "[1,2]]", "[[1,2]],[[1,2]]", "[[1][2]]", "[[--1,2]]"]
)
def test_rows_that_only_look_plain_are_refused(text: str) -> None:
    written = kernels([["?"]], columns=["dt_ns", "kernel_id"]).replace(b'[["?"]]', text.encode())
    batches, ledger = decode(written)
    assert not rows(batches, "kernel") and ledger.lost >= 1
