"""Scopes of a program: how often each was run at each place of the tree, and for how long.

Runs are matched by instance number; who is inside of whom comes of the depth that was written. The same rule as
``events.query.scopes``, for rows that come one by one.
"""

from __future__ import annotations

from typing import Any

from gpuflight.events.activity.steps import Steps, kind_of
from gpuflight.events.activity.summary import ScopeSum, without_secrets
from gpuflight.events.names import Names

MOST_PATHS = 4096
MOST_OPEN = 1 << 16
_BEGINS, _ENDS = (0, 2), (1, 3)

Path = tuple[int, ...]


class Scopes:
    """``beyond``: begins and ends that were not followed, for there were too many places or open runs. ``steps`` is
    told of runs that ended, where ``names`` has the names of their scopes."""

    def __init__(self, steps: Steps | None = None, names: Names | None = None) -> None:
        self.beyond = 0
        self._steps = steps
        self._names = names
        self._kinds: dict[Path, str] = {}  # the name where it is that of a step or a pause, else empty
        self._open: dict[int, tuple[Path, int, int]] = {}  # instance → path, begin, depth
        self._at_depth: dict[int, tuple[int | None, Path]] = {}
        self._lines: dict[Path, list[int]] = {}  # runs ended, open, total, longest

    def add(self, columns: dict[str, Any], count: int) -> None:
        times, events = columns.get("time_ns"), columns.get("event_type")
        if times is None or events is None:
            return
        times, events = times.tolist(), events.tolist()
        instances = _list(columns, "scope_instance_id", count, None)
        names = _list(columns, "name_id", count, 0)
        depths = _list(columns, "depth", count, 0)
        for time_ns, event, instance, name, depth in zip(times, events, instances, names, depths, strict=True):
            if event in _BEGINS:
                self._begin(time_ns, instance, name, depth)
            elif event in _ENDS:
                self._end(time_ns, instance, depth)

    def _begin(self, time_ns: int, instance: int | None, name: int, depth: int) -> None:
        outer = self._at_depth.get(depth - 1)
        path = (*outer[1], name) if outer is not None else (name,)
        key = -1 - depth if instance is None else instance
        line = self._lines.get(path)
        if len(self._open) >= MOST_OPEN or len(self._at_depth) >= MOST_OPEN or (
            line is None and len(self._lines) >= MOST_PATHS
        ):  # fmt: skip
            self.beyond += 1
            return
        if line is None:
            line = self._lines[path] = [0, 0, 0, 0]
        if key not in self._open:
            line[1] += 1
        self._open[key] = (path, time_ns, depth)
        self._at_depth[depth] = (instance, path)

    def _end(self, time_ns: int, instance: int | None, depth: int) -> None:
        opened = self._open.pop(-1 - depth if instance is None else instance, None)
        if opened is None:
            self.beyond += 1
            return
        path, began_ns, depth = opened
        at = self._at_depth.get(depth)
        if at is not None and at[0] == instance:
            del self._at_depth[depth]
        line = self._lines[path]
        took_ns = max(time_ns - began_ns, 0)
        line[0] += 1
        line[1] -= 1
        line[2] += took_ns
        line[3] = max(line[3], took_ns)
        name = self._kinds.get(path)
        if name is None:
            name = self._name_of_kind(path)
        if name and self._steps is not None:
            self._steps.take(name, began_ns, took_ns)

    def _name_of_kind(self, path: Path) -> str:
        """The scope's name if steps are made of it; empty if not, and inside of another one of the same kind."""
        texts = self._names.of("scope") if self._names is not None else {}
        name = texts.get(path[-1])
        if name is None:
            return ""  # it may still come
        kind = kind_of(name)[0]
        if kind in ("loader", "gc") and any(kind_of(texts.get(part, ""))[0] == kind for part in path[:-1]):
            kind = ""
        self._kinds[path] = name if kind else ""
        return self._kinds[path]

    def __len__(self) -> int:
        return len(self._lines)

    def result(self, names: Names, most: int) -> list[ScopeSum]:
        """The places with the longest total, at most ``most``; an outer one is there wherever an inner one is."""
        longest = sorted(self._lines.items(), key=lambda item: (-item[1][2], item[0]))
        chosen: dict[Path, None] = {}
        for path, _ in longest:
            outer = [path[:length] for length in range(1, len(path) + 1)]
            fresh = [part for part in outer if part in self._lines and part not in chosen]
            if len(chosen) + len(fresh) <= most:
                chosen.update(dict.fromkeys(fresh))
        texts = names.of("scope")
        found = []
        for path in chosen:
            words = [without_secrets(texts.get(identifier, f"#{identifier}")) for identifier in path]
            count, opened, total_ns, longest_ns = self._lines[path]
            found.append(ScopeSum("|".join(words), words[-1], len(path) - 1, count, opened, total_ns, longest_ns))
        return sorted(found, key=lambda scope: scope.path)


def _list(columns: dict[str, Any], name: str, count: int, instead: int | None) -> list[Any]:
    column = columns.get(name)
    return [instead] * count if column is None else list(column.tolist())
