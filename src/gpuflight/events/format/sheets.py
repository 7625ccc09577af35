"""Lines of known texts around changing numbers, found by the block: no object is made of such a line.

A line is text, numbers, text, numbers, … and text. For each text it is guessed which of the known ones stands there
(``guess``), then the bytes are compared; numbers are parsed all at once. What is not proven to be like a line that was
read in full is left to be read in full.
"""

from __future__ import annotations

import math
from typing import Any

from gpuflight.events.arrays import numpy
from gpuflight.events.format.digits import MOST_DIGITS, parse_columns, words
from gpuflight.events.format.found import Found
from gpuflight.events.format.texts import Texts

_MOST_TEXTS = 4096
"""Of one place in the lines; with more, lines are looked up one by one."""
_FEWEST_LINES = 128
"""Fewer lines of a layout in a block are sooner looked up one by one."""
_SEARCHED_BYTES = 1 << 19
_MOST_COMBINATIONS = 1 << 16
"""Of texts, for which there is a table instead of a search."""
_TYPE = b'"type":"'
_INTO_TYPE = 4
"""The bytes that tell types apart begin here: many names begin alike."""
_MOST_VALUE = (1 << 63) - 1


class Block:
    """Whole lines, 16 bytes or more. ``starts`` and ``ends`` of the lines, newline not included."""

    def __init__(self, data: bytes) -> None:
        np = numpy()
        self.data = data
        self.view = words(data)
        self.content = np.frombuffer(data, dtype=np.uint8)
        newlines = _newlines(self.content)
        if not data.endswith(b"\n"):
            newlines = np.append(newlines, len(data))
        self.ends = newlines
        self.starts = np.empty_like(newlines)
        self.starts[0] = 0
        np.add(newlines[:-1], 1, out=self.starts[1:])
        self._words: dict[int, Any] = {}

    def words_of_lines(self, at: int) -> Any:
        """The eight bytes at an offset in each line, or behind it where it is shorter."""
        words = self._words.get(at)
        if words is None:
            np = numpy()
            words = self._words[at] = self.view[np.minimum(self.starts + at, len(self.view) - 1)]
        return words


