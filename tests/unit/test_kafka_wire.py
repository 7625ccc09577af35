"""The rounds topic: rounds cut into messages and put together again, whatever happens to the messages in between."""

from __future__ import annotations

import gzip
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from gpuflight.subscribers.kafka_wire import (
    MESSAGE_OVERHEAD_BYTES,
    Assembler,
    Content,
    Encoding,
    Message,
    RoundMessage,
    cut,
    envelope,
)


def encode(data: bytes, encoding: Encoding) -> bytes:
    if encoding == "gzip":
        return gzip.compress(data, mtime=0)
    return zstandard.compress(data) if encoding == "zstd" else data


def cut_round(
    data: bytes,
    *,
    namespace: str,
    instance: str,
    number: int,
    time_ns: int,
    base: int | None,
    encoding: Encoding,
    max_message_bytes: int,
    trial: bool = False,
) -> list[Message]:
    content: Content = "graph" if base is None else "diff"
    around = envelope(namespace, instance, content, encoding, max_message_bytes, trial=trial)
    return cut(data, around, number, time_ns, base)


def messages_of(
    data: bytes = b'{"round":1}',
    *,
    namespace: str = "node1",
    instance: str = "a",
    number: int = 1,
    base: int | None = None,
    encoding: Encoding = "none",
    parts: int = 1,
    trial: bool = False,
) -> list[Message]:
    """A round in so many parts."""
    raw = encode(data, encoding)

    def cut_below(max_message_bytes: int) -> list[Message]:
        return cut_round(
            raw,
            namespace=namespace,
            instance=instance,
            number=number,
            time_ns=1_700_000_000_000_000_000 + number,
            base=base,
            encoding=encoding,
            max_message_bytes=max_message_bytes,
            trial=trial,
        )

    (whole,) = cut_below(10**9)
    texts = [(name, value) for name, value in whole.headers if name not in ("part", "parts")]
    overhead_bytes = MESSAGE_OVERHEAD_BYTES + len(whole.key) + sum(len(name) + len(value) for name, value in texts)
    found = cut_below(overhead_bytes + -(-len(raw) // parts))
    assert len(found) == parts
    return found


def feed(assembler: Assembler, messages: list[Message]) -> list[RoundMessage]:
    found = [assembler.add(m.key, m.headers, m.value) for m in messages]
    return [one for one in found if one is not None]


rounds = st.builds(
    lambda data, base, encoding, limit: (data, base, encoding, limit),
    st.binary(max_size=3000),
    st.none() | st.integers(0, 2**40),
    st.sampled_from(("none", "gzip", "zstd")),
    st.integers(800, 2500),
)


def cut_one(who: int, number: int, one: Any) -> list[Message]:
    data, base, encoding, limit = one
    return cut_round(
        encode(data, encoding),
        namespace=f"knoten-ü{who}",
        instance=f"run{who}",
        number=number,
        time_ns=number,
        base=base,
        encoding=encoding,
        max_message_bytes=limit,
    )


@given(one=rounds)
def test_any_cut_is_put_together_again_and_no_message_is_too_large(one: Any) -> None:
    data, base, _, limit = one
    messages = cut_one(1, 7, one)
    for message in messages:
        headers_bytes = sum(len(name) + len(value) for name, value in message.headers)
        assert len(message.key) + len(message.value) + headers_bytes < limit
    assembler = Assembler()
    (found,) = feed(assembler, messages)
    assert found == RoundMessage(
        namespace="knoten-ü1",
        instance="run1",
        number=7,
        time_ns=7,
        content="graph" if base is None else "diff",
        base=base,
        data=data,
    )
    assert assembler.held_bytes == 0 and assembler.held_back() is None


@given(
    producers=st.lists(st.lists(rounds, min_size=1, max_size=4), min_size=1, max_size=4),
    data=st.data(),
)
def test_producers_in_any_interleaving_with_repeats_and_losses(producers: Any, data: st.DataObject) -> None:
    """Each producer sends its rounds one after the other, some again, some with a part lost on the way. What is
    complete comes out once and in order; what is not is counted as lost."""
    lines: list[list[Message]] = []
    complete: list[list[int]] = []
    lost = 0
    for who, line in enumerate(producers):
        sent: list[Message] = []
        arrives: list[int] = []
        for number, one in enumerate(line, 1):
            messages = cut_one(who, number, one)
            fate = data.draw(st.sampled_from(("once", "twice", "cut short, then again", "a part lost")))
            if fate == "twice":
                messages = messages * 2
            elif fate == "cut short, then again":
                messages = messages[: data.draw(st.integers(0, len(messages)))] + messages
            elif fate == "a part lost":
                del messages[data.draw(st.integers(0, len(messages) - 1))]
                lost += bool(messages)
            if fate != "a part lost":
                arrives.append(number)
            sent += messages
        # A last round settles what is still open before it.
        sent += cut_one(who, 100, (b"end", None, "none", 1000))
        lines.append(sent)
        complete.append([*arrives, 100])
    assembler = Assembler()
    found: list[RoundMessage] = []
    while any(lines):
        line = data.draw(st.sampled_from([one for one in lines if one]))
        found += feed(assembler, [line.pop(0)])
    for who in range(len(producers)):
        assert [one.number for one in found if one.namespace == f"knoten-ü{who}"] == complete[who]
    assert assembler.counts.rounds == len(found)
    assert assembler.counts.lost == lost
    assert assembler.held_bytes == 0
    assert assembler.counts.malformed == assembler.counts.corrupt == 0


@given(
    key=st.none() | st.binary(max_size=8),
    headers=st.none()
    | st.lists(
        st.tuples(
            st.sampled_from(
                ("gpuflight", "instance", "round", "time_ns", "content", "base", "encoding", "part", "parts", "crc32")
            ),
            st.none()
            | st.sampled_from((b"1", b"0", b"-1", b"", b"graph", b"diff", b"none", b"zstd", b"\xff", b"9" * 30)),
        )
    ),
    value=st.none() | st.binary(max_size=20),
)
def test_no_message_makes_it_fail(key: Any, headers: Any, value: Any) -> None:
    assembler = Assembler()
    assert assembler.add(key, headers, value) is None
    counts = assembler.counts
    assert counts.messages == 1 == counts.foreign + counts.malformed + counts.corrupt + (assembler.held_back() == 0)


def test_parts_in_any_order_also_twice() -> None:
    messages = messages_of(b"abcdefghij" * 20, parts=4)
    assembler = Assembler()
    (found,) = feed(assembler, [messages[2], messages[0], messages[2], messages[3], messages[1]])
    assert found.data == b"abcdefghij" * 20
    assert assembler.counts.duplicates == 1
    assert feed(assembler, messages) == []
    assert assembler.counts.repeats == len(messages)


def test_two_tries_cut_differently_are_kept_apart() -> None:
    """The limit of a broker can change between two tries."""
    data = bytes(range(256)) * 4
    wide, narrow = messages_of(data, parts=2), messages_of(data, parts=5)
    assembler = Assembler()
    assert feed(assembler, [wide[0], *narrow[:-1]]) == []
    (found,) = feed(assembler, [narrow[-1]])
    assert found.data == data
    assert assembler.held_bytes == 0 and assembler.counts.lost == 0


def test_damage_is_seen_and_another_try_helps() -> None:
    good = messages_of(b"x" * 100, parts=2)
    bad = Message(good[1].key, good[1].headers, b"y" * len(good[1].value))
    assembler = Assembler()
    assert feed(assembler, [good[0], bad]) == []
    assert assembler.counts.corrupt == 1
    assert len(feed(assembler, good)) == 1


@pytest.mark.parametrize("encoding", ["none", "gzip", "zstd"])
def test_a_round_that_is_enormous_when_decoded_is_corrupt(encoding: Encoding) -> None:
    assembler = Assembler(max_round_bytes=100_000)
    assert feed(assembler, messages_of(bytes(100_001), encoding=encoding)) == []
    assert assembler.counts.corrupt == 1
    assert len(feed(assembler, messages_of(bytes(99_999), number=2, encoding=encoding))) == 1


def test_a_zstd_stream_that_does_not_say_its_size() -> None:
    def sized(count: int, number: int) -> list[Message]:
        writer = zstandard.ZstdCompressor(write_content_size=False).compressobj()
        raw = writer.compress(bytes(count)) + writer.flush()
        return cut_round(
            raw,
            namespace="n",
            instance="a",
            number=number,
            time_ns=0,
            base=None,
            encoding="zstd",
            max_message_bytes=10**6,
        )

    assembler = Assembler(max_round_bytes=100_000)
    (found,) = feed(assembler, sized(100_000, 1))
    assert found.data == bytes(100_000)
    assert feed(assembler, sized(10_000_000, 2)) == []
    assert assembler.counts.corrupt == 1


def test_memory_is_bounded_and_the_oldest_are_lost() -> None:
    assembler = Assembler(max_bytes=1000)
    for number in range(20):
        feed(assembler, messages_of(b"z" * 600, instance=f"run{number}", parts=2)[:1])
        assert assembler.held_bytes <= 1000
    assert assembler.counts.lost == 17
    assert len(feed(assembler, messages_of(b"z" * 600, instance="run19", parts=2)[1:])) == 1


def test_what_never_becomes_complete_is_lost_after_its_time() -> None:
    now = [0.0]
    assembler = Assembler(max_age_s=60.0, clock=lambda: now[0])
    first, *_ = messages_of(b"z" * 600, parts=2)
    assembler.add(first.key, first.headers, first.value, partition=3, offset=17)
    assert assembler.held_back(3) == 17 and assembler.held_back(0) is None
    now[0] = 61.0
    assert len(feed(assembler, messages_of(namespace="node2"))) == 1
    assert assembler.counts.lost == 1 and assembler.held_back(3) is None


def test_offsets_of_unfinished_rounds_hold_back() -> None:
    assembler = Assembler()
    one, two = messages_of(b"z" * 600, parts=2), messages_of(b"z" * 600, namespace="node2", parts=2)
    for offset, message in ((5, one[0]), (6, two[0]), (7, one[1])):
        assembler.add(message.key, message.headers, message.value, offset=offset)
    assert assembler.held_back() == 6
    assembler.add(two[1].key, two[1].headers, two[1].value, offset=8)
    assert assembler.held_back() is None


def test_a_partition_that_is_read_again_gives_its_rounds_again() -> None:
    assembler = Assembler()
    messages = messages_of(b"z" * 600, parts=2)
    assert len(feed(assembler, messages)) == 1
    feed(assembler, messages_of(b"z" * 600, number=2, parts=2)[:1])
    assembler.forget(0)
    assert assembler.held_bytes == 0 and assembler.counts.lost == 0
    assert len(feed(assembler, messages)) == 1


def test_what_is_remembered_of_the_past_is_bounded() -> None:
    assembler = Assembler(max_remembered=2)
    for number in range(5):
        assert len(feed(assembler, messages_of(number=number))) == 1
    assert feed(assembler, messages_of(number=4)) == []
    assert len(feed(assembler, messages_of(number=0))) == 1


def test_trials_and_strangers_are_passed_over() -> None:
    assembler = Assembler()
    assert feed(assembler, messages_of(trial=True)) == []
    assert assembler.add(b"k", [("gpuflight", b"2")], b"") is None
    assert assembler.add(b"k", None, b"") is None
    assert (assembler.counts.trials, assembler.counts.foreign, assembler.counts.rounds) == (1, 2, 0)


def test_no_room_is_told() -> None:
    with pytest.raises(ValueError, match="no room"):
        cut_round(
            b"x", namespace="n", instance="a", number=1, time_ns=1, base=None, encoding="none", max_message_bytes=500
        )
    with pytest.raises(ValueError, match="would be"):
        cut_round(
            bytes(20_000_000),
            namespace="n",
            instance="a",
            number=1,
            time_ns=1,
            base=None,
            encoding="none",
            max_message_bytes=MESSAGE_OVERHEAD_BYTES + 150,
        )
