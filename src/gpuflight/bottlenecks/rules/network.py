"""Connections, sockets and network cards."""

from __future__ import annotations

from gpuflight.bottlenecks.base import CLEAR, ElementRule, Need, Screen, Threshold, Verdict
from gpuflight.bottlenecks.window import Look, told
from gpuflight.graph import edges, nodes


class SendQueuePressure(ElementRule):
    """What is sent over a connection piles up: the other end does not read, or the way is too slow.

    Told on the connection; its target is where to look.
    """

    catalogue_id = "N01"
    subject = edges.ConnectTo
    needs = (
        Need(
            kind=edges.ConnectTo,
            metrics=("send_queue_bytes", "send_buffer_bytes", "receiver_limited_pct"),
            given_by="sockets",
        ),
    )
    screens = (Screen("send_queue_bytes", ">", "least"),)
    thresholds = {
        "full": Threshold(value=80, clear_at=60, unit="% of the send buffer", source="skill of witty-profiler"),
        "receiver": Threshold(
            value=80,
            clear_at=50,
            unit="% of the time",
            guess=True,
            source="a full buffer holds two thirds of its size as data; the rest is the kernel's own",
        ),
        "least": Threshold(value=64 * 1024, unit="bytes", source="small buffers are full at once", guess=True),
    }
    guard = "64 KiB and more wait; full is the send buffer, or the receiver's window (tcp_info, Linux 4.9)"
    persist_s = 10.0
    explains = ("data_loader_starvation", "gpu_idle_gaps")
    advice = "look at who reads at the other end: is it stopped, on one full CPU, or behind a slow link?"
    verify = "ss -tmi dst <address>"

    def judge(self, look: Look) -> Verdict:
        queued, buffer = look.metric("send_queue_bytes"), look.metric("send_buffer_bytes")
        share = 100 * queued / buffer if buffer else 0.0
        limited = look.element.metrics.get("receiver_limited_pct", 0.0)
        if queued <= look.limit("least") or (share <= look.limit("full") and limited <= look.limit("receiver")):
            return CLEAR
        closed = f", its window was full {limited:.0f} % of the time" if limited else ""
        return look.fired(
            f"{told('x_bytes', queued)} wait to be sent on {look.label} ({share:.0f} % of its buffer): the other"
            f" end does not take them{closed}",
            [
                look.saw(name)
                for name in ("send_queue_bytes", "send_buffer_bytes", "receiver_limited_pct")
                if look.has(name)
            ],
            entities=[look.element.source, look.element.target],
        )


class Retransmits(ElementRule):
    """A connection sends much of its data twice: packets are lost on the way."""

    catalogue_id = "N02"
    subject = edges.ConnectTo
    needs = (Need(kind=edges.ConnectTo, metrics=("retransmits_per_s", "segments_sent_per_s"), given_by="sockets"),)
    screens = (Screen("retransmits_per_s", ">", 0),)
    thresholds = {
        "share_warn": Threshold(value=1, clear_at=0.5, unit="% of the segments", source="skill of witty-profiler"),
        "share_crit": Threshold(value=5, clear_at=3, unit="% of the segments", source="skill of witty-profiler"),
        "segments": Threshold(value=200, unit="segments/s", source="1,000 in a round; fewer say little", guess=True),
    }
    guard = "it sends at least 200 segments/s"
    persist_s = 5.0
    explains = ("slow_collective", "data_loader_starvation", "straggler_rank")
    advice = "look for drops on the way: NIC counters (ethtool -S), switch ports, MTU; for RoCE see PFC and ECN"
    verify = "ss -ti dst <address>; nstat -az TcpRetransSegs"

    def judge(self, look: Look) -> Verdict:
        again, sent = look.metric("retransmits_per_s"), look.metric("segments_sent_per_s")
        share = 100 * again / sent if sent else 0.0
        if sent < look.limit("segments") or share <= look.limit("share_warn"):
            return CLEAR
        window_s = look.window.interval_s or 0.0
        return look.fired(
            f"{look.label} sends {share:.1f} % of its segments again ({again:.0f} of {sent:.0f} a second)",
            [
                look.saw(name, window_s=window_s, samples_count=2)
                for name in ("retransmits_per_s", "segments_sent_per_s")
            ],
            severity="critical" if share > look.limit("share_crit") else "warn",
            entities=[look.element.source, look.element.target],
        )


