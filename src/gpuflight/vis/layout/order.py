"""Order of siblings: each stands near what it is wired to, so that lines cross little (barycentre sweeps)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from gpuflight.vis.layout.bundle import Bundle
from gpuflight.vis.layout.item import Item, natural_key, nearest

SWEEPS = 4
_GROUND = frozenset(("Hardware",))
_KIND_ORDER = {
    kind: rank
    for rank, kind in enumerate(
        (
            "Elsewhere", "Host", "Pod", "Container", "Unit", "CpuPackage", "Numa", "GPU", "NPU", "Process", "Nic",
            "RdmaDevice", "Disk", "NvSwitch", "PciDevice",
        )
    )
}  # fmt: skip


def _kind_rank(item: Item) -> int:
    kind = "GPU" if item.kind == "PciDevice" and item.children else item.kind  # a switch stands for its GPUs
    return _KIND_ORDER.get(kind, len(_KIND_ORDER))


def _name_key(item: Item) -> tuple[tuple[int, int, str], ...]:
    """By name; a PCIe switch by the first GPU under it."""
    if item.kind == "PciDevice" and item.children:
        keys = [natural_key(child.label) for child in item.children if child.kind in ("GPU", "NPU")]
        if keys:
            return min(keys)
    return natural_key(item.label)


def _by_name(item: Item) -> tuple[bool, int, tuple[tuple[int, int, str], ...], int, str]:
    return item.folds, _kind_rank(item), _name_key(item), len(item.id), item.id


def order(outer: Sequence[Item], bundles: Iterable[Bundle]) -> None:
    """Sort the children of all boxes (parents first, the root among them): first by kind and name, then by where their
    other ends are. Depths and groups must be set."""
    boxes = [box for box in outer if len(box.children) > 1]
    for box in boxes:
        if box.group is None:
            box.children.sort(key=_by_name)
        else:  # no line ends there, and it is too small to be looked for by name
            children = box.children
            keys = [
                (item.folds, item.kind, len(item.label), item.label, item.id, at) for at, item in enumerate(children)
            ]
            keys.sort()
            box.children = [children[at] for *_, at in keys]
    pulls: dict[Item, list[Item]] = defaultdict(list)
    for bundle in bundles:
        box, _, _ = bundle.inner
        for end, other in ((bundle.first, bundle.second), (bundle.second, bundle.first)):
            item: Item | None = end
            while item is not None and item is not box:
                pulls[item].append(other)
                item = item.parent
    for item, others in pulls.items():
        if item.ground:  # stands above the hardware it uses, whoever else it talks to
            pulls[item] = [other for other in others if nearest(other, _GROUND) is not None] or others
    movable = [
        box
        for box in boxes
        if not box.folds
        and box.group is None
        and nearest(box, _GROUND) is None
        and any(child in pulls for child in box.children)
    ]
    for _ in range(SWEEPS):
        _number(outer[0])
        for box in movable:
            children = box.children
            places = []
            for at, child in enumerate(children):
                ends = pulls.get(child)
                weight = sum([end.order for end in ends]) / len(ends) if ends else child.order
                places.append((child.kind == "Hardware", child.folds, weight, at))
            places.sort()
            box.children = [children[at] for *_, at in places]


def _number(root: Item) -> None:
    """Number all at which lines end, parents first: what stands in a group is not among them."""
    position = 0.0
    stack = [root]
    while stack:
        item = stack.pop()
        item.order = position
        position += 1.0
        if not item.folds:
            stack.extend(item.children[::-1])
