"""Cgroups on made-up machines: v1, v2, hybrid, private namespaces, limits, groups that are not accounted."""

from __future__ import annotations

from pathlib import Path

import pytest
from proc_fixture import ProcFixture

from gpuflight.sources.cgroups import CgroupCounters, Cgroups

A = "4f797c539e6c745de61a93ca3ff892358ecbcaccd8414d5db545c38428142970"
UNLIMITED_V1 = 9223372036854771712
V2_MOUNT = "35 24 0:28 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "33 31 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "34 31 0:31 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"
    "35 31 0:32 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd\n"
)
HYBRID_MOUNT = "36 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
DOCKER_V2 = f"0::/system.slice/docker-{A}.scope\n"
DOCKER_V1 = (
    "".join(
        f"{number}:{names}:/docker/{A}\n"
        for number, names in ((12, "memory"), (4, "pids"), (3, "cpu,cpuacct"), (1, "name=systemd"))
    )
    + "0::/system.slice\n"
)


@pytest.fixture
def machine(tmp_path: Path) -> ProcFixture:
    return ProcFixture(tmp_path)


def look(machine: ProcFixture, pid: int, mounts: str, **own: int) -> tuple[Cgroups, CgroupCounters]:
    """The counters of the innermost layer of a process."""
    machine.own(mountinfo=mounts, namespaces=own)
    cgroups = Cgroups(machine.fs, machine.procfs)
    info = cgroups.of(pid)
    return cgroups, cgroups.counters(info, info.layers[-1])


def v2_group(machine: ProcFixture, group: str, **files: str) -> None:
    for name, text in files.items():
        machine.write(f"/sys/fs/cgroup{group}/{name.replace('__', '.', 1)}", text)


def test_v2_counters(machine: ProcFixture) -> None:
    machine.process(10, cgroup=DOCKER_V2)
    v2_group(
        machine,
        f"/system.slice/docker-{A}.scope",
        cpu__stat="usage_usec 2500000\nuser_usec 2000000\nnr_periods 40\nnr_throttled 10\nthrottled_usec 750000\n",
        cpu__max="150000 100000\n",
        memory__current="1048576\n",
        memory__max="2147483648\n",
        memory__events="low 0\nhigh 0\nmax 7\noom 2\noom_kill 1\n",
        pids__current="3\n",
        pids__max="100\n",
    )
    _, counters = look(machine, 10, V2_MOUNT)
    assert counters == CgroupCounters(
        cpu_usage_s=2.5,
        cpu_quota_cores=1.5,
        periods=40,
        throttled_periods=10,
        throttled_s=0.75,
        memory_used_bytes=1 << 20,
        memory_limit_bytes=1 << 31,
        oom_kills=1,
        pids=3,
        pids_limit=100,
    )


def test_v2_without_limits_has_none(machine: ProcFixture) -> None:
    machine.process(10, cgroup=DOCKER_V2)
    v2_group(
        machine,
        f"/system.slice/docker-{A}.scope",
        cpu__stat="usage_usec 1\n",
        cpu__max="max 100000\n",
        memory__current="5\n",
        memory__max="max\n",
        pids__current="1\n",
        pids__max="max\n",
    )
    _, counters = look(machine, 10, V2_MOUNT)
    assert (counters.cpu_quota_cores, counters.memory_limit_bytes, counters.pids_limit) == (None, None, None)
    assert counters.unknown == {}


def test_v2_without_the_memory_controller_is_unknown_not_zero(machine: ProcFixture) -> None:
    machine.process(10, cgroup=DOCKER_V2)
    v2_group(machine, f"/system.slice/docker-{A}.scope", cpu__stat="usage_usec 1000000\n")
    _, counters = look(machine, 10, V2_MOUNT)
    assert counters.cpu_usage_s == 1.0
    assert counters.memory_used_bytes is None
    assert set(counters.unknown) == {"memory_used_bytes", "pids_count"}


def v1_group(machine: ProcFixture, group: str, limit: int = 1 << 30) -> None:
    for controller, name, text in (
        ("cpu,cpuacct", "cpu.stat", "nr_periods 8\nnr_throttled 2\nthrottled_time 1500000000\n"),
        ("cpu,cpuacct", "cpu.cfs_quota_us", "50000\n"),
        ("cpu,cpuacct", "cpu.cfs_period_us", "100000\n"),
        ("cpu,cpuacct", "cpuacct.usage", "4000000000\n"),
        ("memory", "memory.usage_in_bytes", "4096\n"),
        ("memory", "memory.limit_in_bytes", f"{limit}\n"),
        ("memory", "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"),
        ("pids", "pids.current", "2\n"),
        ("pids", "pids.max", "max\n"),
    ):
        machine.write(f"/sys/fs/cgroup/{controller}{group}/{name}", text)


