"""The launch configuration of a kernel out of a line's fields."""

from __future__ import annotations

import re
from typing import Any

from gpuflight.events.format.cells import Value, cell
from gpuflight.events.format.plans import SHAPE_FIELDS
from gpuflight.events.tables import TABLES

_KINDS = {c.name: c.kind for c in TABLES["kernel_shape"].columns}
_THREE = re.compile(r"\(?\s*(\d{1,18})\s*,\s*(\d{1,18})\s*,\s*(\d{1,18})\s*\)?")


def shape_of(fields: dict[str, Any]) -> tuple[dict[str, Value], list[str]]:
    """Columns of ``kernel_shape`` that the fields tell, and the fields that could not be read."""
    shape: dict[str, Value] = {}
    bad: list[str] = []
    for wire, value in fields.items():
        if value is None:
            continue
        if wire in ("grid", "block"):
            if value == "":
                continue
            three = _THREE.fullmatch(value.strip()) if isinstance(value, str) else None
            if three is None:
                bad.append(wire)
            else:
                shape.update({f"{wire}_{axis}": int(n) for axis, n in zip("xyz", three.groups(), strict=True)})
            continue
        column = SHAPE_FIELDS[wire]
        read = cell(value, _KINDS[column])
        if read is None:
            bad.append(wire)
        elif read != "":
            shape[column] = read
    return shape, bad
