"""Folding: many things that say little become one group box with their count, by rules that the group states.

A group holds its members, drawn small; nothing disappears, and the reader zooms in or searches to read them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import lru_cache

from gpuflight.vis.layout.item import Item, natural_key, set_depths, walk_boxes
from gpuflight.vis.layout.score import ALWAYS, CONNECTED
from gpuflight.vis.layout.tree import Forest
from gpuflight.vis.text import finite, human, human_bytes, plural
from gpuflight.vis.visual import KIND_NOUN

_WORKLOAD = frozenset(("Process", "Container", "Pod", "Unit"))
_PORTS = {
    # kind: how many may stand beside each other before they fold
    "Thread": 1, "Socket": 2, "UnixSocket": 1, "Pipe": 1, "MessageQueue": 3, "Semaphore": 2, "SharedMemory": 2,
    "Stream": 4, "Kernel": 8, "RdmaQueuePair": 2, "RdmaMemoryRegion": 2, "RdmaProtectionDomain": 2,
    "RdmaQueuePairEndpoint": 4, "NumaSet": 1, "PciDevice": 1, "Mount": 2, "Device": 3,
}  # fmt: skip
IDLE_MIN = 3
SAME_NAME_MIN = 5
SAME_TREES_MIN = 12
PAIR_MIN = 3
PAIRS_MAX = 4


def fold(forest: Forest) -> None:
    """Put group boxes into the tree of ``forest``."""
    options = forest.options
    processes = [item for item in forest.items.values() if item.kind == "Process" and not item.missing]
    crowded = len(processes) > options.uncrowded_processes_max
    surplus: set[Item] = set()
    if len(processes) > options.shown_processes_max:
        processes.sort(key=lambda item: (-item.score, item.depth, len(item.id), item.id))
        surplus.update(item for item in processes[options.shown_processes_max :] if item.score < ALWAYS)
    for box in walk_boxes(forest.root):
        if (parent := box.parent) is not None:
            box.group = parent if parent.folds else parent.group
        if len(box.children) > 1 and box.group is not None:
            # groups of work within groups of work would be too small to find
            folder = _Folder(forest, box)
            _fold_ports(folder)
            folder.finish()
        elif box.children and box.group is None:  # unless they have gone into a group of kernel threads
            _fold_children(forest, box, crowded, surplus)
    forest.boxes = set_depths(forest.root)
    _tell(forest)


def _tell(forest: Forest) -> None:
    """Say in the notes how much is folded: no format shows the inside of groups as plainly as boxes."""
    boxes = forest.boxes
    groups = sum([box.folds for box in boxes])
    shown = [box.children for box in boxes if box.group is None and not box.folds]
    entities = len(forest.graph.nodes) - sum([item.entity is not None for items in shown for item in items])
    if groups:
        forest.notes.append(
            f"{plural(entities, 'entity')} folded into {plural(groups, 'group')}; each says how many, and why"
        )


class _Folder:
    """The children of one box on their way into groups."""

    def __init__(self, forest: Forest, box: Item) -> None:
        self.forest = forest
        self.box = box
        self.rest = box.children
        self.groups: list[Item] = []

    def group(self, key: str, members: list[Item], label: str, rule: str) -> None:
        """Move ``members`` into a group box of their own."""
        box = self.box
        group = Item(self.forest.fresh_id(f"group:{key}:{box.id}"), "Group", None, label, box.ns)
        group.rule = rule
        group.count = 0
        group.folds = True
        group.role = "group"
        group.children = list(members)
        group.score = members[0].score
        for item in members:
            item.parent = group
            if item.score > group.score:
                group.score = item.score
            if item.ground:
                group.ground = True
        if members[0].kind == "Process":  # all are of one kind
            group.lines = _sums(members)
        if len(members) == len(self.rest):
            self.rest = []
        else:
            taken = set(members)
            self.rest = [item for item in self.rest if item not in taken]
        self.groups.append(group)

    def take(self, key: str, test: Callable[[Item], bool], least: int, label: str, rule: str) -> None:
        """Group all that pass ``test`` if there are at least ``least``; ``label`` is a noun."""
        members = [item for item in self.rest if test(item)]
        if len(members) >= least:
            self.group(key, members, plural(len(members), label), rule)

    def finish(self) -> None:
        """The box holds what is left and the groups."""
        if self.groups:
            self.box.children = [*self.rest, *self.groups]
            for group in self.groups:
                group.parent = self.box


def _fold_children(forest: Forest, box: Item, crowded: bool, surplus: set[Item]) -> None:
    folder = _Folder(forest, box)
    _fold_kernel_threads(folder)
    _fold_ports(folder)
    if not folder.rest:
        folder.finish()
        return
    if box.kind == "Elsewhere" and not box.children[0].missing:
        _fold_peers(folder)
    _fold_hardware(folder)
    _fold_workers(folder, crowded)
    _fold_idle(folder, crowded)
    if surplus:
        rule = f"beyond the {forest.options.shown_processes_max} processes of the picture with most connections"
        folder.take("surplus", lambda item: item in surplus, 2, "process", rule)
    _fold_crowd(folder, forest.options.siblings_max)
    folder.finish()


def _fold_kernel_threads(folder: _Folder) -> None:
    for item in folder.rest:
        if item.kind == "Process" and getattr(item.entity, "pid", 0) == 2 and item.label == "kthreadd":
            members = item.children
            item.children = []
            count = len(members) + 1
            folder.group("kernel", [item], plural(count, "kernel thread"), "kthreadd and its children")
            for member in members:
                folder.groups[-1].adopt(member)
            return


def _fold_ports(folder: _Folder) -> None:
    by_kind: dict[str, list[Item]] = defaultdict(list)
    for item in folder.rest:
        if item.kind in _PORTS and not item.children and not (item.kind == "PciDevice" and item.ground):
            by_kind[item.kind].append(item)
    for kind, members in by_kind.items():
        if kind == "Socket" and folder.box.kind != "Elsewhere":
            _fold_sockets(folder, members)
        elif len(members) > _PORTS[kind] and not (folder.box.kind == "Elsewhere" and kind == "Socket"):
            if kind == "SharedMemory":
                total = sum(map(_size, members))
                label = f"{len(members)} shared memory" + (f" · {human_bytes(total)}" if total else "")
                folder.group(kind, members, label, "of one kind in one box")
            else:
                folder.group(kind, members, plural(len(members), KIND_NOUN[kind]), "of one kind in one box")


def _size(item: Item) -> float:
    return (finite(item.entity.metrics, "size_bytes") if item.entity else None) or 0.0


def _fold_sockets(folder: _Folder, sockets: list[Item]) -> None:
    if len(sockets) <= _PORTS["Socket"]:
        return
    listening = [item for item in sockets if _listens(item)]
    if len(listening) > _PORTS["Socket"]:
        folder.group("listen", listening, plural(len(listening), "listening socket"), "listening, in one box")
        sockets = [item for item in sockets if not _listens(item)]
    sockets = _fold_pairs(folder, sockets)
    by_protocol: dict[str, list[Item]] = defaultdict(list)
    for item in sockets:
        by_protocol[_protocol(getattr(item.entity, "protocol", ""))].append(item)
    for protocol, members in sorted(by_protocol.items()):
        if len(members) > _PORTS["Socket"]:
            folder.group(
                f"Socket:{protocol}",
                members,
                plural(len(members), f"{protocol} socket".strip()),
                "of one protocol in one box",
            )


def _fold_pairs(folder: _Folder, sockets: list[Item]) -> list[Item]:
    """Sockets whose far ends all stand in one box, or at one address; the rest. Where the pairs are many, none is told:
    the lines do."""
    if len(sockets) < PAIR_MIN:
        return sockets
    by_peer: dict[tuple[str, str], list[Item]] = defaultdict(list)
    far_ends = _far_ends(folder.forest)
    for item in sockets:
        far = far_ends.get(item)
        if far is not None:
            by_peer[far].append(item)
    pairs = {peer: members for peer, members in by_peer.items() if len(members) >= PAIR_MIN}
    if not pairs or len(pairs) > PAIRS_MAX:
        return sockets
    taken: set[Item] = set()
    for (peer, label), members in pairs.items():
        folder.group(f"pair:{peer}", members, f"{plural(len(members), 'socket')} ↔ {label}", "connections of one pair")
        taken.update(members)
    return [item for item in sockets if item not in taken]


def _far_ends(forest: Forest) -> dict[Item, tuple[str, str] | None]:
    """For each socket, the box (id, label) that holds the other ends of its connections, None if it is not one; made
    once."""
    if forest.far_ends is None:
        found: dict[Item, tuple[str, str] | None] = {}
        homes: dict[Item, tuple[str, str]] = {}
        same: dict[tuple[str, str], tuple[str, str]] = {}
        for sort, source, target in forest.wires:
            if sort.kind != "ConnectTo":
                continue
            for end in (source, target):
                if end not in homes:
                    home = _home(end)
                    homes[end] = same.setdefault(home, home)
            near, far = homes[source], homes[target]
            if found.setdefault(source, far) is not far:
                found[source] = None
            if found.setdefault(target, near) is not near:
                found[target] = None
        forest.far_ends = found
    return forest.far_ends


def _home(end: Item) -> tuple[str, str]:
    """Id and label of the box around the end of a connection; of one that none holds, its host."""
    box = end.parent
    if box is not None and box.kind in _WORKLOAD:
        return box.id, box.label
    address = str(getattr(end.entity, "address", end.id))
    host = address.rpartition(":")[0] or address
    return host, host


def _listens(socket: Item) -> bool:
    return socket.entity is not None and socket.entity.attributes.get("state") == "LISTEN"


@lru_cache(maxsize=64)
def _protocol(name: object) -> str:
    return str(name).rstrip("6").upper()


def _fold_peers(folder: _Folder) -> None:
    """Far ends of connections: one box per address, the ports inside."""
    by_address: dict[str, list[Item]] = defaultdict(list)
    for item in folder.rest:
        address = str(getattr(item.entity, "address", ""))
        by_address[address.rpartition(":")[0] or address].append(item)
    for address, members in by_address.items():
        if len(members) > 1:
            label = f"{address} · {plural(len(members), 'socket')}"
            folder.group(f"peer:{address}", members, label, "far ends at one address")
    singles = len(folder.rest)
    if singles > 8:
        folder.group("peers", folder.rest, plural(singles, "other peer"), "one connection each")


def _fold_hardware(folder: _Folder) -> None:
    if folder.box.kind not in ("Hardware", "Numa", "PciDevice"):
        return
    folder.take(
        "virtual-nics",
        lambda item: item.kind == "Nic" and _bare(item),
        2,
        "virtual network interface",
        "no device under it",
    )
    folder.take(
        "virtual-disks", lambda item: item.kind == "Disk" and _bare(item), 2, "virtual disk", "no device, no rates"
    )
    folder.take("switches", lambda item: item.kind == "NvSwitch", 2, "NVSwitch", "the GPUs' switches, side by side")


def _bare(item: Item) -> bool:
    """No PCI function, no activity: a loopback, a bridge, a loop device."""
    entity = item.entity
    if entity is None or item.children or entity.attributes.get("pci_address"):
        return False
    if item.kind == "Disk":
        return entity.attributes.get("model") in (None, "") and item.label.startswith(
            ("loop", "ram", "zram", "nbd", "dm-")
        )
    return finite(entity.metrics, "speed_bits_per_s") is None or not entity.attributes.get("driver")


def _fold_workers(folder: _Folder, crowded: bool) -> None:
    """Processes of one name under one parent that use no GPU and are known to no finding; whole trees of them only in a
    crowd, and only where there are many."""
    by_name: dict[tuple[str, bool], list[Item]] = defaultdict(list)
    for item in folder.rest:
        if item.kind == "Process" and item.score < ALWAYS:
            by_name[item.label, _has_work(item)].append(item)
    for (name, trees), members in by_name.items():
        if len(members) >= SAME_NAME_MIN and (not trees or (crowded and len(members) >= SAME_TREES_MIN)):
            folder.group(
                f"same:{name}:{trees}",
                members,
                f"{len(members)} × {name}",
                "same name, same parent, no GPU of their own",
            )


def _has_work(item: Item) -> bool:
    return any(child.kind in _WORKLOAD or child.role == "group" for child in item.children)


def _fold_idle(folder: _Folder, crowded: bool) -> None:
    limit = CONNECTED if crowded else 1.0
    rule = "less than 1 % CPU, no GPU, " + (
        "nothing but pipes and unix sockets to others" if crowded else "no connection to another process"
    )
    folder.take("idle", lambda item: item.kind == "Process" and item.score < limit, IDLE_MIN, "idle process", rule)
    for kind in ("Unit", "Container", "Pod"):
        noun = f"quiet {KIND_NOUN[kind]}"
        folder.take(f"quiet:{kind}", lambda item, k=kind: item.kind == k and item.score < limit, IDLE_MIN, noun, rule)  # type: ignore[misc]


def _fold_crowd(folder: _Folder, most: int) -> None:
    by_kind: dict[str, list[Item]] = defaultdict(list)
    for item in folder.rest:
        by_kind[item.kind].append(item)
    for kind, members in by_kind.items():
        if len(members) > most:
            members.sort(key=lambda item: (-item.score, natural_key(item.label), item.id))
            surplus = members[most:]
            noun = KIND_NOUN.get(kind, "entity")
            folder.group(
                f"more:{kind}",
                surplus,
                f"{plural(len(surplus), noun)} more",
                f"beyond the {most} with most connections",
            )


def _sums(members: Iterable[Item]) -> list[str]:
    """What the processes of a group use together."""
    cpu = memory = 0.0
    seen = False
    for member in members:
        if member.entity is None:
            continue
        value = finite(member.entity.metrics, "cpu_pct")
        rss = finite(member.entity.metrics, "rss_bytes")
        seen = seen or value is not None or rss is not None
        cpu += value or 0.0
        memory += rss or 0.0
    return [f"{human('cpu_pct', cpu)} CPU · {human_bytes(memory)}"] if seen else []
