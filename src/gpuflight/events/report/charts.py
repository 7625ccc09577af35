"""Small charts as SVG: lines over time, bars. Colours come from the page's style sheet; text is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from gpuflight.events.query.series import Series
from gpuflight.events.report import words
from gpuflight.events.report.model import Report

_WIDTH, _HEIGHT = 720, 120
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 8, 22, 20
_SHOWN = ("gpu_util_pct", "power_mw", "temp_c", "used_mib", "clock_sm_mhz", "cpu_pct", "ram_used_mib")


def telemetry(report: Report) -> str:
    """A chart per metric, one line per device."""
    made = []
    for metric in _SHOWN:
        lines = [series for series in report.series if series.metric == metric and len(series.times_ns) > 1]
        if lines:
            name, unit, scale = words.metric(metric)
            title = f"{'host ' if lines[0].device_id is None else ''}{name}, {unit}"
            made.append(_lines(title, lines, scale, report.head.first_ns))
    return "".join(made)


def memory(report: Report) -> str:
    """Device memory in use over time."""
    points = report.memory_series
    if len(points) < 2:
        return ""
    values = [point.bytes / 1024**2 for point in points]
    series = Series(
        metric="memory",
        device_id=None,
        times_ns=[point.time_ns for point in points],
        counts=[1] * len(points),
        means=values,
        mins=values,
        maxs=values,
    )
    return _lines("device memory in use, MiB", [series], 1.0, report.head.first_ns, stepped=True)


def top_kernels(report: Report) -> str:
    """Time of the first kernels as bars."""
    lines = report.top_kernels[:12]
    rows = [(line.name or f"#{line.kernel_id}", line.total_ns, words.time(line.total_ns) or "") for line in lines]
    return _bars("time in all", rows)


def durations(report: Report) -> str:
    """Launches by duration, octave by octave."""
    rows = [
        (f"{words.time(b.from_ns)} – {words.time(b.to_ns)}", b.count, words.count(b.count) or "")
        for b in report.durations
    ]
    return _bars("launches by duration", rows)


def _lines(title: str, lines: Sequence[Series], scale: float, first_ns: int | None, *, stepped: bool = False) -> str:
    start = min(series.times_ns[0] for series in lines)
    end = max(series.times_ns[-1] for series in lines)
    high = max(max(series.maxs) for series in lines) * scale
    low = min(0.0, min(min(series.mins) for series in lines) * scale)
    span, rise = max(end - start, 1), (high - low) or 1.0
    inner_width, inner_height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def place(time_ns: int, value: float) -> tuple[float, float]:
        x = _LEFT + (time_ns - start) / span * inner_width
        return x, _TOP + inner_height - (value * scale - low) / rise * inner_height

    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">',
        f'<text class="label" x="{_LEFT}" y="13">{escape(title)}</text>',
    ]
    for value, y in ((high, _TOP), (low, _TOP + inner_height)):
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{words.number(value)}</text>')
    origin = first_ns if first_ns is not None and first_ns <= start else start
    for time_ns, anchor, x in ((start, "start", _LEFT), (end, "end", _WIDTH - _RIGHT)):
        text = escape(words.time(time_ns - origin) or "")
        parts.append(f'<text class="tick" x="{x}" y="{_HEIGHT - 4}" text-anchor="{anchor}">+{text}</text>')
    for index, series in enumerate(lines):
        points = [place(t, v) for t, v in zip(series.times_ns, series.means, strict=True)]
        if stepped:
            before = [points[0], *points]
            points = [p for last, now in zip(before, points, strict=False) for p in ((now[0], last[1]), now)]
        else:
            upper = [place(t, v) for t, v in zip(series.times_ns, series.maxs, strict=True)]
            lower = [place(t, v) for t, v in zip(series.times_ns, series.mins, strict=True)]
            band = " ".join(f"{x:.1f},{y:.1f}" for x, y in upper + lower[::-1])
            parts.append(f'<polygon class="band s{index % 6}" points="{band}"/>')
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline class="line s{index % 6}" points="{drawn}"/>')
        if len(lines) > 1:
            x = _WIDTH - _RIGHT - (len(lines) - 1 - index) * 60
            parts.append(
                f'<text class="label s{index % 6}" x="{x}" y="13" text-anchor="end">GPU {series.device_id}</text>'
            )
    return "".join([*parts, "</svg>"])


def _bars(title: str, rows: Sequence[tuple[str, float, str]]) -> str:
    if not rows:
        return ""
    most = max(value for _, value, _ in rows) or 1
    step, top, left, right = 22, 22, 300, 90
    height = top + step * len(rows) + 4
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(title)}">',
        f'<text class="label" x="{left}" y="13">{escape(title)}</text>',
    ]
    for index, (name, value, text) in enumerate(rows):
        y = top + index * step
        width = max(value / most * (_WIDTH - left - right), 1)
        name = words.plain(name)
        shown = name if len(name) <= 44 else f"{name[:18]}…{name[-25:]}"
        parts.append(
            f"<g><title>{escape(name)}</title>"
            f'<text class="tick" x="{left - 8}" y="{y + 14}" text-anchor="end">{escape(shown)}</text>'
            f'<rect class="bar" x="{left}" y="{y + 2}" width="{width:.1f}" height="{step - 6}" rx="2"/>'
            f'<text class="tick" x="{left + width + 6:.1f}" y="{y + 14}">{escape(text)}</text></g>'
        )
    return "".join([*parts, "</svg>"])
