"""Injects real faults into this machine, watches it meanwhile, and says when each was found and when it was over.

    python -m tests.tools.inject [--out FILE.tar.zst] [--alone] [FAULT …]

Rounds are ``INTERVAL_S`` apart, as by default: some before, some with all faults at once, some after. Prints one JSON
object. ``--out`` records it; ``--alone`` does it in namespaces of its own, in which there is nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tests.fakes.nvml.build import VARIABLE, FakeNvml, NoCompiler, fake_nvml
from tests.tools.faults import FAULTS, SLOW, Fault, injected
from tests.tools.gpus import description

from gpuflight.bottlenecks.build import make_engine
from gpuflight.bottlenecks.settings import RulesSettings
from gpuflight.cli.session import open_controller
from gpuflight.rounds import Finding, Round
from gpuflight.settings import Settings

INTERVAL_S = 5.0
BEFORE, DURING, AFTER = 2, 3, 3
COLLECTORS = {"disks": {"loop_devices": True}}
"""How this is watched: the slow disk is a loop device."""
QUICK = [name for name in FAULTS if name not in SLOW]
"""Faults that show within seconds."""


def watch(names: list[str], out: str | None, interval_s: float = INTERVAL_S) -> dict[str, Any]:
    """All faults at once on this machine. ``faults``: what was found of each, and when; ``others``: all else."""
    settings = Settings(interval_s=interval_s, collectors=COLLECTORS)
    engine = make_engine(RulesSettings())
    assert engine is not None
    said: dict[str, Any] = {}
    rounds: list[list[Finding]] = []
    with injected(names) as faults, open_controller(settings, record=out, force=True, judge=engine) as controller:
        started_s = time.monotonic()

        def look() -> Round:
            wait_s = started_s + len(rounds) * interval_s - time.monotonic()
            time.sleep(max(wait_s, 0))
            done = controller.run_round()
            rounds.append(done.findings)
            return done

        for _ in range(BEFORE):
            look()
        for fault in faults.values():
            fault.begin()
            if fault.name == "one_core":
                _use_gpu(fault.element.partition("pid=")[2].partition(",")[0])
        for _ in range(DURING):
            look()
        for fault in faults.values():
            fault.end()
        for _ in range(AFTER):
            look()
        for fault in faults.values():
            said[fault.name] = _fate(fault, rounds)
    wanted = {(fate["rule"], fate["element"]) for fate in said.values()}
    others = sorted(
        {
            f"{each.severity}: {each.id}"
            for found in rounds
            for each in found
            if not any(rule == each.rule and _about(each, element) for rule, element in wanted)
        }
    )
    return {"faults": said, "others": others, "before": BEFORE, "during": DURING}


def _about(finding: Finding, element: str) -> bool:
    return any(fnmatchcase(each, element) for each in (*finding.entities[:1], *finding.edges))


def _fate(fault: Fault, rounds: list[list[Finding]]) -> dict[str, Any]:
    """In which round after its beginning it was found, and in which after its end it was gone; None: never."""
    open_in = [
        number
        for number, found in enumerate(rounds)
        if any(each.rule == fault.rule and _about(each, fault.element) for each in found)
    ]
    told = [each.message for found in rounds for each in found if each.rule == fault.rule]
    over = BEFORE + DURING
    return {
        "rule": fault.rule, "element": fault.element, "refused": fault.refused,
        "found_in": open_in[0] - BEFORE + 1 if open_in else None,
        "gone_in": max(open_in[-1] + 1 - over + 1, 1) if open_in and open_in[-1] + 1 < len(rounds) else None,
        "message": told[0] if told else "",
    }  # fmt: skip


def _use_gpu(pid: str) -> None:
    FakeNvml(Path("."), Path(os.environ[VARIABLE])).set(
        "gpu 0", {"utilization": "30 10", "process": f"{pid}:2048:C:::30:10"}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("faults", nargs="*", choices=[[], "none", *QUICK], default=[])
    parser.add_argument("--out")
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--interval", type=float, default=INTERVAL_S)
    arguments = parser.parse_args()
    if VARIABLE not in os.environ:  # the loader reads its path once: begin anew with it
        again = [sys.executable, "-m", "tests.tools.inject", *sys.argv[1:]]
        if arguments.alone:
            unshare = shutil.which("unshare") or "unshare"
            inner = 'hostname box; ip link set lo up; exec "$@"'
            apart = ("--pid", "--fork", "--mount-proc", "--mount", "--uts", "--ipc", "--net")
            again = [unshare, *apart, "sh", "-c", inner, "sh", *again]
        try:
            folder = Path(tempfile.mkdtemp(prefix="gpuflight-inject-"))
            environment = fake_nvml(str(description(folder, {}))).environment
        except NoCompiler as error:
            raise SystemExit(str(error)) from None
        os.execve(again[0], again, {**os.environ, **environment})
    print(
        json.dumps(
            watch([] if arguments.faults == ["none"] else arguments.faults or QUICK, arguments.out, arguments.interval),
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
