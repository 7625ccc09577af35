"""How long this machine keeps a process waiting that wants to run; the idea of jHiccup (G. Tene).

    python -m tests.chaos.stalls FILE

Sleeps 20 ms, then works for 1 ms of CPU time, again and again, and writes a line for each time that took 10 ms longer
than that: when it began (s since the epoch) and how much longer it took (s). It ends when its standard input does.
"""

from __future__ import annotations

import os
import select
import sys
import time

SLEEP_S, WORK_S, WORTH_S = 0.02, 0.001, 0.01


def measure(path: str) -> None:
    """Measure until the end of standard input."""
    with open(path, "w", buffering=1) as out:
        while True:
            began_s, began_wall_s = time.monotonic(), time.time()
            if select.select([sys.stdin], [], [], SLEEP_S)[0] and not os.read(sys.stdin.fileno(), 1):
                return
            worked_s = time.thread_time()
            while time.thread_time() - worked_s < WORK_S:
                pass
            longer_s = time.monotonic() - began_s - SLEEP_S - WORK_S
            if longer_s > WORTH_S:
                out.write(f"{began_wall_s:.4f} {longer_s:.4f}\n")


if __name__ == "__main__":
    measure(sys.argv[1])
