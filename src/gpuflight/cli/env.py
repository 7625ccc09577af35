"""``gpuflight env``: what this machine lets gpuflight see, and how to see more. ``checks`` makes the data."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from gpuflight.cli.session import add_replay_argument
from gpuflight.errors import SourceUnavailable

if TYPE_CHECKING:
    from gpuflight.sources.world import World

DESCRIPTION = """\
Say what this machine (or a recorded one) offers: kernel, rights, BPF, NVML, netlink, cgroups, tools, optional packages;
and for everything that is missing what it would be good for and how to get it. Changes nothing.
"""

EXAMPLES = ("gpuflight env", "gpuflight env --json")

State = Literal["yes", "limited", "no"]

# <linux/capability.h>
CAPABILITIES = {
    "CAP_SYS_PTRACE": (19, "open files, memory and environment of other users' processes"),
    "CAP_DAC_READ_SEARCH": (2, "files that only root may read"),
    "CAP_SYS_ADMIN": (21, "sockets in other network namespaces"),
    "CAP_NET_ADMIN": (12, "all details of sockets and RDMA resources"),
    "CAP_PERFMON": (38, "probes in the kernel: CUDA, sockets, scheduling; the CPU's counters"),
    "CAP_BPF": (39, "probes in the kernel: CUDA, sockets, scheduling"),
}

TOOLS = {
    "nvidia-smi": "",  # NVML is read without it
    "npu-smi": "comes with the NPU driver; without it NPUs are not seen",
}
"""Programs that are looked for, and what to say where one is missing."""

LATER = " (in a later release)"

EXTRAS = {
    "server": (("fastapi", "uvicorn", "httptools"), "gpuflight-server over HTTP, and pulling other instances"),
    "mongodb": (("pymongo",), "delivery to MongoDB" + LATER),
    "kafka": (("confluent_kafka",), "delivery to Kafka" + LATER),
    "s3": (("boto3",), "archives in S3" + LATER),
    "cupti": (("cupti",), "exact kernel times of Python programs" + LATER),
    "pyvis": (("pyvis",), "PyVis pictures" + LATER),
    "graphviz": (("graphviz",), "Graphviz pictures" + LATER),
}
"""Extra → (its modules, what it is for)."""


class Check(Struct, kw_only=True):
    """One thing that is there, or partly, or not: what was found, and what to do about it."""

    area: str
    name: str
    state: State
    found: str = ""
    hint: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    add_replay_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Look and print."""
    import msgspec

    from gpuflight.cli.output import clean, console, emit_json, make_table
    from gpuflight.sources.open import open_world

    world = open_world(replay=arguments.replay)
    try:
        world.begin_round(1)
        found = list(checks(world))
        hostname = world.procfs.hostname
    finally:
        world.close()
    if arguments.replay is None:
        found += list(package_checks())
    if arguments.json:
        emit_json({"hostname": hostname, "checks": msgspec.to_builtins(found)})
        return 0
    screen = console()
    screen.print(clean(hostname), style="bold")
    marks = {"yes": "✓", "limited": "~", "no": "✗"}
    rows = [[marks[check.state], check.area, check.name, check.found] for check in found]
    screen.print(make_table(["", "area", ("what", {"no_wrap": True}), "found"], rows))
    missing = [check for check in found if check.state != "yes" and check.hint]
    if missing:
        screen.print("\nTo see more", style="bold")
    for check in missing:
        screen.print(f"{clean(check.name)}: {clean(check.hint)}")
    return 0


def checks(world: World) -> Iterator[Check]:
    """Everything about the machine of ``world``; each answer comes from its sources, so that it can be recorded."""
    yield from _kernel(world)
    yield from _rights(world)
    yield from _probes(world)
    yield _counters(world)
    yield from _sockets(world)
    yield from _devices(world)
    for name, hint in TOOLS.items():
        path = world.tools.which(name)
        yield Check(
            area="tools",
            name=name,
            state="yes" if path else "no",
            found=path or "not installed",
            hint="" if path else hint,
        )


def package_checks() -> Iterator[Check]:
    """The optional packages of this Python. Nothing is imported."""
    from importlib.util import find_spec

    for extra, (modules, use) in EXTRAS.items():
        missing = [module for module in modules if find_spec(module) is None]
        yield Check(
            area="extras",
            name=extra,
            state="no" if missing else "yes",
            found=f"missing: {', '.join(missing)}" if missing else "installed",
            hint=f"for {use}: pip install 'gpuflight[{extra}]'" if missing else "",
        )


def _kernel(world: World) -> Iterator[Check]:
    yield _read("kernel", "release", lambda: world.procfs.text("sys/kernel/osrelease"))
    if world.sysfs.exists("fs/cgroup/cgroup.controllers"):
        version = "v2"
    elif world.sysfs.exists("fs/cgroup/unified/cgroup.procs"):
        version = "v1 and v2 (hybrid)"
    elif world.sysfs.exists("fs/cgroup"):
        version = "v1"
    else:
        version = ""
    yield Check(
        area="kernel",
        name="cgroups",
        state="yes" if version else "no",
        found=version or "not mounted",
        hint="" if version else "mount /sys/fs/cgroup to see limits and use of containers",
    )
    hidden = world.procfs.hides_processes()
    yield Check(
        area="kernel",
        name="/proc",
        state="limited" if hidden else "yes",
        found="mounted with hidepid: only your own processes are visible" if hidden else "all processes are visible",
        hint="run as root, or as a member of the group of its gid= option" if hidden else "",
    )


