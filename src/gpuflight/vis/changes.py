"""Two graphs in one picture: what came, what went, what is different. Works with every layout."""

from __future__ import annotations

from msgspec import Struct, field

from gpuflight.graph import Graph, edge_id
from gpuflight.graph.diff import Noise, diff
from gpuflight.vis.model import Box, LayoutGraph
from gpuflight.vis.text import plural

ADDED, REMOVED, CHANGED = "added", "removed", "changed"


class Comparison(Struct):
    """Both graphs as one, and what the comparison says of an element, by its id (edges by ``edge_id``)."""

    graph: Graph
    changes: dict[str, str] = field(default_factory=dict)
    note: str = ""


def compare(before: Graph, after: Graph, *, noise: float = 0.1, name: str = "another graph") -> Comparison:
    """What turns ``before`` into ``after``; elements that are gone stay in the graph, so that they can be drawn.

    A metric that moved by at most ``noise`` of its old value is no change. ``name`` is what ``before`` is called.
    """
    found = diff(before, after, Noise(relative=noise))
    changes = {step.after.id: CHANGED for step in (*found.nodes_changed, *found.edges_changed)}
    changes.update((entity.id, ADDED) for entity in found.nodes_added)
    changes.update((edge.id, ADDED) for edge in found.edges_added)
    nodes, edges = dict(after.nodes), dict(after.edges)
    for node_id in found.nodes_removed:
        changes[node_id] = REMOVED
        nodes.setdefault(node_id, before.nodes[node_id])
    for key in found.edges_removed:
        changes[edge_id(key)] = REMOVED
        edges.setdefault(key, before.edges[key])
    counts = found.counts()
    words = [
        f"{plural(counts[f'{part}_{what}'], noun)} {what}"
        for what in (ADDED, REMOVED, CHANGED)
        for part, noun in (("nodes", "entity"), ("edges", "edge"))
        if counts[f"{part}_{what}"]
    ]
    note = f"Compared with {name}: " + (", ".join(words) or "nothing is different")
    if words and noise:
        note += f"; metrics that moved by at most {noise:.0%} are not told"
    return Comparison(Graph.of(nodes, edges), changes, note)


def mark_changes(picture: LayoutGraph, changes: dict[str, str]) -> None:
    """Write ``change`` on every box, link and route of a picture. A group that holds a change is changed itself."""
    if not changes:
        return
    order: list[tuple[Box, Box | None]] = [(box, None) for box in picture.boxes]
    for box, _ in order:
        order.extend((child, box) for child in box.children)
    for box, parent in reversed(order):
        box.change = changes.get(box.id, "") or (box.change if box.role == "group" else "")
        if box.change and parent is not None and parent.role == "group":
            parent.change = _together(parent.children, changes)
    for link in picture.links:
        link.change = changes.get(edge_id((link.source, link.target, link.kind)), "")
    for route in picture.routes:
        found = {picture.links[index].change for index in route.links}
        route.change = found.pop() if len(found) == 1 else CHANGED if found else ""


def _together(members: list[Box], changes: dict[str, str]) -> str:
    found = {changes.get(member.id, "") for member in members}
    return found.pop() if len(found) == 1 else CHANGED
