"""CPU time of a parent: per peer and poll against decoding the body alone, of a round that shows all peers, of joining.

100 simulated peers of 1,000 entities each (one process that serves prepared bodies over HTTP, zstd), R polls of each
in which every body is a new one, R that bring a difference in which a part of the entities and edges changed, then R
that are answered by 304, all in one run. Each poll is beside decompressing and decoding the same bodies alone.

    python benchmarks/bench_remote.py [--peers 100] [--entities 1000] [--rounds 5] [--changed 1 10 30]

Ratios: ``poll``: HTTP, decompression, decoding, namespaces, halves of connections, over decoding alone (target ≤ 2).
``exchange``: HTTP alone, of which every poll has one: a bare socket that sends and receives the same bytes.
``joining``: time per half connection of n, 2n and 4n (linear: about the same).
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from typing import Any

import zstandard
from msgspec.structs import replace

from gpuflight.collectors.remote import Remote, RemoteSettings
from gpuflight.collectors.remote_join import Half, join_hosts
from gpuflight.graph import Edge, Entity, Graph, edges, nodes
from gpuflight.graph.codec import decode_diff, encode_diff, encode_graph, time_text
from gpuflight.graph.delta import HEAD
from gpuflight.graph.diff import diff
from gpuflight.graph.load import parse_graph
from gpuflight.sources.http import Http, decompress
from gpuflight.sources.open import open_world


def cpu_ms(work: Callable[[], object]) -> float:
    """CPU time of one call, all threads, in ms."""
    gc.collect()
    gc.disable()  # its passes fall where they like; a round of the core disables it too
    try:
        began = time.process_time()
        work()
        return (time.process_time() - began) * 1000
    finally:
        gc.enable()


def body_of(peer: int, version: int, entities: int) -> bytes:
    """A host as JSON."""
    env = {"hostname": f"node-{peer}", "machine_id": f"m{peer}", "boot_id": f"b{peer}"}
    return encode_graph(graph_of(peer, version, entities), round=version, time=time_text(time.time_ns()), env=env)


def diff_of(graph: Graph, version: int, percent: float) -> tuple[Graph, bytes]:
    """The graph one round on, of which so many entities and edges have new metrics, and the difference as JSON."""
    step = max(1, round(100 / percent))

    def moved(element: Any, number: int) -> Any:
        if (number + version) % step or not element.metrics:
            return element
        return replace(element, metrics={name: value + 1 for name, value in element.metrics.items()})

    after = Graph.of(
        {key: moved(element, number) for number, (key, element) in enumerate(graph.nodes.items())},
        {key: moved(element, number) for number, (key, element) in enumerate(graph.edges.items())},
    )
    counts = {"nodes_count": len(after.nodes), "edges_count": len(after.edges)}
    body = encode_diff(diff(graph, after), version, base=version - 1, time=time_text(time.time_ns()), **counts)
    return after, body


def graph_of(peer: int, version: int, entities: int) -> Graph:
    """A host as it is: processes with what is known of them, sockets, the edges between; some talk to other hosts."""
    host = nodes.Host(hostname=f"node-{peer}", metrics={"cpus_count": 64, "load_1min": version / 7})
    found: list[Entity] = [host]
    links: list[Edge] = []
    for number in range(entities * 6 // 10):
        process = nodes.Process(
            pid=number + 1,
            start=1000 + number,
            attributes={"name": f"worker-{number}", "cmdline": ["python3", "train.py", f"--rank={number}"],
                        "exe": "/usr/bin/python3.11", "state": "S", "ppid": 1, "uid": 1000, "user": "ann",
                        "cgroup": "/system.slice/training.service", "cpus_allowed": "0-63"},
            metrics={"cpu_pct": (number * 7 + version) % 100 / 3, "rss_bytes": 1_000_000 + number * version,
                     "threads_count": 4, "fds_count": 32, "major_faults_per_s": 0.0, "minor_faults_per_s": 1.5},
        )  # fmt: skip
        found.append(process)
        links.append(edges.Host(host.id, process.id))
        if number:
            links.append(edges.Own("Process(pid=1,start=1000)", process.id))
    for number in range(entities * 2 // 10):
        half, port = divmod(number, entities // 10)  # client of the next host, then server of the one before
        ends = (f"10.0.{peer}.1:{40000 + port}", f"10.0.{(peer + 1) % 100}.1:{20000 + port}")
        if half:
            ends = (f"10.0.{peer}.1:{20000 + port}", f"10.0.{(peer - 1) % 100}.1:{40000 + port}")
        facts = {"state": "ESTABLISHED", "uid": 1000, "inode": number}
        queues = {"recv_queue_bytes": 0, "send_queue_bytes": version}
        own = nodes.Socket(protocol="tcp", address=ends[0], attributes=facts, metrics=queues)
        far = nodes.Socket(protocol="tcp", address=ends[1], attributes={"remote": True})
        found += [own, far]
        client, server = (far, own) if half else (own, far)
        counts = {"rtt_ms": 0.2, "bytes_sent_count": 1000 * version, "bytes_received_count": 7}
        links.append(edges.ConnectTo(client.id, server.id, {"state": "ESTABLISHED", "half": True}, counts))
        links.append(edges.Belong(own.id, f"Process(pid={number + 1},start={1000 + number})"))
    return Graph(found, links)


def prepare(peers: int, versions: int, entities: int, parts: list[float]) -> list[list[bytes]]:
    """What each peer answers at each version: whole graphs, then differences, the first of which lead on from those."""
    answers = [[body_of(peer, version, entities) for peer in range(peers)] for version in range(1, versions + 1)]
    graphs = [graph_of(peer, versions, entities) for peer in range(peers)]
    for part, steps in (*((part, versions) for part in parts), (1.0, 1)):
        for _ in range(steps):
            version = len(answers) + 1
            told = [diff_of(graph, version, part) for graph in graphs]
            graphs = [after for after, _ in told]
            answers.append([body for _, body in told])
    return answers


def serve(pipe: Connection, answers: list[list[bytes]]) -> None:
    """The peers: ``/N/api/v1/graph``; what comes in over ``pipe`` is the version to serve from now on."""
    ready = {
        (peer, version): zstandard.ZstdCompressor(level=1).compress(body)
        for version, bodies in enumerate(answers, 1)
        for peer, body in enumerate(bodies)
    }
    current = [1]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = -1

        def do_GET(self) -> None:
            etag = f'W/"bench-{current[0]}"'
            now = time.time_ns()
            same = self.headers.get("If-None-Match") == etag
            body = b"" if same else ready[int(self.path.split("/")[1]), current[0]]
            self.send_response(304 if same else 200)
            self.send_header("ETag", etag)
            self.send_header("Gpuflight-Time-Ns", f"{now} {now}")
            self.send_header("Content-Length", str(len(body)))
            if not same:
                self.send_header("Content-Encoding", "zstd")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 256

    server = Server(("127.0.0.1", 0), Handler)
    import threading

    threading.Thread(target=server.serve_forever, daemon=True).start()
    pipe.send(server.server_address[1])
    while (version := pipe.recv()) is not None:
        current[0] = version
        pipe.send(True)


def joining(count: int) -> float:
    """CPU time of joining ``count`` connections, ms, least of five."""
    rows = [(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}:4000", "10.200.0.1:80") for number in range(count)]
    local = [Half("tcp", own, far, f"Socket(tcp,{own})", f"Socket(tcp,{far})", True) for own, far in rows]
    there = [Half("tcp", far, own, f"Socket(ns=n,tcp,{far})", f"Socket(ns=n,tcp,{own})", False) for own, far in rows]
    return min(cpu_ms(lambda: join_hosts(local, {"n": there})) for _ in range(5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, default=100)
    parser.add_argument("--entities", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--changed", type=float, nargs="*", default=[1.0, 10.0, 30.0], help="percent")
    options = parser.parse_args()
    answers = prepare(options.peers, options.rounds, options.entities, options.changed)
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=serve, args=(theirs, answers), daemon=True)
    child.start()
    port = ours.recv()
    try:
        measure(ours, port, answers, options.rounds, options.changed)
    finally:
        ours.send(None)
        child.join(5)


def decode_alone(data: bytes, before: Graph) -> object:
    """Decompressing, and the library's own reader of what is in it, with a graph that a difference leads on from."""
    body = decompress(data, "zstd", 1 << 28)
    return decode_diff(body, before) if body.startswith(HEAD) else parse_graph(body)


