"""A report as one HTML page: nothing is loaded from anywhere, no scripts, everything that a log says is escaped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from gpuflight.events.report import charts, words
from gpuflight.events.report.document import Section, sections
from gpuflight.events.report.model import Report

_CHARTS: dict[str, tuple[Callable[[Report], str], ...]] = {
    "kernels": (charts.durations,),
    "top": (charts.top_kernels,),
    "memory": (charts.memory,),
    "telemetry": (charts.telemetry,),
}

_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --text: #1a1d21; --soft: #5b6570; --line: #d9dee3; --panel: #f5f7f9;
  --warn: #9a4a00; --s0: #0067a8; --s1: #b04700; --s2: #00795b; --s3: #9c3f78; --s4: #7a6400; --s5: #4b5a9c; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171a; --text: #e6e9ec; --soft: #9aa5b0; --line: #31383f;
  --panel: #1c2024; --warn: #ffb266; --s0: #56b4e9; --s1: #ff9a52; --s2: #33c79b; --s3: #e29ac3; --s4: #d9c24a;
  --s5: #9fb0f5; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem; background: var(--ground); color: var(--text);
  font: 14px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin: 0 0 .5rem; }
nav { margin: .6rem 0 1.2rem; color: var(--soft); }
nav a { color: var(--s0); margin-right: .9rem; white-space: nowrap; }
section { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: .9rem 1rem;
  margin: 0 0 1rem; }
section.warning h2 { color: var(--warn); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--soft); white-space: nowrap; }
th, td { padding: .22rem .8rem .22rem 0; vertical-align: top; border-bottom: 1px solid var(--line); }
tr:last-child td { border-bottom: 0; }
td { overflow-wrap: anywhere; } td:first-child { min-width: 9rem; white-space: pre-wrap; }
td.n, th.n { text-align: right; white-space: nowrap; overflow-wrap: normal; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
p.note { color: var(--soft); margin: .1rem 0 .6rem; }
svg { display: block; width: 100%; max-width: 60rem; height: auto; margin: .5rem 0; }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft); } svg .label { fill: var(--text); }
.grid { stroke: var(--line); } .bar { fill: var(--s0); } .line { fill: none; stroke-width: 1.5; }
.band { opacity: .18; stroke: none; }
footer { color: var(--soft); }
""" + "".join(
    f".line.s{i} {{ stroke: var(--s{i}); }} .band.s{i}, svg .label.s{i} {{ fill: var(--s{i}); }}\n" for i in range(6)
)


def page(reports: Sequence[Report], made_by: str) -> str:
    """The page of one report, or of several one after the other."""
    first = reports[0].head
    title = first.app or first.session_id if len(reports) == 1 else f"{len(reports)} GPU sessions"
    body = "".join(_report(report, index, alone=len(reports) == 1) for index, report in enumerate(reports))
    links = "".join(
        f'<a href="#r{index}">{escape(words.plain(_title(report)))}</a> '
        for index, report in enumerate(reports)
        if len(reports) > 1
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(words.plain(title))} – GPU session</title><style>{_STYLE}</style></head><body>"
        f"{f'<h1>{escape(words.plain(title))}</h1><nav>{links}</nav>' if links else ''}{body}"
        f"<footer>{escape(words.plain(made_by))}</footer></body></html>\n"
    )


def _title(report: Report) -> str:
    return f"{report.head.app or 'session'} · {report.head.session_id}"


def _report(report: Report, index: int, *, alone: bool) -> str:
    parts = sections(report)
    heading = "h1" if alone else "h1 class=again"
    links = "".join(f'<a href="#r{index}-{part.id}">{escape(part.title)}</a> ' for part in parts)
    drawn = "".join(_section(part, report, f"r{index}-{part.id}") for part in parts)
    return f'<{heading} id="r{index}">{escape(words.plain(_title(report)))}</h1><nav>{links}</nav>{drawn}'


def _section(part: Section, report: Report, anchor: str) -> str:
    figures = "".join(chart(report) for chart in _CHARTS.get(part.id, ()))
    note = f'<p class="note">{escape(part.note)}</p>' if part.note else ""
    if not part.rows:
        table = ""
    elif part.columns:
        head = "".join(
            f'<th class="n">{escape(c[:-1])}</th>' if c.endswith(">") else f"<th>{escape(c)}</th>" for c in part.columns
        )
        rows = "".join(
            "<tr>"
            + "".join(
                f"<td{' class=n' if column.endswith('>') else ''}>{escape(words.plain(cell))}</td>"
                for column, cell in zip(part.columns, row, strict=True)
            )
            + "</tr>"
            for row in part.rows
        )
        table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    else:
        pairs = "".join(
            f"<dt>{escape(words.plain(row[0]))}</dt><dd>{escape(words.plain(row[1]))}</dd>" for row in part.rows
        )
        table = f"<dl>{pairs}</dl>"
    return (
        f'<section id="{anchor}"{f" class={part.tone}" if part.tone else ""}><h2>{escape(part.title)}</h2>'
        f"{note}{figures}{table}</section>"
    )
