"""The tables of docs/graph.md, made from the classes themselves."""

from __future__ import annotations

from gpuflight.graph.edges import EDGE_KINDS
from gpuflight.graph.element import Entity
from gpuflight.graph.nodes import NODE_KINDS

BEGIN = "<!-- kinds: generated from src/gpuflight/graph, see tests/unit/test_architecture.py -->"
END = "<!-- kinds end -->"


def kind_tables() -> str:
    """Markdown tables of all kinds of entities and edges."""
    lines = ["", "| Entity | Identity | What it is |", "|---|---|---|"]
    base = Entity.__struct_fields__
    for name, node_kind in NODE_KINDS.items():
        identity = ", ".join(f"`{field}`" for field in node_kind.__struct_fields__ if field not in base)
        lines.append(f"| `{name}` | {identity} | {_sentence(node_kind)} |")
    lines += ["", "| Edge | Category | Directed | What it says |", "|---|---|---|---|"]
    for name, edge_kind in EDGE_KINDS.items():
        directed = "yes" if edge_kind.directed else "no"
        lines.append(f"| `{name}` | {edge_kind.category.replace('_', ' ')} | {directed} | {_sentence(edge_kind)} |")
    return "\n".join([*lines, "", ""])


def _sentence(kind: type) -> str:
    """The docstring up to where it lists attributes and metrics."""
    text = " ".join((kind.__doc__ or "").split())
    for mark in (" attributes:", " metrics:"):
        text = text.partition(mark)[0]
    return text.rstrip(".: ").replace("|", "\\|").replace("``", "`")
