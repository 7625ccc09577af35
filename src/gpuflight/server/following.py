"""What a client that keeps a copy of the graph lacks: the differences of several rounds as one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuflight.graph import codec
from gpuflight.graph.diff import Diff, merge_diffs

if TYPE_CHECKING:
    from gpuflight.core.history import History
    from gpuflight.rounds import Round

WORTH_PART = 0.5
"""A difference of more than this part of the graph's elements is not worth it: the graph itself costs less to read."""


def changes_since(history: History, base: int, done: Round) -> Diff | None:
    """What turns the graph of round ``base`` into that of ``done``; None if rounds in between are not kept, or if it is
    not worth it. O(what changed), since the rounds' differences are put together, not their graphs compared."""
    if base > done.number:
        return None
    kept = history.rounds(base, done.number)
    if not kept or kept[0].number != base:
        return None
    if kept[-1].number == done.number - 1:  # it is the latest one before it is in the history
        kept.append(done)
    if [one.number for one in kept] != list(range(base, done.number + 1)):
        return None
    change = kept[1].diff if len(kept) == 2 else merge_diffs(*(one.diff for one in kept[1:]))
    return change if sum(change.counts().values()) <= WORTH_PART * len(done.graph) else None


def encode_changes(done: Round, base: int, change: Diff) -> bytes:
    """A difference as JSON: without coverage and findings, which would be most of a small one."""
    return codec.encode_diff(
        change,
        done.number,
        base=base,
        nodes_count=len(done.graph.nodes),
        edges_count=len(done.graph.edges),
        time=codec.time_text(done.time_ns),
        duration_s=round(done.duration_s, 6),
        truncated_by=done.truncated_by,
    )
