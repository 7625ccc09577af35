"""Recording what every source answered, and answering from such a recording.

Each source has one lowest boundary that answers bytes for a key; it passes every question through ``Tape.ask``. A live
tape just asks; a recording tape asks and keeps the answer, or the error; a replaying tape gives back what was kept.

The file is a zstd-compressed tar, made to be looked into with ``tar --zstd -xf``::

    meta.json             {"schema": 1, "version", "hostname", "time", "redacted"}
    0001/round.json       {"round": 1, "wall_ns", "monotonic_s"}   when the round began
    0001/proc.jsonl       one line per answer: {"k": key, "t": text} | {"k", "b": base64} | {"k", "e": [errno, text]}
    0001/netlink.jsonl                         | {"k", "u": [reason, hint]}   (source not available)
    …
    end.json              {"rounds_count": n}    missing if the file was cut short

A round holds only the answers that differ from the last one to the same key, so an idle machine costs little; ``"n"``
tells how often the key was asked before in that round. A replay answers with the newest one at or before its round and
question; a key first asked later has its first answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.clock import Clock
from gpuflight.sources.tape_reader import Reader, ReplayClock
from gpuflight.sources.tape_writer import Redactor, Writer

Mode = Literal["live", "record", "replay"]


class Tape:
    """The recorder under all sources of a World. ``Tape()`` is live; see ``record``, ``replay`` and ``blank``."""

    def __init__(self) -> None:
        self.mode: Mode = "live"
        self._writer: Writer | None = None
        self._reader: Reader | None = None

    @classmethod
    def record(cls, path: str, clock: Clock, *, hostname: str = "", redactor: Redactor | None = None, version: str = "",
               force: bool = False) -> Tape:  # fmt: skip
        """A tape that writes ``path`` when closed; the file appears whole or not at all.

        Raises InputError if the file exists (unless ``force``) or cannot be made.
        """
        tape = cls()
        tape.mode = "record"
        tape._writer = Writer(path, clock, hostname, redactor, version, force)
        return tape

    @classmethod
    def replay(cls, path: str) -> Tape:
        """A tape that answers from a file. Raises InputError if it is no recording, is damaged, or is too new."""
        tape = cls()
        tape.mode = "replay"
        tape._reader = Reader.load(path)
        return tape

    @classmethod
    def blank(cls) -> Tape:
        """A tape that holds no answer: under sources that must not touch this machine, beside a tree of fixtures."""
        tape = cls()
        tape.mode = "replay"
        tape._reader = Reader()
        return tape

    def ask(self, source: str, key: str, live: Callable[[], bytes]) -> bytes:
        """The answer of ``source`` to ``key``: what ``live`` gives or raises, or what was recorded of it.

        Raises OSError or SourceUnavailable as ``live`` does; in a replay also SourceUnavailable for what the recording
        does not hold. Any other exception of ``live`` is passed on and not recorded.
        """
        if self._reader is not None:
            return self._reader.answer(source, key)
        if self._writer is None:
            return live()
        try:
            answer = live()
        except (OSError, SourceUnavailable) as error:
            self._writer.keep(source, key, error)
            raise
        self._writer.keep(source, key, answer)
        return answer

    def begin_round(self, number: int) -> None:
        """Recording: what is asked from now on belongs to round ``number``. Replaying: move there, or to the last.

        Raises OSError with the file's name if the recording cannot go on (the disk is full): it ends without a file.
        """
        if self._writer is not None:
            self._writer.begin_round(number)
        if self._reader is not None:
            self._reader.begin_round(number)

    @property
    def rounds(self) -> list[int]:
        """Numbers of the recorded rounds, of a replay; else empty."""
        return list(self._reader.rounds) if self._reader is not None else []

    @property
    def meta(self) -> dict[str, Any]:
        """What ``meta.json`` says, of a replay; else empty."""
        return dict(self._reader.meta) if self._reader is not None else {}

    @property
    def clock(self) -> Clock:
        """The clock of a replay: each round's recorded beginning."""
        if self._reader is None:
            raise ValueError("only a replay has a clock of its own")
        return ReplayClock(self._reader)

    def close(self) -> None:
        """End a recording: its file appears now. May be called twice.

        Raises InputError if another file of its name appeared meanwhile, OSError if it cannot be written.
        """
        if self._writer is not None:
            self._writer.close()

    def discard(self) -> None:
        """End a recording without leaving a file."""
        if self._writer is not None:
            self._writer.discard()
