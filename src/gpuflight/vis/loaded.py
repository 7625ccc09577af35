"""What a saved graph says about itself, as options of a layout; parts that do not fit are left out and said so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from gpuflight.graph.load import LoadedGraph
from gpuflight.rounds import Coverage, Environment, Finding
from gpuflight.vis.base import LayoutOptions
from gpuflight.vis.text import plural

Part = TypeVar("Part", Coverage, Finding)


def layout_options(loaded: LoadedGraph, title: str = "") -> LayoutOptions:
    """Options to draw ``loaded`` with. Never raises: a file of another version may say less, or more."""
    notes: list[str] = []
    if loaded.origin != "gpuflight":
        notes.append(f"Read from a graph of {loaded.origin}")
    if loaded.truncated_by:
        notes.append(f"The capture ended early, limited by {loaded.truncated_by}: there is more than is shown")
    return LayoutOptions(
        title=title,
        environment=_environment(loaded.env),
        coverage=_each(loaded.coverage, Coverage, "coverage line", notes),
        findings=_each(loaded.findings, Finding, "finding", notes),
        round_number=loaded.round_number,
        time_ns=loaded.time_ns,
        notes=notes,
    )


def _environment(env: dict[str, Any]) -> Environment:
    known = {
        name: value for name, value in env.items() if name in Environment.__struct_fields__ and isinstance(value, str)
    }
    return Environment(**known)


def _each(parts: Sequence[Any], kind: type[Part], noun: str, notes: list[str]) -> list[Part]:
    fitting: list[Part] = []
    for part in parts:
        try:
            fitting.append(part if isinstance(part, kind) else msgspec.convert(part, kind))
        except (msgspec.ValidationError, TypeError):
            pass
    if len(fitting) < len(parts):
        notes.append(f"{plural(len(parts) - len(fitting), noun)} in a form that this version does not read: left out")
    return fitting