def bare_exchange_ms(port: int, count: int) -> float:
    """CPU time of one GET over a bare socket, answered by 304: request, answer, no parsing."""
    etag = 'W/"bench-1"'
    head = f"GET /0/api/v1/graph HTTP/1.1\r\nHost: x\r\nIf-None-Match: {etag}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", port)) as connection:

        def ask() -> None:
            for _ in range(count):
                connection.sendall(head)
                got = b""
                while b"\r\n\r\n" not in got:
                    got += connection.recv(65536)

        return min(cpu_ms(ask) for _ in range(3)) / count


def measure(pipe: Connection, port: int, answers: list[list[bytes]], rounds: int, parts: list[float]) -> None:
    world = open_world()
    source: Http = world.http
    count = len(answers[0])
    configured = [{"url": f"http://127.0.0.1:{port}/{index}", "name": f"n{index}"} for index in range(count)]
    collector = Remote(RemoteSettings.model_validate({"peers": configured}))
    peers = collector._peers  # polled here and now instead of by threads at their time
    own = ("me", "now")
    bare = bare_exchange_ms(port, 200)
    for peer in peers:
        peer.poll(source, own)
    shown = peers[0].view.copy.lists()
    print(f"{count} peers of {len(shown.entities) + 1} entities, {len(shown.connections)} edges")
    print(f"exchange: a bare socket that asks and is told 304: {bare:.3f} ms")
    same_ms: list[float] = []
    version = 0
    graphs = [parse_graph(body).graph for body in answers[rounds - 1]]
    for part in (None, *parts):
        decode_ms, poll_ms = [], []
        for _ in range(rounds):
            version += 1
            pipe.send(version)
            pipe.recv()
            packed = [zstandard.ZstdCompressor(level=1).compress(body) for body in answers[version - 1]]
            if version > 1:
                decode_ms.append(cpu_ms(lambda packed=packed: [*map(decode_alone, packed, graphs)]) / count)  # type: ignore[misc]
                poll_ms.append(cpu_ms(lambda: [peer.poll(source, own) for peer in peers]) / count)
            same_ms.append(cpu_ms(lambda: [peer.poll(source, own) for peer in peers]) / count)
        what = "a whole graph" if part is None else f"{part:g} % changed"
        decode, poll = statistics.median(decode_ms), statistics.median(poll_ms)
        size = len(answers[version - 1][0]) / 1000
        print(
            f"{what:>14}: {size:6.1f} kB of JSON · decompressing and decoding {decode:.3f} ms · poll {poll:.3f} ms"
            f" · poll / decoding {poll / decode:.2f} (target ≤ 2) · less the exchange {(poll - bare) / decode:.2f}"
        )
    print(f"{'nothing':>14}: poll answered by 304 {statistics.median(same_ms):.3f} ms")
    assert all(peer.view.error == "" and peer.view.round_number == version for peer in peers)
    assert all(peer.diffs_count == rounds * len(parts) and not peer.misfits_count for peer in peers)

    class NoThreads:
        def stop(self, timeout_s: float) -> None:
            pass

    collector._pool = NoThreads()  # type: ignore[assignment]
    observed = []
    for number in range(1, 5):
        world.begin_round(number)
        observed.append(cpu_ms(lambda: collector.observe(world)))
    pipe.send(version + 1)
    pipe.recv()
    for peer in peers:
        peer.poll(source, own)
    world.begin_round(5)
    changed = cpu_ms(lambda: collector.observe(world))
    print(
        f"a round that shows all: {observed[0]:.1f} ms the first time, {min(observed[1:]):.1f} ms while they stand,"
        f" {changed:.1f} ms after 1 % changed; {len(collector._joined.edges)} connections joined"
    )
    times = {number: joining(number) for number in (12_500, 25_000, 50_000)}
    first = times[12_500] / 12_500
    for number, taken in times.items():
        print(f"joining {number} connections: {taken:.1f} ms, per connection {taken / number / first:.2f}× (linear: 1)")
    collector.close()
    world.close()


if __name__ == "__main__":
    main()
