"""The consumer's part of ``/metrics``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpuflight.server.consume.figures import Figures

Add = Callable[[str, str, str, float | int | None, Mapping[str, str] | None], None]


def add_metrics(add: Add, figures: Figures) -> None:
    """One sample each by ``add(name, kind, help, value, labels)``. Labels: partitions of ours, reasons, outcomes."""
    add("consume_connected", "gauge", "1 while the topic can be read.", int(figures.connected), None)
    add("consume_paused", "gauge", "1 while reading waits for the store.", int(figures.paused), None)
    add("consume_store_ok", "gauge", "1 while the store answers.", int(not figures.store_error), None)
    add("consume_messages_total", "counter", "Messages read.", figures.messages, None)
    add("consume_messages_repeated_total", "counter", "Messages of complete rounds.", figures.repeated, None)
    add("consume_trials_total", "counter", "Messages of trial deliveries.", figures.trials, None)
    for reason, count in figures.skipped.items():
        add("consume_skipped_total", "counter", "Messages and rounds of no use.", count, {"reason": reason})
    add("consume_rounds_total", "counter", "Rounds put together.", figures.rounds, None)
    for outcome, count in figures.outcomes.items():
        add("consume_rounds_done_total", "counter", "Rounds by what became of them.", count, {"outcome": outcome})
    add("consume_rounds_given_up_total", "counter", "Rounds left to another consumer.", figures.given_up, None)
    add("consume_queued_rounds", "gauge", "Rounds that wait to be written.", figures.queued_rounds, None)
    add("consume_queued_bytes", "gauge", "Their size.", figures.queued_bytes, None)
    add("consume_unfinished_bytes", "gauge", "Parts that wait for others.", figures.unfinished_bytes, None)
    add("consume_waiting_namespaces", "gauge", "Hosts that wait for a graph.", figures.waiting_count, None)
    add("consume_retries_total", "counter", "Writes tried again.", figures.retries, None)
    add("consume_client_errors_total", "counter", "Errors of the topic.", figures.client_errors, None)
    add("consume_rebalances_total", "counter", "Times that partitions came or went.", figures.rebalances, None)
    add("consume_commits_total", "counter", "Commits.", figures.commits, None)
    add("consume_commit_failures_total", "counter", "Commits that failed.", figures.commit_failures, None)
    for line in figures.partitions:
        labels = {"partition": str(line.partition)}
        add("consume_lag_messages", "gauge", "Messages not done with.", line.lag, labels)
        add("consume_position", "gauge", "Offset of the next message.", line.position, labels)
        add("consume_committed", "gauge", "Offset that is committed.", line.committed, labels)
        add("consume_end", "gauge", "Offset after the last message.", line.high, labels)
