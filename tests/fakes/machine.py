"""A whole machine in memory with something of everything, and a World of the real sources over it.

    files = rich_machine(workers=100)          # MemoryFs: /proc, /sys, /dev, runtimes' files
    fake = FakeMachine(files)                  # .world, .fs (counts and faults), .tape, .clock
    fake.next_round()

Two sockets, eight GPUs, RDMA, NVMe, NFS; a Kubernetes pod that trains, a unit that serves, sockets, pipes, shared
memory, queues and semaphores between processes; one more NPU tool than any real machine has beside NVIDIA GPUs.
"""

from __future__ import annotations

import functools
import struct
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from tests.fakes.cuda_answers import MAPS as CUDA_MAPS
from tests.fakes.machine_answers import OWN_NETNS, POD_NETNS, RANK, SERVER, TRAINER, WORKER, FakeTape, answers
from tests.fakes.memory_fs import MemoryFs
from tests.fakes.sysfs_tree import Tree, hgx_host

from gpuflight.sources.bpf.probes import Probes
from gpuflight.sources.cgroups import Cgroups
from gpuflight.sources.clock import ManualClock
from gpuflight.sources.fs import Stat, StatVfs
from gpuflight.sources.http import Http
from gpuflight.sources.ipc import Ipc
from gpuflight.sources.mongodb import Mongo
from gpuflight.sources.nccl_ras import NcclRas
from gpuflight.sources.netlink import Netlink
from gpuflight.sources.nvml import Nvml
from gpuflight.sources.perf_events import PerfEvents
from gpuflight.sources.procfs import ProcFs
from gpuflight.sources.session_logs import SessionLogs
from gpuflight.sources.sysfs import SysFs
from gpuflight.sources.tools import Tools
from gpuflight.sources.world import World

CONTAINER = "ab" * 32
POD_UID = "11111111-2222-3333-4444-555555555555"
POD_CGROUP = (
    f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{POD_UID.replace('-', '_')}.slice"
    f"/cri-containerd-{CONTAINER}.scope"
)
KERNEL_THREAD = 0x00200040
_NAMESPACES = {"mnt": 4026531841, "pid": 4026531836, "ipc": 4026531839, "uts": 4026531838, "cgroup": 4026531835}
_FIFO, _REGULAR = 0o010644, 0o100644
_SHM_DEVICE, _MQUEUE_DEVICE = 25, 26

_MOUNTS = """\
22 1 259:1 / / rw,relatime shared:1 - ext4 /dev/nvme0n1 rw
23 22 0:21 / /proc rw,nosuid - proc proc rw
24 22 0:22 / /sys rw,nosuid - sysfs sysfs rw
25 22 0:5 / /dev rw,nosuid - devtmpfs udev rw
26 25 0:25 / /dev/shm rw,nosuid - tmpfs tmpfs rw
27 25 0:26 / /dev/mqueue rw,nosuid - mqueue mqueue rw
28 24 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw
29 22 0:50 / /mnt/data rw,relatime - nfs4 filer:/export rw,vers=4.2,addr=10.0.0.9
30 22 0:51 / /mnt/share rw,relatime - cifs //filer/share rw,username=ann,password=HUSH-mount
"""
_MOUNTSTATS = """\
device filer:/export mounted on /mnt/data with fstype nfs4 statvers=1.1
\tbytes:\t1 2 0 0 {read} 4096 0 0
\tper-op statistics
\t        READ: {requests} {requests} 0 100 200 5 {rtt} 50 0
"""
_NET_DEV = """\
Inter-|   Receive                                                |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo: 100 1 0 0 0 0 0 0 100 1 0 0 0 0 0 0
   ib0: 1000 10 0 0 0 0 0 0 2000 20 0 0 0 0 0 0
"""
_FIB = "Main:\n  +-- 10.0.0.0/8 3 0 6\n        |-- 10.0.0.5\n           /32 host LOCAL\n"
_ROUTE = (
    "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\nib0\t0000000A\t00000000\t1\t0\t0\t0\t000000FF\t0\n"
)
_SYSVIPC = {
    "shm": "key shmid perms size cpid lpid nattch uid gid cuid cgid atime dtime ctime rss swap\n"
    "7 5 600 4096 300 301 2 0 0 0 0 1700000100 0 1700000050 4096 0\n",
    "msg": "key msqid perms cbytes qnum lspid lrpid uid gid cuid cgid stime rtime ctime\n"
    "8 3 600 128 2 300 301 0 0 0 0 1700000100 1700000101 1700000050\n",
    "sem": "key semid perms nsems uid gid cuid cgid otime ctime\n9 11 600 2 0 0 0 0 1700000100 1700000050\n",
}


