"""What it costs to write a round into MongoDB, beside the driver alone writing the same documents.

    python benchmarks/bench_mongodb.py [--nodes 10000] [--edges 40000] [--rounds 20]

A graph of that size, of which 1 % changes each round, is written by ``MongoWriter`` into a server on loopback; then
pymongo writes the very same operations, made beforehand, with one unordered ``bulk_write`` per collection. Wall time
of both (median over the rounds, the runs of each in turn), and the CPU time of this process, in which the server has
no part. Goal: the driver alone takes at least 0.6 of our wall time. Then the first round, all of it, beside
``insert_many``; and what a collector ``fleet`` needs to take in 1 % of changes, beside reading and decoding all.

The server is ``mongod`` where it is on PATH, else SecantusDB, which is some times slower.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.services.mongodb import MongoServer, _program  # noqa: E402

from gpuflight.collectors.fleet import Fleet, FleetSettings  # noqa: E402
from gpuflight.graph import Graph, edges, nodes  # noqa: E402
from gpuflight.graph.diff import diff  # noqa: E402
from gpuflight.round_documents import StoredRound  # noqa: E402
from gpuflight.sources.mongo_client import MongoOptions  # noqa: E402
from gpuflight.subscribers import mongo_batches  # noqa: E402
from gpuflight.subscribers.mongo_writer import MongoWriter  # noqa: E402

GOAL = 0.6
TIMEOUT_S = 600.0


def make_rounds(nodes_count: int, edges_count: int, rounds_count: int) -> list[StoredRound]:
    """Rounds that share what does not change, as the store of a host makes them."""
    members: list[Any] = [
        nodes.Process(pid=pid, start=1, attributes={"name": f"worker-{pid}", "state": "S"}, metrics={"cpu_pct": 0.0})
        for pid in range(1, nodes_count + 1)
    ]
    links: list[Any] = [
        edges.SendTo(members[at % nodes_count].id, members[(at * 7 + at // nodes_count + 1) % nodes_count].id)
        for at in range(edges_count)
    ]
    made, before = [], Graph()
    for number in range(1, rounds_count + 1):
        for index in range(number % 100, nodes_count, 100):
            old = members[index]
            members[index] = nodes.Process(
                pid=old.pid, start=1, attributes=old.attributes, metrics={"cpu_pct": float(number), "rss_bytes": 2**30}
            )
        for index in range(number % 100, edges_count, 100):
            old = links[index]
            links[index] = edges.SendTo(old.source, old.target, {}, {"tx_bytes_per_s": float(number)})
        graph = Graph(members, links)
        made.append(
            StoredRound(
                namespace="bench",
                instance="run",
                number=number,
                time_ns=number * 10**9,
                graph=graph,
                diff=diff(before, graph),
                base=number - 1,
            )
        )
        before = graph
    return made


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """(wall, CPU of this process) in s."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall_s, time.process_time() - cpu_s


def main() -> int:
    """Print figures; exit code 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--edges", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    rounds = make_rounds(options.nodes, options.edges, options.rounds + 1)
    with tempfile.TemporaryDirectory() as folder:
        server = MongoServer(Path(folder) / "mongodb")
        server.durable = False
        server.start()
        try:
            return measure(server, rounds)
        finally:
            server.kill()
            server.release()


def measure(server: MongoServer, rounds: list[StoredRound]) -> int:
    """The runs, in turn; both databases hold the same all the time."""
    writer = MongoWriter(MongoOptions(uri=server.uri, timeout_s=TIMEOUT_S), "ours")
    writer.open()
    mirror = MongoWriter(MongoOptions(uri=server.uri, timeout_s=TIMEOUT_S), "bare")  # makes the same indexes
    mirror.open()
    fleet = Fleet(FleetSettings(uri=server.uri, database="ours", timeout_s=TIMEOUT_S))  # type: ignore[arg-type]
    sent: list[tuple[str, list[Any]]] = []
    bulk = mongo_batches.bulk

    def kept(table: Any, batch: list[Any]) -> list[int]:
        sent.append((table.name, list(batch)))
        return bulk(table, batch)

    mongo_batches.bulk = kept
    client = server.client()
    bare = client["bare"]

    def alone() -> None:
        for name, batch in sent:
            bare[name].bulk_write(batch, ordered=False)

    def step(completed: StoredRound) -> tuple[tuple[float, float], tuple[float, float], float]:
        sent.clear()
        ours = timed(lambda: writer.write(completed))
        theirs = timed(alone)
        return ours, theirs, timed(fleet.look)[1]

    first, *later = rounds
    (ours, theirs, whole_s) = step(first)
    count = len(first.graph.nodes) + len(first.graph.edges)
    print(f"server: {_program()}; {len(first.graph.nodes)} entities, {len(first.graph.edges)} edges")
    print(f"first round, {count} documents: ours {ours[0]:.2f} s, driver alone {theirs[0]:.2f} s"
          f" ({theirs[0] / ours[0]:.2f}); CPU here {ours[1]:.2f} s and {theirs[1]:.2f} s")  # fmt: skip
    figures = [step(completed) for completed in later]
    changed = sum(later[-1].diff.counts().values()) if later[-1].diff is not None else 0
    wall = [statistics.median(figure[index][0] for figure in figures) for index in (0, 1)]
    cpu = [statistics.median(figure[index][1] for figure in figures) for index in (0, 1)]
    ratio = statistics.median(figure[1][0] / figure[0][0] for figure in figures)
    print(f"1 % changed, {changed} documents: ours {wall[0] * 1e3:.1f} ms, driver alone {wall[1] * 1e3:.1f} ms"
          f" ({ratio:.2f}, goal {GOAL}); CPU here {cpu[0] * 1e3:.1f} ms and {cpu[1] * 1e3:.1f} ms")  # fmt: skip
    look_s = statistics.median(figure[2] for figure in figures)
    print(f"fleet: CPU to take in that {look_s * 1e3:.1f} ms, all of it {whole_s * 1e3:.0f} ms")
    assert writer.graph("bench") == rounds[-1].graph
    fleet.close()
    writer.close()
    mirror.close()
    client.close()
    return 0 if ratio >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
