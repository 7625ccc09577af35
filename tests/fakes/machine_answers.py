"""What the sources that are not files say on the machine of ``machine.py``: netlink, NVML, semctl(2), npu-smi."""

from __future__ import annotations

import functools
import re
import struct
from collections import Counter
from collections.abc import Callable

import msgspec
from tests.fakes.cuda_answers import cuda_answers
from tests.fakes.kernel_answers import FIRST_ROUND_S, kernel_answers
from tests.fakes.nvml import NoCompiler, fake_nvml
from tests.fakes.perf_answers import perf_answers
from tests.fakes.ras_server import FakeJob, FakeRank
from tests.fakes.sockets import address_message, inet_message, tcp_info, unix_message
from tests.fakes.user_probe_answers import user_probe_answers

from gpuflight.collectors.fleet import Seen
from gpuflight.errors import SourceUnavailable
from gpuflight.events.activity.summary import (
    CopySum,
    DeviceFacts,
    KernelSum,
    MemorySum,
    ScopeSum,
    StreamSum,
    Summary,
    WaitSum,
)
from gpuflight.events.reading import Reading
from gpuflight.graph import Graph, edges, nodes
from gpuflight.graph.codec import encode_graph, time_text
from gpuflight.round_documents import Head
from gpuflight.sources.clock import ManualClock
from gpuflight.sources.http import Answer
from gpuflight.sources.nccl_ras import Told
from gpuflight.sources.nvml import Nvml, NvmlSnapshot
from gpuflight.sources.recording import Tape

OWN_NETNS, POD_NETNS = 4026531840, 4026532001
PEER_URL = "http://web-1:9477"
DATABASE_URI = "mongodb://reader:secret@db-1"
TRAINER, RANK, SERVER, WORKER = 4101, 4102, 300, 301
_NPU = """\
| npu-smi 25.5.2                   Version: 25.5.2                                               |
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
| 0     910B4               | OK            | 89.9        39                0    / 0             |
| 0                         | 0000:C1:00.0  | 97          0    / 0          30711/ 32768         |
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
| 0       0                 | 300           | server                   | 20000                   |
"""


_AGAIN = re.compile(r"#\d+")


class FakeTape(Tape):
    """Answers for the sources that are not files. ``answers``: (source, key) → bytes, or what makes them."""

    def __init__(self, answers: dict[tuple[str, str], bytes | Callable[[], bytes]]) -> None:
        super().__init__()
        self.mode = "replay"
        self.answers = answers
        self.asked: Counter[tuple[str, str]] = Counter()
        self.fault: Callable[[str, str], bytes | None] = lambda source, key: None

    def ask(self, source: str, key: str, live: Callable[[], bytes]) -> bytes:
        self.asked[source, key] += 1
        instead = self.fault(source, key)
        if instead is not None:
            return instead
        answer = self.answers.get((source, key))
        if answer is None and source == "bpf":  # a program that was loaded again says the same
            answer = self.answers.get((source, _AGAIN.sub("", key)))
        if answer is None:
            raise SourceUnavailable(f"this machine has no {source}")
        return answer if isinstance(answer, bytes) else answer()


def answers(clock: ManualClock) -> dict[tuple[str, str], bytes | Callable[[], bytes]]:
    """What netlink, NVML, semctl(2) and npu-smi say on this machine."""
    found: dict[tuple[str, str], bytes | Callable[[], bytes]] = {
        ("tools", "which npu-smi"): b"/usr/local/bin/npu-smi",
        ("tools", "run /usr/local/bin/npu-smi info"): _NPU.encode(),
        ("ipc", "sem_pids 11"): msgspec.msgpack.encode([SERVER, WORKER]),
        **_netlink(),
        ("nccl_ras", f"127.0.0.1:28028 in netns {POD_NETNS}"): lambda: _ras(clock),
        **_peer(clock),
        **_database(clock),
        **kernel_answers(
            clock, server=SERVER, worker=WORKER, trainer=TRAINER, pod_netns=POD_NETNS, own_netns=OWN_NETNS
        ),
        **user_probe_answers(clock, trainer=TRAINER, disk=259 << 20 | 1, nic=10),
        **cuda_answers(clock, trainer=TRAINER, first_round_s=FIRST_ROUND_S),
        **perf_answers(clock, TRAINER, RANK),
        ("session_logs", "reading"): lambda: _sessions(clock),
        ("session_logs", "recorders"): lambda: _recorders(clock),
    }
    snapshot = nvml_snapshot()
    if snapshot is not None:

        def now() -> bytes:
            fresh = msgspec.json.decode(snapshot, type=NvmlSnapshot)
            fresh.monotonic_s, fresh.wall_ns = clock.monotonic_s(), clock.wall_ns()
            return msgspec.json.encode(fresh)

        found["nvml", "snapshot"] = now
    return found


