"""Graphs to draw: an 8 x H100 training host, and crowds of any size. Made from nodes.* and edges.* as collectors do."""

from __future__ import annotations

import random

from gpuflight.graph import Graph, edges, nodes
from gpuflight.rounds import Coverage, Environment, Evidence, Finding, Note

GIB = 1024**3
IMAGE = "nvcr.io/nvidia/pytorch:25.01-py3"


def _hardware(graph: Graph) -> list[nodes.GPU]:
    gpus = []
    for node in range(2):
        graph.try_add_node(
            nodes.Numa(
                index=node,
                attributes={
                    "cpus": f"{node * 56}-{node * 56 + 55},{112 + node * 56}-{167 + node * 56}",
                    "has_cpus": True,
                },
                metrics={"memory_total_bytes": 1007 * GIB, "memory_free_bytes": (610 - 200 * node) * GIB},
            )
        )
        package = nodes.CpuPackage(
            index=node, attributes={"name": "Xeon Platinum 8480C"}, metrics={"cores_count": 56, "cpus_count": 112}
        )
        graph.try_add_node(package)
        graph.try_add_edge(edges.Affinity(package.id, f"Numa({node})"))
        for pair in range(2):
            switch = nodes.PciDevice(
                address=f"0000:{0x15 + node * 0x80 + pair * 0x30:02x}:00.0",
                attributes={"class_name": "PCI bridge", "numa_node": node, "port_type": "switch upstream"},
            )
            graph.try_add_node(switch)
            for slot in range(3):
                bus = 0x17 + node * 0x80 + pair * 0x30 + slot
                function = nodes.PciDevice(
                    address=f"0000:{bus:02x}:00.0",
                    attributes={"numa_node": node},
                    metrics={"link_speed_gt_per_s": 32.0, "link_width": 16},
                )
                graph.try_add_node(function)
                graph.try_add_edge(
                    edges.PcieLink(
                        switch.id, function.id, {}, {"expected_bytes_per_s": 63_000_000_000, "link_width": 16}
                    )
                )
                if slot == 2:
                    name = f"mlx5_{node * 2 + pair}"
                    rdma = nodes.RdmaDevice(name=name, attributes={"firmware": "28.41.1000", "node_type": "CA"})
                    port = nodes.RdmaPort(
                        device=name,
                        port=1,
                        attributes={"state": "ACTIVE"},
                        metrics={"speed_bits_per_s": 400_000_000_000},
                    )
                    for thing in (rdma, port):
                        graph.try_add_node(thing)
                    graph.try_add_edge(edges.AttachedTo(rdma.id, function.id))
                    graph.try_add_edge(edges.Belong(port.id, rdma.id))
                    continue
                index = node * 4 + pair * 2 + slot
                gpu = nodes.GPU(
                    uuid=f"GPU-{index:08x}-aaaa-bbbb-cccc-{index:012x}",
                    attributes={
                        "name": "NVIDIA H100 80GB HBM3", "index": index, "state": "ok", "pci_address": function.address,
                        "driver": "570.86.15", "compute_capability": "9.0", "numa_node": node,
                        "clock_event_reasons": ["sw_power_cap"] if index == 5 else [],
                    },
                    metrics={
                        "sm_util_pct": 97 - 6 * (index == 5) - index % 3, "memory_used_bytes": (71 - index % 2) * GIB,
                        "memory_total_bytes": 80 * GIB, "power_watts": 640 + 8 * index, "power_limit_watts": 700,
                        "temperature_celsius": 58 + index, "pcie_gen": 5, "pcie_width": 16, "sm_clock_hz": 1_755e6,
                    },
                    unknown={"pcie_replays_count": "not supported by this driver"},
                )  # fmt: skip
                graph.try_add_node(gpu)
                graph.try_add_edge(edges.AttachedTo(gpu.id, function.id))
                graph.try_add_edge(edges.Affinity(gpu.id, f"Numa({node})"))
                gpus.append(gpu)
    for number in range(4):
        switch = nodes.NvSwitch(address=f"0000:{number + 5:02x}:00.0")
        graph.try_add_node(switch)
        for gpu in gpus:
            links = 5 if number in (0, 3) else 4
            graph.try_add_edge(
                edges.NvLink(
                    gpu.id, switch.id, {}, {"links_count": links, "expected_bytes_per_s": links * 25_000_000_000}
                )
            )
    for number, gpu in enumerate(gpus):
        for other in gpus[number + 1 :]:
            graph.try_add_edge(edges.Proximity(gpu.id, other.id, {"distance": "NV18"}))
    for name, numa, speed in (("ens3f0", 0, 100_000_000_000), ("lo", -1, 0), ("docker0", -1, 0)):
        metrics: dict[str, int | float] = {"rx_bytes_per_s": 1_200_000, "tx_bytes_per_s": 800_000}
        if speed:
            metrics["speed_bits_per_s"] = speed
        driver = {"driver": "mlx5_core", "pci_address": "0000:02:00.0"} if speed else {}
        graph.try_add_node(nodes.Nic(name=name, attributes={"numa_node": numa, **driver}, metrics=metrics))
    for number in range(2):
        disk = nodes.Disk(
            name=f"nvme{number}n1",
            attributes={"model": "SAMSUNG MZWLO3T8", "numa_node": number},
            metrics={
                "size_bytes": 3_840_000_000_000,
                "read_bytes_per_s": 1_400_000_000,
                "write_bytes_per_s": 12_000_000,
            },
        )
        graph.try_add_node(disk)
    return gpus


