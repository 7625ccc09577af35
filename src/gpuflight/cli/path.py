"""``gpuflight path``: the way data takes between two entities, and its narrowest hop."""

from __future__ import annotations

import argparse

from gpuflight.cli.session import add_observe_arguments

DESCRIPTION = """\
Print the widest way between two entities, hop by hop with the bandwidth each should carry, and the narrowest hop.

An entity is named by its id, pid:123, gpu:0, port:8000, pci:0000:3b:00.0, numa:0, nic:eth0, disk:nvme0n1, or the
beginning of its name. Without --graph this machine is looked at now.
"""

EXAMPLES = (
    "gpuflight path gpu:0 nic:eth0 --graph capture",
    "gpuflight path gpu:0 gpu:1 --graph capture --json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("a", metavar="A", help="where the way begins")
    parser.add_argument("b", metavar="B", help="where it ends")
    parser.add_argument("--graph", metavar="FILE", help="a graph file or run folder (default: this machine now)")
    parser.add_argument("--json", action="store_true", help="print the way as JSON")
    add_observe_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Find and print; 1 if the two are not connected."""
    from gpuflight.cli.session import dump_config, load_settings

    settings = load_settings(arguments)
    if arguments.dump_config:
        return dump_config(settings)

    import msgspec

    from gpuflight.cli.graphs import graph_from
    from gpuflight.cli.output import clean, emit_json, say
    from gpuflight.graph.paths import path
    from gpuflight.graph.queries import find_one

    graph = graph_from(arguments, arguments.graph, settings).graph
    a, b = find_one(graph, arguments.a), find_one(graph, arguments.b)
    found = path(graph, a, b)
    if arguments.json:
        emit_json(msgspec.to_builtins(found))
        return 0 if found is not None else 1
    if found is None:
        say(f"gpuflight: no way from {clean(a.id)} to {clean(b.id)} in this graph")
        return 1
    here = found.source
    print(_named(graph.nodes[here]))
    for hop in found.hops:
        here = hop.source if hop.source != here else hop.target
        mark = "   ← narrowest" if hop is found.narrowest else ""
        print(clean(f"  {hop.text()}{mark}"))
        print(_named(graph.nodes[here]))
    if not found.hops:
        print("this is one and the same")
    elif found.narrowest is not None:
        unknown = f"; {found.unknown_count} hops of unknown bandwidth may be narrower" if found.unknown_count else ""
        print(clean(f"narrowest hop: {found.narrowest.text()}{unknown}"))
    else:
        print("narrowest hop: no hop's bandwidth is known")
    return 0


def _named(entity: object) -> str:
    from gpuflight.cli.output import clean
    from gpuflight.graph import Entity

    assert isinstance(entity, Entity)  # noqa: S101
    return clean(entity.id if entity.label == entity.id else f"{entity.id}  {entity.label}")
