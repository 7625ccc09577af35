"""What was taken in, for metrics and people."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

if TYPE_CHECKING:
    from gpuflight.events.store import Written
    from gpuflight.server.events.blocks import Decoded


class Figures(Struct, kw_only=True):
    """Counters since the start. Only added to, from any thread; a count that two threads add to at once may miss one.

    ``refused``: requests that were not taken, by reason. ``losses``: what lines and rows met, by reason of the ledger.
    """

    requests: int = 0
    body_bytes: int = 0
    raw_bytes: int = 0
    blocks: int = 0
    repeated: int = 0
    lines: int = 0
    rejected_lines: int = 0
    rows: Counter[str] = field(default_factory=Counter)
    losses: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    removed_sessions: int = 0
    waiting_requests: int = 0
    waiting_bytes: int = 0

    def count_stored(self, decoded: Decoded, written: Written) -> None:
        """A block was stored."""
        self.blocks += 1
        self.count_lines(decoded)
        self.count_rows(written)

    def count_lines(self, decoded: Decoded) -> None:
        """Lines that were decoded and stored."""
        self.lines += decoded.lines
        self.rejected_lines += decoded.rejected
        for entry in decoded.ledger:
            self.losses[entry.reason] += entry.count

    def count_rows(self, written: Written) -> None:
        """Rows that were written."""
        self.rows.update(written.rows_by_table)
        for entry in written.ledger:
            self.losses[entry.reason] += entry.count


def add_metrics(add: Any, figures: Figures, state: dict[str, Any]) -> None:
    """Samples of ``/metrics`` by ``add(name, kind, help, value, labels)``. ``state``: what the service says of now."""
    add("events_enabled", "gauge", "1 if GPU sessions are taken in.", int(state["enabled"]), None)
    if not state["enabled"]:
        return
    add("events_store_open", "gauge", "1 while the event store can be used.", int(state["open"]), None)
    add("events_store_bytes", "gauge", "Records of the event store on disk.", state["store_bytes"], None)
    add("events_sessions", "gauge", "GPU sessions that are stored.", state["sessions"], None)
    add("events_sessions_under_way", "gauge", "Sessions whose decoding state is kept.", state["under_way"], None)
    add("events_requests_total", "counter", "Requests with events.", figures.requests, None)
    add("events_body_bytes_total", "counter", "Bodies of those, as sent.", figures.body_bytes, None)
    add("events_raw_bytes_total", "counter", "Lines decoded, without compression.", figures.raw_bytes, None)
    add("events_blocks_total", "counter", "Windows and blocks stored.", figures.blocks, None)
    add("events_repeated_total", "counter", "Windows and blocks that were stored already.", figures.repeated, None)
    add("events_lines_total", "counter", "Lines stored.", figures.lines, None)
    add("events_rejected_lines_total", "counter", "Lines that were of no use.", figures.rejected_lines, None)
    add("events_writes_total", "counter", "Writes of the store, each of all that waited.", state["writes"], None)
    add("events_failed_writes_total", "counter", "Writes that the store refused.", state["failed_writes"], None)
    add("events_removed_sessions_total", "counter", "Sessions deleted.", figures.removed_sessions, None)
    add("events_waiting_requests", "gauge", "Requests that are being taken in.", figures.waiting_requests, None)
    add("events_waiting_bytes", "gauge", "Bodies that are being taken in.", figures.waiting_bytes, None)
    if state["summaries"] is not None:
        written, failed = state["summaries"]
        add("events_summaries_total", "counter", "Summaries of sessions written into MongoDB.", written, None)
        add("events_failed_summaries_total", "counter", "Times that MongoDB did not take them.", failed, None)
    for topic in state["topics"]:
        labels = {"topic": topic.topic}
        add("events_topic_connected", "gauge", "1 while the topic can be read.", int(topic.connected), labels)
        add("events_topic_messages_total", "counter", "Messages read.", topic.messages, labels)
        add("events_topic_repeated_total", "counter", "Messages that were stored already.", topic.repeated, labels)
        add("events_topic_unreadable_total", "counter", "Messages that are no line.", topic.unreadable, labels)
    for table, count in sorted(figures.rows.items()):
        add("events_rows_total", "counter", "Rows stored.", count, {"table": table})
    for reason, count in sorted(figures.losses.items()):
        add("events_losses_total", "counter", "Lines and rows with a flaw.", count, {"reason": reason})
    for reason, count in sorted(figures.refused.items()):
        add("events_refused_total", "counter", "Requests that were not taken.", count, {"reason": reason})
