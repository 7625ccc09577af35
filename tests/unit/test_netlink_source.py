"""Netlink: one dump per namespace and round, fallbacks, recording, and what it says of what it could not see."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from tests.fakes.sockets import OWN, FakeKernel, FakeProcFs, address_message, done, inet_message, tcp_info, unix_message

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.clock import ManualClock
from gpuflight.sources.netlink import Flow, Netlink
from gpuflight.sources.netlink import source as source_module
from gpuflight.sources.netlink.wire import Channel, Connect
from gpuflight.sources.recording import Tape

A, B = ("10.0.0.5", 29500), ("10.0.0.9", 41000)
SOCKSTAT = b"sockets: used 9\nTCP: inuse 3 orphan 0 tw 0 alloc 3 mem 0\nUDP: inuse 1 mem 0\nUDPLITE: inuse 0\n"
SOCKSTAT6 = b"TCP6: inuse 0\nUDP6: inuse 0\nUDPLITE6: inuse 0\n"
TCP_TABLE = (
    b"  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    b"   1: 0500000A:733C 0900000A:A028 01 00000010:00000020 01:00000014 00000000  1000        0 77 2 0 20 4 30 10 -1\n"
)
UNIX_TABLE = b"Num\n0: 00000002 00000000 00010000 0001 01 1060 /run/a\n"
OTHER = 4026532001


@pytest.fixture
def procfs() -> FakeProcFs:
    made = FakeProcFs()
    for who in ("self", 50):
        made.files[who, "sockstat"] = SOCKSTAT
        made.files[who, "sockstat6"] = SOCKSTAT6
    return made


@pytest.fixture
def kernel() -> FakeKernel:
    return FakeKernel(
        {
            (2, 6): [[inet_message(A, B, inode=77, info=tcp_info(rtt_us=9)) + done()]],
            (0, 0): [[address_message("10.0.0.5") + done()]],
            (1, 0): [[unix_message(5, peer=6) + unix_message(6, peer=5) + done()]],
        }
    )


def test_only_what_sockstat_says_is_asked_for_and_once_a_round(procfs: FakeProcFs, kernel: FakeKernel) -> None:
    netlink = Netlink(procfs, connect=kernel.connect)
    netlink.begin_round(1)
    table = netlink.inet_sockets()
    assert netlink.inet_sockets() is table
    assert [socket.inode for socket in table.sockets] == [77]
    assert table.addresses == {0: {"10.0.0.5"}}
    assert kernel.asked == [(2, 6), (2, 17), (0, 0)]  # TCP and UDP over IPv4, addresses
    netlink.begin_round(2)
    again = netlink.inet_sockets()
    assert again is not table
    assert again.sockets[0] is table.sockets[0]


def test_nothing_stays_open_between_rounds(procfs: FakeProcFs, kernel: FakeKernel) -> None:
    netlink = Netlink(procfs, connect=kernel.connect)
    netlink.inet_sockets()
    netlink.unix_sockets()
    assert kernel.links
    assert all(link.closed for link in kernel.links)


def test_without_sockstat_everything_is_asked_for(procfs: FakeProcFs, kernel: FakeKernel) -> None:
    del procfs.files["self", "sockstat"], procfs.files["self", "sockstat6"]
    Netlink(procfs, connect=kernel.connect).inet_sockets()
    assert kernel.asked == [(2, 6), (10, 6), (2, 17), (10, 17), (0, 0)]


def test_each_namespace_is_asked_once_whatever_its_processes(
    procfs: FakeProcFs, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T09: once per network namespace, not once per process."""
    entered: list[dict[int, list[str]]] = []

    def enter(places: dict[int, list[str]], connect: Connect, protocols: tuple[int, ...]) -> dict[int, Channel]:
        entered.append(places)
        return {netns: Channel(connect) for netns in places}

    monkeypatch.setattr(source_module, "open_in_namespaces", enter)
    for pid in range(10, 40):
        procfs.add(pid)
    for pid in range(50, 90):
        procfs.add(pid, netns=OTHER)
    table = Netlink(procfs, connect=kernel.connect).inet_sockets()
    assert [socket.netns for socket in table.sockets] == [0, OTHER]
    assert kernel.asked.count((2, 6)) == 2
    assert entered == [{OTHER: ["/proc/50/ns/net", "/proc/51/ns/net", "/proc/52/ns/net"]}]
    assert len(procfs.opened) == 4  # sockstat and sockstat6 of each namespace


