"""The agent while nothing happens: CPU share of one core with many live sessions.

    python benchmarks/bench_agent.py [--sessions 1000] [--idle-s 10] [--settle-s 4]

Sessions of generation E in one folder, each with its lock held by a living process, one finished window (delivered and
acknowledged before the measurement) and four files that are being written and have not grown for an hour. The agent is
a process of its own, as users start it; its receiver is a plain HTTP server in another, which acknowledges everything.
Windows as files (``--type=http``), then line by line (``--live``). Goal: at most 1 % of a core for 1,000 sessions.

Floor: the same process that only follows the folder (``Tailer``), see bench_tail.py.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gzip
import http.server
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

CHANNELS = ("device", "scope", "system", "sass")
HOUR_AGO_S = time.time() - 3600
TICKS = os.sysconf("SC_CLK_TCK")


class Receiver(http.server.BaseHTTPRequestHandler):
    """Says that it has everything."""

    protocol_version = "HTTP/1.1"
    requests = 0

    def do_POST(self) -> None:
        Receiver.requests += 1
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        answer = b'{"accepted_for_processing": true, "window_acknowledged": true}'
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *values: object) -> None:  # noqa: A002 (its name)
        pass


def receive(pipe: Connection) -> None:
    """In a process of its own: the port, then on demand how many requests came."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pipe.send(server.server_address[1])
    with contextlib.suppress(EOFError):
        while pipe.recv():
            pipe.send(Receiver.requests)


def make_session(folder: Path, number: int) -> None:
    """A session whose writer has said nothing for an hour."""
    identifier = folder.name
    (folder / ".tmp").mkdir(parents=True)
    start = {"type": "job_start", "session_id": identifier, "pid": number, "app": "train", "ts_ns": time.time_ns()}
    line = msgspec.json.encode(start) + b"\n"
    for channel in CHANNELS:
        (folder / ".tmp" / f"{channel}.log").write_bytes(line)
    payload = gzip.compress(line)
    (folder / "device.1.log.gz").write_bytes(payload)
    sidecar = {
        "type": "transport_window",
        "schema_version": 1,
        "window_id": f"{identifier}-device-1",
        "session_id": identifier,
        "channel": "device",
        "window_sequence": 1,
        "payload_file": "device.1.log.gz",
        "payload_bytes": len(payload),
        "payload_crc32": zlib.crc32(payload),
        "created_wall_ms": int(HOUR_AGO_S * 1000),
    }
    (folder / ".gpufl-window.device.1.json").write_bytes(msgspec.json.encode(sidecar))
    (folder / ".gpufl-session.lock").touch()
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (HOUR_AGO_S, HOUR_AGO_S))


def hold_locks(root: str, pipe: Connection) -> None:
    """The writer of all sessions, for as long as the pipe is open."""
    files = []
    for name in os.listdir(root):
        file = open(f"{root}/{name}/.gpufl-session.lock", "r+b")  # noqa: SIM115 (held)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        files.append(file)
    pipe.send(len(files))
    with contextlib.suppress(EOFError):
        pipe.recv()


@contextlib.contextmanager
def beside(work: object, *values: object) -> Iterator[Connection]:
    """A process with a pipe to it."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=work, args=(*values, theirs), daemon=True)  # type: ignore[arg-type]
    process.start()
    try:
        yield ours
    finally:
        ours.close()
        process.terminate()
        process.join()


def cpu_s(pid: int) -> float:
    """CPU time of a process and of all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def measure(root: str, state: str, mode: list[str], idle_s: float, settle_s: float, sessions: int) -> None:
    with beside(hold_locks, root) as writer, beside(receive) as receiver:
        assert writer.recv() == sessions
        port = receiver.recv()
        command = [sys.executable, "-m", "gpuflight.cli", "agent", f"--folder={root}", "--type=http"]
        command += [f"--url=http://127.0.0.1:{port}", f"--state-folder={state}", *mode]
        agent = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            began, requests, before = time.monotonic(), -1, -2
            while requests != before or not requests:  # until nothing comes any more
                time.sleep(settle_s / 2)
                receiver.send(True)
                before, requests = requests, receiver.recv()
            settled_s = time.monotonic() - began
            time.sleep(settle_s)
            first, cpu = time.monotonic(), cpu_s(agent.pid)
            time.sleep(idle_s)
            share = (cpu_s(agent.pid) - cpu) / (time.monotonic() - first)
            receiver.send(True)
            late = receiver.recv() - requests
        finally:
            agent.terminate()
            agent.wait()
    how = " ".join(mode) or "--type=http"
    print(
        f"agent {how}: {sessions} live sessions, {requests:,} requests in {settled_s:.0f} s, "
        f"then idle at {share:.2%} of a core (goal 1 %), {late} requests meanwhile"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--idle-s", type=float, default=10)
    parser.add_argument("--settle-s", type=float, default=4)
    options = parser.parse_args()
    for mode in ([], ["--live"]):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder) / "logs"
            for number in range(options.sessions):
                make_session(root / f"session-{number:04d}", number)
            state = str(Path(folder) / "state")
            measure(str(root), state, mode, options.idle_s, options.settle_s, options.sessions)


if __name__ == "__main__":
    main()
