"""Which of some known texts stands at a place, by as few bytes as tell them apart: a guess for many places at once."""

from __future__ import annotations

from typing import Any

from gpuflight.events.arrays import numpy

_WORD = 8


class Guess:
    """Number of the text that may stand at each of some offsets; -1 where none does.

    A tree: each node looks at eight bytes that lie within all texts that are left, and of which some differ.
    """

    def __init__(self, texts: list[bytes], chosen: list[int] | None = None) -> None:
        np = numpy()
        chosen = list(range(len(texts))) if chosen is None else chosen
        self._only = chosen[0] if len(chosen) == 1 else -1
        self._at = -1
        if len(chosen) == 1:
            return
        left = [texts[i] for i in chosen]
        same, shortest = _alike(min(left), max(left)), min(map(len, left))
        if same == shortest or shortest < _WORD:
            return  # they cannot be told apart
        self._at = min(same, shortest - _WORD)
        by_word: dict[int, list[int]] = {}
        for i in chosen:
            by_word.setdefault(int.from_bytes(texts[i][self._at : self._at + _WORD], "little"), []).append(i)
        ordered = sorted(by_word.items())
        self._words = np.array([word for word, _ in ordered], dtype=np.uint64)
        self._texts = np.array([found[0] if len(found) == 1 else -1 for _, found in ordered], dtype=np.int64)
        self._deeper = [(j, Guess(texts, found)) for j, (_, found) in enumerate(ordered) if len(found) > 1]

    def __call__(self, view: Any, places: Any) -> Any:
        """``view``: words of the block, by offset."""
        np = numpy()
        if self._at < 0:
            return np.full(len(places), self._only, dtype=np.int64)
        word = view[np.minimum(places + self._at, len(view) - 1)]
        branch = np.minimum(np.searchsorted(self._words, word), len(self._words) - 1)
        found = np.where(self._words[branch] == word, self._texts[branch], -1)
        for j, guess in self._deeper:
            some = np.flatnonzero((branch == j) & (self._words[j] == word))
            if len(some):
                found[some] = guess(view, places[some])
        return found


def _alike(first: bytes, second: bytes) -> int:
    """How many bytes two texts begin alike."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
