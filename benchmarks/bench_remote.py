"""CPU time of a parent: per peer and poll against decoding the body alone, of a round that shows all peers, of joining.

100 simulated peers of 1,000 entities each (one process that serves prepared bodies over HTTP, zstd), R polls of each
in which every body is a new one, then R that are answered by 304, all in one run.

    python benchmarks/bench_remote.py [--peers 100] [--entities 1000] [--rounds 5]

Ratios: ``poll``: HTTP, decompression, decoding, namespaces, halves of connections, over decoding alone (target ≤ 2).
``joining``: time per half connection at ten times as many, over that at fewer (linear: about 1).
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import statistics
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from typing import Any

import zstandard

from gpuflight.collectors.remote import Remote, RemoteSettings
from gpuflight.collectors.remote_join import Half, join_hosts
from gpuflight.graph import Edge, Entity, Graph, edges, nodes
from gpuflight.graph.codec import encode_graph, time_text
from gpuflight.graph.load import parse_graph
from gpuflight.sources.http import Http
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
    env = {"hostname": f"node-{peer}", "machine_id": f"m{peer}", "boot_id": f"b{peer}"}
    return encode_graph(Graph(found, links), round=version, time=time_text(time.time_ns()), env=env)


def serve(pipe: Connection, peers: int, versions: int, entities: int) -> None:
    """The peers: ``/N/api/v1/graph``; what comes in over ``pipe`` is the version to serve from now on."""
    ready = {
        (peer, version): zstandard.ZstdCompressor(level=1).compress(body_of(peer, version, entities))
        for version in range(1, versions + 1)
        for peer in range(peers)
    }
    current = [1]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = -1

        def do_GET(self) -> None:
            etag = f'"{current[0]}"'
            same = self.headers.get("If-None-Match") == etag
            body = b"" if same else ready[int(self.path.split("/")[1]), current[0]]
            self.send_response(304 if same else 200)
            self.send_header("ETag", etag)
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
    """CPU time per half connection (ns), least of five."""
    rows = [(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}:4000", "10.200.0.1:80") for number in range(count)]
    local = [Half("tcp", own, far, f"Socket(tcp,{own})", f"Socket(tcp,{far})", True) for own, far in rows]
    there = [Half("tcp", far, own, f"Socket(ns=n,tcp,{far})", f"Socket(ns=n,tcp,{own})", False) for own, far in rows]
    return min(cpu_ms(lambda: join_hosts(local, {"n": there})) for _ in range(5)) * 1e6 / (2 * count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, default=100)
    parser.add_argument("--entities", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(
        target=serve, args=(theirs, options.peers, options.rounds, options.entities), daemon=True
    )
    child.start()
    port = ours.recv()
    try:
        measure(ours, port, options.peers, options.entities, options.rounds)
    finally:
        ours.send(None)
        child.join(5)


def measure(pipe: Connection, port: int, count: int, entities: int, rounds: int) -> None:
    world = open_world()
    source: Http = world.http
    configured = [{"url": f"http://127.0.0.1:{port}/{index}", "name": f"n{index}"} for index in range(count)]
    collector = Remote(RemoteSettings.model_validate({"peers": configured}))
    peers = collector._peers  # polled here and now instead of by threads at their time
    own = ("me", "now")
    bodies = [body_of(index, 1, entities) for index in range(count)]
    decode_ms, poll_ms, same_ms = [], [], []
    for peer in peers[:3]:
        peer.poll(source, own)  # imports httpx, makes the client
    for version in range(1, rounds + 1):
        pipe.send(version)
        pipe.recv()
        decode_ms.append(cpu_ms(lambda: [parse_graph(body) for body in bodies]) / count)
        poll_ms.append(cpu_ms(lambda: [peer.poll(source, own) for peer in peers]) / count)
        same_ms.append(cpu_ms(lambda: [peer.poll(source, own) for peer in peers]) / count)
    assert all(peer.view.error == "" and peer.view.round_number == rounds for peer in peers)
    print(f"{count} peers of {len(peers[0].view.entities) + 1} entities, {len(peers[0].view.connections)} edges,"
          f" {len(bodies[0]) / 1000:.0f} kB of JSON each")  # fmt: skip
    decode, poll, same = (statistics.median(values) for values in (decode_ms[1:], poll_ms[1:], same_ms))
    print(
        f"decoding a body {decode:.2f} ms · a poll with a new body {poll:.2f} ms · a poll answered by 304 {same:.2f} ms"
    )
    print(f"poll / decoding: {poll / decode:.2f}  (target ≤ 2) · 304 / decoding: {same / decode:.2f}")

    class NoThreads:
        def stop(self, timeout_s: float) -> None:
            pass

    collector._pool = NoThreads()  # type: ignore[assignment]
    observed = []
    for number in range(1, 5):
        world.begin_round(number)
        observed.append(cpu_ms(lambda: collector.observe(world)))
    print(
        f"a round that shows all: {observed[0]:.1f} ms the first time, {min(observed[1:]):.1f} ms while they stand;"
        f" {len(collector._joined.edges)} connections joined"
    )
    few, many = joining(5_000), joining(50_000)
    print(
        f"joining: {few:.0f} ns per half of 10,000, {many:.0f} ns of 100,000 · ratio {many / few:.2f} (linear: about 1)"
    )
    collector.close()
    world.close()


if __name__ == "__main__":
    main()