def test_v1_counters(machine: ProcFixture) -> None:
    machine.process(10, cgroup=DOCKER_V1)
    v1_group(machine, f"/docker/{A}")
    _, counters = look(machine, 10, V1_MOUNTS)
    assert counters == CgroupCounters(
        cpu_usage_s=4.0,
        cpu_quota_cores=0.5,
        periods=8,
        throttled_periods=2,
        throttled_s=1.5,
        memory_used_bytes=4096,
        memory_limit_bytes=1 << 30,
        oom_kills=3,
        pids=2,
    )


def test_v1_huge_limit_is_no_limit(machine: ProcFixture) -> None:
    machine.process(10, cgroup=DOCKER_V1)
    v1_group(machine, f"/docker/{A}", limit=UNLIMITED_V1)
    machine.write(f"/sys/fs/cgroup/cpu,cpuacct/docker/{A}/cpu.cfs_quota_us", "-1\n")
    _, counters = look(machine, 10, V1_MOUNTS)
    assert counters.memory_limit_bytes is None
    assert counters.cpu_quota_cores is None
    assert counters.unknown == {}


def test_hybrid_takes_each_counter_where_it_is_kept(machine: ProcFixture) -> None:
    """Memory on v1, everything else on v2."""
    machine.process(10, cgroup=f"4:memory:/docker/{A}\n0::/docker/{A}\n")
    v1_group(machine, f"/docker/{A}")
    machine.write(f"/sys/fs/cgroup/unified/docker/{A}/cpu.stat", "usage_usec 9000000\n")
    memory_only = next(line + "\n" for line in V1_MOUNTS.splitlines() if "memory" in line)
    _, counters = look(machine, 10, memory_only + HYBRID_MOUNT)
    assert counters.memory_used_bytes == 4096
    assert counters.cpu_usage_s == 9.0
    assert set(counters.unknown) == {"pids_count"}


def test_v1_unit_that_only_systemd_accounts(machine: ProcFixture) -> None:
    """A service without memory accounting shares its slice's memory group, whose figures are not its own."""
    machine.process(10, cgroup="4:memory:/system.slice\n1:name=systemd:/system.slice/nginx.service\n0::/\n")
    v1_group(machine, "/system.slice")
    _, counters = look(machine, 10, V1_MOUNTS)
    assert counters.memory_used_bytes is None
    assert "not accounted" in counters.unknown["memory_used_bytes"]
    assert "cpu_pct" in counters.unknown


def test_a_bind_mounted_hierarchy_is_read_below_its_root(machine: ProcFixture) -> None:
    """In a container without a cgroup namespace, its own group is the root of the mount."""
    machine.process(10, cgroup=f"4:memory:/docker/{A}\n")
    machine.write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "77\n")
    machine.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "88\n")
    _, counters = look(machine, 10, f"33 31 0:30 /docker/{A} /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n")
    assert (counters.memory_used_bytes, counters.memory_limit_bytes) == (77, 88)


def test_a_group_outside_of_the_mount_is_unknown(machine: ProcFixture) -> None:
    machine.process(10, cgroup=f"4:memory:/docker/{A}\n")
    _, counters = look(machine, 10, "33 31 0:30 /docker/other /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n")
    assert "outside" in counters.unknown["memory_used_bytes"]


def test_no_hierarchy_mounted(machine: ProcFixture) -> None:
    machine.process(10, cgroup=DOCKER_V2)
    _, counters = look(machine, 10, "")
    assert set(counters.unknown) == {"cpu_pct", "throttled_pct", "memory_used_bytes", "pids_count"}


def test_private_namespace_falls_back_to_the_mounts(machine: ProcFixture, data_dir: Path) -> None:
    """T16, T17: inside a container with cgroup v2 the path is ``/``."""
    mounts = (data_dir / "cgroup_mountinfo" / "docker-v2-private.txt").read_text()
    machine.process(10, cgroup="0::/\n", mountinfo=mounts)
    v2_group(machine, "", memory__current="123\n", cpu__stat="usage_usec 5\n", pids__current="1\n")
    cgroups, counters = look(machine, 10, mounts, cgroup=4026532999)
    assert cgroups.of(10).container_id == A
    assert cgroups.of(10).runtime == "docker"
    assert counters.memory_used_bytes == 123  # the root it sees is the container's own group


