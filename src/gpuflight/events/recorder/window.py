"""When records are taken: always, in a window that was given at the start, or when somebody asks."""

from __future__ import annotations

from typing import Any

from gpuflight.events.recorder.options import Options


class Window:
    """Opens and closes. Times are UNIX ns of the session's clock; counts are of kernels.

    ``closed``: windows that ended, until they are taken out: fields of their deep_window_event lines, and the count of
    kernels when they opened.
    """

    def __init__(self, options: Options, now_ns: int) -> None:
        self.open = False
        self.closed: list[tuple[dict[str, Any], int]] = []
        self._opens_ns: int | None = None if options.on_demand else now_ns + round(options.after_s * 1e9)
        self._plain = not (options.on_demand or options.after_s or options.for_s or options.launches)
        self._for_s = options.for_s
        self._most = options.launches
        self._opened_ns = 0
        self._opened_count = 0
        self._name = "start"

    def ask(self, for_s: float, launches: int, name: str, now_ns: int) -> None:
        """Open now, or if it is open let it go on for so long from now."""
        self._plain = False
        self._for_s, self._most, self._name = for_s, launches, name
        self._opens_ns = now_ns
        if self.open:
            self._opened_ns, self._opened_count = now_ns, -1

    def end(self, reason: str, now_ns: int) -> None:
        """Close it, and do not open it again by itself."""
        self._opens_ns = None
        if not self.open:
            return
        self.open = False
        if self._plain:
            return
        fields: dict[str, Any] = {
            "name": self._name,
            "close_reason": reason,
            "engines": ["nvidia.trace"],
            "start_ns": self._opened_ns,
            "end_ns": now_ns,
            "duration_ns": now_ns - self._opened_ns,
        }
        if self._for_s:
            fields["requested_duration_ms"] = round(self._for_s * 1000)
        if self._most:
            fields["requested_max_launches"] = self._most
        self.closed.append((fields, self._opened_count))

    def look(self, now_ns: int, count: int) -> bool:
        """Whether it is open now."""
        if not self.open and self._opens_ns is not None and now_ns >= self._opens_ns:
            self.open, self._opens_ns = True, None
            self._opened_ns, self._opened_count = now_ns, count
        if self.open:
            if self._opened_count < 0:
                self._opened_count = count
            if self._for_s and now_ns - self._opened_ns >= self._for_s * 1e9:
                self.end("deadline", now_ns)
            elif self._most and count - self._opened_count >= self._most:
                self.end("launch_budget", now_ns)
        return self.open

    def next_s(self, now_ns: int) -> float | None:
        """Seconds until it opens or closes by time; None if nothing is due."""
        if not self.open:
            return None if self._opens_ns is None else max((self._opens_ns - now_ns) / 1e9, 0)
        return max((self._opened_ns - now_ns) / 1e9 + self._for_s, 0) if self._for_s else None
