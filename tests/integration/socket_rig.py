"""One end of a connection, in a process of its own: says what it has on standard output, then waits to be ended.

Usage: socket_rig.py WHAT [ARGUMENT …]; a line ``ready …`` is the sign that the sockets are there.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import sys
from typing import Any

CLONE_NEWNET = 0x40000000
PR_SET_DUMPABLE = 4
NOBODY = 65534


def ready(*words: Any) -> None:
    print("ready", *words, flush=True)


def wait() -> None:
    sys.stdin.readline()


def tcp_server(address: str, port: str = "0") -> None:
    """Listens; accepts one connection, echoes what comes, keeps it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, int(port)), family=family, dualstack_ipv6=address == "::") as listener:
        ready(listener.getsockname()[1])
        connection, _ = listener.accept()
        with connection:
            connection.sendall(connection.recv(65536))
            wait()


def tcp_client(address: str, port: str) -> None:
    """Connects, sends 1000 bytes, reads the answer."""
    with socket.create_connection((address, int(port))) as connection:
        connection.sendall(b"x" * 1000)
        received = 0
        while received < 1000:
            received += len(connection.recv(65536))
        ready(connection.getsockname()[1])
        wait()


def tcp_short(address: str, port: str) -> None:
    """Connects, and closes first."""
    with socket.create_connection((address, int(port))) as connection:
        name = connection.getsockname()[1]
    ready(name)
    wait()


def tcp_short_server(address: str) -> None:
    """Listens; accepts one connection and closes it when the other end has; listens on."""
    with socket.create_server((address, 0)) as listener:
        ready(listener.getsockname()[1])
        connection, _ = listener.accept()
        with connection:
            connection.recv(1)
        ready()
        wait()


def udp_bound(address: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        made.bind((address, 0))
        ready(made.getsockname()[1])
        wait()


def udp_connected(address: str, port: str, own_port: str = "0") -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        made.bind((address, int(own_port)))
        made.connect((address, int(port)))
        ready(made.getsockname()[1])
        wait()


def unix_server(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path.replace("@", "\0", 1))
        listener.listen()
        ready()
        connection, _ = listener.accept()
        with connection:
            wait()


def unix_client(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.connect(path.replace("@", "\0", 1))
        ready()
        wait()


def inherited(descriptor: str) -> None:
    """Keeps a socket that the parent made."""
    os.fstat(int(descriptor))
    ready()
    wait()


def as_nobody(what: str, *arguments: str) -> None:
    """The same as an ordinary user. Rights are given up here and not before this program was started: that user may
    not be able to read the interpreter of a root's environment."""
    "".encode("idna")  # what connect() would import
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1)  # as a program that the user started is
    globals()[what](*arguments)


def look_as_nobody() -> None:
    """What the collectors show an ordinary user, as JSON. Imports come before the rights go, see ``as_nobody``."""
    from gpuflight.collectors.sockets import Sockets
    from gpuflight.collectors.unix_sockets import UnixSockets
    from gpuflight.graph import Graph
    from gpuflight.sources.open import open_world

    def observe() -> None:
        world = open_world()
        world.begin_round(1)
        answer = {}
        for collector in (Sockets(), UnixSockets()):
            collector.observe(world)
            batch = collector.seed()
            answer[collector.name] = {
                "dangling": len(Graph(batch.nodes, batch.edges).dangling()),
                "edges": [[edge.kind, edge.source, edge.target] for edge in batch.edges],
                "notes": {note.reason: [note.hint, note.count] for note in collector.notes.values()},
            }
        print(json.dumps(answer))

    globals()["observe"] = observe
    as_nobody("observe")


def in_new_namespace(what: str, *arguments: str) -> None:
    """The same in a new network namespace, with its loopback up."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        print("refused", os.strerror(ctypes.get_errno()), flush=True)
        return
    _loopback_up()
    globals()[what](*arguments)


def tcp_pair(port: str) -> None:
    """Both ends of a connection on a given port, from a given client port."""
    with (
        socket.create_server(("127.0.0.1", int(port))) as listener,
        socket.create_connection(("127.0.0.1", int(port)), source_address=("127.0.0.1", int(port) + 1)),
    ):
        connection, _ = listener.accept()
        with connection:
            ready()
            wait()


def empty() -> None:
    ready()
    wait()


def after_line(what: str, *arguments: str) -> None:
    """Says ready at once, does it when a line comes."""
    ready()
    sys.stdin.readline()
    globals()[what](*arguments)


def _loopback_up() -> None:
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        request = struct.pack("16sh14x", b"lo", 0x1 | 0x40)  # IFF_UP | IFF_RUNNING
        fcntl.ioctl(made, 0x8914, request)  # SIOCSIFFLAGS


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        globals()[sys.argv[1]](*sys.argv[2:])