def test_fallback_reads_proc_once_per_namespace(procfs: FakeProcFs) -> None:
    """T09 again, where netlink is refused."""
    for pid in range(50, 90):
        procfs.add(pid, netns=OTHER)
    for who in ("self", 50):
        procfs.files[who, "tcp"] = TCP_TABLE
        procfs.files[who, "udp"] = TCP_TABLE[: TCP_TABLE.index(b"\n") + 1]
    table = Netlink(procfs, connect=FakeKernel(refuse=errno.EPERM).connect).inet_sockets()
    assert [(socket.netns, socket.inode, socket.tcp) for socket in table.sockets] == [(0, 77, None), (OTHER, 77, None)]
    assert [name for name in procfs.opened if name[1] == "tcp"] == [("self", "tcp"), (50, "tcp")]
    assert any("without rtt, retransmits" in limit.reason and "EPERM" in limit.reason for limit in table.limits)
    assert all(limit.hint for limit in table.limits)


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT])
def test_unix_fallback(procfs: FakeProcFs, code: int) -> None:
    procfs.files["self", "unix"] = UNIX_TABLE
    table = Netlink(procfs, connect=FakeKernel(refuse=code).connect).unix_sockets()
    assert [(record.inode, record.peer) for record in table.sockets] == [(1060, None)]
    assert "without their peers" in table.limits[0].reason


def test_protocol_without_a_diag_module_falls_back_alone(procfs: FakeProcFs, kernel: FakeKernel) -> None:
    kernel.answers[2, 17] = [[done(-errno.ENOENT)]]
    procfs.files["self", "udp"] = TCP_TABLE.replace(b"00 00000000  1000        0 77 2 0", b"0 0  0  0 88 2 0")
    table = Netlink(procfs, connect=kernel.connect).inet_sockets()
    assert [(socket.protocol, socket.tcp is None) for socket in table.sockets] == [("tcp", False), ("udp", True)]
    assert [limit.reason.split()[0] for limit in table.limits] == ["udp"]


def test_neither_netlink_nor_proc(procfs: FakeProcFs) -> None:
    with pytest.raises(SourceUnavailable) as caught:
        Netlink(procfs, connect=FakeKernel(refuse=errno.EPERM).connect).inet_sockets()
    assert caught.value.hint


def test_overrun_is_counted_in_the_table(procfs: FakeProcFs, kernel: FakeKernel) -> None:
    """T10: the loss is said in the round."""
    kernel.answers[2, 6].insert(0, [OSError(errno.ENOBUFS, "")])
    table = Netlink(procfs, connect=kernel.connect).inet_sockets()
    assert table.losses == {"netlink overruns": 1}
    assert [socket.inode for socket in table.sockets] == [77]


def test_malformed_messages_are_counted(procfs: FakeProcFs, kernel: FakeKernel) -> None:
    whole = inet_message(A, B, inode=1)
    kernel.answers[2, 6] = [[whole + whole[:40], done()]]
    table = Netlink(procfs, connect=kernel.connect).inet_sockets()
    assert table.losses["malformed socket messages"] >= 1
    assert [socket.inode for socket in table.sockets] == [1]


def test_namespaces_that_may_not_be_read_are_said(procfs: FakeProcFs, kernel: FakeKernel) -> None:
    procfs.add(60, netns=PermissionError(errno.EACCES, ""))
    procfs.add(61, netns=FileNotFoundError(errno.ENOENT, ""))  # ended meanwhile: nothing to say
    table = Netlink(procfs, connect=kernel.connect).inet_sockets()
    assert [(limit.count, bool(limit.hint)) for limit in table.limits] == [(1, True)]


