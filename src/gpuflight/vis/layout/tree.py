"""Containment: which box stands in which.

Deploy edges nest: host ⊃ pod, container, unit ⊃ process ⊃ child processes, threads, endpoints. Things that several
processes share (a memory segment, a pipe, a listening socket) stand in the smallest box around all of them. Whatever
nothing contains stands in its host; what only edges name stands apart, marked as not in the graph. No node is ever
lost: ownership in a circle is cut at its first member.
"""

from __future__ import annotations

from collections import defaultdict

from gpuflight.graph import Graph
from gpuflight.graph.element import EdgeKey
from gpuflight.vis.base import LayoutOptions
from gpuflight.vis.layout.hardware import HARDWARE_KINDS, nest_hardware
from gpuflight.vis.layout.item import Item, by_level, common_ancestor, set_depths, walk
from gpuflight.vis.text import plural

HOLDER_RANK = {"Container": 0, "Unit": 1, "Pod": 2, "Host": 3}
STRUCTURAL = frozenset(("Host", "Pod", "Container", "Unit", "Process", "Thread"))


class Forest:
    """The nested items of a picture and what was learnt while nesting them."""

    def __init__(self, graph: Graph, options: LayoutOptions) -> None:
        self.graph = graph
        self.options = options
        self.root = Item("picture", "Picture")
        self.items: dict[str, Item] = {
            node_id: Item(node_id, entity.kind, entity) for node_id, entity in graph.nodes.items()
        }
        self.notes: list[str] = list(options.notes)
        self.far_ends: dict[str, tuple[str, str] | None] | None = None  # of sockets, once folding asks
        self.used: set[EdgeKey] = set()  # deploy edges that nesting already shows
        self._add_missing()
        self.holders: dict[str, list[str]] = defaultdict(list)  # child → Host/RunOn/Belong parents
        self.owners: dict[str, list[str]] = defaultdict(list)  # child → Own parents
        self.users: dict[str, list[str]] = defaultdict(list)  # thing → processes at its data edges
        self.flows: list[EdgeKey] = []  # the edges in which data flows
        self.deploys: list[EdgeKey] = []  # the edges that say what holds what
        self._read_edges()

    def fresh_id(self, wanted: str) -> str:
        """An id for a box of ours that no entity has."""
        while wanted in self.items:
            wanted += "'"
        return wanted

    def _add_missing(self) -> None:
        missing: list[Item] = []
        items = self.items
        for source, target, _ in self.graph.edges:
            if source in items and target in items:
                continue
            for end in (source, target):
                if end not in items:
                    kind = end.partition("(")[0] if "(" in end else "?"
                    items[end] = item = Item(end, kind if kind.isidentifier() else "?", None, end)
                    item.missing = True
                    missing.append(item)
        self.missing = missing
        if missing:
            self.notes.append(
                f"{plural(len(missing), 'entity')} named by an edge but not in the graph: drawn apart, dashed"
            )

    def _read_edges(self) -> None:
        items, owners, holders, users = self.items, self.owners, self.holders, self.users
        for key, edge in self.graph.edges.items():
            source, target, kind = key
            category = edge.category
            if category == "data_stream":
                self.flows.append(key)
            elif category == "deploy":
                self.deploys.append(key)
            if source == target:
                continue
            if kind == "Own":
                owners[target].append(source)
            elif kind == "Host":
                holders[target].append(source)
            elif kind in ("Belong", "RunOn"):
                holders[source].append(target)
            elif category == "data_stream":
                if items[source].kind in ("Process", "Thread"):
                    users[target].append(source)
                if items[target].kind in ("Process", "Thread"):
                    users[source].append(target)

    def build(self) -> None:
        """Nest everything under ``root`` and set depths."""
        parents: dict[str, str] = {}
        by_pid = self._pids()
        for node_id, item in self.items.items():
            if item.kind in STRUCTURAL and item.entity is not None:
                parent = self._structural_parent(item, by_pid)
                if parent:
                    parents[node_id] = parent
        nest_hardware(self.graph, self.items, parents, self.holders)
        self._cut_circles(parents)
        frames = self._frames()
        later: list[Item] = []
        for node_id, item in self.items.items():
            if item.entity is None:
                continue
            parent_id = parents.get(node_id)
            if parent_id is not None:
                self.items[parent_id].adopt(item)
            elif item.kind in STRUCTURAL or item.kind in HARDWARE_KINDS:
                frames.place(item)
            else:
                later.append(item)
        set_depths(self.root)
        self._place_shared(later, frames)
        set_depths(self.root)
        self._flatten_depths()
        self._place_missing()
        self._note_used()

    def _pids(self) -> dict[tuple[str, int], str]:
        found: dict[tuple[str, int], str] = {}
        for node_id, item in self.items.items():
            if item.kind == "Process" and item.entity is not None:
                pid = getattr(item.entity, "pid", None)
                if isinstance(pid, int):
                    found[item.ns, pid] = node_id
        return found

    def _structural_parent(self, item: Item, by_pid: dict[tuple[str, int], str]) -> str | None:
        owner = self._owner(item) if item.kind in ("Process", "Thread") else None
        if owner is not None and item.kind == "Thread":
            return owner
        holder = self._holder(item)
        if owner is None and item.kind == "Process" and item.entity is not None:
            ppid = item.entity.attributes.get("ppid")  # graphs without Own edges between processes (old ones)
            if isinstance(ppid, int):
                owner = by_pid.get((item.ns, ppid))
                if owner == item.id:
                    owner = None
        if owner is None:
            return holder
        if holder is None or self.items[holder].kind == "Host" or holder in self.holders.get(owner, ()):
            return owner
        return holder

    def _owner(self, item: Item) -> str | None:
        """The process or thread that owns it, the first by id."""
        found: str | None = None
        for owner in self.owners.get(item.id, ()):
            box = self.items[owner]
            if box.kind in ("Process", "Thread") and box.entity is not None and (found is None or owner < found):
                found = owner
        return found

    def _holder(self, item: Item) -> str | None:
        """The nearest container, unit, pod or host that holds it; of several of one kind, the first by id."""
        least = HOLDER_RANK.get(item.kind, 0)
        found: tuple[int, str] | None = None
        for holder in self.holders.get(item.id, ()):
            box = self.items[holder]
            rank = HOLDER_RANK.get(box.kind, -1)
            if rank >= least and box.entity is not None and (found is None or (rank, holder) < found):
                found = rank, holder
        return found[1] if found is not None else None

    def _cut_circles(self, parents: dict[str, str]) -> None:
        state: dict[str, int] = {}  # 1 on the way up now, 2 known to reach a root
        cut = 0
        for start in list(parents):
            way: list[str] = []
            node: str | None = start
            while node is not None and node not in state:
                state[node] = 1
                way.append(node)
                node = parents.get(node)
            if node is not None and state[node] == 1:
                first = min(way[way.index(node) :])
                del parents[first]
                cut += 1
            for passed in way:
                state[passed] = 2
        if cut:
            self.notes.append(f"{plural(cut, 'circle')} of ownership: cut at the first member, the cut edge is drawn")

    def _frames(self) -> _Frames:
        return _Frames(self)

    def _place_shared(self, later: list[Item], frames: _Frames) -> None:
        """Endpoints and shared things: into the smallest box around their holders, else around their users.

        A holder may itself be such a thing (a stream in a session), so those wait until their holder has its place.
        """
        items = self.items
        placed = {item.id for item in by_level(self.root)}
        opened: set[str] = set()
        for start in later:
            stack = [start]
            while stack:
                item = stack[-1]
                if item.id in placed:
                    stack.pop()
                    continue
                around = self._around(item, placed)
                if waiting := [other for other in around if other not in placed]:
                    if first := [items[other] for other in waiting if other not in opened]:
                        opened.add(item.id)
                        stack.extend(first)
                        continue
                    # a holder that is not placed now waits for this one: they hold each other in a circle
                    around = [other for other in around if other in placed]
                self._place_around(item, around, frames)
                placed.add(item.id)
                stack.pop()

    def _around(self, item: Item, placed: set[str]) -> list[str]:
        items = self.items
        holders = self.holders.get(item.id) or self.owners.get(item.id) or ()
        around = [holder for holder in holders if items[holder].entity is not None]
        if work := [holder for holder in around if items[holder].kind not in HARDWARE_KINDS]:
            return work
        users = [user for user in self.users.get(item.id, ()) if user in placed]
        return users or around  # a segment in /dev/shm stands with its users, not in the mount

    def _place_around(self, item: Item, around: list[str], frames: _Frames) -> None:
        if not around:
            frames.place(item)
            item.depth = item.parent.depth + 1 if item.parent else 0
            return
        box = self.items[around[0]]
        for other in around[1:]:
            box = common_ancestor(box, self.items[other])
        while box.kind == "Thread" and box.parent is not None and box.parent.kind == "Process":
            box = box.parent  # endpoints are read at the process
        if box is self.root:
            frames.place(item)
        else:
            box.adopt(item)
        item.depth = item.parent.depth + 1 if item.parent else 0

    def _flatten_depths(self) -> None:
        limit = self.options.depth_max
        deep: dict[str, list[Item]] = {}
        for item in by_level(self.root):
            if item.depth == limit and item.children:
                deep[item.id] = walk(item)[1:]
        for box_id, below in deep.items():
            box = self.items[box_id]
            for inner in below:
                inner.children = []
            box.children = []
            for inner in below:
                box.adopt(inner)
                inner.depth = limit + 1
        if deep:
            count = sum(map(len, deep.values()))
            self.notes.append(f"{plural(count, 'entity')} nested deeper than {limit} boxes: side by side at that depth")

    def _place_missing(self) -> None:
        if not self.missing:
            return
        frame = Item(self.fresh_id("missing"), "Elsewhere", label="Named by an edge, not in the graph")
        frame.count = 0
        frame.depth = 1
        self.root.adopt(frame)
        for item in self.missing:
            item.depth = 2
            frame.adopt(item)

    def _note_used(self) -> None:
        """Deploy edges that nesting shows: their inner end stands in their outer one."""
        items = self.items
        for key in self.deploys:
            outer, inner, kind = key
            if kind in ("Belong", "RunOn"):
                outer, inner = inner, outer
            box = items[outer]
            item = items[inner].parent
            while item is not None and item.depth > box.depth:
                item = item.parent
            if item is box:
                self.used.add(key)


