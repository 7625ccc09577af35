"""Rounds out of a topic into a store: whatever is repeated, moved or killed, the store ends at the newest round of each
namespace and never goes back; nothing that is no round stops the rest."""

from __future__ import annotations

import random
from collections import deque

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.fakes.topic import MemoryStore, StoreDown, cut_round, message, round_of

from gpuflight.errors import DeliveryError
from gpuflight.graph import Graph, nodes
from gpuflight.round_codec import encode_round, encode_round_diff
from gpuflight.server.consume.intake import Intake, Job
from gpuflight.server.consume.merge import Merger
from gpuflight.subscribers.kafka_wire import Assembler, Message, RoundMessage

PARTITIONS = 2


def arrived(number: int, *, base: int | None = None, instance: str = "i", time_ns: int = 0) -> RoundMessage:
    whole = None
    assembler = Assembler()
    for part in message("a", number, base=base, instance=instance, time_ns=time_ns):
        whole = assembler.add(part.key, part.headers, part.value)
    assert whole is not None
    return whole


FIVE = ("i", 5, 500)


@pytest.mark.parametrize(
    ("head", "given", "outcome"),
    [
        (None, arrived(5), "written"),
        (None, arrived(5, base=4), "waiting"),
        (FIVE, arrived(6), "written"),
        (FIVE, arrived(6, base=5), "written"),
        (FIVE, arrived(7, base=6), "waiting"),
        (FIVE, arrived(7, base=4), "waiting"),
        (FIVE, arrived(5), "duplicate"),
        (FIVE, arrived(5, base=4), "duplicate"),
        (FIVE, arrived(4), "older"),
        (FIVE, arrived(4, base=3), "older"),
        # Within a run the number counts, whatever the clock says.
        (FIVE, arrived(6, time_ns=100), "written"),
        (FIVE, arrived(1, instance="later", time_ns=501), "written"),
        (FIVE, arrived(6, base=5, instance="later", time_ns=501), "waiting"),
        (FIVE, arrived(700, instance="earlier", time_ns=499), "older"),
    ],
)
@pytest.mark.parametrize("held", [False, True])
def test_what_a_round_is_to_what_the_store_has(
    head: tuple[str, int, int] | None, given: RoundMessage, outcome: str, held: bool
) -> None:
    store = MemoryStore()
    merger = Merger(store.writer())
    if head is not None:
        instance, number, time_ns = head
        assert merger.take(arrived(number, instance=instance, time_ns=time_ns)) == "written"
    if not held:  # by one that has written nothing yet
        merger = Merger(store.writer())
    assert merger.take(given) == outcome


def test_graphs_are_held_within_a_bound_and_read_from_the_store_beyond_it() -> None:
    store = MemoryStore()
    merger = Merger(store.writer(), max_elements=2)
    flows = {name: [message(name, 1), *(message(name, n, base=n - 1) for n in range(2, 6))] for name in "abcd"}
    for step in range(5):
        for flow in flows.values():
            found = Assembler().add(flow[step][0].key, flow[step][0].headers, flow[step][0].value)
            assert found is not None and merger.take(found) == "written"
    assert len(merger._held) == 2


# --- what may be committed -------------------------------------------------------------------------------------------


def intake(partition: int = 0) -> Intake:
    made = Intake(Assembler())
    made.assign([partition])
    return made


def taken(into: Intake, offset: int, part: Message, partition: int = 0) -> Job | None:
    return into.take(partition, offset, part.key, part.headers, part.value)


def test_nothing_is_committed_past_the_first_part_of_what_is_not_written() -> None:
    into = intake()
    assert into.committable(0) is None
    whole, parts = message("a", 1), message("b", 1, parts=3)
    job = taken(into, 10, whole[0])
    assert job is not None and into.committable(0) == 10
    assert taken(into, 11, parts[0]) is None
    assert into.done(job) and into.committable(0) == 11
    assert taken(into, 12, parts[1]) is None and into.committable(0) == 11
    last = taken(into, 13, parts[2])
    assert last is not None and into.committable(0) == 11
    assert into.done(last) and into.committable(0) == 14


def test_rounds_that_end_out_of_order_are_committed_in_order() -> None:
    into = intake()
    first, second = taken(into, 0, message("a", 1)[0]), taken(into, 1, message("b", 1)[0])
    assert first and second
    into.done(second)
    assert into.committable(0) == 0
    into.done(first)
    assert into.committable(0) == 2


def test_what_belongs_to_another_is_not_done_by_us() -> None:
    into = intake()
    job = taken(into, 0, message("a", 1)[0])
    assert job and into.is_current(job)
    into.close([0])
    assert not into.is_current(job)  # no new write is begun …
    assert into.done(job) and into.committable(0) == 1  # … and one that was under way still counts
    into.assign([0])
    again = taken(into, 0, message("a", 1)[0])
    assert again is not None and into.committable(0) == 0  # read again: it is not taken for a repeat
    assert not into.done(job) and into.committable(0) == 0  # of the time before
    into.forget(0)
    assert taken(into, 1, message("a", 2)[0]) is None and into.partitions == []


