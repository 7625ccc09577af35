"""Thresholds as a user wants them: of one rule, for some elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from gpuflight.bottlenecks.base import Rule, Threshold
from gpuflight.graph import Edge, Entity


class Override(Struct, kw_only=True, frozen=True):
    """New thresholds of one rule for the elements that ``where`` selects: ``kind``, ``id``, ``namespace`` or any
    attribute → pattern with ``*`` and ``?``; an empty one selects all. The clearing threshold moves along in
    proportion, unless the name with ``.clear`` is given."""

    rule: str
    thresholds: Mapping[str, float] = field(default_factory=dict)
    where: Mapping[str, str] = field(default_factory=dict)


class Overrides:
    """All overrides, the last one that matches counts. Without any, asking costs one dictionary lookup."""

    def __init__(self, overrides: Sequence[Override] = ()) -> None:
        self._by_rule: dict[str, list[Override]] = {}
        for override in overrides:
            self._by_rule.setdefault(override.rule, []).append(override)

    def of(self, rule: str) -> list[Override]:
        """The overrides of one rule, in their order."""
        return self._by_rule.get(rule, [])

    def threshold(self, rule: Rule, name: str, element: Entity | Edge | None = None) -> Threshold:
        """The threshold that counts for an element."""
        threshold = rule.thresholds[name]
        for override in self._by_rule.get(rule.name, ()):
            value = override.thresholds.get(name)
            if value is None or not (
                (element is None and not override.where) or (element is not None and selects(override.where, element))
            ):
                continue
            clear_at = override.thresholds.get(f"{name}.clear")
            if clear_at is None and threshold.clear_at is not None and threshold.value:
                clear_at = threshold.clear_at * value / threshold.value
            threshold = replace(threshold, value=value, clear_at=clear_at, source="set by the user", guess=False)
        return threshold

    def loosest(self, rule: Rule, name: str) -> float:
        """The limit that lets most elements through, over all overrides; for screens."""
        threshold = rule.thresholds[name]
        values = [
            threshold.value,
            *(o.thresholds[name] for o in self._by_rule.get(rule.name, ()) if name in o.thresholds),
        ]
        return max(values) if threshold.falling else min(values)


def selects(where: Mapping[str, str], element: Entity | Edge) -> bool:
    """Whether an element meets every pattern of ``where``."""
    for name, pattern in where.items():
        value: Any
        if name == "kind":
            value = element.kind
        elif name == "id":
            value = element.id
        elif name == "namespace":
            value = element.ns if isinstance(element, Entity) else ""
        else:
            value = element.attributes.get(name, getattr(element, name, None))
        if value is None or not fnmatchcase(str(value), pattern):
            return False
    return True
