"""Mounts: which are drawn, dead servers, NFS statistics, users of remote mounts, redaction."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.sysfs_tree import Tree

from gpuflight.collectors.mounts import Mounts, MountSettings, redact_options, server_of
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import Graph, nodes
from gpuflight.sources.fs import StatVfs
from gpuflight.sources.mounts import MountEntry, SpaceWatch, parse_mountinfo, parse_mountstats

ROOT = "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard\n"
NFS = "40 27 0:50 / /mnt/data rw,relatime shared:9 - nfs4 filer:/export/data rw,vers=4.2,addr=10.0.0.9\n"
MOUNTINFO = (
    ROOT
    + NFS
    + """\
22 27 0:21 / /proc rw - proc proc rw
25 24 0:23 / /dev/shm rw - tmpfs tmpfs rw,size=1k
26 24 0:24 / /run rw - tmpfs tmpfs rw
50 27 254:0 /var/lib/x /srv/x rw - ext4 /dev/vda rw
51 27 0:60 / /var/lib/docker/overlay2/abc/merged rw - overlay overlay rw,lowerdir=/a
52 27 253:1 / /with\\040space rw - xfs /dev/mapper/vg-data rw
"""
)


class SpaceFs:
    """A file system whose statvfs may hang until told to go on."""

    def __init__(self) -> None:
        self.gates: dict[str, threading.Event] = {}
        self.calls: dict[str, int] = {}
        self.space = StatVfs(1000, 400, 300, 10, 5)

    def statvfs(self, path: str) -> StatVfs:
        self.calls[path] = self.calls.get(path, 0) + 1
        gate = self.gates.get(path)
        if gate is not None:
            gate.wait()
        return self.space


def entry(path: str, fstype: str = "nfs4", device: str = "0:1", source: str = "filer:/x") -> MountEntry:
    return MountEntry(device, "/", path, "rw", fstype, source)


def test_parse_mountinfo() -> None:
    found = parse_mountinfo(MOUNTINFO.encode())
    by_path = {mount.path: mount for mount in found}
    assert by_path["/with space"].device == "253:1"
    nfs = by_path["/mnt/data"]
    assert (nfs.fstype, nfs.source, nfs.options) == (
        "nfs4",
        "filer:/export/data",
        "rw,relatime,rw,vers=4.2,addr=10.0.0.9",
    )
    assert nfs.remote and not nfs.local and by_path["/"].local


def test_a_mount_over_another_hides_it() -> None:
    found = parse_mountinfo((NFS + NFS.replace("filer", "other")).encode())
    assert [mount.source for mount in found] == ["other:/export/data"]


def test_names_that_are_not_utf8_reach_the_system_call_unchanged() -> None:
    (mount,) = parse_mountinfo(b"40 27 0:50 / /mnt/\xff rw - ext4 /dev/x rw\n")
    assert os.fsencode(mount.path) == b"/mnt/\xff"


class Machine(Tree):
    """A tree with a mount table and a scriptable statvfs."""

    def __init__(self, root: Path, mountinfo: str = MOUNTINFO) -> None:
        super().__init__(root)
        self.write("/proc/self/mountinfo", mountinfo)
        self.space = SpaceFs()
        self.fs.statvfs = self.space.statvfs  # type: ignore[method-assign]
        (root / "proc/self/ns").mkdir()
        (root / "proc/self/ns/mnt").symlink_to("mnt:[4026531840]")

    def user(self, pid: int, cwd: str, namespace: int = 4026531840, mountinfo: str = "") -> nodes.Process:
        self.process(pid)
        base = self.root / f"proc/{pid}"
        (base / "ns").mkdir()
        (base / "ns/mnt").symlink_to(f"mnt:[{namespace}]")
        (base / "cwd").symlink_to(cwd)
        (base / "exe").symlink_to("/usr/bin/python3")
        if mountinfo:
            self.write(f"/proc/{pid}/mountinfo", mountinfo)
        return nodes.Process(pid=pid, start=1000)


def capture(tree: Machine, collector: Mounts, processes: list[nodes.Process] | None = None) -> Graph:
    tree.round(collector)
    batch = collector.seed()
    graph = Graph([*batch.nodes, *(processes or [])], batch.edges)
    if processes:
        batch = collector.expand(processes)
        for entity in batch.nodes:
            graph.try_add_node(entity)
        for edge in batch.edges:
            graph.try_add_edge(edge)
    assert not graph.dangling()
    return graph


def test_real_file_systems_once_each(tmp_path: Path) -> None:
    graph = capture(Machine(tmp_path), Mounts())
    assert {node.path for node in graph.of_kind(nodes.Mount)} == {"/", "/mnt/data", "/dev/shm", "/with space"}
    root = graph.nodes["Mount(/)"]
    assert root.metrics["used_bytes"] == 600 and root.metrics["free_bytes"] == 300
    assert root.metrics["used_pct"] == pytest.approx(600 / 900 * 100)  # as df(1)
    assert root.metrics["inodes_used_pct"] == 50
    nfs = graph.nodes["Mount(/mnt/data)"]
    assert nfs.attributes["server"] == "filer" and nfs.attributes["responding"] is True


def test_mounts_lie_on_disks(tmp_path: Path) -> None:
    tree = Machine(tmp_path)
    disk = tree.disk("vda", "/sys/devices/pci0000:00/0000:00:02.0", below="block/")
    tree.link("/sys/dev/block/254:0", disk)
    volume = tree.disk("dm-1")
    tree.link("/sys/dev/block/253:1", volume)
    graph = capture(tree, Mounts())
    assert ("Mount(/)", "Disk(vda)", "Access") in graph
    assert ("Mount(/with space)", "Disk(dm-1)", "Access") in graph
    assert not [edge for edge in graph.edges if edge[0] == "Mount(/mnt/data)"]


def test_btrfs_is_found_by_its_source(tmp_path: Path) -> None:
    tree = Machine(tmp_path, "30 1 0:29 /@ / rw - btrfs /dev/nvme0n1p2 rw\n")
    disk = tree.disk("nvme0n1", "/sys/devices/pci0000:00/0000:00:02.0", below="nvme/nvme0/")
    tree.partition(disk, "nvme0n1p2", "259:2")
    (tmp_path / "x").mkdir()
    assert ("Mount(/)", "Disk(nvme0n1)", "Access") in capture(tree, Mounts())


def test_files_bound_into_a_container_are_no_file_systems(tmp_path: Path) -> None:
    tree = Machine(
        tmp_path,
        "1 0 0:9 / / rw - overlay overlay rw\n2 1 8:1 /pods/etc-hosts /etc/hosts rw - ext4 /dev/sda1 rw\n"
        "3 1 8:1 /data /data rw - ext4 /dev/sda1 rw\n",
    )
    tree.write("/etc/hosts", "x")
    (tmp_path / "data").mkdir()
    graph = capture(tree, Mounts())
    assert {node.path for node in graph.of_kind(nodes.Mount)} == {"/", "/data"}


def test_dead_server_costs_one_deadline_and_one_thread(tmp_path: Path) -> None:
    tree = Machine(tmp_path)
    gate = tree.space.gates["/mnt/data"] = threading.Event()
    collector = Mounts(MountSettings(deadline_s=0.02))
    try:
        for _ in range(4):
            graph = capture(tree, collector)
        node = graph.nodes["Mount(/mnt/data)"]
        assert node.attributes["responding"] is False
        assert "no answer for 3.0 s" in node.unknown["size_bytes"]  # type: ignore[index]
        assert "size_bytes" not in node.metrics
        assert tree.space.calls["/mnt/data"] == 1
        assert collector._watch is not None and collector._watch.hanging_count == 1
        assert any("do not answer" in reason for reason in collector.notes)
        assert graph.nodes["Mount(/)"].metrics["size_bytes"] == 1000
    finally:
        gate.set()
    question = collector._watch._questions["/mnt/data"]
    assert question.thread is not None
    question.thread.join(5)
    del tree.space.gates["/mnt/data"]
    graph = capture(tree, collector)
    assert graph.nodes["Mount(/mnt/data)"].metrics["size_bytes"] == 1000
    assert collector._watch.hanging_count == 0


def test_several_dead_servers_share_the_deadline(tmp_path: Path) -> None:
    fs = SpaceFs()
    gate = threading.Event()
    mounts = [entry(f"/mnt/{index}", device=f"0:{index}") for index in range(5)]
    fs.gates = {mount.path: gate for mount in mounts}
    watch = SpaceWatch(fs, Tree(tmp_path).clock, 0.02)  # type: ignore[arg-type]
    try:
        before = threading.active_count()
        for _ in range(3):
            answers = watch.ask(mounts)
        assert all(isinstance(answer, float) for answer in answers.values())
        assert threading.active_count() == before + 5
        assert watch.ask([]) == {} and watch.hanging_count == 5  # gone, but their threads are not
    finally:
        gate.set()


def test_an_error_is_a_reason(tmp_path: Path) -> None:
    tree = Machine(tmp_path)

    def stale(path: str) -> StatVfs:
        raise OSError(116, "Stale file handle", path)

    tree.fs.statvfs = stale  # type: ignore[method-assign]
    node = capture(tree, Mounts()).nodes["Mount(/mnt/data)"]
    assert "Stale" in node.unknown["size_bytes"]  # type: ignore[index]


STATS = """\
device proc mounted on /proc with fstype proc
device filer:/export/data mounted on /mnt/data with fstype nfs4 statvers=1.1
\topts:\trw,vers=4.2
\tage:\t100
\tbytes:\t1 2 3 4 {read} 60 7 8
\tRPC iostats version: 1.1  p/v: 100003/4 (nfs)
\txprt:\ttcp 0 0 1 0 0 10 10 0 10 0 2 0 0
\tper-op statistics
\t        NULL: 1 1 0 44 24 0 0 0 0
\t        READ: {ops} {sent} 0 100 200 10 {rtt} {execute} 0
\t       WRITE: 0 0 0 0 0 0 0 0 0
device tmpfs mounted on /tmp with fstype tmpfs
"""


def test_parse_mountstats() -> None:
    found = parse_mountstats(STATS.format(read=50, ops=10, sent=12, rtt=30, execute=40).encode())
    assert list(found) == ["/mnt/data"]
    assert found["/mnt/data"].read_bytes == 50 and found["/mnt/data"].written_bytes == 60
    assert found["/mnt/data"].operations["READ"] == (10, 12, 0, 10, 30, 40)


def test_nfs_round_trips_and_retransmits(tmp_path: Path) -> None:
    tree = Machine(tmp_path)
    collector = Mounts()
    tree.write("/proc/self/mountstats", STATS.format(read=0, ops=10, sent=10, rtt=30, execute=40))
    node = capture(tree, collector).nodes["Mount(/mnt/data)"]
    assert "rtt_ms" not in node.metrics and "two readings" in node.unknown["rtt_ms"]  # type: ignore[index]
    tree.write("/proc/self/mountstats", STATS.format(read=5000, ops=30, sent=33, rtt=130, execute=240))
    metrics = capture(tree, collector).nodes["Mount(/mnt/data)"].metrics
    assert metrics["rtt_ms"] == 5 and metrics["execute_ms"] == 10
    assert metrics["retransmits_per_s"] == 3 and metrics["read_bytes_per_s"] == 5000
    idle = capture(tree, collector).nodes["Mount(/mnt/data)"]
    assert "rtt_ms" not in idle.metrics and "no request" in idle.unknown["rtt_ms"]  # type: ignore[index]
    assert idle.metrics["operations_per_s"] == 0


def access(graph: Graph) -> dict[tuple[str, str], Any]:
    return {key[:2]: edge for key, edge in graph.edges.items() if key[2] == "Access" and key[0].startswith("Process")}


def test_processes_working_on_remote_mounts(tmp_path: Path) -> None:
    tree = Machine(tmp_path)
    processes = [tree.user(100, "/mnt/data/run"), tree.user(101, "/home"), tree.user(102, "/mnt/database")]
    found = access(capture(tree, Mounts(), processes))
    assert list(found) == [("Process(pid=100,start=1000)", "Mount(/mnt/data)")]
    assert next(iter(found.values())).attributes == {"via": ["cwd"]}


def test_a_container_sees_the_same_export_under_another_path(tmp_path: Path) -> None:
    tree = Machine(tmp_path)
    inside = "1 0 0:9 / / rw - overlay overlay rw\n2 1 0:50 / /volume rw - nfs4 filer:/export/data rw\n"
    other = "1 0 0:9 / / rw - overlay overlay rw\n2 1 0:77 / /mnt/data rw - nfs4 filer2:/b rw\n"
    processes = [tree.user(100, "/volume/x", 7, inside), tree.user(101, "/mnt/data", 8, other)]
    graph = capture(tree, Mounts(), processes)
    assert set(access(graph)) == {
        ("Process(pid=100,start=1000)", "Mount(/mnt/data)"),
        ("Process(pid=101,start=1000)", "Mount(/mnt/data (mnt:8))"),  # not the host's of that name
    }


def test_open_files_when_asked_for(tmp_path: Path) -> None:
    tree = Machine(tmp_path)
    process = tree.user(100, "/home")
    (tmp_path / "proc/100/fd").mkdir()
    (tmp_path / "proc/100/fd/3").symlink_to("/mnt/data/file")
    assert not access(capture(tree, Mounts(), [process]))
    found = access(capture(tree, Mounts(MountSettings(open_files=True)), [process]))
    assert next(iter(found.values())).attributes == {"via": ["open file"]}


def test_without_remote_mounts_no_working_directory_is_read(tmp_path: Path) -> None:
    tree = Machine(tmp_path, ROOT)
    process = tree.user(100, "/home")
    (tmp_path / "proc/100/cwd").unlink()  # would raise
    collector = Mounts()
    capture(tree, collector, [process])
    assert not collector.losses


def test_vanished_and_foreign_processes(tmp_path: Path) -> None:
    tree = Machine(tmp_path)
    process = tree.user(100, "/home")
    (tmp_path / "proc/100/ns/mnt").unlink()
    collector = Mounts()
    capture(tree, collector, [process, nodes.Process(pid=5, start=1)])
    assert collector.losses == {"vanished processes": 2}


@pytest.mark.parametrize(
    ("source", "server"),
    [
        ("filer:/export", "filer"),
        ("[fe80::1]:/export", "fe80::1"),
        ("//nas/share", "nas"),
        ("//user:secret@nas/share", "nas"),
        ("10.0.0.1,10.0.0.2:/vol", "10.0.0.1,10.0.0.2"),
        ("/dev/sda1", ""),
        ("overlay", ""),
    ],
)
def test_server_of(source: str, server: str) -> None:
    assert server_of(entry("/x", source=source)) == server


def test_options_keep_no_secret_and_no_repetition() -> None:
    text = redact_options("rw,relatime,rw,username=bob,password=hunter2,secret=AQD/x==,vers=3.0,pass=a")
    assert "hunter2" not in text and "AQD" not in text and "=a," not in text
    assert text.startswith("rw,relatime,username=bob,password=***") and "vers=3.0" in text


def test_no_proc_costs_the_round(tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailable):
        Tree(tmp_path).round(Mounts())
