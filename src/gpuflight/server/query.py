"""What part of a graph a request asks for, and that part."""

from __future__ import annotations

import base64
import binascii
import operator
import re
import zlib
from collections.abc import Callable, Iterable
from typing import Any, Literal

import msgspec
from msgspec.structs import replace
from pydantic import BaseModel, ConfigDict, Field

from gpuflight.graph import Graph
from gpuflight.graph.element import EMPTY, Entity
from gpuflight.graph.queries import CANDIDATES_SHOWN, find, neighbours, subgraph, value_of
from gpuflight.server.errors import ApiError

Format = Literal["json", "msgpack", "ndjson", "text"]

_GROUPS = ("attributes", "metrics", "unknown")
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "!=": operator.ne,
    "=": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
_METRIC = re.compile(r"([A-Za-z0-9_.]+)(?:\s*(>=|<=|!=|=|>|<)\s*(.+))?")


class GraphQuery(BaseModel):
    """The parameters of a request for a graph. Filters of several kinds must all hold; values of one are alternatives,
    except those of attribute and metric, which must all hold."""

    model_config = ConfigDict(extra="forbid")

    round: int | None = Field(default=None, ge=1, le=2**53, description="number of a round; the latest without")
    at: str | None = Field(
        default=None,
        max_length=64,
        description="a time (ISO 8601, seconds since the epoch, or -30 for half a minute ago): the round of then",
    )
    kind: list[str] = Field(default=[], max_length=100, description="kinds of entities, e.g. GPU; may be given again")
    namespace: list[str] = Field(
        default=[], max_length=1000, description="namespaces; the empty one is this host; may be given again"
    )
    attribute: list[str] = Field(
        default=[],
        max_length=32,
        description="NAME (it is there) or NAME=VALUE of an attribute, or of a field of the identity",
    )
    metric: list[str] = Field(
        default=[], max_length=32, description="NAME (it is known) or a comparison: sm_util_pct>=50"
    )
    around: str | None = Field(
        default=None, max_length=4096, description="an entity by id, or as gpu:0, pid:42, port:8000 …"
    )
    depth: int = Field(default=1, ge=0, le=64, description="with around: how many edges away")
    fields: str | None = Field(
        default=None,
        max_length=4096,
        description="names of attributes and metrics to give, separated by commas; also attributes, metrics, unknown"
        " for all of them; empty for identities only",
    )
    limit: int | None = Field(default=None, ge=1, le=1_000_000, description="elements on one page; all without")
    cursor: str | None = Field(default=None, max_length=256, description="next_cursor of the page before")
    since: str | None = Field(
        default=None,
        max_length=64,
        description="for who keeps a copy of the graph: what the ETag of the last answer says between its quotes, empty"
        " at first; the answer is what changed since (`type` is `diff`), or the whole graph if that is not known",
    )
    format: Format | None = Field(default=None, description="form of the answer; overrides the Accept header")

    def selection(self) -> str:
        """What is selected, apart from round, page and form, as text; empty for the whole graph."""
        parts = self.model_dump(exclude={"round", "at", "limit", "cursor", "since", "format"}, exclude_defaults=True)
        return msgspec.json.encode(parts, order="sorted").decode() if parts else ""


def select(graph: Graph, query: GraphQuery) -> Graph:
    """The part of a graph that a query asks for; the graph itself if that is all. Raises ApiError, InputError."""
    if query.around is not None:
        graph = neighbours(graph, find_entity(graph, query.around).id, query.depth)
    tests = [*map(_attribute_test, query.attribute), *map(_metric_test, query.metric)]
    if query.kind or query.namespace or tests:
        graph = subgraph(
            graph,
            kinds=query.kind or None,
            namespaces=set(query.namespace) if query.namespace else None,
            where=(lambda entity: all(test(entity) for test in tests)) if tests else None,
        )
    if query.fields is not None:
        graph = _with_fields(graph, [name.strip() for name in query.fields.split(",") if name.strip()])
    return graph


def find_entity(graph: Graph, text: str) -> Entity:
    """The one entity that a text means. Raises ApiError: 404 if none, 409 with the candidates if several."""
    found = find(graph, text)
    if len(found) == 1:
        return found[0]
    if not found:
        raise ApiError(404, "no_such_entity", f"nothing in this graph is called {text!r}")
    raise ApiError(
        409,
        "ambiguous",
        f"{text!r} can mean {len(found)} entities; give the id of one",
        {"candidates": [entity.id for entity in found[:CANDIDATES_SHOWN]], "candidates_count": len(found)},
    )


def _attribute_test(text: str) -> Callable[[Entity], bool]:
    name, equals, wanted = text.partition("=")
    name = name.strip()
    if not name:
        raise ApiError(422, "bad_request", f"attribute: {text!r}: give NAME or NAME=VALUE")
    if not equals:
        return lambda entity: value_of(entity, name) is not None

    def test(entity: Entity) -> bool:
        value = value_of(entity, name)
        if isinstance(value, (list, tuple)):
            return wanted in map(_as_text, value)
        return value is not None and _as_text(value) == wanted

    return test


def _metric_test(text: str) -> Callable[[Entity], bool]:
    parsed = _METRIC.fullmatch(text.strip())
    if parsed is None:
        raise ApiError(422, "bad_request", f"metric: {text!r}: give NAME, or a comparison such as sm_util_pct>=50")
    name, sign, number = parsed.groups()
    if sign is None:
        return lambda entity: name in entity.metrics
    try:
        bound = float(number)
    except ValueError:
        raise ApiError(422, "bad_request", f"metric: {text!r}: {number!r} is no number") from None
    compare = _COMPARISONS[sign]
    return lambda entity: name in entity.metrics and compare(entity.metrics[name], bound)


def _as_text(value: Any) -> str:
    return ("true" if value else "false") if isinstance(value, bool) else str(value)


def _with_fields(graph: Graph, names: Iterable[str]) -> Graph:
    wanted = set(names)
    whole = {group: group in wanted for group in _GROUPS}

    def cut(element: Any) -> Any:
        groups: dict[str, Any] = {}
        for group in _GROUPS:
            values = getattr(element, group)
            if not whole[group] and values:
                kept = {name: value for name, value in values.items() if name in wanted}
                groups[group] = kept or (None if group == "unknown" else EMPTY)
        return replace(element, **groups) if groups else element

    return Graph.of(
        {node_id: cut(entity) for node_id, entity in graph.nodes.items()},
        {key: cut(edge) for key, edge in graph.edges.items()},
    )


class Page(msgspec.Struct):
    """Where a page begins: the round that all pages are of, and how many elements came before."""

    round: int
    offset: int
    selection: int


def page_of(query: GraphQuery) -> Page | None:
    """The page that the cursor of a query names; None without one. Raises ApiError 422 for one of other filters."""
    if query.cursor is None:
        return None
    try:
        raw = base64.urlsafe_b64decode(query.cursor.encode() + b"=" * (-len(query.cursor) % 4))
        page = Page(*msgspec.json.decode(raw, type=tuple[int, int, int]))
    except (ValueError, binascii.Error, msgspec.DecodeError):
        raise ApiError(422, "bad_cursor", "this is no cursor of ours") from None
    if page.selection != zlib.crc32(query.selection().encode()) or page.offset < 0:
        raise ApiError(422, "bad_cursor", "this cursor belongs to a request with other filters")
    return page


def cursor_at(number: int, offset: int, query: GraphQuery) -> str:
    """The cursor of the page that begins at ``offset`` of round ``number``."""
    raw = msgspec.json.encode((number, offset, zlib.crc32(query.selection().encode())))
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
