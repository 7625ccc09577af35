"""How the consumer does, as a line of each round's coverage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpuflight.collectors.base import Collector
from gpuflight.errors import SourceUnavailable
from gpuflight.server.consume.figures import Figures

if TYPE_CHECKING:
    from gpuflight.server.consume.loop import Loop
    from gpuflight.sources.world import World

PARTITIONS_SHOWN = 64
SILENT_S = 30.0
_SKIPPED = {
    "foreign": "messages of another format",
    "malformed": "messages that cannot be read",
    "oversized": "messages that are too large",
    "corrupt": "rounds whose bytes are damaged or too many",
    "namespace": "rounds whose key is no name of a host",
    "unfinished": "rounds of which a part never came",
}


class ConsumeCoverage(Collector):
    """Tells what the consumer reads, writes and passes over; adds nothing to the picture"""

    abstract = True  # made by the server around its consumer, not by the settings
    name = "consume"

    def __init__(self, loop: Loop, settings: Any = None) -> None:
        super().__init__(settings)
        self._loop = loop

    def observe(self, world: World) -> None:
        """Raises SourceUnavailable while the topic cannot be read."""
        figures, silent_s = self._loop.figures(), self._loop.silent_s
        self._tell(figures)
        if silent_s > SILENT_S:
            raise SourceUnavailable(f"the Kafka client has not come back for {silent_s:.0f} s")
        if not figures.connected:
            raise SourceUnavailable(
                figures.client_error or "not connected to Kafka yet", "see `consume` in the settings, and the broker"
            )

    def _tell(self, figures: Figures) -> None:
        for name, count in figures.skipped.items():
            if count:
                self.lose(_SKIPPED.get(name, name), count)
        for outcome, what in (
            ("unreadable", "rounds that cannot be read"),
            ("refused", "rounds that the database refuses"),
            ("waiting", "differences whose base is not known"),
        ):
            if figures.outcomes[outcome]:
                self.lose(what, figures.outcomes[outcome])
        for what, count in (
            ("messages read", figures.messages),
            ("rounds written", figures.outcomes["written"]),
            ("rounds that were there already", figures.outcomes["duplicate"] + figures.outcomes["older"]),
            ("messages that came again", figures.repeated),
        ):
            if count:
                self.note(what, count=count)
        for line in figures.partitions[:PARTITIONS_SHOWN]:
            if line.lag:
                self.note(f"partition {line.partition}: messages that are not done with", count=line.lag)
        if figures.store_error:
            self.note(f"the database does not take rounds: {figures.store_error}", "they wait in Kafka meanwhile")
        if figures.paused:
            self.note("reading waits for the database", "it is written to as fast as it takes; add servers or shards")
        if figures.waiting_count:
            some = ", ".join(figures.waiting_namespaces)
            more = ", …" if figures.waiting_count > len(figures.waiting_namespaces) else ""
            self.note(
                f"waiting for a whole graph of {some}{more}", "`full_every_rounds` of the agent", figures.waiting_count
            )
        if figures.connected and not figures.partitions:
            self.note("no partition of the topic is ours", "there are more servers than partitions, or no topic yet")
