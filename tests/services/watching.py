"""Which collectors a server of a test runs: rounds must not cost more than what the test is about."""

from __future__ import annotations

from typing import Any

from gpuflight.collectors.base import Collector
from gpuflight.registry import plugins


def watching(*names: str) -> dict[str, dict[str, Any]]:
    """The setting ``collectors`` with which only these run."""
    return {name: {"enabled": name in names} for name in plugins(Collector)}
