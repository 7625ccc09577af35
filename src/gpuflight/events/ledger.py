"""What happened to lines and rows that did not simply become records: how many, why, where first.

Nothing is dropped in silence: every line or row that a reader meets is either in a batch or in its ledger.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import msgspec

Effect = Literal["lost", "kept", "repeat"]

REASONS: dict[str, tuple[Effect, str]] = {
    # lost: something that was written cannot be told any more
    "not_json": ("lost", "line is no JSON"),
    "not_object": ("lost", "line is JSON but no object"),
    "no_type": ("lost", "object without a type"),
    "no_session": ("lost", "event without a session id, and none to be had from the folder"),
    "cut_line": ("lost", "last line of the file is cut"),
    "line_too_long": ("lost", "line is longer than the limit; skipped up to its end"),
    "bad_batch": ("lost", "batch without usable columns or rows"),
    "bad_row": ("lost", "row of a batch that is no array"),
    "corrupt_file": ("lost", "compressed file is damaged; what comes before the damage was read"),
    "truncated_file": ("lost", "compressed file ends early; what there is was read"),
    "empty_file": ("lost", "compressed file without content"),
    "utf16_file": ("lost", "file is UTF-16; logs are UTF-8"),
    "unreadable_file": ("lost", "file cannot be opened or read"),
    "vanished_file": ("lost", "file was gone before it could be opened"),
    "missing_window": ("lost", "hole in the window numbers, with neither acknowledgement nor marker"),
    "acked_window": ("lost", "window was shipped and deleted by the agent; it is not here"),
    "marked_loss": ("lost", "loss that the writer or agent has noted itself"),
    "resynchronised": ("lost", "rest of a line in whose middle reading was to begin"),
    "not_imported": ("lost", "event of another profiler that has no table here"),
    "missing_name": ("lost", "id without an entry in the session's dictionary"),
    # kept: the record is there, with a part unknown or raw
    "bad_cell": ("kept", "value that is no number or text of its column's kind; unknown"),
    "not_finite": ("kept", "NaN, inf or -nan(ind) in place of a number; unknown"),
    "short_row": ("kept", "row with fewer values than columns; the rest is unknown"),
    "long_row": ("kept", "row with more values than columns; those are kept raw"),
    "invalid_utf8": ("kept", "text that is not UTF-8; replaced by U+FFFD"),
    "byte_order_mark": ("kept", "byte order mark before a line"),
    "unknown_type": ("kept", "type of event that this version does not know; kept raw"),
    "unknown_column": ("kept", "column or field that this version does not know; kept raw"),
    "implausible_time": ("kept", "time since boot or zero where the session has wall-clock time; not on the timeline"),
    "steady_clock": ("kept", "time of the steady clock by design; not on the timeline"),
    "unfinished_line": ("kept", "last line of a live file, not all written yet"),
    "no_newline": ("kept", "last line of the file is whole but not ended"),
    "missing_sidecar": ("kept", "window without its identity file"),
    "bad_sidecar": ("kept", "identity file that cannot be read"),
    "sidecar_mismatch": ("kept", "window differs from its identity file in size, checksum, name or session"),
    "window_collision": ("kept", "two different windows of one number; both were read"),
    "unfinished_file": ("kept", "half-compressed file beside its raw one; the raw one was read"),
    "file_truncated": ("kept", "file that was cut off by others; what comes now is read as a new window"),
    "file_rewritten": ("kept", "file with other content than was read from it; read as a new window"),
    "ambiguous_file": ("kept", "two windows that begin with the same line; both were read"),
    "late_window": ("kept", "window that came after it had been given up"),
    "bad_checkpoint": ("kept", "damaged checkpoint; put aside"),
    "changed_name": ("kept", "dictionary entry that says something else than before; the newest holds"),
    "batch_conflict": ("kept", "two different batches of one number; both are kept"),
    "unclean_end": ("kept", "session without shutdown whose writer is gone"),
    "after_shutdown": ("kept", "event after the session's shutdown"),
    # repeat: the same thing once more, counted once
    "channel_copy": ("repeat", "copy of an event that goes to every channel"),
    "repeated_batch": ("repeat", "batch that was read before"),
    "repeated_window": ("repeat", "raw and compressed file of one window; read once"),
}
"""Every reason: what it means for the record, and its text."""

_PLACES_KEPT = 5


class Place(NamedTuple):
    """Where a line lies. ``offset``: of its first byte in the uncompressed file; -1 unknown."""

    file: str = ""
    channel: str = ""
    window: int = -1
    offset: int = -1

    def __str__(self) -> str:
        return f"{self.file}:{self.offset}" if self.offset >= 0 else self.file


class Entry(msgspec.Struct):
    """One reason: times it happened, bytes concerned (0 unknown), the first places, an example of what was met."""

    reason: str
    count: int = 0
    size_bytes: int = 0
    places: list[Place] = msgspec.field(default_factory=list)
    detail: str = ""

    @property
    def effect(self) -> Effect:
        return REASONS[self.reason][0]

    @property
    def text(self) -> str:
        return REASONS[self.reason][1]


class Ledger:
    """Counts by (reason, subject). ``subject`` names what it was about: a type, a column, a channel."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], Entry] = {}

    def add(
        self, reason: str, place: Place | None = None, *, count: int = 1, size_bytes: int = 0, subject: str = ""
    ) -> None:
        key = (reason, subject)
        entry = self._entries.get(key)
        if entry is None:
            if reason not in REASONS:
                raise KeyError(reason)
            if len(self._entries) >= 1000:  # hostile input: ever new types or columns
                key = (reason, "…")
            entry = self._entries.setdefault(key, Entry(reason, detail=key[1]))
        entry.count += count
        entry.size_bytes += size_bytes
        if place is not None and len(entry.places) < _PLACES_KEPT:
            entry.places.append(place)

    def count(self, reason: str, subject: str | None = None) -> int:
        """Times it happened, about ``subject`` or (None) about anything."""
        return sum(e.count for (r, s), e in self._entries.items() if r == reason and subject in (None, s))

    def merge(self, other: Ledger) -> None:
        for (reason, subject), entry in other._entries.items():
            self.add(reason, count=entry.count, size_bytes=entry.size_bytes, subject=subject)
            mine = self._entries.get((reason, subject)) or self._entries[(reason, "…")]
            mine.places.extend(entry.places[: _PLACES_KEPT - len(mine.places)])

    @property
    def lost(self) -> int:
        """Lines, rows, names, files or windows that are lost."""
        return sum(e.count for e in self if e.effect == "lost")

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def dump(self) -> list[dict[str, Any]]:
        """Plain data for JSON, most frequent first."""
        return [
            {
                "reason": e.reason,
                "about": e.detail,
                "effect": e.effect,
                "text": e.text,
                "count": e.count,
                "size_bytes": e.size_bytes,
                "places": [str(p) for p in e.places],
            }
            for e in sorted(self, key=lambda e: (e.effect != "lost", -e.count, e.reason, e.detail))
        ]
