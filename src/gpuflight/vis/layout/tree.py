"""Containment: which box stands in which.

Deploy edges nest: host ⊃ pod, container, unit ⊃ process ⊃ child processes, threads, endpoints. Things that several
processes share (a memory segment, a pipe, a listening socket) stand in the smallest box around all of them. Whatever
nothing contains stands in its host; what only edges name stands apart, marked as not in the graph. No node is ever
lost: ownership in a circle is cut at its first member.
"""

from __future__ import annotations

from collections import defaultdict

from gpuflight.graph import Graph
from gpuflight.vis.base import LayoutOptions
from gpuflight.vis.layout.hardware import HARDWARE_KINDS, nest_hardware
from gpuflight.vis.layout.item import Item, common_ancestor, set_depths, walk
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
        self.far_ends: dict[str, frozenset[tuple[str, str]]] | None = None  # of sockets, once folding asks
        self.used: set[tuple[str, str, str]] = set()  # deploy edges that nesting already shows
        self._add_missing()
        self.holders: dict[str, list[str]] = defaultdict(list)  # child → Host/RunOn/Belong parents
        self.owners: dict[str, list[str]] = defaultdict(list)  # child → Own parents
        self.users: dict[str, list[str]] = defaultdict(list)  # thing → processes at its data edges
        self._read_edges()

    def fresh_id(self, wanted: str) -> str:
        """An id for a box of ours that no entity has."""
        while wanted in self.items:
            wanted += "'"
        return wanted

    def _add_missing(self) -> None:
        missing: list[Item] = []
        items = self.items
        for edge in self.graph.edges.values():
            for end in (edge.source, edge.target):
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
        items = self.items
        for source, target, kind in self.graph.edges:
            if source == target:
                continue
            if kind == "Own":
                self.owners[target].append(source)
            elif kind == "Host":
                self.holders[target].append(source)
            elif kind in ("Belong", "RunOn"):
                self.holders[source].append(target)
            elif self.graph.edges[source, target, kind].category == "data_stream":
                if items[source].kind in ("Process", "Thread"):
                    self.users[target].append(source)
                if items[target].kind in ("Process", "Thread"):
                    self.users[source].append(target)

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
        self._flatten_depths()
        self._place_missing()
        set_depths(self.root)
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
        items = self.items
        holders = [
            (HOLDER_RANK[items[holder].kind], holder)
            for holder in self.holders.get(item.id, ())
            if items[holder].entity is not None and items[holder].kind in HOLDER_RANK
        ]
        holders = [held for held in holders if item.kind not in HOLDER_RANK or held[0] >= HOLDER_RANK[item.kind]]
        holder = min(holders)[1] if holders else None
        if item.kind not in ("Process", "Thread"):
            return holder
        owner = next(
            (
                own
                for own in sorted(self.owners.get(item.id, ()))
                if items[own].entity is not None and items[own].kind in ("Process", "Thread")
            ),
            None,
        )
        if owner is None and item.kind == "Process" and item.entity is not None:
            ppid = item.entity.attributes.get("ppid")  # graphs without Own edges between processes (old ones)
            if isinstance(ppid, int):
                owner = by_pid.get((item.ns, ppid))
                if owner == item.id:
                    owner = None
        if owner is None or item.kind == "Thread":
            return owner or holder
        if holder is None or holder in self.holders.get(owner, ()) or items[holder].kind == "Host":
            return owner
        return holder

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
        placed = {item.id for item in walk(self.root)}
        opened: set[str] = set()
        for start in later:
            stack = [start]
            while stack:
                item = stack[-1]
                if item.id in placed:
                    stack.pop()
                    continue
                around = self._around(item, placed)
                first = [self.items[other] for other in around if other not in placed and other not in opened]
                if first:
                    opened.add(item.id)
                    stack.extend(first)
                    continue
                # a holder that is not placed now waits for this one: they hold each other in a circle
                self._place_around(item, [other for other in around if other in placed], frames)
                placed.add(item.id)
                stack.pop()

    def _around(self, item: Item, placed: set[str]) -> list[str]:
        holders = self.holders.get(item.id) or self.owners.get(item.id) or ()
        around = [holder for holder in holders if self.items[holder].entity is not None]
        work = [holder for holder in around if self.items[holder].kind not in HARDWARE_KINDS]
        users = [user for user in self.users.get(item.id, ()) if user in placed]
        return work or users or around  # a segment in /dev/shm stands with its users, not in the mount

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
        set_depths(self.root)
        limit = self.options.depth_max
        deep: dict[str, list[Item]] = {}
        for item in walk(self.root):
            if item.depth == limit and item.children:
                below = [inner for inner in walk(item) if inner is not item]
                deep[item.id] = below
        for box_id, below in deep.items():
            box = self.items[box_id]
            for inner in below:
                inner.children = []
            box.children = []
            for inner in below:
                box.adopt(inner)
        if deep:
            count = sum(map(len, deep.values()))
            self.notes.append(f"{plural(count, 'entity')} nested deeper than {limit} boxes: side by side at that depth")

    def _place_missing(self) -> None:
        if not self.missing:
            return
        frame = Item(self.fresh_id("missing"), "Elsewhere", label="Named by an edge, not in the graph")
        frame.count = 0
        self.root.adopt(frame)
        for item in self.missing:
            frame.adopt(item)

    def _note_used(self) -> None:
        """Deploy edges that nesting shows: their inner end stands in their outer one."""
        for key, edge in self.graph.edges.items():
            if edge.category != "deploy":
                continue
            inner, outer = (key[0], key[1]) if key[2] in ("Belong", "RunOn") else (key[1], key[0])
            box = self.items[outer]
            item = self.items[inner].parent
            while item is not None and item is not box:
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
