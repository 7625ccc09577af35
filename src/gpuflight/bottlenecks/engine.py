"""The rule engine: judges each round by what changed in it.

Cost is proportional to the change: elements that are new or changed pass the screens of their kind (a dictionary lookup
and a comparison each), and only what meets a screen, is pending or is in an open finding is judged by a rule. What
could not be judged is surveyed when somebody asks (``survey``), and now and then for the coverage line.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from msgspec import Struct

from gpuflight.bottlenecks.base import ElementRule, GroupRule, NotYet, Rule, Unknown, Verdict
from gpuflight.bottlenecks.folding import fold
from gpuflight.bottlenecks.index import Index, is_mine, turn_of
from gpuflight.bottlenecks.lifecycle import Track
from gpuflight.bottlenecks.overrides import Overrides
from gpuflight.bottlenecks.survey import RuleState, survey_elements, survey_group
from gpuflight.bottlenecks.window import Key, Look, Window
from gpuflight.graph import Edge
from gpuflight.graph.store import ENDED
from gpuflight.rounds import Coverage, Finding, Note, Round

log = logging.getLogger(__name__)

_GAP = 5.0
"""Rounds this many times farther apart than the ones before have a hole between them: what is pending begins anew."""
_SURVEY_ROUNDS = 96
"""In so many rounds every rule is asked once what it cannot judge: every eight minutes at the default interval."""
_WHOLE_SURVEYS = (1, 3)
"""Rounds in which every rule is asked: the first, and the first one that has all rates."""
_FIRST_SIGHT = ("this was the first", "at its first sight")
"""Ends of reasons that the next round takes away."""
_SURVEY_ELEMENTS = 4
_SURVEY_LOOKS = 256
_NOTES = 8
_UNKNOWN = Verdict(state="unknown")

Subscribers = Callable[[], Sequence[Any]]
"""Gives each subscriber's ``subscribers.worker.SubscriberStatus``, a layer above."""


class Judgement(Struct, kw_only=True):
    """What the engine makes of one round: open findings, roots first; those that ended; its own coverage line."""

    findings: list[Finding]
    cleared: list[Finding]
    coverage: Coverage