def _peer(clock: ManualClock) -> dict[tuple[str, str], bytes | Callable[[], bytes]]:
    """Another instance, with the other end of the connection to 192.0.2.7:443."""

    def head() -> bytes:
        now_ns = clock.wall_ns()
        return msgspec.msgpack.encode(
            Answer(PEER_URL, 200, {"etag": '"5"'}, sent_ns=now_ns - 1_000_000, received_ns=now_ns)
        )

    own = nodes.Socket(protocol="tcp", address="192.0.2.7:443", attributes={"state": "ESTABLISHED"})
    far = nodes.Socket(protocol="tcp", address="10.0.0.5:50000", attributes={"remote": True})
    process = nodes.Process(pid=TRAINER, start=1000 + TRAINER, attributes={"name": "nginx"})
    graph = Graph(
        [nodes.Host(hostname="web-1", metrics={"cpus_count": 4}), process, own, far],
        [edges.ConnectTo(far.id, own.id, {"half": True}), edges.Belong(own.id, process.id)],
    )
    env = {"hostname": "web-1", "machine_id": "m-web-1", "boot_id": "b-web-1"}
    body = encode_graph(graph, round=5, time=time_text(clock.wall_ns()), env=env)
    return {("http", PEER_URL): head, ("http", PEER_URL + " body"): body}


def _database(clock: ManualClock) -> dict[tuple[str, str], bytes | Callable[[], bytes]]:
    """A database with one more host."""

    def heads() -> bytes:
        now_ns = clock.wall_ns()
        head = Head(namespace="db-host", seq=3, complete_seq=3, instance="i", round=3, written_ns=now_ns - 10**9)
        return msgspec.msgpack.encode(Seen([head], read_ns=now_ns))

    process = nodes.Process(pid=TRAINER, start=1000 + TRAINER, ns="db-host", attributes={"name": "train"})
    host = nodes.Host(hostname="db-host", ns="db-host", metrics={"cpus_count": 8})
    graph = Graph([host, process], [edges.Host(host.id, process.id)])
    where = "mongodb://db-1:27017/gpuflight"
    return {("mongodb", where): heads, ("mongodb", f"{where} db-host"): encode_graph(graph)}


def _ras(clock: ManualClock) -> bytes:
    """The RAS of the two ranks in the pod, asked a moment ago."""
    job = FakeJob([FakeRank(1, "10.1.0.2", 42), FakeRank(2, "10.1.0.2", 41)])
    return msgspec.msgpack.encode(Told(clock.monotonic_s() - 0.5, job.json(), structured=True))


def _sessions(clock: ManualClock) -> bytes:
    """A session of the trainer in its pod, which knows itself as pid 1 of job-0, and one of the server, that ended."""
    began_ns = 1_700_000_100 * 10**9
    devices = [DeviceFacts(number, f"GPU-{number}", "Fake H100", "NVIDIA") for number in range(2)]
    secret = "train --api-key=HUSH-application"
    trainer = Summary(
        session_id="session-1", folder="/var/gpufl/monitor/session-1", app=secret, hostname="job-0", pid=1,
        kind="trace", engine="nvidia.trace", start_ns=began_ns, last_event_ns=clock.wall_ns(), devices=devices,
        launches=30, kernel_ns=3_000_000, busy_ns=2_500_000, device_latest_ns=clock.wall_ns(), kernels_count=3,
        kernels=[
            KernelSum(1, "gemm", 20, 2_000_000, 90_000, 110_000, 100_000, 110_000, [(7, 20, 2_000_000)], 20, 0.5),
            KernelSum(2, None, 8, 900_000, 90_000, 120_000, 110_000, 120_000, [(7, 4, 450_000), (9, 4, 450_000)]),
        ],
        streams=[StreamSum(7, 0, 24, 2_450_000, 2, 8192), StreamSum(9, None, 6, 550_000)], streams_count=3,
        copies=[CopySum("HtoD", 0, 2, 8192, 4000), CopySum("DtoD", None, 1, 64, 100)],
        waits=[WaitSum("stream", 3, 60_000, 30_000)], memory=[MemorySum(0, False, 3, 1, 0, 2048, 4096)],
        scopes=[ScopeSum("epoch", "epoch", 0, 1, 1, 0, 0), ScopeSum("epoch|step", "step", 1, 4, 0, 8000, 3000)],
        scopes_count=3, events=60, losses=1, lag_bytes=100, read_ns=clock.wall_ns(), writer="unknown",
    )  # fmt: skip
    server = Summary(session_id="session-2", hostname="node1", pid=SERVER, start_ns=began_ns, end="shutdown", events=4)
    elsewhere = Summary(session_id="session-3", hostname="node-7", pid=SERVER, start_ns=began_ns, events=4)
    reading = Reading([server, elsewhere, trainer], ["/var/gpufl/monitor"], lag_bytes=100, lost=2)
    return msgspec.msgpack.encode(reading)


