"""How many examples a property test makes that asks for a number of its own: a half of it in every run of the suite,
twenty times as many with HYPOTHESIS_PROFILE=deep."""

from __future__ import annotations

import os

_SHARE = 20.0 if os.environ.get("HYPOTHESIS_PROFILE") == "deep" else 0.5


def examples(count: int) -> int:
    """Of ``count`` that would be thorough."""
    return max(1, round(count * _SHARE))
