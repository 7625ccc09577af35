"""RDMA ports: errors that break connections, errors that slow them, congestion, flapping, the way to GPU memory."""

from __future__ import annotations

from collections.abc import Iterable

from gpuflight.bottlenecks.base import CLEAR, ElementRule, GroupRule, Need, Threshold, Unknown, Verdict
from gpuflight.bottlenecks.window import Look, Window, evidence, told
from gpuflight.graph import edges, nodes

_FATAL = (
    "link_downed_count", "excessive_buffer_overrun_errors_count", "local_link_integrity_errors_count",
    "rnr_nak_retry_err_count", "req_transport_retries_exceeded_count",
)  # fmt: skip
_FATAL_WINDOW_S = 300.0
_FLAP_WINDOW_S = 12 * 3600.0
_CONGESTION_WINDOW_S = 300.0
_CNP = ("rp_cnp_handled_per_s", "np_cnp_sent_per_s", "np_ecn_marked_roce_packets_per_s")


class RdmaFatal(ElementRule):
    """A port counted errors of a kind that breaks connections."""

    catalogue_id = "N08"
    subject = nodes.RdmaPort
    severity = "critical"
    needs = (Need(kind=nodes.RdmaPort, metrics=_FATAL, given_by="rdma"),)
    thresholds = {"errors": Threshold(value=0, unit="in 5 minutes", source="NVSentinel: any increment")}
    persist_rounds = 1
    time_matters = False
    histories = {nodes.RdmaPort: dict.fromkeys(_FATAL, _FATAL_WINDOW_S)}
    explains = ("slow_collective", "collective_hang", "straggler_rank", "exposed_communication")
    advice = "look at cable and transceiver (mlxlink -d <device> -c -e), then at the switch's port"
    verify = "grep . /sys/class/infiniband/<device>/ports/1/counters/*"

    def judge(self, look: Look) -> Verdict:
        known = [name for name in _FATAL if look.has(name)]
        if not known:
            look.metric(_FATAL[0])
        rose = {name: look.increase(name, _FATAL_WINDOW_S) for name in known}
        bad = {name: count for name, count in rose.items() if count > look.limit("errors")}
        if not bad:
            return CLEAR
        listed = ", ".join(f"{name.removesuffix('_count')} +{count:.0f}" for name, count in bad.items())
        return look.fired(
            f"{look.label} counted errors that break connections: {listed} in 5 minutes",
            [look.saw(name, count, samples_count=2, window_s=_FATAL_WINDOW_S) for name, count in bad.items()],
        )


class RdmaDegraded(ElementRule):
    """A port counts errors at a rate that costs throughput."""

    catalogue_id = "N09"
    subject = nodes.RdmaPort
    thresholds = {
        "symbol_error": Threshold(value=10, clear_at=5, unit="1/s", source="NVSentinel (non-zero is normal with PAM4)"),
        "link_error_recovery": Threshold(value=5 / 60, unit="1/s", source="NVSentinel: 5 a minute"),
        "port_rcv_errors": Threshold(value=10, clear_at=5, unit="1/s", source="NVSentinel"),
        "local_ack_timeout_err": Threshold(value=1, clear_at=0.5, unit="1/s", source="NVSentinel"),
        "port_xmit_discards": Threshold(value=100, clear_at=50, unit="1/s", source="NVSentinel"),
        "roce_slow_restart": Threshold(value=10, clear_at=5, unit="1/s", source="NVSentinel"),
    }
    needs = (Need(kind=nodes.RdmaPort, metrics=tuple(f"{name}_per_s" for name in thresholds), given_by="rdma"),)
    persist_s = 10.0
    explains = ("slow_collective", "straggler_rank", "exposed_communication")
    advice = "clean or replace cable and transceiver; for RoCE check PFC and ECN on the switch"
    verify = "mlxlink -d <device> -c; grep . /sys/class/infiniband/<device>/ports/1/hw_counters/*"

    def judge(self, look: Look) -> Verdict:
        known = [name for name in self.thresholds if look.has(f"{name}_per_s")]
        if not known:
            look.metric("symbol_error_per_s")
        bad = [name for name in known if look.metric(f"{name}_per_s") > look.limit(name)]
        if not bad:
            return CLEAR
        listed = ", ".join(f"{name} {look.metric(f'{name}_per_s'):.1f}/s" for name in bad)
        return look.fired(f"{look.label} counts {listed}", [look.saw(f"{name}_per_s") for name in bad])