class FakeMachine:
    """The real sources over ``files``; nothing of the test machine is asked."""

    def __init__(self, files: MemoryFs, *, tape: bool = True) -> None:
        self.fs = files.share()
        self.clock = ManualClock(wall_ns=1_700_000_200_000_000_000, monotonic_s=200.0)
        self.tape = FakeTape(answers(self.clock) if tape else {})
        procfs = ProcFs(self.fs, self.clock)
        self.world = World(
            fs=self.fs,
            procfs=procfs,
            sysfs=SysFs(self.fs),
            cgroups=Cgroups(self.fs, procfs),
            netlink=Netlink(procfs, tape=self.tape),
            ipc=Ipc(self.fs, procfs, tape=self.tape),
            nvml=Nvml(tape=self.tape, clock=self.clock),
            tools=Tools(self.tape),
            clock=self.clock,
            tape=self.tape,
            http=Http(self.tape),
            mongo=Mongo(self.tape),
            session_logs=SessionLogs(self.tape),
            nccl_ras=NcclRas(self.tape),
            probes=Probes(self.tape),
            perf_events=PerfEvents(self.tape),
        )
        self.number = 0

    def next_round(self, seconds: float = 1.0) -> World:
        """Let some time pass and begin a round."""
        self.number += 1
        self.clock.advance(seconds)
        self.world.begin_round(self.number)
        return self.world


def empty_machine() -> MemoryFs:
    """Nothing: no /proc, no /sys."""
    return MemoryFs()


def rich_machine(workers: int = 0) -> MemoryFs:
    """The machine of this module. ``workers``: this many more processes, each with a socket, a pipe and shared memory.

    Do not change it: it is made once; ``copy`` it first.
    """
    files = _base().copy()
    for number in range(workers):
        add_process(
            files,
            10_000 + number,
            f"worker-{number}",
            ppid=SERVER,
            cgroup="/system.slice/server.service",
            threads=2,
            fds={3: f"socket:[{90_000 + number}]", 4: "pipe:[7001]", 5: "anon_inode:[eventfd]"},
        )
    return files


