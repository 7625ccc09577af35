"""``with gpuflight.scope("step"):`` and ``@gpuflight.scope("step")``: where in the program GPU work belongs."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from gpuflight.events.recorder import process
from gpuflight.events.recorder.ranges import Open, Ranges

P = ParamSpec("P")
R = TypeVar("R")


class scope:
    """A part of the program by name; kernels that are launched inside carry it. Costs next to nothing where nothing is
    recorded. One object may be entered again while it is open, and by several threads."""

    __slots__ = ("_opened", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._opened: list[tuple[int, Ranges, Open]] = []

    def __enter__(self) -> scope:
        recorder = process.current()
        if recorder is not None:
            self._opened.append((threading.get_ident(), recorder.ranges, recorder.ranges.enter(self.name)))
        return self

    def __exit__(self, *_what: type[BaseException] | BaseException | TracebackType | None) -> None:
        thread = threading.get_ident()
        for place in range(len(self._opened) - 1, -1, -1):
            if self._opened[place][0] == thread:
                _, ranges, opened = self._opened.pop(place)
                ranges.leave(opened)
                return

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Every call of the function is a scope; of a coroutine function, every await of it."""
        name = self.name
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def awaited(*arguments: P.args, **named: P.kwargs) -> Any:
                with scope(name):
                    return await function(*arguments, **named)

            return awaited  # type: ignore[return-value]

        @functools.wraps(function)
        def called(*arguments: P.args, **named: P.kwargs) -> R:
            with scope(name):
                return function(*arguments, **named)

        return called
