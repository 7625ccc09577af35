"""unix_diag messages and /proc/net/unix become records."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.sockets import address_message, done, unix_message

from gpuflight.sources.netlink.addresses import parse as parse_addresses
from gpuflight.sources.netlink.conntrack import Flow, parse_translations
from gpuflight.sources.netlink.proc_tables import parse_unix
from gpuflight.sources.netlink.unix_diag import UnixParser, name_text


def test_listener_and_connected_pair() -> None:
    data = (
        unix_message(10, state=10, path=b"/run/x.sock\0", pending=(12, 0, 13), queues=(2, 128))
        + unix_message(11, path=b"/run/x.sock\0", peer=14, queues=(7, 8))
        + unix_message(15, type_=2, state=7)
        + done()
    )
    listener, connected, datagram = UnixParser(5).parse(data)
    assert (listener.state, listener.path) == ("LISTEN", "/run/x.sock")
    assert (listener.pending, listener.recv_queue, listener.send_queue) == ((12, 13), 2, 128)
    assert (connected.type, connected.state, connected.peer) == ("stream", "ESTABLISHED", 14)
    assert (connected.recv_queue, connected.send_queue, connected.netns) == (7, 8, 5)
    assert (datagram.type, datagram.state, datagram.path, datagram.peer) == ("dgram", "UNCONN", "", 0)


def test_unchanged_socket_keeps_its_record() -> None:
    parser = UnixParser(0)
    first = parser.parse(unix_message(1) + unix_message(2, queues=(0, 0)) + done())
    second = parser.parse(unix_message(1) + unix_message(2, queues=(9, 0)) + done())
    assert second[0] is first[0]
    assert second[1].recv_queue == 9


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"\0abstract", "@abstract"),
        (b"\0a\0b", "@a@b"),
        (b"/run/x\0", "/run/x"),
        (b"/run/\xff", "/run/\\xff"),
        (b"", ""),
    ],
)
def test_names(raw: bytes, text: str) -> None:
    assert name_text(raw) == text


@pytest.mark.parametrize("cut", [3, 16, 20, 33, 40])
def test_dump_cut_short_gives_what_came_before(cut: int) -> None:
    parser = UnixParser(0)
    found = parser.parse(unix_message(1) + unix_message(2, path=b"/x\0", peer=3)[:cut])
    assert [record.inode for record in found] == [1]


@given(st.binary(max_size=300))
def test_any_bytes_never_raise(data: bytes) -> None:
    UnixParser(0).parse(data)
    parse_unix(data, 0)
    parse_addresses(data)
    parse_translations(data)


UNIX_TABLE = b"""\
Num       RefCount Protocol Flags    Type St Inode Path
0000000000000000: 00000002 00000000 00010000 0001 01 1060 /run/a b.sock
0000000000000000: 00000003 00000000 00000000 0001 03 1061
0000000000000000: 00000002 00000000 00000000 0002 01 1062 @abs
0000000000000000: 00000002 00000000 00000000 0001 03     0
broken
"""


def test_proc_net_unix() -> None:
    found, garbage = parse_unix(UNIX_TABLE, 0)
    assert [(record.inode, record.type, record.state, record.path) for record in found] == [
        (1060, "stream", "LISTEN", "/run/a b.sock"),
        (1061, "stream", "ESTABLISHED", ""),
        (1062, "dgram", "UNCONN", "@abs"),
    ]
    assert {record.peer for record in found} == {None}
    assert garbage == 1


def test_addresses() -> None:
    data = address_message("10.0.0.5") + address_message("fe80::1") + done()
    assert parse_addresses(data) == {"10.0.0.5", "fe80::1"}


def test_translations_of_nat() -> None:
    table = (
        b"ipv4     2 tcp      6 431999 ESTABLISHED src=172.17.0.2 dst=10.0.0.5 sport=4242 dport=8080 "
        b"src=172.17.0.3 dst=172.17.0.2 sport=80 dport=4242 [ASSURED] mark=0 zone=0 use=2\n"
        b"ipv4     2 tcp      6 431999 ESTABLISHED src=10.0.0.1 dst=10.0.0.2 sport=1 dport=2 "
        b"src=10.0.0.2 dst=10.0.0.1 sport=2 dport=1 [ASSURED] mark=0 zone=0 use=2\n"
        b"ipv4     2 icmp     1 29 src=10.0.0.1 dst=10.0.0.2 type=8 code=0 id=1\n"
    )
    opener = Flow("tcp", "172.17.0.2:4242", "10.0.0.5:8080")
    server = Flow("tcp", "172.17.0.3:80", "172.17.0.2:4242")
    assert parse_translations(table) == {opener: server, server: opener}