def add_process(
    files: MemoryFs,
    pid: int,
    comm: str | bytes,
    *,
    ppid: int = 1,
    start: int = 0,
    argv: list[str] | bytes | None = None,
    cgroup: str = "/",
    flags: int = 0x400000,
    netns: int = OWN_NETNS,
    uid: int = 1000,
    nspids: str = "",
    threads: int = 1,
    fds: dict[int, str] | None = None,
    shared: str = "",
    cwd: str = "/",
    exe: str = "",
    ticks: int = 500,
) -> None:
    """One process with every file that a kernel has about it; of a kernel thread those that it has."""
    root = f"/proc/{pid}"
    name = comm.encode("utf-8", "surrogateescape") if isinstance(comm, str) else comm
    start = start or 1000 + pid
    kernel = bool(flags & 0x00200000)
    files.write(f"{root}/stat", _stat(pid, name, ppid, start, flags, threads, ticks))
    files.write(
        f"{root}/status",
        b"Name:\t%s\nUid:\t%d\t%d\t%d\t%d\nNSpid:\t%s\n" % (name[:15].replace(b"\n", b"\\n"), uid, uid, uid, uid,
                                                            (nspids or str(pid)).encode())
        + b"Cpus_allowed_list:\t0-3\nMems_allowed_list:\t0-1\nRssShmem:\t%d kB\nHugetlbPages:\t0 kB\n" % len(shared)
        + b"voluntary_ctxt_switches:\t10\nnonvoluntary_ctxt_switches:\t3\n",
    )  # fmt: skip
    if argv is None:
        argv = [] if kernel else [name.decode("utf-8", "replace")]
    raw = argv if isinstance(argv, bytes) else "".join(word + "\0" for word in argv).encode("utf-8", "surrogateescape")
    files.write(f"{root}/cmdline", raw)
    files.write(f"{root}/cgroup", f"0::{cgroup}\n")
    files.write(f"{root}/mountinfo", _MOUNTS)
    files.write(
        f"{root}/environ",
        b"AWS_SECRET_ACCESS_KEY=HUSH-environ\0RANK=0\0LOCAL_RANK=0\0WORLD_SIZE=2\0MASTER_ADDR=10.0.0.1\0MASTER_PORT=29500\0",
    )
    files.write(f"{root}/io", b"rchar: 100\nwchar: 50\nread_bytes: 4096\nwrite_bytes: 512\n")
    files.write(f"{root}/maps", "55d0-55d1 r-xp 00000000 103:01 77 /usr/bin/app\n" + shared)
    files.write(f"{root}/numa_maps", "7f00 default anon=20000 dirty=1 N0=15000 N1=5000 kernelpagesize_kB=4\n")
    files.write(f"{root}/syscall", b"0 0x0 0x0 0x0 0x0 0x0 0x0 0x0 0x0\n")
    files.directory(f"{root}/fd")
    if not kernel:
        files.link(f"{root}/exe", exe or "/usr/bin/app")
        files.link(f"{root}/cwd", cwd)
        files.link(f"{root}/root", "/")
    for kind, inode in {**_NAMESPACES, "net": netns}.items():
        files.link(f"{root}/ns/{kind}", f"{kind}:[{inode}]")
    for fd, target in (fds or {}).items():
        add_descriptor(files, pid, fd, target)
    for number in range(threads):
        task = f"{root}/task/{pid + number}"
        files.write(f"{task}/stat", _stat(pid + number, name, ppid, start + number, flags, threads, ticks))
        files.write(f"{task}/status", b"voluntary_ctxt_switches:\t10\nnonvoluntary_ctxt_switches:\t3\n")
        files.write(f"{task}/schedstat", b"5000000 1000000 10\n")
    _add_net(files, root)


def add_descriptor(files: MemoryFs, pid: int, fd: int, target: str) -> None:
    """``target`` as the link shows it; ``r:``, ``w:`` before it say which end."""
    ends, colon, plain = target.partition(":")
    mode = {"r": 0o500, "w": 0o300}.get(ends, 0o700) if colon else 0o700
    if ends in ("r", "w"):
        target = plain
    path = f"/proc/{pid}/fd/{fd}"
    files.link(path, target, mode)
    known = _FILES_BEHIND.get(target)
    if known is not None:
        files.stats[path] = known
    if target.startswith("/queue"):
        files.files[path] = b"QSIZE:129 NOTIFY:0 SIGNO:0 NOTIFY_PID:0\n"


_FILES_BEHIND = {
    "/dev/shm/ring": Stat(_REGULAR, 501, _SHM_DEVICE, 0, 0, 8192),
    "/memfd:arena (deleted)": Stat(_REGULAR, 502, 1, 0, 0, 16384),
    "/queue": Stat(_REGULAR, 503, _MQUEUE_DEVICE, 0, 0, 80),
    "/tmp/fifo": Stat(_FIFO, 504, 1, 0, 0, 0),
}
_RING = "7f00-7f02 rw-s 00000000 00:19 501 /dev/shm/ring\n"
_ARENA = "7f10-7f14 rw-s 00000000 00:01 502 /memfd:arena (deleted)\n"
_SYSV = "7f20-7f21 rw-s 00000000 00:01 5 /SYSV00000007 (deleted)\n"
_SEMAPHORE = "7f30-7f31 rw-s 00000000 00:19 505 /dev/shm/sem.lock\n"


