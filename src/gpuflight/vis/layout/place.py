"""From places within boxes to places in the picture."""

from __future__ import annotations

from collections.abc import Sequence

from gpuflight.vis.layout.item import Item


def place(boxes: Sequence[Item], margin: float) -> None:
    """Make the places of what lines may end at absolute: of all in ``boxes`` (those that hold others, parents first,
    the root at ``margin``) but what stands in groups, which is many times more and read by no one but ``finish``."""
    root = boxes[0]
    root.x = root.y = margin
    root.scale = 1.0
    for box in boxes:
        if box.group is None and not box.folds:
            _place_children(box)


def _place_children(box: Item) -> None:
    left, top, by, inner = places_in(box)
    if by != 1.0:
        box.rows = [(low * by, high * by) for low, high in box.rows]
    for child in box.children:
        child.x = left + child.x * by
        child.y = top + child.y * by
        child.scale = inner
        child.w *= inner
        child.h *= inner
        child.header *= inner


def places_in(box: Item) -> tuple[float, float, float, float]:
    """What makes places in ``box`` absolute, whose own is: they are shifted by the first two, after they have been
    multiplied by the third; sizes are multiplied by the fourth, which is the scale of what stands in it."""
    return box.x, box.y, box.scale, box.scale * box.content_scale
