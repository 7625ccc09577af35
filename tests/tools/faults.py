"""Real faults, each in a process of its own: begun and ended when told.

    with injected(names) as faults:          # dict of Fault
        faults["throttled"].begin()
        faults["throttled"].end()

Each fault says which rule should find it, and about which element (a pattern for ``fnmatch``). What this machine or
user does not allow is ``Refused`` with the reason, kept in ``fault.refused``.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from tests.tools.slow_disk import CLONE_NEWNS, MS_REC_PRIVATE, SIZE_BYTES, new_pause, slow_disk

CGROUPS = Path("/sys/fs/cgroup")
CLONE_NEWNET = 0x40000000
IPC_CREAT, IPC_NOWAIT, IPC_RMID = 0o1000, 0o4000, 0

Steps = Iterator[str]
"""Yields the pattern of the element when all is ready, something when the fault is there, and again when it is gone."""


class Refused(Exception):
    """This machine or user does not allow it."""


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        raise Refused(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def _me() -> str:
    return f"Process(pid={os.getpid()},start=*)"


class _Spin:
    """Uses up a CPU in threads until stopped."""

    def __init__(self, threads: int = 1) -> None:
        self._stop = threading.Event()
        for _ in range(threads):
            threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self._stop.is_set():
            sum(range(2000))

    def stop(self) -> None:
        self._stop.set()


@contextlib.contextmanager
def _cgroup(controller: str, container: str) -> Iterator[tuple[Path, bool]]:
    """A cgroup of a made-up container with this process in it, and whether it is of version 2."""
    v1 = CGROUPS / controller
    v2 = (CGROUPS / "cgroup.controllers").exists()
    parent = (CGROUPS if v2 else v1) / "docker"
    path = parent / container
    try:
        made_parent = not parent.exists()
        path.mkdir(parents=True)
        if v2:
            for above in (CGROUPS, parent):
                (above / "cgroup.subtree_control").write_text(f"+{controller}")
        (path / "cgroup.procs").write_text("0")
    except OSError as error:
        raise Refused(f"cgroup {controller}: {error.strerror}") from None
    try:
        yield path, v2
    finally:
        ((CGROUPS if v2 else v1) / "cgroup.procs").write_text("0")
        with contextlib.suppress(OSError):
            path.rmdir()
            if made_parent:
                parent.rmdir()


def throttled() -> Steps:
    """A container that wants a whole CPU and may use a fifth of one."""
    container = "c0" * 32
    with _cgroup("cpu", container) as (path, v2):
        if v2:
            (path / "cpu.max").write_text("10000 50000")
        else:
            (path / "cpu.cfs_period_us").write_text("50000")
            (path / "cpu.cfs_quota_us").write_text("10000")
        yield f"Container({container})"
        spin = _Spin()
        yield "begun"
        spin.stop()
        yield "ended"


def task_limit() -> Steps:
    """A container with nearly as many threads as it may have."""
    container = "c1" * 32
    with _cgroup("pids", container) as (path, _):
        (path / "pids.max").write_text("30")
        yield f"Container({container})"
        stop = threading.Event()
        threads = [threading.Thread(target=stop.wait, daemon=True) for _ in range(27)]
        for thread in threads:
            thread.start()
        yield "begun"
        stop.set()
        for thread in threads:
            thread.join()
        yield "ended"


def shm_full() -> Steps:
    """A container's /dev/shm of 16 MiB, nearly full."""
    libc = _libc()
    _checked(libc.unshare(CLONE_NEWNS), "a mount namespace")
    _checked(libc.mount(b"none", b"/", None, MS_REC_PRIVATE, None), "private mounts")
    _checked(libc.mount(b"shm", b"/dev/shm", b"tmpfs", 0, b"size=16m"), "a tmpfs")
    with open("/dev/shm/batches", "w+b") as file:
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096) as small:
            small[:2] = b"ab"
            yield "Mount(/dev/shm*"
            os.ftruncate(file.fileno(), 15 << 20)
            with mmap.mmap(file.fileno(), 15 << 20) as large:
                large[:] = b"x" * len(large)
                yield "begun"
            os.ftruncate(file.fileno(), 4096)
            yield "ended"


def _own_network() -> None:
    _checked(_libc().unshare(CLONE_NEWNET), "a network namespace")
    ip = shutil.which("ip")
    if ip is None:
        raise Refused("there is no `ip`")
    subprocess.run([ip, "link", "set", "lo", "mtu", "1500", "up"], check=True)


