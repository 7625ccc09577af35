"""How much the tests do that could go on for ever: a part of it in every run of the suite, all of it with
HYPOTHESIS_PROFILE=deep."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

_T = TypeVar("_T")
DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"


def examples(count: int) -> int:
    """Of a property test, ``count`` being thorough: a half, or twenty times as many."""
    return max(1, count * 20 if DEEP else count // 2)


def every_second(items: Sequence[_T], turn: int = 0) -> Sequence[_T]:
    """Those of one turn, of two that together take all."""
    return items if DEEP else items[turn % 2 :: 2]
