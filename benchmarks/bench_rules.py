"""What judging a round costs, against merging it.

One host of 10,000 nodes and 40,000 edges, 5 % of which change in each round, as collectors report them: processes with
their threads, endpoints and connections, pipes, containers, GPUs. Both sides in one process, CPU time, medians: the
store makes the round of the reports (the floor: the core has to do that anyway), the engine judges it with every rule.

    bench_rules.py [--processes 1000] [--rounds 30] [--changed 0.05]

Goal: all rules together at most 10 % of the merge. The memory of the window is printed.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time

from gpuflight.bottlenecks.base import Rule
from gpuflight.bottlenecks.engine import Engine
from gpuflight.graph import Edge, Entity, edges, nodes
from gpuflight.graph.store import LiveStore
from gpuflight.registry import plugins
from gpuflight.rounds import Environment, Round


class Machine:
    """A busy host: about ten nodes and forty edges per process."""

    def __init__(self, processes: int, seed: int = 3) -> None:
        self.random = random.Random(seed)
        host = nodes.Host(
            hostname="h", metrics={"cpus_count": 128, "memory_total_bytes": 1 << 40, "cpu_busy_pct": 40.0}
        )
        gpus: list[Entity] = [self._gpu(n) for n in range(8)]
        boxes: list[Entity] = [
            nodes.Container(container_id=f"{n:064x}", metrics={"cpu_pct": 50.0, "throttled_pct": 0.4, "pids_count": 20})
            for n in range(processes // 20)
        ]
        crowd = [self._process(n) for n in range(processes)]
        threads = [
            nodes.Thread(tid=100_000 + n, start=n, metrics={"cpu_pct": 1.0, "run_delay_pct": 0.1})
            for n in range(processes * 4)
        ]
        ends = [
            nodes.Socket(protocol="tcp", address=f"10.0.{n >> 8}.{n & 255}:80", metrics={"connections_count": 1})
            for n in range(processes * 4)
        ]
        pipes = [nodes.Pipe(inode=n + 1) for n in range(processes)]
        self.nodes: list[Entity] = [host, *gpus, *boxes, *crowd, *threads, *ends, *pipes]
        wires: dict[tuple[str, str, str], Edge] = {}
        for n, process in enumerate(crowd):
            batch: list[Edge] = [edges.Own(crowd[n // 3].id, process.id)] if n else []
            batch.append(edges.Host(boxes[n // 20 % len(boxes)].id, process.id))
            batch += [edges.Own(process.id, thread.id) for thread in threads[4 * n : 4 * n + 4]]
            batch += [edges.Belong(end.id, process.id) for end in ends[4 * n : 4 * n + 4]]
            batch += [edges.SendTo(process.id, pipes[n].id), edges.SendTo(pipes[n - 1].id, process.id)]
            batch += [self._connection(ends) for _ in range(27)]
            if n < 8:
                batch.append(edges.Access(process.id, gpus[n].id, {}, {"memory_used_bytes": 1 << 34}))
            for edge in batch:
                wires[edge.key] = edge
        self.edges = list(wires.values())

    @staticmethod
    def _gpu(n: int) -> nodes.GPU:
        metrics = {
            "sm_util_pct": 90 + n, "memory_total_bytes": 80 << 30, "memory_used_bytes": (20 + n) << 30, "pcie_gen": 5,
            "pcie_gen_max": 5, "pcie_width": 16, "pcie_width_max": 16, "temperature_celsius": 60, "power_watts": 500,
            "power_limit_watts": 700, "sm_clock_hz": 1.98e9, "sm_clock_max_hz": 1.98e9, "nvlink_count": 18,
            "nvlink_active_count": 18, "pcie_replays_count": 0, "processes_count": 1,
        }  # fmt: skip
        return nodes.GPU(uuid=f"GPU-{n}", attributes={"index": n, "state": "ok", "persistence": True}, metrics=metrics)

    def _process(self, n: int) -> nodes.Process:
        metrics = {
            "cpu_pct": round(self.random.random() * 100, 1),
            "rss_bytes": self.random.randrange(1 << 34 if n % 20 == 0 else 1 << 29),
            "threads_count": 4, "fds_count": 30, "major_faults_per_s": 0.0, "minor_faults_per_s": 3.0,
            "context_switches_voluntary_per_s": 100.0, "context_switches_involuntary_per_s": 2.0,
        }  # fmt: skip
        return nodes.Process(pid=n + 1, start=n, attributes={"name": "python", "state": "S"}, metrics=metrics)

    def _connection(self, ends: list[nodes.Socket]) -> edges.ConnectTo:
        source, target = self.random.sample(ends, 2)
        metrics = {"rtt_ms": 0.2, "bytes_sent_count": self.random.randrange(1 << 40), "retransmits_count": 0}
        return edges.ConnectTo(source.id, target.id, {"state": "ESTABLISHED"}, metrics)

    def step(self, share: float) -> None:
        """Another value in one metric of ``share`` of the elements; the others stay the same objects."""
        for elements in (self.nodes, self.edges):
            for at in self.random.sample(range(len(elements)), int(len(elements) * share)):
                element = elements[at]
                if not element.metrics:
                    continue
                name = next(iter(element.metrics))
                metrics = {**element.metrics, name: element.metrics[name] + self.random.choice((1, 2, 3)) / 10}
                fields = {f: getattr(element, f) for f in element.__struct_fields__} | {"metrics": metrics}
                elements[at] = type(element)(**fields)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--changed", type=float, default=0.05)
    options = parser.parse_args()
    machine = Machine(options.processes)
    engine = Engine([cls() for cls in plugins(Rule).values()])
    store = LiveStore()
    gc.disable()
    merge_ms, judge_ms, found = [], [], 0
    kept: list[Round] = []  # freeing a round is nobody's part of what is measured
    for number in range(1, options.rounds + 2):
        batches = [machine.nodes], [machine.edges]
        began = time.process_time()
        advance = store.advance(number, *batches)
        merged = time.process_time()
        done = Round(
            number=number, time_ns=number * 5_000_000_000, duration_s=0.1, graph=advance.graph, diff=advance.diff,
            coverage=[], env=Environment(), monotonic_s=number * 5.0,
        )  # fmt: skip
        kept.append(done)
        before = time.process_time()
        judged = engine.judge(done)
        after = time.process_time()
        if number > 1:  # the first round is all new
            merge_ms.append((merged - began) * 1e3)
            judge_ms.append((after - before) * 1e3)
        found = len(judged.findings)
        del kept[:-2]
        machine.step(options.changed)
    elements = len(machine.nodes) + len(machine.edges)
    changed = int(elements * options.changed)
    merge, judge = statistics.median(merge_ms), statistics.median(judge_ms)
    size = f"{len(machine.nodes):,} nodes, {len(machine.edges):,} edges"
    print(f"{size}, {changed:,} changed a round; {len(engine.rules)} rules")
    print(f"merge {merge:.2f} ms, judge {judge:.2f} ms (worst {max(judge_ms):.2f}): x{judge / merge:.3f} (goal <= 0.1)")
    memory = f"window {engine.memory_bytes() / 1e6:.1f} MB"
    print(f"{judge / changed * 1e3:.2f} us per changed element; {found} findings; {memory}")


if __name__ == "__main__":
    main()
