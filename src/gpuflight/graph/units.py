"""Numbers for people: a value formatted by the unit at the end of its metric's name."""

from __future__ import annotations

from functools import lru_cache

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "k", "M", "G", "T", "P")

# Longest suffix first: bytes_per_s must not be taken for per_s. (suffix, unit, scale)
_UNITS: tuple[tuple[str, str, str], ...] = (
    ("_bytes_per_s", "B/s", "decimal"),
    ("_bits_per_s", "b/s", "decimal"),
    ("_gt_per_s", "GT/s", "plain"),
    ("_ops_per_s", "op/s", "decimal"),
    ("_per_s", "/s", "decimal"),
    ("_bytes", "B", "binary"),
    ("_pct", " %", "plain"),
    ("_celsius", " °C", "plain"),
    ("_watts", " W", "plain"),
    ("_joules", " J", "decimal"),
    ("_hz", "Hz", "decimal"),
    ("_cores", " cores", "plain"),
    ("_ns", " ns", "plain"),
    ("_us", " µs", "plain"),
    ("_ms", " ms", "plain"),
    ("_1min", "", "plain"),
    ("_s", " s", "plain"),
    ("_count", "", "plain"),
)


@lru_cache(maxsize=4096)
def _unit(name: str) -> tuple[str, str, str]:
    """What is left of a metric's name without its unit, as words; the unit; how it is scaled."""
    for suffix, unit, scale in _UNITS:
        if name.endswith(suffix):
            return name[: -len(suffix)].replace("_", " ") or name, unit, scale
    return name.replace("_", " "), "", "plain"


def human(name: str, value: float) -> str:
    """The value of metric ``name`` with its unit: ``human("memory_used_bytes", 2**31)`` is ``2 GiB``.

    Bytes are scaled by 1024, rates and frequencies by 1000, counts are never rounded.
    """
    _, unit, scale = _unit(name)
    if scale == "binary":
        return _binary(value)
    if scale == "decimal":
        return _decimal(value, unit)
    return short_number(value) + (unit if unit[:1] in ("", " ") else f" {unit}")


def quantity(name: str) -> str:
    """What a metric's name says apart from its unit, as words: ``memory_used_bytes`` is ``memory used``."""
    return _unit(name)[0]


def short_number(value: float) -> str:
    """At most three significant digits behind the integer part, no trailing zeros, no exponent below 10^15."""
    if isinstance(value, int):
        return str(value)
    magnitude = abs(value)
    digits = 0 if magnitude >= 100 else 1 if magnitude >= 10 else 2 if magnitude >= 0.1 or magnitude == 0 else 4
    if magnitude >= 1e15 or (0 < magnitude < 0.0001):
        return f"{value:.3g}"
    text = f"{value:.{digits}f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def _binary(value: float) -> str:
    size = float(value)
    for unit in _BINARY[:-1]:
        if abs(size) < 1024:
            return f"{short_number(size)} {unit}"
        size /= 1024
    return f"{short_number(size)} {_BINARY[-1]}"


def _decimal(value: float, unit: str) -> str:
    size = float(value)
    for prefix in _DECIMAL[:-1]:
        if abs(size) < 1000:
            return _with_unit(size, prefix, unit)
        size /= 1000
    return _with_unit(size, _DECIMAL[-1], unit)


def _with_unit(size: float, prefix: str, unit: str) -> str:
    joined = prefix + unit.strip()
    separator = "" if unit.startswith("/") else " "
    return f"{short_number(size)}{separator}{joined}"
