"""The loop that reads the topic, around a client made for the test: back-pressure, rebalances, commits, the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
from msgspec import Struct
from tests.fakes.topic import MemoryStore, message

from gpuflight.server.consume import loop as loop_module
from gpuflight.server.consume.client import ClientError, Listener, Record
from gpuflight.server.consume.figures import Figures
from gpuflight.server.consume.loop import Loop
from gpuflight.subscribers.kafka_wire import Message

PATIENCE_S = 10.0


class Limits(Struct):
    max_queue_bytes: int = 1 << 30
    max_queue_rounds: int = 1000
    max_unfinished_bytes: int = 1 << 30
    unfinished_max_s: float = 300.0
    max_message_bytes: int = 10_000
    max_round_bytes: int = 1 << 20
    max_held_elements: int = 1000
    writers_count: int = 2
    retry_first_s: float = 0.01
    retry_max_s: float = 0.02


class FakeClient:
    """A topic of several partitions for one consumer, which the test can take away from it."""

    def __init__(self, logs: dict[int, list[Message]], committed: dict[int, int]) -> None:
        self.logs, self.committed = logs, committed
        self.next: dict[int, int] = {}
        self.paused: set[int] = set()
        self.polls = 0
        self.errors: list[ClientError] = []
        self.commit_error = ""
        self.orders: list[Callable[[], None]] = []
        self.started = self.closed = False
        self.changed = threading.Condition()

    def start(self, listener: Listener) -> None:
        self.listener, self.started = listener, True
        self.give(list(self.logs))

    def give(self, partitions: list[int]) -> None:
        self.next.update({partition: self.committed.get(partition, 0) for partition in partitions})
        self.listener.on_assign(partitions)

    def take_away(self, partitions: list[int], lost: bool = False) -> None:
        (self.listener.on_lost if lost else self.listener.on_revoke)(partitions)
        for partition in partitions:
            del self.next[partition]

    def order(self, work: Callable[[], None]) -> None:
        """Have something happen within the next poll, and wait for it."""
        done = threading.Event()
        self.orders.append(lambda: (work(), done.set())[0])
        assert done.wait(PATIENCE_S)

    def poll(self, timeout_s: float) -> Record | None:
        with self.changed:
            self.polls += 1
            self.changed.notify_all()
        if self.orders:
            self.orders.pop(0)()
            return None
        if self.errors:
            raise self.errors.pop(0)
        for partition, offset in self.next.items():
            if partition not in self.paused and offset < len(self.logs[partition]):
                self.next[partition] = offset + 1
                found = self.logs[partition][offset]
                return Record(partition, offset, found.key, found.headers, found.value)
        time.sleep(0.001)
        return None

    def pause(self, partitions: Iterable[int]) -> None:
        self.paused.update(partitions)

    def resume(self, partitions: Iterable[int]) -> None:
        self.paused.difference_update(partitions)

    def commit(self, offsets: Mapping[int, int], wait: bool) -> None:
        if not self.commit_error:
            self.committed.update(offsets)
        self.listener.on_commit(dict(offsets), self.commit_error)

    def high(self, partition: int, fresh: bool) -> int | None:
        return len(self.logs[partition])

    def beginning(self, partition: int) -> int | None:
        return self.committed[partition]

    def close(self) -> None:
        if not self.closed and self.started:
            self.take_away(list(self.next))
        self.closed = True


class Running:
    """A loop with its client and store."""

    def __init__(self, logs: dict[int, list[Message]], store: MemoryStore | None = None, **limits: Any) -> None:
        self.logs, self.committed, self.store = logs, dict.fromkeys(logs, 0), store or MemoryStore()
        self.clients: list[FakeClient] = []
        self.loop = Loop(self._client, self.store.writer, Limits(**limits))
        self.loop.start()

    def _client(self) -> FakeClient:
        made = FakeClient(self.logs, self.committed)
        self.clients.append(made)
        return made

    @property
    def client(self) -> FakeClient:
        self.until(lambda: bool(self.clients))
        return self.clients[-1]

    def until(self, holds: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline_s, self.loop.figures()
            time.sleep(0.002)

    def figures_when(self, holds: Callable[[Figures], bool]) -> Figures:
        self.until(lambda: holds(self.loop.figures()))
        return self.loop.figures()


Start = Callable[..., Running]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    for name in ("COMMIT_INTERVAL_S", "FIGURES_INTERVAL_S", "HIGH_INTERVAL_S"):
        monkeypatch.setattr(loop_module, name, 0.0)
    running: list[Running] = []

    def begin(*logs: list[Message], **options: Any) -> Running:
        running.append(Running(dict(enumerate(logs)), **options))
        return running[-1]

    yield begin
    for each in running:
        each.store.up.set()
        assert each.loop.stop(PATIENCE_S)
        assert each.store.open_count == 0


def rounds(namespace: str, count: int) -> list[Message]:
    return [part for number in range(1, count + 1) for part in message(namespace, number)]


def test_everything_is_written_committed_and_counted(start: Start) -> None:
    running = start(rounds("a", 5) + message("a", 5), rounds("b", 3))
    found = running.figures_when(lambda figures: figures.outcomes["written"] == 8 and figures.lag == 0)
    assert running.store.written("a") == [("i", number) for number in range(1, 6)]
    assert running.committed == {0: 6, 1: 3}
    assert (found.messages, found.rounds, found.repeated, found.connected) == (9, 8, 1, True)
    assert [(line.partition, line.position, line.high, line.lag) for line in found.partitions] == [
        (0, 6, 6, 0),
        (1, 3, 3, 0),
    ]


def test_a_store_that_is_down_holds_reading_back_but_not_polling(start: Start) -> None:
    store = MemoryStore()
    store.up.clear()
    running = start(rounds("a", 200), rounds("b", 200), store=store, max_queue_rounds=10)
    found = running.figures_when(lambda figures: figures.paused and bool(figures.retries))
    assert found.store_error == "down" and found.queued_rounds <= 11 and found.lag == 400
    client = running.client
    polls = client.polls
    running.until(lambda: client.polls > polls + 100)  # or the group would throw us out
    assert max(client.next.values()) <= 11 and running.committed == {0: 0, 1: 0}
    store.up.set()
    running.figures_when(lambda figures: figures.outcomes["written"] == 400 and not figures.paused)
    assert running.store.written("a") == [("i", number) for number in range(1, 201)]
    running.figures_when(lambda figures: figures.lag == 0 and figures.store_error == "")


def test_parts_do_not_age_while_nothing_is_read(start: Start) -> None:
    store = MemoryStore()
    first, *others = message("a", 1, parts=3)
    running = start([first, *rounds("b", 20), *others], store=store, max_queue_rounds=4, unfinished_max_s=0.2)
    store.up.clear()
    running.figures_when(lambda figures: figures.paused)
    time.sleep(0.3)  # longer than a part may wait for another
    store.up.set()
    found = running.figures_when(lambda figures: figures.lag == 0)
    assert found.skipped["unfinished"] == 0 and store.written("a") == [("i", 1)]


def test_what_goes_to_another_is_committed_as_far_as_it_is_written(start: Start) -> None:
    whole, parts = rounds("a", 3), message("b", 1, parts=2)
    running = start(whole + parts[:1], rounds("c", 1))
    running.figures_when(lambda figures: figures.outcomes["written"] == 4)
    client = running.client
    client.order(lambda: client.take_away([0]))
    assert running.committed[0] == 3, "the first part of what is not whole is read again"
    running.logs[0] += parts[1:]
    client.order(lambda: client.give([0]))
    running.figures_when(lambda figures: figures.outcomes["written"] == 5 and figures.lag == 0)
    assert running.store.written("b") == [("i", 1)] and running.committed[0] == 5


@pytest.mark.parametrize("lost", [False, True])
def test_what_was_not_written_is_left_to_another(start: Start, lost: bool) -> None:
    store = MemoryStore()
    store.up.clear()
    running = start(rounds("a", 3), rounds("b", 1), store=store)
    running.figures_when(lambda figures: figures.queued_rounds == 4)
    client = running.client
    client.order(lambda: client.take_away([0], lost))
    running.figures_when(lambda figures: figures.given_up == 3)
    assert running.committed == {0: 0, 1: 0}
    store.up.set()
    running.figures_when(lambda figures: figures.outcomes["written"] == 1)
    assert store.written("a") == [] and [line.partition for line in running.loop.figures().partitions] == [1]


def test_poison_is_counted_by_what_is_wrong_and_holds_nothing(start: Start) -> None:
    garbage = [
        Message(b"a", [], b"x"),
        Message(b"a", message("a", 1)[0].headers, b"other bytes"),
        Message(b"a", message("a", 1)[0].headers[:3], b""),
        Message(b"a", message("a", 1)[0].headers, b"x" * 20_000),
        *message("no/name", 1),
        *message("a", 1, parts=2)[:1],
    ]
    running = start(garbage + rounds("a", 2))
    found = running.figures_when(lambda figures: figures.outcomes["written"] == 2 and figures.lag == 0)
    assert found.skipped == {
        "foreign": 1, "malformed": 1, "corrupt": 1, "oversized": 1, "namespace": 1, "unfinished": 0,
    }  # fmt: skip
    assert running.committed == {0: 8}


def test_a_difference_without_its_base_waits_for_a_whole_graph_and_is_shown(start: Start) -> None:
    log = message("a", 7, base=6) + message("b", 1)
    running = start(log)
    found = running.figures_when(lambda figures: figures.outcomes["waiting"] == 1 and figures.lag == 0)
    assert (found.waiting_count, found.waiting_namespaces) == (1, ["a"])
    log += message("a", 8) + message("a", 9, base=8)
    running.figures_when(lambda figures: figures.waiting_count == 0 and figures.lag == 0)
    assert running.store.written("a") == [("i", 8), ("i", 9)]


def test_a_broker_that_does_not_answer_is_said_and_tried_again(start: Start) -> None:
    running = start(rounds("a", 1))
    running.figures_when(lambda figures: figures.lag == 0)
    client = running.client
    client.errors.append(ClientError("no broker"))
    running.figures_when(lambda figures: figures.client_errors == 1)
    client.errors.append(ClientError("fenced", fatal=True))
    running.until(lambda: len(running.clients) == 2 and running.clients[1].started)
    assert client.closed
    running.logs[0] += message("a", 2)
    running.figures_when(lambda figures: figures.outcomes["written"] == 2 and figures.connected)


def test_a_commit_that_fails_is_said_and_made_again(start: Start) -> None:
    log: list[Message] = []
    running = start(log)
    client = running.client
    client.commit_error = "not the coordinator"
    log += rounds("a", 1)
    found = running.figures_when(lambda figures: figures.commit_failures > 1)
    assert "not the coordinator" in found.client_error or not found.client_error
    client.commit_error = ""
    running.until(lambda: running.committed == {0: 1})


def test_the_end_writes_what_was_read_and_leaves(start: Start) -> None:
    running = start(rounds("a", 50))
    running.until(lambda: running.client.next.get(0) == 50)
    assert running.loop.stop(PATIENCE_S)
    assert running.committed == {0: 50} and len(running.store.written("a")) == 50
    assert running.client.closed and running.store.open_count == 0


def test_the_end_does_not_wait_for_a_store_that_is_down(start: Start) -> None:
    store = MemoryStore()
    store.up.clear()
    running = start(rounds("a", 5), store=store)
    running.figures_when(lambda figures: bool(figures.retries))
    began_s = time.monotonic()
    assert running.loop.stop(60.0)
    assert time.monotonic() - began_s < 30.0 and running.committed == {0: 0}
