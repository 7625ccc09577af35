"""Memory of the host: faults, stalls, shortage, leaks."""

from __future__ import annotations

from itertools import pairwise

from gpuflight.bottlenecks.base import CLEAR, ElementRule, Need, Screen, Threshold, Verdict
from gpuflight.bottlenecks.window import Look, told
from gpuflight.graph import edges, nodes

_LEAK_WINDOW_S = 3 * 3600.0
_SWAP_WINDOW_S = 1800.0


class MajorFaults(ElementRule):
    """A process that uses a GPU waits for pages to be read from storage again and again."""

    catalogue_id = "S08"
    subject = nodes.Process
    needs = (Need(kind=nodes.Process, metrics=("major_faults_per_s",), given_by="process_tree"),)
    screens = (Screen("major_faults_per_s", ">", "faults"),)
    gpu_users_only = True
    thresholds = {"faults": Threshold(value=100, clear_at=50, unit="1/s", source="ours", guess=True)}
    guard = "the process uses a GPU; its first minutes are excluded"
    warm_up_s = 120.0
    persist_s = 20.0
    relations = (edges.Access,)
    explains = ("gpu_idle_gaps", "data_loader_starvation", "stuck_process")
    advice = "less memory pressure on the host, or read the data into memory (not mmap) where it is used at random"
    verify = "pidstat -r -p <pid> 5"

    def judge(self, look: Look) -> Verdict:
        faults = look.metric("major_faults_per_s")
        gpus = look.window.gpus_of(look.element)
        if faults <= look.limit("faults") or not gpus:
            return CLEAR
        return look.fired(
            f"{look.label} has {faults:.0f} major page faults/s: it waits for storage to give back its memory",
            [look.saw("major_faults_per_s")],
            entities=[look.id, *(gpu.id for gpu in gpus[:8])],
        )


class MemoryStall(ElementRule):
    """All tasks of the host stood still because memory was short."""

    catalogue_id = "S09"
    subject = nodes.Host
    needs = (Need(kind=nodes.Host, metrics=("memory_pressure_full_pct",), given_by="host"),)
    thresholds = {
        "stalled": Threshold(value=2, clear_at=1, unit="% of the time", source="Coroot: 0.02 s/s of memory stall")
    }
    persist_s = 10.0
    explains = ("major_faults", "gpu_idle_gaps", "run_queue_delay", "stuck_process")
    cost_formula = "unknown: the stalled share concerns all GPUs of the host"
    advice = "find who grows (gpuflight describe, sorted by rss_bytes), give it a limit, or move it"
    verify = "cat /proc/pressure/memory"

    def judge(self, look: Look) -> Verdict:
        stalled = look.metric("memory_pressure_full_pct")
        if stalled <= look.limit("stalled"):
            return CLEAR
        return look.fired(
            f"every task of {look.label} waited for memory {stalled:.1f} % of the last 10 s",
            [look.saw("memory_pressure_full_pct", window_s=10.0)],
            severity="critical" if stalled > 5 * look.limit("stalled") else "warn",
        )


