"""Processes shorter than a round: seen, named, with how they ended; pids as gpuflight's own namespace numbers them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.kernel_rig import Watch, needs_probes, watching

from gpuflight.graph import Entity

pytestmark = needs_probes
SECRET = "hUsH7xQ29vLm4Tz8"


def ended(watch: Watch, pid: int) -> Entity:
    [found] = [
        node
        for node in watch.graph.nodes.values()
        if node.id.startswith(f"Process(pid={pid},") and node.attributes.get("ended")
    ]
    return found


def test_a_process_between_two_rounds() -> None:
    with watching("process_tree", "kernel_process") as watch:
        child = subprocess.Popen(["/bin/sh", "-c", "exit 3", f"--password={SECRET}"])
        child.wait()
        watch.round()
        node = ended(watch, child.pid)
        assert node.attributes["exit_code"] == 3 and "exit_signal" not in node.attributes
        assert node.attributes["cmdline"] == "/bin/sh -c exit 3 --password=***"
        assert node.attributes["name"] == "sh" and node.attributes["uid"] == os.geteuid()
        assert 0 < node.metrics["lifetime_ms"] < 60_000
        assert node.metrics["minor_faults_count"] > 0
        assert (watch.process(os.getpid()), node.id, "Own") in watch.graph.edges
        assert watch.graph.nodes[watch.process(os.getpid())].attributes["name"], "its parent is the one that is known"
        assert SECRET.encode() not in watch.graph.model_dump_json()
        host = next(node for node in watch.graph.nodes.values() if node.kind == "Host")
        assert host.metrics["program_starts_per_s"] >= 1 and host.metrics["process_ends_per_s"] >= 1
        watch.round()
        assert node.id not in watch.graph.nodes


def test_nobody_is_asked_about_what_is_over() -> None:
    """Else each ended process would count as one that vanished before it could be read."""
    with watching("process_tree", "threads", "kernel_process") as watch:
        children = [subprocess.Popen(["/bin/true"]) for _ in range(20)]
        for child in children:
            child.wait()
        watch.round()
        assert all(ended(watch, child.pid).attributes["ended"] for child in children)
        assert watch.of("process_tree").losses.get("vanished processes", 0) < 20


def test_killed_by_a_signal() -> None:
    with watching("kernel_process") as watch:
        child = subprocess.Popen(["/bin/sleep", "60"])
        child.send_signal(signal.SIGTERM)
        child.wait()
        watch.round()
        assert ended(watch, child.pid).attributes["exit_signal"] == signal.SIGTERM
        assert "exit_code" not in ended(watch, child.pid).attributes


def test_a_fork_that_starts_no_program() -> None:
    with watching("kernel_process") as watch:
        pid = os.fork()
        if not pid:
            os._exit(7)
        os.waitpid(pid, 0)
        watch.round()
        node = ended(watch, pid)
        assert node.attributes["exit_code"] == 7
        assert "cmdline" in (node.unknown or {})


def test_the_exit_code_of_many_threads_is_that_of_the_process() -> None:
    """One thread ends it while others run."""
    program = (
        "import os, threading\n[threading.Thread(target=threading.Event().wait).start() for _ in range(3)]\nos._exit(5)"
    )
    with watching("kernel_process") as watch:
        child = subprocess.Popen([sys.executable, "-I", "-c", program])
        child.wait()
        watch.round()
        assert ended(watch, child.pid).attributes["exit_code"] == 5


def test_a_process_that_was_known_before_keeps_its_identity() -> None:
    with watching("process_tree", "kernel_process") as watch:
        child = subprocess.Popen(["/bin/sleep", "60"])
        watch.round()
        before = watch.process(child.pid)
        assert not watch.graph.nodes[before].attributes.get("ended")
        child.kill()
        child.wait()
        watch.round()
        assert ended(watch, child.pid).id == before
        assert watch.graph.nodes[before].attributes["cmdline"] == "/bin/sleep 60"


def test_more_than_the_limit_are_counted() -> None:
    with watching("kernel_process", kernel_process={"ended_limit": 2}) as watch:
        for _ in range(5):
            subprocess.run(["/bin/true"], check=True)
        watch.round()
        assert watch.of("kernel_process").losses["ended processes beyond ended_limit"] >= 3
        assert len([node for node in watch.graph.nodes.values() if node.attributes.get("ended")]) == 2


def test_what_finds_no_room_in_the_ring_is_counted() -> None:
    with watching("kernel_process", kernel_process={"ring_bytes": 4096}) as watch:
        for _ in range(30):
            subprocess.run(["/bin/true"], check=True)
        watch.round()
        assert watch.of("kernel_process").losses["records that found no room"] >= 10


def test_a_long_command_line_is_cut_and_says_so() -> None:
    with watching("kernel_process") as watch:
        child = subprocess.Popen(["/bin/true", "x" * 5000])
        child.wait()
        watch.round()
        assert ended(watch, child.pid).attributes["cmdline_cut"] is True


def test_recorded_command_lines_have_no_secrets(tmp_path: Path) -> None:
    path = tmp_path / "tape"
    with watching("kernel_process", record=path) as watch:
        child = subprocess.Popen(["/bin/true", f"--token={SECRET}"])
        child.wait()
        live = ended(watch, child.pid) if watch.round() else None
    shown = subprocess.run(["tar", "--zstd", "-xOf", path], capture_output=True, check=False).stdout
    assert b"process drain events" in shown and SECRET.encode() not in shown
    with watching("kernel_process", replay=path) as again:
        again.round()
        assert ended(again, child.pid) == live


@pytest.mark.skipif(os.geteuid() != 0, reason="making pid namespaces needs root")
def test_pids_are_those_of_our_own_namespace() -> None:
    """gpuflight in a container: the kernel counts from the host's pids, the picture has the container's."""
    program = """
