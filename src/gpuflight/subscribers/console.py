"""The subscriber that prints to the terminal."""

from __future__ import annotations

import sys
from typing import IO, Literal

from pydantic import Field

from gpuflight.errors import DeliveryError
from gpuflight.graph import codec
from gpuflight.rounds import Round
from gpuflight.subscribers.base import Outside, Subscriber, SubscriberSettings, delivery_error
from gpuflight.subscribers.encoding import encode_diff_line, encode_round


class ConsoleSettings(SubscriberSettings):
    """Settings of the console subscriber."""

    stream: Literal["stdout", "stderr"] = Field(default="stdout", description="where to print")
    content: Literal["summary", "text", "graph", "diff"] = Field(
        default="summary",
        description="one line, the described graph, the whole round as JSON, or what changed as JSON",
    )


class Console(Subscriber):
    """Prints each round to the terminal."""

    stability = "stable"
    settings_class = ConsoleSettings

    def outside(self) -> Outside:
        return Outside()

    def deliver(self, completed: Round) -> None:
        stream: IO[str] = getattr(sys, self.settings.stream)
        try:
            stream.write(self._text(completed) + "\n")
            stream.flush()
        except OSError as error:
            raise delivery_error(error, self.settings.stream) from error
        except ValueError as error:  # the stream is closed
            raise DeliveryError(f"{self.settings.stream}: {error}", retryable=False) from error

    def _text(self, completed: Round) -> str:
        content = self.settings.content
        if content == "summary":
            return summary(completed)
        if content == "text":
            return completed.graph.describe().rstrip("\n")
        return (encode_round if content == "graph" else encode_diff_line)(completed).decode()


def summary(completed: Round) -> str:
    """One line on a round: number, time, sizes, what changed, collectors that did not answer in full."""
    counts = completed.diff.counts()
    changes = "/".join(
        str(counts[f"nodes_{what}"] + counts[f"edges_{what}"]) for what in ("added", "removed", "changed")
    )
    poor = [f"{line.collector} {line.status}" for line in completed.coverage if line.status != "ok"]
    return (
        f"{codec.time_text(completed.time_ns)} round {completed.number}: {len(completed.graph.nodes)} nodes, "
        f"{len(completed.graph.edges)} edges, +/-/~ {changes}, {completed.duration_s * 1000:.0f} ms"
        + (f"; truncated by {completed.truncated_by}" if completed.truncated_by else "")
        + (f"; {', '.join(poor)}" if poor else "")
    )
