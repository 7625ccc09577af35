"""The few things used last, made once each: past rounds, parts of graphs that are read page by page."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Kept(Generic[K, V]):
    """At most ``size`` values by key, the least recently used one goes first. Thread-safe; made one at a time."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The value of ``key``, made if it is not there. None is never kept. What ``make`` raises is raised."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
            value = make()
            if value is not None:
                self._values[key] = value
                while len(self._values) > self._size:
                    self._values.popitem(last=False)
            return value

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._values.clear()
