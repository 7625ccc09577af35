"""How much is held on to: the number of objects that can be reached from some others."""

from __future__ import annotations

import gc
import types
from typing import Any

_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType, types.FrameType)


def reachable_count(roots: tuple[Any, ...], leave_out: tuple[type, ...] = ()) -> int:
    """Objects reachable from ``roots``, classes, modules and functions left out, and whatever is of ``leave_out``."""
    left_out = (*_CODE, *leave_out)
    seen: dict[int, Any] = {}
    pending = list(roots)
    while pending:
        item = pending.pop()
        if id(item) in seen or isinstance(item, left_out):
            continue
        seen[id(item)] = item
        pending.extend(gc.get_referents(item))
    return len(seen)
