"""What rules are given: the newest round, the recent past of the metrics they asked for, and ways between elements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from gpuflight.bottlenecks.base import NotYet, Rule, Unknown, Verdict
from gpuflight.bottlenecks.series import Series
from gpuflight.graph import Edge, Entity, nodes
from gpuflight.graph import edges as edge_kinds
from gpuflight.graph.element import EdgeKey
from gpuflight.graph.store import ENDED
from gpuflight.graph.units import human
from gpuflight.rounds import Evidence, Round, Severity

if TYPE_CHECKING:
    from gpuflight.bottlenecks.index import Index
    from gpuflight.bottlenecks.overrides import Overrides

E = TypeVar("E", bound=Entity)
T = TypeVar("T")
Key = str | EdgeKey


def key_of(element: Entity | Edge) -> Key:
    """What an element is kept under: an entity's id, an edge's key."""
    return element.id if isinstance(element, Entity) else element.key


class Window:
    """One round as rules see it. ``now_s`` is monotonic; ``interval_s`` the time since the round before (None at the
    first); ``time_ns`` the wall clock. Made by the engine; read-only for rules."""

    def __init__(self, index: Index, overrides: Overrides, snapshot: bool = False) -> None:
        self.round: Round
        self.now_s = 0.0
        self.interval_s: float | None = None
        self.rounds_count = 0
        self.started_s = 0.0
        self.snapshot = snapshot
        self.subscribers_before: Sequence[Any] = ()
        self.subscribers: Sequence[Any] = ()
        """Each subscriber's state: ``name``, ``policy``, ``statistics`` (received, sent, queued, dropped_by …)."""
        self._index = index
        self._shared: tuple[int, dict[str, Any]] = (0, {})
        self.overrides = overrides

    @property
    def time_ns(self) -> int:
        """Wall clock of the round, ns since the epoch."""
        return self.round.time_ns

    @property
    def watched_s(self) -> float:
        """For how long rounds have been judged without a gap."""
        return self.now_s - self.started_s

    def all(self, kind: type[E]) -> Iterator[E]:
        """Every live entity of a small kind that some rule declared as ``subject``, ``needs`` or in ``histories``."""
        return iter(list(self._index.by_kind.get(kind, {}).values()))

    def all_edges(self, kind: type[Edge]) -> Iterator[Edge]:
        """Every edge of a kind that some rule declared."""
        return iter(list(self._index.by_kind.get(kind, {}).values()))

    def members(self, kind: type[E], attribute: str) -> list[E]:
        """Every live entity of a kind that has an attribute, foreign ones too; some rule must declare it in
        ``members``."""
        return list(self._index.members.get((kind, attribute), {}).values())

    def shared(self, name: str, make: Callable[[Window], T]) -> T:
        """What several rules derive from this round: made once, then given to all."""
        number, made = self._shared
        if number != self.rounds_count:
            self._shared = (self.rounds_count, made := {})
        if name not in made:
            made[name] = make(self)
        found: T = made[name]
        return found

    def entity(self, entity_id: str) -> Entity | None:
        """An entity of this round by id."""
        return self.round.graph.nodes.get(entity_id)

    def out_of(self, entity_id: str, kind: type[Edge]) -> list[Edge]:
        """Edges of ``kind`` that begin at an entity; the rule must declare the kind in ``relations``."""
        tag = str(kind.__struct_config__.tag)
        return self._edges((entity_id, far, tag) for far in self._index.out.get((entity_id, kind), ()))

    def into(self, entity_id: str, kind: type[Edge]) -> list[Edge]:
        """Edges of ``kind`` that end at an entity; the rule must declare the kind in ``relations``."""
        tag = str(kind.__struct_config__.tag)
        return self._edges((far, entity_id, tag) for far in self._index.into.get((entity_id, kind), ()))

    def _edges(self, keys: Iterable[EdgeKey]) -> list[Edge]:
        edges = self.round.graph.edges
        return [edge for key in keys if (edge := edges.get(key)) is not None and ENDED not in edge.attributes]

    def users(self, gpu: Entity) -> list[nodes.Process]:
        """The live processes that use a GPU (``Access`` edges; needs it in ``relations``)."""
        found = (self.entity(edge.source) for edge in self.into(gpu.id, edge_kinds.Access))
        return [entity for entity in found if isinstance(entity, nodes.Process)]

    def gpus_of(self, process: Entity) -> list[nodes.GPU]:
        """The GPUs that a process uses (``Access`` edges; needs it in ``relations``)."""
        known: dict[str, list[nodes.GPU]] = self.shared("gpus of", lambda _: {})
        if process.id not in known:
            found = (self.entity(edge.target) for edge in self.out_of(process.id, edge_kinds.Access))
            known[process.id] = [entity for entity in found if isinstance(entity, nodes.GPU)]
        return known[process.id]

    def history(self, element: Entity | Edge, metric: str) -> Series | None:
        """The past of a metric that a rule declared in ``histories``."""
        return self._index.history(key_of(element), metric)

    def covered_s(self, element: Entity | Edge, metric: str) -> float:
        """For how long the past of a metric is known."""
        return self._index.covered_s(key_of(element), metric, self.now_s)

    def increase(self, element: Entity | Edge, metric: str, window_s: float) -> float | None:
        """By how much a counter rose within the window; None at its first sight."""
        return self._index.increase(key_of(element), metric, self.now_s, window_s)


