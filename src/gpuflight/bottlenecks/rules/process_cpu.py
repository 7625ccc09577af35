"""Programs that use GPUs and wait for CPUs: in the run queue, for the GIL, for memory on another NUMA node."""

from __future__ import annotations

from gpuflight.bottlenecks.base import CLEAR, ElementRule, Need, Screen, Threshold, Unknown, Verdict
from gpuflight.bottlenecks.window import Look, name_of
from gpuflight.graph import edges, nodes


class RunQueueDelay(ElementRule):
    """A thread of a program that uses a GPU waits for a CPU although it could run.

    Launching a kernel takes microseconds; a wait in the run queue takes milliseconds.
    """

    catalogue_id = "S02"
    subject = nodes.Thread
    needs = (Need(kind=nodes.Thread, metrics=("run_delay_pct", "cpu_pct"), given_by="threads"),)
    screens = (Screen("run_delay_pct", ">", "least"),)
    thresholds = {
        "share": Threshold(
            value=10, clear_at=6, unit="% of its running time", source="stricter than others", guess=True
        ),
        "least": Threshold(value=2, unit="% of the time", source="below it nobody notices", guess=True),
    }
    guard = "its process uses a GPU"
    persist_s = 5.0
    relations = (edges.Own, edges.Access)
    explains = ("launch_delay", "host_bound_idle", "gpu_idle_gaps")
    advice = "pin the launching thread to CPUs of its own, use fewer threads, keep other work off the cores"
    verify = "perf sched timehist -p <pid>; cat /proc/<pid>/task/*/schedstat"

    def judge(self, look: Look) -> Verdict:
        delay, runs = look.metric("run_delay_pct"), look.metric("cpu_pct")
        share = 100 * delay / runs if runs else 0.0
        if share <= look.limit("share") or delay <= look.limit("least"):
            return CLEAR
        owners = [edge.source for edge in look.window.into(look.id, edges.Own)]
        process = next((e for owner in owners if isinstance(e := look.window.entity(owner), nodes.Process)), None)
        gpus = look.window.gpus_of(process) if process is not None else []
        if process is None or not gpus:
            return CLEAR
        return look.fired(
            f"{look.label} of {name_of(look.window, process.id)} waits for a CPU {delay:.0f} % of the time and runs"
            f" {runs:.0f} %",
            [look.saw("run_delay_pct"), look.saw("cpu_pct")],
            entities=[look.id, process.id, *(gpu.id for gpu in gpus[:8])],
        )


class GilBound(ElementRule):
    """A Python program with many threads runs on one core while its GPU waits: its threads wait for the GIL.

    Told from outside by its pattern, so it is suspected; with a probe on take_gil it is measured (gil_wait_pct).
    """

    catalogue_id = "S06"
    subject = nodes.Process
    severity = "info"
    needs = (
        Need(kind=nodes.Process, metrics=("cpu_pct", "threads_count", "gil_wait_pct"), given_by="process_tree"),
        Need(kind=nodes.GPU, metrics=("sm_util_pct",), given_by="nvml"),
    )
    screens = (Screen("cpu_pct", ">", "one_core"), Screen("gil_wait_pct", ">", "waits"))
    gpu_users_only = True
    thresholds = {
        "waits": Threshold(value=5, clear_at=3, unit="% of the time", source="Coroot: 0.05 s/s of GIL wait"),
        "one_core": Threshold(value=95, clear_at=90, unit="% of one core", source="py-spy-like, one hot thread"),
        "threads": Threshold(value=4, unit="threads", source="ours", guess=True),
        "gpu": Threshold(value=50, clear_at=60, unit="%", source="ours", guess=True, falling=True),
    }
    guard = "a Python program that uses a GPU, at one core exactly"
    persist_s = 20.0
    relations = (edges.Access,)
    explains = ("gpu_idle_gaps", "host_bound_idle", "launch_bound")
    advice = "move work out of Python's threads (processes, C++ loaders, torch.compile), or a free-threaded build"
    verify = "py-spy dump --pid <pid>; py-spy top --gil --pid <pid>"

    def judge(self, look: Look) -> Verdict:
        if look.has("gil_wait_pct"):
            waits = look.metric("gil_wait_pct")
            if waits <= look.limit("waits"):
                return CLEAR
            gpus = look.window.gpus_of(look.element)
            return look.fired(
                f"threads of {look.label} wait for the GIL {waits:.0f} % of the time",
                [look.saw("gil_wait_pct")],
                severity="warn",
                entities=[look.id, *(gpu.id for gpu in gpus[:8])],
            )
        name = str(look.element.attributes.get("name", ""))
        cpu, threads = look.metric("cpu_pct"), look.metric("threads_count")
        if not name.startswith("python") or not look.limit("one_core") <= cpu <= 115 or threads < look.limit("threads"):
            return CLEAR
        gpus = look.window.gpus_of(look.element)
        used = [gpu.metrics["sm_util_pct"] for gpu in gpus if "sm_util_pct" in gpu.metrics]
        if not used:
            raise Unknown("sm_util_pct of GPU: not measured here")
        if max(used) >= look.limit("gpu"):
            return CLEAR
        return look.fired(
            f"{look.label} has {threads:.0f} threads and uses one core ({cpu:.0f} %) while its GPU does"
            f" {max(used):.0f} %: suspected to wait for the GIL",
            [look.saw("cpu_pct"), look.saw("threads_count"), *(look.saw("sm_util_pct", of=gpu) for gpu in gpus[:4])],
            entities=[look.id, *(gpu.id for gpu in gpus[:8])],
        )


