"""A graph in the forms that the API gives: JSON, MessagePack, NDJSON, text."""

from __future__ import annotations

from typing import Any

import msgspec

from gpuflight.graph import Graph, codec
from gpuflight.graph.codec import Document
from gpuflight.round_codec import encode_round
from gpuflight.rounds import Round


class PagedDocument(Document, omit_defaults=True):
    """A part of a graph file, and where to go on. Edges come after all nodes; their ends may be on other pages."""

    next_cursor: str = ""


def encode(
    done: Round, graph: Graph, form: str, *, offset: int = 0, limit: int | None = None, next_cursor: str = ""
) -> bytes:
    """``graph`` (a part of the round's, or all of it) in a form; of its elements, nodes first, those of one page."""
    whole = graph is done.graph and limit is None and not offset
    if form == "text":
        part = graph if limit is None and not offset else _page_graph(graph, offset, limit)
        return (part.describe().rstrip("\n") + "\n").encode(errors="backslashreplace")
    if form == "json" and whole:
        return encode_round(done)
    nodes, edges = list(graph.nodes.values()), list(graph.edges.values())
    if limit is not None or offset:
        end = len(nodes) + len(edges) if limit is None else offset + limit
        nodes, edges = nodes[offset:end], edges[max(0, offset - len(nodes)) : max(0, end - len(nodes))]
    document = PagedDocument(
        schema=codec.SCHEMA,
        round=done.number,
        time=codec.time_text(done.time_ns),
        monotonic_s=done.monotonic_s,
        duration_s=round(done.duration_s, 6),
        env=msgspec.to_builtins(done.env),
        truncated_by=done.truncated_by,
        edge_kinds=codec.edge_kind_table(),
        nodes=nodes,
        edges=edges,
        next_cursor=next_cursor,
    )
    if whole:
        document.coverage, document.findings, document.cleared = done.coverage, done.findings, done.cleared
        document.own_cost = msgspec.to_builtins(done.own_cost) if done.own_cost is not None else None
    if form == "ndjson":
        document.nodes, document.edges = [], []
        return b"\n".join([codec.encode(document), *map(codec.encode, nodes), *map(codec.encode, edges)]) + b"\n"
    if form == "msgpack":
        return _msgpack(document)
    return codec.encode(document)


def _page_graph(graph: Graph, offset: int, limit: int | None) -> Graph:
    """The nodes of a page, and the edges between them: text shows an edge under its ends."""
    ids = list(graph.nodes)[offset : None if limit is None else offset + limit]
    nodes = {node_id: graph.nodes[node_id] for node_id in ids}
    return Graph.of(nodes, {key: edge for key, edge in graph.edges.items() if key[0] in nodes and key[1] in nodes})


def _msgpack(document: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(document)
    except UnicodeEncodeError:  # text that is not valid Unicode, escaped as in JSON
        return msgspec.msgpack.encode(msgspec.json.decode(codec.encode(document)))
