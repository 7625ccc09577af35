"""On which line of a TOML text something stands: ``tomllib`` gives values only."""

from __future__ import annotations

import re

Path = tuple[str | int, ...]

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(?:#.*)?")
_KEY = re.compile(r"\s*((?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*'))*)\s*=")


class TomlLines:
    """The lines of one text. It is a guess made of headers and keys at the beginning of lines: good for messages."""

    def __init__(self, text: str) -> None:
        self._lines: dict[Path, int] = {}
        self._last: dict[Path, int] = {}  # of each array of tables, the number of the last one
        table: Path = ()
        for number, line in enumerate(text.splitlines(), 1):
            if header := _HEADER.fullmatch(line):
                table = self._table(_parts(header[2]), header[1] == "[[")
                self._lines.setdefault(table, number)
            elif key := _KEY.match(line):
                self._lines.setdefault((*table, *_parts(key[1])), number)

    def _table(self, parts: list[str], array: bool) -> Path:
        path: Path = ()
        for part in parts[:-1]:
            path = (*path, part)
            if path in self._last:
                path = (*path, self._last[path])
        path = (*path, parts[-1])
        if array:
            self._last[path] = self._last.get(path, -1) + 1
        return (*path, self._last[path]) if path in self._last else path

    def of(self, path: Path) -> int:
        """The line of a key or table, or of the nearest thing around it; 1 without any."""
        for length in range(len(path), 0, -1):
            if (line := self._lines.get(path[:length])) is not None:
                return line
        return 1


def _parts(text: str) -> list[str]:
    return [part.strip().strip("\"'") for part in text.split(".")]
