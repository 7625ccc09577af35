"""The events of a trace in Chrome's JSON format one after the other, whatever the size of the file."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

from gpuflight.events.files.inflate import Damaged, chunks
from gpuflight.events.ledger import Ledger, Place

_LONGEST = 64 << 20
"""Characters of one value; what is longer is no trace."""
_BLANK = re.compile(r"[\s,]*")
_KEY = re.compile(r'"((?:[^"\\]|\\.)*)"\s*:\s*')


class TraceFile:
    """``events()`` once. ``head``: the fields beside ``traceEvents`` that were met so far (those that come before it
    are there at the first event). Numbers with a fraction are Decimal: µs with their ns."""

    def __init__(self, path: str, ledger: Ledger, seen: Callable[[int], None] = lambda size: None) -> None:
        self.path = path
        self.head: dict[str, Any] = {}
        self._ledger = ledger
        self._seen = seen
        self._decode = json.JSONDecoder(parse_float=Decimal, parse_constant=lambda name: None).raw_decode
        self._text = ""
        self._at = 0
        self._more: Iterator[str] = iter(())
        self._ended = False

    def events(self) -> Iterator[Any]:
        """Values of ``traceEvents``, or of a file that is a bare list. Damage ends them, and is in the ledger."""
        self._more = self._texts()
        start = self._next("[{")
        if start == "[":
            yield from self._list()
        elif start == "{":
            while (key := self._key()) is not None:
                if key == "traceEvents":
                    if self._next("[") != "[":
                        self._fail()
                        return
                    yield from self._list()
                else:
                    found, value = self._value()
                    if not found:
                        return
                    self.head[key] = value
        else:
            self._fail()

    def _texts(self) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
        replaced = 0
        try:
            for piece in chunks(self.path, _is_gzip(self.path), lambda data: self._seen(len(data))):
                text = decoder.decode(piece)
                replaced += text.count("\ufffd")
                yield text
        except Damaged as damage:
            self._ledger.add(damage.reason, Place(self.path))
        yield decoder.decode(b"", final=True)
        if replaced:
            self._ledger.add("invalid_utf8", Place(self.path), count=replaced)

    def _read(self) -> bool:
        """More text behind what is left; False at the end."""
        for text in self._more:
            if text:
                self._text = self._text[self._at :] + text
                self._at = 0
                return True
        self._ended = True
        return False

    def _skip(self) -> bool:
        """To the next character that is no blank or comma; False at the end."""
        while True:
            found = _BLANK.match(self._text, self._at)
            self._at = found.end() if found is not None else self._at
            if self._at < len(self._text):
                return True
            if not self._read():
                return False

    def _next(self, wanted: str) -> str:
        """The next character if it is one of those, taken; else empty."""
        if self._skip() and self._text[self._at] in wanted:
            self._at += 1
            return self._text[self._at - 1]
        return ""

    def _key(self) -> str | None:
        """A key and its colon; None at the end of the object."""
        if not self._skip():
            self._fail()
            return None
        if self._text[self._at] == "}":
            return None
        while (found := _KEY.match(self._text, self._at)) is None:
            if len(self._text) - self._at > _LONGEST or not self._read():
                self._fail()
                return None
        self._at = found.end()
        return found[1]

    def _list(self) -> Iterator[Any]:
        while True:
            if not self._skip():
                self._fail()
                return
            if self._text[self._at] == "]":
                self._at += 1
                return
            found, value = self._value()
            if not found:
                return
            yield value

    def _value(self) -> tuple[bool, Any]:
        """The next value. What is cut off at the end of the text at hand is tried again with more of it."""
        self._skip()
        while True:
            try:
                value, end = self._decode(self._text, self._at)
            except (ValueError, RecursionError):
                if len(self._text) - self._at > _LONGEST or not self._read():
                    self._fail()
                    return False, None
                continue
            if end == len(self._text) and not self._ended and not isinstance(value, (dict, list, str)) and self._read():
                continue  # a number may go on
            self._at = end
            return True, value

    def _fail(self) -> None:
        rest = len(self._text) - self._at
        self._ledger.add("cut_line" if self._ended else "not_json", Place(self.path), size_bytes=rest)


def _is_gzip(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"\x1f\x8b"


def base_of(path: str) -> int | None:
    """``baseTimeNanoseconds`` wherever it stands in the file."""
    pattern = re.compile(rb'"baseTimeNanoseconds"\s*:\s*(\d{1,19})\b')
    rest = b""
    try:
        for piece in chunks(path, _is_gzip(path)):
            found = pattern.search(rest + piece)
            if found is not None:
                return int(found[1])
            rest = piece[-64:]
    except Damaged:
        return None
    return None
