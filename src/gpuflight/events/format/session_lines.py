"""What a session says about itself: its dictionaries and what came of the capture."""

from __future__ import annotations

from typing import Any

from gpuflight.events.format.cells import Value, cell
from gpuflight.events.format.session import Session
from gpuflight.events.ledger import Ledger, Place
from gpuflight.events.names import DICTIONARIES
from gpuflight.events.tables import TABLES

_ENVELOPE = frozenset({"type", "version", "session_id"})
_SUFFIX = "_dict"


def dictionary_entries(session: Session, fields: dict[str, Any], ledger: Ledger, place: Place) -> None:
    """Entries of a dictionary_update; one that brings nothing new is the copy for another channel."""
    new = known = 0
    for wire, entries in fields.items():
        if wire in _ENVELOPE:
            continue
        dictionary = DICTIONARIES.get(wire)
        if dictionary is None:
            ledger.add("unknown_column", place, subject=f"dictionary_update.{wire}")
            if not wire.endswith(_SUFFIX):
                continue
            dictionary = wire.removesuffix(_SUFFIX)
        for key, text in entries.items() if isinstance(entries, dict) else ():
            identifier = cell(key, "i64")
            if not isinstance(identifier, int) or not isinstance(text, str):
                ledger.add("bad_cell", place, subject=f"dictionary_update.{wire}")
                continue
            verdict = session.entry(dictionary, identifier, text)
            if verdict == "known":
                known += 1
            else:
                new += 1
            if verdict == "changed":
                ledger.add("changed_name", place, subject=wire)
    if known and not new:
        ledger.add("channel_copy", place, subject="dictionary_update")


def capability_rows(session: Session, fields: dict[str, Any], ledger: Ledger, place: Place) -> list[dict[str, Value]]:
    """A row per feature; notes whether the session's kernels are synthetic."""
    table = TABLES["capability"]
    kinds = {c.name: c.kind for c in table.columns}
    common: dict[str, Value] = {}
    for wire, column in (
        ("ts_ns", "time_ns"),
        ("requested_engine", "requested_engine"),
        ("selected_engine", "selected_engine"),
    ):
        value = cell(fields.get(wire), kinds[column])
        if value is not None:
            common[column] = value
    rows: list[dict[str, Value]] = []
    features = fields.get("capabilities")
    for feature in features if isinstance(features, list) else ():
        if not isinstance(feature, dict):
            ledger.add("bad_cell", place, subject="capture_capabilities.capabilities")
            continue
        row = dict(common)
        for wire, value in feature.items():
            if wire not in kinds:
                ledger.add("unknown_column", place, subject=f"capture_capabilities.{wire}")
            elif (got := cell(value, kinds[wire])) is not None:
                row[wire] = got
        rows.append(row)
        if row.get("feature") == "kernel_events":
            session.synthetic_kernels = (
                row.get("status") == "fallback" and row.get("mode") == "launch_callbacks_synthetic"
            )
    return rows