class RdmaCongestion(ElementRule):
    """Congestion marks on a port rise while it carries less: the network is full.

    Marks alone say little: they are how RoCE is meant to work.
    """

    catalogue_id = "N10"
    subject = nodes.RdmaPort
    severity = "info"
    needs = (Need(kind=nodes.RdmaPort, metrics=(*_CNP, "tx_bytes_per_s"), given_by="rdma"),)
    thresholds = {
        "rise": Threshold(
            value=2, unit="times", source="Oracle, RoCE counters; NVSentinel dropped it as noisy", guess=True
        ),
        "fall": Threshold(value=20, unit="% less throughput", source="as above", guess=True),
        "marks": Threshold(value=100, unit="1/s", source="fewer are how it is meant to work", guess=True),
    }
    persist_rounds = 3
    histories = {nodes.RdmaPort: {**dict.fromkeys(_CNP, _CONGESTION_WINDOW_S), "tx_bytes_per_s": _CONGESTION_WINDOW_S}}
    explains = ("slow_collective",)
    advice = "who shares the way? spread jobs over other leaves, check PFC/ECN thresholds (DCQCN) of the fabric"
    verify = "grep . /sys/class/infiniband/<device>/ports/1/hw_counters/*cnp*"

    def judge(self, look: Look) -> Verdict:
        name = next((each for each in _CNP if look.has(each)), _CNP[0])
        marks, sent = look.metric(name), look.metric("tx_bytes_per_s")
        if marks < look.limit("marks"):
            return CLEAR
        now_s, window_s = look.window.now_s, _CONGESTION_WINDOW_S
        marks_before = look.history(name, window_s, least=0.8).mean(now_s, window_s)
        sent_before = look.history("tx_bytes_per_s", window_s, least=0.8).mean(now_s, window_s)
        if not marks_before or not sent_before:
            return CLEAR
        fell = 100 * (1 - sent / sent_before)
        if marks < look.limit("rise") * marks_before or fell < look.limit("fall"):
            return CLEAR
        return look.fired(
            f"{look.label} is marked {marks:.0f} times/s ({marks / marks_before:.1f} times the mean of 5 minutes) and"
            f" sends {fell:.0f} % less",
            [look.saw(name), look.saw("tx_bytes_per_s")],
        )


class RdmaFlapping(ElementRule):
    """A port goes down and comes up again, or has been down for minutes."""

    catalogue_id = "N11"
    subject = nodes.RdmaPort
    needs = (Need(kind=nodes.RdmaPort, attributes=("state",), metrics=("link_downed_count",), given_by="rdma"),)
    thresholds = {
        "downs": Threshold(value=3, unit="times in 12 hours", source="gpud, ib flap: 3 downs in 12 h"),
    }
    guard = "a port that was up before; ports that nothing is plugged into are left alone"
    persist_rounds = 1
    time_matters = False
    histories = {nodes.RdmaPort: {"link_downed_count": _FLAP_WINDOW_S}}
    explains = ("rdma_fatal", "slow_collective", "collective_hang")
    advice = "replace cable or transceiver; see the switch's log of this port"
    verify = "ibstat <device>; dmesg | grep -i link"

    def judge(self, look: Look) -> Verdict:
        look.attribute("state")
        downs = look.increase("link_downed_count", _FLAP_WINDOW_S)
        if downs < look.limit("downs"):
            return CLEAR
        return look.fired(
            f"{look.label} went down {downs:.0f} times within 12 hours (now {look.attribute('state')})",
            [look.saw("link_downed_count", downs, samples_count=2, window_s=_FLAP_WINDOW_S), look.saw("state")],
        )


class GpudirectUnused(GroupRule):
    """GPUs and RDMA are busy, but nothing lets the network card reach the GPUs' memory: all goes through the host."""

    catalogue_id = "N13"
    severity = "info"
    needs = (
        Need(kind=nodes.Host, attributes=("gpudirect",), given_by="host_counters"),
        Need(kind=nodes.RdmaPort, metrics=("tx_bytes_per_s", "rx_bytes_per_s"), given_by="rdma"),
        Need(kind=nodes.GPU, metrics=("processes_count",), given_by="nvml"),
    )
    thresholds = {"traffic": Threshold(value=1e9, clear_at=0.5e9, unit="B/s", source="ours", guess=True)}
    guard = "GPUs are used and RDMA carries much; drivers that hand out DMA buffers need no module"
    persist_s = 30.0
    relations = (edges.Access,)
    explains = ("slow_collective", "exposed_communication")
    advice = "modprobe nvidia_peermem, or an open driver with DMA-BUF (NCCL says GDR in its log with NCCL_DEBUG=INFO)"
    verify = "lsmod | grep peermem; NCCL_DEBUG=INFO <program> | grep -i gdr"

    def judge(self, window: Window) -> Iterable[Verdict]:
        gpus = [gpu for gpu in window.all(nodes.GPU) if not gpu.ns and gpu.metrics.get("processes_count")]
        ports = [port for port in window.all(nodes.RdmaPort) if not port.ns]
        if not gpus or not ports:
            return
        host = next((each for each in window.all(nodes.Host) if not each.ns), None)
        state = host.attributes.get("gpudirect") if host is not None else None
        if host is None or state is None:
            raise Unknown("gpudirect of Host: not told here")
        sums = {p.id: p.metrics.get("tx_bytes_per_s", 0.0) + p.metrics.get("rx_bytes_per_s", 0.0) for p in ports}
        total = sum(sums.values())
        if state != "no module" or total <= window.overrides.threshold(self, "traffic").value:
            return
        busiest = max(sums, key=sums.__getitem__)
        yield Verdict(
            state="fired", subject=host.id, severity=self.severity,
            entities=[host.id, busiest, *(gpu.id for gpu in gpus)],
            evidence=[evidence(host.id, "gpudirect", state), evidence(busiest, "rdma_bytes_per_s", total)],
            message=f"RDMA carries {told('x_bytes_per_s', total)} beside {len(gpus)} GPUs in use, and no module lets it"
            " reach their memory (suspected: the log of NCCL tells for sure)",
        )  # fmt: skip
