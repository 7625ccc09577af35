"""A topic and a store without either: for the consumer's tests."""

from __future__ import annotations

import json
import threading
from typing import Any

from gpuflight.errors import DeliveryError, InputError
from gpuflight.server.consume.merge import Head
from gpuflight.subscribers.kafka_wire import Message, RoundMessage, cut


class StoreDown(DeliveryError):
    """The store did not answer."""


def message(
    namespace: str, number: int, *, parts: int = 1, instance: str = "i", base: int | None = None, time_ns: int = 0
) -> list[Message]:
    """A round that says what it is, in so many parts."""
    time_ns = time_ns or number
    before = None if base is None else {"instance": instance, "number": base}
    data = {"state": {"instance": instance, "number": number, "time_ns": time_ns}, "base": before}
    # Parts are cut to be about equal: the overhead is 512 and the headers, the rest is room.
    made = cut(
        json.dumps(data).encode().ljust(1000 * parts),
        namespace=namespace,
        instance=instance,
        number=number,
        time_ns=time_ns,
        base=base,
        encoding="none",
        max_message_bytes=1_000_000 if parts == 1 else 1800,
    )
    assert len(made) == parts
    return made


class MemoryStore:
    """Keeps each namespace's newest round, as ``{"state": …, "base": the state it must find, or null}``. Fails when it
    is told to, and whenever it would be taken back or a difference does not fit."""

    def __init__(self) -> None:
        self.states: dict[str, dict[str, Any]] = {}
        self.writes = 0
        self.order: list[tuple[str, str, int]] = []
        self.refuse = False
        self.up = threading.Event()
        self.up.set()
        self.closed = False
        self._fail = 0
        self._after = False

    def fail_next(self, count: int, *, after: bool) -> None:
        """Do not answer so many writes; ``after``: though they were done."""
        self._fail, self._after = count, after

    def written(self, namespace: str) -> list[tuple[str, int]]:
        """Instance and number of each round of a namespace that was written, in order."""
        return [(instance, number) for name, instance, number in self.order if name == namespace]

    def head(self, namespace: str) -> Head | None:
        """As a store."""
        self._answer()
        state = self.states.get(namespace)
        return None if state is None else Head(state["instance"], state["number"], state["time_ns"])

    def write(self, message: RoundMessage) -> None:
        """As a store."""
        self._answer()
        if self.refuse:
            raise DeliveryError("too large", retryable=False)
        try:
            data = json.loads(message.data)
        except ValueError as error:
            raise InputError("not a round") from error
        if self._fail and not self._after:
            self._fail -= 1
            raise StoreDown("down", retryable=True)
        found, state = self.states.get(message.namespace), data["state"]
        if data["base"] is not None:
            assert found is not None and data["base"].items() <= found.items(), "a difference on something else"
        if found is not None:
            newer = (
                state["number"] > found["number"]
                if state["instance"] == found["instance"]
                else state["time_ns"] > found["time_ns"]
            )
            assert newer, "an older round after a newer one"
        self.states[message.namespace] = state
        self.writes += 1
        self.order.append((message.namespace, state["instance"], state["number"]))
        if self._fail:
            self._fail -= 1
            raise StoreDown("the answer was lost", retryable=True)

    def close(self) -> None:
        """As a store."""
        self.closed = True

    def _answer(self) -> None:
        if not self.up.is_set():
            raise StoreDown("down", retryable=True)
