"""Tasks of the host: how they are scheduled, how many there may be, which of them are stuck."""

from __future__ import annotations

from gpuflight.bottlenecks.base import CLEAR, ElementRule, Need, Screen, Threshold, Verdict
from gpuflight.bottlenecks.window import Look
from gpuflight.graph import edges, nodes

_KTHREADD = 2
"""pid of the parent of all threads of the kernel."""


class ContextSwitchStorm(ElementRule):
    """A process is switched off its CPU against its will thousands of times a second."""

    catalogue_id = "S18"
    subject = nodes.Process
    needs = (
        Need(
            kind=nodes.Process,
            metrics=("context_switches_involuntary_per_s", "context_switches_voluntary_per_s"),
            given_by="process_tree, of processes that use CPU or a GPU",
        ),
    )
    screens = (
        Screen("context_switches_involuntary_per_s", ">", "involuntary_warn"),
        Screen("context_switches_voluntary_per_s", ">", "all"),
    )
    thresholds = {
        "involuntary_warn": Threshold(value=3000, clear_at=2000, unit="1/s", source="skill of witty-profiler"),
        "involuntary_crit": Threshold(value=5000, clear_at=4000, unit="1/s", source="skill of witty-profiler"),
        "all": Threshold(value=10_000, clear_at=8000, unit="1/s", source="skill of witty-profiler"),
    }
    guard = "it uses a GPU, or more than half a core"
    persist_s = 10.0
    relations = (edges.Access,)
    explains = ("run_queue_delay", "launch_delay")
    advice = "fewer threads (OMP_NUM_THREADS, torch.set_num_threads), pin them, keep other work off these CPUs"
    verify = "pidstat -w -p <pid> 5"

    def judge(self, look: Look) -> Verdict:
        forced = look.metric("context_switches_involuntary_per_s")
        total = forced + look.metric("context_switches_voluntary_per_s")
        if forced <= look.limit("involuntary_warn") and total <= look.limit("all"):
            return CLEAR
        if not look.window.gpus_of(look.element) and look.element.metrics.get("cpu_pct", 0.0) < 50:
            return CLEAR
        return look.fired(
            f"{look.label} is switched {total:.0f} times/s, {forced:.0f} of them against its will",
            [look.saw("context_switches_involuntary_per_s"), look.saw("context_switches_voluntary_per_s")],
            severity="critical" if forced > look.limit("involuntary_crit") else "warn",
        )


class TaskLimit(ElementRule):
    """A container or unit is close to the number of tasks it may have: the next thread fails to start."""

    catalogue_id = "S15"
    subject = (nodes.Container, nodes.Pod, nodes.Unit)
    needs = (Need(kind=nodes.Container, metrics=("pids_count", "pids_limit_count"), given_by="containers"),)
    screens = (Screen("pids_limit_count", ">", 0),)
    thresholds = {
        "used_warn": Threshold(value=85, clear_at=80, unit="% of the limit", source="Netdata"),
        "used_crit": Threshold(value=90, clear_at=86, unit="% of the limit", source="Netdata"),
    }
    guard = "a limit is set"
    advice = "raise pids.max (--pids-limit, TasksMax=), or use fewer threads and workers"
    verify = "cat /sys/fs/cgroup/<path>/pids.{current,max}"

    def judge(self, look: Look) -> Verdict:
        count, limit = look.metric("pids_count"), look.metric("pids_limit_count")
        share = 100 * count / limit if limit else 0.0
        if share <= look.limit("used_warn"):
            return CLEAR
        return look.fired(
            f"{look.label} has {count:.0f} of the {limit:.0f} tasks it may have ({share:.0f} %)",
            [look.saw("pids_count"), look.saw("pids_limit_count")],
            severity="critical" if share > look.limit("used_crit") else "warn",
        )


class StuckProcess(ElementRule):
    """A process has been in uninterruptible sleep, or dead and not collected, for minutes.

    It cannot be killed. With a GPU driver in the name, or in its hands, the GPU will not come free.
    """

    catalogue_id = "S16"
    subject = nodes.Process
    needs = (Need(kind=nodes.Process, attributes=("state",), given_by="process_tree"),)
    screens = (Screen("state", "in", ("D", "Z")),)
    guard = "five minutes in a row (threads of the kernel excepted)"
    persist_s = 300.0
    relations = (edges.Access,)
    explains = ("collective_hang", "zombie_memory", "gpu_idle_gaps")
    advice = "see where it waits: cat /proc/<pid>/stack (root); NFS: is the server there? a GPU: see dmesg for Xid"
    verify = "ps -eo pid,stat,wchan:32,comm | grep -E ' [DZ]'"

    def judge(self, look: Look) -> Verdict:
        state = look.attribute("state")
        if state not in ("D", "Z") or _KTHREADD in (look.element.pid, look.element.attributes.get("ppid")):
            return CLEAR
        gpus = look.window.gpus_of(look.element)
        near = bool(gpus) or str(look.element.attributes.get("name", "")).startswith(("nvidia", "nv-"))
        what = "hangs in the kernel and cannot be killed" if state == "D" else "is dead and its parent leaves it lying"
        return look.fired(
            f"{look.label} {what} (state {state})",
            [look.saw("state")],
            severity="critical" if near else "warn",
            entities=[look.id, *(gpu.id for gpu in gpus[:8])],
        )
