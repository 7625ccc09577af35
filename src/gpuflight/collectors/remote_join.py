"""Which half connections of different hosts are one, and the edge that then crosses the machines.

Every host reports a connection with another host as a *half*: its own endpoint, and a stand-in for the far end that
carries ``remote``. Two halves are the two sides of one connection exactly if the addresses of one are those of the
other, mirrored: same protocol, own address of each is the far address of the other. One side alone proves nothing
(private addresses repeat from host to host, NAT shows addresses that nobody has), so an end that is known from one side
only keeps its stand-in. Loopback and unspecified addresses never join. Where more than two hosts claim the same
connection nobody can say which two it is: none is joined, and that is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from gpuflight.graph import Edge, Entity, edges, nodes
from gpuflight.graph.element import EMPTY

_NOWHERE = ("127.", "[::1]", "0.0.0.0:", "[::]", "[::ffff:127.", "localhost:")


class Half(Struct, gc=False):
    """One side of a connection. ``own`` and ``far`` are ids of the endpoint and its stand-in; ``opened``: whether this
    side is the client, None if not known."""

    protocol: str
    own_address: str
    far_address: str
    own: str
    far: str
    opened: bool | None = None
    edge: edges.ConnectTo | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """The same for both sides of a connection."""
        one, other = self.own_address, self.far_address
        return (self.protocol, one, other) if one < other else (self.protocol, other, one)


class _Connection(Struct, gc=False):
    """One joined connection, what it was made of, and what it was made into."""

    first: Half
    second: Half
    given: tuple[Entity | None, Entity | None]
    edge: edges.ConnectTo
    stand_ins: tuple[tuple[str, str, Entity | None], ...]


class Joined(Struct):
    """``edges``: one ConnectTo per connection of which both sides are known. ``joined_to``: the stand-ins that it makes
    superfluous, each with the id of the real endpoint; ``nodes``: those of them whose entities were given, with that as
    the attribute ``joined_to``. ``ambiguous_count``: connections that more than two sides claim."""

    nodes: list[Entity] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    joined_to: dict[str, str] = field(default_factory=dict)
    ambiguous_count: int = 0
    connections: dict[tuple[str, str, str], _Connection] = field(default_factory=dict)


def joinable(address: str) -> bool:
    """Whether an address (``10.0.0.5:80``, ``[fe80::1]:80``) can mean the same to two hosts."""
    return bool(address) and not address.startswith(_NOWHERE)


def halves_of(entities: Mapping[str, Entity], connections: Iterable[Edge]) -> list[Half]:
    """The half connections of a graph. Linear."""
    found: list[Half] = []
    for edge in connections:
        if type(edge) is edges.ConnectTo and (half := half_of(entities, edge)) is not None:
            found.append(half)
    return found


def half_of(entities: Mapping[str, Entity], edge: edges.ConnectTo) -> Half | None:
    """The half connection that an edge is: one of which exactly one end carries ``remote``; None if it is another."""
    source, target = entities.get(edge.source), entities.get(edge.target)
    if type(source) is not nodes.Socket or type(target) is not nodes.Socket:
        return None
    far_source, far_target = source.attributes.get("remote") is True, target.attributes.get("remote") is True
    if far_source == far_target or source.protocol != target.protocol:
        return None
    own, far = (target, source) if far_source else (source, target)
    if not (joinable(own.address) and joinable(far.address)):
        return None
    opened = None if "direction" in edge.attributes else own is source
    return Half(own.protocol, own.address, far.address, own.id, far.id, opened, edge)


def join_hosts(
    local: Iterable[Half],
    peers: Mapping[str, Iterable[Half]],
    named: Mapping[str, Entity] | None = None,
    before: Joined | None = None,
) -> Joined:
    """Join the halves of this host and of each peer (by namespace). Linear in the number of halves.

    The joining edge runs from the side that opened the connection; its metrics are those of the client's half where it
    has some, else of the server's. ``named`` gives the stand-ins' entities, of which a marked copy is reported. What
    was made ``before`` of the same halves and entities is taken again, the very objects.
    """
    first_of: dict[tuple[str, str, str], tuple[str, Half]] = {}
    second_of: dict[tuple[str, str, str], tuple[str, Half]] = {}
    disputed: set[tuple[str, str, str]] = set()
    for ns, halves in (("", local), *peers.items()):
        for half in halves:
            if joinable(half.own_address) and joinable(half.far_address):
                claim = (ns, half)
                key = half.key
                if first_of.setdefault(key, claim) is not claim and second_of.setdefault(key, claim) is not claim:
                    disputed.add(key)
    joined = Joined(ambiguous_count=len(disputed))
    known = before.connections if before is not None else {}
    entity_of = (named or {}).get
    for key, (other_ns, second) in second_of.items():
        ns, first = first_of[key]
        if key in disputed or ns == other_ns or first.own_address != second.far_address:
            continue
        if first.own_address == second.own_address:
            continue
        given = entity_of(first.far), entity_of(second.far)
        made = known.get(key)
        if (
            made is None
            or made.second is not second
            or (made.first is not first and made.first != first)
            or made.given[0] is not given[0]
            or made.given[1] is not given[1]
        ):
            made = _connection(first, second, given)
        joined.connections[key] = made
        joined.edges.append(made.edge)
        for far, real, entity in made.stand_ins:
            joined.joined_to[far] = real
            if entity is not None:
                joined.nodes.append(entity)
    return joined


def _connection(first: Half, second: Half, given: tuple[Entity | None, Entity | None]) -> _Connection:
    known = first.opened is not None or second.opened is not None
    if first.opened is not None and second.opened is not None and first.opened == second.opened:
        known = False  # each says the other one opened it: no telling
    if not known:
        first_opens = first.own < second.own
    elif first.opened is not None:
        first_opens = first.opened
    else:
        first_opens = not second.opened
    client, server = (first, second) if first_opens else (second, first)
    attributes: dict[str, Any] = {"join": "both_ends"}
    metrics: dict[str, Any] = {}
    unknown: dict[str, str] | None = None
    for half in (server, client):  # the client's word stands
        if half.edge is not None:
            said = {name: value for name, value in half.edge.attributes.items() if name not in ("half", "direction")}
            attributes = {**said, **attributes}
            metrics = {**metrics, **half.edge.metrics}
            unknown = {**(unknown or {}), **(half.edge.unknown or {})}
    if not known:
        attributes["direction"] = "guessed"
    if unknown is not None:
        unknown = {name: why for name, why in unknown.items() if name not in metrics and name not in attributes} or None
    edge = edges.ConnectTo(client.own, server.own, attributes, metrics or EMPTY, unknown)
    stand_ins = tuple(
        (half.far, real.own, marked(entity, real.own) if entity is not None else None)
        for half, real, entity in ((first, second, given[0]), (second, first, given[1]))
    )
    return _Connection(first, second, given, edge, stand_ins)


def marked(entity: Entity, real: str) -> Entity:
    """A stand-in with the id of the endpoint that it stands for."""
    return replace(entity, attributes={**entity.attributes, "joined_to": real})
