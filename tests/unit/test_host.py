"""The host: what it is, how loaded it is, and what is unknown of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tests.fakes.proc import KERNEL_THREAD, FakeProc

from gpuflight.collectors.host import Host
from gpuflight.collectors.rates import FIRST_READING
from gpuflight.graph import nodes
from gpuflight.sources.sysfs import SysFs


class Rig:
    """A Host collector on a /proc and a /sys in memory."""

    def __init__(self) -> None:
        self.proc = FakeProc()
        self.sysfs = SysFs(self.proc.fs)
        self.host = Host()
        self.proc.add(1, "systemd", ppid=0)
        self.proc.add(2, "kthreadd", ppid=0, flags=KERNEL_THREAD)
        files = self.proc.fs.files
        files["/proc/meminfo"] = b"MemTotal: 1000 kB\nMemAvailable: 600 kB\nSwapTotal: 50 kB\nSwapFree: 20 kB\n"
        files["/proc/loadavg"] = b"1.25 0.5 0.1 2/300 4242\n"
        files["/proc/stat"] = b"cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 1\ncpu1 1\nctxt 1000\nbtime 5\n"
        files["/proc/pressure/cpu"] = b"some avg10=1.50 avg60=0.2 avg300=0.0 total=5\nfull avg10=0.00 avg60=0 total=1\n"
        files["/proc/pressure/memory"] = b"some avg10=9.00 avg60=0 total=5\nfull avg10=2.50 avg60=0 total=1\n"
        files["/proc/sys/kernel/osrelease"] = b"6.1.0\n"
        files["/proc/sys/kernel/random/boot_id"] = b"b00t\n"
        files["/etc/machine-id"] = b"m4ch1ne\n"
        files["/proc/cpuinfo"] = b"processor\t: 0\nvendor_id\t: X\nmodel name\t: Fast CPU\nflags\t: lm hypervisor\n\n"

    def round(self, seconds: float = 1.0) -> nodes.Host:
        self.proc.next_round(seconds)
        self.sysfs.begin_round(self.proc.round)
        world = SimpleNamespace(procfs=self.proc.procfs, sysfs=self.sysfs, clock=self.proc.clock)
        self.host.observe(world)  # type: ignore[arg-type]
        (host,) = self.host.seed().nodes
        assert isinstance(host, nodes.Host)
        return host


def test_what_it_is() -> None:
    host = Rig().round()
    assert host.id == "Host(node1)"
    assert host.attributes == {
        "name": "node1",
        "kernel": "6.1.0",
        "boot_id": "b00t",
        "machine_id": "m4ch1ne",
        "architecture": "x86_64",
        "cpu_model": "Fast CPU",
        "virtualisation": "vm",
    }


def test_how_loaded_it_is() -> None:
    rig = Rig()
    first = rig.round()
    assert first.metrics["memory_total_bytes"] == 1_024_000
    assert first.metrics["memory_available_bytes"] == 614_400
    assert first.metrics["swap_used_bytes"] == 30 * 1024
    assert (first.metrics["load_1min"], first.metrics["cpus_count"]) == (1.25, 2)
    assert (first.metrics["processes_count"], first.metrics["kernel_threads_count"]) == (1, 1)
    assert (first.metrics["cpu_pressure_some_pct"], first.metrics["memory_pressure_full_pct"]) == (1.5, 2.5)
    assert (first.unknown or {})["cpu_busy_pct"] == FIRST_READING
    rig.proc.fs.files["/proc/stat"] = b"cpu  130 10 60 820 80 5 5 40 0 0\ncpu0 1\ncpu1 1\nctxt 1500\n"
    second = rig.round(2.0)
    # 30 user + 10 nice + 10 system + 5 irq + 5 softirq of 150 ticks; 30 waiting for I/O, 40 stolen.
    assert second.metrics["cpu_busy_pct"] == pytest.approx(40.0)
    assert second.metrics["cpu_iowait_pct"] == pytest.approx(20.0)
    assert second.metrics["cpu_steal_pct"] == pytest.approx(80 / 3)
    assert second.metrics["context_switches_per_s"] == 250.0


def test_what_cannot_be_read_is_unknown_with_a_reason() -> None:
    rig = Rig()
    for path in ("/proc/meminfo", "/proc/loadavg", "/etc/machine-id", "/proc/cpuinfo", "/proc/pressure/cpu"):
        del rig.proc.fs.files[path]
    rig.proc.fs.files["/proc/stat"] = b"nonsense\n"
    rig.proc.fs.files["/proc/pressure/memory"] = b"nonsense\n"
    host = rig.round()
    unknown = host.unknown or {}
    for name in (
        *("memory_total_bytes", "swap_used_bytes", "load_1min", "cpu_busy_pct", "cpu_pressure_some_pct"),
        *("memory_pressure_full_pct", "io_pressure_full_pct"),
    ):
        assert unknown[name]
        assert name not in host.metrics
    for name in ("machine_id", "architecture", "virtualisation"):
        assert unknown[name]
        assert name not in host.attributes
    assert host.attributes["kernel"] == "6.1.0"


@pytest.mark.parametrize(
    ("vendor", "flags", "found"),
    [("QEMU", "lm hypervisor", "QEMU"), ("Dell Inc.", "lm", "none"), ("Dell Inc.", None, "none"), (None, None, "")],
)
def test_virtualisation(vendor: str | None, flags: str | None, found: str) -> None:
    rig = Rig()
    if vendor:
        rig.proc.fs.files["/sys/class/dmi/id/sys_vendor"] = vendor.encode()
    rig.proc.fs.files["/proc/cpuinfo"] = f"flags\t: {flags}\n".encode() if flags else b"CPU architecture: 8\n"
    assert rig.round().attributes.get("virtualisation", "") == found
