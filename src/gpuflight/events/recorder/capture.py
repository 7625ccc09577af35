"""CUPTI on and off, and what it refused: everything between the recorder and the binding."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from gpuflight.events.format.matrix import prepare
from gpuflight.events.recorder import lifecycle
from gpuflight.events.recorder.binding import Binding, Unavailable, Why, load
from gpuflight.events.recorder.clock import Anchor, Clock, anchor
from gpuflight.events.recorder.intake import Intake
from gpuflight.events.recorder.layouts import Layouts
from gpuflight.events.recorder.options import Options

FLUSH_EVERY_S = 1.0
SCOPE_KIND = 5
"""CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM2: launches inside our scopes carry the scope's instance number as this."""


class Capture:
    """``why``: why nothing is recorded, None while all is well; ``refused``: groups that CUPTI does not give, and why.

    ``running``: records are being taken. ``failed_calls``: calls that CUPTI refused while running.
    """

    def __init__(
        self, options: Options, clock: Clock, wake: Callable[[], None], make: Callable[[], Binding] = load
    ) -> None:
        self.running = False
        self.ever_ran = False
        self.why: Why | None = None
        self.refused: dict[str, Why] = {}
        self.anchor: Anchor | None = None
        self.dropped = 0
        self.failed_calls = 0
        self.intake: Intake | None = None
        self._options = options
        self._clock = clock
        self._wake = wake
        self._make = make
        self._binding: Binding | None = None
        self._flushes_itself = False
        self._last_flush_ns = 0

    @property
    def binding(self) -> Binding | None:
        """CUPTI, once it was there."""
        return self._binding

    def start(self) -> bool:
        """Switch on; whether it is on. Never raises."""
        if self.running:
            return True
        try:
            self._start()
        except Unavailable as error:
            self.why = error.why
        except Exception as error:  # noqa: BLE001 - the user's program goes on, whatever a binding does
            self.why = Why("recorder_error", f"{type(error).__name__}: {error}"[:300])
        return self.running

    def _start(self) -> None:
        binding = self._binding
        if binding is None:
            with lifecycle.imports:
                binding = self._make()
                prepare()
            layouts = Layouts(binding.module)
            limits = (self._options.max_pending_bytes, self._options.buffer_bytes)
            self.intake = Intake(layouts, *limits, self._wake)
            self._binding = binding
        assert self.intake is not None  # noqa: S101 (made with the binding)
        self._anchor(binding)
        other = self._other_subscriber(binding)
        if other is not None:
            raise Unavailable(other)
        if "nvtx" in self._options.kinds:
            self._listen_to_nvtx(binding)
        binding.register(self.intake.requested, self.intake.completed)
        self.refused.clear()
        enabled = 0
        for group in ("device", *self._options.kinds):
            try:
                binding.enable(group)
                enabled += group != "device"
            except Unavailable as error:
                self.refused[group] = error.why
        if not enabled:
            raise Unavailable(self.refused.get("kernel") or next(iter(self.refused.values())))
        self._flushes_itself = binding.flush_every(round(FLUSH_EVERY_S * 1000))
        self.why = None
        self.running = self.ever_ran = True

    @staticmethod
    def _listen_to_nvtx(binding: Binding) -> None:
        """NVTX asks the environment whom to tell, at the program's first range. Another tool's wish is left alone."""
        library = binding.library()
        if library:
            os.environ.setdefault("NVTX_INJECTION64_PATH", library)

    @staticmethod
    def _other_subscriber(binding: Binding) -> Why | None:
        try:
            return binding.who_subscribes()
        except Unavailable:
            return None  # it cannot be asked; enabling will tell

    def stop(self) -> None:
        """Switch off and have everything delivered. Never raises."""
        if not self.running or self._binding is None:
            return
        self.running = False
        for group in ("device", *self._options.kinds):
            self._try(self._binding.disable, group)
        self._try(lambda: self._binding.flush(forced=True))  # type: ignore[union-attr]
        self._ask_dropped()

    def lost(self) -> None:
        """In a forked child: CUPTI was the parent's."""
        self.running = False
        self._binding = None

    def tick(self) -> None:
        """Now and then: deliver, relate the clocks, ask for what was dropped. Never raises."""
        if not self.running or self._binding is None:
            return
        now = self._clock.now_ns()
        if now - self._last_flush_ns < FLUSH_EVERY_S * 1e9:
            return
        self._last_flush_ns = now
        if not self._flushes_itself:
            self._try(lambda: self._binding.flush(forced=False))  # type: ignore[union-attr]
        self._try(self._anchor, self._binding)
        self._ask_dropped()

    def push(self, identifier: int) -> bool:
        """A scope begins in this thread; whether it has to be popped."""
        if not self.running or self._binding is None or "external" not in self._options.kinds:
            return False
        try:
            self._binding.push(SCOPE_KIND, identifier)
        except Unavailable:
            self.failed_calls += 1
            return False
        return True

    def pop(self) -> None:
        if self._binding is not None:
            self._try(self._binding.pop, SCOPE_KIND)

    def _anchor(self, binding: Binding) -> None:
        self.anchor = anchor(self._clock, binding.timestamp, self.anchor)

    def _ask_dropped(self) -> None:
        try:
            self.dropped += self._binding.dropped() if self._binding is not None else 0
        except Unavailable:
            self.failed_calls += 1

    def _try(self, function: Callable[..., Any], *arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception:  # noqa: BLE001 - counted; the program goes on
            self.failed_calls += 1
