"""A trial delivery: whether a subscriber would deliver, tried on an instance of its own beside every queue."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from gpuflight.errors import DeliveryError
from gpuflight.rounds import Round
from gpuflight.subscribers.base import Subscriber

TRIAL_DEADLINE_S = 10.0


def try_delivery(
    subscriber: Subscriber,
    completed: Round,
    timeout_s: float = TRIAL_DEADLINE_S,
    ended: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Start, try and close a copy of a subscriber: ``ok``, ``error``, ``retryable``, ``duration_s``.

    One that does not answer in time is left behind in its thread; ``ended`` is called when that ends. Never raises.
    """
    copy = type(subscriber)(subscriber.settings)
    copy.rules = subscriber.rules
    found: dict[str, Any] = {}
    done = threading.Event()

    def run() -> None:
        try:
            found.update(_tried(copy, completed, timeout_s))
        finally:
            ended()
            done.set()

    began_s = time.monotonic()
    threading.Thread(target=run, name=f"gpuflight-trial-{subscriber.label}", daemon=True).start()
    if not done.wait(timeout_s):
        found = {"ok": False, "error": f"no answer within {timeout_s:g} s", "retryable": True}
    return {**found, "duration_s": round(time.monotonic() - began_s, 3)}


def _tried(subscriber: Subscriber, completed: Round, timeout_s: float) -> dict[str, Any]:
    try:
        try:
            subscriber.start()
            subscriber.trial(completed)
            subscriber.flush(time.monotonic() + timeout_s)
        finally:
            subscriber.close()
    except DeliveryError as error:
        return {"ok": False, "error": str(error), "retryable": error.retryable}
    except Exception as error:  # noqa: BLE001 - the edge of a sink
        return {"ok": False, "error": f"{type(error).__name__}: {error}", "retryable": False}
    return {"ok": True, "error": "", "retryable": False}
