"""What the engine keeps between rounds about the elements: which meet a screen, the past of metrics, ways between them.

Everything here is brought up to date by a round's difference, so an element that did not change costs nothing.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from zlib import crc32

from gpuflight.bottlenecks.base import MASS_KINDS, ElementRule, Rule, Screen
from gpuflight.bottlenecks.overrides import Overrides
from gpuflight.bottlenecks.series import Series, Table
from gpuflight.bottlenecks.window import Key, key_of
from gpuflight.graph import Edge, Entity, Graph
from gpuflight.graph import edges as edge_kinds
from gpuflight.graph.diff import Change
from gpuflight.graph.edges import EDGE_KINDS
from gpuflight.graph.element import EdgeKey
from gpuflight.graph.nodes import NODE_KINDS, Session
from gpuflight.graph.store import ENDED
from gpuflight.rounds import Round

COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le,
}  # fmt: skip
_FOLDING = (edge_kinds.Access, edge_kinds.Host, edge_kinds.Own)
"""Kinds of edge that folding follows (folding.py)."""

CALM_ROUNDS = 3
"""A session that goes on changes in each round, and with it all that rules look at: half a minute of it, or more. Each
rule about sums of sessions (``whole_session``) that has nothing to say about one looks again in so many rounds."""

_TABLE_COLUMNS = 16
"""So many metrics of a kind that are looked at over the same time are worth a table."""

_GPUS = ("GPU(", "MigInstance(")

Gate = tuple[ElementRule, str | None, Callable[[Any, Any], bool] | None, Any]
"""A rule with one screen: metric, comparison, limit; without comparison it is an attribute; without name all pass."""
Due = dict[ElementRule, dict[Key, Any]]
"""Elements that each rule is to judge."""


class Index:
    """The elements of one host as the rules need them. ``by_kind``, ``out`` and ``into`` are read by ``Window``."""

    def __init__(self, rules: Sequence[Rule], overrides: Overrides) -> None:
        self._overrides = overrides
        element_rules = [rule for rule in rules if isinstance(rule, ElementRule)]
        self._gates = self._make_gates([rule for rule in element_rules if not rule.gpu_users_only])
        self._user_gates = self._make_gates([rule for rule in element_rules if rule.gpu_users_only])
        horizons = _wanted_histories(rules)
        self._columns = {kind: _columns(row) for kind, row in horizons.items()}
        self._horizons = {
            kind: {metric: seconds for metric, seconds in row.items() if metric not in self._columns[kind]}
            for kind, row in horizons.items()
        }
        self._wanted = {
            kind: {metric: (seconds, self._least(element_rules, kind, metric)) for metric, seconds in row.items()}
            for kind, row in horizons.items()
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
        self.tables: dict[Key, Table] = {}
        self.first_seen_s: dict[Key, float] = {}
        self._watched: dict[ElementRule, list[dict[Key, None]]] = {
            rule: [{} for _ in range(rule.every_rounds)] for rule in element_rules
        }
        """What each rule judges though it may not change, by the turn in which it does."""
        self._slow = [rule for rule in element_rules if rule.every_rounds > 1]
        self._every_round = [rule for rule in element_rules if rule.every_round]
        self._calm: dict[ElementRule, set[Key]] = {
            rule: set()
            for rule in element_rules
            if rule.whole_session and rule.every_rounds == 1 and Session in rule.subjects()
        }
        """Sessions that each rule about their sums has nothing to say about."""
        self._stirred: list[dict[Key, None]] = [{} for _ in range(CALM_ROUNDS)]
        """Sessions that changed since it was last their turn, by turn."""
        self.gpu_users: set[str] = set()
        self.members: dict[tuple[type[Any], str], dict[str, Any]] = {
            (kind, name): {} for kind, names in self._marks.items() for name in names
        }

    def clear(self) -> None:
        """Forget everything."""
        for table in (self.by_kind, self.out, self.into, self.histories, self.tables, self.first_seen_s):
            table.clear()
        for turns in (*self._watched.values(), self._stirred):
            for row in turns:
                row.clear()
        for calm in self._calm.values():
            calm.clear()
        for members in self.members.values():
            members.clear()
        self.gpu_users.clear()

    def take(self, done: Round, now_s: float, round_number: int, first: bool) -> Due:
        """Bring everything up to date with a round; what is to be judged in it, since it changed and meets a screen, or
        whether it changed or not."""
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
        due: Due = {}
        self._link_all(edges_added, done, due)
        groups: dict[type[Any], list[Any]] = {kind: [] for kind in self._concerned}
        for elements in (nodes_added, edges_added, *([step.after for step in steps] for steps in changed)):
            for element in elements:
                if (group := groups.get(type(element))) is not None:
                    group.append(element)
        for kind, names in self._marks.items():
            for name in names:
                _sort_out(groups[kind], name, self.members[(kind, name)])
        for kind, group in groups.items():  # of masses a screen is one pass over a column
            if kind in self._kept and (group or kind is Session):
                self._look_at_few(kind, group, now_s, round_number, due)
            elif group:
                self._look_at_masses(kind, group, now_s, due)
        if self._warm:
            for entity in nodes_added:
                if type(entity) in self._warm:
                    self.first_seen_s[entity.id] = now_s
        self._add_watched(due, done.graph, round_number)
        return due

    def _add_watched(self, due: Due, graph: Graph, round_number: int) -> None:
        """Add what is to be judged in this round whether it changed or not, and take out what is not in its turn."""
        for rule in self._slow:
            if later := due.pop(rule, None):
                self.watch(rule, later)
        for rule, turns in self._watched.items():
            if row := turns[round_number % len(turns)]:
                mine = due.setdefault(rule, {})
                for key in [key for key in row if key not in mine]:
                    element = graph.nodes.get(key) if isinstance(key, str) else graph.edges.get(key)
                    if element is None:
                        del row[key]
                    elif is_mine(element):
                        mine[key] = element
        for rule in self._every_round:
            if round_number % rule.every_rounds == 0:
                mine = due.setdefault(rule, {})
                for kind in rule.subjects():
                    mine.update((k, e) for k, e in self.by_kind.get(kind, {}).items() if is_mine(e))

    def _link_all(self, edges: Iterable[Edge], done: Round, due: Due) -> None:
        """New edges between elements; who uses a GPU from now on passes the screens for these, changed or not."""
        before = self.gpu_users.copy()
        for edge in edges:
            if type(edge) in self._relations:
                self._link(edge)
        for entity_id in self.gpu_users - before:
            user = done.graph.nodes.get(entity_id)
            if user is not None:
                for gate in self._user_gates.get(type(user), ()):
                    _pass_gate(gate, [user], due)

    def _look_at_few(self, kind: type[Any], elements: Sequence[Any], now_s: float, round_number: int, due: Due) -> None:
        wanted, here = self._horizons.get(kind), self.by_kind.setdefault(kind, {})
        wires = issubclass(kind, Edge)
        alive = {e.key if wires else e.id: e for e in elements if ENDED not in e.attributes}
        if len(alive) < len(elements):
            for element in elements:
                if ENDED in element.attributes:
                    self._drop(key_of(element), kind)
        here.update(alive)
        if wanted is not None:
            for key, element in alive.items():
                self._remember(key, element, wanted, now_s)
        mine = {key: e for key, e in alive.items() if (is_mine(e) if wires else not e.ns)}
        now, later = self._by_turn(mine, round_number) if kind is Session else (mine, {})
        if not (mine or now):
            return
        for gate in self._gates.get(kind, ()):
            rule, these = gate[0], mine
            if rule in self._calm:
                these = now
                if restless := later.keys() - self._calm[rule]:
                    these = now | {key: later[key] for key in later if key in restless}
            if gate[1] is not None:
                _pass_gate(gate, these.values(), due)
            elif these:
                due.setdefault(rule, {}).update(these)

    def _by_turn(self, mine: dict[Key, Any], round_number: int) -> tuple[dict[Key, Any], dict[Key, Any]]:
        """Sessions that changed now or since their last turn: those to judge now, and those that may wait if calm."""
        turns, turn, here = self._stirred, round_number % CALM_ROUNDS, self.by_kind[Session]
        now = {key: here[key] for key in turns[turn] if key in here}
        later: dict[Key, Any] = {}
        turns[turn].clear()
        for key, element in mine.items():
            its_turn = _turn(key, CALM_ROUNDS)
            if its_turn == turn or element.attributes.get("state") != "live":
                now[key] = element
            else:
                later[key] = element
                turns[its_turn][key] = None
        return now, later

    def _look_at_masses(self, kind: type[Any], elements: list[Any], now_s: float, due: Due) -> None:
        """One that has ended has no metrics, so it meets no screen; what is kept of it goes when it is removed."""
        for gate in self._gates.get(kind, ()):
            _pass_gate(gate, elements, due)
        if kind in self._user_gates:
            users = [element for element in elements if element.id in self.gpu_users]
            for gate in self._user_gates[kind]:
                _pass_gate(gate, users, due)
        wanted = self._wanted.get(kind)
        if wanted is not None:  # most of a crowd have none of what is wanted, or too little of it
            for element in elements:
                metrics = element.metrics
                for metric, (_, least) in wanted.items():
                    if metric in metrics and metrics[metric] >= least:
                        self._remember(key_of(element), element, self._horizons[kind], now_s)
                        break

    def history(self, key: Key, metric: str) -> Series | None:
        """The past of a metric that a rule declared."""
        if (table := self.tables.get(key)) is not None and metric in table:
            return table.series(metric)
        row = self.histories.get(key)
        return row.get(metric) if row is not None else None

    def covered_s(self, key: Key, metric: str, now_s: float) -> float:
        """For how long the past of a metric is known."""
        if (table := self.tables.get(key)) is not None and metric in table:
            return table.covered_s(metric, now_s)
        series = self.history(key, metric)
        return series.covered_s(now_s) if series is not None else 0.0

    def increase(self, key: Key, metric: str, now_s: float, window_s: float) -> float | None:
        """By how much a counter rose within the window; None at its first sight."""
        if (table := self.tables.get(key)) is not None and metric in table:
            return table.increase(metric, now_s, window_s)
        series = self.history(key, metric)
        return series.rose(now_s, window_s) if series is not None else None

    def watch(self, rule: ElementRule, keys: Iterable[Key]) -> None:
        """Judge these again in the next round, or when it is their turn, though they may not change."""
        turns = self._watched[rule]
        for key in keys:
            turns[turn_of(rule, key)][key] = None
        if rule in self._calm:
            self._calm[rule].difference_update(keys)

    def unwatch(self, rule: ElementRule, keys: Iterable[Key]) -> None:
        """Leave these alone until they change."""
        turns = self._watched[rule]
        if any(turns):
            for key in keys:
                turns[turn_of(rule, key)].pop(key, None)
        if rule in self._calm:
            self._calm[rule].update(keys)

    def meets_screens(self, rule: ElementRule, element: Any) -> bool:
        """Whether any screen of the rule lets the element through."""
        return any(_column(gate, (element,)) for gate in self._own_gates[rule.name])

    def restart(self) -> None:
        """Rounds were missed: the past says nothing about now."""
        for row in self.histories.values():
            for series in row.values():
                series.restart()
        for table in self.tables.values():
            table.restart()

    def memory_bytes(self) -> int:
        """What all this holds, about."""
        series = [each for row in self.histories.values() for each in row.values()]
        tables: tuple[Mapping[Any, Any], ...] = (self.out, self.into, self.by_kind)
        indexed = sum(len(row) for table in tables for row in table.values())
        return (
            sum(each.size_bytes for each in series)
            + sum(each.size_bytes for each in self.tables.values())
            + 200 * (len(series) + len(self.histories) + len(self.tables))
            + 120 * indexed
            + 100 * (sum(len(row) for turns in self._watched.values() for row in turns) + len(self.first_seen_s))
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

    def _remember(self, key: Key, element: Any, wanted: Mapping[str, float], now_s: float) -> None:
        metrics = element.metrics
        if columns := self._columns[type(element)]:
            table = self.tables.get(key)
            if table is None:
                table = self.tables[key] = Table(columns, self._wanted[type(element)][next(iter(columns))][0])
            table.append(now_s, metrics)
        row = self.histories.setdefault(key, {})
        if len(row) < len(wanted):
            row |= {metric: Series(wanted[metric]) for metric in wanted if metric in metrics and metric not in row}
        for metric, series in row.items():
            if metric in metrics:
                series.append(now_s, metrics[metric])
            else:
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
        self.tables.pop(key, None)
        if kind is Session:
            for calm in self._calm.values():
                calm.discard(key)

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


def is_mine(element: Any) -> bool:
    """Whether an element is alive and of this host; foreign ones are judged by their own gpuflight."""
    if ENDED in element.attributes:
        return False
    if isinstance(element, Entity):
        return not element.ns
    return "(ns=" not in element.source and "(ns=" not in element.target


def turn_of(rule: Rule, key: Key) -> int:
    """In which of its rounds a rule judges an element. All about jobs in one: what is derived of them serves all."""
    if rule.every_rounds == 1:
        return 0
    return _turn("jobs" if rule.members else key, rule.every_rounds)


def _turn(key: Key, rounds: int) -> int:
    """One of so many rounds; the same in every run."""
    return crc32((key if isinstance(key, str) else key[0]).encode("utf-8", "surrogatepass")) % rounds


def _sort_out(elements: Iterable[Any], attribute: str, members: dict[str, Any]) -> None:
    """Keep those of what is new or changed that have the attribute, and drop those that have it no more."""
    for element in elements:
        if attribute in element.attributes and ENDED not in element.attributes:
            members[element.id] = element
        elif members:
            members.pop(element.id, None)


def _pass_gate(gate: Gate, elements: Iterable[Any], due: Due) -> None:
    """Those of the elements that one screen lets through are due for its rule, if they are of this host."""
    passed = _column(gate, elements)
    if passed:
        due.setdefault(gate[0], {}).update((key_of(e), e) for e in passed if is_mine(e))


def _column(gate: Gate, elements: Iterable[Any]) -> list[Any]:
    """Those of many elements that one screen lets through; what has no such metric never is."""
    _rule, name, compare, limit = gate
    least, most = -math.inf, math.inf
    if compare in (operator.gt, operator.ge):
        beyond = limit if compare is operator.gt else math.nextafter(limit, least)
        return [e for e in elements if e.metrics.get(name, least) > beyond]
    if compare is not None:
        beyond = limit if compare is operator.lt else math.nextafter(limit, most)
        return [e for e in elements if e.metrics.get(name, most) < beyond]
    return [e for e in elements if name is None or e.attributes.get(name) in limit]


def _wanted_histories(rules: Sequence[Rule]) -> dict[type[Any], dict[str, float]]:
    """Metrics whose past is kept, by kind, for as long as the rule that looks back farthest wants."""
    wanted: dict[type[Any], dict[str, float]] = {}
    for rule in rules:
        for kind, metrics in rule.histories.items():
            row = wanted.setdefault(kind, {})
            for metric, seconds in metrics.items():
                row[metric] = max(seconds, row.get(metric, 0.0))
    return wanted


def _columns(horizons: Mapping[str, float]) -> dict[str, int]:
    """Metrics of a kind that are kept in one table: many that are looked at over the same time. With their columns."""
    times = Counter(horizons.values()).most_common(1)
    if not times or times[0][1] < _TABLE_COLUMNS:
        return {}
    return {m: at for at, m in enumerate(m for m, seconds in horizons.items() if seconds == times[0][0])}


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
