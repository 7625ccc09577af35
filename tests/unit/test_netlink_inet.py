"""inet_diag messages and /proc/net tables become records; unchanged sockets keep theirs; garbage harms nobody."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.sockets import done, inet_message, tcp_info

from gpuflight.sources.netlink.inet_diag import InetParser
from gpuflight.sources.netlink.proc_tables import InetTableParser, hex_address, parse_sockstat
from gpuflight.sources.netlink.records import inet_key

A, B = ("10.0.0.5", 29500), ("10.0.0.9", 41000)
MAPPED = ("::ffff:10.0.0.5", 29500), ("::ffff:10.0.0.9", 41000)


def parse(*messages: bytes, time_wait_limit: int = 0) -> list:
    return InetParser(0, "tcp").parse(b"".join(messages) + done(), time_wait_limit)


def test_tcp_socket() -> None:
    raw = tcp_info(rtt_us=250, retransmits=3, acked=5001, received=700, sent=5100, resent=100, segments=9,
                   busy_us=1000, receiver_limited_us=200, buffer_limited_us=30)  # fmt: skip
    (found,) = parse(inet_message(A, B, inode=77, uid=1000, recv_queue=5, send_queue=6, info=raw))
    assert (found.local, found.remote, found.state) == ("10.0.0.5:29500", "10.0.0.9:41000", "ESTABLISHED")
    assert (found.inode, found.uid, found.recv_queue, found.send_queue) == (77, 1000, 5, 6)
    assert (found.recv_buffer_bytes, found.send_buffer_bytes) == (131072, 2626560)
    assert found.id == "Socket(tcp,10.0.0.5:29500)"
    assert found.mirror == inet_key(0, "tcp", found.remote, found.local)
    info = found.tcp
    assert (info.rtt_us, info.retransmits, info.bytes_sent, info.bytes_received) == (250, 3, 5000, 700)
    assert (info.segments_sent, info.busy_us) == (9, 1000)
    assert (info.receiver_limited_us, info.send_buffer_limited_us) == (200, 30)
    assert info.opened  # one byte more acknowledged than sent: its SYN


def test_fin_is_not_taken_for_the_syn() -> None:
    raw = tcp_info(acked=101, sent=100)
    assert [socket.tcp.opened for socket in parse(inet_message(A, B, info=raw, state="CLOSE"))] == [False]
    assert [socket.tcp.opened for socket in parse(inet_message(A, B, info=tcp_info(acked=100, sent=100)))] == [False]


@pytest.mark.parametrize(
    ("size", "sent", "received", "segments"),
    [(104, None, None, None), (136, 900, 50, None), (192, 900, 50, 4), (216, 800, 50, 4), (280, 800, 50, 4)],
)
def test_tcp_info_of_older_kernels(size: int, sent: int | None, received: int | None, segments: int | None) -> None:
    raw = tcp_info(acked=900, received=50, sent=800, segments=4, size=size)
    (found,) = parse(inet_message(A, B, info=raw))
    assert (found.tcp.bytes_sent, found.tcp.bytes_received, found.tcp.segments_sent) == (sent, received, segments)


def test_listener_has_no_peer_and_no_tcp_info() -> None:
    (found,) = parse(inet_message(("0.0.0.0", 80), state="LISTEN", recv_queue=2, send_queue=128, info=tcp_info()))
    assert (found.state, found.remote, found.tcp, found.recv_queue, found.send_queue) == ("LISTEN", "", None, 2, 128)


def test_ipv6_and_mapped_addresses() -> None:
    plain, mapped = parse(inet_message(("::1", 80), ("::1", 4000)), inet_message(*MAPPED, cookie=2))
    assert (plain.local, plain.remote, plain.loopback) == ("[::1]:80", "[::1]:4000", True)
    assert (mapped.local, mapped.remote, mapped.loopback) == ("10.0.0.5:29500", "10.0.0.9:41000", False)


def test_udp_states() -> None:
    parser = InetParser(7, "udp")
    found = parser.parse(inet_message(A, B) + inet_message(("0.0.0.0", 53), state="UNCONN", cookie=9) + done())
    assert [(socket.state, socket.protocol, socket.netns) for socket in found] == [
        ("ESTABLISHED", "udp", 7),
        ("UNCONN", "udp", 7),
    ]


def test_socket_that_rests_keeps_its_record_and_one_that_moves_does_not() -> None:
    parser = InetParser(0, "tcp")

    def round_(idle_ms: int, sent: int) -> list:
        rests = inet_message(A, B, inode=1, info=tcp_info(rtt_us=9, idle_ms=idle_ms))
        moves = inet_message(B, A, inode=2, info=tcp_info(sent=sent, idle_ms=idle_ms))
        return parser.parse(rests + moves + done())

    first, second = round_(10, 100), round_(5010, 200)
    assert second[0] is first[0]  # only its ages moved on
    assert second[1] is not first[1]
    assert second[1].tcp.bytes_sent == 200


def test_new_socket_with_the_addresses_of_an_old_one_is_a_new_record() -> None:
    parser = InetParser(0, "tcp")
    first = parser.parse(inet_message(A, B, inode=1, cookie=1) + done())
    second = parser.parse(inet_message(A, B, inode=1, cookie=2) + done())
    assert first[0] is not second[0]
    assert second[0].cookie == 2


def test_like_long_messages_with_other_attributes_are_told_apart() -> None:
    # Same length, but SKMEMINFO lies elsewhere: the layout is checked for each message, not only learnt once.
    plain = inet_message(A, B, inode=1, info=tcp_info(rtt_us=5, size=240))
    other = inet_message(B, A, inode=2, info=tcp_info(rtt_us=6, size=248), shutdown=False)
    assert len(plain) == len(other)
    found = parse(plain, other, inet_message(A, B, inode=3, cookie=3, info=tcp_info(rtt_us=7, size=240)))
    assert [socket.tcp.rtt_us for socket in found] == [5, 6, 7]
    assert {socket.send_buffer_bytes for socket in found} == {2626560}


def test_socket_without_attributes() -> None:
    (found,) = parse(inet_message(A, B, memory=None, shutdown=False))
    assert (found.tcp, found.send_buffer_bytes, found.drops) == (None, None, None)


def test_time_wait_is_counted_beyond_the_limit() -> None:
    waiting = [inet_message(A, ("10.0.0.9", port), state="TIME_WAIT", inode=0, cookie=port) for port in (1, 2, 3)]
    parser = InetParser(0, "tcp")
    found = parser.parse(b"".join(waiting) + done(), time_wait_limit=2)
    assert [socket.state for socket in found] == ["TIME_WAIT", "TIME_WAIT"]
    assert parser.time_wait_count == 1
    assert parser.parse(b"".join(waiting) + done()) == []
    assert parser.time_wait_count == 3


@pytest.mark.parametrize("cut", [1, 17, 87, 89, 100, 200])
def test_dump_cut_short_gives_what_came_before(cut: int) -> None:
    parser = InetParser(0, "tcp")
    whole, broken = inet_message(A, B, inode=1, info=tcp_info()), inet_message(B, A, inode=2, info=tcp_info())
    found = parser.parse(whole + broken[:cut])
    assert [socket.inode for socket in found] == [1]
    assert parser.garbage == (1 if cut >= 16 else 0)


@given(st.integers(0, 2**32), st.integers(1, 40))
def test_garbage_never_raises(seed: int, changes: int) -> None:
    rng = random.Random(seed)
    data = bytearray(inet_message(A, B, info=tcp_info()) * 3 + done())
    for _ in range(changes):
        data[rng.randrange(len(data))] = rng.randrange(256)
    parser = InetParser(0, "tcp")
    parser.parse(bytes(data))
    parser.parse(bytes(data))


@given(st.binary(max_size=400))
def test_any_bytes_never_raise(data: bytes) -> None:
    InetParser(0, "udp").parse(data)
    InetTableParser(0, "udp").parse(data)


TCP_TABLE = b"""\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:07E8 00000000:0000 0A 00000000:00000003 00:00000000 00000000     0        0 1060 1 0000 100 0 0 10 0
   1: 0500000A:733C 0900000A:A028 01 00000010:00000020 01:00000014 00000000  1000        0 77 2 0000 20 4 30 10 -1
   2: 0500000A:733C 0900000A:A029 06 00000000:00000000 03:00000014 00000000     0        0 0 3 0000
   3: 0500000A:733C 0900000A:A02A 03 00000000:00000000 03:00000014 00000000     0        0 0 3 0000
   4: short line