def _process(graph: Graph, pid: int, name: str, parent: str | None, holder: str, **more: object) -> nodes.Process:
    cpu = more.pop("cpu", 0.1)
    rss = more.pop("rss", 40 * 1024**2)
    process = nodes.Process(
        pid=pid, start=100 + pid, attributes={"name": name, **more}, metrics={"cpu_pct": cpu, "rss_bytes": rss}
    )  # type: ignore[dict-item]
    graph.try_add_node(process)
    if parent:
        graph.try_add_edge(edges.Own(parent, process.id))
    graph.try_add_edge(edges.Host(holder, process.id))
    return process


def h100() -> Graph:
    """Eight ranks in a container on 2 NUMA nodes and 8 H100 behind NVSwitch: NCCL sockets, shared memory, workers."""
    graph = Graph()
    host = nodes.Host(
        hostname="dgx-01",
        attributes={"name": "dgx-01", "kernel": "6.8.0-52-generic", "architecture": "x86_64"},
        metrics={
            "cpus_count": 224,
            "memory_total_bytes": 2014 * GIB,
            "memory_available_bytes": 1020 * GIB,
            "load_1min": 41.2,
        },
    )
    graph.try_add_node(host)
    gpus = _hardware(graph)
    systemd = _process(graph, 1, "systemd", None, host.id)
    for pid in range(3, 60):
        name = "kthreadd" if pid == 3 else f"kworker/{pid}:0"
        if pid == 3:
            kthreadd = _process(graph, 2, "kthreadd", None, host.id)
        _process(graph, pid, name if pid > 3 else "rcu_gp", kthreadd.id, host.id)
    for pid, name in enumerate(
        ("sshd", "cron", "dbus-daemon", "nvidia-persiste", "dcgm", "chronyd", "rsyslogd", "agetty"), 700
    ):
        unit = nodes.Unit(path=f"/system.slice/{name}.service", attributes={"name": f"{name}.service"})
        graph.try_add_node(unit)
        graph.try_add_edge(edges.Host(host.id, unit.id))
        _process(graph, pid, name, systemd.id, unit.id)
    shim = _process(graph, 900, "containerd-shim", systemd.id, host.id)
    container = nodes.Container(
        container_id="5f1c9a7e2b40", attributes={"name": "llama-pretrain", "runtime": "docker", "image": IMAGE},
        metrics={"cpu_pct": 6100.0, "memory_used_bytes": 690 * GIB, "memory_limit_bytes": 1800 * GIB},
    )  # fmt: skip
    graph.try_add_node(container)
    graph.try_add_edge(edges.Host(host.id, container.id))
    torchrun = _process(
        graph,
        4000,
        "torchrun",
        shim.id,
        container.id,
        cmdline="torchrun --nproc-per-node=8 train.py",
        cpu=0.4,
        rss=GIB // 4,
    )
    ranks = []
    store = nodes.Socket(protocol="tcp", address="10.0.0.5:29500", attributes={"state": "LISTEN"})
    graph.try_add_node(store)
    graph.try_add_edge(edges.Belong(store.id, torchrun.id))
    ring = nodes.SharedMemory(mechanism="posix", key="nccl-shm-ring", metrics={"size_bytes": 512 * 1024**2})
    graph.try_add_node(ring)
    for rank in range(8):
        process = _process(
            graph, 4100 + rank, "python3", torchrun.id, container.id,
            cmdline=["/usr/bin/python3", "-u", "train.py", f"--local-rank={rank}"], cpu=103.0 + rank, rss=21 * GIB,
        )  # fmt: skip
        ranks.append(process)
        graph.try_add_edge(
            edges.Access(process.id, gpus[rank].id, {}, {"memory_used_bytes": (70 - rank % 2) * GIB, "sm_util_pct": 95})
        )
        graph.try_add_edge(
            edges.NumaAccess(process.id, f"Numa({rank // 4})", {"cpus_allowed": "0-55"}, {"resident_bytes": 21 * GIB})
        )
        graph.try_add_edge(edges.Access(process.id, ring.id, {}, {"resident_bytes": 64 * 1024**2}))
        for number in range(24):
            thread = nodes.Thread(
                tid=41000 + rank * 100 + number,
                start=9,
                attributes={"name": "pt_autograd" if number % 3 else "NCCL proxy"},
            )
            graph.try_add_node(thread)
            graph.try_add_edge(edges.Own(process.id, thread.id))
        for number in range(6):
            worker = _process(
                graph, 5000 + rank * 10 + number, "pt_data_worker", process.id, container.id, cpu=71.0, rss=3 * GIB
            )
            pipe = nodes.Pipe(inode=900000 + rank * 10 + number)
            graph.try_add_node(pipe)
            graph.try_add_edge(edges.SendTo(worker.id, pipe.id, {}, {"bytes_per_s": 4_000_000}))
            graph.try_add_edge(edges.SendTo(pipe.id, process.id))
            graph.try_add_edge(edges.Belong(pipe.id, process.id))
            batch = nodes.SharedMemory(
                mechanism="posix", key=f"torch_{4100 + rank}_{number}", metrics={"size_bytes": 96 * 1024**2}
            )
            graph.try_add_node(batch)
            graph.try_add_edge(edges.Access(worker.id, batch.id))
            graph.try_add_edge(edges.Access(process.id, batch.id))
    for rank, process in enumerate(ranks):
        following = ranks[(rank + 1) % 8]
        for number in range(2):
            near = nodes.Socket(
                protocol="tcp", address=f"10.0.0.5:{46000 + rank * 10 + number}", attributes={"state": "ESTABLISHED"}
            )
            far = nodes.Socket(
                protocol="tcp", address=f"10.0.0.5:{47000 + rank * 10 + number}", attributes={"state": "ESTABLISHED"}
            )
            for socket, holder in ((near, process), (far, following)):
                graph.try_add_node(socket)
                graph.try_add_edge(edges.Belong(socket.id, holder.id))
            graph.try_add_edge(edges.ConnectTo(near.id, far.id, {"state": "ESTABLISHED"}, {"rtt_ms": 0.05}))
        client = nodes.Socket(protocol="tcp", address=f"10.0.0.5:{51000 + rank}", attributes={"state": "ESTABLISHED"})
        graph.try_add_node(client)
        graph.try_add_edge(edges.Belong(client.id, process.id))
        graph.try_add_edge(edges.ConnectTo(client.id, store.id, {}, {"rtt_ms": 0.04}))
    for peer in range(3):
        for number in range(4):
            near = nodes.Socket(
                protocol="tcp", address=f"10.0.0.5:{48000 + peer * 10 + number}", attributes={"state": "ESTABLISHED"}
            )
            far = nodes.Socket(
                protocol="tcp", address=f"10.0.0.{6 + peer}:{29600 + number}", attributes={"remote": True}
            )
            graph.try_add_node(near)
            graph.try_add_node(far)
            graph.try_add_edge(edges.Belong(near.id, ranks[peer * 2].id))
            graph.try_add_edge(
                edges.ConnectTo(
                    near.id, far.id, {}, {"rtt_ms": 0.21, "bytes_per_s": 480_000_000, "retransmits_count": 2}
                )
            )
    return graph


