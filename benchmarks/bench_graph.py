"""A round's graph work against networkx, against the floor of the interpreter, and against orjson.

Work: construct 25 % more reports than elements, deduplicate, merge with the last round, diff; 95 % of the elements are
as they were. Both sides get the same reports (tuples of scalars). Sides alternate; every figure is CPU time, the ratio
is the median of the paired ratios of ``--repeats`` pairs.

    python benchmarks/bench_graph.py [--repeats 5] [--sizes 10000x40000,100000x400000]
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import networkx as nx
import orjson

from gpuflight.graph import edges, nodes
from gpuflight.graph.codec import decode_graph, encode_graph, to_builtins
from gpuflight.graph.rows import Rows
from gpuflight.graph.store import LiveStore

NodeReport = tuple[int, int, str, str, str, int, float, int]
EdgeReport = tuple[int, int, int, int, float]
Reports = tuple[list[NodeReport], list[EdgeReport]]


def reports(node_count: int, edge_count: int, changed_share: float) -> Reports:
    """What collectors would have read: the same shape for every share of change."""
    shape, change = random.Random(1), random.Random(2)
    node_reports: list[NodeReport] = []
    for index in range(node_count):
        value = index if change.random() >= changed_share else index + 1_000_000
        node_reports.append((index, 900_000 + index, f"proc{index % 50}", "python train.py", "S", value * 4096, 1.5, 4))
    edge_reports: list[EdgeReport] = []
    pairs: set[tuple[int, int]] = set()
    while len(edge_reports) < edge_count:
        pair = (shape.randrange(node_count), shape.randrange(node_count))
        if pair in pairs:
            continue
        pairs.add(pair)
        value = len(edge_reports) if change.random() >= changed_share else len(edge_reports) + 1_000_000
        edge_reports.append((*pair, value * 1500, value % 7, (value % 4000) / 1000))
    node_reports += [node_reports[shape.randrange(node_count)] for _ in range(node_count // 4)]
    edge_reports += [edge_reports[shape.randrange(edge_count)] for _ in range(edge_count // 4)]
    return node_reports, edge_reports


class OurCollector:
    """Turns reports into elements as the collectors do; unchanged rows give the object of the round before."""

    def __init__(self, ids: list[str]) -> None:
        self.ids = ids
        self.node_rows = Rows(self._node)
        self.edge_rows = Rows(self._edge)

    @staticmethod
    def _node(pid: int, start: int, name: str, cmdline: str, state: str, rss: int, cpu: float, threads: int) -> Any:
        return nodes.Process(
            pid=pid,
            start=start,
            attributes={"name": name, "cmdline": cmdline, "state": state},
            metrics={"rss_bytes": rss, "cpu_pct": cpu, "threads_count": threads},
        )

    def _edge(self, a: int, b: int, sent: int, retransmits: int, rtt: float) -> Any:
        ids = self.ids
        metrics = {"bytes_sent_count": sent, "retransmits_count": retransmits, "rtt_ms": rtt}
        return edges.ConnectTo(ids[a], ids[b], metrics=metrics)


def our_round(store: LiveStore, collector: OurCollector, data: Reports, number: int) -> Any:
    gc.disable()  # as the core does for the length of a round
    node_reports, edge_reports = data
    result = store.advance(
        number, [collector.node_rows.elements(node_reports)], [collector.edge_rows.elements(edge_reports)]
    )
    gc.enable()
    return result


def networkx_graph(ids: list[str], node_reports: list[NodeReport], edge_reports: list[EdgeReport]) -> Any:
    graph: Any = nx.MultiDiGraph()
    for pid, start, name, cmdline, state, rss, cpu, threads in node_reports:
        graph.add_node(
            f"Process(pid={pid},start={start})",
            pid=pid, start=start, name=name, cmdline=cmdline, state=state,
            rss_bytes=rss, cpu_pct=cpu, threads_count=threads,
        )  # fmt: skip
    for a, b, sent, retransmits, rtt in edge_reports:
        graph.add_edge(
            ids[a], ids[b], key="ConnectTo", bytes_sent_count=sent, retransmits_count=retransmits, rtt_ms=rtt
        )
    return graph


def networkx_diff(before: Any, after: Any) -> tuple[int, ...]:
    old_nodes, new_nodes = before.nodes, after.nodes
    old_edges = {(a, b, key): data for a, b, key, data in before.edges(keys=True, data=True)}
    new_edges = {(a, b, key): data for a, b, key, data in after.edges(keys=True, data=True)}
    counts = []
    for old, new in ((old_nodes, new_nodes), (old_edges, new_edges)):
        counts.append(len([key for key in new if key not in old]))
        counts.append(len([key for key in old if key not in new]))
        counts.append(len([key for key in new if key in old and new[key] != old[key]]))
    return tuple(counts)


def floor(ids: list[str], node_reports: list[NodeReport], edge_reports: list[EdgeReport]) -> dict[Any, Any]:
    """What any Python store must do: build a key per report and put it into a dict."""
    found: dict[Any, Any] = {}
    for report in node_reports:
        found["Process", "", report[0], report[1]] = report
    for edge in edge_reports:
        found[ids[edge[0]], ids[edge[1]], "ConnectTo"] = edge
    return found


def cpu_ms(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.process_time()
    result = work()
    return (time.process_time() - started) * 1e3, result


def bench_round(node_count: int, edge_count: int, repeats: int) -> None:
    first, second = reports(node_count, edge_count, 0.0), reports(node_count, edge_count, 0.05)
    ids = [f"Process(pid={index},start={900_000 + index})" for index in range(node_count)]
    ours, peers, floors = [], [], []
    for _ in range(repeats):
        store, collector = LiveStore(), OurCollector(ids)
        our_round(store, collector, first, 1)
        gc.collect()
        spent, result = cpu_ms(partial(our_round, store, collector, second, 2))
        ours.append(spent)
        counts = result.diff.counts()
        del store, collector, result
        gc.collect()
        spent, kept = cpu_ms(lambda: floor(ids, *second))
        floors.append(spent)
        del kept
        before = networkx_graph(ids, *first)
        gc.collect()
        spent, (after, peer_counts) = cpu_ms(partial(_networkx_round, before, ids, second))
        peers.append(spent)
        del before, after
        gc.collect()
    assert tuple(counts.values()) == peer_counts, (counts, peer_counts)
    print(
        f"round {node_count}/{edge_count}: ours {statistics.median(ours):.1f} ms, "
        f"networkx {statistics.median(peers):.1f} ms, floor {statistics.median(floors):.1f} ms; "
        f"{_median_ratio(peers, ours):.1f}x faster than networkx, {_median_ratio(ours, floors):.2f}x the floor; "
        f"per element {statistics.median(ours) * 1e6 / (node_count + edge_count):.0f} ns"
    )


def _networkx_round(live: Any, ids: list[str], data: Reports) -> Any:
    after = networkx_graph(ids, *data)
    counts = networkx_diff(live, after)
    live.update(edges=after.edges(keys=True, data=True), nodes=after.nodes(data=True))
    return after, counts


def bench_json(node_count: int, edge_count: int, repeats: int) -> None:
    ids = [f"Process(pid={index},start={900_000 + index})" for index in range(node_count)]
    store = LiveStore()
    graph = our_round(store, OurCollector(ids), reports(node_count, edge_count, 0.0), 1).graph
    plain = to_builtins(graph)
    data = encode_graph(graph)
    assert len(orjson.dumps(plain)) == len(data)
    dump_ours, dump_peer, load_ours, load_peer = [], [], [], []
    for _ in range(3 * repeats):
        dump_ours.append(cpu_ms(lambda: encode_graph(graph))[0])
        dump_peer.append(cpu_ms(lambda: orjson.dumps(plain))[0])
    for _ in range(repeats):  # apart from dumping: what loading leaves behind in the caches would fall on one side
        load_ours.append(cpu_ms(lambda: decode_graph(data))[0])
        load_peer.append(cpu_ms(lambda: orjson.loads(data))[0])
    print(
        f"json {node_count}/{edge_count} ({len(data) / 1e6:.1f} MB): dump {_median_ratio(dump_peer, dump_ours):.2f}x "
        f"orjson ({statistics.median(dump_ours):.1f} ms), load {_median_ratio(load_peer, load_ours):.2f}x "
        f"orjson.loads ({statistics.median(load_ours):.1f} ms)"
    )


def bench_memory(node_count: int, edge_count: int) -> None:
    ids = [f"Process(pid={index},start={900_000 + index})" for index in range(node_count)]
    data = reports(node_count, edge_count, 0.0)
    sizes = {}
    for name, build in (
        ("ours", lambda: our_round(LiveStore(), OurCollector(ids), data, 1).graph),
        ("networkx", lambda: networkx_graph(ids, *data)),
    ):
        gc.collect()
        tracemalloc.start()
        kept = build()
        gc.collect()
        sizes[name] = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        del kept
    elements = node_count + edge_count
    print(
        f"memory {node_count}/{edge_count}: ours {sizes['ours'] / elements:.0f} B/element, "
        f"networkx {sizes['networkx'] / elements:.0f} B/element; {sizes['ours'] / sizes['networkx']:.2f}x networkx"
    )


def _median_ratio(over: list[float], under: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sizes", default="10000x40000,100000x400000")
    options = parser.parse_args()
    print(f"python {sys.version.split()[0]}, networkx {nx.__version__}, orjson {orjson.__version__}, "
          f"msgspec {msgspec.__version__}")  # fmt: skip
    for size in options.sizes.split(","):
        node_count, edge_count = map(int, size.split("x"))
        bench_round(node_count, edge_count, options.repeats)
        bench_json(node_count, edge_count, options.repeats)
        bench_memory(node_count, edge_count)


if __name__ == "__main__":
    main()