"""
UDP6_TABLE = b"""\
  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops
  10: 00000000000000000000000001000000:0035 00000000000000000000000000000000:0000 07 00000000:00000010 00:00000000 00000000   101        0 555 2 0000 4
"""  # noqa: E501


def test_proc_net_tcp() -> None:
    parser = InetTableParser(0, "tcp")
    listener, connected = parser.parse(TCP_TABLE)
    assert (listener.local, listener.state, listener.inode, listener.recv_queue) == ("0.0.0.0:2024", "LISTEN", 1060, 3)
    assert (connected.local, connected.remote) == ("10.0.0.5:29500", "10.0.0.9:41000")
    assert (connected.send_queue, connected.recv_queue, connected.uid, connected.inode) == (16, 32, 1000, 77)
    assert connected.tcp is None
    assert (parser.time_wait_count, parser.garbage) == (1, 1)
    again = parser.parse(TCP_TABLE.replace(b"01:00000014", b"01:00000099"))  # only a timer ran
    assert again[1] is connected


def test_proc_net_tcp_time_wait() -> None:
    found = InetTableParser(0, "tcp").parse(TCP_TABLE, time_wait_limit=5)
    assert [socket.state for socket in found] == ["LISTEN", "ESTABLISHED", "TIME_WAIT"]


def test_proc_net_udp6() -> None:
    (found,) = InetTableParser(0, "udp").parse(UDP6_TABLE)
    assert (found.local, found.state, found.uid, found.inode, found.drops) == ("[::1]:53", "UNCONN", 101, 555, 4)


@pytest.mark.parametrize(
    ("raw", "address"),
    [
        (b"0100007F", "127.0.0.1"),
        (b"00000000000000000000000001000000", "::1"),
        (b"0000000000000000FFFF00000500000A", "10.0.0.5"),
        (b"B80D01200000000067452301EFCDAB89", "2001:db8::123:4567:89ab:cdef"),
    ],
)
def test_hex_addresses(raw: bytes, address: str) -> None:
    assert hex_address(raw) == address


def test_sockstat() -> None:
    text = b"sockets: used 30\nTCP: inuse 4 orphan 0 tw 2 alloc 5 mem 1\nUDP: inuse 0 mem 0\nTCP6: inuse 1\nbad\n"
    assert parse_sockstat(text) == {"TCP": 4, "UDP": 0, "TCP6": 1}
