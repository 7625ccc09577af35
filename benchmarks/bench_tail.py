"""The tailer: what it costs while nothing happens, while much happens, and when it has to catch up.

    python benchmarks/bench_tail.py [--sessions 1000] [--idle-s 60] [--lines-per-s 100000] [--live-s 20] [--big-mb 650]

1. Idle tail of live sessions (four files being written in each, none of which has grown for an hour): CPU share of
   one core, with notification and by looking. Goal: at most 1 % of a core for 1,000 sessions.
2. Lines written by another process at a steady rate, flushed as a writer without flush per line does, windows rotated
   and compressed: CPU share, lag from write to hand-out in poll intervals (p50, p99), lines lost or doubled (goal: 0).
3. Catching up on a folder, plain and compressed: MB/s against a bare read loop (read in 1 MiB pieces, count newlines;
   the compressed one through the same inflater). Goal: at least half of it.
"""

from __future__ import annotations

import argparse
import gzip
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from gpuflight.events.files.inflate import chunks as inflated
from gpuflight.events.tail import Tailer, TailSettings

POLL_S = 0.25
HOUR_AGO_S = time.time() - 3600
CHANNELS = ("device", "scope", "system", "sass")

WRITER = r"""
import gzip, os, sys, time
folder, rate, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
temporary = os.path.join(folder, ".tmp")
path = os.path.join(temporary, "device.log")
number = window = 0
file = open(path, "ab", buffering=8192)
began = time.monotonic()
pad = "x" * 90
while (passed := time.monotonic() - began) < seconds:
    while number < rate * passed:
        now = time.time_ns()
        for _ in range(100):
            number += 1
            file.write(b'{"version":1,"type":"memset_event","n":%d,"t":%d,"p":"%s"}\n' % (number, now, pad.encode()))
    if file.tell() > 64 << 20:
        file.close()
        window += 1
        retired = os.path.join(temporary, f"device.{window}.log")
        os.rename(path, retired)
        file = open(path, "ab", buffering=8192)
        if os.fork() == 0:
            with open(retired, "rb") as raw, gzip.open(retired + ".gz.part", "wb", 1) as packed:
                while piece := raw.read(1 << 20):
                    packed.write(piece)
            os.rename(retired + ".gz.part", retired + ".gz")
            os.unlink(retired)
            os.rename(retired + ".gz", os.path.join(folder, f"device.{window}.log.gz"))
            os._exit(0)
    time.sleep(0.002)
file.close()
print(number)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--idle-s", type=float, default=60)
    parser.add_argument("--lines-per-s", type=int, default=100_000)
    parser.add_argument("--live-s", type=float, default=20)
    parser.add_argument("--big-mb", type=int, default=650)
    options = parser.parse_args()
    idle(options.sessions, options.idle_s)
    live(options.lines_per_s, options.live_s)
    catch_up(options.big_mb)


def idle(sessions: int, seconds: float) -> None:
    with tempfile.TemporaryDirectory() as root:
        for number in range(sessions):
            temporary = Path(root) / f"session{number}" / ".tmp"
            temporary.mkdir(parents=True)
            for channel in CHANNELS:
                path = temporary / f"{channel}.log"
                path.write_bytes(b'{"type":"job_start","n":%d}\n' % number)
                os.utime(path, (HOUR_AGO_S, HOUR_AGO_S))
            os.utime(temporary, (HOUR_AGO_S, HOUR_AGO_S))
            os.utime(temporary.parent, (HOUR_AGO_S, HOUR_AGO_S))
        for notify in (True, False):
            tailer = Tailer(root, settings=TailSettings(notify=notify, poll_interval_s=POLL_S))
            while found := tailer.poll():
                for chunk in found:
                    tailer.commit(chunk)
            run(tailer, 6)  # past the looks that follow the first one
            began, cpu = time.monotonic(), time.process_time()
            run(tailer, seconds)
            share = (time.process_time() - cpu) / (time.monotonic() - began)
            how = "notified" if tailer.notified else "looking"
            print(f"idle, {sessions} sessions, {how}: {share:.2%} of a core (goal 1 %), ratio {share / 0.01:.2f}")
            tailer.close()


def run(tailer: Tailer, seconds: float) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        for chunk in tailer.poll():
            tailer.commit(chunk)
        tailer.wait(left)


def live(rate: int, seconds: float) -> None:
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "logs" / "session"
        (folder / ".tmp").mkdir(parents=True)
        tailer = Tailer(
            str(folder.parent),
            str(Path(root) / "checkpoint.json"),
            TailSettings(poll_interval_s=POLL_S, gone_wait_s=1),
        )
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), str(rate), str(seconds)], stdout=subprocess.PIPE
        )
        began, cpu = time.monotonic(), time.process_time()
        lags: list[tuple[float, int]] = []
        count, total = 0, 0
        written, share = 0, 0.0
        quiet_s = time.monotonic()
        while not written or time.monotonic() - quiet_s < 3:
            found = tailer.poll()
            now = time.time_ns()
            for chunk in found:
                lines = chunk.data.count(b"\n") + (not chunk.data.endswith(b"\n"))
                count += lines
                total += number_sum(chunk.data)
                at = chunk.data.find(b'"t":')
                lags.append(((now - int(chunk.data[at + 4 : chunk.data.index(b",", at)])) / 1e9, lines))
                tailer.commit(chunk)
            if found:
                quiet_s = time.monotonic()
            if not written and writer.poll() is not None:
                assert writer.stdout is not None
                written = int(writer.stdout.read())
                share = (time.process_time() - cpu) / (time.monotonic() - began)
            tailer.wait(POLL_S)
        tailer.close()
        lags.sort()
        sums = "agree" if total == written * (written + 1) // 2 else "DIFFER"
        p50, p99 = (at_share(lags, part) / POLL_S for part in (0.5, 0.99))
        print(
            f"live, {written / seconds:,.0f} lines/s: {share:.1%} of a core, lag p50 {p50:.2f}, p99 {p99:.2f} poll"
            f" intervals of {POLL_S} s; {written - count} lines lost (goal 0), sums {sums}"
        )


def number_sum(data: bytes) -> int:
    """Of the numbers of lines: tells lost and doubled ones apart from each other's making up."""
    return sum(int(part[: part.index(b",")]) for part in data.split(b'"n":')[1:])