class SlowRoundTrip(ElementRule):
    """The round trip of a busy connection is long for one inside a cluster."""

    catalogue_id = "N03"
    subject = edges.ConnectTo
    severity = "info"
    needs = (Need(kind=edges.ConnectTo, metrics=("rtt_ms", "bytes_sent_per_s"), given_by="sockets"),)
    screens = (Screen("rtt_ms", ">", "rtt"),)
    thresholds = {
        "rtt": Threshold(value=10, clear_at=7, unit="ms", source="Coroot, 10 ms inside a cluster"),
        "rtt_far": Threshold(value=100, clear_at=80, unit="ms", source="Coroot, 100 ms anywhere"),
        "busy": Threshold(value=100e3, unit="B/s", source="idle connections are nobody's loss", guess=True),
    }
    guard = "both ends have private addresses, or the round trip is over 100 ms; and it carries data"
    persist_s = 20.0
    advice = "is the other end where you think (traceroute)? is a queue on the way full (N06, N07)?"
    verify = "ss -ti dst <address>"

    def judge(self, look: Look) -> Verdict:
        rtt = look.metric("rtt_ms")
        if rtt <= look.limit("rtt"):
            return CLEAR
        busy = look.metric("bytes_sent_per_s") + look.element.metrics.get("bytes_received_per_s", 0.0)
        near = all(_private(end) for end in (look.element.source, look.element.target))
        if busy < look.limit("busy") or (not near and rtt <= look.limit("rtt_far")):
            return CLEAR
        return look.fired(
            f"a round trip on {look.label} takes {rtt:.1f} ms while it carries {told('x_bytes_per_s', busy)}",
            [look.saw("rtt_ms"), look.saw("bytes_sent_per_s")],
            entities=[look.element.source, look.element.target],
        )


def _private(entity_id: str) -> bool:
    """Whether an endpoint's id names an address of private networks (RFC 1918, RFC 4193)."""
    import ipaddress

    address = entity_id.partition(",")[2].rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(address).is_private
    except ValueError:
        return False


class AcceptQueueOverflow(ElementRule):
    """Connections are refused because a program does not accept them fast enough."""

    catalogue_id = "N04"
    subject = nodes.Host
    needs = (Need(kind=nodes.Host, metrics=("tcp_listen_overflows_per_s",), given_by="host_counters"),)
    thresholds = {
        "overflows_warn": Threshold(value=1, clear_at=0.2, unit="1/s", source="Netdata, tcp_accept_queue_overflows"),
        "overflows_crit": Threshold(value=5, clear_at=2, unit="1/s", source="Netdata, tcp_accept_queue_overflows"),
    }
    advice = "which listener is full? ss -ltn (Recv-Q at Send-Q); a larger backlog needs net.core.somaxconn too"
    verify = "nstat -az TcpExtListenOverflows"

    def judge(self, look: Look) -> Verdict:
        rate = look.metric("tcp_listen_overflows_per_s")
        if rate <= look.limit("overflows_warn"):
            return CLEAR
        return look.fired(
            f"{rate:.1f} connections/s to {look.label} found the accept queue full",
            [look.saw("tcp_listen_overflows_per_s")],
            severity="critical" if rate > look.limit("overflows_crit") else "warn",
        )


class FailedConnects(ElementRule):
    """Connections fail or are reset again and again."""

    catalogue_id = "N05"
    subject = nodes.Host
    severity = "info"
    needs = (
        Need(kind=nodes.Host, metrics=("tcp_connect_failures_per_s", "tcp_resets_per_s"), given_by="host_counters"),
    )
    thresholds = {
        "failures": Threshold(
            value=1, clear_at=0.3, unit="1/s", source="Coroot: any; checks of health are noise", guess=True
        ),
        "resets": Threshold(value=10, clear_at=5, unit="1/s", source="Netdata, 10 times the usual", guess=True),
    }
    persist_s = 30.0
    advice = "who connects to what is not there? kernel_net shows it per process; ss -s, dmesg"
    verify = "nstat -az TcpAttemptFails TcpEstabResets"

    def judge(self, look: Look) -> Verdict:
        failures, resets = look.metric("tcp_connect_failures_per_s"), look.metric("tcp_resets_per_s")
        if failures <= look.limit("failures") and resets <= look.limit("resets"):
            return CLEAR
        return look.fired(
            f"on {look.label} {failures:.1f} connection attempts/s fail and {resets:.1f} connections/s are reset",
            [look.saw("tcp_connect_failures_per_s"), look.saw("tcp_resets_per_s")],
        )


