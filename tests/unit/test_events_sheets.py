"""Lines found by the block say what they say when each is read alone, whatever was done to their bytes."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest

from gpuflight.events.batch import Batch
from gpuflight.events.format.decoder import Decoder
from gpuflight.events.format.digits import columns, parse, words
from gpuflight.events.format.guess import Guess
from gpuflight.events.format.sheets import Block
from gpuflight.events.ledger import Place

np = pytest.importorskip("numpy")

OF_LINES = ("not_json", "not_object", "no_type", "no_session", "unknown_type", "invalid_utf8", "not_finite")
"""Reasons of which each line has its own: others are told once for what repeats."""
START_NS = 1_790_000_000_000_000_000


def encoded(event: dict[str, Any]) -> bytes:
    return json.dumps({"version": 1, **event, "session_id": "s"}, separators=(",", ":")).encode() + b"\n"


def detail(corr_id: int, kernel: int) -> bytes:
    return encoded(
        {
            "type": "kernel_detail",
            "pid": 9,
            "corr_id": corr_id,
            "grid": f"({kernel % 7 + 1},1,1)",
            "occupancy": kernel / 64,
            "user_scope": f"global|step_{kernel // 3}",
        }
    )


def launch(number: int, kernel: int) -> bytes:
    start = START_NS + number * 9000
    return encoded(
        {
            "type": "kernel_event",
            "name": f"kernel_{kernel}(int*)",
            "device_id": "0",
            "stream_id": "7",
            "start_ns": start,
            "end_ns": start + 700 + number,
            "api_start_ns": start - 300,
            "api_exit_ns": start - 100,
            "grid": f"({kernel},1,1)",
            "num_regs": 32,
            "corr_id": number,
            "scope_depth": kernel % 2,
        }
    )


def rows_of(batches: list[Batch]) -> Counter[str]:
    found: Counter[str] = Counter()
    for batch in batches:
        extra = batch.extra or {}
        for i, row in enumerate(batch.rows()):
            found[
                repr((batch.table, batch.clock, sorted(row.items()), sorted((k, v[i]) for k, v in extra.items())))
            ] += 1
    return found


def damaged(line: bytes, chance: random.Random) -> bytes:
    """A line of which something is another way: bytes, numbers, order; often still JSON."""
    how = chance.randrange(7)
    at = chance.randrange(len(line) - 1)
    if how == 0:
        return line[:at] + bytes([chance.randrange(32, 127)]) + line[at + 1 :]
    if how == 1:
        return line[:at] + line[at + 1 :]
    if how == 2:
        return line[:at] + line[at : at + 9] + line[at:]
    if how == 3:
        return line.replace(
            b'"corr_id":', b'"corr_id":' + chance.choice([b"0", b"-", b" ", b"1.", b"99999999999999999"])
        )
    if how == 4:
        return line.replace(b'"corr_id":', b'"corr_id":' + b"1" * chance.randrange(14, 24))
    if how == 5:
        return line[:at] + chance.choice([b"\n", b"\n\n", b"\r\n", b",", b"}\n"]) + line[at:]
    return chance.choice([b"{}\n", b"\n", encoded({"type": "unheard_of", "corr_id": at}), b"shut\n"])


def read(data: bytes, pieces: list[int]) -> tuple[Counter[str], dict[str, tuple[int, int]], int]:
    decoder = Decoder()
    batches: list[Batch] = []
    offset = 0
    for end in [*pieces, len(data)]:
        batches += decoder.feed(data[offset:end], Place("f", "device", 1, offset))
        offset = end
    told = {entry.reason: (entry.count, entry.size_bytes) for entry in decoder.ledger if entry.reason in OF_LINES}
    return rows_of(batches), told, decoder.lines


@pytest.mark.parametrize("seed", [*range(6), 14, 16])
def test_by_the_block_as_one_by_one(seed: int) -> None:
    chance = random.Random(seed)
    lines = []
    for number in range(6000):
        kernel = chance.randrange(40)
        line = detail(number, kernel) if number % 3 else launch(number * 10 ** (seed % 6), kernel)
        lines.append(damaged(line, chance) if seed and chance.random() < 0.02 else line)
    data = b"".join(lines)
    ends = [i + 1 for i in range(len(data)) if data[i] == 10]
    by_block = read(data, [e for i, e in enumerate(ends) if i % 2000 == 1999])
    in_groups = read(data, [e for i, e in enumerate(ends) if i % 20 == 19])
    assert by_block == in_groups
    assert in_groups == read(data, ends)


def test_most_lines_are_found_by_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ([b"".join(f(i, i % 40) for i in range(n, n + 900) for f in (detail, launch))] for n in (1, 2000))
    decoder = Decoder()
    decoder.feed(first[0])
    monkeypatch.setattr(Decoder, "_read", lambda *_: pytest.fail("a line was read"))
    batches = decoder.feed(second[0])
    assert sum(b.count for b in batches if b.table == "kernel") == 900
    assert sum(b.count for b in batches if b.table == "kernel_detail") == 1800  # launches tell their shape too
    assert all(b.place.offset >= 0 for b in batches)


def test_what_comes_after_a_shutdown_is_told_apart_in_a_block() -> None:
    decoder = Decoder()
    decoder.feed(b"".join(detail(i, i % 4) for i in range(400)), Place("f", "device", 1, 0))
    end = encoded({"type": "shutdown", "ts_ns": START_NS})
    block = b"".join(detail(i, i % 4) for i in range(400)) + end + b"".join(detail(i, i % 4) for i in range(300))
    decoder.feed(block, Place("f", "device", 1, 0))
    assert decoder.ledger.count("after_shutdown") == 300


def test_more_heads_than_are_kept_lose_nothing() -> None:
    lines = [detail(i, i % 3).replace(b'"pid":9', b'"pid":%d' % (i % 20)) for i in range(400)]
    once, twice = Decoder(), Decoder()
    expected = rows_of([batch for line in lines * 2 for batch in once.feed(line)])
    told = twice.feed(b"".join(lines)) + twice.feed(b"".join(lines))
    assert rows_of([b for b in told if b.table == "kernel_detail"]) == Counter(
        {row: n for row, n in expected.items() if "'kernel_detail'" in row}
    )
    assert once.lines == twice.lines == 800


def test_numbers_are_exact_or_none() -> None:
    chance = random.Random(1)
    texts = [str(chance.randrange(10 ** chance.randrange(1, 23))).encode() for _ in range(3000)]
    texts += [b"0", b"00", b"01", b"", b"1a", b"/1", b"1:2", b"-5", b"12345678:012345678", b"1844674407370955161\xb5"]
    texts += [str(2**64 + n).encode() for n in range(-3, 3)] + [b"9" * n for n in range(1, 22)]
    data, ends = bytes(8), []
    for text in texts:
        data += text
        ends.append(len(data))
        data += b","
    values, good = parse(words(data), np.array(ends), np.array([len(t) for t in texts]))
    for text, value, is_number in zip(texts, values.tolist(), good.tolist(), strict=True):
        expected = text.isdigit() and (text == b"0" or text[:1] != b"0") and int(text) < 2**64
        assert is_number == expected and (not expected or value == int(text)), text


@pytest.mark.parametrize(
    "texts", [["7"] * 3, [str(2**64 - 1)] * 3, ["1", "22", "1234567890123"], ["12345678", "9", "0"]]
)
def test_columns(texts: list[str]) -> None:
    data, ends = bytes(8), []
    for text in texts:
        data += text.encode()
        ends.append(len(data))
        data += b","
    lengths = np.array([[len(t) for t in texts]])
    found = columns(data, np.array([ends]), lengths)
    assert found is not None and found[0].tolist() == [int(t) for t in texts]
    assert columns(data.replace(texts[0].encode(), b"0" * len(texts[0])), np.array([ends]), lengths) is None or (
        len(texts[0]) == 1
    )


@pytest.mark.parametrize("length", range(1, 23))
@pytest.mark.parametrize("alike", [0, 3, 11, 15])
def test_numbers_of_one_length(length: int, alike: int) -> None:
    """Also such as begin alike, among which something else may be."""
    chance = random.Random(length)
    texts = [
        b"7" * min(alike, length) + bytes(chance.choice(b"0123456789") for _ in range(length - alike))
        for _ in range(300)
    ]
    for before in (b"", bytes(30)):
        for wrong in (b"", b"/", b":", b"-", b" ", b"\xb5"):
            numbers = list(texts)
            if wrong:
                for i in range(0, 300, 7):
                    at = chance.randrange(length)
                    numbers[i] = numbers[i][:at] + wrong + numbers[i][at + 1 :]
            if alike and wrong:
                numbers = [wrong + text[1:] for text in numbers]
            data, ends = bytes(8) + before, []
            for text in numbers:
                data += text
                ends.append(len(data))
                data += b","
            values, good = parse(words(data), np.array(ends), np.full(300, length))
            for text, value, is_number in zip(numbers, values.tolist(), good.tolist(), strict=True):
                expected = text.isdigit() and (text == b"0" or text[:1] != b"0") and int(text) < 2**64
                assert is_number == expected and (not expected or value == int(text)), text


def test_guess_tells_texts_apart() -> None:
    texts = [f'{{"name":"kernel_{i}(int*)","start_ns":'.encode() for i in (*range(30), 111, 112, 1112)]
    data = b"".join(text + b"123}\n" for text in texts)
    block = Block(data)
    assert Guess(texts)(block.view, block.starts).tolist() == list(range(len(texts)))
    assert Guess(texts[:5])(block.view, block.starts[5:9]).tolist() == [-1, -1, -1, -1]
    alike = [b"abcdefgh", b"abcdefghi"]
    assert Guess(alike)(block.view, block.starts[:2]).tolist() == [-1, -1]


@pytest.mark.parametrize(
    "data", [b"x" * 20, b"\n" * 20, b"ab\ncd\n\n" * 4, b"a" * 300_000 + b"\n" + b"b" * 9, b"1234567\n" * 3]
)
def test_lines_of_a_block(data: bytes) -> None:
    block = Block(data)
    lines = [data[s:e] for s, e in zip(block.starts.tolist(), block.ends.tolist(), strict=True)]
    assert lines == (data[:-1] if data.endswith(b"\n") else data).split(b"\n")