def test_a_topic_that_begins_anew_is_read_from_there() -> None:
    into = intake()
    taken(into, 1000, Message(b"a", [], b""))
    assert into.committable(0) == 1001
    job = taken(into, 0, message("a", 1)[0])
    assert job is not None and into.committable(0) == 0


GARBAGE = [
    Message(b"a", [], b"\xff\x00"),
    Message(b"a", [("gpuflight", b"2"), ("instance", b"i"), ("round", b"1")], b"{}"),
    Message(b"\xff\xfe", message("a", 9)[0].headers, b"{}"),
    Message(b"a", message("a", 9)[0].headers, b"not what was summed"),
    Message(b"a", [(name, b"-1" if name == "round" else value) for name, value in message("a", 9)[0].headers], b""),
    Message(b"a", [(name, b"9" * 4000) for name, value in message("a", 9)[0].headers], b""),
]


@pytest.mark.parametrize("poison", GARBAGE, ids=["bytes", "version", "key", "sum", "number", "huge"])
def test_what_is_no_round_is_passed_over_and_counted(poison: Message) -> None:
    into = intake()
    assert taken(into, 0, poison) is None
    assert into.committable(0) == 1, "a message that can never be read must not hold the partition"
    counts = into.assembler.counts
    assert counts.foreign + counts.malformed + counts.corrupt == 1
    assert taken(into, 1, message("a", 1)[0]) is not None


# --- everything together ---------------------------------------------------------------------------------------------


class Sent:
    """What agents sent: per partition the messages, and per namespace the rounds that a faultless reader writes."""

    def __init__(self, seed: int, rounds: int) -> None:
        dice = random.Random(seed)
        self.logs: list[list[Message]] = [[] for _ in range(PARTITIONS)]
        self.expected: dict[str, list[tuple[str, int]]] = {}
        self.truth: dict[tuple[str, str, int], Graph] = {}
        flows = [self._agent(dice, name, rounds) for name in ("a", "b", "c")]
        while flow := [each for each in flows if each[1]]:
            name, parts = dice.choice(flow)
            log = self.logs[ord(name) % PARTITIONS]
            log.append(parts.popleft())
            if dice.random() < 0.1:
                log.append(dice.choice(GARBAGE))

    def _agent(self, dice: random.Random, name: str, rounds: int) -> tuple[str, deque[Message]]:
        flow: deque[Message] = deque()
        written = self.expected.setdefault(name, [])
        number, life, time_ns = 0, 0, 1
        before: Graph | None = None  # of the round before in this run
        there = False  # whether the store has that one
        graph = Graph([nodes.Process(pid=1, start=1)])
        for _ in range(rounds):
            time_ns += dice.randint(1, 5)
            if dice.random() < 0.15:
                life, number, before = life + 1, 0, None
            number += 1
            run = f"{name}{life}"
            graph = self.truth[(name, run, number)] = _changed(dice, graph)
            done = round_of(number, graph, before, time_ns)
            whole = before is None or dice.random() < 0.4
            parts = cut_round(
                encode_round(done) if whole else encode_round_diff(done),
                name, done, run, None if whole else number - 1, dice.choice((100_000, 1200)),
            )  # fmt: skip
            arrives = dice.random() < 0.85
            if dice.random() < 0.2 or not arrives:  # a try broke off
                flow.extend(parts[: dice.randint(0, len(parts) - 1)])
            for _ in range(0 if not arrives else 2 if dice.random() < 0.2 else 1):  # the answer to a try was lost
                flow.extend(parts)
            there = arrives and (whole or there)
            if there:
                written.append((run, number))
            before = graph
        return name, flow


def _changed(dice: random.Random, graph: Graph) -> Graph:
    found = {entity.pid: entity for entity in graph.of_kind(nodes.Process)}
    pid = dice.randint(1, 4)
    if dice.random() < 0.3:
        found.pop(pid, None)
    else:
        attributes = {dice.choice("xyz"): dice.randint(0, 9) for _ in range(2)}
        found[pid] = nodes.Process(pid=pid, start=1, attributes=attributes, metrics={"cpu_pct": dice.random()})
    return Graph(found.values())