class PacketDrops(ElementRule):
    """Packets are dropped: by a network card, or because the CPUs do not take them up in time."""

    catalogue_id = "N06"
    subject = (nodes.Nic, nodes.Host)
    needs = (
        Need(kind=nodes.Nic, metrics=("rx_drops_per_s", "rx_packets_per_s"), given_by="nics"),
        Need(kind=nodes.Host, metrics=("softnet_drops_per_s", "softnet_squeezed_per_s"), given_by="host_counters"),
    )
    thresholds = {
        "share": Threshold(
            value=2, clear_at=1, unit="% of the packets", source="Netdata, inbound_packets_dropped_ratio"
        ),
        "softnet": Threshold(value=1, clear_at=0.2, unit="1/s", source="Netdata, 1min_netdev_backlog_exceeded"),
        "squeezed": Threshold(value=10, clear_at=5, unit="1/s", source="Netdata, 1min_netdev_budget_ran_out"),
        "packets": Threshold(value=100, unit="packets/s", source="fewer say little", guess=True),
    }
    persist_s = 10.0
    explains = ("retransmits", "rdma_degraded")
    advice = "larger rings (ethtool -G), more queues spread over CPUs (irqbalance), net.core.netdev_budget"
    verify = "ip -s link show <nic>; cat /proc/net/softnet_stat"

    def judge(self, look: Look) -> Verdict:
        if isinstance(look.element, nodes.Host):
            dropped, squeezed = look.metric("softnet_drops_per_s"), look.metric("softnet_squeezed_per_s")
            if dropped <= look.limit("softnet") and squeezed <= look.limit("squeezed"):
                return CLEAR
            return look.fired(
                f"the CPUs of {look.label} are late with packets: {dropped:.1f}/s dropped, {squeezed:.1f}/s put off",
                [look.saw("softnet_drops_per_s"), look.saw("softnet_squeezed_per_s")],
                severity="warn" if dropped > look.limit("softnet") else "info",
            )
        drops, packets = look.metric("rx_drops_per_s"), look.metric("rx_packets_per_s")
        share = 100 * drops / (drops + packets) if drops + packets else 0.0
        if drops + packets < look.limit("packets") or share <= look.limit("share"):
            return CLEAR
        return look.fired(
            f"{look.label} drops {share:.1f} % of what arrives ({drops:.0f} packets/s)",
            [look.saw("rx_drops_per_s"), look.saw("rx_packets_per_s")],
        )


class NicSaturated(ElementRule):
    """A network card carries nearly all that its link can."""

    catalogue_id = "N07"
    subject = nodes.Nic
    needs = (Need(kind=nodes.Nic, metrics=("speed_bits_per_s", "rx_bytes_per_s", "tx_bytes_per_s"), given_by="nics"),)
    thresholds = {
        "used_warn": Threshold(value=85, clear_at=75, unit="% of the link", source="Netdata, 1m_*_traffic_overflow"),
        "used_crit": Threshold(value=90, clear_at=85, unit="% of the link", source="Netdata, 1m_*_traffic_overflow"),
    }
    guard = "the driver knows the speed of the link"
    persist_s = 10.0
    explains = ("slow_collective", "data_loader_starvation", "slow_round_trip", "send_queue_pressure")
    advice = "who sends it? (gpuflight describe --around nic:<name>); spread over more cards, or compress"
    verify = "sar -n DEV 5"

    def judge(self, look: Look) -> Verdict:
        if look.element.attributes.get("operstate") == "down" or look.element.name == "lo":
            return CLEAR
        speed = look.metric("speed_bits_per_s")
        most = max(("rx_bytes_per_s", "tx_bytes_per_s"), key=lambda name: look.element.metrics.get(name, 0.0))
        rate = look.metric(most)
        share = 800 * rate / speed if speed else 0.0
        if share <= look.limit("used_warn"):
            return CLEAR
        return look.fired(
            f"{look.label} {'receives' if most[0] == 'r' else 'sends'} {told('x_bytes_per_s', rate)},"
            f" {share:.0f} % of its link",
            [look.saw(most), look.saw("speed_bits_per_s")],
            severity="critical" if share > look.limit("used_crit") else "warn",
        )
