"""The two bases of everything in a graph: Entity (a node) and Edge.

Both are ``msgspec.Struct(gc=False)``: they hold only text, numbers and dictionaries of these, so they can take part in
no reference cycle, and keeping them out of the garbage collector halves the cost of a round (docs/architecture.md).
For the same reason an attribute's value is a scalar or a tuple/list of scalars, never another element.

Elements are values: once handed to a graph they are replaced, never changed in place.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from msgspec import Struct

Metric = int | float
Category = Literal["deploy", "data_stream", "placement", "attribute"]

LOCAL = ""
"""Namespace of this host; anything else is a foreign host's."""


class _Empty(dict[str, Any]):
    """An empty dictionary that stays empty; copies and pickles of it are itself."""

    __slots__ = ()

    def _refuse(self, *_args: object, **_values: object) -> Any:
        raise TypeError("elements are replaced, never changed in place: make a new dictionary")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __copy__(self) -> _Empty:
        return self

    def __deepcopy__(self, _memo: object) -> _Empty:
        return self

    def __reduce__(self) -> str:
        return "EMPTY"


EMPTY: dict[str, Any] = _Empty()
"""What an element without attributes or metrics has: one shared, read-only dictionary instead of one each, a sixth of
the memory of a large graph. It is left out of JSON."""


class Entity(Struct, gc=False, kw_only=True, tag_field="kind", omit_defaults=True):
    """A thing on a machine: identity fields (of the subclass), attributes, metrics.

    ``id`` is ``Kind(identity)``, or ``Kind(ns=namespace,identity)`` for anything not of this host; it is rendered from
    the identity fields when not given. Identity never changes; attributes change rarely; metrics are numbers with the
    unit at the end of their name (``memory_used_bytes``, ``sm_util_pct``). ``unknown`` maps a metric or attribute that
    could not be read to the reason; such a metric is then absent, never 0.
    """

    id: str = ""
    attributes: dict[str, Any] = EMPTY
    metrics: dict[str, Metric] = EMPTY
    unknown: dict[str, str] | None = None
    ns: str = LOCAL

    def __post_init__(self) -> None:
        if not self.id:
            self.id = self._render_id()

    def _render_id(self) -> str:
        return entity_id(self.__struct_config__.tag, self._identity(), self.ns)

    def _identity(self) -> str:
        """The identity as it stands between the brackets of the id."""
        raise NotImplementedError(f"{type(self).__name__} has no identity of its own")

    @property
    def kind(self) -> str:
        """Name of the kind, as in the id and in JSON."""
        return self.__struct_config__.tag  # type: ignore[return-value]

    @property
    def label(self) -> str:
        """Short text for people: the name attribute if there is one, else what the id says."""
        name = self.attributes.get("name")
        return str(name) if name else self.id


class Edge(Struct, gc=False, tag_field="kind", omit_defaults=True):
    """A relation from ``source`` to ``target``, both ids of entities. One per (source, target, kind).

    ``category`` and ``directed`` belong to the kind and never differ between edges of one kind.
    """

    source: str
    target: str
    attributes: dict[str, Any] = EMPTY
    metrics: dict[str, Metric] = EMPTY
    unknown: dict[str, str] | None = None

    category: ClassVar[Category]
    directed: ClassVar[bool] = True

    @property
    def kind(self) -> str:
        """Name of the kind, as in JSON."""
        return self.__struct_config__.tag  # type: ignore[return-value]

    @property
    def key(self) -> EdgeKey:
        """What identifies an edge in a graph."""
        return (self.source, self.target, self.__struct_config__.tag)  # type: ignore[return-value]

    @property
    def id(self) -> str:
        """The key as text: ``Kind(source->target)``; rendered on demand, never stored."""
        return edge_id(self.key)


EdgeKey = tuple[str, str, str]
"""(source id, target id, kind name)."""


def entity_id(kind: Any, identity: str, ns: str = LOCAL) -> str:
    """The global id of an entity, e.g. ``Process(pid=42,start=918273)`` or ``Process(ns=node-7,pid=42,…)``."""
    return f"{kind}({identity})" if not ns else f"{kind}(ns={ns},{identity})"


def edge_id(key: EdgeKey) -> str:
    """Text form of an edge's key."""
    source, target, kind = key
    return f"{kind}({source}->{target})"
