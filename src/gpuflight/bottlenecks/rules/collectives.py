"""Collectives as the CUDA probe sees them called: how large they are, and how fast they are against the wires."""

from __future__ import annotations

from gpuflight.bottlenecks.base import CLEAR, ElementRule, Need, NotYet, Screen, Threshold, Unknown, Verdict
from gpuflight.bottlenecks.ceiling import Ceiling, ceiling_of
from gpuflight.bottlenecks.jobs import MEMBERS, Job, Rank, jobs_of
from gpuflight.bottlenecks.window import Look, Window, told
from gpuflight.graph import Entity, edges, nodes

_WINDOW_S = 60.0
_LEAST_CALLS = 100
_MIB = 1 << 20


class SmallPackets(ElementRule):
    """Much of what a program sends by NCCL goes in small messages, of which each pays the latency of all."""

    catalogue_id = "C07"
    subject = nodes.Process
    needs = (Need(kind=nodes.Process, metrics=("nccl_calls_count", "nccl_small_calls_count"), given_by="cuda_probes"),)
    screens = (Screen("nccl_calls_count", ">=", _LEAST_CALLS),)
    thresholds = {
        "share": Threshold(
            value=20, clear_at=15, unit="% of the calls below 1 MB", source="msprof packet.yaml: 20 %, 1 MB"
        ),
        "rate": Threshold(value=10, clear_at=8, unit="small calls/s", source="fewer cost less than 1 ms/s", guess=True),
    }
    guard = "at least 100 calls in a minute, 10 small ones a second"
    persist_s = 30.0
    histories = {nodes.Process: {"nccl_calls_count": _WINDOW_S, "nccl_small_calls_count": _WINDOW_S}}
    explains = ("communication_share", "exposed_communication")
    advice = "larger buckets (DDP bucket_cap_mb, FSDP wrapping of larger units), fused optimisers, ncclGroupStart/End"
    verify = "gpuflight graph --kind Process, nccl_small_calls_count against nccl_calls_count"

    def judge(self, look: Look) -> Verdict:
        watched_s = min(look.covered_s("nccl_calls_count", _WINDOW_S), _WINDOW_S)
        calls = look.increase("nccl_calls_count", _WINDOW_S)
        if calls < _LEAST_CALLS:
            return CLEAR
        small = look.increase("nccl_small_calls_count", _WINDOW_S)
        share, per_s = 100 * small / calls, small / watched_s
        if share < look.limit("share") or per_s < look.limit("rate"):
            return CLEAR
        size = look.element.metrics.get("nccl_bytes")
        mean = ""
        if size is not None and (total := look.metric("nccl_calls_count")):
            mean = f"; {told('x_bytes', size / total)} on average since it is watched"
        return look.fired(
            f"{look.label} sends {share:.0f} % of its NCCL messages below 1 MB: {small:.0f} of {calls:.0f} in the last"
            f" {watched_s:.0f} s{mean}",
            [
                look.saw("nccl_small_calls_count", small, samples_count=int(calls), window_s=watched_s),
                look.saw("nccl_calls_count", calls, window_s=watched_s),
            ],
        )


