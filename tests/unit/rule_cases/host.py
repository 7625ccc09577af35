"""Cases of the rules about CPUs, memory, storage and tasks of the host."""

from __future__ import annotations

from typing import Any

from tests.rule_scenes import Case, Scene, changing, steady
from tests.unit.rule_cases.gpu import ID, gpu

from gpuflight.graph import edges, nodes

GIB = 2**30
_HOST: dict[str, Any] = {
    "cpus_count": 64, "memory_total_bytes": 512 * GIB, "memory_available_bytes": 300 * GIB, "swap_total_bytes": 8 * GIB,
    "swap_used_bytes": 0, "cpu_busy_pct": 35.0, "cpu_iowait_pct": 0.5, "memory_pressure_full_pct": 0.0,
}  # fmt: skip


def host(without: str = "", **other: float) -> nodes.Host:
    """A healthy host, but for what is named."""
    metrics = {**_HOST, **other}
    unknown = {name: "not told" for name in without.split() if metrics.pop(name, None) is not None}
    return nodes.Host(hostname="h", metrics=metrics, unknown=unknown or None)


def process(without: str = "", pid: int = 77, **other: Any) -> nodes.Process:
    """A healthy training process, but for what is named."""
    metrics: dict[str, Any] = {
        "cpu_pct": 95.0, "rss_bytes": 20 * GIB, "threads_count": 40, "fds_count": 200, "major_faults_per_s": 0.0,
        "minor_faults_per_s": 50.0, "context_switches_voluntary_per_s": 900.0,
        "context_switches_involuntary_per_s": 20.0,
    }  # fmt: skip
    attributes: dict[str, Any] = {"name": "python", "state": "R", "ppid": 70, "cpus_allowed": "0-63"}
    for name, value in other.items():
        (metrics if name in metrics or name.endswith(("_count", "_s")) else attributes)[name] = value
    unknown = {}
    for name in without.split():
        metrics.pop(name, None)
        attributes.pop(name, None)
        unknown[name] = "no right to read it"
    return nodes.Process(pid=pid, start=1, attributes=attributes, metrics=metrics, unknown=unknown or None)


def uses(one: nodes.Process) -> edges.Access:
    """The process uses the GPU."""
    return edges.Access(one.id, ID)


def with_gpu(one: nodes.Process, **other: Any) -> Scene:
    """The process and the GPU it uses, working."""
    return steady(gpu(), one, uses(one), **other)


def mount(path: str = "/data", without: str = "", **other: Any) -> nodes.Mount:
    """A healthy file system, but for what is named."""
    metrics: dict[str, Any] = {"size_bytes": 900 * GIB, "free_bytes": 400 * GIB, "used_pct": 55.0}
    attributes: dict[str, Any] = {"fstype": "ext4", "options": "rw,relatime"}
    for name, value in other.items():
        (metrics if name in metrics or name.endswith("_ms") else attributes)[name] = value
    unknown = {name: "no answer" for name in without.split() if metrics.pop(name, None) is not None}
    return nodes.Mount(path=path, attributes=attributes, metrics=metrics, unknown=unknown or None)


def box(**metrics: float) -> nodes.Container:
    """A container."""
    return nodes.Container(container_id="c1", metrics=metrics)


_IDLE = gpu(sm_util_pct=2)
_DISK = {"io_time_pct": 99.7, "in_flight_count": 31, "read_wait_ms": 22.0}
_SHM = "/dev/shm"


def _grows(per_hour: float, hours: float = 4.5) -> Scene:
    """A process whose memory grows, looked at every minute."""
    return changing(
        lambda n: [process(rss_bytes=int(20 * GIB * (1 + per_hour * n / 60 / 100)))], int(hours * 60), step_s=60.0
    )