def at_share(lags: list[tuple[float, int]], share: float) -> float:
    """Of each chunk's oldest line, weighed by its lines."""
    left = share * sum(lines for _, lines in lags)
    for lag, lines in lags:
        left -= lines
        if left <= 0:
            return lag
    return lags[-1][0]


def catch_up(megabytes: int) -> None:
    with tempfile.TemporaryDirectory() as root:
        for packed in (False, True):
            folder = Path(root) / ("packed" if packed else "plain") / "session"
            folder.mkdir(parents=True)
            size = make(folder, megabytes << 20, packed)
            best: dict[str, float] = {}
            for _ in range(3):
                for name, work in (("bare loop", bare), ("tailer", tail)):
                    best[name] = min(best.get(name, 1e9), timed(work, folder, size))
            speeds = {name: size / seconds / 1e6 for name, seconds in best.items()}
            ratio = speeds["tailer"] / speeds["bare loop"]
            kind = "compressed" if packed else "plain"
            print(
                f"catching up, {size >> 20} MiB {kind}: {speeds['tailer']:,.0f} MB/s against {speeds['bare loop']:,.0f}"
                f" of the bare loop, ratio {ratio:.2f} (goal 0.5)"
            )


def make(folder: Path, size: int, packed: bool) -> int:
    total = number = window = 0
    while total < size:
        window += 1
        made: list[bytes] = []
        length = 0
        while length < min(64 << 20, size):
            number += 1
            made.append(
                b'{"version":1,"type":"kernel_detail","corr_id":%d,"grid":[%d,1,1],"pad":"abc"}\n'
                % (number, number % 97)
            )
            length += len(made[-1])
        data = b"".join(made)
        total += len(data)
        path = folder / f"device.{window}.log"
        path.write_bytes(data)
        if packed:
            Path(f"{path}.gz").write_bytes(gzip.compress(data, 6))
            path.unlink()
    return total


def timed(work: Callable[[Path], tuple[int, int]], folder: Path, size: int) -> float:
    began = time.perf_counter()
    read, _ = work(folder)
    seconds = time.perf_counter() - began
    if read != size:
        raise SystemExit(f"{work.__name__} read {read} of {size} bytes")
    return seconds


def bare(folder: Path) -> tuple[int, int]:
    read = lines = 0
    for name in sorted(os.listdir(folder)):
        for piece in inflated(f"{folder}/{name}", name.endswith(".gz")):
            read += len(piece)
            lines += piece.count(b"\n")
    return read, lines


def tail(folder: Path) -> tuple[int, int]:
    read = lines = 0
    with Tailer(str(folder.parent), settings=TailSettings(notify=False)) as tailer:
        while found := tailer.poll():
            for chunk in found:
                read += len(chunk.data)
                lines += chunk.data.count(b"\n")
                tailer.commit(chunk)
    return read, lines


if __name__ == "__main__":
    main()
