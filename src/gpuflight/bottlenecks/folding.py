"""Root causes first: findings that explain others, and the order in which people read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpuflight.bottlenecks.base import Rule
from gpuflight.bottlenecks.window import Window
from gpuflight.graph import edges as edge_kinds
from gpuflight.graph import nodes
from gpuflight.rounds import Finding

_SEVERITY = {"critical": 0, "warn": 1, "info": 2}


def fold(findings: Sequence[Finding], rules: Mapping[str, Rule], window: Window) -> list[Finding]:
    """Set ``explains`` and ``explained_by`` of each, and order them: roots by severity and cost, symptoms after theirs.

    A finding explains another if its rule declares so and both concern the same or neighbouring elements: a GPU and
    the processes that use it, a process and its container, the ends of an edge. Nothing explains its own cause.
    """
    if not findings:
        return []
    by_rule: dict[str, list[Finding]] = {}
    for finding in findings:
        finding.explains = []
        finding.explained_by = ""
        by_rule.setdefault(finding.rule, []).append(finding)
    spheres: dict[str, frozenset[str]] = {}
    for cause in sorted(findings, key=_order):
        for name in rules[cause.rule].explains if cause.rule in rules else ():
            for symptom in by_rule.get(name, ()):
                if symptom is cause or symptom.explained_by or _root(cause, findings) is symptom:
                    continue
                if not sphere(cause, window, spheres).isdisjoint(sphere(symptom, window, spheres)):
                    symptom.explained_by = cause.id
                    cause.explains.append(symptom.id)
    return _read_order(findings)


def sphere(finding: Finding, window: Window, known: dict[str, frozenset[str]]) -> frozenset[str]:
    """Ids of what a finding concerns and of what is next to that."""
    found = known.get(finding.id)
    if found is None:
        near = set(finding.entities)
        for edge in finding.edges:
            near.update(_ends(edge))
        for entity_id in tuple(near):
            entity = window.entity(entity_id)
            if isinstance(entity, nodes.GPU | nodes.MigInstance):
                near.update(edge.source for edge in window.into(entity_id, edge_kinds.Access))
            elif isinstance(entity, nodes.Process):
                near.update(
                    e.target for e in window.out_of(entity_id, edge_kinds.Access) if e.target.startswith("GPU(")
                )
                near.update(edge.source for edge in window.into(entity_id, edge_kinds.Host))
            elif isinstance(entity, nodes.Thread):
                near.update(edge.source for edge in window.into(entity_id, edge_kinds.Own))
            elif isinstance(entity, nodes.Kernel | nodes.Stream):
                near.add(entity.process)
            elif isinstance(entity, nodes.Session):
                near.update(edge.source for edge in window.into(entity_id, edge_kinds.Own))
                near.update(edge.target for edge in window.out_of(entity_id, edge_kinds.Belong))
            elif isinstance(entity, nodes.Host):
                near.update(gpu.id for gpu in window.all(nodes.GPU))
        found = known[finding.id] = frozenset(near)
    return found


def _ends(edge_id: str) -> tuple[str, ...]:
    inner = edge_id.partition("(")[2][:-1]
    source, arrow, target = inner.partition("->")
    return (source, target) if arrow else ()


def _root(finding: Finding, findings: Sequence[Finding]) -> Finding:
    by_id = {each.id: each for each in findings}
    seen = {finding.id}
    while finding.explained_by in by_id and finding.explained_by not in seen:
        finding = by_id[finding.explained_by]
        seen.add(finding.id)
    return finding


def _order(finding: Finding) -> tuple[int, int, float, str]:
    cost = finding.cost_gpu_s
    return (_SEVERITY[finding.severity], 0 if cost is not None else 1, -(cost or 0.0), finding.id)


def _read_order(findings: Sequence[Finding]) -> list[Finding]:
    by_id = {finding.id: finding for finding in findings}
    ordered: list[Finding] = []

    def add(finding: Finding) -> None:
        ordered.append(finding)
        for symptom in sorted((by_id[name] for name in finding.explains), key=_order):
            add(symptom)

    for finding in sorted(findings, key=_order):
        if not finding.explained_by:
            add(finding)
    return ordered
