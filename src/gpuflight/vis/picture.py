"""From a graph to a laid out picture of the part that was asked for: what the command and the server share."""

from __future__ import annotations

from msgspec.structs import replace

from gpuflight.graph import Graph
from gpuflight.rounds import Finding
from gpuflight.vis.base import Layout, LayoutOptions
from gpuflight.vis.changes import compare, mark_changes
from gpuflight.vis.choose import Choice, choose
from gpuflight.vis.model import LayoutGraph
from gpuflight.vis.text import plural


def make_picture(
    graph: Graph,
    options: LayoutOptions,
    layout: Layout,
    *,
    choice: Choice | None = None,
    before: Graph | None = None,
    before_name: str = "another graph",
    noise: float = 0.1,
) -> LayoutGraph:
    """The chosen part of a graph, placed; coloured by what changed since ``before`` if that is given.

    Raises InputError for a choice that cannot be used or leaves nothing.
    """
    notes: list[str] = []
    changes: dict[str, str] = {}
    if before is not None:
        comparison = compare(before, graph, noise=noise, name=before_name)
        graph, changes = comparison.graph, comparison.changes
        notes.append(comparison.note)
    part, left_out = choose(graph, choice or Choice())
    notes += left_out
    findings = options.findings
    if part is not graph:
        findings = [finding for finding in findings if _is_about(finding, part)]
        if hidden := len(options.findings) - len(findings):
            notes.append(f"{plural(hidden, 'finding')} about what is not shown: left out")
    picture = layout.layout(part, replace(options, findings=findings, notes=[*options.notes, *notes]))
    mark_changes(picture, changes)
    return picture


def _is_about(finding: Finding, graph: Graph) -> bool:
    """Whether anything that a finding names is in a graph; one that names nothing is about all of it."""
    if not finding.entities and not finding.edges:
        return True
    if any(name in graph.nodes for name in finding.entities):
        return True
    named = set(finding.edges)
    return bool(named) and any(edge.id in named for edge in graph.edges.values())
