"""Cases of the rules about communication of one program: sessions, and collectives as the CUDA probe sees them."""

from __future__ import annotations

from tests.rule_scenes import Case, Scene, changing

from gpuflight.graph import Edge, Entity, edges, nodes

MIB = 1 << 20
_PER_ROUND: dict[str, float] = {
    "gpu_timeline_ms": 5000.0, "gpu_active_ms": 4600.0, "steps_ms": 4900.0, "steps_count": 40.0,
    "communication_active_ms": 300.0, "communication_ms": 300.0, "communication_overlapped_ms": 240.0,
    "communication_kernels_count": 400.0, "sync_batch_norms_count": 0.0,
}  # fmt: skip
"""What a healthy rank adds in 5 s: 6 % communication, of which 80 % is hidden."""


def session(n: int, without: str = "", why: str = "the log has none", **other: float) -> nodes.Session:
    """After n rounds; sums since its beginning."""
    metrics = {name: value * (n + 3) for name, value in {**_PER_ROUND, **other}.items()}
    metrics |= {"communication_unclassified_pct": 2.5, "communication_own_streams_count": 1.0}
    metrics |= {name: value for name, value in other.items() if name in ("communication_own_streams_count",)}
    unknown = {name: why for name in without.split() if metrics.pop(name, None) is not None}
    attributes = {"state": "live", "communication_unclassified": ["ncclNewKernel_AllReduce"]}
    return nodes.Session(session_id="s", attributes=attributes, metrics=metrics, unknown=unknown or None)


def told(without: str = "", count: int = 14, process: nodes.Process | None = None, **other: float) -> Scene:
    """One that runs."""

    def one(n: int) -> list[Entity | Edge]:
        found: list[Entity | Edge] = [session(n, without, **other)]
        return [*found, process, edges.Own(process.id, found[0].id)] if process is not None else found  # type: ignore[union-attr]

    return changing(one, count)


_RENAMED = {"communication_kernels_count": 0.0, "communication_active_ms": 0.0, "communication_overlapped_ms": 0.0}
_CALLS = nodes.Process(pid=7, start=1, metrics={"nccl_calls_count": 900.0})
_QUIET = nodes.Process(pid=7, start=1, metrics={"cpu_pct": 90.0})


def calls(small: float | None = 200.0, per_round: float = 400.0, count: int = 16) -> Scene:
    """A process that calls NCCL."""

    def one(n: int) -> list[Entity]:
        metrics = {"nccl_calls_count": per_round * (n + 1), "nccl_bytes": per_round * (n + 1) * 3 * MIB}
        if small is not None:
            metrics["nccl_small_calls_count"] = small * (n + 1)
        unknown = None if small is not None else {"nccl_small_calls_count": "of a data type whose size is not known"}
        return [nodes.Process(pid=7, start=1, metrics=metrics, unknown=unknown)]

    return changing(one, count)


def moving(
    bus_gb_per_s: float,
    size_mib: float = 256.0,
    count: int = 30,
    links: bool = True,
    timed: bool = True,
    ranks: int = 2,
) -> Scene:
    """Two ranks on GPUs with an NVLink of 450 GB/s between them; both communicate for 500 ms each 5 s."""

    def one(n: int) -> list[Entity | Edge]:
        found: list[Entity | Edge] = []
        for rank in range(2):
            sums = {
                "nccl_calls_count": 100.0 * (n + 1),
                "nccl_bytes": 100.0 * size_mib * MIB * (n + 1),
                "nccl_bus_bytes": bus_gb_per_s * 1e9 * 0.5 * (n + 1),
            }
            attributes = {"rank": rank, "world_size": ranks, "job": "j", "ppid": 1}
            process = nodes.Process(pid=10 + rank, start=1, attributes=attributes, metrics=sums)
            gpu = nodes.GPU(uuid=f"G{rank}", attributes={"index": rank, "nvlink_version": 4})
            metrics = {"communication_active_ms": 500.0 * (n + 1)} if timed else {}
            told_of = nodes.Session(session_id=f"s{rank}", attributes={"state": "live"}, metrics=metrics)
            found += [process, gpu, told_of, edges.Access(process.id, gpu.id), edges.Own(process.id, told_of.id)]
        if links:
            found.append(edges.NvLink("GPU(uuid=G0)", "GPU(uuid=G1)", {}, {"expected_bytes_per_s": 450e9}))
        return found

    return changing(one, count)


CASES = {
    "communication_share": Case(
        fires=told(communication_active_ms=1200.0, communication_overlapped_ms=900.0),
        about="Session(s)",
        clear=told(),
        unknown=told("communication_kernels_count"),
        also={
            "critical": ("critical", told(communication_active_ms=2600.0)),
            "without steps": ("warn", told("steps_ms steps_count", communication_active_ms=1200.0)),
            "N25 renamed": ("unknown", told(process=_CALLS, **_RENAMED)),
            "none": ("clear", told(process=_QUIET, **_RENAMED)),
            "first rounds": ("unknown", told(count=2, communication_active_ms=2600.0)),
        },
    ),
    "exposed_communication": Case(
        fires=told(communication_active_ms=1200.0, communication_overlapped_ms=100.0),
        about="Session(s)",
        clear=told(communication_active_ms=1200.0, communication_overlapped_ms=900.0),
        unknown=told("communication_overlapped_ms", communication_active_ms=1200.0),
        also={
            "one stream": (
                "clear",
                told(
                    communication_active_ms=1200.0, communication_overlapped_ms=0.0, communication_own_streams_count=0.0
                ),
            ),
            "N26 no communication": ("clear", told(process=_QUIET, **_RENAMED)),
        },
    ),
    "sync_batch_norm": Case(
        fires=told(sync_batch_norms_count=53.0 * 40),
        about="Session(s)",
        clear=told(sync_batch_norms_count=8.0 * 40),
        unknown=told("steps_count", sync_batch_norms_count=53.0 * 40),
    ),
    "small_packets": Case(
        fires=calls(),
        about="Process(pid=7,start=1)",
        clear=calls(small=20.0),
        unknown=calls(small=None),
        also={"few calls": ("clear", calls(small=5.0, per_round=5.0))},
    ),
    "slow_collective": Case(
        fires=moving(120.0),
        about="Process(pid=10,start=1)",
        clear=moving(350.0),
        unknown=moving(120.0, links=False),
        also={
            "small messages": ("clear", moving(20.0, size_mib=1.0)),
            "no session": ("unknown", moving(120.0, timed=False)),
            "some ranks are not seen": ("unknown", moving(120.0, ranks=8)),
        },
    ),
}
