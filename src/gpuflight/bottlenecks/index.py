"""What the engine keeps between rounds about the elements: which meet a screen, the past of metrics, ways between them.

Everything here is brought up to date by a round's difference, so an element that did not change costs nothing.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from zlib import crc32

from gpuflight.bottlenecks.base import MASS_KINDS, ElementRule, Rule, Screen
from gpuflight.bottlenecks.overrides import Overrides
from gpuflight.bottlenecks.series import Series
from gpuflight.bottlenecks.window import Key, key_of
from gpuflight.graph import Edge
from gpuflight.graph import edges as edge_kinds
from gpuflight.graph.diff import Change
from gpuflight.graph.edges import EDGE_KINDS
from gpuflight.graph.element import EdgeKey
from gpuflight.graph.nodes import NODE_KINDS
from gpuflight.graph.store import ENDED
from gpuflight.rounds import Round

COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le,
}  # fmt: skip
_FOLDING = (edge_kinds.Access, edge_kinds.Host, edge_kinds.Own)
"""Kinds of edge that folding follows (folding.py)."""

_GPUS = ("GPU(", "MigInstance(")

Gate = tuple[ElementRule, str | None, Callable[[Any, Any], bool] | None, Any]
"""A rule with one screen: metric, comparison, limit; without comparison it is an attribute; without name all pass."""
Met = list[tuple[ElementRule, Any]]


class Index:
    """The elements of one host as the rules need them. ``by_kind``, ``out`` and ``into`` are read by ``Window``."""

    def __init__(self, rules: Sequence[Rule], overrides: Overrides) -> None:
        self._overrides = overrides
        element_rules = [rule for rule in rules if isinstance(rule, ElementRule)]
        self._gates = self._make_gates([rule for rule in element_rules if not rule.gpu_users_only])
        self._user_gates = self._make_gates([rule for rule in element_rules if rule.gpu_users_only])
        self._horizons = _wanted_histories(rules)
        self._wanted = {
            kind: {metric: (seconds, self._least(element_rules, kind, metric)) for metric, seconds in row.items()}
            for kind, row in self._horizons.items()
        }
        self._kept = _kept_kinds(rules, element_rules)
        self._marks = _wanted_members(rules)
        self._own_gates = {rule.name: self._gates_of(rule) for rule in element_rules}
        self._concerned = {*self._gates, *self._user_gates, *self._wanted, *self._kept, *self._marks}
        self._relations = {*_FOLDING, *(kind for rule in rules for kind in rule.relations)}
        self._warm = {kind for rule in element_rules if rule.warm_up_s > 0 for kind in rule.subjects()}
        self.by_kind: dict[type[Any], dict[Key, Any]] = {}
        self.out: dict[tuple[str, type[Edge]], dict[str, None]] = {}
        self.into: dict[tuple[str, type[Edge]], dict[str, None]] = {}
        self.histories: dict[Key, dict[str, Series]] = {}
        self.first_seen_s: dict[Key, float] = {}
        self.watched: dict[Key, dict[str, ElementRule]] = {}
        self.gpu_users: set[str] = set()
        self.members: dict[tuple[type[Any], str], dict[str, Any]] = {
            (kind, name): {} for kind, names in self._marks.items() for name in names
        }
        self._slow = [rule for rule in element_rules if rule.every_rounds > 1]
        self.slow: dict[tuple[str, int], dict[Key, ElementRule]] = {}
        """Under watch of rules that judge each element only every so many rounds, by rule and turn."""

    def clear(self) -> None:
        """Forget everything."""
        for table in (self.by_kind, self.out, self.into, self.histories, self.first_seen_s, self.watched, self.slow):
            table.clear()
        for members in self.members.values():
            members.clear()
        self.gpu_users.clear()

    def take(self, done: Round, now_s: float, first: bool) -> Met:
        """Bring everything up to date with a round; (rule, element) for what changed and meets a screen."""
        diff = done.diff
        nodes_added: Iterable[Any] = diff.nodes_added
        edges_added: Iterable[Any] = diff.edges_added
        changed: tuple[Sequence[Change], ...] = (diff.nodes_changed, diff.edges_changed)
        if first:  # a stream may begin in the middle; a saved graph has no difference
            nodes_added, edges_added, changed = done.graph.nodes.values(), done.graph.edges.values(), ()
        else:
            for node_id in diff.nodes_removed:
                self._drop(node_id, NODE_KINDS.get(node_id.partition("(")[0]))
            for edge_key in diff.edges_removed:
                kind = EDGE_KINDS.get(edge_key[2])
                self._drop(edge_key, kind)
                self._unlink(edge_key, kind)
        met: Met = []
        self._link_all(edges_added, done, met)
        groups: dict[type[Any], list[Any]] = {kind: [] for kind in self._concerned}
        for elements in (nodes_added, edges_added):
            for element in elements:
                if (group := groups.get(type(element))) is not None:
                    group.append(element)
        for steps in changed:
            for step in steps:
                element = step.after
                if (group := groups.get(type(element))) is not None:
                    group.append(element)
        for kind, names in self._marks.items():
            for name in names:
                _sort_out(groups[kind], name, self.members[(kind, name)])
        for kind, group in groups.items():  # of masses a screen is one pass over a column
            if group and kind in self._kept:
                self._look_at_few(kind, group, now_s, met)
            elif group:
                self._look_at_masses(kind, group, now_s, met)
        if self._warm:
            for entity in nodes_added:
                if type(entity) in self._warm:
                    self.first_seen_s[entity.id] = now_s
        return met

    def _link_all(self, edges: Iterable[Edge], done: Round, met: Met) -> None:
        """New edges between elements; who uses a GPU from now on passes the screens for these, changed or not."""
        before = self.gpu_users.copy()
        for edge in edges:
            if type(edge) in self._relations:
                self._link(edge)
        for entity_id in self.gpu_users - before:
            user = done.graph.nodes.get(entity_id)
            if user is not None:
                _pass_gates(user, self._user_gates.get(type(user), ()), met)

    def _look_at_few(self, kind: type[Any], elements: Iterable[Any], now_s: float, met: Met) -> None:
        wanted, gates, here = self._horizons.get(kind), self._gates.get(kind, ()), self.by_kind.setdefault(kind, {})
        for element in elements:
            key = key_of(element)
            if ENDED in element.attributes:
                self._drop(key, kind)
                continue
            here[key] = element
            if wanted is not None:
                self._remember(element, wanted, now_s)
            _pass_gates(element, gates, met)

    def _look_at_masses(self, kind: type[Any], elements: list[Any], now_s: float, met: Met) -> None:
        """One that has ended has no metrics, so it meets no screen; what is kept of it goes when it is removed."""
        for row in self._gates.get(kind, ()):
            met += _column(row, elements)
        if kind in self._user_gates:
            users = [element for element in elements if element.id in self.gpu_users]
            for row in self._user_gates[kind]:
                met += _column(row, users)
        wanted = self._wanted.get(kind)
        if wanted is not None:  # most of a crowd have none of what is wanted, or too little of it
            for element in elements:
                metrics = element.metrics
                for metric, (_, least) in wanted.items():
                    if metric in metrics and metrics[metric] >= least:
                        self._remember(element, self._horizons[kind], now_s)
                        break

    def watch(self, rule: ElementRule, key: Key) -> None:
        """Judge the element again in the next round, or when it is its turn, though it may not change."""
        if rule.every_rounds > 1:
            self.slow.setdefault((rule.name, _turn(key, rule.every_rounds)), {})[key] = rule
        else:
            self.watched.setdefault(key, {})[rule.name] = rule

    def unwatch(self, rule: ElementRule, key: Key) -> None:
        """Leave the element alone until it changes."""
        if rule.every_rounds > 1:
            self.slow.get((rule.name, _turn(key, rule.every_rounds)), {}).pop(key, None)
            return
        row = self.watched.get(key)
        if row is not None:
            row.pop(rule.name, None)
            if not row:
                del self.watched[key]

    def under_watch(self, round_number: int) -> Iterator[tuple[Key, ElementRule]]:
        """What is to be judged in this round whether it changed or not."""
        for key, rules in self.watched.items():
            for rule in rules.values():
                yield key, rule
        for rule in self._slow:
            for key in self.slow.get((rule.name, round_number % rule.every_rounds), ()):
                yield key, rule

    def meets_screens(self, rule: ElementRule, element: Any) -> bool:
        """Whether any screen of the rule lets the element through."""
        met: Met = []
        _pass_gates(element, self._own_gates[rule.name], met)
        return bool(met)

    def restart(self) -> None:
        """Rounds were missed: the past says nothing about now."""
        for row in self.histories.values():
            for series in row.values():
                series.restart()

    def memory_bytes(self) -> int:
        """What all this holds, about."""
        series = [each for row in self.histories.values() for each in row.values()]
        tables: tuple[Mapping[Any, Any], ...] = (self.out, self.into, self.by_kind)
        indexed = sum(len(row) for table in tables for row in table.values())
        return (
            sum(each.size_bytes for each in series)
            + 200 * (len(series) + len(self.histories))
            + 120 * indexed
            + 100 * (len(self.watched) + len(self.first_seen_s))
        )

    def _make_gates(self, rules: Sequence[ElementRule]) -> dict[type[Any], list[Gate]]:
        gates: dict[type[Any], list[Gate]] = {}
        for rule in rules:
            if not rule.every_round:
                for kind in rule.subjects():
                    gates.setdefault(kind, []).extend(self._gates_of(rule))
        return gates

    def _gates_of(self, rule: ElementRule) -> list[Gate]:
        if not rule.screens:
            return [(rule, None, None, None)]
        return [(rule, s.metric, COMPARE.get(s.comparison), self._screen_limit(rule, s)) for s in rule.screens]

    def _least(self, rules: Sequence[ElementRule], kind: type[Any], metric: str) -> float:
        """From which value on the past of a metric is of interest: where the screens of all that want it begin."""
        limits = []
        for rule in rules:
            if metric in rule.histories.get(kind, ()):
                mine = [
                    self._screen_limit(rule, s) for s in rule.screens if s.metric == metric and s.comparison[0] == ">"
                ]
                limits.append(min(mine) if mine else -math.inf)
        return min(limits, default=-math.inf)

    def _screen_limit(self, rule: Rule, screen: Screen) -> Any:
        return self._overrides.loosest(rule, screen.limit) if isinstance(screen.limit, str) else screen.limit

    def _remember(self, element: Any, wanted: Mapping[str, float], now_s: float) -> None:
        key = key_of(element)
        metrics = element.metrics
        row = self.histories.get(key)
        if row is None:
            row = self.histories[key] = {}
        for metric, horizon_s in wanted.items():
            series = row.get(metric)
            if metric in metrics:
                if series is None:
                    series = row[metric] = Series(horizon_s)
                series.append(now_s, metrics[metric])
            elif series is not None:
                series.restart()

    def _drop(self, key: Key, kind: type[Any] | None) -> None:
        """An element is gone."""
        if kind is not None and kind in self.by_kind:
            self.by_kind[kind].pop(key, None)
        if kind in self._marks and isinstance(key, str):
            for name in self._marks[kind]:
                self.members[(kind, name)].pop(key, None)
        self.first_seen_s.pop(key, None)
        self.histories.pop(key, None)
        self.watched.pop(key, None)
        for rule in self._slow:
            self.unwatch(rule, key)

    def _link(self, edge: Edge) -> None:
        kind = type(edge)
        self.out.setdefault((edge.source, kind), {})[edge.target] = None
        self.into.setdefault((edge.target, kind), {})[edge.source] = None
        if kind is edge_kinds.Access and edge.target.startswith(_GPUS):
            self.gpu_users.add(edge.source)

    def _unlink(self, key: EdgeKey, kind: type[Edge] | None) -> None:
        if kind is None or kind not in self._relations:
            return
        source, target, _tag = key
        for table, near, far in ((self.out, source, target), (self.into, target, source)):
            row = table.get((near, kind))
            if row is not None:
                row.pop(far, None)
                if not row:
                    del table[(near, kind)]
        if kind is edge_kinds.Access and target.startswith(_GPUS):
            left = self.out.get((source, kind), {})
            if not any(other.startswith(_GPUS) for other in left):
                self.gpu_users.discard(source)


def _turn(key: Key, rounds: int) -> int:
    """In which of so many rounds an element is judged; the same in every run."""
    return crc32((key if isinstance(key, str) else key[0]).encode("utf-8", "surrogatepass")) % rounds


def _sort_out(elements: Iterable[Any], attribute: str, members: dict[str, Any]) -> None:
    """Keep those of what is new or changed that have the attribute, and drop those that have it no more."""
    for element in elements:
        if attribute in element.attributes and ENDED not in element.attributes:
            members[element.id] = element
        elif members:
            members.pop(element.id, None)


def _column(gate: Gate, elements: Sequence[Any]) -> Met:
    """Those of many elements that one screen lets through; what has no such metric never is."""
    rule, name, compare, limit = gate
    least, most = -math.inf, math.inf
    if compare in (operator.gt, operator.ge):
        beyond = limit if compare is operator.gt else math.nextafter(limit, least)
        return [(rule, e) for e in elements if e.metrics.get(name, least) > beyond]
    if compare is not None:
        beyond = limit if compare is operator.lt else math.nextafter(limit, most)
        return [(rule, e) for e in elements if e.metrics.get(name, most) < beyond]
    return [(rule, e) for e in elements if name is None or e.attributes.get(name) in limit]


def _pass_gates(element: Any, gates: Iterable[Gate], met: Met) -> None:
    metrics = element.metrics
    for rule, name, compare, limit in gates:
        if compare is not None:
            if name in metrics and compare(metrics[name], limit):
                met.append((rule, element))
        elif name is None or element.attributes.get(name) in limit:
            met.append((rule, element))


def _wanted_histories(rules: Sequence[Rule]) -> dict[type[Any], dict[str, float]]:
    """Metrics whose past is kept, by kind, for as long as the rule that looks back farthest wants."""
    wanted: dict[type[Any], dict[str, float]] = {}
    for rule in rules:
        for kind, metrics in rule.histories.items():
            row = wanted.setdefault(kind, {})
            for metric, seconds in metrics.items():
                row[metric] = max(seconds, row.get(metric, 0.0))
    return wanted


def _wanted_members(rules: Sequence[Rule]) -> dict[type[Any], set[str]]:
    """Attributes whose bearers are kept, by kind."""
    wanted: dict[type[Any], set[str]] = {}
    for rule in rules:
        for kind, attribute in rule.members.items():
            wanted.setdefault(kind, set()).add(attribute)
    return wanted


def _kept_kinds(rules: Sequence[Rule], element_rules: Sequence[ElementRule]) -> set[type[Any]]:
    """Small kinds that rules go through: subjects, needs, and what has a past."""
    kinds: set[type[Any]] = {kind for rule in element_rules for kind in rule.subjects()}
    for rule in rules:
        kinds.update(need.kind for need in rule.needs)
        kinds.update(rule.histories)
    return {kind for kind in kinds if kind.__struct_config__.tag not in MASS_KINDS}
