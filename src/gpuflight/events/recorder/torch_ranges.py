"""``torch.profiler.record_function`` ranges as scopes, once the program has imported torch; torch itself is not."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from gpuflight.events.recorder.ranges import Ranges

_MODULE = "torch.autograd.profiler"
_OPENED = "_gpuflight_opened"
_MARK = "_gpuflight_ranges"


def follow(ranges: Callable[[], Ranges | None]) -> bool:
    """Whether record_function tells us now. ``ranges``: where they go at that moment, None for nowhere."""
    ranged = getattr(sys.modules.get(_MODULE), "record_function", None)
    if not isinstance(ranged, type) or "__enter__" not in vars(ranged) or "__exit__" not in vars(ranged):
        return False
    if getattr(ranged, _MARK, False):
        return True
    enter, leave = ranged.__enter__, ranged.__exit__  # type: ignore[attr-defined]

    @functools.wraps(enter)
    def entering(self: Any, *arguments: Any) -> Any:
        into = ranges()
        if into is not None:
            opened = into.enter(str(getattr(self, "name", "record_function")))
            vars(self).setdefault(_OPENED, []).append((into, opened))
        return enter(self, *arguments)

    @functools.wraps(leave)
    def leaving(self: Any, *arguments: Any) -> Any:
        opened = vars(self).get(_OPENED)
        if opened:
            into, scope = opened.pop()
            into.leave(scope)
        return leave(self, *arguments)

    ranged.__enter__, ranged.__exit__ = entering, leaving  # type: ignore[attr-defined]
    setattr(ranged, _MARK, True)
    return True
