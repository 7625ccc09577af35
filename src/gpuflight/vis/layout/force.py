"""Force-directed places: the forces of ForceAtlas2 by a multilevel particle-mesh method, in numpy.

Forces after Jacomy et al., "ForceAtlas2, a Continuous Graph Layout Algorithm for Handy Network Visualization Designed
for the Gephi Software", PLoS ONE 9(6), 2014: edges pull with their length, nodes push with 1 / distance times their
masses (degree + 1), gravity holds the parts together, speeds adapt by swinging and traction. Two things make it fast:

- 1 / distance is the field of a two-dimensional charge, so the push of all nodes on all nodes is one convolution: their
  masses go onto a grid, which is convolved by FFT (Hockney and Eastwood, "Computer Simulation Using Particles", 1988),
  and the field is read back. It costs the same whether nodes are spread out or in heaps.
- The graph is coarsened by joining neighbours until few are left; these are placed exactly, then each level starts from
  the places of the one above (Walshaw, "A Multilevel Algorithm for Force-Directed Graph Drawing", 2003). A heap weighs
  what its members weigh, so that the forces of the levels agree.

Nothing is random: where a choice is free, a fixed hash of the node's number makes it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from gpuflight.errors import MissingExtra

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

REPULSION = 2.0
GRAVITY = 1.0
COARSEST = 80
EXACT_MAX = 500  # up to here all pairs are cheaper than the grid
STEPS_COARSE = 120
STEPS_LEVEL = 40
STEPS_FINEST = 32
STEPS_WARM = 6


def numpy() -> Any:
    """The package, imported when a layout needs it. Raises MissingExtra."""
    try:
        import numpy
    except ImportError:
        raise MissingExtra("numpy", "vis", "the layout gephi") from None
    return numpy


def solve(count: int, ends: Ints, weights: Floats, start: Floats | None = None, loose: Floats | None = None) -> Floats:
    """Places of ``count`` nodes joined by ``ends`` (rows of two numbers) with ``weights``: an array of x and y.

    With ``start`` the nodes begin there and only settle: ``loose``, 0 to 1 for each node, is how far each may follow
    its forces. O((nodes + edges + grid) · log nodes).
    """
    np = numpy()
    if count == 0:
        return np.zeros((0, 2))  # type: ignore[no-any-return]
    ends, weights = _simple(count, ends, weights)
    masses = 1.0 + np.bincount(ends.ravel(), minlength=count).astype(float)
    if start is not None:
        return _settle(start.astype(float), ends, weights, masses, STEPS_WARM, loose)
    levels: list[tuple[Ints, Floats, Floats, Ints]] = []
    while len(masses) > COARSEST:
        heaps = _heaps(len(masses), ends, weights, masses)
        smaller = int(heaps.max()) + 1
        if smaller > 0.9 * len(masses):
            break
        levels.append((ends, weights, masses, heaps))
        masses = np.bincount(heaps, masses, smaller)
        ends, weights = _simple(smaller, heaps[ends], weights)
    turn = np.arange(len(masses)) * 2.399963229728653  # golden angle: a disc filled evenly
    radius = np.sqrt(np.arange(len(masses)) + 0.5) * np.sqrt(masses.sum() / len(masses)) * 2
    places = np.stack((radius * np.cos(turn), radius * np.sin(turn)), axis=1)
    places = _settle(places, ends, weights, masses, STEPS_COARSE)
    for at, (ends, weights, masses, heaps) in enumerate(reversed(levels)):
        spread = np.sqrt(masses / masses.mean())[:, None] * 0.3 * _spacing(places, np.bincount(heaps, masses))
        turn = _hashed(len(masses)) * (2 * np.pi)
        places = places[heaps] + spread * np.stack((np.cos(turn), np.sin(turn)), axis=1)
        steps = STEPS_FINEST if at == len(levels) - 1 else STEPS_LEVEL
        places = _settle(places, ends, weights, masses, steps)
    return places


def unit_of(places: Floats, ends: Ints, weights: Floats) -> float:
    """How many lengths of a picture are one of ``solve``, where ``places`` (about their middle) were at rest: then what
    pulls inwards, times its distance, equals what pushes outwards (the virial theorem)."""
    np = numpy()
    count = len(places)
    ends, weights = _simple(count, ends, weights)
    masses = 1.0 + np.bincount(ends.ravel(), minlength=count)
    pulled = float((weights * ((places[ends[:, 0]] - places[ends[:, 1]]) ** 2).sum(axis=1)).sum())
    held = float(GRAVITY * (masses * np.sqrt((places**2).sum(axis=1))).sum())
    pushed = REPULSION * (float(masses.sum()) ** 2 - float((masses**2).sum())) / 2
    # pulled / unit² + held / unit = pushed
    return float((held + np.sqrt(held**2 + 4 * pulled * pushed)) / (2 * pushed)) or 1.0 if pushed > 0 else 1.0


def _spacing(places: Floats, masses: Floats) -> float:
    """About how far neighbours are apart: the side of a square that one node has to itself."""
    np = numpy()
    spread = np.sqrt((masses[:, None] * (places - places.mean(0)) ** 2).sum() / masses.sum())
    return float(spread * 2 / np.sqrt(len(places))) or 1.0


def _hashed(count: int) -> Floats:
    """Numbers from 0 to 1 that look random and never change (Knuth's multiplicative hash)."""
    np = numpy()
    return ((np.arange(1, count + 1, dtype=np.uint64) * 2654435761) % 2**32) / 2.0**32  # type: ignore[no-any-return]


def _simple(count: int, ends: Ints, weights: Floats) -> tuple[Ints, Floats]:
    """Edges without loops, each pair once with the weights of all."""
    np = numpy()
    low, high = ends.min(axis=1), ends.max(axis=1)
    keys, where = np.unique(low * count + high, return_inverse=True)
    sums = np.bincount(where.ravel(), weights, len(keys))
    kept = keys // count != keys % count
    return np.stack((keys[kept] // count, keys[kept] % count), axis=1), sums[kept]


def _heaps(count: int, ends: Ints, weights: Floats, masses: Floats) -> Ints:
    """The heap of each node: pairs that want each other most, joined by lone nodes that want one of a pair."""
    np = numpy()
    source = np.concatenate((ends[:, 0], ends[:, 1]))
    target = np.concatenate((ends[:, 1], ends[:, 0]))
    # light nodes first, or hubs swallow everything; the hash breaks ties
    wish = np.concatenate((weights, weights)) / (masses[source] * masses[target])
    tie = _hashed(len(weights))
    wish *= 1 + 0.2 * np.concatenate((tie, tie))
    heaps = np.full(count, -1, dtype=np.int64)
    order = np.lexsort((wish, source))
    for _ in range(3):
        free = heaps < 0
        open_edges = order[(free[source] & free[target])[order]]
        if not len(open_edges):
            break
        best = np.full(count, -1, dtype=np.int64)
        best[source[open_edges]] = target[open_edges]  # the last one written is the one most wanted
        chooser = np.flatnonzero(best >= 0)
        mutual = chooser[best[best[chooser]] == chooser]
        heaps[mutual] = np.minimum(mutual, best[mutual])
    lone = heaps < 0
    usable = order[(lone[source] & ~lone[target])[order]]
    joined = np.full(count, -1, dtype=np.int64)
    joined[source[usable]] = heaps[target[usable]]
    heaps = np.where(lone & (joined >= 0), joined, heaps)
    heaps = np.where(heaps < 0, np.arange(count), heaps)
    _, numbered = np.unique(heaps, return_inverse=True)
    return numbered.ravel().astype(np.int64)  # type: ignore[no-any-return]


def _settle(
    places: Floats, ends: Ints, weights: Floats, masses: Floats, steps: int, loose: Floats | None = None
) -> Floats:
    """Follow the forces for some steps, at FA2's adaptive speeds."""
    np = numpy()
    count = len(masses)
    push = _push_exact if count <= EXACT_MAX else _push_mesh
    before = np.zeros_like(places)
    speed = 1.0
    pull = weights[:, None]
    source, target = ends[:, 0], ends[:, 1]
    both = np.concatenate((source, target))
    for step in range(steps):
        force = push(places, masses)
        drawn = (places[target] - places[source]) * pull
        force[:, 0] += np.bincount(both, np.concatenate((drawn[:, 0], -drawn[:, 0])), count)
        force[:, 1] += np.bincount(both, np.concatenate((drawn[:, 1], -drawn[:, 1])), count)
        distance = np.sqrt((places**2).sum(axis=1)) + 1e-9
        force -= places * (GRAVITY * masses / distance)[:, None]
        swing = masses * np.sqrt(((force - before) ** 2).sum(axis=1))
        traction = 0.5 * masses * np.sqrt(((force + before) ** 2).sum(axis=1))
        if step:
            total_swing = float(swing.sum()) or 1e-9
            speed = min(float(traction.sum()) / total_swing, 1.5 * speed)
        moved = force * (speed / (1.0 + np.sqrt(speed * swing)))[:, None]
        if loose is not None:
            moved *= loose[:, None]
        places = places + moved
        before = force
    return places


def _push_exact(places: Floats, masses: Floats) -> Floats:
    np = numpy()
    dx = places[:, 0][:, None] - places[:, 0][None, :]
    dy = places[:, 1][:, None] - places[:, 1][None, :]
    field = REPULSION * masses[None, :] / (dx * dx + dy * dy + 1e-6)
    return np.stack(((dx * field).sum(axis=1), (dy * field).sum(axis=1)), axis=1) * masses[:, None]  # type: ignore[no-any-return]


@lru_cache(maxsize=4)
def _kernel(side: int) -> tuple[Any, Any]:
    """The transformed field of one mass on a grid of ``side`` cells, padded to twice that so that nothing wraps."""
    np = numpy()
    line = np.fft.fftfreq(2 * side, 1 / (2 * side)).astype(np.float32)
    dx, dy = np.meshgrid(line, line)
    soft = dx * dx + dy * dy + 0.25  # one cell's own spread
    return np.fft.rfft2(dx / soft), np.fft.rfft2(dy / soft)


def _push_mesh(places: Floats, masses: Floats) -> Floats:
    """The push of all on all by a grid; each mass is spread over the four nearest points, and so is its field."""
    np = numpy()
    count = len(masses)
    side = 64
    while side < 512 and side * side < 5 * count:
        side *= 2
    low, high = places.min(axis=0), places.max(axis=0)
    cell = float((high - low).max()) / (side - 2) or 1.0
    at = (places - low) / cell + 0.5
    corner = at.astype(np.int64)
    rest = at - corner
    fx, fy = rest[:, 0], rest[:, 1]
    width = 2 * side
    index = corner[:, 1] * width + corner[:, 0]
    indices = np.concatenate((index, index + 1, index + width, index + width + 1))
    shares = np.concatenate(((1 - fx) * (1 - fy), fx * (1 - fy), (1 - fx) * fy, fx * fy))
    grid = np.bincount(indices, shares * np.tile(masses, 4), width * width).astype(np.float32).reshape(width, width)
    spectrum = np.fft.rfft2(grid)
    found = []
    for kernel in _kernel(side):
        field = np.fft.irfft2(spectrum * kernel, s=grid.shape).ravel()
        found.append((field[indices] * shares).reshape(4, count).sum(axis=0))
    return np.stack(found, axis=1) * (masses * (REPULSION / cell))[:, None]  # type: ignore[no-any-return]
