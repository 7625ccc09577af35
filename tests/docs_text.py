"""What the documentation shows: its fenced blocks, and the examples of every ``--help``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


class Block(NamedTuple):
    """A fenced block: the page it stands on, the line it begins at, its language, its text."""

    page: Path
    line: int
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found[1], found[2])
        for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


def commands(page: Path) -> list[str]:
    """Every command line (``$ …``) of a page's console blocks, in order."""
    return [
        line.removeprefix("$ ")
        for block in blocks(page)
        if block.language == "console"
        for line in block.text.splitlines()
        if line.startswith("$ ")
    ]
