"""A number of rounds one after the other, on this machine or a recording, until enough or until asked to end."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuflight.core.controller import Controller
    from gpuflight.rounds import Round

_TICK_S = 0.2

_SLACK_S = 0.05
"""A last round that would begin so soon after another one says nothing new."""


class EarlyEnd:
    """While entered, the first Ctrl-C or SIGTERM sets ``asked``; a second one raises KeyboardInterrupt."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.asked = threading.Event()
        self._before: list[tuple[signal.Signals, Any]] = []

    def __enter__(self) -> EarlyEnd:
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup asks for
                    self._before.append((number, signal.signal(number, self._handle)))
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before:
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked.is_set():
            raise KeyboardInterrupt
        self.asked.set()


def run_rounds(
    controller: Controller,
    *,
    seconds: float | None,
    rounds: int | None = None,
    early_end: EarlyEnd,
    tick: Callable[[float], None] = lambda elapsed_s: None,
) -> Iterator[Round]:
    """Rounds at the settings' interval for ``seconds``, the last one at their end; or ``rounds`` of them.

    A recording is run through as fast as it goes: its own rounds, those of its first ``seconds``. ``tick`` is called
    with the seconds passed while waiting.
    """
    tape = controller.world.tape
    if tape is not None and tape.rounds:
        yield from _replayed(controller, len(tape.rounds), seconds, rounds, early_end)
        return
    started_s = time.monotonic()
    interval_s = controller.settings.interval_s
    number = 0
    while True:
        number += 1
        began_s = time.monotonic() - started_s
        yield controller.run_round()
        if early_end.asked.is_set() or (rounds is not None and number >= rounds):
            return
        next_s = max(began_s + interval_s, time.monotonic() - started_s)
        if seconds is not None:
            if seconds - began_s <= _SLACK_S:
                return
            next_s = min(next_s, seconds) if seconds - next_s > _SLACK_S else seconds
            if next_s - began_s <= _SLACK_S:
                return
        while (left_s := started_s + next_s - time.monotonic()) > 0:
            tick(time.monotonic() - started_s)
            if early_end.asked.wait(min(left_s, _TICK_S)):
                return


def _replayed(
    controller: Controller, recorded: int, seconds: float | None, rounds: int | None, early_end: EarlyEnd
) -> Iterator[Round]:
    first_s: float | None = None
    for number in range(1, recorded + 1):
        completed = controller.run_round()
        now_s = controller.world.clock.monotonic_s()
        if first_s is None:
            first_s = now_s
        if seconds is not None and now_s - first_s > seconds:
            return
        yield completed
        if early_end.asked.is_set() or (rounds is not None and number >= rounds):
            return
