"""A producer that looks like confluent_kafka.Producer and does what a test says, also what a broker seldom does. Its
reports come only from ``poll``, as those of librdkafka do."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any


class FakeError:
    """Looks like a KafkaError."""

    def __init__(self, name: str, text: str = "what happened", fatal: bool = False) -> None:
        self._name, self._text, self._fatal = name, text, fatal

    def name(self) -> str:
        return self._name

    def str(self) -> str:
        return self._text

    def fatal(self) -> bool:
        return self._fatal


class FakeProducer:
    """``fate(value)`` says what becomes of a message: None it is acknowledged, "never" nothing is heard of it, else an
    error. ``room`` is how many messages its queue takes."""

    def __init__(self, fate: Callable[[bytes], Any], room: int = 1000) -> None:
        self.fate = fate
        self.room = room
        self.accepted: list[bytes] = []
        self.purged = 0
        self.polls = 0
        self.callers: set[int] = set()
        self._queue: deque[tuple[bytes, Any]] = deque()

    def produce(
        self,
        topic: str,
        value: bytes,
        key: bytes,
        partition: int,
        callback: Any,
        on_delivery: Any,
        timestamp: int,
        headers: Any,
    ) -> None:
        self.callers.add(threading.get_ident())
        if len(self._queue) >= self.room:
            raise BufferError("queue full")
        self.accepted.append(value)
        self._queue.append((value, on_delivery))

    def poll(self, timeout: float) -> int:
        self.callers.add(threading.get_ident())
        self.polls += 1
        served, left = 0, deque()
        while self._queue:
            value, report = self._queue.popleft()
            fate = self.fate(value)
            if fate == "never" and not self.purged:
                left.append((value, report))
                continue
            served += 1
            report(FakeError("_PURGE_INFLIGHT") if fate == "never" else fate, None)
        self._queue = left
        if not served:
            threading.Event().wait(min(timeout, 0.02))
        return served

    def purge(self) -> None:
        self.purged += 1
