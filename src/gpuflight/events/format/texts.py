"""Known texts of one place in lines: which may stand there, and whether it does, byte for byte."""

from __future__ import annotations

from typing import Any

from gpuflight.events.arrays import numpy
from gpuflight.events.format.guess import Guess

_SPREAD_BYTES = 64
"""Texts whose lengths differ by more are compared apart."""
_FEWEST_PLACES = 48
"""At fewer places each is sooner compared on its own."""
_COMPARED_BYTES = 1 << 17
"""At a time: it stays in the processor's cache."""
_WORD = 8


class Texts:
    """``lengths`` of the texts; ``first``: the byte that all begin with, 0 if they do not."""

    def __init__(self, texts: list[bytes]) -> None:
        np = numpy()
        self.lengths = np.array([len(text) for text in texts], dtype=np.int64)
        self.guess = Guess(texts)
        self.first = texts[0][0] if len({text[:1] for text in texts}) == 1 else 0
        self._texts = texts
        self._groups: list[_Group] = []
        self._group_of = np.zeros(len(texts), dtype=np.int64)
        self._number_in_group = np.zeros(len(texts), dtype=np.int64)
        chosen: list[int] = []
        ordered = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        for i in ordered:
            if chosen and len(texts[i]) > len(texts[chosen[0]]) + _SPREAD_BYTES:
                self._close(chosen)
                chosen = []
            chosen.append(i)
        self._close(chosen)

    def __len__(self) -> int:
        return len(self._texts)

    def proven(self, data: bytes, view: Any, chosen: Any, places: Any) -> Any:
        """Whether these texts stand at these places; there are as many bytes. ``view``: words of the data."""
        np = numpy()
        if len(self._groups) == 1:
            return self._proven(0, data, view, chosen, places)
        good = np.zeros(len(places), dtype=bool)
        group_of = self._group_of[chosen]
        for number in np.flatnonzero(np.bincount(group_of, minlength=len(self._groups))).tolist():
            some = np.flatnonzero(group_of == number)
            good[some] = self._proven(number, data, view, chosen[some], places[some])
        return good

    def _close(self, chosen: list[int]) -> None:
        self._group_of[chosen] = len(self._groups)
        self._number_in_group[chosen] = range(len(chosen))
        self._groups.append(_Group([self._texts[i] for i in chosen]))

    def _proven(self, group: int, data: bytes, view: Any, chosen: Any, places: Any) -> Any:
        np = numpy()
        if len(places) < _FEWEST_PLACES or not self._groups[group].words:
            begins = map(data.startswith, map(self._texts.__getitem__, chosen.tolist()), places.tolist())
            return np.fromiter(begins, dtype=bool, count=len(places))
        return self._groups[group].proven(data, view, self._number_in_group[chosen], places)


class _Group:
    """Texts of about one length: the words that all have are compared at once, the ends word by word.

    ``words``: how many all have.
    """

    def __init__(self, texts: list[bytes]) -> None:
        np = numpy()
        self.words = len(texts[0]) // _WORD
        self._ends: list[tuple[Any, Any]] = []
        if not self.words:
            return
        self._kind = f"V{self.words * _WORD}"
        self._begins = np.frombuffer(b"".join(text[: self.words * _WORD] for text in texts), dtype=self._kind)
        for back in range(_WORD, len(texts[-1]) - self.words * _WORD + _WORD, _WORD):
            at = [max(len(text) - back, 0) for text in texts]
            ends = [int.from_bytes(text[i : i + _WORD], "little") for i, text in zip(at, texts, strict=True)]
            self._ends.append((np.array(at, dtype=np.int64), np.array(ends, dtype=np.uint64)))

    def proven(self, data: bytes, view: Any, chosen: Any, places: Any) -> Any:
        np = numpy()
        windows = np.ndarray((len(data) - self.words * _WORD + 1,), self._kind, data, strides=(1,))
        step = _COMPARED_BYTES // (self.words * _WORD) + 1
        good = np.ones(len(places), dtype=bool)
        for start in range(0, len(places), step):
            part = slice(start, start + step)
            found = windows[places[part]].view("<u8").reshape(-1, self.words)
            known = self._begins if len(self._begins) == 1 else self._begins[chosen[part]]
            same = found == known.view("<u8").reshape(-1, self.words)
            if not same.all():
                good[part] = same.all(axis=1)
        for at, ends in self._ends:
            good &= view[places + at[chosen]] == ends[chosen]
        return good
