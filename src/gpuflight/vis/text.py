"""Text of a picture: names made harmless, numbers made readable, widths estimated without a font."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]"
)
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_DECIMAL = ("", "k", "M", "G", "T", "P", "E")
_WIDE = re.compile(
    "[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe4f\uff00-\uff60\U0001f300-\U0001faff]"
)


def clean(text: str, limit: int = 4096) -> str:
    """``text`` without what could harm a reader or a file: control characters become their visible symbols, lone
    surrogates and characters that reorder text become U+FFFD, and beyond ``limit`` characters it is cut and says so."""
    if len(text) > limit:
        text = f"{text[:limit]}… ({len(text)} characters)"
    if text.isascii() and text.isprintable():
        return text
    return _UNSAFE.sub(_visible, text)


def _visible(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else "\ufffd"


def clean_value(value: Any, limit: int = 4096) -> Any:
    """An attribute or metric as something every JSON reader understands: text is cleaned, a number that is not finite
    or that a double cannot hold becomes text, a list is cut at 256 items and says so."""
    kind = type(value)
    if kind is str:
        return clean(value, limit)
    if kind is bool or value is None:
        return value
    if kind is int:
        return value if -(2**53) <= value <= 2**53 else str(value)
    if kind is float:
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [clean_value(item, limit) for item in list(value)[:256]]
        return items if len(value) <= 256 else [*items, f"… ({len(value)} items)"]
    return clean(str(value), limit)


def human_bytes(count: float) -> str:
    """``41.2 GiB``."""
    size = abs(count)
    step = 0
    while size >= 1023.5 and step < len(_BINARY) - 1:
        size /= 1024
        step += 1
    return f"{'-' if count < 0 else ''}{_short(size)} {_BINARY[step]}"


def human_pct(value: float) -> str:
    """``41.2 %``."""
    return f"{'-' if value < 0 else ''}{_short(abs(value))} %"


def human_si(number: float, unit: str) -> str:
    """``12.4 GB/s`` for ``(12.4e9, "B/s")``; without a unit the prefix stands at the number."""
    size = abs(number)
    step = 0
    while size >= 999.5 and step < len(_DECIMAL) - 1:
        size /= 1000
        step += 1
    suffix = _DECIMAL[step] + unit
    return f"{'-' if number < 0 else ''}{_short(size)}{' ' + suffix if suffix else ''}"


def _short(size: float) -> str:
    if size >= 99.95 or size == int(size):
        return f"{size:.0f}"
    return f"{size:.1f}" if size >= 9.995 else f"{size:.2f}".rstrip("0").rstrip(".")


_UNITS: tuple[tuple[str, str], ...] = (
    ("_bits_per_s", "bit/s"),
    ("_bytes_per_s", "B/s"),
    ("_gt_per_s", "GT/s"),
    ("_per_s", "/s"),
    ("_hz", "Hz"),
    ("_watts", "W"),
)


def human(name: str, value: Any) -> str:
    """A metric with the unit that its name ends with; text and everything that is not finite as it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    name = f"_{name}"  # the whole name may be a unit: bytes_per_s
    try:
        if not math.isfinite(value):
            return str(value)
    except OverflowError:
        return str(value)[:40]
    if name.endswith("_bytes"):
        return human_bytes(value)
    if name.endswith("_pct"):
        return human_pct(value)
    if name.endswith("_celsius"):
        return f"{_short(value)} °C"
    for suffix, unit in (("_ms", "ms"), ("_us", "µs"), ("_ns", "ns")):
        if name.endswith(suffix):
            return f"{_short(value)} {unit}"
    for suffix, unit in _UNITS:
        if name.endswith(suffix):
            return human_si(value, unit)
    if name.endswith("_s"):
        return f"{_short(value)} s"
    return human_si(value, "") if abs(value) >= 1e5 else _short(abs(value)) if value >= 0 else "-" + _short(-value)


def finite(metrics: Mapping[str, Any], name: str) -> float | None:
    """A metric as a finite number, or None when it is absent or is none."""
    value = metrics.get(name)
    if value is None or isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        value = float(value)
    except OverflowError:
        return None
    return value if math.isfinite(value) else None


@lru_cache(maxsize=4096)
def plural(count: int, noun: str) -> str:
    """``1 process``, ``2 processes``; the count with thousands separated."""
    if count == 1:
        return f"1 {noun}"
    head, _, last = noun.rpartition(" ")
    if last.endswith(("s", "x", "ch", "sh")):
        last += "es"
    elif last.endswith("y") and last[-2:-1] not in "aeiou":
        last = last[:-1] + "ies"
    else:
        last += "s"
    return f"{count:,} {head + ' ' if head else ''}{last}".replace(",", "\u202f")


def width(text: str, size: float) -> float:
    """Estimated width of ``text`` in a proportional sans-serif font of ``size`` units: 0.61 em a character, 1.1 em a
    wide one (East Asian, emoji). Renderers that know the font still cut at the box's border."""
    count = len(text)
    if count > 200:
        text = text[:200]
        count = 200
    if not text.isascii():
        count += int(_wide_count(text) * 0.8)
    return count * size * 0.61


def _wide_count(text: str) -> int:
    try:
        text.encode("latin-1")
    except UnicodeEncodeError:
        return len(_WIDE.findall(text))
    return 0  # the middle dot and the like, at a fifth of the price
