"""The netlink wire: faults of a dump, and what is done about them."""

from __future__ import annotations

import errno
import struct

import pytest
from tests.fakes.sockets import FakeKernel, FakeLink, done, inet_message, message

from gpuflight.sources.netlink.wire import NETLINK_SOCK_DIAG, Channel

REQUEST = struct.pack("=BBBBI48x", 2, 6, 0, 0, 0)
TCP = (2, 6)
SOCKET = inet_message(("10.0.0.1", 80), ("10.0.0.2", 4000))


def dump(kernel: FakeKernel) -> tuple[bytes, Channel]:
    channel = Channel(kernel.connect)
    return channel.dump(NETLINK_SOCK_DIAG, 20, REQUEST), channel


def test_parts_are_joined_up_to_done() -> None:
    data, channel = dump(FakeKernel({TCP: [[SOCKET, SOCKET + done()]]}))
    assert len(data) == 2 * len(SOCKET) + len(done())
    assert channel.losses == {}


def test_overrun_is_asked_again_over_a_fresh_socket_and_counted() -> None:
    """T10: ENOBUFS from the kernel: resynchronise, count the loss."""
    kernel = FakeKernel({TCP: [[SOCKET, OSError(errno.ENOBUFS, "")], [SOCKET + done()]]})
    data, channel = dump(kernel)
    assert len(data) == len(SOCKET) + len(done())
    assert channel.losses == {"netlink overruns": 1}
    assert [link.closed for link in kernel.links] == [True, False]


def test_overruns_without_end_are_an_error_after_three_attempts() -> None:
    kernel = FakeKernel({TCP: [[OSError(errno.ENOBUFS, "")]]})
    channel = Channel(kernel.connect)
    with pytest.raises(OSError) as caught:
        channel.dump(NETLINK_SOCK_DIAG, 20, REQUEST)
    assert caught.value.errno == errno.ENOBUFS
    assert channel.losses == {"netlink overruns": 3}
    assert all(link.closed for link in kernel.links)


def test_interrupted_dump_is_asked_again() -> None:
    kernel = FakeKernel({TCP: [[SOCKET, done(flags=0x12)], [SOCKET, SOCKET, done()]]})
    data, channel = dump(kernel)
    assert len(data) == 2 * len(SOCKET) + len(done())
    assert channel.losses == {}


def test_dump_that_is_always_interrupted_is_taken_and_counted() -> None:
    kernel = FakeKernel({TCP: [[message(20, b"", flags=0x12) + SOCKET, done()]]})
    data, channel = dump(kernel)
    assert SOCKET[16:] in data
    assert channel.losses == {"interrupted socket dumps": 1}
    assert len(kernel.asked) == 3


@pytest.mark.parametrize("last", [done(-errno.ENOENT), message(2, struct.pack("=i16x", -errno.ENOENT))])
def test_status_of_the_kernel_is_an_oserror(last: bytes) -> None:
    with pytest.raises(FileNotFoundError):
        dump(FakeKernel({TCP: [[last]]}))


@pytest.mark.parametrize("part", [b"", b"\1\2\3", message(2, b"")[:16]])
def test_message_cut_short_is_an_oserror(part: bytes) -> None:
    with pytest.raises(OSError) as caught:
        dump(FakeKernel({TCP: [[part]]}))
    assert caught.value.errno == errno.EBADMSG


def test_rest_of_an_older_answer_is_passed_over() -> None:
    class Late(FakeLink):
        def recv(self, size: int, /) -> bytes:
            if not self.kernel.asked[1:]:
                self.kernel.asked.append((0, 0))
                return SOCKET + done()  # of sequence 0
            return super().recv(size)

    kernel = FakeKernel({TCP: [[SOCKET + SOCKET + done()]]})
    channel = Channel(lambda protocol: Late(kernel))
    assert len(channel.dump(NETLINK_SOCK_DIAG, 20, REQUEST)) == 2 * len(SOCKET) + len(done())


def test_close_closes_the_sockets() -> None:
    kernel = FakeKernel({TCP: [[done()]]})
    _, channel = dump(kernel)
    channel.close()
    channel.close()
    assert [link.closed for link in kernel.links] == [True]