class RemoteNuma(ElementRule):
    """A program and its GPU are on different NUMA nodes: copies and launches cross the link between CPU sockets."""

    catalogue_id = "S07"
    subject = nodes.Process
    needs = (
        Need(kind=nodes.Numa, given_by="numa"),
        Need(kind=nodes.GPU, given_by="nvml"),
        Need(kind=nodes.Process, metrics=("rss_bytes",), given_by="process_tree"),
    )
    screens = (Screen("rss_bytes", ">", "least"),)
    gpu_users_only = True
    thresholds = {
        "remote_warn": Threshold(value=30, clear_at=25, unit="% of its memory", source="skill of witty-profiler"),
        "remote_crit": Threshold(value=50, clear_at=45, unit="% of its memory", source="skill of witty-profiler"),
        "least": Threshold(value=64 << 20, unit="bytes", source="smaller programs copy little", guess=True),
    }
    guard = "the host has several NUMA nodes, and the driver says which one the GPU is local to"
    persist_s = 10.0
    relations = (edges.Access, edges.NumaAccess, edges.Affinity)
    explains = ("pcie_degraded", "launch_delay", "memory_operations_heavy", "straggler_rank")
    advice = "numactl --cpunodebind=<n> --membind=<n> (or --cpu-bind, topology-aware scheduling); first touch decides"
    verify = "numastat -p <pid>; nvidia-smi topo -m"

    def judge(self, look: Look) -> Verdict:
        window = look.window
        if sum(1 for node in window.all(nodes.Numa) if not node.ns) < 2:
            return CLEAR
        gpus = window.gpus_of(look.element)
        local = {edge.target for gpu in gpus for edge in window.out_of(gpu.id, edges.Affinity)}
        if not local:
            raise Unknown("numa_node of GPU: neither the driver nor PCI says where it is")
        by_node: dict[str, float] = {}
        for edge in window.out_of(look.id, edges.NumaAccess):
            if edge.target.startswith("Numa(") and "resident_bytes" in edge.metrics:
                by_node[edge.target] = by_node.get(edge.target, 0.0) + edge.metrics["resident_bytes"]
        total = sum(by_node.values())
        if not total:
            raise Unknown("resident_bytes of NumaAccess: not measured here")
        remote = sum(size for node, size in by_node.items() if node not in local)
        share = 100 * remote / total
        if share <= look.limit("remote_warn"):
            return CLEAR
        far = max((node for node in by_node if node not in local), key=by_node.__getitem__)
        return look.fired(
            f"{share:.0f} % of the memory of {look.label} is not on the NUMA node of {name_of(window, gpus[0].id)}",
            [look.saw("resident_bytes", size, of=window.entity(node)) for node, size in sorted(by_node.items())],
            severity="critical" if share > look.limit("remote_crit") else "warn",
            entities=[look.id, *(gpu.id for gpu in gpus[:8]), *sorted(local)],
            edges=[f"NumaAccess({look.id}->{far})"],
        )


class CacheMisses(ElementRule):
    """Much of what a program reads misses the last-level cache.

    Judged of the processes that the collector perf_counters counts; it is off until
    ``collectors.perf_counters.watch`` is set.
    """

    catalogue_id = "S19"
    subject = nodes.Process
    severity = "info"
    needs = (
        Need(
            kind=nodes.Process, metrics=("llc_miss_pct", "llc_misses_per_s"), given_by="perf_counters, if switched on"
        ),
    )
    screens = (Screen("llc_miss_pct", ">", "misses"),)
    measured_of_some = True
    thresholds = {
        "misses": Threshold(value=20, clear_at=15, unit="%", source="skill of witty-profiler"),
        "least": Threshold(
            value=1, clear_at=0.5, unit="million misses/s", source="at some 100 ns each a tenth of a core", guess=True
        ),
    }
    guard = "the machine has hardware counters (virtual ones often do not), and gpuflight the right to read them"
    persist_s = 10.0
    advice = "smaller working sets, huge pages, fewer neighbours on the same socket"
    verify = "perf stat -e LLC-loads,LLC-load-misses -p <pid> sleep 5"

    def judge(self, look: Look) -> Verdict:
        misses, millions = look.metric("llc_miss_pct"), look.metric("llc_misses_per_s") / 1e6
        if misses <= look.limit("misses") or millions <= look.limit("least"):
            return CLEAR
        return look.fired(
            f"{misses:.0f} % of what {look.label} reads past its own caches misses the last level too,"
            f" {millions:.1f} million times per second",
            [look.saw("llc_miss_pct"), look.saw("llc_misses_per_s")],
        )
