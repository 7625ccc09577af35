"""A peer's graph in our namespaces, kept up to date by the differences that the peer tells.

What is kept is what is shown: elements are put in their namespace once, when they come. A difference costs what
changed, plus a copy of the lists that a round reads. It must fit exactly (``Misfit`` otherwise, and the peer is asked
for the whole graph): the round that it leads on from, every element that changes or goes, and the numbers of nodes and
edges afterwards.
"""

from __future__ import annotations

import threading
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from gpuflight.collectors.remote_join import Half, half_of
from gpuflight.graph import LOCAL, Edge, Entity, Graph, edges, nodes
from gpuflight.graph.delta import Delta, ElementDelta, changed
from gpuflight.graph.element import EdgeKey
from gpuflight.graph.namespaces import depth, loose_id, move_into, moved_references, within, without_namespaces

Identity = tuple[str, str]
"""Machine id and boot id of a host."""


class Misfit(Exception):
    """A difference that does not lead on from the copy, or that changes which hosts are in it."""


class Lists(Struct, frozen=True):
    """What a round reads of a copy, and may keep: all entities but the peer's own Host, the edges, the half connections
    and the far ends of these by id."""

    entities: list[Entity]
    connections: list[Edge]
    halves: list[Half]
    stand_ins: dict[str, Entity]


