"""Numbers of GPU sessions for people."""

from __future__ import annotations

from datetime import UTC, datetime

from gpuflight.graph.units import human, short_number

_NS = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"))


def time(ns: float | None) -> str | None:
    """``12.4 µs``; hours and days for what takes so long."""
    if ns is None:
        return None
    if abs(ns) >= 7.2e12:
        seconds = round(ns / 1e9)
        return f"{seconds // 3600} h {seconds % 3600 // 60:02} min"
    for size, unit in _NS:
        if abs(ns) >= size:
            return f"{significant(ns / size)} {unit}"
    return f"{significant(ns)} ns"


def significant(value: float) -> str:
    """Three significant digits, whole numbers in full."""
    if value == int(value) or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3g}"


def moment(ns: int | None) -> str | None:
    """UTC, to the millisecond."""
    if ns is None:
        return None
    try:
        return datetime.fromtimestamp(ns / 1e9, UTC).isoformat(" ", "milliseconds").replace("+00:00", " UTC")
    except (OverflowError, ValueError, OSError):
        return f"{ns} ns"


def size(count: float | None) -> str | None:
    """``4 MiB``."""
    return None if count is None else human("_bytes", count)


def rate(bytes_per_s: float | None) -> str | None:
    """``12.4 GB/s``."""
    return None if bytes_per_s is None else human("_bytes_per_s", bytes_per_s)


def percent(share: float | None) -> str | None:
    """``12.4 %`` of 0.124."""
    return None if share is None else f"{significant(share * 100)} %"


def count(number: int | None) -> str | None:
    """``1 234 567``, with thin spaces."""
    return None if number is None else f"{number:,}".replace(",", "\u202f")


_METRIC_UNITS = (
    ("_pct", "%", 1.0),
    ("_mw", "W", 1e-3),
    ("_mib", "GiB", 1 / 1024),
    ("_mhz", "MHz", 1.0),
    ("_mv", "mV", 1.0),
    ("_bytes_per_s", "MB/s", 1e-6),
    ("_c", "°C", 1.0),
)


def metric(name: str) -> tuple[str, str, float]:
    """A metric's name as words, its unit, and what its values are multiplied with to be in it."""
    for suffix, unit, scale in _METRIC_UNITS:
        if name.endswith(suffix):
            return name.removesuffix(suffix).replace("_", " "), unit, scale
    return name.replace("_", " "), "", 1.0


def plain(text: str | None) -> str:
    """A cell's text: ``–`` for what is unknown; controls, and marks that turn the direction of text, as escapes."""
    if text is None:
        return "–"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\u202f\u00a0" else c.encode("unicode_escape").decode() for c in text)


def number(value: float | None) -> str | None:
    """At most three digits behind the point."""
    return None if value is None else short_number(int(value) if value == int(value) else value)
