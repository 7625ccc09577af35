"""Records of a ring buffer out of its bytes, without a kernel."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from gpuflight.sources.bpf.ringbuf import _split

BUSY, DISCARDED = 1 << 31, 1 << 30


def written(size: int, flags: int, number: int) -> tuple[bytes, bytes]:
    """A record as the kernel lays it out, and its body."""
    body = bytes([number % 251]) * size
    return struct.pack("<II", size | flags, number) + body + bytes(-size % 8), body


def one_by_one(content: bytes, limit: int) -> tuple[list[bytes], int, int]:
    """What ``_split`` says, in the plainest way."""
    at, found = 0, []
    while at + 8 <= len(content) and len(found) < limit:
        length = int.from_bytes(content[at : at + 4], "little")
        size = length & ~(BUSY | DISCARDED)
        after = at + 8 + size + -size % 8
        if length & BUSY:
            break
        if after > len(content):
            return found, at, after - at
        if not length & DISCARDED:
            found.append(content[at + 8 : at + 8 + size])
        at = after
    return found, at, 0


@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 8, 8, 8, 8, 13, 40]), st.sampled_from([0] * 9 + [DISCARDED, BUSY]))),
    st.integers(1, 80),
    st.integers(0, 30),
)
def test_complete_records_are_taken_in_order(shapes: list[tuple[int, int]], limit: int, cut: int) -> None:
    whole = b"".join(written(size, flags, number)[0] for number, (size, flags) in enumerate(shapes))
    content = whole[: max(0, len(whole) - cut)]
    records: list[bytes] = []
    at, needed = _split(content, content, limit, records)
    assert (records, at, needed) == one_by_one(content, limit)


@given(st.lists(st.tuples(st.sampled_from([8, 40]), st.integers(1, 40)), max_size=6))
def test_long_runs_of_one_size_are_taken_whole(runs: list[tuple[int, int]]) -> None:
    sizes = [size for size, count in runs for _ in range(count)]
    content = b"".join(written(size, 0, number)[0] for number, size in enumerate(sizes))
    records: list[bytes] = []
    assert _split(content, content, 1000, records) == (len(content), 0)
    assert records == [written(size, 0, number)[1] for number, size in enumerate(sizes)]


def test_what_is_not_here_whole_is_told_with_what_it_needs() -> None:
    whole, _ = written(4000, 0, 1)
    records: list[bytes] = []
    assert _split(whole[:1000], whole[:1000], 10, records) == (0, 4008)
    assert records == []
    small, body = written(8, 0, 2)
    content = small + whole[:100]
    assert _split(content, content, 10, records) == (16, 4008)
    assert records == [body]


def test_the_body_is_of_the_second_copy() -> None:
    """The first copy may be older: it says only which records are complete."""
    old, _ = written(8, 0, 1)
    new, body = written(8, 0, 2)
    records: list[bytes] = []
    _split(old * 5, new * 5, 10, records)
    assert records == [body] * 5
