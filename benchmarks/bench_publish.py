"""What it adds to a round to publish it to ten sinks of every policy, a hung one among them.

    python benchmarks/bench_publish.py [--nodes 10000] [--edges 40000] [--rounds 60]

A graph of that size, of which 2 % changes each round, goes to: memory, two JSON files (replaced, appended to), a text
file, three HTTP POST sinks on loopback (whole rounds, differences, one whose receiver never answers), two with a spool
on disk (one of them down), and one that blocks. Wall time of ``publish``, beside how long one encoding of the round
takes. Goal: at most 1 ms per round (median; the worst is printed). Then counts: in = sent + dropped + queued for each.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from typing import Any

from gpuflight.graph import Graph, edges, nodes
from gpuflight.graph.diff import diff
from gpuflight.rounds import Environment, Round
from gpuflight.subscribers.delivery import SubscriberSet
from gpuflight.subscribers.encoding import encode_round
from gpuflight.subscribers.file_json import FileJson, FileJsonSettings
from gpuflight.subscribers.file_text import FileText, FileTextSettings
from gpuflight.subscribers.http_post import HttpPost, HttpPostSettings
from gpuflight.subscribers.memory import Memory, MemorySettings

RECEIVER = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204)
        self.end_headers()
    def log_message(self, *_):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


def make_rounds(nodes_count: int, edges_count: int, rounds_count: int) -> list[Round]:
    """Rounds that share what does not change, as the store makes them."""
    members: list[Any] = [
        nodes.Process(pid=pid, start=1, attributes={"name": f"worker-{pid}"}, metrics={"cpu_pct": 0.0})
        for pid in range(1, nodes_count + 1)
    ]
    links: list[Any] = [
        edges.SendTo(members[at % nodes_count].id, members[(at * 7 + at // nodes_count + 1) % nodes_count].id)
        for at in range(edges_count)
    ]
    rounds, before = [], Graph()
    for number in range(1, rounds_count + 1):
        for index in range(number, nodes_count, 50):
            old = members[index]
            members[index] = nodes.Process(
                pid=old.pid, start=1, attributes=old.attributes, metrics={"cpu_pct": float(number)}
            )
        graph = Graph(members, links)
        rounds.append(
            Round(
                number=number,
                time_ns=time.time_ns(),
                duration_s=0.1,
                graph=graph,
                diff=diff(before, graph),
                coverage=[],
                env=Environment(hostname="bench"),
            )
        )
        before = graph
    return rounds


def ten_sinks(folder: str, url: str, hung: str) -> list[Any]:
    """One of each kind, and each policy."""
    spool = {"policy": "spool", "spool_folder": f"{folder}/spool"}
    return [
        Memory(MemorySettings()),
        Memory(MemorySettings(name="blocks", policy="block", max_items=4)),
        FileJson(FileJsonSettings(name="replaced", path=f"{folder}/graph.json")),
        FileJson(FileJsonSettings(name="appended", path=f"{folder}/diffs.jsonl", mode="append", content="diff")),
        FileText(FileTextSettings(path=f"{folder}/graph.txt", expected_update_interval_s=5)),
        HttpPost(HttpPostSettings(name="post", url=url)),
        HttpPost(HttpPostSettings(name="post-diffs", url=url, content="diff", compression="zstd")),
        HttpPost(HttpPostSettings(name="hung", url=hung)),
        HttpPost(HttpPostSettings(name="spooled", url=url, content="diff", **spool)),
        HttpPost(HttpPostSettings(name="spooled-down", url="http://127.0.0.1:9/", content="diff", **spool)),
    ]


def main() -> int:
    """Print figures; exit code 1 if the goal is missed or a count does not add up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--edges", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    rounds = make_rounds(arguments.nodes, arguments.edges, arguments.rounds)
    began_s = time.perf_counter()
    size_bytes = len(encode_round(rounds[0]))
    encoding_ms = (time.perf_counter() - began_s) * 1e3
    with ExitStack() as stack:
        receiver = stack.enter_context(
            subprocess.Popen([sys.executable, "-c", RECEIVER], stdout=subprocess.PIPE, text=True)
        )
        stack.callback(receiver.kill)
        assert receiver.stdout is not None
        url = f"http://127.0.0.1:{int(receiver.stdout.readline())}/"
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        members = SubscriberSet()
        for sink in ten_sinks(folder, url, f"http://127.0.0.1:{listener.getsockname()[1]}/"):
            members.add(sink)
        taken_ms = []
        for completed in rounds:
            began_s = time.perf_counter()
            members.publish(completed)
            taken_ms.append((time.perf_counter() - began_s) * 1e3)
            time.sleep(0.25)
        members.close(10.0)
        lines = members.status()
    for line in lines:
        counts = line.statistics
        print(
            f"  {line.name:13} received {counts.received:4}  sent {counts.sent:4}  dropped {counts.dropped:4}"
            f"  queued {counts.queued:4}  {counts.last_error[:60]}"
        )
    median_ms = statistics.median(taken_ms)
    print(f"one encoding of the round: {encoding_ms:.0f} ms, {size_bytes / 1e6:.1f} MB")
    print(f"publish to {len(lines)} sinks: median {median_ms:.3f} ms, worst {max(taken_ms):.3f} ms (goal: 1 ms)")
    adds_up = all(
        line.statistics.received
        == arguments.rounds
        == line.statistics.sent + line.statistics.dropped + line.statistics.queued
        for line in lines
    )
    return 0 if median_ms <= 1.0 and adds_up else 1


if __name__ == "__main__":
    sys.exit(main())
