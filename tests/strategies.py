"""Hypothesis strategies for entities, edges and graphs of every kind, hostile text included.

``entities()`` and ``edges()`` give single elements, ``graphs()`` whole graphs, ``agreeing_graphs(n)`` several graphs
that share elements and nowhere contradict each other, ``json_values()`` anything JSON can hold.
"""

from __future__ import annotations

import typing
from typing import Any

import msgspec
from hypothesis import strategies as st

from gpuflight.graph import Edge, Entity, Graph
from gpuflight.graph.edges import EDGE_KINDS
from gpuflight.graph.nodes import NODE_KINDS

HOSTILE = (
    "",
    " ",
    '"><script>alert(1)</script>',
    "a,b)(c=d",
    "comm) S 1 (",
    "\x00\x1b[31m\n\r\t",
    "‮desrever",
    "日本語🚀",
    "é",
    "\ud7ff\U0010ffff",
    "->",
    "ns=evil,",
)

INT64 = st.integers(-(2**63), 2**63 - 1)
UINT64 = st.integers(0, 2**64 - 1)
NAMES = st.sampled_from(("name", "state", "index", "cmdline", "pci_address", "ended", "x.y", "é"))
METRIC_NAMES = st.sampled_from(("cpu_pct", "rss_bytes", "threads_count", "rtt_ms", "rx_bytes_per_s", "z"))


def texts(*, surrogates: bool = False) -> st.SearchStrategy[str]:
    """Text as strangers write it; with ``surrogates`` also what UTF-8 cannot hold."""
    plain = st.text(max_size=12) if not surrogates else st.text(st.characters(), max_size=12)
    return st.one_of(plain, st.sampled_from(HOSTILE))


def floats() -> st.SearchStrategy[float]:
    """Finite numbers; no collector may hand out others."""
    return st.floats(allow_nan=False, allow_infinity=False)


def scalars() -> st.SearchStrategy[Any]:
    """Values of attributes."""
    return st.one_of(st.none(), st.booleans(), INT64, floats(), texts())


def attributes() -> st.SearchStrategy[dict[str, Any]]:
    """Attributes: scalars or lists of them."""
    return st.dictionaries(NAMES, st.one_of(scalars(), st.lists(scalars(), max_size=3)), max_size=2)


def metrics() -> st.SearchStrategy[dict[str, int | float]]:
    """Metrics: integers of 64 bits and finite floats."""
    return st.dictionaries(METRIC_NAMES, st.one_of(INT64, floats()), max_size=3)


@st.composite
def unknowns(draw: st.DrawFn, known: dict[str, Any]) -> dict[str, str] | None:
    """Reasons for what an element does not have; never for what it has."""
    names = draw(st.sets(METRIC_NAMES, max_size=2)) - known.keys()
    return {name: draw(texts()) for name in sorted(names)} or None


def identities(kind: type[Entity]) -> dict[str, st.SearchStrategy[Any]]:
    """A strategy for each identity field of a kind, by its type."""
    hints = typing.get_type_hints(kind)
    base = Entity.__struct_fields__
    by_type = {int: INT64, str: texts()}
    return {name: by_type[hints[name]] for name in kind.__struct_fields__ if name not in base}


@st.composite
def entities(draw: st.DrawFn, kinds: tuple[str, ...] = tuple(NODE_KINDS), *, bare: bool = False) -> Entity:
    """One entity of any of the kinds; ``bare`` has an identity only."""
    kind = NODE_KINDS[draw(st.sampled_from(kinds))]
    identity = {name: draw(strategy) for name, strategy in identities(kind).items()}
    ns = draw(st.sampled_from(("", "", "node-7", "10.0.0.7,x")))
    if bare:
        return kind(**identity, ns=ns)
    own_metrics = draw(metrics())
    own_attributes = draw(attributes())
    return kind(
        **identity,
        ns=ns,
        attributes=own_attributes,
        metrics=own_metrics,
        unknown=draw(unknowns({**own_metrics, **own_attributes})),
    )


@st.composite
def edges(draw: st.DrawFn, ids: st.SearchStrategy[str] | None = None) -> Edge:
    """One edge of any kind between ids (of a node, or anything)."""
    ends = texts() if ids is None else ids
    kind = EDGE_KINDS[draw(st.sampled_from(tuple(EDGE_KINDS)))]
    own_metrics = draw(metrics())
    own_attributes = draw(attributes())
    known = {**own_metrics, **own_attributes}
    return kind(draw(ends), draw(ends), own_attributes, own_metrics, draw(unknowns(known)))


@st.composite
def graphs(draw: st.DrawFn, *, max_nodes: int = 5, max_edges: int = 6, dangling: bool = True) -> Graph:
    """A graph of any kinds, possibly empty; ``dangling`` allows edges to what is not in it."""
    members = draw(st.lists(entities(), max_size=max_nodes))
    known = [entity.id for entity in members]
    ids = st.sampled_from(known) if known else texts()
    if known and dangling:
        ids = st.one_of(ids, st.sampled_from(("Process(pid=1,start=1)", "outside")))
    if not known and not dangling:
        return Graph(members)
    return Graph(members, draw(st.lists(edges(ids), max_size=max_edges)))


@st.composite
def _part_of(draw: st.DrawFn, element: Any) -> Any:
    """An element with some of what it has left out, perhaps with a reason."""
    kept_attributes = {k: v for k, v in element.attributes.items() if draw(st.booleans())}
    kept_metrics = {k: v for k, v in element.metrics.items() if draw(st.booleans())}
    missing = [k for k in (*element.metrics, *element.attributes) if k not in kept_metrics and k not in kept_attributes]
    unknown = {k: "not read" for k in missing if draw(st.booleans())}
    unknown |= {k: v for k, v in (element.unknown or {}).items() if draw(st.booleans())}
    return msgspec.structs.replace(element, attributes=kept_attributes, metrics=kept_metrics, unknown=unknown or None)


@st.composite
def agreeing_graphs(draw: st.DrawFn, count: int) -> list[Graph]:
    """Graphs that are parts of one: they overlap, each may lack what another has, none contradicts another."""
    whole = draw(graphs())
    parts = []
    for _ in range(count):
        kept_nodes = [draw(_part_of(node)) for node in whole.nodes.values() if draw(st.booleans())]
        kept_edges = [draw(_part_of(edge)) for edge in whole.edges.values() if draw(st.booleans())]
        parts.append(Graph(kept_nodes, kept_edges))
    return parts


def json_values() -> st.SearchStrategy[Any]:
    """Any JSON value, huge integers, NaN and lone surrogates included, as Python's parser lets them pass."""
    leaves = st.one_of(
        st.none(), st.booleans(), st.integers(), st.just(10**400), st.floats(), st.text(st.characters(), max_size=8)
    )
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
        max_leaves=12,
    )
