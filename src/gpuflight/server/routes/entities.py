"""Single entities and edges, and the way between two entities."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Query
from starlette.concurrency import run_in_threadpool

from gpuflight.graph import Graph, codec
from gpuflight.graph.adjacency import adjacency
from gpuflight.graph.element import Edge
from gpuflight.graph.paths import path
from gpuflight.graph.queries import CANDIDATES_SHOWN, find
from gpuflight.rounds import Round
from gpuflight.server.auth import Role, require
from gpuflight.server.deps import State
from gpuflight.server.errors import ApiError
from gpuflight.server.query import find_entity
from gpuflight.server.router import PlainRouter
from gpuflight.server.samples import sample
from gpuflight.server.selection import select_round

router = PlainRouter(prefix="/api/v1", tags=["entities"], dependencies=[Depends(require(Role.VIEWER))])

RoundNumber = Annotated[int | None, Query(alias="round", ge=1, le=2**53, description="a round; the latest without")]
At = Annotated[str | None, Query(max_length=64, description="a time: the round that stood then")]
Text = Annotated[str, Query(max_length=4096)]


@router.get("/entities", summary="What a text can mean", openapi_extra=sample("GET", "/api/v1/entities?q=gpu:0"))
async def search(
    state: State,
    q: Annotated[str, Query(max_length=4096, description="an id, gpu:0, pid:42, port:8000, the beginning of a name …")],
    number: RoundNumber = None,
    at: At = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = CANDIDATES_SHOWN,
) -> dict[str, Any]:
    """The entities that a text means, at most ``limit``; all of them are counted."""
    done = await select_round(state, number, at)
    found = await run_in_threadpool(find, done.graph, q)
    return {**_head(done), "count": len(found), "entities": found[:limit]}


@router.get(
    "/entities/{entity_id:path}",
    summary="One entity and its edges",
    openapi_extra=sample("GET", "/api/v1/entities/Host(box)"),
)
async def entity(state: State, entity_id: str, number: RoundNumber = None, at: At = None) -> dict[str, Any]:
    """An entity by its exact id, with every edge that begins or ends there."""
    done = await select_round(state, number, at)
    found = done.graph.nodes.get(entity_id)
    if found is None:
        raise ApiError(404, "no_such_entity", f"there is no entity {entity_id!r} in round {done.number}")
    edges = await run_in_threadpool(_edges_of, done.graph, entity_id)
    return {**_head(done), "entity": found, "edges": [{"id": edge.id, **_plain(edge)} for edge in edges]}


@router.get(
    "/edges/{edge_id:path}",
    summary="One edge",
    openapi_extra=sample("GET", "/api/v1/edges/Own(Process(pid=1,start=10)->Process(pid=2,start=20))"),
)
async def edge(state: State, edge_id: str, number: RoundNumber = None, at: At = None) -> dict[str, Any]:
    """An edge by its id, ``Kind(source->target)``."""
    done = await select_round(state, number, at)
    found = _edge(done.graph, edge_id)
    if found is None:
        raise ApiError(404, "no_such_edge", f"there is no edge {edge_id!r} in round {done.number}")
    return {
        **_head(done),
        "edge": {"id": found.id, **_plain(found), "category": found.category, "directed": found.directed},
    }


@router.get(
    "/path",
    summary="The way between two entities",
    openapi_extra=sample("GET", "/api/v1/path?from=pid:2&to=Host(box)"),
)
async def way(
    state: State,
    source: Annotated[str, Query(alias="from", max_length=4096, description="an entity, as for /entities?q=")],
    target: Annotated[str, Query(alias="to", max_length=4096, description="another one")],
    number: RoundNumber = None,
    at: At = None,
) -> dict[str, Any]:
    """The widest way that data can take between two entities, hop by hop, with the narrowest hop."""
    done = await select_round(state, number, at)
    start, goal = find_entity(done.graph, source), find_entity(done.graph, target)
    found = await run_in_threadpool(path, done.graph, start, goal)
    if found is None:
        raise ApiError(404, "not_connected", f"there is no way from {start.id} to {goal.id} in this graph")
    return {**_head(done), "path": found}


def _head(done: Round) -> dict[str, Any]:
    return {"round": done.number, "time": codec.time_text(done.time_ns)}


def _plain(edge: Edge) -> dict[str, Any]:
    plain: dict[str, Any] = {"kind": edge.kind, "source": edge.source, "target": edge.target}
    for group in ("attributes", "metrics", "unknown"):
        if values := getattr(edge, group):
            plain[group] = values
    return plain


def _edges_of(graph: Graph, entity_id: str) -> list[Edge]:
    around = adjacency(graph)
    numbers = {number for _, number, _ in around.around(around.index[entity_id])}
    return [around.edges[number] for number in sorted(numbers)]


def _edge(graph: Graph, edge_id: str) -> Edge | None:
    kind, bracket, rest = edge_id.partition("(")
    if not bracket or not rest.endswith(")"):
        return None
    ends = rest[:-1].split("->")
    for cut in range(1, len(ends)):  # an id may hold an arrow itself
        found = graph.edges.get(("->".join(ends[:cut]), "->".join(ends[cut:]), kind))
        if found is not None:
            return found
    return None