class Look:
    """One rule's view of one element. What it reads through ``metric`` and its kin is unknown with a reason where it is
    missing, and can be quoted as evidence by ``saw``."""

    __slots__ = ("active", "element", "rule", "window")

    def __init__(self, rule: Rule, element: Any, window: Window, active: bool) -> None:
        self.rule = rule
        self.element = element
        self.window = window
        self.active = active
        """Whether a finding of this rule about this element is open."""

    @property
    def id(self) -> str:
        """Id of the element (an edge's too)."""
        return str(self.element.id)

    @property
    def label(self) -> str:
        """What people call it."""
        if isinstance(self.element, Edge):
            return f"{name_of(self.window, self.element.source)} → {name_of(self.window, self.element.target)}"
        return name_of(self.window, self.element.id)

    def limit(self, name: str) -> float:
        """A threshold of the rule: as overridden for this element, and where a finding is open, where it ends."""
        threshold = self.window.overrides.threshold(self.rule, name, self.element)
        return threshold.value if not self.active or threshold.clear_at is None else threshold.clear_at

    def has(self, metric: str) -> bool:
        """Whether a metric is known."""
        return metric in self.element.metrics

    def metric(self, name: str, of: Entity | Edge | None = None) -> float:
        """A metric of the element, or of another one. Raises Unknown with the reason that the collector gave."""
        element = self.element if of is None else of
        value = element.metrics.get(name)
        if value is None:
            raise Unknown(f"{name} of {element.kind}: {(element.unknown or {}).get(name) or 'not measured here'}")
        return value

    def attribute(self, name: str, of: Entity | Edge | None = None) -> Any:
        """An attribute of the element, or of another one. Raises Unknown."""
        element = self.element if of is None else of
        value = element.attributes.get(name)
        if value is None:
            raise Unknown(f"{name} of {element.kind}: {(element.unknown or {}).get(name) or 'not told here'}")
        return value

    def history(self, metric: str, window_s: float, of: Entity | Edge | None = None, least: float = 0.5) -> Series:
        """The past of a metric (declared in ``histories``). Raises Unknown until ``least`` of the window is known."""
        element = self.element if of is None else of
        known_s = self.covered_s(metric, window_s, of, least)
        series = self.window.history(element, metric)
        if series is None:
            raise self._not_yet(metric, known_s, window_s * least, element)
        return series

    def covered_s(self, metric: str, window_s: float, of: Entity | Edge | None = None, least: float = 0.5) -> float:
        """For how long the past of a metric is known. Raises Unknown until ``least`` of the window is."""
        element = self.element if of is None else of
        if metric not in element.metrics:
            self.metric(metric, element)
        known_s = self.window.covered_s(element, metric)
        if known_s < window_s * least:
            raise self._not_yet(metric, known_s, window_s * least, element)
        return known_s

    @staticmethod
    def _not_yet(metric: str, known_s: float, needed_s: float, element: Entity | Edge) -> NotYet:
        return NotYet(f"{metric} of {element.kind}: watched for {known_s:.0f} s, {needed_s:.0f} s are needed")

    def increase(self, metric: str, window_s: float, of: Entity | Edge | None = None) -> float:
        """By how much a counter rose within the window (resets taken into account). Unknown at its first sight."""
        element = self.element if of is None else of
        self.metric(metric, element)
        rose = self.window.increase(element, metric, window_s)
        if rose is None:
            raise NotYet(f"{metric} of {element.kind}: a counter says nothing at its first sight")
        return rose

    def saw(
        self,
        metric: str,
        value: float | str | None = None,
        *,
        unit: str | None = None,
        of: Entity | Edge | None = None,
        samples_count: int = 1,
        window_s: float = 0.0,
    ) -> Evidence:
        """Evidence: a metric (or attribute) as it is, or a value computed from it, with its unit by its name."""
        element = self.element if of is None else of
        if value is None:
            found = element.metrics.get(metric, element.attributes.get(metric))
            value = found if isinstance(found, int | float) and not isinstance(found, bool) else str(found)
        return evidence(element.id, metric, value, unit=unit, samples_count=samples_count, window_s=window_s)

    def fired(
        self,
        message: str,
        seen: Iterable[Evidence],
        *,
        severity: Severity | None = None,
        entities: Iterable[str] = (),
        edges: Iterable[str] = (),
        cost: str = "",
        cost_gpu_s: float | None = None,
        advice: str = "",
        verify: str = "",
    ) -> Verdict:
        """The condition is met. The element itself is always among the entities or edges."""
        concerned, wires = list(entities), list(edges)
        mine = wires if isinstance(self.element, Edge) else concerned
        if self.id not in mine:
            mine.insert(0, self.id)
        return Verdict(
            state="fired",
            subject=self.id,
            severity=severity or self.rule.severity,
            entities=concerned,
            edges=wires,
            evidence=list(seen),
            message=message,
            cost=cost,
            cost_gpu_s=cost_gpu_s,
            advice=advice or self.rule.advice,
            verify=verify or self.rule.verify,
        )


