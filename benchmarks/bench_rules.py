"""What judging a round costs, against merging it.

One host of 10,000 nodes and 40,000 edges, 5 % of which change in each round, as collectors report them: processes with
their threads, endpoints and connections, pipes, containers, GPUs. Then the same host with the ranks of one torchrun job
on its GPUs, of which everything changes in each round: processes with their collectives, sessions, kernels, streams,
GPUs. Both sides in one process, CPU time, medians: the store makes the round of the reports (the floor: the core has to
do that anyway), the engine judges it with every rule.

    bench_rules.py [--processes 1000] [--ranks 8] [--rounds 30] [--changed 0.05]

Goal: all rules together at most 10 % of the merge, with ranks and without. The memory of the window is printed.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Sequence

from gpuflight.bottlenecks.base import Rule
from gpuflight.bottlenecks.engine import Engine
from gpuflight.graph import Edge, Entity, edges, nodes
from gpuflight.graph.store import LiveStore
from gpuflight.registry import plugins
from gpuflight.rounds import Environment, Round


class Job:
    """The ranks of one job on the GPUs of a host, as the collectors process_tree, ranks, cuda_probes, nvml and sessions
    tell of them. It is healthy, and nothing of it stays as it was in the round before."""

    kernels_count, streams_count, scopes_count = 20, 4, 4

    def __init__(self, processes: Sequence[nodes.Process], gpus: Sequence[nodes.GPU], chance: random.Random) -> None:
        self._ranks = list(zip(range(len(gpus)), processes, gpus, strict=True))
        self._random = chance

    def report(self, number: int) -> tuple[list[Entity], list[Edge]]:
        """All of its elements in a round."""
        found_nodes: list[Entity] = []
        found_edges: list[Edge] = []
        for rank, process, gpu in self._ranks:
            sums = _Sums(number * 5.0 + self._random.random() / 10)
            who = {"rank": rank, "local_rank": rank, "world_size": len(self._ranks), "job": "torchrun night-7"}
            process = nodes.Process(
                pid=process.pid, start=process.start, attributes={**process.attributes, **who, "ppid": 100 + rank},
                metrics={**process.metrics, **sums.process()},
            )  # fmt: skip
            gpu = nodes.GPU(uuid=gpu.uuid, attributes=gpu.attributes, metrics={**gpu.metrics, **sums.gpu()})
            session = nodes.Session(
                session_id=f"s{rank}", metrics=sums.session(),
                attributes={
                    **who, "name": "train.py", "state": "live", "step_scope": "train_step",
                    "last_event": f"round {number}", "collective_marks": sums.marks(number),
                },
            )  # fmt: skip
            found_nodes += [process, gpu, session]
            found_edges += [
                edges.Access(process.id, gpu.id, {}, {"memory_used_bytes": (1 << 34) + number * 4096}),
                edges.Own(process.id, session.id),
                edges.Transfer(process.id, gpu.id, {}, sums.copies()),
            ]
            lanes = [
                nodes.Stream(process=process.id, stream=n, metrics=sums.part(4)) for n in range(self.streams_count)
            ]
            for lane in lanes:
                found_edges += [edges.Belong(lane.id, session.id), edges.RunOn(lane.id, gpu.id)]
            names = ["ncclDevKernel_AllReduce_Sum_f32_RING_LL", *(f"gemm_{n}" for n in range(1, self.kernels_count))]
            for n, name in enumerate(names):
                kernel = nodes.Kernel(process=process.id, name=name, metrics=sums.kernel())
                found_nodes.append(kernel)
                found_edges.append(edges.Launch(process.id, kernel.id, {}, {"launches_per_s": sums.per_s(20)}))
                found_edges.append(edges.RunOn(kernel.id, lanes[n % len(lanes)].id, {}, sums.part(20)))
            found_nodes += lanes
            for n in range(self.scopes_count):
                scope = nodes.Scope(session_id=f"s{rank}", path=f"phase {n}", metrics=sums.scope())
                found_nodes.append(scope)
                found_edges.append(edges.Own(session.id, scope.id))
        return found_nodes, found_edges


class _Sums:
    """What a healthy rank has done in so many seconds: ten steps a second, 200 launches each."""

    def __init__(self, passed_s: float) -> None:
        self._s = passed_s

    def per_s(self, parts: int) -> float:
        return round(2000 / parts + self._s % 1, 3)

    def part(self, parts: int) -> dict[str, int | float]:
        return {"launches_count": int(2000 * self._s / parts), "gpu_time_ms": 950 * self._s / parts}

    def copies(self) -> dict[str, int | float]:
        return {"copies_count": int(20 * self._s), "copied_bytes": int(2e8 * self._s), "copy_bytes_per_s": 2e8}

    def scope(self) -> dict[str, int | float]:
        return {
            "runs_count": int(10 * self._s),
            "open_count": 1,
            "time_ms": 999 * self._s,
            "mean_ms": 99.9,
            "max_ms": 120,
        }

    def process(self) -> dict[str, int | float]:
        s = self._s
        return {
            "cpu_pct": 100 + s % 3,
            "nccl_calls_count": int(300 * s), "nccl_small_calls_count": int(3 * s), "nccl_bytes": int(3e10 * s),
            "nccl_bus_bytes": int(5e10 * s), "nccl_calls_per_s": 300 + s % 1, "cuda_launches_count": int(2000 * s),
            "cuda_launches_per_s": 2000 + s % 1, "cuda_wait_pct": 40 + s % 1, "cuda_wait_ms": 400 * s,
            "cuda_held_bytes": 1 << 34, "cuda_allocations_count": 4000, "io_read_bytes_per_s": 2e5 + s % 7,
            "io_write_bytes_per_s": 1e3 + s % 7,
        }  # fmt: skip

    def gpu(self) -> dict[str, int | float]:
        return {
            "sm_util_pct": 95 + self._s % 4,
            "power_watts": 500 + self._s % 9,
            "temperature_celsius": 60 + self._s % 2,
        }

    def kernel(self) -> dict[str, int | float]:
        return {
            **self.part(20),
            "mean_us": 475.0, "min_us": 400.0, "max_us": 900.0, "p50_us": 470 + self._s % 1,
            "p99_us": 800 + self._s % 1, "occupancy_pct": 60.0, "occupancy_samples_count": 100,
            "session_share_pct": 5.0, "launches_per_s": self.per_s(20), "gpu_time_pct": 4.7, "registers_count": 64,
            "reg_occupancy_pct": 50.0, "thread_local_bytes": 0, "waves_count": 8.5,
        }  # fmt: skip

    def session(self) -> dict[str, int | float]:
        s = self._s
        return {
            "events_count": int(9000 * s), "losses_count": 0, "lag_bytes": int(s * 1e3 % 999), "duration_s": s,
            "launches_count": int(2000 * s), "kernels_count": 20, "gpu_time_ms": 950 * s,
            "launches_per_s": self.per_s(1), "busy_pct": 95 + s % 1, "copies_count": int(20 * s),
            "copied_htod_bytes": int(2e8 * s), "copy_htod_bytes_per_s": 2e8 + s % 9,
            "copied_dtoh_bytes": int(1e5 * s), "copy_dtoh_bytes_per_s": 1e5 + s % 9, "syncs_count": int(10 * s),
            "sync_wait_ms": 300 * s, "sync_wait_pct": 30 + s % 1, "allocations_count": 4000,
            "frees_unmatched_count": 0, "held_bytes": 1 << 34, "alloc_peak_bytes": 1 << 34,
            "pinned_held_bytes": 1 << 20, "pinned_peak_bytes": 1 << 20, "memsets_count": int(10 * s),
            "graph_launches_count": 0, "scopes_count": int(40 * s), "communication_kernels_count": int(300 * s),
            "sync_batch_norms_count": 0, "communication_unclassified_pct": 0.0, "communication_own_streams_count": 1,
            "communication_ms": 95 * s, "communication_active_ms": 95 * s, "communication_overlapped_ms": 80 * s,
            "invalid_records_count": 0, "short_launches_count": int(20 * s), "graph_kernels_count": 0,
            "gpu_timeline_ms": 1000 * s, "gpus_worked_count": 1, "gpu_active_ms": 960 * s,
            "gpu_gaps_count": int(90 * s), "gpu_gaps_long_count": 0, "gpu_gaps_long_ms": 0.0, "gpu_gap_max_ms": 4.0,
            "kernels_active_ms": 950 * s, "gpu_gaps_known_ms": 40 * s, "host_wait_ms": 10 * s,
            "idle_launches_count": int(90 * s), "delayed_launches_count": int(s / 10),
            "launch_calls_count": int(2000 * s), "slow_launch_calls_count": int(s), "slow_launch_calls_ms": 0.2 * s,
            "copy_time_ms": 8 * s, "htod_copies_count": int(10 * s), "htod_small_copies_count": 0,
            "memset_time_ms": 0.1 * s, "allocation_time_ms": 12.0, "copy_calls_count": int(20 * s),
            "blocking_copies_count": int(s), "blocking_copies_ms": 0.2 * s, "pageable_copies_count": int(s),
            "pageable_copies_ms": 0.2 * s, "pageable_copied_bytes": int(1e4 * s), "pageable_big_copies_count": 0,
            "steps_count": int(10 * s), "steps_ms": 1000 * s, "step_p50_ms": 100.0, "step_max_ms": 130.0,
            "steps_judged_count": min(int(10 * s), 4096), "step_outliers_count": int(s / 100), "first_step_s": 8.0,
            "first_work_s": 6.0, "loader_ms": 20 * s, "gc_pauses_count": int(s / 10), "gc_long_pauses_count": 0,
            "gc_pauses_ms": s, "gc_pause_max_ms": 12.0, "top_kernel_pct": 10.0, "host_syncs_count": int(10 * s),
            "host_sync_wait_ms": 300 * s, "stall_samples_count": int(1000 * s), "stall_top_pct": 40 + s % 1,
            "thread_efficiency_pct": 95.0, "instructions_count": int(1e9 * s), "sm_active_pct": 90 + s % 1,
            "dram_active_pct": 40 + s % 1, "tensor_active_pct": 45 + s % 1,
        }  # fmt: skip

    def marks(self, number: int) -> list[str]:
        """Of the last collectives: one each 20 ms, all ranks within a tenth of a millisecond."""
        late_ns = int(self._s * 1e9) % 100_000
        began = ((n, n * 20_000_000 + late_ns) for n in range(number * 40, number * 40 + 32))
        return [f"{n}:AllReduce:{begin_ns}:{begin_ns + 3_000_000}" for n, begin_ns in began]


class Machine:
    """A busy host: about ten nodes and forty edges per process."""

    def __init__(self, processes: int, ranks: int = 0, seed: int = 3) -> None:
        self.random = random.Random(seed)
        host = nodes.Host(
            hostname="h", metrics={"cpus_count": 128, "memory_total_bytes": 1 << 40, "cpu_busy_pct": 40.0}
        )
        gpus: list[nodes.GPU] = [self._gpu(n) for n in range(8)]
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
        self._job = Job(crowd[:ranks], gpus[:ranks], self.random)
        self.nodes: list[Entity] = [host, *gpus[ranks:], *boxes, *crowd[ranks:], *threads, *ends, *pipes]
        wires: dict[tuple[str, str, str], Edge] = {}
        for n, process in enumerate(crowd):
            batch: list[Edge] = [edges.Own(crowd[n // 3].id, process.id)] if n else []
            batch.append(edges.Host(boxes[n // 20 % len(boxes)].id, process.id))
            batch += [edges.Own(process.id, thread.id) for thread in threads[4 * n : 4 * n + 4]]
            batch += [edges.Belong(end.id, process.id) for end in ends[4 * n : 4 * n + 4]]
            batch += [edges.SendTo(process.id, pipes[n].id), edges.SendTo(pipes[n - 1].id, process.id)]
            batch += [self._connection(ends) for _ in range(27)]
            if ranks <= n < 8:
                batch.append(edges.Access(process.id, gpus[n].id, {}, {"memory_used_bytes": 1 << 34}))
            for edge in batch:
                wires[edge.key] = edge
        self.edges = list(wires.values())

    def report(self, number: int) -> tuple[list[list[Entity]], list[list[Edge]]]:
        """What collectors report in a round, nodes and edges in batches."""
        job_nodes, job_edges = self._job.report(number)
        return [self.nodes, job_nodes], [self.edges, job_edges]

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


def measure(machine: Machine, options: argparse.Namespace) -> None:
    """Judge rounds of a host, and print what that costs against their merge."""
    engine = Engine([cls() for cls in plugins(Rule).values()])
    store = LiveStore()
    merge_ms, judge_ms, changed, found = [], [], 0, 0
    kept: list[Round] = []  # freeing a round is nobody's part of what is measured
    for number in range(1, options.warm_up + options.rounds + 1):
        batches = machine.report(number)
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
        if number > options.warm_up:
            merge_ms.append((merged - began) * 1e3)
            judge_ms.append((after - before) * 1e3)
        changed = len(done.diff.nodes_changed) + len(done.diff.edges_changed)
        found = len(judged.findings)
        del kept[:-2]
        machine.step(options.changed)
    merge, judge = statistics.median(merge_ms), statistics.median(judge_ms)
    size = f"{len(done.graph.nodes):,} nodes, {len(done.graph.edges):,} edges"
    print(f"{size}, {changed:,} changed a round; {len(engine.rules)} rules")
    means = f"x{sum(judge_ms) / sum(merge_ms):.3f} on average, worst {max(judge_ms):.2f} ms"
    print(f"merge {merge:.2f} ms, judge {judge:.2f} ms: x{judge / merge:.3f} (goal <= 0.1; {means})")
    memory = f"window {engine.memory_bytes() / 1e6:.1f} MB"
    print(f"{judge / changed * 1e3:.2f} us per changed element; {found} findings; {memory}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=8, help="of the second host, 8 at most")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--warm-up", type=int, default=65, help="rounds before: five minutes of which rules look back")
    parser.add_argument("--changed", type=float, default=0.05)
    options = parser.parse_args()
    gc.disable()
    for ranks in (0, options.ranks):
        print(f"--- {ranks} ranks of a job")
        measure(Machine(options.processes, ranks), options)


if __name__ == "__main__":
    main()