import subprocess, sys
from tests.integration.kernel_rig import Puppet, watching
with watching("process_tree", "kernel_sched", "kernel_process", "kernel_net") as watch, Puppet() as child:
    child.do("import socket; a, b = socket.socketpair(); a.send(b'12345'); b.recv(5)")
    gone = subprocess.Popen(["/bin/sh", "-c", "exit 4"])
    gone.wait()
    graph = watch.round()
    node = graph.nodes[watch.process(child.pid)]
    assert node.metrics["socket_sent_bytes_per_s"] == 5, node
    assert "run_delay_pct" in node.metrics, node
    [short] = [node for node in graph.nodes.values() if node.id.startswith(f"Process(pid={gone.pid},")]
    assert short.attributes["exit_code"] == 4 and child.pid < 100 and gone.pid < 100
    assert not [node for node in graph.nodes.values() if node.kind == "Process" and node.pid > 1000]
print("right")
"""
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unshare" in done.stderr and "right" not in done.stdout:
        pytest.skip(done.stderr.strip())
    assert done.stdout.strip() == "right", done.stderr


@pytest.mark.parametrize("kept, status", [("", "skipped"), (",+bpf,+perfmon", "ok")])
@pytest.mark.skipif(os.geteuid() != 0, reason="giving up rights needs them")
def test_the_two_rights_are_enough_and_without_them_there_is_one_reason_and_a_hint(kept: str, status: str) -> None:
    program = """
from gpuflight.collectors.base import Collector
from gpuflight.core.expansion import CollectorRunner, expand_world
from gpuflight.registry import plugins
from gpuflight.settings.model import Limits
from gpuflight.sources.open import open_world
world = open_world()
made = [cls() for name, cls in plugins(Collector).items() if name.startswith("kernel_") and name != "kernel_ipc"]
runners = [CollectorRunner(one) for one in made]
for number in (1, 2):
    world.begin_round(number)
    coverage = expand_world(world, runners, Limits()).coverage
for line in coverage:
    print(line.status, "CAP_BPF" in line.reason and "CAP_PERFMON" in line.hint, sep=" ")
for runner in runners:
    runner.close()
world.close()
"""
    rights = ["setpriv", f"--inh-caps=-all{kept}", f"--bounding-set=-all{kept}"]
    done = subprocess.run([*rights, sys.executable, "-c", program], capture_output=True, text=True, check=False)
    if done.returncode and "setpriv" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.stdout.splitlines() == [f"{status} {status == 'skipped'}"] * 4, done.stderr
