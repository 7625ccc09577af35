"""What ``gpuflight doctor`` costs on this machine, and when it says something first.

    bench_doctor.py [--seconds 15]

The whole command, from its start to its exit code: CPU time of the process and its children over its wall time, and
when the first verdict appears on stderr. Beside it the floor: as many rounds of `gpuflight run` without rules.
Goals: the first verdict at most 5 s after the start, at most 10 % of one core.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FIRST_GOAL_S = 5.0
CPU_GOAL_PCT = 10.0
PROGRAM = str(Path(sys.executable).with_name("gpuflight"))


def measured(*arguments: str) -> tuple[float, float, float | None]:
    """CPU seconds, wall seconds, and seconds to the first line that begins with ``after``."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began_s = time.monotonic()
    first_s: float | None = None
    with subprocess.Popen(
        [PROGRAM, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if first_s is None and line.startswith("after "):
                first_s = time.monotonic() - began_s
    wall_s = time.monotonic() - began_s
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall_s, first_s


def main() -> int:
    """Measure and print; 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=15.0)
    seconds = str(parser.parse_args().seconds)
    with tempfile.TemporaryDirectory() as folder:
        run = ("run", "--offline", seconds, "--interval", "1", "--set", "rules.enabled=false", "--out", folder)
        floor_s, floor_wall_s, _ = measured(*run)
    cpu_s, wall_s, first_s = measured("doctor", "--seconds", seconds)
    share = 100 * cpu_s / wall_s
    shown_s = first_s if first_s is not None else float("nan")
    for name, used_s, took_s in (("rounds without rules", floor_s, floor_wall_s), ("gpuflight doctor", cpu_s, wall_s)):
        print(f"{name:21} {used_s:6.2f} s CPU in {took_s:5.1f} s: {100 * used_s / took_s:4.1f} % of a core")
    print(f"                      {cpu_s / floor_s:6.2f}x the rounds without rules; goal {CPU_GOAL_PCT:g} % of a core")
    print(f"first verdict         {shown_s:6.2f} s after the start; goal {FIRST_GOAL_S:g} s")
    return int(first_s is None or first_s > FIRST_GOAL_S or share > CPU_GOAL_PCT)


if __name__ == "__main__":
    sys.exit(main())