def _pair(buffer: int | None = None) -> tuple[socket.socket, socket.socket, str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        sender = socket.socket()
        if buffer:
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        sender.connect(("127.0.0.1", port))
        receiver, _ = listener.accept()
    return sender, receiver, f"ConnectTo(*:{sender.getsockname()[1]}*->*:{port}*"


def back_pressure() -> Steps:
    """A connection whose reader does not read."""
    _own_network()
    sender, receiver, edge = _pair()
    stop = threading.Event()
    sender.settimeout(0.2)
    receiver.settimeout(0.2)

    def send() -> None:
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                sender.send(bytes(1 << 16))

    def receive() -> None:
        while not stop.is_set() or receiver.recv(1 << 20, socket.MSG_PEEK):
            receiver.recv(1 << 20)

    yield edge
    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    yield "begun"
    stop.set()
    thread.join()
    with contextlib.suppress(TimeoutError):
        receive()
    yield "ended"


def loss() -> Steps:
    """A connection over a link that drops what does not fit."""
    _own_network()
    tc = shutil.which("tc")
    if tc is None:
        raise Refused("there is no `tc`")
    sender, receiver, edge = _pair()
    stop = threading.Event()

    def send() -> None:
        sender.settimeout(0.2)
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                sender.send(bytes(1 << 14))
            time.sleep(0.01)

    def receive() -> None:
        while receiver.recv(1 << 16):
            pass

    for job in (send, receive):
        threading.Thread(target=job, daemon=True).start()
    yield edge
    limit = ("qdisc", "add", "dev", "lo", "root", "tbf", "rate", "8mbit", "burst", "3000", "limit", "9000")
    done = subprocess.run([tc, *limit], capture_output=True, text=True)
    if done.returncode:
        raise Refused(done.stderr.strip())
    yield "begun"
    subprocess.run([tc, *["qdisc", "del", "dev", "lo", "root"]], check=True)
    yield "ended"
    stop.set()


def accept_queue() -> Steps:
    """A listener that does not accept."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1)
    tries: list[socket.socket] = []
    stop = threading.Event()

    def knock() -> None:
        while not stop.wait(0.1):
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
            tries.append(one)

    yield "Host(*"
    thread = threading.Thread(target=knock, daemon=True)
    thread.start()
    yield "begun"
    stop.set()
    thread.join()
    for each in tries:
        each.close()
    listener.close()
    yield "ended"


def descriptors() -> Steps:
    """A process with nearly as many descriptors as it may have."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
    yield _me()
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(370)]
    yield "begun"
    for each in opened:
        os.close(each)
    yield "ended"


def queue_full() -> Steps:
    """A message queue that nobody reads."""
    libc = _libc()
    queue = _checked(libc.msgget(0, IPC_CREAT | 0o600), "a message queue")
    try:
        message = ctypes.create_string_buffer((1).to_bytes(8, "little") + b"x" * 1000)
        yield f"MessageQueue(*{queue}*"
        while libc.msgsnd(queue, message, 1000, IPC_NOWAIT) == 0:
            pass
        yield "begun"
        while libc.msgrcv(queue, message, 1000, 0, IPC_NOWAIT) >= 0:
            pass
        yield "ended"
    finally:
        libc.msgctl(queue, IPC_RMID, None)


def one_core() -> Steps:
    """A process that uses a GPU (NVML is told so by who runs this) and may use one CPU only."""
    every = os.sched_getaffinity(0)
    if len(every) < 2:
        raise Refused("there is one CPU only")
    yield "Process(pid=*"
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        os.sched_setaffinity(0, {min(every)})
        while True:
            sum(range(2000))
    yield f"Process(pid={child},start=*)"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    yield "ended"


