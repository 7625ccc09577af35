"""How long `gpuflight --help` takes, and what importing gpuflight costs, against a bare interpreter in the same run.

Each is started REPEATS times; the median counts. Fails (exit code 1) above the limits of the product.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

REPEATS = 15
HELP_LIMIT_MS = 150.0

PROGRAM = str(Path(sys.executable).with_name("gpuflight"))

CASES = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "import gpuflight": [sys.executable, "-c", "import gpuflight"],
    "gpuflight --help": [PROGRAM, "--help"],
    "gpuflight run --help": [PROGRAM, "run", "--help"],
    "gpuflight version": [PROGRAM, "version"],
    "gpuflight plugins": [PROGRAM, "plugins"],
}


def median_ms(argv: list[str]) -> float:
    """Median wall time of a process, ms; the first run, which warms the file cache, does not count."""
    times = []
    for _ in range(REPEATS + 1):
        started_s = time.perf_counter()
        subprocess.run(argv, stdout=subprocess.DEVNULL, check=True)
        times.append((time.perf_counter() - started_s) * 1e3)
    return statistics.median(times[1:])


def main() -> int:
    """Measure and print; 1 if a limit is passed."""
    found = {name: median_ms(argv) for name, argv in CASES.items()}
    bare_ms = found["python -c pass"]
    for name, taken_ms in found.items():
        print(f"{name:24} {taken_ms:7.1f} ms  {taken_ms / bare_ms:5.1f}x a bare interpreter")
    return int(found["gpuflight --help"] > HELP_LIMIT_MS)


if __name__ == "__main__":
    sys.exit(main())
