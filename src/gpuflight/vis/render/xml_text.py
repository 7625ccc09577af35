"""Text inside XML 1.0: cleaned of what XML cannot hold, then escaped. All our XML goes through here."""

from __future__ import annotations

import re
from typing import Any

from gpuflight.vis.render.tables import value_text
from gpuflight.vis.text import clean

_SPECIAL = re.compile("[&<>\"']")
_ESCAPES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;"}
_CACHED_MAX = 65_536
_CACHED_TEXT_MAX = 64


def escaped(text: str) -> str:
    """A cleaned text as content of an element or of an attribute in double quotes."""
    return _SPECIAL.sub(lambda match: _ESCAPES[match[0]], text) if _SPECIAL.search(text) else text


def xml(text: str, limit: int = 4096) -> str:
    """Any text as content of an element or attribute. Line breaks and other control characters become visible."""
    return escaped(clean(text, limit))


def xml_lines(lines: list[str], limit: int = 4096) -> str:
    """Lines of text as an attribute; their breaks survive a reader."""
    return "&#xa;".join(xml(line, limit) for line in lines)


class XmlValues(dict[Any, "str | None"]):
    """Values as escaped text; ``values[value]`` computes each text that repeats once.

    Only for text: ``1``, ``1.0`` and ``True`` are one key.
    """

    def __missing__(self, value: str) -> str:
        text = xml(value)
        if len(self) < _CACHED_MAX and len(value) <= _CACHED_TEXT_MAX:
            self[value] = text
        return text


def xml_value(value: Any) -> str | None:
    """Any value of an attribute or metric as escaped text; None for nothing."""
    text = value_text(value)
    return None if text is None else escaped(text)