class _Frames:
    """Where things go that nothing contains: the host of their namespace, its hardware, or elsewhere."""

    def __init__(self, forest: Forest) -> None:
        self.forest = forest
        self.hosts: dict[str, Item] = {}
        self.hardware: dict[str, Item] = {}
        self.elsewhere: Item | None = None
        hosts = [item for item in forest.items.values() if item.kind == "Host" and item.entity is not None]
        for item in hosts:
            self.hosts.setdefault(item.ns, item)
        total = sum(1 for item in forest.items.values() if item.entity is not None)
        self.bare = total <= 1  # a lone entity needs no host around it

    def place(self, item: Item) -> None:
        """Put ``item`` into the frame of its namespace."""
        root = self.forest.root
        if item.kind == "Host" or self.bare:
            root.adopt(item)
        elif self._far(item):
            if self.elsewhere is None:
                self.elsewhere = Item(self.forest.fresh_id("elsewhere"), "Elsewhere", label="Network peers")
                self.elsewhere.count = 0
                root.adopt(self.elsewhere)
            self.elsewhere.adopt(item)
        elif item.kind in HARDWARE_KINDS:
            self._hardware_of(item.ns).adopt(item)
        else:
            self._host_of(item.ns).adopt(item)

    def _far(self, item: Item) -> bool:
        """A socket end that no process here holds: the far end of a connection."""
        if item.kind not in ("Socket", "RdmaQueuePairEndpoint") or item.entity is None:
            return False
        state = item.entity.attributes.get("state")
        return bool(item.entity.attributes.get("remote")) or item.kind != "Socket" or state is None

    def _host_of(self, ns: str) -> Item:
        host = self.hosts.get(ns)
        if host is None:
            name = ns or self.forest.options.environment.hostname or "This host"
            self.hosts[ns] = host = Item(self.forest.fresh_id(f"host:{ns}"), "Host", label=name, ns=ns)
            host.count = 0
            self.forest.root.adopt(host)
        return host

    def _hardware_of(self, ns: str) -> Item:
        frame = self.hardware.get(ns)
        if frame is None:
            self.hardware[ns] = frame = Item(
                self.forest.fresh_id(f"hardware:{ns}"), "Hardware", label="Hardware", ns=ns
            )
            frame.count = 0
            self._host_of(ns).adopt(frame)
        return frame