def _rights(world: World) -> Iterator[Check]:
    try:
        fields = dict(line.split(":\t", 1) for line in world.procfs.text("self/status").split("\n") if ":\t" in line)
        effective, uid = int(fields["CapEff"], 16), int(fields["Uid"].split()[1])
    except (OSError, KeyError, ValueError, SourceUnavailable) as error:
        yield Check(area="rights", name="capabilities", state="no", found=f"not known: {error}")
        return
    yield Check(
        area="rights",
        name="user",
        state="yes" if uid == 0 else "limited",
        found="root" if uid == 0 else f"uid {uid}",
        hint="" if uid == 0 else "as root, or with the capabilities below, more can be seen",
    )
    for name, (bit, use) in CAPABILITIES.items():
        there = bool(effective >> bit & 1)
        yield Check(
            area="rights",
            name=name,
            state="yes" if there else "no",
            found=use,
            hint="" if there else f"grant it to see {use}, e.g. setpriv or AmbientCapabilities= of systemd",
        )


def _probes(world: World) -> Iterator[Check]:
    try:
        capabilities = world.probes.capabilities()
    except SourceUnavailable as error:
        yield Check(area="probes", name="probes", state="no", found=f"not known: {error.reason}")
    else:
        lacking = any(not item.ok for item in capabilities.items if item.name in ("BTF", "uprobe_multi", "own cost"))
        state: State = "limited" if lacking else "yes"
        yield Check(
            area="probes",
            name="probes",
            state=state if capabilities.backend else "no",
            found=f"loaded by {capabilities.backend}" if capabilities.backend else capabilities.reason,
            hint=capabilities.hint,
        )
        for item in capabilities.items:
            yield Check(
                area="probes",
                name=item.name,
                state="yes" if item.ok else "no",
                found="as above" if not item.ok and item.found == capabilities.reason else item.found,
                hint=item.hint if item.hint != capabilities.hint else "",  # said once is enough
            )
    for name, meaning in (
        ("perf_event_paranoid", "2 and less lets users measure their own programs"),
        ("unprivileged_bpf_disabled", "0 lets users load probes"),
        ("yama/ptrace_scope", "0 lets users look into their own programs"),
    ):
        check = _read("probes", name, lambda name=name: world.procfs.text(f"sys/kernel/{name}"))  # type: ignore[misc]
        if check.state == "yes":
            check.found += f" ({meaning})"
        yield check


def _counters(world: World) -> Check:
    """Whether the CPU's counters tell of processes, tried on this one."""
    from gpuflight.collectors.perf_counters import why_refused, why_unsupported
    from gpuflight.collectors.perf_events_choice import event_sets
    from gpuflight.sources.perf_events import Target

    me = Target("this process", (os.getpid(),))
    try:
        sets = event_sets(world.procfs.cpu_info(), instructions=True)
        found = world.perf_events.count(sets, [me], descriptors_at_most=16, threads_at_most=1)
    except SourceUnavailable as error:
        return Check(area="probes", name="CPU counters", state="no", found=f"not known: {error.reason}")
    reason, hint = "too few descriptors to try them", "raise the limit of open files (ulimit -n)"
    if found.unsupported:
        reason, hint = why_unsupported(found.unsupported)
    elif found.refused:
        reason, hint = why_refused(world, next(iter(found.refused.values())))
    elif found.set:
        scope = "of programs without what the kernel does for them" if found.user_only else "of programs and the kernel"
        told = f"{', '.join(found.events)} (by {found.set}), {scope}; collectors.perf_counters.watch reads them"
        return Check(area="probes", name="CPU counters", state="limited" if found.user_only else "yes", found=told)
    return Check(area="probes", name="CPU counters", state="no", found=reason, hint=hint)


def _sockets(world: World) -> Iterator[Check]:
    for name, read in (
        ("internet sockets", world.netlink.inet_sockets),
        ("unix sockets", world.netlink.unix_sockets),
    ):
        try:
            table = read()
        except (OSError, SourceUnavailable) as error:
            yield Check(area="sockets", name=name, state="no", found=_reason(error), hint=_hint(error))
            continue
        limits = table.limits
        yield Check(
            area="sockets",
            name=name,
            state="limited" if limits else "yes",
            found=f"{len(table.sockets)} seen" + (f"; {limits[0].reason}" if limits else ""),
            hint="; ".join(dict.fromkeys(limit.hint for limit in limits if limit.hint)),
        )


def _devices(world: World) -> Iterator[Check]:
    try:
        snapshot = world.nvml.snapshot()
    except SourceUnavailable as error:
        yield Check(area="devices", name="NVML", state="no", found=error.reason, hint=error.hint)
    else:
        driver = f"driver {snapshot.driver_version}, NVML {snapshot.nvml_version}"
        lost = [gpu for gpu in snapshot.gpus if gpu.state == "lost"]
        yield Check(
            area="devices",
            name="NVML",
            state="limited" if lost or snapshot.stale_reason or snapshot.nameless else "yes",
            found=f"{driver}, {len(snapshot.gpus)} GPUs" + (f", {len(lost)} lost" if lost else ""),
            hint=snapshot.stale_reason,
        )
    try:
        devices = world.sysfs.list_dir("class/infiniband")
    except (OSError, SourceUnavailable):
        devices = []
    yield Check(
        area="devices",
        name="RDMA",
        state="yes" if devices else "no",
        found=", ".join(devices) or "no device",
    )


def _read(area: str, name: str, read: Callable[[], str]) -> Check:
    try:
        return Check(area=area, name=name, state="yes", found=read())
    except (OSError, SourceUnavailable) as error:
        return Check(area=area, name=name, state="no", found=_reason(error), hint=_hint(error))


def _reason(error: OSError | SourceUnavailable) -> str:
    return error.reason if isinstance(error, SourceUnavailable) else error.strerror or str(error)


def _hint(error: OSError | SourceUnavailable) -> str:
    return error.hint if isinstance(error, SourceUnavailable) else ""
