"""Pairs of real processes, each joined by exactly one thing; run as a script, driven by test_capture_rig.py.

Prints one JSON line ``{"pairs": {name: [pid, pid]}, "refused": {name: why}}`` when every pair is joined, and ends all
when its stdin is closed. The pairs of ``tcp`` and ``tcp_in_namespace`` use the same loopback addresses and ports in two
network namespaces, so that an edge joined across namespaces would show.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any

libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
libc.sem_open.restype = ctypes.c_void_p
CLONE_NEWNET = 0x40000000
IPC_PRIVATE, IPC_CREAT, IPC_RMID = 0, 0o1000, 0
TAG = f"gf_capture_{os.getpid()}"
KEEP: list[Any] = []
PATIENCE_S = 20


class Refused(Exception):
    """This machine or user does not allow it."""


def check(result: int | None) -> int:
    if result is None or result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


class Step:
    """Lets the two processes of a pair wait for each other; closed, and so gone, once the pair is joined."""

    def __init__(self) -> None:
        self.ends = socket.socketpair()

    def take(self, side: int) -> None:
        self.ends[1 - side].close()
        self.end = self.ends[side]
        self.end.settimeout(PATIENCE_S)

    def tell(self, text: str = ".") -> None:
        self.end.sendall(text.encode())

    def hear(self) -> str:
        data = self.end.recv(256)
        if not data:
            raise RuntimeError("the other process of the pair ended")
        return data.decode()


def tcp(side: int, step: Step) -> None:
    if side == 0:
        listener = socket.create_server(("127.0.0.1", PORT))
        listener.settimeout(PATIENCE_S)  # the other side may have died
        step.tell()
        connection, _ = listener.accept()
        listener.close()
        KEEP.append(connection)
        connection.sendall(b"x" * 1000)
    else:
        step.hear()
        made = socket.create_connection(("127.0.0.1", PORT), source_address=("127.0.0.1", PORT + 1))
        made.recv(1000)
        KEEP.append(made)


def tcp_in_namespace(side: int, step: Step) -> None:
    if side == 0:
        path = f"/proc/{os.getpid()}/ns/net"
        if libc.unshare(CLONE_NEWNET) != 0:
            step.tell("refused")
            raise Refused(os.strerror(ctypes.get_errno()))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
            fcntl.ioctl(made, 0x8914, struct.pack("16sh14x", b"lo", 0x41))  # SIOCSIFFLAGS: up, running
        step.tell(path)
        step.hear()
    else:
        path = step.hear()
        if path == "refused":
            raise Refused("refused to the other process")
        with open(path) as namespace:
            check(libc.setns(namespace.fileno(), CLONE_NEWNET))
        step.tell()
    tcp(side, step)


def udp(side: int, step: Step) -> None:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    KEEP.append(made)
    made.bind(("127.0.0.1", 0))
    step.tell(str(made.getsockname()[1]))
    made.connect(("127.0.0.1", int(step.hear())))


def unix(side: int, step: Step) -> None:
    path = f"\0{TAG}"
    if side == 0:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()
        listener.settimeout(PATIENCE_S)
        step.tell()
        KEEP.append(listener.accept()[0])
        listener.close()
    else:
        step.hear()
        made = socket.socket(socket.AF_UNIX)
        made.connect(path)
        KEEP.append(made)


def pipe(side: int, step: Step) -> None:
    mine, other = (PIPE[1], PIPE[0]) if side == 0 else PIPE
    os.close(other)
    KEEP.append(mine)


def posix_shared_memory(side: int, step: Step) -> None:
    path = f"/dev/shm/{TAG}"
    if side == 1:
        step.hear()
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    os.ftruncate(descriptor, 8192)
    memory = mmap.mmap(descriptor, 8192)
    os.close(descriptor)  # only the mapping is left to see
    memory[0] = 1
    KEEP.append(memory)
    if side == 0:
        step.tell()


def sysv_shared_memory(side: int, step: Step) -> None:
    address = libc.shmat(SEGMENT, None, 0)
    ctypes.memset(address, 1, 8)


def memfd(side: int, step: Step) -> None:
    memory = mmap.mmap(MEMFD, 8192)
    memory[side] = 1
    KEEP.append(memory)


def message_queue(side: int, step: Step) -> None:
    attributes = (ctypes.c_long * 8)(0, 4, 64)
    name = f"/{TAG}".encode()
    if side == 1:
        step.hear()
    check(libc.mq_open(name, os.O_CREAT | (os.O_WRONLY if side == 0 else os.O_RDONLY), 0o600, attributes))
    if side == 0:
        step.tell()


def semaphore(side: int, step: Step) -> None:
    if side == 1:
        step.hear()
    made = ctypes.c_void_p(libc.sem_open(f"/{TAG}".encode(), os.O_CREAT, 0o600, 1))
    check(libc.sem_post(made))
    if side == 0:
        step.tell()


PAIRS: list[Callable[[int, Step], None]] = [
    tcp, udp, unix, pipe, posix_shared_memory, sysv_shared_memory, memfd, message_queue, semaphore, tcp_in_namespace,
]  # fmt: skip


def child(join: Callable[[int, Step], None], side: int, step: Step, report: int) -> None:
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    os.close(null)
    step.take(side)
    if join is not pipe:
        for descriptor in PIPE:
            os.close(descriptor)
    if join is not memfd:
        os.close(MEMFD)
    answer = "ok"
    try:
        join(side, step)
    except Refused as error:
        answer = f"refused {error}"
    step.end.close()
    os.write(report, f"{os.getpid()} {answer}\n".encode())
    os.close(report)
    signal.pause()


def two_free_ports() -> int:
    """The lower of two neighbouring ports that nobody holds; below the ephemeral ones, so that nobody takes them."""
    for port in range(20_000 + os.getpid() % 5_000 * 2, 32_000, 2):
        try:
            for candidate in (port, port + 1):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", candidate))
        except OSError:
            continue
        return port
    raise RuntimeError("no two free ports")


def main() -> None:
    global PORT, PIPE, SEGMENT, MEMFD
    PORT = two_free_ports()
    PIPE = os.pipe()
    MEMFD = os.memfd_create(TAG)
    os.ftruncate(MEMFD, 8192)
    SEGMENT = check(libc.shmget(IPC_PRIVATE, 8192, IPC_CREAT | 0o600))
    report_read, report_write = os.pipe()
    pids: dict[str, list[int]] = {}
    started: list[int] = []
    try:
        for join in PAIRS:
            step = Step()
            for side in (0, 1):
                pid = os.fork()
                if pid == 0:
                    try:
                        os.close(report_read)
                        child(join, side, step, report_write)
                    except BaseException:  # noqa: BLE001 - the child must not run the parent's code
                        traceback.print_exc()
                    os._exit(1)
                started.append(pid)
                pids.setdefault(join.__name__, []).append(pid)
            for end in step.ends:
                end.close()
        for descriptor in (report_write, *PIPE, MEMFD):
            os.close(descriptor)
        answers: dict[int, str] = {}
        with os.fdopen(report_read) as lines:  # ends when every child has said its word, or died
            for line in lines:
                pid_text, _, answer = line.strip().partition(" ")
                answers[int(pid_text)] = answer
        refused = {}
        for name, pair in pids.items():
            for pid in pair:
                if pid not in answers:
                    raise RuntimeError(f"{name}: process {pid} failed")
                if answers[pid] != "ok":
                    refused[name] = answers[pid]
        print(json.dumps({"pairs": pids, "refused": refused}), flush=True)
        sys.stdin.read()
    finally:
        for pid in started:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        libc.shmctl(SEGMENT, IPC_RMID, None)
        libc.mq_unlink(f"/{TAG}".encode())
        libc.sem_unlink(f"/{TAG}".encode())
        if os.path.exists(f"/dev/shm/{TAG}"):
            os.unlink(f"/dev/shm/{TAG}")


if __name__ == "__main__":
    main()
