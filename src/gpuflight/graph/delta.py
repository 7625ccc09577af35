"""A difference as it came over the wire, typed and not yet applied: for who keeps a copy and changes it in place.

``codec.decode_diff`` makes a Diff with both sides of each change; here only what was sent is decoded, several times
faster, and nothing of the graph that it belongs to is needed for that.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Union

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gpuflight.errors import InputError
from gpuflight.graph.codec import check_schema, edge_kinds, node_kinds
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
        delta: Delta = _decoder(tuple(node_kinds().values()), tuple(edge_kinds().values())).decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        check_schema_of(data)
        raise InputError(f"not a difference: {error}") from None
    except RecursionError:
        raise InputError("not a difference: nested too deeply") from None
    check_schema(delta.schema)
    return delta


def changed(before: Any, delta: ElementDelta) -> Any:
    """The element after the change."""
    gone = delta.gone
    attributes, metrics, unknown = before.attributes, before.metrics, before.unknown
    if delta.attributes is not None:
        attributes = {**attributes, **delta.attributes}
    if delta.metrics is not None:
        metrics = {**metrics, **delta.metrics}
    if delta.unknown is not None:
        unknown = {**(unknown or EMPTY), **delta.unknown}
    if gone is not None:
        attributes = _without(attributes, gone.get("attributes"))
        metrics = _without(metrics, gone.get("metrics"))
        unknown = _without(unknown or EMPTY, gone.get("unknown")) or None
    return replace(before, attributes=attributes, metrics=metrics, unknown=unknown)


def check_schema_of(data: bytes) -> None:
    """Raises InputError if a document that cannot be read says of itself that it is of a newer schema."""
    try:
        schema = msgspec.json.decode(data, type=_Schema).schema
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    check_schema(schema)


class _Schema(Struct):
    schema: int = 0


def _without(group: dict[str, Any], names: list[str] | None) -> dict[str, Any]:
    if not names:
        return group
    return {name: value for name, value in group.items() if name not in names} or EMPTY


@lru_cache(maxsize=4)
def _decoder(nodes: tuple[type[Entity], ...], edges: tuple[type[Edge], ...]) -> msgspec.json.Decoder[Any]:
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
