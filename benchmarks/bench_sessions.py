"""GPU sessions in the graph: what a round costs with many that are idle, and with one that is busy.

    python benchmarks/bench_sessions.py [--sessions 1000] [--rounds 40] [--batches 800]

1. Idle sessions of this process, four files each, in rounds of 5 s (the clock is moved, nobody waits): CPU per round as
   share of one core, with notification and by looking. Goal: at most 1 % of a core for 1,000 sessions.
2. A session of columnar batches (2,048 launches and 64 launch details each) that is behind: kernels per s of CPU until
   it is caught up with, in rounds of ``bytes_per_round``; the longest round; against a bare ``json.loads`` loop that
   counts launches per kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from gpuflight.collectors.sessions import Sessions, SessionsSettings
from gpuflight.events.live import LiveSessions
from gpuflight.events.reading import LiveSettings
from gpuflight.sources.open import open_world

ROUND_S = 5.0
SETTLED = 12
ROWS = 2048
CHANNELS = ("device", "scope", "system", "sass")


class JumpingClock:
    """The machine's clocks, ahead by what was skipped."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def wall_ns(self) -> int:
        return time.time_ns() + int(self.ahead_s * 1e9)

    def monotonic_s(self) -> float:
        return time.monotonic() + self.ahead_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--batches", type=int, default=800)
    options = parser.parse_args()
    for notify in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            idle(Path(folder), options.sessions, options.rounds, notify)
    with tempfile.TemporaryDirectory() as folder:
        busy(Path(folder), options.batches)


def idle(folder: Path, sessions: int, rounds: int, notify: bool) -> None:
    for number in range(sessions):
        name = f"{number:08d}-1111-4111-8111-111111111111"
        for channel in CHANNELS:
            lines = [start(name)] + ([names(name), kernels(name, 0, 200)] if channel == "device" else [])
            write(folder / name / ".tmp" / f"{channel}.log", lines)
    clock = JumpingClock()
    world = open_world(clock=clock)
    collector = Sessions(SessionsSettings(folders=[str(folder)], notify=notify))
    costs = []
    for number in range(1, rounds + 1):
        world.begin_round(number)
        world.procfs.processes()
        before = time.process_time()
        collector.observe(world)
        shown = len(collector.seed().nodes)
        costs.append(time.process_time() - before)
        clock.ahead_s += ROUND_S
    collector.close()
    world.close()
    settled = costs[SETTLED:] or costs[-1:]
    share = 100 * sum(settled) / len(settled) / ROUND_S
    how = "notified" if notify else "looking"
    print(f"idle, {how}: {sessions} sessions, {shown} entities: {share:.2f} % of a core (goal: 1 %), "
          f"longest round {1e3 * max(settled):.0f} ms, first {1e3 * costs[0]:.0f} ms")  # fmt: skip


def busy(folder: Path, batches: int) -> None:
    path = folder / "s" / ".tmp" / "device.log"
    write(path, [start("s"), names("s"), *(kernels("s", number, ROWS) for number in range(batches))])
    live = LiveSessions([str(folder)], LiveSettings(notify=False))
    costs = []
    while True:
        before = time.process_time()
        reading = live.read()
        costs.append(time.process_time() - before)
        if not reading.lag_bytes:
            break
    launches = reading.sessions[0].launches
    assert launches == batches * ROWS
    live.close()
    before = time.process_time()
    assert sum(naive(path).values()) == launches
    plain_s = time.process_time() - before
    rate, ratio = launches / sum(costs) / 1e6, plain_s / sum(costs)
    print(f"busy: {rate:.2f} M kernels/s, {len(costs)} rounds, longest {1e3 * max(costs):.0f} ms; "
          f"{ratio:.1f} x a json.loads loop")  # fmt: skip


def naive(path: Path) -> dict[int, int]:
    counts: dict[int, int] = {}
    with open(path, "rb") as file:
        for line in file:
            event = json.loads(line)
            if event["type"] == "kernel_event_batch":
                for row in event["rows"]:
                    counts[row[1]] = counts.get(row[1], 0) + 1
    return counts


def write(path: Path, lines: list[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(lines))


def event(wire_type: str, session: str, **fields: Any) -> bytes:
    fields = {"version": 1, "type": wire_type, "session_id": session, **fields}
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"  # as the format's writers: without blanks


def start(session: str) -> bytes:
    devices = [{"id": number, "uuid": f"GPU-{number}", "name": "H100"} for number in range(8)]
    return event("job_start", session, pid=os.getpid(), app="bench", ts_ns=time.time_ns() + 10**9,
                 hostname=socket.gethostname(), devices=devices)  # fmt: skip


def names(session: str) -> bytes:
    return event(
        "dictionary_update", session, kernel_dict={str(number): f"kernel_{number}" for number in range(1, 101)}
    )


def kernels(session: str, number: int, rows: int) -> bytes:
    base = number * rows
    launches = [[n * 1000, 1 + n % 100, 7 + n % 4, 500 + n % 977, base + n] for n in range(rows)]
    details = [event("kernel_detail", session, pid=1, app="bench", corr_id=base + n, occupancy=0.5) for n in range(64)]
    batch = event("kernel_event_batch", session, batch_id=number + 1, base_time_ns=time.time_ns(), rows=launches,
                  columns=["dt_ns", "kernel_id", "stream_id", "duration_ns", "corr_id"])  # fmt: skip
    return batch + b"".join(details)


if __name__ == "__main__":
    main()
