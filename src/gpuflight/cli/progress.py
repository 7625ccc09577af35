"""The progress of a capture: a bar with live counts on a terminal, one line at the start anywhere else."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from gpuflight.cli.output import is_terminal, say

if TYPE_CHECKING:
    from gpuflight.rounds import Round


class Progress:
    """Shown on stderr while entered. ``seconds`` is the length of the capture, None if it is not known."""

    def __init__(self, title: str, seconds: float | None) -> None:
        self._title = title
        self._seconds = seconds
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if not is_terminal(sys.stderr) or os.environ.get("NO_COLOR"):
            say(f"{self._title} (Ctrl-C ends early)")
            return self
        from rich import progress

        from gpuflight.cli.output import console

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=20),
            progress.TextColumn("{task.fields[counts]}", markup=False),
            console=console(sys.stderr),
            transient=True,
            auto_refresh=False,
        )
        self._bar.start()
        self._task = self._bar.add_task(self._title, total=self._seconds, counts="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def tick(self, elapsed_s: float) -> None:
        """Time has passed."""
        if self._bar is not None:
            self._bar.update(self._task, completed=elapsed_s, refresh=True)

    def round(self, completed: Round) -> None:
        """A round is done."""
        if self._bar is not None:
            self._bar.update(self._task, counts=counts_text(completed), refresh=True)


def counts_text(completed: Round) -> str:
    """``round 3: 120 nodes, 340 edges``."""
    return f"round {completed.number}: {len(completed.graph.nodes)} nodes, {len(completed.graph.edges)} edges"