def test_a_container_without_a_group_of_its_own_gets_no_counters(machine: ProcFixture, data_dir: Path) -> None:
    """Rootless Podman without delegation, seen from the host: the mounts tell who it is, the root group is not its."""
    mounts = (data_dir / "cgroup_mountinfo" / "podman-rootless.txt").read_text()
    machine.process(10, cgroup="0::/\n", mountinfo=mounts, namespaces={"mnt": 4026532100})
    v2_group(machine, "", memory__current="123\n", cpu__stat="usage_usec 5\n", pids__current="1\n")
    cgroups, counters = look(machine, 10, V2_MOUNT)
    assert cgroups.of(10).runtime == "podman"
    assert counters.memory_used_bytes is None
    assert "no cgroup of its own" in counters.unknown["memory_used_bytes"]


def test_a_host_process_at_the_root_is_in_no_container(machine: ProcFixture, data_dir: Path) -> None:
    mounts = (data_dir / "cgroup_mountinfo" / "host-with-docker.txt").read_text()
    machine.process(10, cgroup="0::/\n", mountinfo=mounts)
    machine.own(mountinfo=mounts)
    info = Cgroups(machine.fs, machine.procfs).of(10)
    assert (info.container_id, info.pod_uid, info.unit, info.layers) == ("", "", "", ())


def test_mounts_are_read_once_per_namespace_while_their_process_lives(machine: ProcFixture, data_dir: Path) -> None:
    first = (data_dir / "cgroup_mountinfo" / "podman-rootless.txt").read_text()
    second = (data_dir / "cgroup_mountinfo" / "docker-v2-private.txt").read_text()
    machine.own(mountinfo=V2_MOUNT)
    machine.process(10, mountinfo=first, namespaces={"mnt": 77})
    machine.process(11, namespaces={"mnt": 77})  # has no mountinfo: must not be asked
    cgroups = Cgroups(machine.fs, machine.procfs)
    assert cgroups.of(10).runtime == cgroups.of(11).runtime == "podman"
    # Both end; the kernel gives the namespace's number to another container.
    for pid in (10, 11):
        (machine.root / f"proc/{pid}/stat").unlink()
    machine.process(12, start=5000, mountinfo=second, namespaces={"mnt": 77})
    machine.procfs.begin_round(2)
    cgroups.begin_round(2)
    assert cgroups.of(12).runtime == "docker"


def test_without_the_right_to_look_the_path_is_all_there_is(machine: ProcFixture) -> None:
    machine.process(10, cgroup="0::/user.slice/user-1000.slice/session-3.scope\n")
    machine.own(mountinfo=V2_MOUNT)
    cgroups = Cgroups(machine.fs, machine.procfs)
    assert cgroups.of(10).unit == "/user.slice/user-1000.slice/session-3.scope"
    with pytest.raises(OSError):
        cgroups.of(11)


def test_the_hierarchy_that_tells_most_is_believed(machine: ProcFixture) -> None:
    machine.own(mountinfo=V1_MOUNTS)
    machine.process(10, cgroup=f"3:cpu:/\n2:memory:/docker/{A}\n1:name=systemd:/system.slice/docker.service\n0::/\n")
    info = Cgroups(machine.fs, machine.procfs).of(10)
    assert info.container_id == A
    assert info.path == f"/docker/{A}"


def test_gone_processes_and_containers_are_forgotten(machine: ProcFixture) -> None:
    machine.own(mountinfo=V2_MOUNT)
    cgroups = Cgroups(machine.fs, machine.procfs)
    for number in range(1, 66):
        machine.procfs.begin_round(number)
        cgroups.begin_round(number)
        pid = machine.process(1000 + number, cgroup=f"0::/docker/{number:064x}\n")
        cgroups.facts(cgroups.of(pid).layers[0])
        (machine.root / f"proc/{pid}/stat").unlink()
    alive = machine.process(7)
    for number in (128, 192):
        machine.procfs.begin_round(number)
        cgroups.begin_round(number)
        cgroups.of(alive)
    assert set(cgroups._of) == {alive}
    assert len(cgroups._parsed) == 1
    assert cgroups._facts == {}
