"""Boxes that lie on each other are moved apart, each pair along the shorter way, until none does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpuflight.vis.layout.force import numpy

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

ROUNDS = 60
ROUNDS_LOOSE = 16
STRETCH_EVERY = 12  # rounds that did not suffice: everything a little further apart
STRETCH = 1.1  # at least; more where many lie on each other
BIG_MAX = 48


def make_room(places: Floats, halves: Floats, loose: Floats, gap: float = 6.0) -> Floats:
    """As ``apart``, where only the boxes with ``loose`` above 0 have moved: only those and their surroundings are
    looked at, and the others give way as little as may be."""
    np = numpy()
    movers = np.flatnonzero(loose > 0)
    if not len(movers):
        return places
    side = 4 * float(np.quantile(halves[:, 0], 0.9)) + gap
    cells = ((places - places.min(axis=0)) / side).astype(np.int64) + 1
    width = int(cells[:, 0].max()) + 2
    keys = cells[:, 1] * width + cells[:, 0]
    shifts = np.array([row * width + column for row in (-1, 0, 1) for column in (-1, 0, 1)])
    around = np.unique((keys[movers][:, None] + shifts).ravel())
    near = np.isin(keys, around)
    near[np.argsort(-halves[:, 0], kind="stable")[: min(BIG_MAX, len(places) // 8)]] = True  # reach far
    places = places.copy()
    places[near] = apart(places[near], halves[near], gap, loose[near])
    return places


def apart(places: Floats, halves: Floats, gap: float = 6.0, loose: Floats | None = None) -> Floats:
    """``places`` (middles) changed as little as may be so that boxes of ``halves`` (half width, half height) keep
    ``gap`` between them. With ``loose`` (0 to 1 each) those that are looser give way. Ends after a fixed number of
    rounds, so a few boxes of a great heap may still touch."""
    np = numpy()
    halves = halves + gap / 2
    places = places.copy()
    share = (halves[:, 0] * halves[:, 1]) ** -0.5  # small ones give way to large ones
    if loose is not None:
        share = share * (0.02 + loose)
    for at in range(1, (ROUNDS if loose is None else ROUNDS_LOOSE) + 1):
        one, two = touching(places, halves)
        if loose is not None:  # what lay on each other before may stay so
            moved = (loose[one] > 0) | (loose[two] > 0)
            one, two = one[moved], two[moved]
        if not len(one):
            break
        between = places[two] - places[one]
        need = halves[one] + halves[two] - np.abs(between)
        across = need[:, 0] * 0.7 <= need[:, 1]  # boxes are wide: rather aside than up
        sign = np.where(between < 0, -1.0, 1.0)
        total = share[one] + share[two]
        step = np.where(across, need[:, 0] * sign[:, 0], need[:, 1] * sign[:, 1]) * 0.6
        for axis, mine in ((0, across), (1, ~across)):
            first, second = one[mine], two[mine]
            part = step[mine]
            shift = np.bincount(second, part * share[second] / total[mine], len(places))
            shift -= np.bincount(first, part * share[first] / total[mine], len(places))
            places[:, axis] += shift
        if at % STRETCH_EVERY == 0 and loose is None and len(one) > len(places) // 100:
            places = places * (STRETCH + min(0.5, 0.15 * len(one) / len(places)))
    return places


def touching(places: Floats, halves: Floats) -> tuple[Any, Any]:
    """Pairs of boxes that overlap, as two arrays of numbers. Boxes go into the cells of a grid, each is compared with
    those of its own and four neighbouring cells; the few largest are compared with all."""
    np = numpy()
    count = len(places)
    none = np.zeros(0, dtype=np.int64)
    if count < 2:
        return none, none
    found_one, found_two = [none], [none]
    size = halves[:, 0]
    big = np.argsort(-size, kind="stable")[: min(BIG_MAX, count // 8)]
    rest = np.setdiff1d(np.arange(count), big)
    if len(big):
        near = (np.abs(places[big][:, None, :] - places[None, :, :]) < halves[big][:, None, :] + halves[None]).all(-1)
        first, second = np.nonzero(near)
        first = big[first]
        is_big = np.zeros(count, dtype=bool)
        is_big[big] = True
        kept = (first != second) & (~is_big[second] | (first < second))
        found_one.append(first[kept])
        found_two.append(second[kept])
    cell = 2 * halves[rest].max(axis=0)
    at = ((places[rest] - places[rest].min(axis=0)) / cell).astype(np.int64)
    width = int(at[:, 0].max()) + 3
    key = (at[:, 1] + 1) * width + at[:, 0] + 1
    order = np.argsort(key, kind="stable")
    keys, members = key[order], rest[order]
    where = np.arange(len(members))
    for shift in (0, 1, width - 1, width, width + 1):
        low = where + 1 if shift == 0 else np.searchsorted(keys, keys + shift, "left")
        high = np.searchsorted(keys, keys + shift, "right")
        many = np.maximum(high - low, 0)
        total = int(many.sum())
        if not total:
            continue
        first = np.repeat(where, many)
        second = np.arange(total) - np.repeat(np.cumsum(many) - many, many) + np.repeat(low, many)
        one, two = members[first], members[second]
        near = (np.abs(places[one] - places[two]) < halves[one] + halves[two]).all(axis=1)
        found_one.append(one[near])
        found_two.append(two[near])
    return np.concatenate(found_one), np.concatenate(found_two)
