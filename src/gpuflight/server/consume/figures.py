"""What a consumer has done and how far behind it is, for coverage, metrics and people."""

from __future__ import annotations

from msgspec import Struct, field

from gpuflight.server.consume.merge import Outcome

OUTCOMES: tuple[Outcome, ...] = ("written", "duplicate", "older", "waiting", "unreadable", "refused")


class PartitionFigures(Struct, kw_only=True):
    """One partition that is ours. Offsets are None while unknown. ``lag`` counts the messages that are in the topic and
    not yet done with: those of unfinished rounds too."""

    partition: int
    position: int | None = None
    committed: int | None = None
    high: int | None = None
    lag: int | None = None


class Figures(Struct, kw_only=True):
    """Counters since the start, and the state of now.

    Every round of ``rounds`` has one outcome, waits, is skipped for its namespace, or was given up since its partition
    went to another consumer, which writes it.
    """

    connected: bool = False
    paused: bool = False
    messages: int = 0
    rounds: int = 0
    outcomes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    given_up: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    """Messages, and rounds put together of them, that are of no use, by reason."""
    repeated: int = 0
    """Messages of rounds that were complete already."""
    trials: int = 0
    rebalances: int = 0
    commits: int = 0
    commit_failures: int = 0
    client_errors: int = 0
    client_error: str = ""
    """The last one of the connection to the topic; empty while it works."""
    retries: int = 0
    store_error: str = ""
    """The last one of the store; empty while it answers."""
    queued_rounds: int = 0
    queued_bytes: int = 0
    unfinished_bytes: int = 0
    waiting_namespaces: list[str] = field(default_factory=list)
    """Those that wait for a whole graph, at most ``WAITING_SHOWN``."""
    waiting_count: int = 0
    partitions: list[PartitionFigures] = field(default_factory=list)

    @property
    def lag(self) -> int | None:
        """Of all partitions together; None while one of them is unknown."""
        known = [line.lag for line in self.partitions if line.lag is not None]
        return sum(known) if len(known) == len(self.partitions) else None


WAITING_SHOWN = 5
