"""What lies in the folders that are sent, and what only seems to: whoever writes logs may not be trusted as we are."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable


class Inside:
    """Files and folders below some roots, links followed. The agent often may read more than those who write logs."""

    def __init__(self, roots: Iterable[str]) -> None:
        self._roots = tuple(os.path.abspath(root) for root in roots)

    def holds(self, path: str) -> bool:
        """Whether a path leads to something within the roots."""
        real = os.path.realpath(path)
        for root in map(os.path.realpath, self._roots):  # a root may be a link that is changed
            if real == root or real.startswith(root.rstrip("/") + "/"):
                return True
        return False

    def why_not(self, path: str) -> str:
        """Why a file is not to be read; empty if it may be. Raises OSError."""
        if not self.holds(path):
            return "leads out of the folder that is sent"
        if not stat.S_ISREG(os.stat(path).st_mode):
            return "is no regular file"
        return ""
