"""What a decoder remembers of one session: which texts it has told, what it has seen before, how its clock stands.

Bounded whatever the session's length: what does not fit is forgotten, and told again when it comes again.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from gpuflight.events.ledger import Ledger, Place
from gpuflight.events.names import text_id

EPOCH_FROM_NS = 10**17
"""Stamps below (1973) are no wall clock of ours: zero, or nanoseconds since boot."""

_TEXTS = 100_000
_RECENT_BATCHES = 4096


class BatchNumbers:
    """Numbers of the batches of one type that were read: the recent with a signature, all as ranges."""

    def __init__(self) -> None:
        self._recent: OrderedDict[int, tuple[int, str]] = OrderedDict()
        self._ends: dict[int, int] = {}  # first number of a range -> last
        self._starts: dict[int, int] = {}

    def seen(self, number: int, signature: int, channel: str) -> str:
        """``new``, ``copy`` (from another channel), ``again``, or ``conflict`` (same number, other content)."""
        recent = self._recent.get(number)
        if recent is None:
            if self._in_range(number):
                return "again"
            self._add(number)
            self._recent[number] = (signature, channel)
            if len(self._recent) > _RECENT_BATCHES:
                self._recent.popitem(last=False)
            return "new"
        if recent[0] != signature:
            return "conflict"
        return "again" if recent[1] == channel else "copy"

    def _in_range(self, number: int) -> bool:
        return any(first <= number <= last for first, last in self._ends.items())

    def _add(self, number: int) -> None:
        first, last = number, number
        if number - 1 in self._starts:
            first = self._starts.pop(number - 1)
            del self._ends[first]
        if number + 1 in self._ends:
            last = self._ends.pop(number + 1)
            del self._starts[last]
        self._ends[first] = last
        self._starts[last] = first
        if len(self._ends) > _RECENT_BATCHES:  # numbers at random: no writer does that
            oldest = next(iter(self._ends))
            del self._starts[self._ends.pop(oldest)]


class Session:
    """State of one session in a decoder.

    ``start_ns``: time of its first job_start, None before it came. ``ended``: channels whose shutdown came.
    ``synthetic_kernels``: whether its kernels' times are those of launches; None until the session says so (at its
    end). ``names`` and ``shapes``: told since the decoder last asked.
    """

    def __init__(self, identifier: str) -> None:
        self.id = identifier
        self.start_ns: int | None = None
        self.ended: set[str] = set()
        self.synthetic_kernels: bool | None = None
        self.names: list[tuple[str, int, str]] = []
        self.shapes: list[dict[str, Any]] = []
        self._texts: dict[tuple[str, str], int] = {}
        self._written: dict[tuple[str, int], str] = {}
        self._shapes: set[int] = set()
        self._batches: dict[str, BatchNumbers] = {}
        self._copies: dict[int, dict[str, int]] = {}

    @property
    def has_epoch(self) -> bool:
        """Whether the session's own start is wall-clock time, so that other stamps can be told from it."""
        return self.start_ns is not None and self.start_ns >= EPOCH_FROM_NS

    def text(self, dictionary: str, text: str) -> int:
        """Id of a text that a line carries itself; told as a name the first time."""
        key = (dictionary, text)
        identifier = self._texts.get(key)
        if identifier is None:
            identifier = text_id(text)
            if len(self._texts) >= _TEXTS:
                self._texts.clear()
            self._texts[key] = identifier
            if identifier:
                self.names.append((dictionary, identifier, text))
        return identifier

    def entry(self, dictionary: str, identifier: int, text: str) -> str:
        """An entry of a dictionary_update: ``new``, ``known`` or ``changed``."""
        key = (dictionary, identifier)
        known = self._written.get(key)
        if known == text:
            return "known"
        if len(self._written) >= _TEXTS:
            self._written.clear()
        self._written[key] = text
        self.names.append((dictionary, identifier, text))
        return "new" if known is None else "changed"

    def shape(self, shape: dict[str, Any]) -> int:
        """Id of a launch configuration; told the first time."""
        identifier = text_id(repr(sorted(shape.items())))
        if identifier not in self._shapes:
            if len(self._shapes) >= _TEXTS:
                self._shapes.clear()
            self._shapes.add(identifier)
            self.shapes.append({"shape_id": identifier, **shape})
        return identifier

    def batch(self, wire_type: str, number: int, signature: int, channel: str) -> str:
        numbers = self._batches.get(wire_type)
        if numbers is None:
            numbers = self._batches[wire_type] = BatchNumbers()
        return numbers.seen(number, signature, channel)

    def is_copy(self, line: bytes, channel: str) -> bool:
        """Whether an event that goes to every channel was had from another one: the n-th in a channel is new only if
        no other channel has had n of them."""
        channels = self._copies.setdefault(hash(line), {})
        before = max(channels.values(), default=0)
        channels[channel] = channels.get(channel, 0) + 1
        if len(self._copies) > _TEXTS:
            self._copies.clear()
        return channels[channel] <= before


class Sessions:
    """The sessions of one folder or stream. ``default``: id of lines that name none; empty if there is no such."""

    def __init__(self, default: str, ledger: Ledger) -> None:
        self.default = default
        self.known: dict[str, Session] = {}
        self._ledger = ledger

    def get(self, identifier: str) -> Session:
        """The state of a session, made at its first line."""
        session = self.known.get(identifier)
        if session is None:
            session = self.known[identifier] = Session(identifier)
        return session

    def of(self, identifier: Any, place: Place, size_bytes: int) -> Session | None:
        """The session that a line of so many bytes names; None, and told, if there is none."""
        if not isinstance(identifier, str) or not identifier:
            identifier = self.default
        if not identifier:
            self._ledger.add("no_session", place, size_bytes=size_bytes)
            return None
        return self.get(identifier)
