"""``gpuflight diff``: what changed between two graphs."""

from __future__ import annotations

import argparse
from typing import Any

DESCRIPTION = """\
Print what changed from graph A to graph B: what appeared (+), what is gone (-), what is different (~).

Each is a graph.json, a run folder (its last graph), a stream of rounds, a recording (its last round) or a graph of
witty-profiler. Metrics always move a little; --noise leaves out elements of which only metrics moved, and by little.
"""

EXAMPLES = (
    "gpuflight diff before after",
    "gpuflight diff before/graph.json after/graph.json --noise 10 --json",
    "gpuflight diff before before --exit-code",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("a", metavar="A", help="the graph before")
    parser.add_argument("b", metavar="B", help="the graph after")
    parser.add_argument(
        "--noise", metavar="PCT", type=float, default=0.0, help="ignore metrics that moved by at most this many percent"
    )
    parser.add_argument("--no-metrics", action="store_true", help="ignore metrics altogether")
    parser.add_argument("--exit-code", action="store_true", help="end with 1 if anything changed")
    parser.add_argument("--json", action="store_true", help="print the difference as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Load both, compare, print."""
    import math

    from gpuflight.cli.graphs import load_replay_or_graph
    from gpuflight.errors import InputError
    from gpuflight.graph.diff import Noise, diff

    if not 0 <= arguments.noise < math.inf:
        raise InputError("--noise: must be 0 percent or more")
    before, after = load_replay_or_graph(arguments.a).graph, load_replay_or_graph(arguments.b).graph
    if arguments.no_metrics:
        noise: Noise | None = Noise(absolute=math.inf)
    else:
        noise = Noise(relative=arguments.noise / 100) if arguments.noise else None
    change = diff(before, after, noise)
    if arguments.json:
        _print_json(change, arguments.a, arguments.b)
    else:
        _print_text(change, before, after)
    return 1 if arguments.exit_code and change else 0


def _print_json(change: Any, a: str, b: str) -> None:
    import msgspec

    from gpuflight.cli.output import emit_json
    from gpuflight.graph import edge_id

    def steps(changes: list[Any]) -> list[dict[str, Any]]:
        return [
            {
                "id": step.after.id,
                "changes": [
                    {"group": group, "name": name, "before": old, "after": new}
                    for group, name, old, new in step.fields()
                ],
            }
            for step in changes
        ]

    emit_json(
        {
            "a": a,
            "b": b,
            "counts": change.counts(),
            "nodes_added": msgspec.to_builtins(change.nodes_added),
            "nodes_removed": change.nodes_removed,
            "nodes_changed": steps(change.nodes_changed),
            "edges_added": msgspec.to_builtins(change.edges_added),
            "edges_removed": [edge_id(key) for key in change.edges_removed],
            "edges_changed": steps(change.edges_changed),
        }
    )


def _print_text(change: Any, before: Any, after: Any) -> None:
    from gpuflight.cli.output import clean
    from gpuflight.graph import edge_id
    from gpuflight.graph.units import human

    def named(entity: Any) -> str:
        return entity.id if entity.label == entity.id else f"{entity.id} {entity.label}"

    def value(group: str, name: str, what: Any) -> str:
        if what is None:
            return "–"
        return human(name, what) if group == "metrics" else str(what)

    for entity in change.nodes_added:
        print(clean(f"+ {named(entity)}"))
    for node_id in change.nodes_removed:
        print(clean(f"- {named(before.nodes[node_id])}"))
    for edge in change.edges_added:
        print(clean(f"+ {edge.id}"))
    for key in change.edges_removed:
        print(clean(f"- {edge_id(key)}"))
    for step in (*change.nodes_changed, *change.edges_changed):
        print(clean(f"~ {step.after.id}"))
        for group, name, old, new in step.fields():
            print(clean(f"    {name}: {value(group, name, old)} → {value(group, name, new)}"))
    counts = change.counts()
    print(
        ", ".join(
            f"{counts[f'{part}_{what}']} {part} {what}"
            for part in ("nodes", "edges")
            for what in ("added", "removed", "changed")
        )
    )
