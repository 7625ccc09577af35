"""Which of some known texts stands at a place, by as few bytes as tell them apart: a guess for many places at once."""

from __future__ import annotations

from typing import Any

from gpuflight.events.arrays import numpy

_WORD = 8
_MOST_WORDS = 4
_ODD = 0x9E3779B97F4A7C15


class Guess:
    """Number of the text that may stand at each of some offsets; -1 where none does.

    Where a few words within all texts tell them apart, these are looked up together, else one after the other.
    """

    def __init__(self, texts: list[bytes]) -> None:
        np = numpy()
        self._tree = _Node(texts, list(range(len(texts))))
        self._at: list[int] = []
        at = sorted(self._tree.offsets())
        if self._tree.only >= 0 or len(at) > _MOST_WORDS or at[-1] + _WORD > min(map(len, texts)) or at[0] < 0:
            return
        keys = np.zeros(len(texts), dtype=np.uint64)
        for place in at:
            words = [int.from_bytes(text[place : place + _WORD], "little") for text in texts]
            keys = _mixed(keys, np.array(words, dtype=np.uint64))
        order = np.argsort(keys)
        if len(set(keys.tolist())) == len(texts):
            self._at, self._keys, self._order = at, keys[order], order

    def __call__(self, view: Any, places: Any) -> Any:
        """``view``: words of the block, by offset."""
        np = numpy()
        if not self._at:
            return self._tree(view, places)
        keys: Any = np.uint64(0)
        for at in self._at:
            keys = _mixed(keys, view[np.minimum(places + at, len(view) - 1)])
        found = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return np.where(self._keys[found] == keys, self._order[found], -1)


def _mixed(keys: Any, words: Any) -> Any:
    """A hash of words that is so far ``keys``, with one more."""
    words ^= keys
    words *= numpy().uint64(_ODD)
    return words


class _Node:
    """A tree: each node looks at eight bytes that lie within all texts that are left, and of which some differ.

    ``only``: the text, if no other is left; -1.
    """

    def __init__(self, texts: list[bytes], chosen: list[int]) -> None:
        np = numpy()
        self.only = chosen[0] if len(chosen) == 1 else -1
        self._at = -1
        self._deeper: list[tuple[int, _Node]] = []
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
        self._deeper = [(j, _Node(texts, found)) for j, (_, found) in enumerate(ordered) if len(found) > 1]

    def offsets(self) -> set[int]:
        """Where it looks; -1 if some texts cannot be told apart."""
        if self.only >= 0:
            return set()
        return {self._at}.union(*(node.offsets() for _, node in self._deeper))

    def __call__(self, view: Any, places: Any) -> Any:
        np = numpy()
        if self._at < 0:
            return np.full(len(places), self.only, dtype=np.int64)
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
