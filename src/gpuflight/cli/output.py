"""What all commands print alike: JSON, tables, text that may hold anything."""

from __future__ import annotations

import json
import os
import re
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# Controls and escapes act on a terminal; bidirectional overrides make text show what it is not.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def clean(text: Any) -> str:
    """``text`` on one line, with every character that could act on a terminal shown as its escape."""
    return _UNSAFE.sub(lambda found: found.group().encode("unicode_escape").decode(), str(text))


def clean_lines(text: str) -> str:
    """As ``clean``, keeping line ends."""
    return "\n".join(clean(line) for line in text.split("\n"))


def shorten(text: Any, width: int) -> str:
    """``text`` cleaned and cut to ``width`` columns, with an ellipsis if it was longer."""
    cleaned = clean(text)
    if sum(_columns(character) for character in cleaned) <= width:
        return cleaned
    kept, used = [], 1
    for character in cleaned:
        used += _columns(character)
        if used > width:
            break
        kept.append(character)
    return "".join(kept) + "…"


def emit_json(value: Any) -> None:
    """``value`` as JSON on stdout, UTF-8 whatever the locale says."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    emit_bytes(text.encode("utf-8", "backslashreplace"))  # a lone surrogate becomes \\udcxx: valid JSON


def emit_bytes(data: bytes) -> None:
    """Bytes on stdout, after what was printed before."""
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def say(text: str) -> None:
    """A line for the user that is no result: to stderr."""
    print(text, file=sys.stderr, flush=True)


def console(file: IO[str] | None = None) -> Console:
    """A rich console: colour only on a terminal and without NO_COLOR, 80 columns when not a terminal."""
    from rich.console import Console

    class PipedConsole(Console):
        def on_broken_pipe(self) -> None:
            """rich would exit with 1 here; ``cli.guarded`` knows better."""
            raise  # the BrokenPipeError that is being handled

    stream = file if file is not None else sys.stdout
    terminal = is_terminal(stream)
    return PipedConsole(
        file=stream,
        force_terminal=terminal,
        no_color=not terminal or bool(os.environ.get("NO_COLOR")),
        width=None if terminal else int(os.environ.get("COLUMNS") or 80),
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )


def is_terminal(stream: IO[str]) -> bool:
    """Whether a person looks at the stream."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def make_table(columns: Sequence[str | tuple[str, dict[str, Any]]], rows: Iterable[Sequence[Any]]) -> Table:
    """A plain table: no lines but one under the head. Cells are text and may hold anything; None is shown as ``–``."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    for column in columns:
        name, options = (column, {}) if isinstance(column, str) else column
        table.add_column(name, **{"overflow": "fold", **options})
    for row in rows:
        table.add_row(*(Text("–" if cell is None else clean_lines(str(cell))) for cell in row))
    return table


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
