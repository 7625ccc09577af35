"""A probe under the tape: its answers are kept while a world is recorded, and come from there when it is replayed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.bpf.base import Link, ProbeObject, ProgramCost, Uprobe
from gpuflight.sources.recording import Tape

SOURCE = "bpf"

T = TypeVar("T")


class Opened(msgspec.Struct):
    """What is kept of a probe that was opened."""

    backend: str
    why_classic: str


class _Attached(msgspec.Struct):
    """Which of the places that were asked for were attached, and what became of the others: by their numbers."""

    attached: list[int]
    failed: list[tuple[int, str]]


class Drained(msgspec.Struct):
    """A ring buffer gives a record once, so its records belong to one round."""

    round: int
    records: list[bytes]


class TapedLink(Link):
    """A link as it was, with the live one behind it while there is one."""

    def __init__(self, attached: list[Uprobe], failed: list[tuple[Uprobe, str]], inner: Link | None, key: str) -> None:
        self.attached = attached
        self.failed = failed
        self.inner = inner
        self.key = key

    def close(self) -> None:
        self.closed = True
        self.attached = []
        if self.inner is not None:
            self.inner.close()


class TapedObject(ProbeObject):
    """``inner`` is the live object of a recording, None in a replay: then writing does nothing."""

    def __init__(
        self,
        name: str,
        key: str,
        opened: Opened,
        tape: Tape,
        inner: ProbeObject | None,
        round_number: Callable[[], int],
    ) -> None:
        self.name = name
        self.backend = opened.backend
        self.why_classic = opened.why_classic
        self.closed = False
        self._key = key
        self._tape = tape
        self._inner = inner
        self._round = round_number
        self._drains: dict[str, tuple[int, int]] = {}  # map → round, how often it was drained in it

    def _live(self) -> ProbeObject:
        if self._inner is None:
            raise SourceUnavailable("a replay loads no probes")
        return self._inner

    def _ask(self, question: str, live: Callable[[], T], kind: type[T]) -> T:
        raw = self._tape.ask(SOURCE, f"{self._key} {question}", lambda: msgspec.msgpack.encode(live()))
        return decode(raw, kind)

    def attach_uprobes(self, program: str, uprobes: Sequence[Uprobe], pid: int = 0) -> Link:
        links: list[Link] = []

        def live() -> _Attached:
            link = self._live().attach_uprobes(program, uprobes, pid)
            links.append(link)
            numbers = {uprobe: number for number, uprobe in enumerate(uprobes)}
            return _Attached(
                [numbers[uprobe] for uprobe in link.attached],
                [(numbers[uprobe], reason) for uprobe, reason in link.failed],
            )

        places = hashlib.blake2b(msgspec.msgpack.encode([list(uprobes), pid]), digest_size=8).hexdigest()
        question = f"attach {program} {places}"
        known = self._ask(question, live, _Attached)
        try:
            attached = [uprobes[number] for number in known.attached]
            failed = [(uprobes[number], reason) for number, reason in known.failed]
        except IndexError:
            raise SourceUnavailable("the recorded answer of a probe makes no sense", "record again") from None
        return TapedLink(attached, failed, links[0] if links else None, question)

    def attach(self, program: str) -> Link:
        links: list[Link] = []

        def live() -> bool:
            links.append(self._live().attach(program))
            return True

        self._ask(f"attach {program}", live, bool)
        return TapedLink([], [], links[0] if links else None, program)

    def read(self, map_name: str) -> list[tuple[bytes, bytes]]:
        return self._ask(f"read {map_name}", lambda: self._live().read(map_name), list[tuple[bytes, bytes]])

    def lookup(self, map_name: str, key: bytes) -> bytes | None:
        def live() -> list[bytes]:
            value = self._live().lookup(map_name, key)
            return [] if value is None else [value]

        found = self._ask(f"lookup {map_name} {key.hex()}", live, list[bytes])
        return found[0] if found else None

    def update(self, map_name: str, key: bytes, value: bytes) -> None:
        if self._inner is not None:
            self._inner.update(map_name, key, value)

    def delete(self, map_name: str, key: bytes) -> bool:
        return self._ask(f"delete {map_name} {key.hex()}", lambda: self._live().delete(map_name, key), bool)

    def clear(self, map_name: str) -> None:
        if self._inner is not None:
            self._inner.clear(map_name)

    def drain(self, map_name: str, limit: int = 65536) -> list[bytes]:
        now = self._round()
        last, count = self._drains.get(map_name, (now, 0))
        count = count + 1 if last == now else 1
        self._drains[map_name] = now, count
        question = f"drain {map_name}" + (f" {count}" if count > 1 else "")
        kept = self._ask(question, lambda: Drained(now, self._live().drain(map_name, limit)), Drained)
        return kept.records if kept.round == now else []

    def lost(self, map_name: str) -> int:
        return self._ask(f"lost {map_name}", lambda: self._live().lost(map_name), int)

    def losses(self) -> dict[int, int]:
        return self._ask("losses", lambda: self._live().losses(), dict[int, int])

    def run_iter(self, link: Link) -> bytes:
        if not isinstance(link, TapedLink):
            raise TypeError("this link is of another probe")
        inner = link.inner
        return self._ask(
            f"iterate {link.key}", lambda: self._live().run_iter(inner) if inner is not None else b"", bytes
        )

    def costs(self) -> list[ProgramCost]:
        return self._ask("costs", lambda: self._live().costs(), list[ProgramCost])

    def close(self) -> None:
        self.closed = True
        if self._inner is not None:
            self._inner.close()


def decode(raw: bytes, kind: type[T]) -> T:
    """A kept answer. Raises SourceUnavailable if it is damaged."""
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SourceUnavailable(f"the recorded answer of a probe makes no sense: {error}", "record again") from None
