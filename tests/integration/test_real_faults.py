"""Real faults on this machine, found by all rules at once: in time, about the right thing, and gone when mended."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest
from tests.conftest import ROOT
from tests.tools.faults import FAULTS, SLOW, injected

from gpuflight.bottlenecks.build import make_engine
from gpuflight.bottlenecks.engine import Engine
from gpuflight.bottlenecks.settings import RulesSettings, ThresholdOverride
from gpuflight.cli.plugin_settings import make_collectors
from gpuflight.core.controller import Controller
from gpuflight.rounds import Round
from gpuflight.settings import Settings
from gpuflight.sources.clock import ManualClock
from gpuflight.sources.open import open_world

QUICK = [name for name in FAULTS if name not in SLOW]
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="cgroups and namespaces are made by root")
needs_cc = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="the fake NVML is compiled")


@pytest.fixture(scope="module")
def fates() -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.tools.inject"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)["faults"]
    return told


@needs_root
@needs_cc
@pytest.mark.parametrize("name", QUICK)
def test_it_is_found_within_three_rounds_and_gone_within_three(name: str, fates: dict[str, Any]) -> None:
    fate = fates[name]
    if fate["refused"]:
        pytest.skip(fate["refused"])
    assert fate["found_in"] is not None and 1 <= fate["found_in"] <= 3, fate
    assert fate["gone_in"] is not None and fate["gone_in"] <= 3, fate
    assert any(letter.isdigit() for letter in fate["message"])


class Hours:
    """This machine's processes as they are, with a clock that is moved by hand."""

    def __init__(self) -> None:
        engine = make_engine(
            RulesSettings(
                only=["stuck_process", "memory_leak"],
                overrides=[ThresholdOverride(rule="memory_leak", thresholds={"least": 32 << 20})],
            )
        )
        assert isinstance(engine, Engine)
        self.clock = ManualClock()
        collectors = [each for each in make_collectors(Settings()) if each.name == "process_tree"]
        self.controller = Controller(
            open_world(clock=self.clock), settings=Settings(), collectors=collectors, judge=engine
        )

    def round(self, seconds: float) -> Round:
        self.clock.advance(seconds)
        return self.controller.run_round()

    def about(self, seconds: float, rule: str, pid: int) -> list[str]:
        found = self.round(seconds).findings
        return [each.message for each in found if each.rule == rule and f"pid={pid}," in each.entities[0]]


def test_a_dead_process_that_nobody_collects_and_one_that_grows_for_hours() -> None:
    """The clock is fast: a round is 2 or 10 minutes. Leaks are looked for in every 30th round, over three hours."""
    hours = Hours()
    with injected(["zombie", "leak"]) as faults:
        leak, zombie = faults["leak"], faults["zombie"]
        for _ in range(3):
            assert hours.about(600.0, "stuck_process", zombie.pid) == []
        zombie.begin()
        dead = int(zombie.element.partition("pid=")[2].partition(",")[0])
        told = [hours.about(600.0, "stuck_process", dead) for _ in range(3)]
        assert told[-1] and str(dead) in told[-1][0]
        zombie.end()
        assert [hours.about(600.0, "stuck_process", dead) for _ in range(3)][-1] == []
        for _ in range(160):
            leak.begin()
            grown = hours.about(120.0, "memory_leak", leak.pid)
            if grown:
                break
        assert grown and "%" in grown[0], "nothing was said of the leak after 5 hours"
    assert hours.about(120.0, "memory_leak", leak.pid) == []
    hours.controller.close()


@needs_root
def test_a_process_that_waits_for_a_disk_that_does_not_answer() -> None:
    hours = Hours()
    with injected(["stuck"]) as faults:
        stuck = faults["stuck"]
        if stuck.refused:
            pytest.skip(stuck.refused)
        stuck.begin()
        reader = int(stuck.element.partition("pid=")[2].partition(",")[0])
        told = [hours.about(120.0, "stuck_process", reader) for _ in range(4)]
        assert told[1] == [] and told[-1] and "(state D)" in told[-1][0]
        stuck.end()
        assert hours.about(120.0, "stuck_process", reader) == []
    hours.controller.close()
