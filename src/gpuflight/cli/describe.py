"""``gpuflight describe``: a graph as compact text."""

from __future__ import annotations

import argparse

from gpuflight.cli.session import add_observe_arguments

DESCRIPTION = """\
Print a graph as text for people and language models: programs as a tree with what they send where, then the hardware.

Reads a graph.json, a run folder, a stream of rounds or a graph of witty-profiler; without a file it looks at this
machine now. An entity is named by its id, pid:123, gpu:0, port:8000, numa:0, nic:eth0 or the beginning of its name.
"""

EXAMPLES = (
    "gpuflight describe",
    "gpuflight describe capture",
    "gpuflight describe capture --around gpu:0 --depth 2",
    "gpuflight describe capture --kind GPU --kind Process --json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "file", metavar="FILE", nargs="?", help="a graph file or run folder (default: this machine now)"
    )
    parser.add_argument("--around", metavar="ENTITY", help="only what is near this entity")
    parser.add_argument("--depth", metavar="N", type=int, default=1, help="how many edges around it (default 1)")
    parser.add_argument(
        "--kind", metavar="KIND", action="append", help="only entities of this kind; may be given again"
    )
    parser.add_argument("--json", action="store_true", help="print the graph as JSON, in the form of graph.json")
    add_observe_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Load or look, filter, print."""
    from gpuflight.cli.session import dump_config, load_settings

    settings = load_settings(arguments)
    if arguments.dump_config:
        return dump_config(settings)

    from gpuflight.cli.graphs import graph_from, graph_json
    from gpuflight.cli.output import clean_lines, emit_bytes
    from gpuflight.graph.queries import find_one, neighbours, subgraph

    loaded = graph_from(arguments, arguments.file, settings)
    graph = loaded.graph
    if arguments.around is not None:
        graph = neighbours(graph, find_one(graph, arguments.around).id, arguments.depth)
    if arguments.kind:
        graph = subgraph(graph, arguments.kind)
    if arguments.json:
        loaded.graph = graph
        emit_bytes(graph_json(loaded))
    else:
        print(clean_lines(graph.describe().rstrip("\n")))
    return 0
