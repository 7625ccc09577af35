"""How wide text is before any font is known, for files whose text nobody can measure while they are written.

Advance widths of DejaVu Sans, the widest of the usual sans-serif fonts: what fits by them fits in the others too.
"""

from __future__ import annotations

import re

_REGULAR = (
    318, 401, 460, 838, 636, 950, 780, 275, 390, 390, 500, 838, 318, 361, 318, 337, 636, 636, 636, 636, 636, 636, 636,
    636, 636, 636, 337, 337, 838, 838, 838, 531, 1000, 684, 686, 698, 770, 632, 575, 775, 752, 295, 295, 656, 557, 863,
    748, 787, 603, 787, 695, 635, 611, 732, 684, 989, 685, 611, 685, 390, 337, 390, 838, 500, 500, 613, 635, 550, 635,
    615, 352, 635, 634, 278, 278, 579, 278, 974, 634, 612, 635, 635, 411, 521, 392, 634, 592, 818, 592, 592, 525, 636,
    337, 636, 838,
)  # fmt: skip
"""In thousandths of the size, of the characters 32 to 126."""
_OTHER = 720
_WIDE = 1100
_BOLD = 1.12
"""Words in bold are wider by this; single narrow letters by more, capitals by less."""
_WIDE_TEXT = re.compile(
    "[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe4f\uff00-\uff60\u2600-\u27bf\U0001f000-\U0001faff]"
)
_TABLE = [_OTHER] * 32 + list(_REGULAR) + [_OTHER] * 129
ELLIPSIS = 1000
"""Width of "…"."""


def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """The most that ``text`` is wide in a font of ``size``."""
    if text.isascii():
        thousandths = sum(map(_TABLE.__getitem__, text.encode()))
    else:
        thousandths = sum(map(_TABLE.__getitem__, text.encode("latin-1", "replace")))
        other = sum(1 for char in text if char > "\xff")
        wide = len(_WIDE_TEXT.findall(text))
        thousandths += (other - wide) * (_OTHER - _TABLE[63]) + wide * (_WIDE - _TABLE[63])
    return thousandths * size * (_BOLD if bold else 1.0) / 1000


def cut_to(text: str, room: float, size: float, *, bold: bool = False) -> str:
    """``text``, or as much of it as fits into ``room`` with "…" behind it; empty if nothing does."""
    if text_width(text, size, bold=bold) <= room:
        return text
    left = room - ELLIPSIS * size * (_BOLD if bold else 1.0) / 1000
    if left <= 0:
        return ""
    low, high = 0, len(text) - 1
    while low < high:
        half = (low + high + 1) // 2
        if text_width(text[:half], size, bold=bold) <= left:
            low = half
        else:
            high = half - 1
    return text[:low].rstrip() + "…" if low else ""


def wrapped(text: str, room: float, size: float, lines_max: int = 3) -> list[str]:
    """``text`` in lines that fit into ``room``, broken at blanks; what does not fit into the last is cut."""
    lines: list[str] = []
    words = text.split(" ")
    line = ""
    for at, word in enumerate(words):
        longer = f"{line} {word}" if line else word
        if text_width(longer, size) <= room or not line:
            line = longer
            continue
        if len(lines) == lines_max - 1:
            line = " ".join((line, *words[at:]))
            break
        lines.append(line)
        line = word
    return [cut for cut in (cut_to(each, room, size) for each in (*lines, line)) if cut]
