"""Record classes of cupti-python → numpy layouts, so that records are copied as bytes and read as columns.

The classes' suffixes change with each release (``ActivityKernel9`` … ``13``); each has a structured dtype of its name.
A class without one, or whose size is another, is read attribute by attribute: slower, and never wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

from gpuflight.events.arrays import numpy

_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def dtype_name(class_name: str) -> str:
    """``ActivityMemcpyPtoP4`` → ``activity_memcpy_pto_p4_dtype``."""
    return f"{_WORD.sub('_', class_name).lower()}_dtype"


class Layouts:
    """Of one binding."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._known: dict[type, Any] = {}

    def of(self, record: Any) -> Any | None:
        """The dtype of a record's class, None where its bytes cannot be trusted to be laid out like that."""
        kind = type(record)
        if kind not in self._known:
            self._known[kind] = self._find(record)
        return self._known[kind]

    def _find(self, record: Any) -> Any | None:
        dtype = getattr(self._module, dtype_name(type(record).__name__), None)
        if dtype is None or "kind" not in (dtype.names or ()):
            return None
        try:
            size = memoryview(record).nbytes
        except TypeError:
            return None
        return dtype if size == dtype.itemsize else None


def columns_of(records: list[Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Attribute by attribute: those that every record has; what is no number is left out."""
    np = numpy()
    found: dict[str, Any] = {}
    for name in names:
        try:
            values = list(map(attrgetter(name), records))
            array = np.array(values)
        except (AttributeError, OverflowError, ValueError):
            continue
        if array.dtype.kind in "iu" and array.ndim == 1:
            found[name] = array
    return found


class Fields(Mapping[str, Any]):
    """Columns of a structured array, by name; ``some`` of the records without copying what is not read."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self._names = frozenset(array.dtype.names)

    def __getitem__(self, name: str) -> Any:
        return self.array[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self.array.dtype.names)

    def __len__(self) -> int:
        return len(self._names)

    def some(self, chosen: Any) -> Fields:
        """Of these records only."""
        return Fields(self.array[chosen])