class Sheet:
    """The known lines of one layout. ``groups``: names of the numbers between the texts."""

    def __init__(self, groups: list[list[str]]) -> None:
        self._groups = groups
        self._inner = [[b',"' + name.encode() + b'":' for name in names[1:]] for names in groups]
        self._texts: list[dict[bytes, int]] = [{} for _ in range(len(groups) + 1)]
        self._numbers: dict[tuple[int, ...], int] = {}
        self._built: list[Texts] = []
        self._codes: Any = None
        self._table: Any = None
        self._by_code: Any = None
        self._built_of = 0
        self._word: tuple[int, int] | None = None
        self._lengths: dict[str, list[int]] = {}

    def learn(self, texts: tuple[bytes, ...], number: int) -> None:
        """A line with these texts around its numbers was read: ``number`` stands for what it says."""
        if len(self._numbers) >= _MOST_TEXTS:
            return
        if self._word is None:
            at = texts[0].find(_TYPE)
            if at < 0 or len(texts[0]) < at + len(_TYPE) + _INTO_TYPE + 8:
                return
            at += len(_TYPE) + _INTO_TYPE
            self._word = (at, int.from_bytes(texts[0][at : at + 8], "little"))
        key = tuple(known.setdefault(text, len(known)) for known, text in zip(self._texts, texts, strict=True))
        self._numbers[key] = number

    def find(self, block: Block) -> Found | None:
        """The lines of the block that are like known ones; None if there are none."""
        np = numpy()
        if self._word is None or not self._build():
            return None
        view = block.view
        at, word = self._word
        lines = np.flatnonzero(block.words_of_lines(at) == np.uint64(word))
        if len(lines) < _FEWEST_LINES:
            return None
        place = block.starts[lines]
        kept: list[Any] = []  # of each line: places and numbers of its texts, ends and lengths of its numbers

        def keep(chosen: Any) -> None:
            nonlocal lines, place
            if not chosen.all():
                lines, place = lines[chosen], place[chosen]
                kept[:] = [column[chosen] for column in kept]

        code: Any = 0
        for g, known in enumerate(self._built):
            text = known.guess(view, place)
            kept += (place, text)
            place = place + known.lengths[text]
            keep((text >= 0) & (place <= block.ends[lines]))
            if not len(lines):
                return None
            for n, name in enumerate(self._groups[g] if g < len(self._groups) else ()):
                if n:
                    literal = self._inner[g][n - 1]
                    keep(_same(view, place, literal))
                    place = place + len(literal)
                stop = self._inner[g][n][0] if n < len(self._inner[g]) else self._built[g + 1].first
                lengths = self._length(name, block.content, place, stop)
                place = place + lengths
                kept += (place, lengths)
        keep(place == block.ends[lines])
        texts, numbers = self._apart(kept)
        for known, (_, text) in zip(self._built, texts, strict=True):
            code = code * len(known) + text
        chosen, good = self._numbers_of(code)
        for known, (places, text) in zip(self._built, texts, strict=True):
            good &= known.proven(block.data, view, text, places)
        names = [name for group in self._groups for name in group]
        ends, lengths = (np.array(column) for column in zip(*numbers, strict=True))
        parsed, are_numbers = parse_columns(view, ends, lengths)
        good &= are_numbers.all(axis=0)
        if int(parsed.max()) > _MOST_VALUE:
            good &= (parsed <= np.uint64(_MOST_VALUE)).all(axis=0)
        values = dict(zip(names, parsed, strict=True))
        if not good.all():
            lines, chosen = lines[good], chosen[good]
            values = {name: column[good] for name, column in values.items()}
        return Found(lines, block.starts[lines], chosen, values) if len(lines) else None

    def _apart(self, kept: list[Any]) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Texts and numbers, that follow each other in a line, apart."""
        texts, numbers = [], []
        pairs = iter(zip(kept[::2], kept[1::2], strict=True))
        for g in range(len(self._built)):
            texts.append(next(pairs))
            numbers += [next(pairs) for _ in (self._groups[g] if g < len(self._groups) else ())]
        return texts, numbers

    def _numbers_of(self, code: Any) -> tuple[Any, Any]:
        """What known lines of these codes were learnt as, and whether there are such."""
        np = numpy()
        if self._table is not None:
            chosen = self._table[code]
            return chosen, chosen >= 0
        at = np.minimum(np.searchsorted(self._codes, code), len(self._codes) - 1)
        return self._by_code[at], self._codes[at] == code

    def _build(self) -> bool:
        """What is needed to find lines; made anew when an eighth of the known ones is new."""
        np = numpy()
        if len(self._numbers) > self._built_of + self._built_of // 8:
            self._built = [Texts(list(known)) for known in self._texts]
            codes = []
            for key in self._numbers:
                code = 0
                for text, known in zip(key, self._texts, strict=True):
                    code = code * len(known) + text
                codes.append(code)
            order = np.argsort(np.array(codes, dtype=np.int64))
            self._codes = np.array(codes, dtype=np.int64)[order]
            self._by_code = np.array(list(self._numbers.values()), dtype=np.int64)[order]
            self._table = None
            if (combinations := math.prod(map(len, self._texts))) <= _MOST_COMBINATIONS:
                self._table = np.full(combinations, -1, dtype=np.int64)
                self._table[self._codes] = self._by_code
            self._built_of = len(self._numbers)
        return bool(self._built)

    def _length(self, name: str, content: Any, place: Any, stop: int) -> Any:
        """Bytes up to one that ends a number; 0 if there are too many. Lengths that occurred are tried first, the
        last most frequent one before all: if that is not the nearest end, what is between is no number."""
        np = numpy()
        tried = self._lengths.get(name, [])
        left: Any = None
        lengths = np.zeros(len(place), dtype=np.int64)
        last = len(content) - 1
        occurred: dict[int, int] = {}
        for length in [*tried, *(n for n in range(1, MOST_DIGITS + 1) if n not in tried)]:
            ends = content[np.minimum((place if left is None else place[left]) + length, last)] == stop
            count = int(np.count_nonzero(ends))
            if not count:
                continue
            occurred[length] = count
            if count == len(ends):
                lengths[slice(None) if left is None else left] = length
                break
            lengths[ends if left is None else left[ends]] = length
            left = np.flatnonzero(~ends) if left is None else left[~ends]
        self._lengths[name] = sorted(occurred, key=lambda length: -occurred[length])
        return lengths


def _newlines(content: Any) -> Any:
    """Offsets of the newlines: first the words that have one, which few have; piece by piece, in the cache."""
    np = numpy()
    hits = np.zeros(min(len(content) + 7 & ~7, _SEARCHED_BYTES), dtype=bool)
    words = hits.view(np.uint64)
    found = []
    for start in range(0, len(content), _SEARCHED_BYTES):
        piece = content[start : start + _SEARCHED_BYTES]
        np.equal(piece, ord("\n"), out=hits[: len(piece)])
        hits[len(piece) :] = False
        some = np.flatnonzero(words != 0)
        at = np.flatnonzero(words[some].view(bool))
        found.append(some[at >> 3] * 8 + (at & 7) + start)
    return np.concatenate(found) if len(found) > 1 else found[0]


def _same(view: Any, places: Any, text: bytes) -> Any:
    """Whether a text of eight bytes or more stands there."""
    np = numpy()
    last = len(view) - 1
    same = np.ones(len(places), dtype=bool)
    for at in {*range(0, len(text) - 7, 8), len(text) - 8}:
        word = np.uint64(int.from_bytes(text[at : at + 8], "little"))
        same &= view[np.minimum(places + at, last)] == word
    return same
