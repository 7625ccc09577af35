"""How many of NCCL's kernels go by names that no scheme of ours fits (faults N25)."""

from __future__ import annotations

from collections.abc import Iterable

from gpuflight.sources.cuda_probe.rows import NameRow
from gpuflight.sources.nccl_kernels import UNCLASSIFIED, classify

MOST_NAMES = 1000
"""Distinct names kept."""


class NcclNames:
    """Names of NCCL's kernels as the probe tells them, each once per process."""

    def __init__(self) -> None:
        self._names: dict[str, bool] = {}  # whether a scheme fits

    def hear(self, names: Iterable[NameRow]) -> None:
        """What is new since the last reading."""
        for row in names:
            if row.name in self._names or len(self._names) >= MOST_NAMES:
                continue
            kernel = classify(row.name)
            if kernel is not None:
                self._names[row.name] = kernel.operation != UNCLASSIFIED

    def limit(self) -> tuple[str, str, int]:
        """(reason, hint, count): how many fit no scheme; a count of 0 is no limit."""
        unknown = [name for name, fits in self._names.items() if not fits]
        share = len(unknown) / len(self._names) if self._names else 0.0
        example = f", such as {unknown[0][:80]}" if unknown else ""
        return (
            f"{share:.0%} of NCCL's kernels have names that no known version gave{example}: what they do is not told",
            "report this name, or update gpuflight",
            len(unknown),
        )
