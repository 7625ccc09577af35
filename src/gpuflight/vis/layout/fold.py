"""Folding: many things that say little become one group box with their count, by rules that the group states.

A group holds its members, drawn small; nothing disappears, and the reader zooms in or searches to read them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from gpuflight.vis.layout.item import Item, by_level, natural_key, walk
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
    inner: set[Item] = set()  # stands in a group already
    for box in [item for item in walk(forest.root) if item.children]:
        if box.parent is not None and (box.parent.folds or box.parent in inner):
            inner.add(box)
        if box.children:  # unless they have gone into a group of kernel threads
            _fold_children(forest, box, crowded, surplus, small=box in inner)
    _tell(forest)


def _tell(forest: Forest) -> None:
    """Say in the notes how much is folded: no format shows the inside of groups as plainly as boxes."""
    groups = entities = 0
    inside: set[Item] = set()  # boxes in groups
    for box in [item for item in by_level(forest.root) if item.children]:
        groups += box.folds
        if box.folds or box in inside:
            inside.update([child for child in box.children if child.children])
            entities += sum([child.entity is not None for child in box.children])
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
        group = Item(self.forest.fresh_id(f"group:{key}:{self.box.id}"), "Group", label=label, ns=self.box.ns)
        group.rule = rule
        group.count = 0
        group.folds = True
        group.role = "group"
        group.children = list(members)
        for item in members:
            item.parent = group
        group.score = max([item.score for item in members])
        group.ground = True in [item.ground for item in members]
        group.lines = _sums(members)
        taken = set(members)
        self.rest = [item for item in self.rest if item not in taken]
        self.groups.append(group)

    def take(self, key: str, test: Callable[[Item], bool], least: int, label: str, rule: str) -> None:
        """Group all that pass ``test`` if there are at least ``least``; ``label`` is a noun."""
        members = [item for item in self.rest if test(item)]
        if len(members) >= least:
            self.group(key, members, plural(len(members), label), rule)

    def finish(self) -> None:
        self.box.children = [*self.rest, *self.groups]
        for group in self.groups:
            group.parent = self.box


def _fold_children(forest: Forest, box: Item, crowded: bool, surplus: set[Item], small: bool) -> None:
    folder = _Folder(forest, box)
    if small:  # groups of work within groups of work would be too small to find
        _fold_ports(folder)
        folder.finish()
        return
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
    listening = [item for item in sockets if _state(item) == "LISTEN"]
    if len(listening) > _PORTS["Socket"]:
        folder.group("listen", listening, plural(len(listening), "listening socket"), "listening, in one box")
        sockets = [item for item in sockets if _state(item) != "LISTEN"]
    sockets = _fold_pairs(folder, sockets)
    by_protocol: dict[str, list[Item]] = defaultdict(list)
    for item in sockets:
        by_protocol[str(getattr(item.entity, "protocol", "")).rstrip("6").upper()].append(item)
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
        far = far_ends.get(item.id)
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


def _far_ends(forest: Forest) -> dict[str, tuple[str, str] | None]:
    """For each socket, the box (id, label) that holds the other ends of its connections, None if it is not one; made
    once."""
    if forest.far_ends is None:
        connections = [key for key in forest.flows if key[2] == "ConnectTo"]
        ends = {source for source, _, _ in connections} | {target for _, target, _ in connections}
        holders = {end: _holder(forest.items[end]) for end in ends}
        found: dict[str, tuple[str, str] | None] = {}
        for source, target, _ in connections:
            for near, far in ((source, target), (target, source)):
                if found.setdefault(near, holders[far]) != holders[far]:
                    found[near] = None
        forest.far_ends = found
    return forest.far_ends


def _holder(far: Item) -> tuple[str, str]:
    box = far.parent
    if box is not None and box.kind in _WORKLOAD:
        return box.id, box.label
    address = str(getattr(far.entity, "address", far.id))
    host = address.rpartition(":")[0] or address
    return host, host


def _state(item: Item) -> str:
    return str(item.entity.attributes.get("state", "")) if item.entity is not None else ""


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
        if member.kind != "Process" or member.entity is None:
            continue
        value = finite(member.entity.metrics, "cpu_pct")
        rss = finite(member.entity.metrics, "rss_bytes")
        seen = seen or value is not None or rss is not None
        cpu += value or 0.0
        memory += rss or 0.0
    return [f"{human('cpu_pct', cpu)} CPU · {human_bytes(memory)}"] if seen else []