@functools.cache
def _base() -> MemoryFs:
    files = MemoryFs()
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder))
        hgx_host(tree)
        files.load(tree.root)
    _add_machine(files)
    add_process(files, 1, "systemd", ppid=0, start=1, uid=0, cgroup="/init.scope")
    add_process(files, 2, "kthreadd", ppid=0, start=2, uid=0, flags=KERNEL_THREAD)
    add_process(files, 3, "kworker/0:1", ppid=2, start=3, uid=0, flags=KERNEL_THREAD)
    pod: dict[str, Any] = {"cgroup": POD_CGROUP, "netns": POD_NETNS, "nspids": f"{TRAINER}\t1", "threads": 3}
    add_process(
        files, TRAINER, "python3", argv=["python3", "train.py", "--api-key=HUSH-option", "--lr", "0.1"],
        fds={0: "/dev/null", 3: "/dev/nvidia0", 4: "/dev/nvidia-uvm", 5: "socket:[601]", 6: "w:pipe:[7000]",
             7: "/dev/shm/ring", 8: "/memfd:arena (deleted)", 9: "socket:[651]", 10: "socket:[603]"},
        shared=_RING + _ARENA + CUDA_MAPS, cwd="/mnt/data/job", ticks=90_000, **pod,
    )  # fmt: skip
    pod["nspids"] = f"{RANK}\t2"
    add_process(
        files, RANK, "python3", ppid=TRAINER, argv=["python3", "worker.py", "postgres://u:HUSH-url@db/x"],
        fds={3: "/dev/nvidia1", 5: "socket:[602]", 6: "r:pipe:[7000]", 7: "/memfd:arena (deleted)", 9: "socket:[652]",
             10: "socket:[604]"},
        shared=_RING + _ARENA + CUDA_MAPS, **pod,
    )  # fmt: skip
    for pid in (TRAINER, RANK):  # a pod has a host name of its own
        files.link(f"/proc/{pid}/ns/uts", "uts:[4026532002]")
    add_process(
        files, SERVER, "server", argv=["server", "--password", "HUSH-argument"], cgroup="/system.slice/server.service",
        fds={3: "socket:[611]", 4: "socket:[612]", 5: "w:pipe:[7001]", 6: "/queue", 7: "w:/tmp/fifo",
             8: "anon_inode:[eventpoll]", 9: "socket:[661]", 10: "socket:[621]"},
        shared=_SYSV + _SEMAPHORE, threads=2,
    )  # fmt: skip
    add_process(
        files, WORKER, "worker) S 1 (x y", ppid=SERVER, cgroup="/system.slice/server.service",
        fds={3: "socket:[613]", 5: "r:pipe:[7001]", 6: "/queue", 7: "r:/tmp/fifo", 9: "socket:[662]",
             10: "socket:[622]"},
        shared=_SYSV + _SEMAPHORE,
    )  # fmt: skip
    add_process(files, 400, "nsys", argv=["nsys", "profile"])
    return files


