"""A made-up RAS of NCCL: its client protocol, in JSON and in text, and the ways in which one may fail.

with RasServer(job) as ras: ...   # ras.port; ras.commands: what was asked

As a program it is a rank: ``ras_server.py LIBRARY GPU PORT [netns]`` maps and opens these files, listens, in a network
namespace of its own if asked to, says ``ready``, and ends with its standard input. It is behind another rank.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import socket
import struct
import sys
import threading
from dataclasses import dataclass, field
from typing import Any, Literal

Manner = Literal["well", "silent", "slow", "garbage", "endless", "endless line", "cut", "closes", "refuses", "http"]
OPERATIONS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")


@dataclass
class FakeRank:
    """A rank of the one communicator. ``absent``: how RAS says that it is not there; None for one that answers."""

    pid: int
    host: str = "10.0.0.1"
    all_reduces: int = 41
    state: str = "RUNNING"
    error: int = 0
    absent: Literal["unresponsive", "dead", "left"] | None = None


@dataclass
class FakeJob:
    """What RAS knows. ``version`` decides what it can: JSON from 2.28.7 on, in 2.28.9 without a comma."""

    ranks: list[FakeRank]
    version: str = "2.29.7+cuda12.9"
    timeouts: int = 0

    @property
    def speaks_json(self) -> bool:
        return tuple(map(int, self.version.partition("+")[0].split("."))) >= (2, 28, 7)

    def json(self) -> bytes:
        ranks, missing = [], []
        for number, rank in enumerate(self.ranks):
            head: dict[str, Any] = {"rank": number, "host": rank.host, "pid": rank.pid, "cuda_dev": 0, "nvml_dev": 0}
            if rank.absent is not None:
                gone = {"unresponsive": rank.absent != "left", "considered_dead": rank.absent == "dead"}
                missing.append({**head, "status": gone})
                continue
            status = {
                "init_state": 7 if rank.state == "INIT" else 0, "async_error": rank.error,
                "finalize_called": rank.state == "FINALIZE", "destroy_flag": False, "abort_flag": rank.state == "ABORT",
            }  # fmt: skip
            counts = {name: rank.all_reduces if name == "AllReduce" else 2 for name in OPERATIONS}
            ranks.append({**head, "status": status, "collective_counts": counts})
        communicator = {
            "hash": "0x1f2e3d", "secondary_hash": "0x1:0x2", "size": len(self.ranks), "ranks_count": len(ranks),
            "missing_ranks_count": len(missing), "ranks": ranks, "missing_ranks": missing,
        }  # fmt: skip
        answer = {
            "nccl_version": self.version, "cuda_runtime_version": 12090, "cuda_driver_version": 13000,
            "timestamp": "2026-11-30 10:00:00", "communicators_count": 1, "communicators": [communicator],
            "ras": {"collection_time_sec": 0.003, "timeouts_count": self.timeouts},
        }  # fmt: skip
        text = json.dumps(answer, indent=2)
        if self.version.startswith("2.28.9"):
            gone_at = text.index('"missing_ranks": [')
            text = text[:gone_at] + text[gone_at:].replace('"nvml_dev": 0,', '"nvml_dev": 0')
        return text.encode() + b"\n"

    def text(self) -> bytes:
        """As NCCL's own client shows it: the summary, "Errors", "Warnings"."""
        there = [(number, rank) for number, rank in enumerate(self.ranks) if rank.absent is None]
        lost = [(number, rank) for number, rank in enumerate(self.ranks) if rank.absent in ("unresponsive", "dead")]
        most = max((rank.all_reduces for _, rank in there), default=0)
        behind = [(number, rank) for number, rank in there if rank.all_reduces < most]
        errors = ",".join(["INCOMPLETE"] * bool(lost) + ["MISMATCH"] * bool(behind)) or "OK"
        size = len(self.ranks)
        lines = [
            f"NCCL version {self.version} compiled with CUDA 12.9", "CUDA runtime version 12090, driver version 13000",
            "", "Job summary", "===========", "", "  Nodes  Processes         GPUs  Processes     GPUs",
            "(total)   per node  per process    (total)  (total)", f"      1  {size:9}  {1:11}  {size:9}  {size:7}", "",
            "Communicators... (0.00s)", "=============", "",
            "Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors",
            "    #  in group  per comm  per node  per comm  in group",
            f"    0  {1:8}  {1:8}  {size:8}  {size:8}  {len(there):8}   RUNNING  {errors:>6}", "",
            "Errors", "======", "",
        ]  # fmt: skip
        if lost:
            lines += ["INCOMPLETE", f"  Missing communicator data from {len(lost)} job process(es)"]
            lines += [f"  Process {rank.pid} on node {rank.host} managing GPU 0" for _, rank in lost]
            lines += ["", "#0-0 (00000000001f2e3d) INCOMPLETE", f"  Missing communicator data from {len(lost)} ranks"]
            lines += [f"  Rank {n} -- GPU 0 managed by process {rank.pid} on node {rank.host}" for n, rank in lost]
            lines += [""]
        lines += ["Warnings", "========", ""]
        if self.timeouts:
            lines += ["TIMEOUT", f"  Encountered {self.timeouts} communication timeouts while gathering data", ""]
        if behind:
            lines += [
                "#0-0 (00000000001f2e3d) MISMATCH",
                "  Communicator ranks have different AllReduce operation counts",
            ]
            lines += [f"  {len(there) - len(behind)} ranks have launched up to operation {most}"]
            for number, rank in behind:
                lines += [
                    f"  Rank {number} has launched up to operation {rank.all_reduces} -- GPU 0 (NVML 3) managed by "
                    f"process {rank.pid} on node {rank.host}"
                ]
            lines += [""]
        return "\n".join(lines).encode() + b"\n"