def coverage() -> list[Coverage]:
    """One collector of each status, with reasons and hints."""
    return [
        Coverage(collector="processes", status="ok", wall_ms=14.2, cpu_ms=13.9, nodes_count=180, edges_count=179),
        Coverage(
            collector="sockets", status="ok", wall_ms=3.1, cpu_ms=3.0, nodes_count=64, losses={"vanished processes": 2},
            notes=[Note(reason="sockets of 3 processes of other users", hint="run as root", count=3)],
        ),
        Coverage(collector="rdma", status="skipped", reason="rdma: no such tool", hint="apt-get install iproute2"),
        Coverage(collector="npu", status="skipped", reason="npu-smi is not installed"),
        Coverage(collector="nvml", status="stale", reason="no answer within 5 s", age_rounds=3),
    ]  # fmt: skip


def findings(graph: Graph) -> list[Finding]:
    """A root cause with a symptom folded under it."""
    gpu = next(entity for entity in graph.of_kind(nodes.GPU) if entity.attributes["index"] == 5)
    return [
        Finding(
            id="power-cap:5", rule="gpu_power_cap", severity="warn", message="GPU 5 runs below its clocks: power cap",
            entities=[gpu.id], evidence=[
                Evidence(element=gpu.id, metric="sm_util_pct", value=91, unit="%"),
                Evidence(element=gpu.id, metric="power_watts", value=680, unit="W"),
            ], cost="about 6 % of this rank's steps",
            advice="Raise the limit with nvidia-smi -pl, or balance the racks.", explains=["straggler:5"],
        ),
        Finding(
            id="straggler:5", rule="straggler", severity="critical", message="Rank 5 holds the others back",
            entities=["Process(pid=4105,start=4205)"],
        ),
    ]  # fmt: skip


