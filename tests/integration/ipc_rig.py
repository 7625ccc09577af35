"""A rig of real processes that exchange data in every way gpuflight knows; run as a script, driven by the tests.

R (this script) forks A, B, C and D. A and B share one object of each kind; C blocks in msgrcv(2) on a second System V
queue, D in semop(2) on a second set. When all is set up R prints one JSON line with pids and ids, and ends all when its
stdin is closed.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from multiprocessing import resource_tracker, shared_memory

libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
libc.sem_open.restype = ctypes.c_void_p
IPC_PRIVATE, IPC_CREAT, IPC_RMID = 0, 0o1000, 0
WAIT_FOR_EVER = struct.pack("=HhH", 0, -1, 0)
POST_FIRST = struct.pack("=HhH", 0, 1, 0)
POST_SECOND = struct.pack("=HhH", 1, 1, 0)


class MqAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("flags", "maxmsg", "msgsize", "curmsgs")] + [
        ("pad", ctypes.c_long * 4)
    ]


def check(result: int | None) -> int:
    if result is None or result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def touch(descriptor: int) -> mmap.mmap:
    memory = mmap.mmap(descriptor, 8192)
    memory[0] = 1
    return memory


def main() -> None:
    tag = f"gf_rig_{os.getpid()}"
    fifo = f"/tmp/{tag}.fifo"
    os.mkfifo(fifo)
    pipe_read, pipe_write = os.pipe()
    ready_read, ready_write = os.pipe()
    turn_read, turn_write = os.pipe()  # B goes after A
    memfd = os.memfd_create(tag)
    os.ftruncate(memfd, 8192)
    anonymous = mmap.mmap(-1, 16384)
    segment = check(libc.shmget(IPC_PRIVATE, 12288, IPC_CREAT | 0o600))
    queue, queue_of_c = (check(libc.msgget(IPC_PRIVATE, IPC_CREAT | 0o600)) for _ in range(2))
    semaphores = check(libc.semget(IPC_PRIVATE, 2, IPC_CREAT | 0o600))
    semaphores_of_d = check(libc.semget(IPC_PRIVATE, 1, IPC_CREAT | 0o600))
    named, mq = f"/{tag}_sem".encode(), f"/{tag}_mq".encode()
    keep: list[object] = []

    def both(who: str) -> None:
        first = who == "a"
        if first:
            os.close(pipe_read)
            keep.append(shared_memory.SharedMemory(f"{tag}_py", create=True, size=4096))
            resource_tracker.unregister(f"/{tag}_py", "shared_memory")
            raw = os.open(f"/dev/shm/{tag}_raw", os.O_CREAT | os.O_RDWR, 0o600)
            os.ftruncate(raw, 8192)
        else:
            os.close(pipe_write)
            os.close(turn_write)
            os.read(turn_read, 1)
            keep.append(shared_memory.SharedMemory(f"{tag}_py"))
            resource_tracker.unregister(f"/{tag}_py", "shared_memory")
            raw = os.open(f"/dev/shm/{tag}_raw", os.O_RDWR)
        os.close(turn_read)
        keep.append(touch(raw))
        os.close(raw)
        keep.append(touch(memfd))
        os.close(memfd)
        anonymous[0] = 1
        address = libc.shmat(segment, None, 0)
        ctypes.memset(address, 1, 8)
        attributes = MqAttributes(0, 4, 64, 0)
        flags = os.O_CREAT | os.O_WRONLY if first else os.O_RDONLY
        check(libc.mq_open(mq, flags, 0o600, ctypes.byref(attributes)))
        semaphore = ctypes.c_void_p(libc.sem_open(named, os.O_CREAT if first else 0, 0o600, 1))
        check(libc.sem_post(semaphore))
        message = ctypes.create_string_buffer(struct.pack("=l16s", 1, b"hello"))
        if first:
            check(libc.msgsnd(queue, message, 16, 0))
            check(libc.semop(semaphores, POST_FIRST, 1))
            os.write(turn_write, b"x")
            os.close(turn_write)
        else:
            check(libc.msgrcv(queue, message, 16, 0, 0))
            check(libc.semop(semaphores, POST_SECOND, 1))
        os.write(ready_write, b"x")
        keep.append(os.open(fifo, os.O_WRONLY if first else os.O_RDONLY))  # each waits for the other
        os.write(ready_write, b"x")
        signal.pause()

    def only_ready() -> None:
        for descriptor in (pipe_read, pipe_write, memfd, turn_read, turn_write):
            os.close(descriptor)
        os.write(ready_write, b"xx")
        os.close(ready_write)

    def c(_who: str) -> None:
        only_ready()
        message = ctypes.create_string_buffer(64)
        libc.msgrcv(queue_of_c, message, 16, 0, 0)

    def d(_who: str) -> None:
        only_ready()
        libc.semop(semaphores_of_d, WAIT_FOR_EVER, 1)

    roles: dict[str, Callable[[str], None]] = {"a": both, "b": both, "c": c, "d": d}
    pids: dict[str, int] = {"r": os.getpid()}
    for who, role in roles.items():
        pid = os.fork()
        if pid == 0:
            try:
                null = os.open("/dev/null", os.O_RDWR)
                os.dup2(null, 0)
                os.dup2(null, 1)
                os.close(ready_read)
                role(who)
            except BaseException:  # noqa: BLE001 - whatever it is, the child must not run the parent's code
                traceback.print_exc()
            os._exit(1)
        pids[who] = pid
    try:
        inodes = {"pipe": os.fstat(pipe_read).st_ino, "fifo": os.stat(fifo).st_ino}
        inodes["memfd"] = os.fstat(memfd).st_ino
        for descriptor in (pipe_read, pipe_write, ready_write, turn_read, turn_write, memfd):
            os.close(descriptor)
        anonymous.close()
        got = 0
        while got < 8:
            more = len(os.read(ready_read, 8))
            if not more:
                raise RuntimeError("a child failed")
            got += more
        os.unlink(f"/dev/shm/{tag}_raw")
        ids = {"segment": segment, "queue": queue, "queue_of_c": queue_of_c}
        ids |= {"semaphores": semaphores, "semaphores_of_d": semaphores_of_d}
        print(json.dumps({"tag": tag, "pids": pids, "inodes": inodes, "ids": ids}), flush=True)
        sys.stdin.read()
    finally:
        for who in roles:
            os.kill(pids[who], signal.SIGKILL)
            os.waitpid(pids[who], 0)
        for name in (fifo, f"/dev/shm/{tag}_py", f"/dev/shm/{tag}_raw"):
            if os.path.exists(name):
                os.unlink(name)
        libc.mq_unlink(mq)
        libc.sem_unlink(named)
        libc.shmctl(segment, IPC_RMID, None)
        for identifier in (queue, queue_of_c):
            libc.msgctl(identifier, IPC_RMID, None)
        for identifier in (semaphores, semaphores_of_d):
            libc.semctl(identifier, 0, IPC_RMID)


if __name__ == "__main__":
    main()