class Engine:
    """Judges the rounds of one host, in their order. Not thread-safe: the core calls it from one thread.

    ``rules``: instances. ``subscribers`` gives the statistics of the subscribers. ``snapshot``: single saved graphs are
    judged: what asks for time becomes a finding that is not confirmed.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        *,
        overrides: Overrides | None = None,
        subscribers: Subscribers | None = None,
        snapshot: bool = False,
    ) -> None:
        self.rules = {rule.name: rule for rule in rules}
        self.snapshot = snapshot
        self._subscribers = subscribers
        self._overrides = overrides or Overrides()
        self._element_rules = [rule for rule in rules if isinstance(rule, ElementRule)]
        self._group_rules = [rule for rule in rules if isinstance(rule, GroupRule)]
        self._index = Index(rules, self._overrides)
        self.clear()

    def clear(self) -> None:
        """Forget everything; the next round is the first."""
        self._index.clear()
        self._tracks: dict[str, dict[str, Track]] = {name: {} for name in self.rules}
        self._failed: dict[str, str] = {}
        self.window = Window(self._index, self._overrides, self.snapshot)
        self._started = False
        self._last_time_ns = 0
        self._unknown: dict[str, str] = {}
        self._unknown_notes: list[Note] = []

    def judge(self, done: Round) -> Judgement:
        """Judge a round; its ``graph`` and ``diff`` are read, nothing of it is changed. A rule that fails costs that
        rule this round, and is named on the coverage line."""
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        window = self.window
        self._open(done)
        due = self._index.take(done, window.now_s, window.rounds_count, first=not self._started)
        self._started = True
        self._failed = {}
        cleared: list[Finding] = []
        for rule, elements in due.items():
            self._judge_elements(rule, elements, cleared)
        for group in self._group_rules:
            if window.rounds_count % group.every_rounds == turn_of(group, group.name) or window.rounds_count == 1:
                self._judge_group(group, cleared)
        self._end_the_gone(cleared)
        findings = fold(self._findings(), self.rules, window)
        notes = [
            *(Note(reason=f"rule {name} failed: {why}") for name, why in self._failed.items()),
            *self._survey_some(),
        ]
        coverage = Coverage(
            collector="rules",
            status="ok",
            wall_ms=round((time.perf_counter() - began_s) * 1e3, 3),
            cpu_ms=round((time.thread_time() - began_cpu_s) * 1e3, 3),
            notes=notes,
        )
        return Judgement(findings=findings, cleared=cleared, coverage=coverage)

    def suspected(self) -> list[Finding]:
        """Conditions that are met now, but not yet for as long as their rule demands."""
        window = self.window
        return [
            track.suspected(window.round.number, window.time_ns, window.now_s)
            for track in self._all_tracks()
            if track.finding is None and track.met_since_s is not None
        ]

    def survey(self) -> list[RuleState]:
        """Every rule about every subject of the last round, without changing anything. O(elements x rules)."""
        if not self._started:
            return [RuleState(rule=name, unknown={"no round yet": 1}) for name in self.rules]
        wanted = {kind for rule in self._element_rules for kind in rule.subjects()}
        elements: dict[type[Any], list[Any]] = {}
        graph = self.window.round.graph
        for element in (*graph.nodes.values(), *graph.edges.values()):
            if type(element) in wanted and is_mine(element):
                elements.setdefault(type(element), []).append(element)
        return [self._state_of(rule, lambda kind: elements.get(kind, ())) for rule in self.rules.values()]

    def _state_of(self, rule: Rule, of_kind: Callable[[type[Any]], Sequence[Any]]) -> RuleState:
        opened = {subject for subject, track in self._tracks[rule.name].items() if track.finding is not None}
        state = RuleState(rule=rule.name, open_count=len(opened), failed=self._failed.get(rule.name, ""))
        if isinstance(rule, ElementRule):
            mine = (each for kind in rule.subjects() for each in of_kind(kind))
            others = [each for each in mine if not opened or each.id not in opened]
            survey_elements(rule, others, self._ask, self._index.meets_screens, state)
        elif isinstance(rule, GroupRule):
            survey_group(lambda: list(rule.judge(self.window)), state)
        return state

    def _survey_some(self) -> list[Note]:
        """A part of the rules each round, all of them in the first ones, about some elements of each kind: why rules
        cannot judge, each reason with how many rules it concerns."""
        turn = self.window.rounds_count
        first, step = (0, 1) if turn in _WHOLE_SURVEYS else (turn % _SURVEY_ROUNDS, _SURVEY_ROUNDS)
        before = dict(self._unknown)
        for name, rule in islice(self.rules.items(), first, None, step):
            state = self._state_of(rule, self._some)
            why = next(iter(state.unknown)) if state.state == "unknown" else ""
            self._unknown[name] = "" if turn == 1 and why.endswith(_FIRST_SIGHT) else why
        if self._unknown != before:
            counts = Counter(reason for reason in self._unknown.values() if reason)
            self._unknown_notes = [
                Note(reason=f"rules that cannot judge: {reason}", count=count)
                for reason, count in counts.most_common(_NOTES)
            ]
        return self._unknown_notes

    def _some(self, kind: type[Any]) -> Sequence[Any]:
        graph = self.window.round.graph
        kept = self._index.by_kind.get(kind)
        found: Iterable[Any]
        if kept is not None:
            found = kept.values()
        else:
            everything = graph.edges if issubclass(kind, Edge) else graph.nodes
            found = (each for each in islice(everything.values(), _SURVEY_LOOKS) if type(each) is kind)
        return [each for each in islice(found, _SURVEY_ELEMENTS) if is_mine(each)]

    def memory_bytes(self) -> int:
        """What the window holds, about: the past of metrics, indexes, states of findings."""
        return self._index.memory_bytes() + 600 * sum(map(len, self._tracks.values()))

    def _open(self, done: Round) -> None:
        window = self.window
        if done.monotonic_s is not None:
            now_s = done.monotonic_s
        elif not self._started:
            now_s = done.time_ns / 1e9
        else:  # the wall clock only: a step back is no time, a step ahead is a gap
            now_s = window.now_s + max((done.time_ns - self._last_time_ns) / 1e9, 0.0)
        self._last_time_ns = done.time_ns
        interval_s = now_s - window.now_s if self._started else None
        if interval_s is None:
            window.started_s = now_s
        elif interval_s < 0 or self._is_gap(interval_s):
            window.started_s = now_s
            self._index.restart()
            for track in self._all_tracks():
                track.restart()
            interval_s = None
        window.interval_s = interval_s or None
        window.now_s = now_s
        window.round = done
        window.rounds_count += 1
        if self._subscribers is not None:
            window.subscribers_before = window.subscribers
            window.subscribers = self._subscribers()

    def _is_gap(self, interval_s: float) -> bool:
        usual_s = self.window.interval_s
        return usual_s is not None and interval_s > max(usual_s * _GAP, usual_s + 30.0)

    def _ask(self, rule: Rule, element: Any) -> Verdict:
        assert isinstance(rule, ElementRule)  # noqa: S101
        return rule.judge(Look(rule, element, self.window, False))

    def _judge_elements(self, rule: ElementRule, elements: Mapping[Key, Any], cleared: list[Finding]) -> None:
        tracks, window, index = self._tracks[rule.name], self.window, self._index
        # Means move, and a history becomes long enough, though the element stays as it is.
        moves = bool(rule.histories) and rule.time_matters
        again: list[Key] = []
        quiet: list[Key] = []
        for key, element in elements.items():
            track = tracks.get(element.id)
            soon = False
            try:
                verdict = rule.judge(Look(rule, element, window, track is not None and track.finding is not None))
            except Unknown as reason:
                verdict = _UNKNOWN
                soon = isinstance(reason, NotYet)
            except Exception as error:  # noqa: BLE001 - a rule that throws costs that rule this round
                self._fail(rule, error)
                again.append(key)
                continue
            if verdict.state == "fired":
                verdict.subject = verdict.subject or element.id
                since_s = max(index.first_seen_s.get(key, window.started_s), window.started_s)
                self._fired(rule, verdict, key, ready=window.now_s - since_s >= rule.warm_up_s)
                again.append(key)
                continue
            if track is not None:
                ended = track.clear(window.now_s) if verdict.state == "clear" else track.unknown(window.now_s)
                if ended is not None:
                    cleared.append(ended)
            waits = index.meets_screens(rule, element) if rule.screens else soon or moves
            (again if waits or (track is not None and not track.idle) else quiet).append(key)
        if again:
            index.watch(rule, again)
        if quiet:
            index.unwatch(rule, quiet)

    def _judge_group(self, rule: GroupRule, cleared: list[Finding]) -> None:
        window = self.window
        try:
            verdicts = list(rule.judge(window))
        except Unknown as reason:
            verdicts = [Verdict(state="unknown", reason=str(reason))]
        except Exception as error:  # noqa: BLE001 - see above
            self._fail(rule, error)
            return
        said = {verdict.subject: verdict for verdict in verdicts if verdict.subject}
        rest = "unknown" if any(v.state == "unknown" and not v.subject for v in verdicts) else "clear"
        for verdict in said.values():
            if verdict.state == "fired":
                self._fired(rule, verdict, None, ready=window.watched_s >= rule.warm_up_s)
        for subject, track in self._tracks[rule.name].items():
            state = said[subject].state if subject in said else rest
            if state != "fired":
                ended = track.clear(window.now_s) if state == "clear" else track.unknown(window.now_s)
                if ended is not None:
                    cleared.append(ended)

    def _fired(self, rule: Rule, verdict: Verdict, key: Key | None, ready: bool) -> None:
        if not verdict.evidence or not (verdict.entities or verdict.edges):
            self._fail(rule, ValueError("fired without evidence, or about no element"))
            return
        tracks = self._tracks[rule.name]
        track = tracks.get(verdict.subject)
        if track is None:
            track = tracks[verdict.subject] = Track(rule, verdict.subject, key)
        window = self.window
        track.fired(verdict, window.now_s, window.round.number, window.time_ns, ready or self.snapshot)

    def _fail(self, rule: Rule, error: Exception) -> None:
        if rule.name not in self._failed:
            log.warning("rule %s failed: %s", rule.name, error, exc_info=log.isEnabledFor(logging.DEBUG))
        self._failed[rule.name] = f"{type(error).__name__}: {error}"

    def _end_the_gone(self, cleared: list[Finding]) -> None:
        """Findings about elements that are not in the graph any more end; what is idle is forgotten."""
        window, graph = self.window, self.window.round.graph
        for tracks in filter(None, self._tracks.values()):
            for subject, track in list(tracks.items()):
                if track.key is not None:
                    element = graph.nodes.get(track.key) if isinstance(track.key, str) else graph.edges.get(track.key)
                    if element is None or ENDED in element.attributes:
                        ended = track.end()
                        if ended is not None:
                            cleared.append(ended)
                        del tracks[subject]
                        continue
                if track.forgettable(window.now_s):
                    del tracks[subject]

    def _findings(self) -> list[Finding]:
        found = [track.finding for track in self._all_tracks() if track.finding is not None]
        return [*found, *self.suspected()] if self.snapshot else found

    def _all_tracks(self) -> list[Track]:
        return [track for tracks in self._tracks.values() for track in tracks.values()]
