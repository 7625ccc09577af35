"""`gpuflight report` and `gpuflight export` of a large session, as a user runs them.

    python benchmarks/bench_report.py [--lines 1000000] [--runs 3] [--keep FOLDER]

The session is that of bench_events_decode.py (at 1 M lines 900 k kernels with details, about 650 MB of JSON). Each
command runs in a process of its own: wall time, CPU time and peak RSS, the median of the runs. Goal: a report of 1 M
lines in a few seconds (GPU Flight's own reports: 18 s and 911 MB, or 4 s and 1.6 GB, for one of its 14 windows; its
analyzer: 142 s and 4.8 GB for all of them).
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

from bench_events_decode import write_session
from gpuflight.events.files import find_sessions

COMMANDS = {
    "report (text)": ["report", "{folder}"],
    "report (html)": ["report", "{folder}", "--html", "{out}/report.html", "--force"],
    "export trace": ["export", "{folder}", "--out", "{out}/trace.json", "--force"],
    "export parquet": ["export", "{folder}", "--as", "parquet", "--out", "{out}/kernel.parquet", "--force"],
    "export arrow": ["export", "{folder}", "--as", "arrow", "--out", "{out}/kernel.arrows", "--force"],
}


def run(words: list[str]) -> tuple[float, float, int]:
    """Wall and CPU seconds, peak RSS in MB."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    program = (
        "import resource, sys; from gpuflight.cli import main; code = main(sys.argv[1:]);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, cpu, int(done.stderr.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--keep", default="", help="folder for the session; used again if it is there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or os.path.join(temporary, "logs")
        os.makedirs(folder, exist_ok=True)
        if not find_sessions(folder):
            print(f"{write_session(folder, options.lines):,} kernels")
        for name, words in COMMANDS.items():
            filled = [word.format(folder=folder, out=temporary) for word in words]
            runs = [run(filled) for _ in range(options.runs)]
            wall, cpu, peak = (statistics.median(values) for values in zip(*runs, strict=True))
            print(f"{name:16} {wall:6.2f} s wall, {cpu:6.2f} s CPU, {peak:.0f} MB peak")


if __name__ == "__main__":
    main()
