"""CPU time of a round's sockets with their owners: gpuflight against psutil, beside the bare dump.

Makes N loopback TCP sockets and P idle processes, lets all sides look in turn, R times, in one run.
``first`` is a collector that sees every socket for the first time; ``round`` is one that saw them a round before and
of which a tenth of the connections moved data since. Nothing of psutil's does what the collector does besides: join
both ends, rtt, retransmits, bytes, rates.

    python benchmarks/bench_sockets.py [--sockets 5000] [--processes 1000] [--rounds 7]
"""

from __future__ import annotations

import argparse
import gc
import resource
import socket
import statistics
import subprocess
import time
from collections.abc import Callable

import psutil

from gpuflight.collectors.sockets import Sockets
from gpuflight.sources.netlink import inet_diag
from gpuflight.sources.netlink.wire import NETLINK_SOCK_DIAG, Channel, connect
from gpuflight.sources.open import open_world


def cpu_ms(work: Callable[[], object]) -> float:
    """CPU time of one call, in ms."""
    gc.collect()
    began = time.process_time()
    work()
    return (time.process_time() - began) * 1000


def make_sockets(count: int) -> tuple[socket.socket, list[socket.socket]]:
    """A listener and ``count`` connected sockets, in pairs."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    ends: list[socket.socket] = []
    for _ in range(count // 2):
        client = socket.create_connection(listener.getsockname())
        ends += [client, listener.accept()[0]]
    return listener, ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sockets", type=int, default=5000)
    parser.add_argument("--processes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    listener, ends = make_sockets(options.sockets)
    sleepers = [subprocess.Popen(["sleep", "600"]) for _ in range(options.processes)]
    try:
        measure(ends, options.rounds)
    finally:
        for sleeper in sleepers:
            sleeper.kill()
        for sleeper in sleepers:
            sleeper.wait()
        listener.close()


def measure(ends: list[socket.socket], rounds: int) -> None:
    """Let all sides look in turn, and print what they took."""
    world, collector = open_world(), Sockets()
    number = 0
    shown = 0

    def begin() -> None:
        nonlocal number
        number += 1
        world.begin_round(number)
        world.procfs.processes()  # read once a round for all collectors

    def look(who: Sockets) -> None:
        nonlocal shown
        who.observe(world)
        batch = who.seed()
        shown = len(batch.nodes) + len(batch.edges)

    def floor() -> None:
        channel = Channel(connect)
        channel.dump(NETLINK_SOCK_DIAG, inet_diag.SOCK_DIAG_BY_FAMILY, inet_diag.request(2, "tcp", time_wait=True))
        channel.close()

    begin()
    world.netlink.inet_sockets()
    begin()
    look(collector)
    times: dict[str, list[float]] = {}

    def take(name: str, milliseconds: float) -> None:
        times.setdefault(name, []).append(milliseconds)

    for turn in range(rounds):
        for client in ends[turn % 10 * 2 :: 20]:
            client.send(b"x")
        take("floor: bare inet_diag dump", cpu_ms(floor))
        take("psutil.net_connections('inet')", cpu_ms(lambda: psutil.net_connections("inet")))
        cold_world, cold = open_world(), Sockets()
        cold_world.begin_round(1)
        cold_world.procfs.processes()

        def first(cold: Sockets = cold, cold_world: object = cold_world) -> None:
            cold.observe(cold_world)  # type: ignore[arg-type]
            cold.seed()

        take("gpuflight, first", cpu_ms(first))
        begin()
        dump = cpu_ms(lambda: world.netlink.inet_sockets(collector.settings.time_wait_limit))
        owners = cpu_ms(world.procfs.fds)
        rest = cpu_ms(lambda: look(collector))
        take("gpuflight, round: dump and parse", dump)
        take("gpuflight, round: owners (shared with other collectors)", owners)
        take("gpuflight, round: join, entities, edges", rest)
        take("gpuflight, round", dump + owners + rest)
    processes = len(world.procfs.processes())
    print(f"{len(ends) + 1} TCP sockets, {processes} processes, {shown} entities and edges")
    print(f"CPU ms, median of {rounds} (range)")
    for name, taken in times.items():
        print(f"  {name:<58}{statistics.median(taken):8.2f}  ({min(taken):.2f}-{max(taken):.2f})")
    for name in ("gpuflight, first", "gpuflight, round"):
        pairs = zip(times["psutil.net_connections('inet')"], times[name], strict=True)
        ratio = statistics.median(peer / ours for peer, ours in pairs)
        print(f"ratio psutil / {name}: {ratio:.2f}")


if __name__ == "__main__":
    main()
