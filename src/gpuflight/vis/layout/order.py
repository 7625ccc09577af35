"""Order of siblings: each stands near what it is wired to, so that lines cross little (barycentre sweeps)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from gpuflight.vis.layout.bundle import Bundle
from gpuflight.vis.layout.item import Item, by_level, natural_key, nearest

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


def order(root: Item, bundles: Iterable[Bundle]) -> None:
    """Sort the children of every box: first by kind and name, then by where their other ends are."""
    outer = [item for item in by_level(root) if item.children]
    small: set[Item] = set()  # stands in a group: no line ends there, and it is too small to be looked for by name
    for box in outer:
        if box.folds or box in small:
            small.update([child for child in box.children if child.children])
    boxes = [box for box in outer if len(box.children) > 1]
    for box in boxes:
        if box in small:
            box.children.sort(key=lambda item: (item.folds, item.kind, len(item.label), item.label, item.id))
            continue
        box.children.sort(key=lambda item: (item.folds, _kind_rank(item), _name_key(item), len(item.id), item.id))
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
        and box not in small
        and nearest(box, _GROUND) is None
        and any(child in pulls for child in box.children)
    ]
    for _ in range(SWEEPS):
        _number(root)
        for box in movable:
            weights: dict[int, float] = {}
            for child in box.children:
                ends = pulls.get(child)
                weights[id(child)] = sum(end.order for end in ends) / len(ends) if ends else child.order
            box.children.sort(key=lambda item: (item.kind == "Hardware", item.folds, weights[id(item)]))


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
