"""A diagnosis on a terminal, readable in 80 columns."""

from __future__ import annotations

import textwrap
from collections import Counter
from typing import TYPE_CHECKING

from gpuflight.cli.output import clean
from gpuflight.graph.units import human, quantity

if TYPE_CHECKING:
    from rich.console import Console

    from gpuflight.bottlenecks.diagnosis import Diagnosis
    from gpuflight.rounds import Evidence, Finding

_WIDTH = 80
_INDENT = 4
_STYLE = {"critical": "bold red", "warn": "bold yellow", "info": "bold cyan"}
_NOUNS = {"critical": ("critical", "critical"), "warn": ("warning", "warnings"), "info": ("note", "notes")}
_WORD = {"critical": "CRITICAL", "warn": "WARNING", "info": "NOTE"}
_REASONS = 6
_EVIDENCE = 4
_LONGEST = 56


def text(diagnosis: Diagnosis, console: Console, *, every_rule: bool = False) -> None:
    """Print it."""
    width = min(console.width, 100) if console.is_terminal else _WIDTH
    head = [f"gpuflight doctor · {clean(diagnosis.hostname or diagnosis.source)}"]
    if diagnosis.hostname and diagnosis.source != "this machine":
        head.append(clean(diagnosis.source))
    if diagnosis.rounds_count > 1:
        head.append(f"{diagnosis.rounds_count} rounds" + (f" in {diagnosis.seconds:g} s" if diagnosis.seconds else ""))
    console.print(_filled(" · ".join(head), width, ""), style="bold")
    console.print(_summary(diagnosis))
    by_id = {finding.id: finding for finding in diagnosis.findings}
    confirmed = [finding for finding in diagnosis.findings if finding.confirmed]
    number = 0
    for finding in confirmed:
        if finding.explained_by in by_id:
            continue
        number += 1
        console.print()
        _finding(finding, f"{number}.", diagnosis, console, width)
        for symptom in _symptoms(finding, by_id):
            _wrapped(console, "explains", f"{_WORD[symptom.severity].lower()}: {clean(symptom.message)}", width)
    unconfirmed = [finding for finding in diagnosis.findings if not finding.confirmed]
    if unconfirmed:
        console.print()
        console.print("Seen, but not for long enough to be sure", style="bold")
        for finding in unconfirmed:
            console.print(_filled(f"- {_WORD[finding.severity].lower()}: {clean(finding.message)}", width, "  "))
    _unjudged(diagnosis, console, width, every_rule)


def _summary(diagnosis: Diagnosis) -> str:
    if diagnosis.verdict == "unknown":
        return "could not judge: no rule had what it needs"
    counts = Counter(finding.severity for finding in diagnosis.findings if finding.confirmed)
    parts = [f"{counts[s]} {_NOUNS[s][counts[s] != 1]}" for s in ("critical", "warn", "info") if counts[s]]
    found = ", ".join(parts) if parts else "nothing found that holds it back"
    judged = diagnosis.rules.get("clear", 0) + diagnosis.rules.get("fired", 0)
    return f"{found} · {judged} of {sum(diagnosis.rules.values())} rules could judge"


def _finding(finding: Finding, number: str, diagnosis: Diagnosis, console: Console, width: int) -> None:
    from rich.text import Text

    word = _WORD[finding.severity]
    title = _filled(f"{number:<{_INDENT}}{word}  {clean(finding.message)}", width, " " * _INDENT)
    line = Text(title)
    line.stylize(_STYLE[finding.severity], _INDENT, _INDENT + len(word))
    console.print(line)
    where = " › ".join(_short(clean(part)) for part in diagnosis.places.get(finding.id, []))
    if len(finding.entities) > 1:
        where += f" (and {len(finding.entities) - 1} more)"
    if finding.edges:
        where += f"{' · ' if where else ''}{clean(finding.edges[0])}"
    for name, value in (
        ("where", where),
        ("seen", " · ".join(_told(seen) for seen in finding.evidence[:_EVIDENCE])),
        ("cost", _cost(finding)),
        ("do", clean(finding.advice)),
        ("check", clean(finding.verify)),
    ):
        if value:
            _wrapped(console, name, value, width)
    if finding.flapping:
        _wrapped(console, "note", "it comes and goes; it is held until it has been calm for a while", width)


def _short(name: str) -> str:
    """A name that fits a line: those of kernels may have hundreds of characters without a blank."""
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"


def _cost(finding: Finding) -> str:
    if finding.cost_gpu_s is not None:
        amount = f"{finding.cost_gpu_s:.2f} GPU-seconds a second"
        return f"{amount} ({clean(finding.cost)})" if finding.cost else amount
    return clean(finding.cost) if finding.cost else "not known"


def _told(seen: Evidence) -> str:
    value = clean(seen.value) if isinstance(seen.value, str) else human(seen.metric, seen.value)
    over = f" over {seen.window_s:g} s" if seen.window_s else ""
    samples = f", {seen.samples_count} samples" if seen.samples_count > 1 else ""
    return f"{clean(quantity(seen.metric))} {value}{over}{samples}"


def _symptoms(finding: Finding, by_id: dict[str, Finding]) -> list[Finding]:
    found: list[Finding] = []
    pending = list(finding.explains)
    while pending:
        symptom = by_id.get(pending.pop(0))
        if symptom is not None and symptom not in found:
            found.append(symptom)
            pending += symptom.explains
    return found


def _unjudged(diagnosis: Diagnosis, console: Console, width: int, every_rule: bool) -> None:
    if not diagnosis.unjudged:
        return
    console.print()
    console.print("Could not be judged", style="bold")
    shown = diagnosis.unjudged if every_rule else diagnosis.unjudged[:_REASONS]
    for each in shown:
        count = f"{len(each.rules)} {'rule' if len(each.rules) == 1 else 'rules'}"
        names = f": {', '.join(each.rules)}" if every_rule else ""
        console.print(_filled(f"- {clean(each.reason)} ({count}{names})", width, "  "))
        if each.hint:
            console.print(_filled(f"  → {clean(each.hint)}", width, "    "))
    left = diagnosis.unjudged[len(shown) :]
    if left:
        rules = sum(len(each.rules) for each in left)
        console.print(f"- {len(left)} other reasons ({rules} rules); --all lists them")


def _wrapped(console: Console, name: str, value: str, width: int) -> None:
    begin = " " * _INDENT + f"{name:<10}"
    console.print(_filled(begin + value, width, " " * len(begin)))


def _filled(line: str, width: int, indent: str) -> str:
    return textwrap.fill(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )
