"""Garbage collections of the recorded program: long ones are scopes, and nothing of it is left afterwards."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

from tests.unit.recorder_rig import Read, recording

from gpuflight.events.recorder.clock import Clock
from gpuflight.events.recorder.garbage import LEAST_NS, Garbage

MS = 1_000_000


class Noted:
    """Where ranges would go."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def passed(self, name: str, began_ns: int, ended_ns: int) -> None:
        self.told.append((name, ended_ns - began_ns))


def collected(*lasted_ns: int) -> list[tuple[str, int]]:
    """What is told of collections that take so long."""
    now = [1_000 * MS]
    noted = Noted()
    garbage = Garbage(noted, Clock(lambda: 10**18, lambda: now[0]))  # type: ignore[arg-type]
    info: dict[str, Any] = {"generation": 0, "collected": 0, "uncollectable": 0}
    garbage._called("stop", info)  # one that was under way when it began
    for lasted in lasted_ns:
        garbage._called("start", info)
        now[0] += lasted
        garbage._called("stop", info)
        now[0] += MS
    return noted.told


def test_long_collections_are_told_and_the_first_one() -> None:
    assert collected(5_000, 7_000, LEAST_NS, LEAST_NS - 1, 9 * MS) == [("gc", 5_000), ("gc", LEAST_NS), ("gc", 9 * MS)]


def test_the_interpreter_calls_it_until_it_is_stopped(tmp_path: Path) -> None:
    before = list(gc.callbacks)
    with recording(tmp_path, gc_ranges=True) as (recorder, _):
        assert len(gc.callbacks) == len(before) + 1
        gc.collect()
        recorder._garbage.start()
        assert len(gc.callbacks) == len(before) + 1
    assert gc.callbacks == before
    gc.collect()
    read = Read(tmp_path)
    rows = [row for row in read.rows("scope") if read.text("scope", row["name_id"]) == "gc"]
    assert rows and [row["event_type"] for row in rows[:2]] == [0, 1]
    assert all(begin["time_ns"] <= end["time_ns"] for begin, end in zip(rows[::2], rows[1::2], strict=True))


def test_a_child_that_was_forked_is_not_called(tmp_path: Path) -> None:
    before = list(gc.callbacks)
    with recording(tmp_path, gc_ranges=True) as (recorder, _):
        recorder._garbage.stop()  # what forget_in_child does first, in the child
        assert gc.callbacks == before
        recorder._garbage.stop()