def _disk_that_waits(pause_s: float, readers: int) -> Steps:
    """Processes that read a disk whose answers take so long, or that does not answer until it is over."""
    pause = new_pause(0.0)
    try:
        with slow_disk(pause) as disk:
            yield f"Disk({disk.name})" if readers > 1 else "Process(pid=*"
            pause.value = pause_s
            children = [_reader(disk.path) for _ in range(readers)]
            deadline_s = time.monotonic() + 10
            while not all(_state(child) == "D" for child in children):
                if time.monotonic() > deadline_s:
                    raise Refused("whoever reads the disk does not wait for it")
                time.sleep(0.01)
            yield "begun" if readers > 1 else f"Process(pid={children[0]},start=*)"
            pause.value = 0.0
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            yield "ended"
    except OSError as error:
        raise Refused(str(error)) from None


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _reader(path: str) -> int:
    """A process that reads blocks of a device, past the cache, until it is killed."""
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        try:
            device, block = os.open(path, os.O_RDONLY | os.O_DIRECT), mmap.mmap(-1, 4096)
            while True:
                os.preadv(device, [block], random.randrange(SIZE_BYTES // 4096) * 4096)
        finally:  # the disk is gone
            os._exit(1)
    return child


def slow_disk_load() -> Steps:
    """A disk that takes 50 ms for a block, and six that read it."""
    return _disk_that_waits(0.05, 6)


def stuck() -> Steps:
    """A process that waits in the kernel for a disk that does not answer."""
    return _disk_that_waits(3600.0, 1)


def zombie() -> Steps:
    """A process that is dead and not collected."""
    yield "Process(pid=*"
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    yield f"Process(pid={child},start=*)"
    os.waitpid(child, 0)
    yield "ended"


def leak() -> Steps:
    """A process whose memory grows by 2 MiB at each wish, from 64 MiB on."""
    held = [bytearray(os.urandom(64)) * (1 << 20)]
    yield _me()
    while True:
        held.append(bytearray(os.urandom(64)) * (1 << 15))
        yield "grown"


FAULTS: dict[str, tuple[Callable[[], Steps], str]] = {
    "throttled": (throttled, "cpu_throttled"),
    "task_limit": (task_limit, "task_limit"),
    "shm_full": (shm_full, "shm_nearly_full"),
    "back_pressure": (back_pressure, "send_queue_pressure"),
    "loss": (loss, "retransmits"),
    "accept_queue": (accept_queue, "accept_queue_overflow"),
    "descriptors": (descriptors, "descriptor_leak"),
    "queue_full": (queue_full, "ipc_exhaustion"),
    "one_core": (one_core, "few_cpus"),
    "slow_disk": (slow_disk_load, "slow_storage"),
    "stuck": (stuck, "stuck_process"),
    "zombie": (zombie, "stuck_process"),
    "leak": (leak, "memory_leak"),
}
"""Name → what it does, and the rule that should find it."""
SLOW = ("stuck", "zombie", "leak")
"""Those that are told after minutes or hours."""


@dataclass
class Fault:
    """One injected fault, as who injects it sees it."""

    name: str
    rule: str
    process: subprocess.Popen[str]
    element: str = ""
    refused: str = ""
    _said: list[str] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.process.pid

    def begin(self) -> None:
        """Let it happen; a process made by it may turn out to be the element only now."""
        said = self._step()
        if said not in ("begun", "grown") and not self.refused:
            self.element = said

    def end(self) -> None:
        """Mend it."""
        self._step()

    def _step(self) -> str:
        if self.refused:
            return ""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        return self._hear()

    def _hear(self) -> str:
        out: IO[str] | None = self.process.stdout
        assert out is not None
        word, _, text = out.readline().rstrip("\n").partition(" ")
        if word != "ok":
            self.refused = text or "it ended"
        return text


@contextlib.contextmanager
def injected(names: Sequence[str]) -> Iterator[dict[str, Fault]]:
    """The processes of these faults, ready and waiting; ended at the end."""
    faults = {}
    try:
        for name in names:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.tools.faults", name],
                cwd=Path(__file__).parents[2], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            faults[name] = Fault(name, FAULTS[name][1], process)
        for fault in faults.values():
            fault.element = fault._hear()
        yield faults
    finally:
        for fault in faults.values():
            assert fault.process.stdin is not None and fault.process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                fault.process.stdin.close()
            fault.process.stdout.close()
            try:
                fault.process.wait(5)
            except subprocess.TimeoutExpired:
                fault.process.kill()
                fault.process.wait()


def main() -> None:
    """Play one fault: a step for each line on stdin."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: nothing is left if who started it is killed
    steps = FAULTS[sys.argv[1]][0]()
    try:
        for said in steps:
            print("ok", said, flush=True)
            if not sys.stdin.readline():
                break
    except Refused as why:
        print("refused", why, flush=True)
    finally:
        steps.close()  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