def _recorders(clock: ManualClock) -> bytes:
    """Of those sessions' recorders one answers."""
    told = {"session-1": {"state": "paused", "why": "torch.profiler is running", "lost": 3}}
    reading = msgspec.msgpack.decode(_sessions(clock))
    return msgspec.msgpack.encode({"reading": reading, "told": told, "silent": 1, "beyond": 2})


@functools.cache
def _netlink() -> dict[tuple[str, str], bytes]:
    tcp = tcp_info(rtt_us=100, acked=1000, received=2000, sent=1000, segments=20)
    server, client = ("10.0.0.5", 8000), ("10.0.0.5", 40000)
    host = [
        inet_message(("0.0.0.0", 8000), state="LISTEN", inode=611),
        inet_message(server, client, inode=612, info=tcp),
        inet_message(client, server, inode=613, info=tcp),
        inet_message(("10.0.0.5", 50000), ("192.0.2.7", 443), inode=0, info=tcp),
    ]
    ranks = (("10.1.0.2", 29500), ("10.1.0.2", 41000))
    pod = [inet_message(*ranks, inode=601, info=tcp), inet_message(*reversed(ranks), inode=602, info=tcp)]
    pod += [inet_message(("127.0.0.1", 28028), state="LISTEN", inode=inode) for inode in (603, 604)]  # NCCL's RAS
    udp = [
        inet_message(("10.0.0.5", 9000), ("10.0.0.5", 9001), inode=621),
        inet_message(("10.0.0.5", 9001), ("10.0.0.5", 9000), inode=622),
    ]
    found: dict[tuple[str, str], bytes] = {}
    for netns, connections, unix in ((0, host, (661, 662)), (POD_NETNS, pod, (651, 652))):
        found["netlink", f"{netns}/inet/tcp"] = b"".join(connections)
        found["netlink", f"{netns}/inet/udp"] = b"" if netns else b"".join(udp)
        found["netlink", f"{netns}/addresses"] = address_message("10.1.0.2" if netns else "10.0.0.5")
        found["netlink", f"{netns}/unix"] = unix_message(unix[0], path=b"/run/a.sock\0", peer=unix[1]) + unix_message(
            unix[1], peer=unix[0]
        )
    nested = struct.pack("=HHI", 8, 21, 100) + struct.pack("=HHI", 8, 28, TRAINER)
    entry = struct.pack("=HH", 4 + len(nested), 0x8000 | 20) + nested
    table = struct.pack("=HH", 4 + len(entry), 0x8000 | 19) + entry
    device = struct.pack("=HHI", 8, 1, 0) + struct.pack("=HH", 11, 2) + b"mlx5_0\0\0"
    for key, body in (("rdma 1", device), ("rdma 10 0", table), ("rdma 11 0", b""), ("rdma 13 0", b"")):
        found["netlink", key] = struct.pack("=IHHII", 16 + len(body), 5 << 10, 2, 0, 0) + body
    return found


@functools.cache
def nvml_snapshot() -> bytes | None:
    """What the real Nvml source reads from the fake library of eight H100 at this machine's PCI addresses; None without
    a C compiler."""
    buses = [0x10 + number * 0x20 + 3 + port for number in range(4) for port in range(2)]
    changes = {f"gpu{index}": {"pci": f"0000:{bus:02x}:00.0"} for index, bus in enumerate(buses)}
    changes["gpu0"]["process"] = f"{TRAINER}:40960:C:::87:41"
    changes["gpu1"]["process"] = f"{RANK}:20480:C:::50:20"
    try:
        fake = fake_nvml("h100x8", None, **changes)
    except NoCompiler:
        return None
    with fake.activated():
        source = Nvml(library=fake.library)
        try:
            return msgspec.json.encode(source.snapshot())
        finally:
            source.close()