class MemoryPressure(ElementRule):
    """The host, or a container, runs out of memory: little is available, it swaps, or the kernel killed somebody."""

    catalogue_id = "S10"
    subject = (nodes.Host, nodes.Container, nodes.Pod, nodes.Unit)
    needs = (
        Need(
            kind=nodes.Host,
            metrics=("memory_available_bytes", "memory_total_bytes", "swap_used_bytes"),
            given_by="host",
        ),
        Need(
            kind=nodes.Container,
            metrics=("oom_kills_count", "memory_used_bytes", "memory_limit_bytes"),
            given_by="containers",
        ),
    )
    thresholds = {
        "available_warn": Threshold(
            value=10, clear_at=15, unit="% of RAM", source="Netdata, ram_available", falling=True
        ),
        "available_crit": Threshold(value=5, clear_at=8, unit="% of RAM", source="Netdata", guess=True, falling=True),
        "swapped": Threshold(value=20, unit="% of RAM in 30 minutes", source="Netdata, 30min_ram_swapped_out"),
        "limit_used": Threshold(value=95, clear_at=92, unit="% of the limit", source="beside the kill", guess=True),
    }
    persist_s = 10.0
    histories = {
        nodes.Host: {"swap_used_bytes": _SWAP_WINDOW_S, "oom_kills_count": 600.0},
        nodes.Container: {"oom_kills_count": 600.0},
        nodes.Pod: {"oom_kills_count": 600.0},
        nodes.Unit: {"oom_kills_count": 600.0},
    }
    time_matters = False
    explains = ("major_faults", "memory_stall")
    advice = "find who grows (gpuflight describe), raise the limit, or use fewer workers"
    verify = "free -h; grep oom_kill /proc/vmstat; cat /sys/fs/cgroup/<path>/memory.events"

    def judge(self, look: Look) -> Verdict:
        return self._host(look) if isinstance(look.element, nodes.Host) else self._group(look)

    def _host(self, look: Look) -> Verdict:
        killed = look.window.history(look.element, "oom_kills_count")
        count = killed.increase(look.window.now_s, 600.0) if killed is not None else None
        if count:
            return look.fired(
                f"the kernel killed {count:.0f} tasks of {look.label} for want of memory in the last 10 minutes",
                [look.saw("oom_kills_count", count, samples_count=2, window_s=600.0)],
                severity="critical",
            )
        available, total = look.metric("memory_available_bytes"), look.metric("memory_total_bytes")
        share = 100 * available / total if total else 100.0
        seen = [look.saw("memory_available_bytes"), look.saw("memory_total_bytes")]
        if share < look.limit("available_warn"):
            return look.fired(
                f"{look.label} has {told('x_bytes', available)} of memory left ({share:.0f} %)",
                seen,
                severity="critical" if share < look.limit("available_crit") else "warn",
            )
        series = look.window.history(look.element, "swap_used_bytes")
        if series is not None and len(series.values) > 1:
            out = 100 * (series.values[-1] - min(series.values)) / total
            if out > look.limit("swapped"):
                return look.fired(
                    f"{look.label} swapped out {out:.0f} % of its memory within 30 minutes",
                    [look.saw("swap_used_bytes", window_s=_SWAP_WINDOW_S, samples_count=len(series.values)), *seen],
                )
        return CLEAR

    def _group(self, look: Look) -> Verdict:
        killed = look.increase("oom_kills_count", 600.0)
        if killed > 0:
            return look.fired(
                f"the kernel killed {killed:.0f} tasks of {look.label} for want of memory in the last 10 minutes",
                [look.saw("oom_kills_count", killed, samples_count=2, window_s=600.0)],
                severity="critical",
            )
        if not (look.has("memory_limit_bytes") and look.has("memory_used_bytes")):
            return CLEAR
        used, limit = look.metric("memory_used_bytes"), look.metric("memory_limit_bytes")
        share = 100 * used / limit if limit else 0.0
        if share <= look.limit("limit_used"):
            return CLEAR
        return look.fired(
            f"{look.label} uses {told('x_bytes', used)} of its limit of {told('x_bytes', limit)} ({share:.0f} %)",
            [look.saw("memory_used_bytes"), look.saw("memory_limit_bytes")],
        )


class MemoryLeak(ElementRule):
    """A process's memory has grown steadily for hours."""

    catalogue_id = "S13"
    subject = nodes.Process
    needs = (Need(kind=nodes.Process, metrics=("rss_bytes",), given_by="process_tree"),)
    screens = (Screen("rss_bytes", ">", "least"),)
    every_rounds = 30
    thresholds = {
        "growth": Threshold(value=10, clear_at=7, unit="% an hour", source="Coroot, memory leak: 10 % an hour"),
        "least": Threshold(value=1 << 30, unit="bytes", source="smaller ones are left alone", guess=True),
    }
    guard = "it has been watched for three hours"
    persist_rounds = 1
    histories = {nodes.Process: {"rss_bytes": _LEAK_WINDOW_S}}
    advice = (
        "look at what is kept: py-spy dump, tracemalloc, or heap profiles; caches that never end are the usual cause"
    )
    verify = "grep -E 'Rss|Pss' /proc/<pid>/smaps_rollup"

    def judge(self, look: Look) -> Verdict:
        series = look.history("rss_bytes", _LEAK_WINDOW_S, least=0.95)
        slope = series.slope_per_s(look.window.now_s, _LEAK_WINDOW_S)
        now = look.metric("rss_bytes")
        if slope is None or now <= look.limit("least"):
            return CLEAR
        begin = max(now - slope * _LEAK_WINDOW_S, 1.0)
        per_hour = 100 * slope * 3600 / begin
        halves = [
            series.mean(look.window.now_s - back, 1800.0) or 0.0 for back in (0.0, 1800.0, 3600.0, 5400.0, 7200.0)
        ]
        grew_throughout = all(later > earlier for later, earlier in pairwise(halves))
        if per_hour <= look.limit("growth") or not grew_throughout:
            return CLEAR
        return look.fired(
            f"{look.label} has grown by {per_hour:.0f} % an hour for 3 hours, to {told('x_bytes', now)}",
            [look.saw("rss_bytes", samples_count=series.rounds_count, window_s=_LEAK_WINDOW_S)],
        )
