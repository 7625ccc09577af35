"""Cases of the rules about limits of the host, connections and network cards."""

from __future__ import annotations

from typing import Any

from tests.rule_scenes import Case, Scene, changing, steady
from tests.unit.rule_cases.host import host, process

from gpuflight.graph import edges, nodes

_A = nodes.Socket(protocol="tcp", address="10.0.0.5:40000")
_B = nodes.Socket(protocol="tcp", address="10.0.0.6:29500")
_FAR = nodes.Socket(protocol="tcp", address="93.184.216.34:443")
EDGE = f"ConnectTo({_A.id}->{_B.id})"
_BUSY: dict[str, Any] = {
    "rtt_ms": 0.3, "send_queue_bytes": 0, "send_buffer_bytes": 4 << 20, "bytes_sent_per_s": 2e8,
    "bytes_received_per_s": 1e6, "retransmits_count": 4, "segments_sent_count": 90_000,
    "retransmits_per_s": 0.0, "segments_sent_per_s": 1e5,
}  # fmt: skip


def link(target: nodes.Socket = _B, without: str = "", **other: float) -> list[Any]:
    """A healthy busy connection, but for what is named."""
    metrics = {**_BUSY, **other}
    unknown = {name: "not asked over netlink" for name in without.split() if metrics.pop(name, None) is not None}
    return [_A, target, edges.ConnectTo(_A.id, target.id, {"state": "ESTABLISHED"}, metrics, unknown or None)]


def _sends(again_per_s: float) -> Scene:
    """1,000 segments/s, of them some once more."""
    return steady(*link(retransmits_per_s=again_per_s, segments_sent_per_s=1000.0), seconds=10)


def nic(without: str = "", **other: Any) -> nodes.Nic:
    """A healthy card of 100 Gb/s, but for what is named."""
    metrics: dict[str, Any] = {
        "speed_bits_per_s": 100e9, "rx_bytes_per_s": 3e9, "tx_bytes_per_s": 2e9, "rx_packets_per_s": 400e3,
        "rx_drops_per_s": 0.0,
    }  # fmt: skip
    attributes: dict[str, Any] = {"operstate": "up"}
    for name, value in other.items():
        (metrics if name in metrics else attributes)[name] = value
    unknown = {name: "the driver does not know" for name in without.split() if metrics.pop(name, None) is not None}
    return nodes.Nic(name="eth0", attributes=attributes, metrics=metrics, unknown=unknown or None)


_QUEUE = {"queued_bytes": 97_000, "limit_bytes": 100_000, "messages_count": 970}
_CALM = {"softnet_drops_per_s": 0.0, "softnet_squeezed_per_s": 0.0}


def _queue(**metrics: float) -> nodes.MessageQueue:
    return nodes.MessageQueue(mechanism="posix", key="/q", metrics=metrics)


def _clock(**metrics: float) -> nodes.Host:
    return nodes.Host(hostname="h", attributes={"clock_synchronised": "yes"}, metrics=metrics)


_WILD = nodes.Host(hostname="h", attributes={"clock_synchronised": "no"})


def _opens(per_hour: int) -> Scene:
    return changing(lambda n: [process(fds_count=2000 + per_hour * n // 60, fds_limit_count=4096)], 100, step_s=60.0)


CASES = {
    "descriptor_leak": Case(
        fires=steady(process(fds_count=1000, fds_limit_count=1024), seconds=90),
        about="Process(pid=77,start=1)",
        severity="critical",
        clear=steady(process(), process(pid=78, fds_count=300, fds_limit_count=1024), host(), seconds=90),
        unknown=steady(process("fds_limit_count", fds_count=1000), seconds=90),
        also={
            "grows": ("warn", _opens(600)),
            "grows slowly": ("clear", _opens(20)),
            "the host": ("critical", steady(host(files_open_count=990, files_limit_count=1000), seconds=90)),
        },
    ),
    "ipc_exhaustion": Case(
        fires=steady(_queue(**_QUEUE)),
        about="MessageQueue(posix,/q)",
        severity="critical",
        clear=steady(_queue(**{**_QUEUE, "queued_bytes": 10})),
        unknown=steady(_queue(messages_count=3)),
    ),
    "clock_unsynchronised": Case(
        fires=steady(_WILD, nodes.RdmaDevice(name="mlx5_0"), seconds=35),
        about="Host(h)",
        severity="info",
        clear=steady(_clock(clock_offset_ms=0.2, clock_max_error_ms=3.0), seconds=35),
        unknown=steady(host(), seconds=35),
        also={
            "alone": ("clear", steady(_WILD, seconds=35)),
            "off": ("warn", steady(_clock(clock_offset_ms=-40.0, clock_max_error_ms=90.0), seconds=35)),
        },
    ),
    "send_queue_pressure": Case(
        fires=steady(*link(send_queue_bytes=4 << 20), seconds=15),
        about=EDGE,
        clear=steady(*link(), seconds=15),
        unknown=steady(*link(without="send_queue_bytes"), seconds=15),
    ),
    "retransmits": Case(
        fires=_sends(80.0),
        about=EDGE,
        severity="critical",
        clear=_sends(0.0),
        unknown=steady(*link(without="retransmits_per_s")),
        also={"some": ("warn", _sends(20.0))},
    ),
    "slow_round_trip": Case(
        fires=steady(*link(rtt_ms=25.0), seconds=25),
        about=EDGE,
        clear=steady(*link(), seconds=25),
        unknown=steady(*link(without="rtt_ms"), seconds=25),
        also={
            "far away": ("clear", steady(*link(_FAR, rtt_ms=40.0), seconds=25)),
            "idle": ("clear", steady(*link(rtt_ms=40.0, bytes_sent_per_s=10.0, bytes_received_per_s=0), seconds=25)),
        },
    ),
    "accept_queue_overflow": Case(
        fires=steady(host(tcp_listen_overflows_per_s=7.0)),
        about="Host(h)",
        severity="critical",
        clear=steady(host(tcp_listen_overflows_per_s=0.0)),
        unknown=steady(host()),
    ),
    "failed_connects": Case(
        fires=steady(host(tcp_connect_failures_per_s=4.0, tcp_resets_per_s=0.1), seconds=35),
        about="Host(h)",
        clear=steady(host(tcp_connect_failures_per_s=0.1, tcp_resets_per_s=0.1), seconds=35),
        unknown=steady(host(), seconds=35),
    ),
    "packet_drops": Case(
        fires=steady(nic(rx_drops_per_s=30e3), seconds=15),
        about="Nic(eth0)",
        clear=steady(nic(), host(**_CALM), seconds=15),
        unknown=steady(nic("rx_drops_per_s"), seconds=15),
        also={"late CPUs": ("info", steady(host(**{**_CALM, "softnet_squeezed_per_s": 90.0}), seconds=15))},
    ),
    "nic_saturated": Case(
        fires=steady(nic(rx_bytes_per_s=12.1e9), seconds=15),
        about="Nic(eth0)",
        severity="critical",
        clear=steady(nic(), seconds=15),
        unknown=steady(nic("speed_bits_per_s"), seconds=15),
        also={"down": ("clear", steady(nic("speed_bits_per_s", operstate="down"), seconds=15))},
    ),
}
