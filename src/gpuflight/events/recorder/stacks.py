"""Where in the program kernels are launched: the Python stack of every n-th launch, taken in the launching thread.

CUPTI calls us at every launch for it, with the interpreter's lock: this is dear, and off unless it is asked for.
"""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType
from typing import Any

from gpuflight.events.recorder.binding import Binding, Unavailable, Why

_FRAMES = 48
_WAITING = 10_000
_ENTER = 0


class Stacks:
    """``every``: 0 for none. ``taken``, ``nameless`` (launches of threads that run no Python), ``dropped``: counts."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.why: Why | None = None
        self.taken = 0
        self.nameless = 0
        self.dropped = 0
        self._binding: Binding | None = None
        self._launches = 0
        self._waiting: dict[int, str] = {}
        self._lock = threading.Lock()

    def start(self, binding: Binding) -> None:
        """Ask CUPTI to call at launches, if stacks are wanted. Never raises."""
        if not self.every or self._binding is not None:
            return
        try:
            binding.on_launch(self._launch)
        except Unavailable as error:
            self.why = error.why
            return
        self.why = None
        self._binding = binding

    def stop(self) -> None:
        binding, self._binding = self._binding, None
        if binding is not None:
            try:
                binding.off_launch()
            except Unavailable:
                pass

    def take(self) -> dict[int, str]:
        """Stacks by correlation id, since this was last asked."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        return waiting

    def line(self) -> dict[str, Any]:
        """Of capture_capabilities."""
        from gpuflight.events.recorder.capabilities import entry

        if not self.every:
            return entry("launch_stacks", False, "not_requested", "", None)
        if self.why is not None:
            return entry("launch_stacks", True, "skipped", "", self.why)
        told = f"every {self.every}th launch: {self.taken} stacks"
        if self.nameless:
            told += f", {self.nameless} of threads without Python"
        if self.dropped:
            told += f", {self.dropped} dropped"
        status = "collected" if self.taken else "enabled_no_data"
        return entry("launch_stacks", True, status, "sampled", Why("sampled", told))

    def _launch(self, _: Any, __: Any, ___: Any, call: Any) -> None:
        """CUPTI's callback: in the thread that launches."""
        try:
            if int(call.callback_site) != _ENTER:
                return
            self._launches += 1
            if self._launches % self.every:
                return
            stack = stack_text(sys._getframe(1))
            if not stack:
                self.nameless += 1
                return
            with self._lock:
                if len(self._waiting) >= _WAITING:
                    self.dropped += 1
                    return
                self._waiting[int(call.correlation_id)] = stack
                self.taken += 1
        except Exception:  # noqa: BLE001 - in the middle of the user's launch
            self.dropped += 1


def stack_text(frame: FrameType | None) -> str:
    """``function (file.py:line)`` from the outermost to the innermost, joined by ``|``; without our own frames."""
    parts: list[str] = []
    while frame is not None and len(parts) < _FRAMES:
        code = frame.f_code
        if not frame.f_globals.get("__name__", "").startswith("gpuflight."):
            name = code.co_qualname if hasattr(code, "co_qualname") else code.co_name
            parts.append(f"{name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})".replace("|", "/"))
        frame = frame.f_back
    return "|".join(reversed(parts))