@dataclass
class RasServer:
    """Listens on loopback, as the thread in a rank does. ``manners``: of one connection after the other, the last of
    them of all that follow."""

    job: FakeJob
    manners: tuple[Manner, ...] = ("well",)
    commands: list[str] = field(default_factory=list)
    connections: int = 0
    port: int = 0

    def __enter__(self) -> RasServer:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(5)

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            manner = self.manners[min(self.connections, len(self.manners) - 1)]
            self.connections += 1
            thread = threading.Thread(target=self._serve, args=(link, manner), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, link: socket.socket, manner: Manner) -> None:
        with link:
            try:
                self._talk(link, manner)
            except OSError:
                pass  # it went away, as it may

    def _talk(self, link: socket.socket, manner: Manner) -> None:
        if manner == "silent":
            self._ended.wait(30)
            return
        structured = False
        for line in link.makefile("r", encoding="ascii"):
            command = line.strip().lower()
            self.commands.append(line.strip())
            if manner == "http":
                link.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                return
            if manner == "endless line":
                link.sendall(b"x" * 4096)
            elif command.startswith("client protocol "):
                link.sendall(b"SERVER PROTOCOL 2\n")
            elif command.startswith("timeout "):
                link.sendall(b"ERROR: Invalid timeout value\n" if manner == "refuses" else b"OK\n")
            elif command == "set format json" and self.job.speaks_json:
                structured = True
                link.sendall(b"OK\n")
            elif command in ("status", "verbose status"):
                self._answer(link, manner, self.job.json() if structured else self.job.text())
                return
            else:
                link.sendall(b"ERROR: Unknown command " + line.strip().encode() + b"\n")

    def _answer(self, link: socket.socket, manner: Manner, answer: bytes) -> None:
        if manner == "slow":
            while not self._ended.wait(0.02):
                link.sendall(b" ")
        elif manner == "garbage":
            link.sendall(b'\xff\x00{"communicators": 7}\n')
        elif manner == "endless":
            while not self._ended.is_set():
                link.sendall(b" " * (1 << 16))
        elif manner == "cut":
            link.sendall(answer[: len(answer) // 2])
        elif manner != "closes":
            link.sendall(answer)


def _own_network() -> None:
    """A network namespace with nothing but loopback, which is up."""
    if ctypes.CDLL(None, use_errno=True).unshare(0x4000_0000) != 0:  # CLONE_NEWNET
        raise OSError(ctypes.get_errno(), "unshare")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", 0x1))  # SIOCSIFFLAGS, IFF_UP


def _be_a_rank(library: str, gpu: str, port: str, *rest: str) -> None:
    if rest:
        _own_network()
    job = FakeJob([FakeRank(os.getpid(), "127.0.0.1", 41), FakeRank(1 << 30, "192.0.2.7", 42)])
    with (
        open(library, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ),
        open(gpu, "rb"),
        RasServer(job, port=int(port)),
    ):
        print("ready", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    _be_a_rank(*sys.argv[1:])
