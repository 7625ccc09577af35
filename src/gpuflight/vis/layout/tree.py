"""Containment: which box stands in which.

Deploy edges nest: host ⊃ pod, container, unit ⊃ process ⊃ child processes, threads, endpoints. Things that several
processes share (a memory segment, a pipe, a listening socket) stand in the smallest box around all of them. Whatever
nothing contains stands in its host; what only edges name stands apart, marked as not in the graph. No node is ever
lost: ownership in a circle is cut at its first member.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property
from operator import attrgetter

from gpuflight.graph import Graph
from gpuflight.vis.base import LayoutOptions
from gpuflight.vis.layout.cards import items_of
from gpuflight.vis.layout.hardware import HARDWARE_KINDS, nest_hardware
from gpuflight.vis.layout.item import Item, common_ancestor, set_depths, walk
from gpuflight.vis.layout.wires import RUNNING, read_wires
from gpuflight.vis.text import plural

HOLDER_RANK = {"Container": 0, "Unit": 1, "Pod": 2, "Host": 3}
STRUCTURAL = frozenset(("Host", "Pod", "Container", "Unit", "Process", "Thread"))
_ID = attrgetter("id")


class Forest:
    """The nested items of a picture and what was learnt while nesting them."""

    def __init__(self, graph: Graph, options: LayoutOptions) -> None:
        self.graph = graph
        self.options = options
        self.root = Item("picture", "Picture")
        self.boxes: list[Item] = []  # the root and all that hold others, parents first; once folded
        self.items: dict[str, Item] = items_of(graph)
        self.notes: list[str] = list(options.notes)
        self.far_ends: dict[Item, tuple[str, str] | None] | None = None  # of sockets, once folding asks
        self.used: set[int] = set()  # the deploy edges, by number, that nesting already shows
        self.wires, self.missing = read_wires(graph, self.items)
        if self.missing:
            self.notes.append(
                f"{plural(len(self.missing), 'entity')} named by an edge but not in the graph: drawn apart, dashed"
            )
        self.holders: dict[Item, list[Item]] = defaultdict(list)  # child → Host/RunOn/Belong parents
        self.owners: dict[Item, list[Item]] = defaultdict(list)  # child → Own parents
        self.users: dict[Item, list[Item]] = defaultdict(list)  # thing → processes at its data edges
        self._read_wires()

    def fresh_id(self, wanted: str) -> str:
        """An id for a box of ours that no entity has."""
        while wanted in self.items:
            wanted += "'"
        return wanted

    def _read_wires(self) -> None:
        owners, holders, users = self.owners, self.holders, self.users
        for sort, source, target in self.wires:
            if not sort.nests or source is target:
                continue
            kind = sort.kind
            if kind == "Own":
                owners[target].append(source)
            elif kind == "Host":
                holders[target].append(source)
            elif kind in ("Belong", "RunOn"):
                holders[source].append(target)
            else:
                if sort.source_kind in RUNNING:
                    users[target].append(source)
                if sort.target_kind in RUNNING:
                    users[source].append(target)

    def build(self) -> None:
        """Nest everything under ``root`` and set depths."""
        parents: dict[Item, Item] = {}
        standing: list[Item] = []  # structure and hardware: of these others may stand in
        hardware: list[Item] = []
        later: list[Item] = []
        for item in self.items.values():
            if item.entity is None:
                continue
            if item.kind in STRUCTURAL:
                standing.append(item)
                parent = self._structural_parent(item)
                if parent is not None:
                    parents[item] = parent
            elif item.kind in HARDWARE_KINDS:
                standing.append(item)
                hardware.append(item)
            else:
                later.append(item)
        nest_hardware(self.graph, self.items, hardware, parents, self.holders)
        self._cut_circles(parents)
        frames = _Frames(self)
        for item in standing:
            parent = parents.get(item)
            if parent is not None:
                parent.adopt(item)
            else:
                frames.place(item)
        set_depths(self.root)
        self._place_shared(later, frames)
        self._flatten_depths(set_depths(self.root))
        self._place_missing()
        self._note_used()
        for found in (self.holders, self.owners, self.users):
            found.clear()  # the boxes of the picture go where these were, instead of into fresh memory

    @cached_property
    def _by_pid(self) -> dict[tuple[str, int], Item]:
        found: dict[tuple[str, int], Item] = {}
        for item in self.items.values():
            if item.kind == "Process" and item.entity is not None:
                pid = getattr(item.entity, "pid", None)
                if isinstance(pid, int):
                    found[item.ns, pid] = item
        return found

    def _structural_parent(self, item: Item) -> Item | None:
        kind = item.kind
        owner = self._owner(item) if kind in RUNNING else None
        if owner is not None and kind == "Thread":
            return owner
        holder = self._holder(item)
        if owner is None and kind == "Process" and item.entity is not None:
            ppid = item.entity.attributes.get("ppid")  # graphs without Own edges between processes (old ones)
            if isinstance(ppid, int):
                owner = self._by_pid.get((item.ns, ppid))
                if owner is item:
                    owner = None
        if owner is None:
            return holder
        if holder is None or holder.kind == "Host" or holder in self.holders.get(owner, ()):
            return owner
        return holder

    def _owner(self, item: Item) -> Item | None:
        """The process or thread that owns it, the first by id."""
        found: Item | None = None
        for owner in self.owners.get(item, ()):
            if owner.kind in RUNNING and owner.entity is not None and (found is None or owner.id < found.id):
                found = owner
        return found

    def _holder(self, item: Item) -> Item | None:
        """The nearest container, unit, pod or host that holds it; of several of one kind, the first by id."""
        least = HOLDER_RANK.get(item.kind, 0)
        found: Item | None = None
        first = len(HOLDER_RANK), ""
        for holder in self.holders.get(item, ()):
            rank = HOLDER_RANK.get(holder.kind, -1)
            if rank >= least and holder.entity is not None and (rank, holder.id) < first:
                first = rank, holder.id
                found = holder
        return found

    def _cut_circles(self, parents: dict[Item, Item]) -> None:
        safe: set[Item] = set()  # known to reach a root
        cut = 0
        holding = set(parents.values())  # what a circle is made of
        for start in [item for item in parents if item in holding]:
            way: dict[Item, None] = {}
            node: Item | None = start
            while node is not None and node not in safe:
                if node in way:
                    circle = list(way)
                    del parents[min(circle[circle.index(node) :], key=_ID)]
                    cut += 1
                    break
                way[node] = None
                node = parents.get(node)
            safe.update(way)
        if cut:
            self.notes.append(f"{plural(cut, 'circle')} of ownership: cut at the first member, the cut edge is drawn")

    def _place_shared(self, later: list[Item], frames: _Frames) -> None:
        """Endpoints and shared things: into the smallest box around their holders, else around their users.

        A holder may itself be such a thing (a stream in a session), so those wait until their holder has its place.
        """
        opened: set[Item] = set()
        for start in later:
            stack = [start]
            while stack:
                item = stack[-1]
                if item.parent is not None:  # it has its place
                    stack.pop()
                    continue
                around = self._around(item)
                if waiting := [other for other in around if other.parent is None]:
                    if first := [other for other in waiting if other not in opened]:
                        opened.add(item)
                        stack.extend(first)
                        continue
                    # a holder that is not placed now waits for this one: they hold each other in a circle
                    around = [other for other in around if other.parent is not None]
                self._place_around(item, around, frames)
                stack.pop()

    def _around(self, item: Item) -> Sequence[Item]:
        holders = self.holders.get(item) or self.owners.get(item) or ()
        around = [holder for holder in holders if holder.entity is not None]
        if work := [holder for holder in around if holder.kind not in HARDWARE_KINDS]:
            return work
        users = [user for user in self.users.get(item, ()) if user.parent is not None]
        return users or around  # a segment in /dev/shm stands with its users, not in the mount

    def _place_around(self, item: Item, around: Sequence[Item], frames: _Frames) -> None:
        if not around:
            frames.place(item)
            item.depth = item.parent.depth + 1 if item.parent else 0
            return
        box = around[0]
        for other in around[1:]:
            box = common_ancestor(box, other)
        while box.kind == "Thread" and box.parent is not None and box.parent.kind == "Process":
            box = box.parent  # endpoints are read at the process
        if box is self.root:
            frames.place(item)
        else:
            box.adopt(item)
        item.depth = item.parent.depth + 1 if item.parent else 0

    def _flatten_depths(self, boxes: Iterable[Item]) -> None:
        limit = self.options.depth_max
        deep = [(box, walk(box)[1:]) for box in boxes if box.depth == limit and box.children]
        for box, below in deep:
            for inner in below:
                inner.children = []
            box.children = []
            for inner in below:
                box.adopt(inner)
                inner.depth = limit + 1
        if deep:
            count = sum(len(below) for _, below in deep)
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
        used = self.used
        for number, (sort, box, inner) in enumerate(self.wires):
            if sort.category != "deploy":
                continue
            if sort.kind in ("Belong", "RunOn"):
                box, inner = inner, box
            depth = box.depth
            item = inner.parent
            while item is not None and item.depth > depth:
                item = item.parent
            if item is box:
                used.add(number)


class _Frames:
    """Where things go that nothing contains: the host of their namespace, its hardware, or elsewhere."""

    def __init__(self, forest: Forest) -> None:
        self.forest = forest
        self.hosts: dict[str, Item] = {}
        self.hardware: dict[str, Item] = {}
        self.elsewhere: Item | None = None
        for item in forest.items.values():
            if item.kind == "Host" and item.entity is not None:
                self.hosts.setdefault(item.ns, item)
        self.bare = len(forest.graph.nodes) <= 1  # a lone entity needs no host around it

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