class SlowCollective(ElementRule):
    """Large collectives of a program are far slower than the wires between its GPUs allow.

    Bus bandwidth as in nccl-tests (PERFORMANCE.md): bytes times 2(n-1)/n for all-reduce and so on, over the time in
    which NCCL's kernels ran. The ceiling is the narrowest hop of the widest way between its GPU and another of the job,
    and what the RDMA cards of the host carry together if the job spans hosts. Of the ranks of a host that are seen the
    fastest counts: it came last and did not wait for others.
    """

    catalogue_id = "C06"
    subject = nodes.Process
    needs = (
        Need(kind=nodes.Process, metrics=("nccl_bus_bytes", "nccl_bytes", "nccl_calls_count"), given_by="cuda_probes"),
        Need(kind=nodes.Session, metrics=("communication_active_ms",), given_by="sessions"),
        Need(kind=nodes.GPU, given_by="nvml"),
        Need(kind=nodes.NvSwitch, given_by="nvml"),
        Need(kind=nodes.PciDevice, given_by="pci"),
        Need(kind=nodes.Numa, given_by="numa"),
        Need(kind=nodes.CpuPackage, given_by="numa"),
        Need(kind=nodes.RdmaPort, metrics=("speed_bits_per_s",), given_by="rdma"),
        Need(kind=nodes.Host),
        Need(kind=edges.NvLink, given_by="nvml"),
        Need(kind=edges.PcieLink, given_by="pci"),
        Need(kind=edges.AttachedTo, given_by="pci"),
        Need(kind=edges.Affinity, given_by="numa"),
        Need(kind=edges.NumaDistance, given_by="numa"),
    )
    screens = (Screen("nccl_bytes", ">=", 64 * _MIB),)
    thresholds = {
        "share": Threshold(
            value=50,
            clear_at=60,
            unit="% of the ceiling",
            source="msprof: contention below 80 %",
            guess=True,
            falling=True,
        ),
        "size": Threshold(value=64 * _MIB, unit="B per call", source="below, latency counts (nccl-tests)", guess=True),
    }
    guard = "messages over 64 MiB on average, at least 100 ms of communication in the last minute"
    persist_s = 60.0
    every_rounds = 6
    histories = {
        nodes.Process: dict.fromkeys(("nccl_bus_bytes", "nccl_bytes", "nccl_calls_count"), _WINDOW_S),
        nodes.Session: {"communication_active_ms": _WINDOW_S},
    }
    members = MEMBERS
    relations = (edges.Own, edges.Access)
    explains = ("communication_share", "exposed_communication")
    advice = "look at the narrowest hop: links that are down or slow, P2P that is off, a card that is far from the GPU"
    verify = "all_reduce_perf -b 128M -e 1G -f 2 -g <GPUs> (nccl-tests), column busbw"

    def judge(self, look: Look) -> Verdict:
        calls = look.increase("nccl_calls_count", _WINDOW_S)
        if calls < 2:
            return CLEAR
        size = look.increase("nccl_bytes", _WINDOW_S) / calls
        if size < look.limit("size"):
            return CLEAR
        job, mine = look.window.shared("jobs by rank", _jobs_by_rank).get(look.id, (None, None))
        if job is None or mine is None:
            raise Unknown("rank of Process: which job it belongs to is not known")
        ranks = [rank for rank in job if rank.process is not None and not rank.ns]
        rates = look.window.shared(f"bus rates of {job.name}", lambda _: _rates(look, ranks))
        if not rates:
            raise NotYet("the times of NCCL's kernels in the last minute are not known: no session tells them")
        fastest = max(rates, key=rates.__getitem__)
        ceiling = look.window.shared(f"ceiling of {job.name}", lambda window: _ceiling(window, job, job.ranks[fastest]))
        if isinstance(ceiling, Unknown):
            raise Unknown(str(ceiling))
        if mine.number != fastest:
            return CLEAR  # the finding is one per host
        rate = rates[fastest]
        if 100 * rate >= look.limit("share") * ceiling.bytes_per_s:
            return CLEAR
        return look.fired(
            f"collectives of {look.label} move {told('x_bytes_per_s', rate)} per GPU (bus bandwidth),"
            f" {100 * rate / ceiling.bytes_per_s:.0f} % of what {ceiling.text} carries"
            f" ({told('x_bytes_per_s', ceiling.bytes_per_s)}), with messages of {told('x_bytes', size)}",
            [
                look.saw("nccl_bus_bytes_per_s", rate, samples_count=int(calls), window_s=_WINDOW_S),
                look.saw("ceiling_bytes_per_s", ceiling.bytes_per_s, of=ceiling.element),
            ],
            entities=[look.id, *ceiling.entities],
            edges=ceiling.edges,
        )


def _jobs_by_rank(window: Window) -> dict[str, tuple[Job, Rank]]:
    return {rank.element.id: (job, rank) for job in jobs_of(window) for rank in job}


def _rates(look: Look, ranks: list[Rank]) -> dict[int, float]:
    """Bus bytes per second of each rank of which they are known."""
    return {rank.number: rate for rank in ranks if (rate := _bus_bytes_per_s(look, rank.process, rank.sessions))}


def _ceiling(window: Window, job: Job, rank: Rank) -> Ceiling | Unknown:
    """That of the rank that counts, or why it is not known."""
    try:
        return ceiling_of(window, job, rank)
    except Unknown as reason:
        return reason


def _bus_bytes_per_s(look: Look, process: Entity | None, sessions: list[nodes.Session]) -> float | None:
    """Of one rank over the last minute; None where it is not known, or it hardly communicated."""
    if process is None or "nccl_bus_bytes" not in process.metrics:
        return None
    for session in sessions:
        if session.attributes.get("state") == "live" and "communication_active_ms" in session.metrics:
            active_ms = look.increase("communication_active_ms", _WINDOW_S, of=session)
            if active_ms >= 100:
                return look.increase("nccl_bus_bytes", _WINDOW_S, of=process) / active_ms * 1e3
    return None
