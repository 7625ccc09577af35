"""What gpuflight-vis reads: graphs from files, folders, recordings and servers; several become one; findings."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import msgspec

from gpuflight.errors import InputError
from gpuflight.graph import Graph
from gpuflight.graph.load import LoadedGraph, parse_graph

if TYPE_CHECKING:
    from gpuflight.vis.sessions import SessionPicture

_URL = ("http://", "https://", "unix:")
_GRAPH_PATH = "/api/v1/graph"


def is_url(text: str) -> bool:
    """Whether an input names a server and not a file."""
    return text.startswith(_URL)


def load_input(text: str, arguments: argparse.Namespace) -> LoadedGraph:
    """One INPUT. Raises InputError, or GpuflightError for a server that fails; one line each."""
    if is_url(text):
        return _from_server(text, arguments)
    from gpuflight.cli.graphs import load_replay_or_graph

    try:
        return load_replay_or_graph(text)
    except FileNotFoundError:
        raise InputError(f"{text}: no such file or folder") from None


def load_any(text: str, arguments: argparse.Namespace, stack: ExitStack, sessions: list[SessionPicture]) -> LoadedGraph:
    """One INPUT, which may also be GPU sessions: these stay open in ``stack`` and are added to ``sessions``."""
    from gpuflight.vis.sessions import is_session_input, load_session_picture

    if is_url(text) or not is_session_input(text):
        return load_input(text, arguments)
    picture = stack.enter_context(load_session_picture(text))
    sessions.append(picture)
    return LoadedGraph(graph=picture.graph)


def _from_server(url: str, arguments: argparse.Namespace) -> LoadedGraph:
    from gpuflight.cli.rest import Rest

    url = url.rstrip("/").removesuffix(_GRAPH_PATH)
    asked = argparse.Namespace(
        url=url, token_file=arguments.token_file, ca_file=arguments.ca_file, timeout=arguments.timeout
    )
    found = Rest(asked).call("GET", _GRAPH_PATH)
    try:
        return parse_graph(json.dumps(found).encode())
    except InputError as error:
        raise InputError(f"{url}: {error}") from None


def merge_inputs(loaded: Sequence[LoadedGraph], names: Sequence[str]) -> LoadedGraph:
    """Several graphs as one. Those of one machine are laid over each other, the later ones win; each further machine
    gets a namespace, and the connections between machines are joined."""
    first = loaded[0]
    if len(loaded) == 1:
        return first
    from gpuflight.collectors.remote_join import halves_of, join_hosts
    from gpuflight.graph.namespaces import name_from, with_namespace

    graphs: dict[str, Graph] = {}
    spaces: dict[str, str] = {}
    findings: list[Any] = []
    coverage: list[Any] = []
    for each, name in zip(loaded, names, strict=True):
        machine = _machine(each)
        if machine not in spaces:
            spaces[machine] = _free(name_from(_host_name(each) or _stem(name)), spaces) if spaces else ""
        space = spaces[machine]
        graph = with_namespace(each.graph, space) if space else each.graph
        found = _findings(each.findings)
        findings += [_moved(finding, space, each.graph, graph) for finding in found] if space else found
        coverage += [line for line in each.coverage if not space or _limited(line)]
        graphs[space] = graph.merge(graphs[space]) if space in graphs else graph
    merged = graphs.pop("")
    local = halves_of(merged.nodes, merged.edges.values())
    peers = {space: halves_of(graph.nodes, graph.edges.values()) for space, graph in graphs.items()}
    for graph in graphs.values():
        merged = merged.merge(graph)
    if peers:
        joined = join_hosts(local, peers, merged.nodes)
        merged = Graph(joined.nodes).merge(merged).merge(Graph([], joined.edges))
    return LoadedGraph(
        merged,
        env=first.env,
        coverage=coverage,
        findings=findings,
        round_number=first.round_number if len({each.round_number for each in loaded}) == 1 else 0,
        time_ns=max(each.time_ns for each in loaded),
        truncated_by=next((each.truncated_by for each in loaded if each.truncated_by), ""),
        origin=first.origin,
    )


def _machine(loaded: LoadedGraph) -> str:
    """What tells one machine from another; empty if the graph does not say which it is of."""
    for key in ("machine_id", "hostname"):
        value = loaded.env.get(key)
        if isinstance(value, str) and value:
            return value
    return _host_name(loaded)


def _host_name(loaded: LoadedGraph) -> str:
    value = loaded.env.get("hostname")
    if isinstance(value, str) and value:
        return value
    from gpuflight.graph.nodes import Host

    return next((host.hostname for host in loaded.graph.of_kind(Host) if not host.ns), "")


def _stem(name: str) -> str:
    return os.path.basename(name.rstrip("/")).partition(".")[0]


def _free(name: str, spaces: dict[str, str]) -> str:
    taken, number, found = set(spaces.values()), 1, name
    while found in taken:
        number += 1
        found = f"{name}-{number}"
    return found


def _findings(findings: list[Any]) -> list[dict[str, Any]]:
    plain = msgspec.to_builtins(findings)
    return [finding for finding in plain if isinstance(finding, dict)]


def _moved(finding: dict[str, Any], space: str, before: Graph, after: Graph) -> dict[str, Any]:
    """A finding of another machine: its entities and edges as they are called in the one picture."""
    from gpuflight.graph.namespaces import namespaced_id

    named = finding.get("edges")
    wanted = {name for name in named if isinstance(name, str)} if isinstance(named, list) else set()
    renamed = {}
    if wanted:  # moving keeps the order
        pairs = zip(before.edges.values(), after.edges.values(), strict=False)
        renamed = {old.id: new.id for old, new in pairs if old.id in wanted}

    def texts(name: str) -> list[str]:
        values = finding.get(name)
        return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []

    return {
        **finding,
        "id": f"{finding.get('id', '')}@{space}",
        "explains": [f"{other}@{space}" for other in texts("explains")],
        "entities": [namespaced_id(name, space) for name in texts("entities")],
        "edges": [renamed.get(name, name) for name in texts("edges")],
    }


def _limited(line: Any) -> bool:
    return not (isinstance(line, dict) and line.get("status") == "ok" and not line.get("losses"))


def read_findings(text: str) -> list[Any]:
    """Findings from a file, or from standard input for ``-``: a list, or what holds one as ``findings`` (the answer of
    ``GET /api/v1/findings``, a graph, a report). Raises InputError."""
    name = "standard input" if text == "-" else text
    try:
        if text == "-":
            data = sys.stdin.buffer.read()
        else:
            with open(text, "rb") as file:
                data = file.read()
    except OSError as error:
        raise InputError(f"--findings {name}: {error.strerror or error}") from None
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"--findings {name}: not JSON: {error}") from None
    if isinstance(found, dict):
        found = found.get("findings")
    if not isinstance(found, list):
        raise InputError(f"--findings {name}: no list of findings, and nothing that holds one")
    return found