class Copy:
    """The graph of a peer, less what is not shown of it: our own host as it comes back through others, and what came
    through too many. ``apply`` is called by one thread at a time, ``lists`` by any.

    ``host`` is the peer's own Host, apart from ``entities``; ``hosts`` are the other machines by namespace.
    ``too_deep_count``: entities beyond the depth limit. Changes the elements of ``graph``, which nobody else may have
    seen.
    """

    def __init__(self, graph: Graph, ns: str, own: Identity, max_depth: int, number: int = 0) -> None:
        self.ns = ns
        self.round_number = number
        self.too_deep_count = 0
        self._spaces = {entity.ns for entity in graph.nodes.values()}
        self._doomed: set[str] = set()
        shown = self._less_what_is_too_far(graph, own, max_depth)
        self._dropped = graph.nodes.keys() - shown.nodes.keys()
        self._dropped_edges_count = len(graph.edges) - len(shown.edges)
        self._ids: dict[str, str] = {}
        connections = list(shown.edges.values())
        self.nodes = move_into(shown.nodes.values(), connections, ns, self._ids)
        self.edges: dict[EdgeKey, Edge] = {edge.key: edge for edge in connections}
        self.hosts: dict[str, Identity] = {}
        self.stand_ins: dict[str, Entity] = {}
        self.host: nodes.Host | None = None
        for id_, entity in self.nodes.items():
            if type(entity) is nodes.Host:
                if entity.ns != ns:
                    self.hosts[entity.ns] = identity_of(entity)
                elif self.host is None:
                    self.host = entity
            elif type(entity) is nodes.Socket and entity.attributes.get("remote") is True:
                self.stand_ins[id_] = entity
        if self.host is not None:
            del self.nodes[self.host.id]
        self.halves: dict[EdgeKey, Half] = {}
        self._find_halves()
        self._lock = threading.Lock()
        self._nodes_changed = self._edges_changed = self._halves_changed = False
        self._lists = Lists(list(self.nodes.values()), connections, list(self.halves.values()), self.stand_ins.copy())

    def _less_what_is_too_far(self, graph: Graph, own: Identity, max_depth: int) -> Graph:
        spaces = self._spaces
        if spaces <= {LOCAL}:
            return graph
        gone: set[str] = set()
        for entity in graph.nodes.values():
            if entity.ns != LOCAL and type(entity) is nodes.Host and same_host(identity_of(entity), own):
                gone.add(entity.ns)
        too_deep = {ns for ns in spaces if ns != LOCAL and depth(ns) + 1 > max_depth}
        self.too_deep_count = sum(entity.ns in too_deep for entity in graph.nodes.values()) if too_deep else 0
        outer = gone | too_deep
        self._doomed = {ns for ns in spaces if any(within(ns, one) for one in outer)}
        return without_namespaces(graph, outer)

    def apply(self, delta: Delta) -> None:
        """Take in a difference. Raises Misfit, after which this copy takes in nothing more, and ``lists`` gives what it
        gave before."""
        if delta.base != self.round_number:
            raise Misfit(f"it leads on from round {delta.base}, not from {self.round_number}")
        with self._lock:
            self.round_number = -1  # until all of it fits
            try:
                self._apply(delta)
            except KeyError as error:
                raise Misfit(f"it is about something that is not there: {error}") from None
            self._check_counts(delta)
            self.round_number = delta.round

    def lists(self) -> Lists:
        """What there is now; the very same lists where nothing changed. Made when they are wanted, since peers may be
        asked more often than rounds are made."""
        with self._lock:
            if self.round_number >= 0 and (self._nodes_changed or self._edges_changed):
                known = self._lists
                self._lists = Lists(
                    list(self.nodes.values()) if self._nodes_changed else known.entities,
                    list(self.edges.values()) if self._edges_changed else known.connections,
                    list(self.halves.values()) if self._halves_changed else known.halves,
                    self.stand_ins.copy() if self._nodes_changed else known.stand_ins,
                )
                self._nodes_changed = self._edges_changed = self._halves_changed = False
            return self._lists

    def _check_counts(self, delta: Delta) -> None:
        counts = (
            len(self.nodes) + (self.host is not None) + len(self._dropped),
            len(self.edges) + self._dropped_edges_count,
        )
        if counts != (delta.nodes_count, delta.edges_count):
            raise Misfit(f"{counts} nodes and edges, not {(delta.nodes_count, delta.edges_count)}")

    def _apply(self, delta: Delta) -> None:
        sockets_changed = False
        for key in delta.edges_removed:
            self._remove_edge(key)
        for id_ in delta.nodes_removed:
            sockets_changed |= self._remove_node(id_)
        ids, known, stand_ins = self._ids, self.nodes, self.stand_ins
        for change in delta.nodes_changed:
            if change.attributes is None and change.gone is None and (new := ids.get(change.id)) in known:
                after = known[new] = changed(known[new], change)  # most that changes: only numbers
                if new in stand_ins:
                    stand_ins[new] = after
            else:
                sockets_changed |= self._change_node(change)
        if delta.nodes_added:
            sockets_changed |= self._add_nodes(delta.nodes_added)
        for change in delta.edges_changed:
            self._change_edge(change)
        if delta.edges_added:
            self._add_edges(delta.edges_added)
        if sockets_changed:
            self._find_halves()
        if delta.nodes_added or delta.nodes_removed or delta.nodes_changed:
            self._nodes_changed = True
        if delta.edges_added or delta.edges_removed or delta.edges_changed:
            self._edges_changed = True

    # --- nodes -----------------------------------------------------------------------------------------------------

    def _remove_node(self, id_: str) -> bool:
        if id_ in self._dropped:
            self._dropped.remove(id_)
            return False
        new = self._ids.pop(id_)
        if type(self.nodes.pop(new)) is nodes.Host:
            raise Misfit("a host went")
        return self.stand_ins.pop(new, None) is not None

    def _change_node(self, change: ElementDelta) -> bool:
        """Whether an end of a connection became, or ceased to be, a stand-in."""
        if change.id in self._dropped:
            if change.attributes is not None and not change.attributes.keys().isdisjoint(("machine_id", "boot_id")):
                raise Misfit("a host that is left out is another one now")
            return False
        new = self._ids[change.id]
        if change.attributes is not None:
            change.attributes = moved_references(change.attributes, self.ns, self._ids)
        host = self.host
        if host is not None and new == host.id:
            self.host = changed(host, change)
            return False
        before = self.nodes[new]
        after = self.nodes[new] = changed(before, change)
        if type(after) is nodes.Socket:
            was, is_now = new in self.stand_ins, after.attributes.get("remote") is True
            if is_now:
                self.stand_ins[new] = after
            elif was:
                del self.stand_ins[new]
            return was != is_now
        if type(after) is nodes.Host and identity_of(after) != identity_of(before):
            raise Misfit("a host is another one now")
        return False

    def _add_nodes(self, added: list[Entity]) -> bool:
        """Whether some of them take the place of others, which went and came again."""
        for entity in added:
            if type(entity) is nodes.Host or entity.ns not in self._spaces:
                raise Misfit("a host came")
        doomed = self._doomed
        if doomed:
            self._dropped.update(entity.id for entity in added if entity.ns in doomed)
            added = [entity for entity in added if entity.ns not in doomed]
        moved = move_into(added, (), self.ns, self._ids)
        again = not moved.keys().isdisjoint(self.nodes)
        self.nodes.update(moved)
        for id_, entity in moved.items():
            if type(entity) is nodes.Socket and entity.attributes.get("remote") is True:
                self.stand_ins[id_] = entity
            elif again:
                self.stand_ins.pop(id_, None)
        return again

    # --- edges -----------------------------------------------------------------------------------------------------

    def _moved_key(self, key: EdgeKey) -> EdgeKey | None:
        """The key here; None for an edge that is left out with one of its ends."""
        source, target, kind = key
        if self._dropped and (source in self._dropped or target in self._dropped):
            return None
        ids = self._ids
        return ids.get(source) or loose_id(source, self.ns), ids.get(target) or loose_id(target, self.ns), kind

    def _remove_edge(self, key: EdgeKey) -> None:
        new = self._moved_key(key)
        if new is None:
            self._dropped_edges_count -= 1
            return
        del self.edges[new]
        if self.halves.pop(new, None) is not None:
            self._halves_changed = True

    def _change_edge(self, change: ElementDelta) -> None:
        if change.key is None:
            raise Misfit("a change of nothing")
        new = self._moved_key(change.key)
        if new is None:
            return
        if change.attributes is not None:
            change.attributes = moved_references(change.attributes, self.ns, self._ids)
        edge = self.edges[new] = changed(self.edges[new], change)
        half = self.halves.get(new)
        if half is not None and change.attributes is None and change.gone is None:
            self.halves[new] = replace(half, edge=edge)
            self._halves_changed = True
        else:
            self._note_half(new, edge)

    def _add_edges(self, added: list[Edge]) -> None:
        if self._dropped:
            kept = [edge for edge in added if self._moved_key(edge.key) is not None]
            self._dropped_edges_count += len(added) - len(kept)
            added = kept
        move_into((), added, self.ns, self._ids)
        for edge in added:
            key = edge.key
            self.edges[key] = edge
            self._note_half(key, edge)

    # --- what is derived -------------------------------------------------------------------------------------------

    def _note_half(self, key: EdgeKey, edge: Edge) -> None:
        if type(edge) is not edges.ConnectTo:
            return
        half = half_of(self.nodes, edge)
        if half is not None:
            self.halves[key] = half
            self._halves_changed = True
        elif self.halves.pop(key, None) is not None:
            self._halves_changed = True

    def _find_halves(self) -> None:
        self.halves = {}
        self._halves_changed = True
        if self.stand_ins:
            for key, edge in self.edges.items():
                self._note_half(key, edge)


def same_host(one: Identity, other: Identity) -> bool:
    """A boot id is made anew at each start of a kernel; without one nothing can be said."""
    return bool(one[1]) and one == other


def identity_of(host: Any) -> Identity:
    """Machine id and boot id that a Host says of itself."""
    return str(host.attributes.get("machine_id", "")), str(host.attributes.get("boot_id", ""))