def _add_machine(files: MemoryFs) -> None:
    write, link = files.write, files.link
    write(
        "/proc/stat",
        "cpu  100 0 100 1000 10 0 0 0 0 0\ncpu0 100 0 100 1000 10 0 0 0 0 0\nctxt 1000\nbtime 1700000000\n",
    )
    write("/proc/meminfo", "MemTotal: 1000 kB\nMemAvailable: 500 kB\nSwapTotal: 100 kB\nSwapFree: 50 kB\n")
    write("/proc/uptime", "40.00 20.00\n")
    write("/proc/vmstat", "nr_free_pages 1\noom_kill 2\npswpout 0\n")
    write("/proc/sys/fs/file-nr", "9000\t0\t2000000\n")
    write("/proc/net/softnet_stat", "00000400 00000000 00000003 0 0 0 0 0 0 0 0 0\n" * 2)
    write("/proc/net/netstat", "TcpExt: SyncookiesSent ListenOverflows ListenDrops\nTcpExt: 0 4 5\n")
    write(
        "/proc/net/snmp", "Ip: Forwarding\nIp: 1\nTcp: AttemptFails EstabResets OutSegs RetransSegs\nTcp: 3 4 900 2\n"
    )
    write("/proc/loadavg", "0.5 0.4 0.3 1/200 999\n")
    write("/proc/sys/kernel/hostname", "node1\n")
    write("/proc/sys/kernel/osrelease", "6.8.0\n")
    write("/proc/sys/kernel/arch", "x86_64\n")
    write("/proc/sys/kernel/random/boot_id", "b00t\n")
    write("/etc/machine-id", "0123456789abcdef\n")
    write("/etc/passwd", "root:x:0:0:root:/root:/bin/sh\nann:x:1000:1000:Ann:/home/ann:/bin/sh\n")
    for name in ("cpu", "memory", "io"):
        write(
            f"/proc/pressure/{name}",
            "some avg10=1.50 avg60=0 avg300=0 total=1\nfull avg10=0.50 avg60=0 avg300=0 total=1\n",
        )
    for name, text in _SYSVIPC.items():
        write(f"/proc/sysvipc/{name}", text)
    write("/proc/self/mountinfo", _MOUNTS)
    write("/proc/self/mountstats", _MOUNTSTATS.format(read=100, requests=10, rtt=20))
    write("/proc/self/auxv", struct.pack("=QQQQQQ", 6, 4096, 17, 100, 0, 0))
    for kind, inode in {**_NAMESPACES, "net": OWN_NETNS}.items():
        link(f"/proc/self/ns/{kind}", f"{kind}:[{inode}]")
    _add_net(files, "/proc/self")
    write("/sys/class/dmi/id/sys_vendor", "Supermicro\n")
    write("/sys/class/dmi/id/product_name", "SYS-821GE\n")
    for point in ("/", "/dev/shm", "/mnt/data", "/mnt/share"):
        files.spaces[point] = StatVfs(1 << 40, 1 << 39, 1 << 38, 1000, 500)
    files.directory("/mnt/data")
    files.stats["/dev/shm"] = Stat(0o041777, 1, _SHM_DEVICE, 0, 0, 60)
    files.directory("/dev/shm")
    write("/dev/shm/ring", b"\0" * 64)
    files.stats["/dev/shm/ring"] = _FILES_BEHIND["/dev/shm/ring"]
    write("/dev/shm/sem.lock", struct.pack("=QII", 1, 0, 0) + bytes(16))
    files.stats["/dev/shm/sem.lock"] = Stat(_REGULAR, 505, _SHM_DEVICE, 0, 0, 32)
    write("/dev/shm/left-over", b"x")
    files.stats["/dev/shm/left-over"] = Stat(_REGULAR, 506, _SHM_DEVICE, 0, 0, 4096)
    files.directory("/dev/mqueue")
    link("/sys/dev/block/259:1", "/sys/block/nvme0n1")
    for group in ("", POD_CGROUP, POD_CGROUP.rpartition("/")[0], "/system.slice/server.service", "/init.scope"):
        base = f"/sys/fs/cgroup{group}"
        write(f"{base}/cpu.stat", "usage_usec 5000000\nnr_periods 100\nnr_throttled 10\nthrottled_usec 5000\n")
        write(f"{base}/cpu.max", "200000 100000\n")
        write(f"{base}/memory.current", "1000000\n")
        write(f"{base}/memory.max", "max\n")
        write(f"{base}/memory.events", "oom 0\noom_kill 1\n")
        write(f"{base}/pids.current", "5\n")
        write(f"{base}/pids.max", "100\n")
    task = f"/run/containerd/io.containerd.runtime.v2.task/k8s.io/{CONTAINER}/config.json"
    annotations = {"io.kubernetes.cri.container-name": "trainer", "io.kubernetes.cri.sandbox-name": "job-0",
                   "io.kubernetes.cri.sandbox-namespace": "ml", "secret": "HUSH-annotation"}  # fmt: skip
    write(task, msgspec.json.encode({"annotations": annotations, "process": {"env": ["TOKEN=HUSH-container"]}}))


def _add_net(files: MemoryFs, root: str) -> None:
    files.write(
        f"{root}/net/sockstat", "sockets: used 9\nTCP: inuse 5 orphan 0 tw 0 alloc 5 mem 1\nUDP: inuse 2 mem 1\n"
    )
    files.write(f"{root}/net/sockstat6", "TCP6: inuse 0\nUDP6: inuse 0\n")
    files.write(f"{root}/net/dev", _NET_DEV)
    files.write(f"{root}/net/fib_trie", _FIB)
    files.write(f"{root}/net/route", _ROUTE)
    files.write(f"{root}/net/if_inet6", "")


def _stat(pid: int, comm: bytes, ppid: int, start: int, flags: int, threads: int, ticks: int) -> bytes:
    fields: list[Any] = [0] * 50
    fields[0:4] = ["S", ppid, pid, pid]
    fields[6], fields[7], fields[9], fields[11] = flags, 100, 5, ticks
    fields[17], fields[19], fields[21], fields[25] = threads, start, 50_000, 140_000
    return b"%d (%s) %s\n" % (pid, comm, " ".join(map(str, fields)).encode())
