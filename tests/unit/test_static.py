"""Processes asked for by pid."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from pydantic import ValidationError
from tests.fakes.proc import FakeProc

from gpuflight.collectors.static import Static, StaticSettings


def observe(static: Static, proc: FakeProc) -> list[str]:
    static.notes = {}
    proc.next_round()
    static.observe(SimpleNamespace(procfs=proc.procfs))  # type: ignore[arg-type]
    return [node.id for node in static.seed().nodes]


def test_only_these_and_each_once() -> None:
    proc = FakeProc()
    for pid in (10, 11, 12):
        proc.add(pid)
    static = Static(StaticSettings(pids=[12, 10, 12]))
    assert observe(static, proc) == ["Process(pid=12,start=120)", "Process(pid=10,start=100)"]
    assert static.seed().nodes[0].attributes == {"seeded": True}
    assert static.notes == {}


def test_nothing_asked_for_reads_nothing() -> None:
    proc = FakeProc()
    assert observe(Static(), proc) == []
    assert not proc.fs.asked


def test_a_missing_pid_is_said_and_costs_only_itself() -> None:
    proc = FakeProc()
    proc.add(10)
    static = Static(StaticSettings(pids=[99, 10]))
    assert observe(static, proc) == ["Process(pid=10,start=100)"]
    assert list(static.notes) == ["there is no process 99"]
    proc.add(99)
    assert len(observe(static, proc)) == 2
    assert static.notes == {}


def test_a_pid_given_to_another_process_is_not_followed() -> None:
    proc = FakeProc()
    proc.add(10)
    static = Static(StaticSettings(pids=[10]))
    observe(static, proc)
    proc.end(10)
    assert observe(static, proc) == []
    assert list(static.notes) == ["process 10 has ended"]
    proc.add(10, start=999)
    assert observe(static, proc) == []
    assert list(static.notes) == ["process 10 has ended"]


@pytest.mark.parametrize("pids", [[0], [-1], ["x"]])
def test_what_is_no_pid(pids: list[object]) -> None:
    with pytest.raises(ValidationError):
        StaticSettings(pids=pids)  # type: ignore[arg-type]