ENV = Environment(hostname="dgx-01", machine_id="ab12", boot_id="cd34", version="0.1.0", kernel="6.8.0-52-generic")


def crowd(count: int, seed: int = 7) -> Graph:
    """About ``count`` nodes and twice the edges: processes in a random tree, threads, sockets that talk at random."""
    rng = random.Random(seed)
    graph = Graph()
    host = nodes.Host(hostname="crowd")
    graph.try_add_node(host)
    processes: list[nodes.Process] = []
    for pid in range(1, max(2, count // 4)):
        process = nodes.Process(
            pid=pid, start=pid, attributes={"name": rng.choice(("python3", "nginx", "java", "bash", "worker"))},
            metrics={"cpu_pct": round(rng.random() ** 6 * 100, 1), "rss_bytes": rng.randrange(10**6, 10**9)},
        )  # fmt: skip
        graph.try_add_node(process)
        if processes:
            graph.try_add_edge(edges.Own(processes[rng.randrange(max(1, len(processes) // 3))].id, process.id))
        graph.try_add_edge(edges.Host(host.id, process.id))
        processes.append(process)
    ends: list[nodes.Socket] = []
    while len(graph.nodes) < count:
        owner = rng.choice(processes)
        if rng.random() < 0.5:
            thing: nodes.Thread | nodes.Socket = nodes.Thread(
                tid=10**6 + len(graph.nodes), start=1, attributes={"name": "pool"}
            )
            graph.try_add_edge(edges.Own(owner.id, thing.id))
        else:
            thing = nodes.Socket(
                protocol="tcp", address=f"10.1.0.1:{len(graph.nodes)}", attributes={"state": "ESTABLISHED"}
            )
            graph.try_add_edge(edges.Belong(thing.id, owner.id))
            ends.append(thing)
        graph.try_add_node(thing)
    while ends and len(graph.edges) < 2 * count:
        first, second = rng.choice(ends), rng.choice(ends)
        graph.try_add_edge(edges.ConnectTo(first.id, second.id, {}, {"rtt_ms": 0.1}))
    return graph
