"""A difference as it came over the wire, typed and not yet applied: for who keeps a copy and changes it in place.

``codec.decode_diff`` makes a Diff with both sides of each change; here only what was sent is decoded, several times
faster, and nothing of the graph that it belongs to is needed for that.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Union

import msgspec
from msgspec import Struct

from gpuflight.errors import InputError
from gpuflight.graph.codec import check_schema, check_schema_of, edge_kinds, node_kinds
from gpuflight.graph.element import EMPTY, Edge, EdgeKey, Entity, Metric

HEAD = b'{"type":"diff"'
"""How a difference begins."""


class ElementDelta(Struct, gc=False):
    """What is new or different in one element, and which names of which group are gone. ``id`` is that of an entity,
    ``key`` that of an edge."""

    id: str = ""
    key: EdgeKey | None = None
    attributes: dict[str, Any] | None = None
    metrics: dict[str, Metric] | None = None
    unknown: dict[str, str] | None = None
    gone: dict[str, list[str]] | None = None


class Delta(Struct):
    """A difference (codec.DiffLine) without what is said about the round."""

    type: str
    schema: int
    round: int
    base: int = 0
    nodes_count: int = 0
    edges_count: int = 0
    time: str = ""
    nodes_added: list[Any] = []
    nodes_removed: list[str] = []
    nodes_changed: list[ElementDelta] = []
    edges_added: list[Any] = []
    edges_removed: list[EdgeKey] = []
    edges_changed: list[ElementDelta] = []


def decode_delta(data: bytes) -> Delta:
    """What ``codec.encode_diff`` wrote. Raises InputError, also for kinds that nobody here declares."""
    try:
        delta: Delta = _decoder(len(Entity.__subclasses__()), len(Edge.__subclasses__())).decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        check_schema_of(data)
        raise InputError(f"not a difference: {error}") from None
    except RecursionError:
        raise InputError("not a difference: nested too deeply") from None
    check_schema(delta.schema)
    return delta


def changed(before: Any, delta: ElementDelta) -> Any:
    """The element after the change."""
    after = before.__copy__()  # nobody has seen it yet; unlike replace it does not look at the identity again
    if delta.metrics is not None:
        after.metrics = {**before.metrics, **delta.metrics}
    if delta.attributes is not None:
        after.attributes = {**before.attributes, **delta.attributes}
    if delta.unknown is not None:
        after.unknown = {**(before.unknown or EMPTY), **delta.unknown}
    if (gone := delta.gone) is not None:
        after.attributes = _without(after.attributes, gone.get("attributes"))
        after.metrics = _without(after.metrics, gone.get("metrics"))
        after.unknown = _without(after.unknown or EMPTY, gone.get("unknown")) or None
    return after


def _without(group: dict[str, Any], names: list[str] | None) -> dict[str, Any]:
    if not names:
        return group
    return {name: value for name, value in group.items() if name not in names} or EMPTY


@lru_cache(maxsize=4)
def _decoder(_nodes_count: int, _edges_count: int) -> msgspec.json.Decoder[Any]:
    """Anew when there are more kinds; to look at all of them each time would cost more than decoding."""
    nodes, edges = tuple(node_kinds().values()), tuple(edge_kinds().values())
    typed = msgspec.defstruct(
        "TypedDelta",
        [
            ("nodes_added", list[Union[nodes]], msgspec.field(default_factory=list)),  # type: ignore[valid-type]  # noqa: UP007
            ("edges_added", list[Union[edges]], msgspec.field(default_factory=list)),  # type: ignore[valid-type]  # noqa: UP007
        ],
        bases=(Delta,),
    )
    return msgspec.json.Decoder(typed)


__all__ = ["HEAD", "Delta", "ElementDelta", "changed", "decode_delta"]