class Consumer:
    """The parts of a consumer without its threads."""

    def __init__(self, sent: Sent, store: MemoryStore) -> None:
        self.sent, self.store = sent, store
        self.intake = Intake(Assembler())
        self.merger = Merger(store.writer())
        self.jobs: deque[Job] = deque()
        self.next: dict[int, int] = {}

    def own(self, partition: int, committed: int) -> None:
        self.intake.assign([partition])
        self.next[partition] = committed

    def read(self, count: int) -> None:
        for partition, log in enumerate(self.sent.logs):
            for _ in range(count if partition in self.next else 0):
                offset = self.next[partition]
                if offset == len(log):
                    break
                self.next[partition] = offset + 1
                job = taken(self.intake, offset, log[offset], partition)
                if job is not None:
                    self.jobs.append(job)

    def write(self, count: int) -> None:
        for _ in range(min(count, len(self.jobs))):
            job = self.jobs[0]
            if self.intake.is_current(job):
                try:
                    self.merger.take(job.message, job.term)
                except StoreDown:
                    return
                self.intake.done(job)
            self.jobs.popleft()

    def commit(self, committed: dict[int, int]) -> None:
        for partition in self.next:
            offset = self.intake.committable(partition)
            if offset is not None:
                committed[partition] = offset

    def leave(self, partition: int) -> None:
        self.intake.close([partition])
        self.intake.forget(partition)
        del self.next[partition]

    @property
    def finished(self) -> bool:
        return not self.jobs and all(offset == len(self.sent.logs[p]) for p, offset in self.next.items())


ACTIONS = st.one_of(
    st.tuples(st.just("read"), st.integers(0, 1), st.integers(1, 5)),
    st.tuples(st.just("read"), st.integers(0, 1), st.integers(1, 5)),
    st.tuples(st.just("write"), st.integers(0, 1), st.integers(1, 10)),
    st.tuples(st.just("commit"), st.integers(0, 1), st.just(0)),
    st.tuples(st.just("kill"), st.integers(0, 1), st.just(0)),
    st.tuples(st.just("move"), st.integers(0, 1), st.integers(0, PARTITIONS - 1)),
    st.tuples(st.just("lose"), st.integers(0, 1), st.integers(0, PARTITIONS - 1)),
    st.tuples(st.just("fail"), st.sampled_from((0, 1)), st.integers(1, 3)),
)


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(0, 2**32), st.integers(5, 25), st.lists(ACTIONS, min_size=20, max_size=80))
def test_the_store_ends_at_the_newest_round_and_never_goes_back(
    seed: int, rounds: int, actions: list[tuple[str, int, int]]
) -> None:
    sent = Sent(seed, rounds)
    store = MemoryStore(sent.truth)
    committed = dict.fromkeys(range(PARTITIONS), 0)
    owners = dict.fromkeys(range(PARTITIONS), 0)

    def begin(index: int) -> Consumer:
        made = Consumer(sent, store)
        for partition, owner in owners.items():
            if owner == index:
                made.own(partition, committed[partition])
        return made

    consumers = [begin(0), begin(1)]
    for what, which, amount in actions:
        if what == "read":
            consumers[which].read(amount)
        elif what == "write":
            consumers[which].write(amount)
        elif what == "commit":
            consumers[which].commit(committed)
        elif what == "kill":  # between a write and its commit, or anywhere else
            consumers[which] = begin(which)
        elif what in ("move", "lose"):
            old = consumers[owners[amount]]
            if what == "move":
                old.commit(committed)
            old.leave(amount)
            owners[amount] = which
            consumers[which].own(amount, committed[amount])
        else:
            store.failures.append(("before", "half", "after")[amount - 1])
    for _ in range(10_000):
        for consumer in consumers:
            consumer.read(20)
            consumer.write(20)
            consumer.commit(committed)
        if all(consumer.finished for consumer in consumers):
            break
    else:
        pytest.fail("it never ends")
    # Not only the newest round: every one, once and in order.
    assert {name: store.written(name) for name in sent.expected} == sent.expected
    # Whoever starts now sees only what nobody can complete.
    consumers = [begin(0), begin(1)]
    before = list(store.order)
    for consumer in consumers:
        consumer.read(10_000)
        consumer.write(10_000)
    assert store.order == before


def test_a_store_that_says_never_costs_that_round_only() -> None:
    store = MemoryStore()
    merger = Merger(store.writer())
    store.refuse = True
    assert merger.take(arrived(1)) == "refused"
    store.refuse = False
    assert merger.take(arrived(2)) == "written"
    assert merger.take(msgspec.structs.replace(arrived(3), data=b"{}")) == "unreadable"
    assert merger.take(msgspec.structs.replace(arrived(3, base=2), data=b"[" * 5000)) == "unreadable"
    assert merger.take(arrived(3, base=2)) == "written"


def test_after_a_write_of_which_the_answer_was_lost_the_store_is_asked() -> None:
    store = MemoryStore()
    merger = Merger(store.writer())
    store.failures = ["after"]
    with pytest.raises(DeliveryError):
        merger.take(arrived(1))
    assert merger.take(arrived(1)) == "duplicate"
    assert store.written("a") == [("i", 1)]
