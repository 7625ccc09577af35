"""Disks, network file systems and /dev/shm."""

from __future__ import annotations

from gpuflight.bottlenecks.base import CLEAR, ElementRule, Need, Threshold, Verdict
from gpuflight.bottlenecks.window import Look, told
from gpuflight.graph import nodes

_FILL_WINDOW_S = 3600.0
_MEMORY_ONLY = frozenset({"tmpfs", "ramfs", "devtmpfs", "squashfs", "iso9660", "overlay", "efivarfs"})


class SlowStorage(ElementRule):
    """A disk is busy all the time, or a network file system answers slowly."""

    catalogue_id = "S11"
    subject = (nodes.Disk, nodes.Mount)
    needs = (
        Need(kind=nodes.Disk, metrics=("io_time_pct", "in_flight_count"), given_by="disks"),
        Need(kind=nodes.Mount, metrics=("rtt_ms",), given_by="mounts, for NFS"),
    )
    thresholds = {
        "busy": Threshold(value=98, clear_at=90, unit="%", source="Netdata, 10min_disk_utilization"),
        "waiting": Threshold(value=4, unit="requests in flight", source="NVMe is busy and idle at once", guess=True),
        "rtt": Threshold(value=50, clear_at=30, unit="ms", source="NFS, skill of witty-profiler"),
    }
    guard = "requests wait: fast disks are busy all the time and yet take more"
    persist_s = 5.0
    explains = ("data_loader_starvation", "io_bound_idle_gpu", "stuck_process", "gpu_idle_gaps", "major_faults")
    advice = "see who reads and writes (gpuflight describe <disk>), spread the load, cache the data set"
    verify = "iostat -x 5; nfsiostat 5"

    def judge(self, look: Look) -> Verdict:
        if isinstance(look.element, nodes.Mount):
            if not look.has("rtt_ms"):
                return CLEAR
            rtt = look.metric("rtt_ms")
            if rtt <= look.limit("rtt"):
                return CLEAR
            return look.fired(f"{look.label} answers in {rtt:.0f} ms on average", [look.saw("rtt_ms")])
        busy, waiting = look.metric("io_time_pct"), look.metric("in_flight_count")
        if busy < look.limit("busy") or waiting < look.limit("waiting"):
            return CLEAR
        waits = [look.saw(name) for name in ("read_wait_ms", "write_wait_ms") if look.has(name)]
        return look.fired(
            f"{look.label} is busy {busy:.0f} % of the time, {waiting:.0f} requests are in flight",
            [look.saw("io_time_pct"), look.saw("in_flight_count"), *waits],
        )


class DiskFills(ElementRule):
    """A file system is nearly full, or will be soon."""

    catalogue_id = "S12"
    subject = nodes.Mount
    needs = (Need(kind=nodes.Mount, metrics=("free_bytes", "size_bytes", "used_pct"), given_by="mounts"),)
    thresholds = {
        "full_in_warn": Threshold(value=8, clear_at=12, unit="h", source="Netdata, disk_fill_rate", falling=True),
        "full_in_crit": Threshold(value=2, clear_at=4, unit="h", source="Netdata, disk_fill_rate", falling=True),
        "free_share": Threshold(value=10, clear_at=12, unit="% free", source="gpud", falling=True),
        "free": Threshold(value=500e6, clear_at=800e6, unit="bytes free", source="gpud: 500 MB", falling=True),
    }
    guard = "it is storage (not memory, not a read-only image), and it can be written"
    persist_s = 10.0
    histories = {nodes.Mount: {"free_bytes": _FILL_WINDOW_S}}
    time_matters = False
    advice = "delete old checkpoints and caches (du -xh --max-depth=2 <path> | sort -h), or move them"
    verify = "df -h <path>"

    def judge(self, look: Look) -> Verdict:
        kind = str(look.element.attributes.get("fstype", ""))
        options = str(look.element.attributes.get("options", "")).split(",")
        if kind in _MEMORY_ONLY or "ro" in options:
            return CLEAR
        free, size = look.metric("free_bytes"), look.metric("size_bytes")
        share = 100 * free / size if size else 100.0
        seen = [look.saw("free_bytes"), look.saw("size_bytes")]
        series = look.window.history(look.element, "free_bytes")
        now_s = look.window.now_s
        if series is not None and series.covered_s(now_s) >= 600.0:
            slope = series.slope_per_s(now_s, _FILL_WINDOW_S)
            if slope is not None and slope < 0:
                hours = free / -slope / 3600
                if hours < look.limit("full_in_warn"):
                    return look.fired(
                        f"{look.label} will be full in {hours:.1f} h: {told('x_bytes', free)} are left,"
                        f" {told('x_bytes_per_s', -slope)} are written",
                        [look.saw("free_bytes", samples_count=series.rounds_count, window_s=_FILL_WINDOW_S), seen[1]],
                        severity="critical" if hours < look.limit("full_in_crit") else "warn",
                    )
        if free < look.limit("free") or share < look.limit("free_share"):
            return look.fired(
                f"{look.label} has {told('x_bytes', free)} left ({share:.1f} % of {told('x_bytes', size)})",
                seen,
                severity="critical" if free < look.limit("free") else "warn",
            )
        return CLEAR


class ShmNearlyFull(ElementRule):
    """A /dev/shm is nearly full: loaders and NCCL that share memory through it crash or hang when it is.

    The default of containers is 64 MiB, which data loaders with workers fill at once.
    """

    catalogue_id = "S17"
    subject = nodes.Mount
    needs = (Need(kind=nodes.Mount, metrics=("used_pct", "size_bytes"), given_by="shared_memory"),)
    thresholds = {
        "used_warn": Threshold(value=80, clear_at=70, unit="%", source="pytorch#5040, #1355, #16979", guess=True),
        "used_crit": Threshold(value=95, clear_at=90, unit="%", source="pytorch#5040, #1355, #16979", guess=True),
        "small": Threshold(value=64 * 2**20, unit="bytes", source="Docker's default", falling=True),
    }
    guard = "it is a /dev/shm, each container's its own"
    explains = ("data_loader_starvation", "collective_hang")
    advice = "docker run --shm-size=16g (or --ipc=host); in Kubernetes an emptyDir with medium: Memory at /dev/shm"
    verify = "df -h /dev/shm  # in the container"

    def judge(self, look: Look) -> Verdict:
        if look.element.attributes.get("name") != "/dev/shm" and not str(look.element.path).startswith("/dev/shm"):  # noqa: S108
            return CLEAR
        used, size = look.metric("used_pct"), look.metric("size_bytes")
        limit = look.limit("used_warn") if size > look.limit("small") else look.limit("used_warn") / 2
        if used <= limit:
            return CLEAR
        return look.fired(
            f"{look.label} is {used:.0f} % full, its size is {told('x_bytes', size)}",
            [look.saw("used_pct"), look.saw("size_bytes")],
            severity="critical" if used > look.limit("used_crit") else "warn",
        )