CASES = {
    "cpu_bound_idle_gpu": Case(
        fires=steady(host(cpu_busy_pct=97.0), _IDLE, seconds=90),
        about=ID,
        clear=steady(host(cpu_busy_pct=97.0), gpu(), seconds=90),
        unknown=steady(host("cpu_busy_pct"), _IDLE, seconds=90),
    ),
    "io_bound_idle_gpu": Case(
        fires=steady(host(cpu_iowait_pct=70.0), _IDLE, seconds=90),
        about=ID,
        clear=steady(host(), _IDLE, seconds=90),
        unknown=steady(host("cpu_iowait_pct"), _IDLE, seconds=90),
    ),
    "few_cpus": Case(
        fires=with_gpu(process(cpus_allowed="5", cpu_pct=99.0), seconds=15),
        about="Process(pid=77,start=1)",
        clear=with_gpu(process(cpu_pct=400.0), seconds=15),
        unknown=with_gpu(process("cpus_allowed"), seconds=15),
        also={"idle": ("clear", with_gpu(process(cpus_allowed="5", cpu_pct=20.0), seconds=15))},
    ),
    "major_faults": Case(
        fires=with_gpu(process(major_faults_per_s=900.0), seconds=150),
        about="Process(pid=77,start=1)",
        clear=with_gpu(process(), seconds=150),
        unknown=with_gpu(process("major_faults_per_s"), seconds=150),
        also={"warm-up": ("clear", with_gpu(process(major_faults_per_s=900.0), seconds=60))},
    ),
    "memory_stall": Case(
        fires=steady(host(memory_pressure_full_pct=4.0), seconds=15),
        about="Host(h)",
        severity="warn",
        clear=steady(host(), seconds=15),
        unknown=steady(host("memory_pressure_full_pct"), seconds=15),
    ),
    "memory_pressure": Case(
        fires=steady(host(memory_available_bytes=20 * GIB), seconds=15),
        about="Host(h)",
        severity="critical",
        clear=steady(host(), seconds=15),
        unknown=steady(host("memory_available_bytes"), seconds=15),
        also={
            "a kill": ("critical", changing(lambda n: [box(oom_kills_count=3 + (n > 1))], 6)),
            "a kill of old": ("clear", steady(box(oom_kills_count=3), seconds=15)),
            "at its limit": (
                "warn",
                steady(box(oom_kills_count=0, memory_used_bytes=97, memory_limit_bytes=100), seconds=15),
            ),
            "swaps": ("warn", changing(lambda n: [host(swap_used_bytes=n * 30 * GIB)], 8)),
        },
    ),
    "memory_leak": Case(
        fires=_grows(15.0),
        about="Process(pid=77,start=1)",
        clear=_grows(1.0),
        unknown=_grows(15.0, hours=1.0),
    ),
    "slow_storage": Case(
        fires=steady(nodes.Disk(name="sda", metrics=_DISK), seconds=15),
        about="Disk(sda)",
        clear=steady(nodes.Disk(name="nvme0n1", metrics={**_DISK, "in_flight_count": 1}), mount(), seconds=15),
        unknown=steady(nodes.Disk(name="sda", unknown={"io_time_pct": "no statistics"}), seconds=15),
        also={"nfs": ("warn", steady(mount(fstype="nfs4", rtt_ms=180.0), seconds=15))},
    ),
    "disk_fills": Case(
        fires=changing(lambda n: [mount(free_bytes=(200 - n) * GIB)], 80, step_s=30.0),
        about="Mount(/data)",
        severity="critical",
        clear=steady(mount(), seconds=15),
        unknown=steady(mount(without="free_bytes"), seconds=15),
        also={
            "nearly full": ("warn", steady(mount(free_bytes=40 * GIB), seconds=15)),
            "full": ("critical", steady(mount(free_bytes=10**8), seconds=15)),
            "an image": ("clear", steady(mount(free_bytes=0, options="ro"), seconds=15)),
        },
    ),
    "shm_nearly_full": Case(
        fires=steady(mount(_SHM, fstype="tmpfs", name=_SHM, used_pct=97.0)),
        about=f"Mount({_SHM})",
        severity="critical",
        clear=steady(mount(_SHM, fstype="tmpfs", name=_SHM, used_pct=20.0)),
        unknown=steady(mount(_SHM, without="used_pct", fstype="tmpfs", name=_SHM)),
        also={"small": ("warn", steady(mount(_SHM, name=_SHM, used_pct=60.0, size_bytes=64 * 2**20)))},
    ),
    "context_switch_storm": Case(
        fires=with_gpu(process(context_switches_involuntary_per_s=6500.0), seconds=15),
        about="Process(pid=77,start=1)",
        severity="critical",
        clear=with_gpu(process(), seconds=15),
        unknown=with_gpu(process("context_switches_involuntary_per_s context_switches_voluntary_per_s"), seconds=15),
        also={"many": ("warn", with_gpu(process(context_switches_voluntary_per_s=20_000.0), seconds=15))},
    ),
    "task_limit": Case(
        fires=steady(box(pids_count=970, pids_limit_count=1000)),
        about="Container(c1)",
        severity="critical",
        clear=steady(box(pids_count=97, pids_limit_count=1000)),
        unknown=steady(box(pids_limit_count=1000)),
    ),
    "stuck_process": Case(
        fires=with_gpu(process(state="D"), seconds=310),
        about=ID,
        severity="critical",
        clear=with_gpu(process(state="D", ppid=2), seconds=310),
        unknown=with_gpu(process("state"), seconds=310),
        also={
            "for a moment": ("clear", with_gpu(process(state="D"), seconds=60)),
            "a zombie": ("warn", steady(process(state="Z"), seconds=310)),
        },
    ),
}
