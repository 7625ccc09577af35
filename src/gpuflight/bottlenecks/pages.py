"""A page of documentation for each rule, from its declaration; ``make docs`` writes them to docs/rules."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping

from gpuflight.bottlenecks.base import ElementRule, Rule, Threshold

_SUBJECTS = {
    "G": "GPU activity", "C": "Communication", "H": "Device health", "S": "Host, scheduling, memory, storage",
    "N": "Network, RDMA", "M": "gpuflight itself",
}  # fmt: skip


def page_name(rule: type[Rule]) -> str:
    """File name of a rule's page."""
    return f"{rule.catalogue_id or 'X'}-{rule.name}.md"


def page(rule: type[Rule]) -> str:
    """The page of one rule, Markdown."""
    title, _, text = inspect.cleandoc(rule.__doc__ or "").partition("\n")
    lines = [
        f"<!-- made from {rule.__module__} by `make docs` -->",
        f"# {rule.catalogue_id} {rule.name}",
        "",
        title,
        "",
        *([text.strip(), ""] if text.strip() else []),
        "| | |",
        "|---|---|",
        f"| judges | {_judged(rule)} |",
        f"| severity | {rule.severity} |",
        f"| needs | {_needs(rule)} |",
        *([f"| does not apply unless | {rule.guard} |"] if rule.guard else []),
        f"| becomes a finding | {_persistence(rule)} |",
        f"| ends | after {_rounds(rule.clear_rounds)} without it |",
        f"| cost | {rule.cost_formula} |",
        *([f"| explains | {', '.join(f'`{name}`' for name in rule.explains)} |"] if rule.explains else []),
        "",
    ]
    if rule.thresholds:
        lines += ["| threshold | value | ends at | source |", "|---|---|---|---|"]
        lines += [_threshold(name, threshold) for name, threshold in rule.thresholds.items()]
        lines.append("")
    lines += [f"**What to do:** {rule.advice}", ""]
    if rule.verify:
        lines += ["**Whether it helped:**", "", "```text", rule.verify, "```", ""]
    return "\n".join(lines)


def index(rules: Mapping[str, type[Rule]]) -> str:
    """The list of all pages, Markdown."""
    lines = [
        "<!-- made by `make docs` -->",
        "# The rules",
        "",
        "How they judge, and how to change them: [rules](../rules.md).",
        "",
    ]
    by_subject: dict[str, list[type[Rule]]] = {}
    for rule in rules.values():
        by_subject.setdefault(_SUBJECTS.get(rule.catalogue_id[:1], "Others"), []).append(rule)
    for subject in (*_SUBJECTS.values(), "Others"):
        if subject in by_subject:
            lines += [f"## {subject}", "", "| id | rule | what it says |", "|---|---|---|"]
            for rule in sorted(by_subject[subject], key=lambda each: each.catalogue_id):
                lines.append(f"| {rule.catalogue_id} | [{rule.name}]({page_name(rule)}) | {rule.description} |")
            lines.append("")
    return "\n".join(lines)


def all_pages(rules: Mapping[str, type[Rule]]) -> dict[str, str]:
    """File name → text of every page."""
    return {"README.md": index(rules), **{page_name(rule): page(rule) for rule in rules.values()}}


def write(folder: str, rules: Mapping[str, type[Rule]]) -> None:
    """Write every page into ``folder``; pages of rules that are gone are removed."""
    pages = all_pages(rules)
    os.makedirs(folder, exist_ok=True)
    for name in os.listdir(folder):
        made = name.endswith(".md") and name[:1] in "GCHSNMX" and name[1:3].isdigit()
        if made and name not in pages:
            os.unlink(os.path.join(folder, name))
    for name, text in pages.items():
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            file.write(text)


def _judged(rule: type[Rule]) -> str:
    if issubclass(rule, ElementRule):
        return "each " + ", ".join(str(kind.__struct_config__.tag) for kind in rule.subjects())
    return "all of them together"


def _needs(rule: type[Rule]) -> str:
    parts = []
    for need in rule.needs:
        names = ", ".join(f"`{name}`" for name in (*need.metrics, *need.attributes))
        given = f" (collector {need.given_by})" if need.given_by else ""
        parts.append(f"{need.kind.__struct_config__.tag}{': ' + names if names else ''}{given}")
    return "; ".join(parts)


def _persistence(rule: type[Rule]) -> str:
    if rule.whole_session:
        return "at once: its numbers are of the whole session"
    text = f"when met in {_rounds(rule.persist_rounds)}"
    if rule.persist_s:
        text += f" and for {rule.persist_s:g} s"
    if rule.warm_up_s:
        text += f", not in the first {rule.warm_up_s:g} s"
    return text


def _rounds(count: int) -> str:
    return "one round" if count == 1 else f"{count} rounds in a row"


def _threshold(name: str, threshold: Threshold) -> str:
    unit = f" {threshold.unit}" if threshold.unit else ""
    ends = f"{threshold.clear_at:g}{unit}" if threshold.clear_at is not None else ""
    guess = " (our guess)" if threshold.guess else ""
    return f"| `{name}` | {threshold.value:g}{unit} | {ends} | {threshold.source}{guess} |"
