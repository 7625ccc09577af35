"""Where a series changes its level for good: PELT of the library ruptures.

Killick, Fearnhead, Eckley: "Optimal detection of changepoints with a linear computational cost", JASA 107 (2012).
Deterministic. The penalty is that of BIC for a level and a place, with the noise estimated from the differences of
neighbours, which a change of level does not touch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from gpuflight.errors import MissingExtra

_MAD = 1.4826
"""Median absolute deviation → standard deviation, for normal noise."""
_PENALTY = 4.0
"""Times the logarithm of the number of values and the variance; 3 is BIC's for independent noise, and series of steps
are a little correlated."""

_STILL = 0.02
"""Noise is taken to be at least this share of the level: what drifts slowly, or hardly moves, would break anywhere."""


def change_points(values: Sequence[float], least: int) -> list[int]:
    """Indexes at which a new level begins; levels are at least ``least`` values long. Raises MissingExtra."""
    try:
        import numpy as np
        import ruptures
    except ImportError as error:
        raise MissingExtra(error.name or "ruptures", "rules", "finding change points") from None
    count = len(values)
    if count < 2 * least:
        return []
    steps = [abs(later - earlier) for earlier, later in pairwise(values)]
    noise = _MAD * median(steps) / math.sqrt(2)
    floor = _STILL * abs(median(values))
    signal = np.asarray(values, dtype=float).reshape(-1, 1)
    found = ruptures.KernelCPD(kernel="linear", min_size=least).fit(signal)
    return [int(at) for at in found.predict(pen=_PENALTY * math.log(count) * max(noise, floor, 1e-12) ** 2)[:-1]]