def evidence(
    element: str,
    metric: str,
    value: float | str,
    *,
    unit: str | None = None,
    samples_count: int = 1,
    window_s: float = 0.0,
) -> Evidence:
    """One piece of evidence, its unit read off the metric's name unless given."""
    if unit is None:
        unit = "" if isinstance(value, str) else unit_of(metric)
    if isinstance(value, float):
        value = float(f"{value:.6g}")
    return Evidence(
        element=element, metric=metric, value=value, unit=unit, samples_count=samples_count, window_s=round(window_s, 3)
    )


_UNITS = (
    ("_bytes_per_s", "B/s"), ("_bits_per_s", "bit/s"), ("_gt_per_s", "GT/s"), ("_per_s", "1/s"), ("_bytes", "B"),
    ("_pct", "%"), ("_celsius", "°C"), ("_watts", "W"), ("_hz", "Hz"), ("_cores", "cores"), ("_ns", "ns"),
    ("_us", "µs"), ("_ms", "ms"), ("_s", "s"),
)  # fmt: skip


def unit_of(metric: str) -> str:
    """SI unit by the suffix of a metric's name; "" for counts and ratios."""
    for suffix, unit in _UNITS:
        if metric.endswith(suffix):
            return unit
    return ""


def name_of(window: Window, entity_id: str) -> str:
    """An entity as people call it, with its kind: ``GPU 0``, ``process python (4242)``."""
    entity = window.entity(entity_id)
    if entity is None:
        return entity_id
    name = str(entity.attributes.get("name") or "")
    if isinstance(entity, nodes.GPU):
        index = entity.attributes.get("index")
        return f"GPU {index}" if index is not None else f"GPU {entity.uuid}"
    if isinstance(entity, nodes.Process):
        return f"{name or 'process'} ({entity.pid})"
    if isinstance(entity, nodes.Thread):
        return f"thread {name} ({entity.tid})"
    label = entity.label
    return label if label.startswith(entity.kind) else f"{entity.kind} {label}"


def told(metric: str, value: float) -> str:
    """A number with its unit, for messages."""
    return human(metric, value)
