"""The machine itself: what it is, and how loaded its CPUs and memory are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gpuflight.collectors.base import Batch, Collector
from gpuflight.collectors.rates import FIRST_READING, Rates
from gpuflight.graph import nodes

if TYPE_CHECKING:
    from gpuflight.sources.procfs import ProcFs
    from gpuflight.sources.world import World

_USER, _NICE, _SYSTEM, _IDLE, _IOWAIT, _IRQ, _SOFTIRQ, _STEAL = range(8)
_MEMORY = {"MemTotal": "memory_total_bytes", "MemAvailable": "memory_available_bytes", "SwapTotal": "swap_total_bytes"}
_PRESSURE = {
    "cpu": ("some", "cpu_pressure_some_pct"),
    "memory": ("full", "memory_pressure_full_pct"),
    "io": ("full", "io_pressure_full_pct"),
}
_STATIC_ROUNDS = 60
_HYPERVISORS = ("KVM", "QEMU", "VMware", "VirtualBox", "Virtual Machine", "Xen", "HVM domU", "Google Compute Engine",
                "Amazon EC2", "OpenStack", "Bochs", "BHYVE", "Parallels")  # fmt: skip


class Host(Collector):
    """The host: name, ids, kernel, CPUs, memory, load, busy time, pressure."""

    seeds = True
    precedence = 10

    def __init__(self, settings: None = None) -> None:
        super().__init__(settings)
        self._round = 0
        self._attributes: dict[str, str] = {}
        self._unknown_attributes: dict[str, str] = {}
        self._cpu_before: list[int] | None = None
        self._rates = Rates()

    def observe(self, world: World) -> None:
        procfs = world.procfs
        if self._round % _STATIC_ROUNDS == 0:
            self._attributes, self._unknown_attributes = _attributes(world)
        self._round += 1
        self._metrics: dict[str, int | float] = {}
        self._unknown: dict[str, str] = {}
        self._hostname = procfs.hostname
        self._rates.begin(world.clock.monotonic_s())
        for read, names in (
            (self._memory, (*_MEMORY.values(), "swap_used_bytes")),
            (self._load, ("load_1min",)),
            (self._cpu, ("cpus_count", "cpu_busy_pct")),
        ):
            self._guarded(read, procfs, names)
        self._pressure(procfs)
        processes = procfs.processes().values()
        self._metrics["kernel_threads_count"] = sum(1 for stat in processes if stat.kernel_thread)
        self._metrics["processes_count"] = len(processes) - self._metrics["kernel_threads_count"]

    def seed(self) -> Batch:
        unknown = {**self._unknown_attributes, **self._unknown}
        attributes = {"name": self._hostname, **self._attributes}
        host = nodes.Host(
            hostname=self._hostname, attributes=attributes, metrics=dict(self._metrics), unknown=unknown or None
        )
        return Batch([host])

    def _guarded(self, read: Callable[[ProcFs], None], procfs: ProcFs, names: tuple[str, ...]) -> None:
        try:
            read(procfs)
        except OSError as error:
            why = error.strerror or "cannot be read"
        except (ValueError, IndexError, KeyError):
            why = "the kernel's figures have an unknown form"
        else:
            return
        self._unknown.update(dict.fromkeys([name for name in names if name not in self._metrics], why))

    def _memory(self, procfs: ProcFs) -> None:
        kilobytes = {}
        for line in procfs.text("meminfo").split("\n"):
            name, _, value = line.partition(":")
            if value.endswith(" kB"):
                kilobytes[name] = int(value[:-3])
        for field, name in _MEMORY.items():
            if field in kilobytes:
                self._metrics[name] = kilobytes[field] * 1024
            else:
                self._unknown[name] = f"this kernel does not report {field}"
        self._metrics["swap_used_bytes"] = (kilobytes["SwapTotal"] - kilobytes["SwapFree"]) * 1024

    def _load(self, procfs: ProcFs) -> None:
        self._metrics["load_1min"] = float(procfs.text("loadavg").split()[0])

    def _cpu(self, procfs: ProcFs) -> None:
        """Busy is everything but idle and waiting for I/O; steal is what the hypervisor gave to others."""
        lines = procfs.text("stat").split("\n")
        self._metrics["cpus_count"] = sum(1 for line in lines if line.startswith("cpu") and line[3:4].isdigit())
        ticks = [int(value) for value in lines[0].split()[1:9]]
        before, self._cpu_before = self._cpu_before, ticks
        names = ("cpu_busy_pct", "cpu_iowait_pct", "cpu_steal_pct")
        spent = [max(0, now - then) for now, then in zip(ticks, before, strict=True)] if before is not None else []
        total = sum(spent)
        if not total:
            self._unknown.update(dict.fromkeys(names, FIRST_READING))
        else:
            busy = total - spent[_IDLE] - spent[_IOWAIT] - spent[_STEAL]
            for name, value in zip(names, (busy, spent[_IOWAIT], spent[_STEAL]), strict=True):
                self._metrics[name] = value * 100.0 / total
        for line in lines:
            if line.startswith("ctxt "):
                rate = self._rates.per_s("ctxt", int(line[5:]))
                if rate is None:
                    self._unknown["context_switches_per_s"] = self._rates.why
                else:
                    self._metrics["context_switches_per_s"] = rate

    def _pressure(self, procfs: ProcFs) -> None:
        """Share of the last 10 s in which some (full: all) tasks waited: Documentation/accounting/psi.rst, avg10."""
        for name, (line_name, metric) in _PRESSURE.items():
            try:
                lines = procfs.text(f"pressure/{name}").split("\n")
                fields = next(line.split() for line in lines if line.startswith(line_name))
                self._metrics[metric] = float(fields[1].removeprefix("avg10="))
            except OSError as error:
                self._unknown[metric] = f"no pressure stall information: {error.strerror}"
            except (StopIteration, ValueError, IndexError):
                self._unknown[metric] = "pressure stall information has an unknown form"


def _attributes(world: World) -> tuple[dict[str, str], dict[str, str]]:
    """What does not change while the machine runs, and why some of it is missing."""
    procfs = world.procfs
    attributes: dict[str, str] = {}
    unknown: dict[str, str] = {}
    for name, path in (("kernel", "sys/kernel/osrelease"), ("boot_id", "sys/kernel/random/boot_id")):
        try:
            attributes[name] = procfs.text(path).strip()
        except OSError as error:
            unknown[name] = error.strerror or "cannot be read"
    machine_id = procfs.machine_id()
    if machine_id:
        attributes["machine_id"] = machine_id
    else:
        unknown["machine_id"] = "neither /etc/machine-id nor /var/lib/dbus/machine-id holds one"
    cpu = procfs.cpu_info()
    if "architecture" in cpu:
        attributes["architecture"] = cpu["architecture"]
    else:
        unknown["architecture"] = "/proc/cpuinfo does not tell"
    if "model name" in cpu:
        attributes["cpu_model"] = cpu["model name"]
    virtualisation = _virtualisation(world, cpu)
    if virtualisation:
        attributes["virtualisation"] = virtualisation
    else:
        unknown["virtualisation"] = "neither the firmware nor the CPU tells"
    return attributes, unknown


def _virtualisation(world: World, cpu: dict[str, str]) -> str:
    """Name of the hypervisor, ``vm`` where only its presence shows, ``none`` where there is none, empty if unknown."""
    texts = []
    for name in ("sys_vendor", "product_name"):
        try:
            texts.append(world.sysfs.text(f"class/dmi/id/{name}"))
        except OSError:
            continue
    found = next((name for name in _HYPERVISORS if any(name in text for text in texts)), "")
    if found:
        return found
    if "flags" not in cpu:  # only x86 CPUs say that they are virtual
        return "none" if texts else ""
    return "vm" if "hypervisor" in cpu["flags"].split() else "none"