def test_kernel_without_namespaces(procfs: FakeProcFs, kernel: FakeKernel) -> None:
    procfs.own = FileNotFoundError(errno.ENOENT, "")
    procfs.add(60, netns=FileNotFoundError(errno.ENOENT, ""))
    assert [socket.netns for socket in Netlink(procfs, connect=kernel.connect).inet_sockets().sockets] == [0]


def test_parsers_of_namespaces_that_are_gone_are_forgotten(
    procfs: FakeProcFs, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        source_module, "open_in_namespaces", lambda places, connect, protocols: {n: Channel(connect) for n in places}
    )
    netlink = Netlink(procfs, connect=kernel.connect)
    for number in range(3):
        pid = 50 + number
        procfs.add(pid, netns=OTHER + number)
        netlink.begin_round(number)
        netlink.inet_sockets()
        netlink.unix_sockets()
        procfs.end(pid)
    assert {key[0] for key in netlink._inet_parsers} == {0, OTHER + 2}
    assert set(netlink._unix_parsers) == {0, OTHER + 2}


def test_translations_are_read_only_from_a_table_of_bearable_size(procfs: FakeProcFs) -> None:
    netlink = Netlink(procfs, connect=FakeKernel().connect)
    assert netlink.translations() == {}
    netlink.begin_round(2)
    procfs.files["self", "nf_conntrack"] = (
        b"ipv4 2 tcp 6 9 ESTABLISHED src=172.17.0.2 dst=10.0.0.5 sport=42 dport=8080 "
        b"src=172.17.0.3 dst=172.17.0.2 sport=80 dport=42 [ASSURED]\n"
    )
    procfs.texts["sys/net/netfilter/nf_conntrack_count"] = "1"
    assert netlink.translations()[Flow("tcp", "172.17.0.2:42", "10.0.0.5:8080")].local == "172.17.0.3:80"
    procfs.texts["sys/net/netfilter/nf_conntrack_count"] = "250000"
    assert netlink.translations(), "read once per round"
    netlink.begin_round(3)
    assert netlink.translations() == {}


def test_recording_stands_in_for_the_kernel(procfs: FakeProcFs, kernel: FakeKernel, tmp_path: Path) -> None:
    path = str(tmp_path / "r.tar.zst")
    tape = Tape.record(path, ManualClock())
    tape.begin_round(1)
    recorded = Netlink(procfs, tape, kernel.connect)
    first, first_unix = recorded.inet_sockets(), recorded.unix_sockets()
    tape.close()

    replayed = Netlink(procfs, Tape.replay(path), FakeKernel(refuse=errno.EPERM).connect)
    assert replayed.inet_sockets() == first
    assert replayed.unix_sockets() == first_unix


def test_recorded_refusal_is_refused_again(procfs: FakeProcFs, kernel: FakeKernel, tmp_path: Path) -> None:
    path = str(tmp_path / "r.tar.zst")
    procfs.files["self", "unix"] = UNIX_TABLE
    tape = Tape.record(path, ManualClock())
    tape.begin_round(1)
    first = Netlink(procfs, tape, FakeKernel(refuse=errno.EPERM).connect).unix_sockets()
    tape.close()
    assert Netlink(procfs, Tape.replay(path), kernel.connect).unix_sockets() == first


def test_tree_of_fixtures_never_asks_this_machine(procfs: FakeProcFs, kernel: FakeKernel) -> None:
    procfs.files["self", "unix"] = UNIX_TABLE
    table = Netlink(procfs, Tape.blank(), kernel.connect).unix_sockets()
    assert [record.inode for record in table.sockets] == [1060]
    assert kernel.asked == []


def test_own_namespace_is_zero(procfs: FakeProcFs, kernel: FakeKernel) -> None:
    """T01: processes in the host's network namespace are seen like any other."""
    procfs.add(60, netns=OWN)
    assert {socket.netns for socket in Netlink(procfs, connect=kernel.connect).inet_sockets().sockets} == {0}
