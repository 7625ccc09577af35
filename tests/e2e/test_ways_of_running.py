"""Every command as root and as an ordinary user, with and without netlink, with processes hidden, on full disks, under
signals, beside processes that come and go: never a traceback, and what is missing is said.

``runner.py`` takes the rights away and asserts what holds for every run.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.runner import (
    BIN,
    HIDDEN,
    NO_NETLINK,
    NOTHING,
    PATIENCE_S,
    PLAIN,
    ROOT,
    USER,
    USER_NO_NETLINK,
    Capture,
    Outcome,
    Running,
    Sandbox,
    Way,
    check_coverage,
    checked_capture,
    sandbox,
)
from tests.examples import every_second
from tests.fakes.nvml import NoCompiler, fake_nvml

from gpuflight.cli.runfolder import FILES
from gpuflight.graph import Graph, edges, nodes
from gpuflight.graph.load import load_graph, read_rounds

WAYS = (PLAIN, USER, NO_NETLINK, USER_NO_NETLINK, HIDDEN, NOTHING)

SHORT = ("run", "--offline", "0.6", "--interval", "0.3")


@pytest.fixture
def box() -> Iterator[Sandbox]:
    """A fresh folder in which any user may work."""
    with sandbox() as made:
        yield made


@pytest.fixture(scope="module")
def neighbour() -> Iterator[tuple[int, int]]:
    """A TCP connection inside this process, to be found: the ports of its listener and of the end that connected."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as connected,
        listener.accept()[0] as accepted,
    ):
        connected.sendall(b"x" * 100)
        accepted.recv(100)
        yield listener.getsockname()[1], connected.getsockname()[1]


# -- every command, every way --------------------------------------------------------------------------------------


@dataclass
class Visit:
    """What all commands answered when they were run in one way."""

    way: Way
    box: Sandbox
    outcomes: dict[str, Outcome]
    capture: Capture

    @property
    def graph(self) -> Graph:
        return self.capture.loaded.graph

    @property
    def limited(self) -> bool:
        """Whether it was an ordinary user's."""
        return self.way.uid is not None or not ROOT


@pytest.fixture(scope="module", params=WAYS, ids=str)
def visit(request: pytest.FixtureRequest, neighbour: tuple[int, int]) -> Iterator[Visit]:
    """All commands in one way: those that look at the machine at the same time, then those that read files."""
    way: Way = request.param
    with sandbox() as box:
        looking = {
            "run": box.start(*SHORT, "--out", "run", way=way),
            "record": box.start("record", "m.tar.zst", "--rounds", "2", "--interval", "0.3", "--json", way=way),
            "describe": box.start("describe", "--json", "--set", "interval_s=0.3", way=way),
            "env": box.start("env", "--json", way=way),
            "plugins": box.start("plugins", "--json", way=way),
        }
        outcomes = {name: running.finish() for name, running in looking.items()}
        reading = {
            "picture": box.start("run/graph.json", "-o", "run.html", program="gpuflight-vis", way=way),
            "replay": box.start("run", "--replay", "m.tar.zst", "--out", "replayed", "--json", way=way),
        }
        outcomes |= {name: running.finish() for name, running in reading.items()}
        yield Visit(way, box, outcomes, box.capture("run"))


def test_nothing_but_what_was_asked_for_is_written(visit: Visit) -> None:
    assert visit.box.names() == {"run", "m.tar.zst", "run.html", "replayed"}


def test_describe_and_run_see_the_same_machine(visit: Visit, tmp_path: Path) -> None:
    described = json.loads(visit.outcomes["describe"].out)
    for line in described["coverage"]:
        check_coverage(line)
    (tmp_path / "described.json").write_text(visit.outcomes["describe"].out)
    assert load_graph(tmp_path / "described.json").env == visit.capture.loaded.env
    # The one process of which every way can be sure that it may be seen is the one that looks.
    names = {entity.attributes.get("name") for entity in visit.graph.of_kind(nodes.Process)}
    assert "gpuflight" in names


def test_a_recording_replays_with_the_same_rights(visit: Visit) -> None:
    recorded, replayed = (json.loads(visit.outcomes[name].out) for name in ("record", "replay"))
    capture = checked_capture(visit.box.work / "replayed")
    assert recorded["rounds"] == replayed["rounds"] == 2
    # Not the very same graph: a list of threads that was read twice in a round is recorded once.
    assert {host.hostname for host in capture.loaded.graph.of_kind(nodes.Host)} == {
        host.hostname for host in visit.graph.of_kind(nodes.Host)
    }
    assert "gpuflight" in {entity.attributes.get("name") for entity in capture.loaded.graph.of_kind(nodes.Process)}
    assert capture.lines.keys() == visit.capture.lines.keys()
    for name, line in capture.lines.items():
        if name != "cuda_probes":  # of programs that other tests may have run in one of the two
            assert line["status"] == visit.capture.lines[name]["status"], name


def test_the_picture_is_whole(visit: Visit) -> None:
    page = (visit.box.work / "run.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html>")
    assert page.rstrip().endswith("</html>")


def test_all_plugins_load_for_everybody(visit: Visit) -> None:
    families = json.loads(visit.outcomes["plugins"].out)
    assert [plugin for plugins in families.values() for plugin in plugins if plugin["error"]] == []
    assert {plugin["name"] for plugin in families["collectors"]} | {"core", "rules"} == visit.capture.lines.keys()


def test_coverage_tells_what_an_ordinary_user_does_not_see(visit: Visit) -> None:
    said = visit.capture.said
    if visit.way.hidepid:
        assert "hidepid" in said("process_tree")
        assert os.getpid() not in {entity.pid for entity in visit.graph.of_kind(nodes.Process)}
    elif visit.limited:
        for collector in ("process_tree", "pipes", "shared_memory", "sockets"):
            assert "run as root or grant CAP_SYS_PTRACE" in said(collector), collector
    else:
        assert os.getpid() in {entity.pid for entity in visit.graph.of_kind(nodes.Process)}


def test_coverage_tells_what_is_missing_without_netlink(visit: Visit) -> None:
    for collector in ("sockets", "unix_sockets"):
        told = "netlink refused" in visit.capture.said(collector)
        assert told == bool(visit.way.netlink_errno), collector
        assert ("allow AF_NETLINK" in visit.capture.said(collector)) == told


def test_the_connection_is_found_with_what_can_be_known_of_it(visit: Visit, neighbour: tuple[int, int]) -> None:
    there, here = (f"Socket(tcp,127.0.0.1:{port})" for port in neighbour)
    joins = [edge for edge in visit.graph.edges_of_kind(edges.ConnectTo) if {edge.source, edge.target} == {here, there}]
    assert [(edge.source, edge.target) for edge in joins] == [(here, there)]
    [join] = joins
    listener = visit.graph.nodes[there]
    if visit.way.netlink_errno:
        for name in ("rtt_ms", "retransmits_count", "bytes_sent_count"):
            assert name not in join.metrics
            assert "netlink" in (join.unknown or {})[name]
        assert "netlink" in (listener.unknown or {})["backlog_max_count"]
    else:
        assert join.metrics["rtt_ms"] > 0
        assert join.metrics["bytes_sent_count"] >= 100
        assert listener.metrics["backlog_max_count"] > 0
    owners = {edge.target for edge in visit.graph.edges_of_kind(edges.Belong) if edge.source in (here, there)}
    if visit.limited and ROOT:
        assert owners == set(), "whose it is may not be seen"
    else:
        assert [visit.graph.nodes[owner].label for owner in owners]
        assert all(f"Process(pid={os.getpid()}," in owner for owner in owners)


def test_env_tells_the_same(visit: Visit) -> None:
    checks = {(check["area"], check["name"]): check for check in json.loads(visit.outcomes["env"].out)["checks"]}
    assert checks["rights", "user"]["state"] == ("limited" if visit.limited else "yes")
    assert checks["kernel", "/proc"]["state"] == ("limited" if visit.way.hidepid else "yes")
    for name in ("internet sockets", "unix sockets"):
        assert ("AF_NETLINK" in checks["sockets", name]["hint"]) == bool(visit.way.netlink_errno)
    for check in checks.values():
        if check["area"] in ("rights", "sockets", "kernel") and check["state"] != "yes":
            assert check["hint"], check


# -- what is not on this machine -----------------------------------------------------------------------------------


def test_a_recording_of_root_replays_where_there_is_nothing(box: Sandbox) -> None:
    """Without rights, PATH, netlink or the recorded processes; as if on another machine."""
    box.run("record", "m.tar.zst", "--rounds", "2", "--interval", "0.3")
    (box.work / "m.tar.zst").chmod(0o644)
    box.run("run", "--replay", "m.tar.zst", "--out", "here")
    running = [
        box.start("run", "--replay", "m.tar.zst", "--out", "there", way=NOTHING, env={"PATH": ""}),
        box.start("describe", "--replay", "m.tar.zst", way=NOTHING, env={"PATH": ""}),
        box.start("env", "--replay", "m.tar.zst", "--json", way=NOTHING, env={"PATH": ""}),
    ]
    _, described, env = (command.finish() for command in running)
    here, there = box.capture("here"), box.capture("there")
    assert here.loaded.graph == there.loaded.graph
    assert here.loaded.env == there.loaded.env
    assert here.loaded.time_ns == there.loaded.time_ns
    assert described.out == (box.work / "here" / "describe.txt").read_text()
    [user] = [check for check in json.loads(env.out)["checks"] if check["name"] == "user"]
    assert user["found"] == ("root" if ROOT else f"uid {os.geteuid()}"), "the rights of who recorded"


@pytest.mark.parametrize("library", ["absent", "broken"])
def test_no_nvml(box: Sandbox, library: str) -> None:
    folder = box.home.parent / "lib"
    folder.mkdir()
    if library == "broken":
        (folder / "libnvidia-ml.so.1").write_bytes(b"\x7fELF but no more")
    elif Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has an NVIDIA driver")
    env = {"LD_LIBRARY_PATH": str(folder)}
    done = box.run(*SHORT, "--out", "run", env=env)
    capture = box.capture()
    said = capture.said("nvml")
    if library == "broken":
        assert "NVML cannot be loaded" in said
        assert "reinstall" in said
    else:
        assert "libnvidia-ml.so.1 is not there" in said
        assert "install the NVIDIA driver" in said
    if not capture.loaded.graph.of_kind(nodes.GPU):
        assert "none seen" in done.out
    answer = box.run("path", "gpu:0", "gpu:1", "--graph", "run", code=2)
    assert "gpu:0" in answer.err


def test_hardly_any_descriptors(box: Sandbox) -> None:
    """A service manager's or a container's limit; descriptors run out in the middle of anything."""
    for number in (9, 14):
        box.run(*SHORT, "--out", f"run{number}", way=Way("few", open_files=number))
        box.capture(f"run{number}")


def test_no_variables_at_all(box: Sandbox) -> None:
    command = Running(
        subprocess.Popen(
            [str(BIN / "gpuflight"), *SHORT, "--out", "run"],
            cwd=box.work, env={}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
    )  # fmt: skip
    assert "GPUs" in command.finish().out
    box.capture()


# -- texts that nobody expects -------------------------------------------------------------------------------------

ODD = """
import ctypes, sys
ctypes.CDLL(None).prctl(15, b"a) R \\xff\\x1b[31m\\n", 0, 0, 0)
print("up", flush=True)
sys.stdin.read()
"""


@contextmanager
def beside(code: str, *arguments: str | bytes) -> Iterator[subprocess.Popen[bytes]]:
    """A Python program that runs until its stdin is closed, once it has printed a line."""
    command = [sys.executable, "-I", "-S", "-c", code, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(PATIENCE_S)


def test_a_locale_without_letters_and_names_without_sense(box: Sandbox) -> None:
    """LANG=C: names that are no UTF-8, that look like fields of /proc, or that would act on a terminal."""
    plain = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "NO_COLOR": "1", "TERM": "dumb"}
    with beside(ODD, b"\xff\xfe", "漢字\u202e\x1b[2J", "--token=hush") as odd:
        box.run(*SHORT, "--pid", str(odd.pid), "--out", "run", env=plain)
        described = box.run("describe", "--pid", str(odd.pid), "--set", "interval_s=0.2", env=plain)
        recorded = box.run("record", "m.tar.zst", "--rounds", "1", env=plain)
    for text in (described.out, recorded.err, (box.work / "run" / "describe.txt").read_text("utf-8")):
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert "hush" not in text
    capture = box.capture()
    [process] = [entity for entity in capture.loaded.graph.of_kind(nodes.Process) if entity.pid == odd.pid]
    assert process.attributes["name"].startswith("a) R ")
    assert f"Process {odd.pid} " in described.out
    box.run("run", "--replay", "m.tar.zst", "--out", "replayed", env=plain)
    again = box.capture("replayed")
    [process] = [entity for entity in again.loaded.graph.of_kind(nodes.Process) if entity.pid == odd.pid]
    assert process.attributes["name"].startswith("a) R ")


# -- outputs that cannot be written --------------------------------------------------------------------------------


def into_a_closed_pipe(box: Sandbox, *arguments: str, program: str = "gpuflight") -> Outcome:
    read, write = os.pipe()
    os.close(read)
    running = box.start(*arguments, stdout=write, program=program)
    os.close(write)
    return running.finish(141)


def test_a_reader_that_went_away_costs_the_report_and_nothing_else(box: Sandbox) -> None:
    into_a_closed_pipe(box, *SHORT, "--out", "run")
    box.capture()
    into_a_closed_pipe(box, *SHORT, "--out", "json", "--json")
    box.capture("json")
    into_a_closed_pipe(box, "record", "m.tar.zst", "--rounds", "1", "--json")
    box.run("run", "--replay", "m.tar.zst", "--out", "replayed")
    for arguments in (("describe", "run"), ("describe", "run", "--json"), ("env",), ("plugins",), ("version",)):
        assert into_a_closed_pipe(box, *arguments).err == ""


def test_a_full_output_is_an_error(box: Sandbox) -> None:
    for arguments in ((*SHORT, "--out", "run"), ("describe", "run"), ("env", "--json"), ("plugins",)):
        with Path("/dev/full").open("wb") as full:
            done = box.start(*arguments, stdout=full).finish(1)
        assert "No space left on device" in done.err
    box.capture()


def test_no_streams_at_all(box: Sandbox) -> None:
    command = f"exec '{BIN}/gpuflight' {' '.join(SHORT)} --out run <&- >&- 2>&-"
    done = subprocess.run(["sh", "-c", command], cwd=box.work, env=box.environment(), timeout=PATIENCE_S, check=False)
    assert done.returncode == 0
    box.capture()


@pytest.mark.parametrize(
    ("out", "why"),
    [
        ("taken/run", "not a folder"),
        ("taken", "not a folder"),
        ("/proc/gpuflight", "cannot be written"),
        ("../run", "Permission denied"),
        ("n" * 300, "File name too long"),
    ],
)
def test_a_folder_that_cannot_be_made(box: Sandbox, request: pytest.FixtureRequest, out: str, why: str) -> None:
    if why == "Permission denied" and not ROOT:
        box.work.parent.chmod(0o555)
        request.addfinalizer(lambda: box.work.parent.chmod(0o755))
    (box.work / "taken").write_bytes(b"mine")
    for arguments in (("run", "--offline", "30", "--out", out), ("record", out, "--seconds", "30")):
        began = time.monotonic()
        done = box.run(*arguments, code=2, way=USER)
        assert time.monotonic() - began < 25, "refused before anything is looked at"
        if arguments[0] == "run":
            assert why in done.err
        assert done.err.strip().splitlines()[-1].startswith("gpuflight: ")
    assert box.names() == {"taken"}
    assert (box.work / "taken").read_bytes() == b"mine"


def test_a_picture_that_cannot_be_written(box: Sandbox) -> None:
    box.run(*SHORT, "--collectors", "host", "--out", "run")
    for target, code in (("/proc/x.html", 1), ("run", 2), ("nowhere/x.html", 1), ("run/graph.json", 2)):
        done = box.run("run", "-o", target, program="gpuflight-vis", code=code)
        assert done.err.startswith("gpuflight-vis: ")
        assert done.err.count("\n") == 1
    assert sorted(os.listdir(box.work / "run")) == sorted(FILES)


@pytest.mark.skipif(not ROOT, reason="mounting a small file system needs root")
def test_a_full_disk(box: Sandbox) -> None:
    """So small that the first round does not fit; that a recording does not; that the rounds do but not the graph."""
    box.run(*SHORT, "--out", "run")
    sizes = {name: (box.work / "run" / name).stat().st_size for name in FILES}
    (box.work / "small").mkdir()
    page = os.sysconf("SC_PAGESIZE")
    enough = sizes["rounds.jsonl.zst"] + sizes["graph.json"] // 2
    for size_bytes, program, arguments, name in (
        (page, "gpuflight", " ".join((*SHORT, "--out", "small/run")), "small/run/"),
        (page, "gpuflight", "record small/m.tar.zst --rounds 1", "small/m.tar.zst"),
        (page, "gpuflight-vis", "run -o small/x.html", "small/x.html"),
        (max(enough, 2 * page), "gpuflight", " ".join((*SHORT, "--out", "small/run")), "small/run/"),
    ):
        told, left = on_a_small_disk(box, size_bytes, f"'{BIN}/{program}' {arguments}")
        assert "code 1" in told
        assert any(name in line and "No space left on device" in line for line in told), told
        assert left <= {"run", "rounds.jsonl.zst", "rounds.jsonl.zst.part", "graph.json", "describe.txt"}, left


def on_a_small_disk(box: Sandbox, size_bytes: int, command: str) -> tuple[list[str], set[str]]:
    """What a command said and left behind with ``small`` on a file system of its own, which ends with it."""
    way = Way("full", tmpfs={str(box.work / "small"): size_bytes})
    script = f"{command} 2>&1; echo \"code $?\"; echo; find small -mindepth 1 -printf '%f\\n'"
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    shell = subprocess.Popen(way.command(["/bin/sh", "-c", script]), cwd=box.work, env=box.environment(), **options)
    told, _, left = Running(shell).finish().out.rpartition("\n\n")
    return told.splitlines(), set(left.split())


# -- ended early ---------------------------------------------------------------------------------------------------


def wait_for(condition: Callable[[], bool], running: Running) -> None:
    """Until something is so that a running command brings about."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert running.process.poll() is None, running.process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_in_the_middle_keeps_everything(box: Sandbox, number: signal.Signals) -> None:
    part = box.work / "run" / "rounds.jsonl.zst.part"
    capturing = box.start("run", "--offline", "3600", "--interval", "3600", "--out", "run", way=USER)
    recording = box.start("record", "m.tar.zst", "--seconds", "3600", "--interval", "0.2")
    wait_for(lambda: part.exists() and part.stat().st_size > 0, capturing)
    wait_for(lambda: bool(list(box.work.glob("m.tar.zst.part*"))), recording)
    capturing.process.send_signal(number)  # in the wait for the next round
    recording.process.send_signal(number)  # anywhere
    done = capturing.finish()
    assert "ended early" in done.err
    assert "GPUs" in done.out
    box.capture()
    recording.finish()
    box.run("run", "--replay", "m.tar.zst", "--out", "replayed")
    box.capture("replayed")
    assert box.names() == {"run", "m.tar.zst", "replayed"}


def test_a_second_signal_waits_for_nothing(box: Sandbox) -> None:
    """The first round hangs in a driver: the first Ctrl-C waits for its end, the second does not."""
    try:
        fake = fake_nvml("h100x8-hang", box.home.parent, system={"hang.nvmlInit": "yes"})
    except NoCompiler as error:
        pytest.skip(str(error))
    running = box.start("run", "--offline", "3600", "--collectors", "nvml", "--out", "run", env=fake.environment)
    wait_for((box.work / "run" / "rounds.jsonl.zst.part").exists, running)
    assert running.process.stderr is not None
    assert running.process.stderr.readline().startswith(b"watching")
    running.process.send_signal(signal.SIGINT)
    time.sleep(0.5)  # two signals that are pending at once are one
    if running.process.poll() is None:  # else, slow as the machine was, the round was over meanwhile
        running.process.send_signal(signal.SIGINT)
        done = running.finish(130)
        assert "interrupted" in done.err
        assert box.names() == set(), "without a round there is nothing to keep"


# -- a machine that does not stand still ---------------------------------------------------------------------------

STORM = """
import os, select, socket, sys, threading, time
print("up", flush=True)
born = 0
alive = []
while not select.select([0], [], [], 0)[0]:
    born += 1
    child = os.fork()
    if child == 0:
        kept = (os.pipe(), socket.socketpair(), os.memfd_create("storm"))
        threading.Thread(target=time.sleep, args=(0.002,)).start()
        listener = socket.create_server(("127.0.0.1", 0))
        socket.create_connection(listener.getsockname())
        if born % 3 == 0:
            os.execv("/bin/true", ["true", "--token=hush"])
        if born % 3 == 1:
            os.setsid()
        os._exit(0)
    alive.append(child)
    while len(alive) > 12:  # until then zombies
        os.waitpid(alive.pop(0), 0)
    time.sleep(0.002)  # leave some of the machine to those who look
for child in alive:
    os.waitpid(child, 0)
print(born)
"""


@pytest.mark.parametrize("way", every_second([PLAIN, USER]), ids=str)
def test_processes_that_come_and_go(box: Sandbox, way: Way) -> None:
    """Forks, execs, exits, threads, sockets and pipes, faster than anybody can read them."""
    with beside(STORM) as storm:
        running = [
            box.start("run", "--offline", "1", "--interval", "0.1", "--out", "run", "--pid", str(storm.pid), way=way),
            box.start("record", "m.tar.zst", "--rounds", "3", "--interval", "0.1", way=way),
        ]
        for command in running:
            command.finish()
        assert storm.stdin is not None
        assert storm.stdout is not None
        storm.stdin.close()
        assert int(storm.stdout.readline()) > 100
    capture = box.capture()
    rounds = list(read_rounds(box.work / "run" / "rounds.jsonl.zst"))
    assert len(rounds) >= 2
    assert any(line["losses"] for line in capture.lines.values()), "nobody can have seen all of it"
    box.run("run", "--replay", "m.tar.zst", "--out", "replayed", way=way)
    box.capture("replayed")


# -- nothing else is touched ---------------------------------------------------------------------------------------

WATCHER = """
import os, sys
log = os.open(os.environ["WRITES_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {"os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
           "os.chown", "os.utime", "os.setxattr", "os.removexattr", "shutil.rmtree", "shutil.move"}
def watch(event, arguments):
    if event == "open":
        path, mode, flags = arguments
        if not flags & WRITES:
            return
        paths = [path]
    elif event in CHANGES:
        paths = arguments[:2]
    else:
        return
    for path in paths:
        if isinstance(path, (str, bytes)) and path:
            os.write(log, os.path.realpath(os.fsencode(path)) + b"\\n")
sys.addaudithook(watch)
"""


def test_every_file_that_is_written_was_asked_for(box: Sandbox) -> None:
    """By the interpreter's own audit events, from its start to its end."""
    hook = box.home.parent / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(WATCHER)
    work = os.path.realpath(box.work)

    def watched(name: str, *arguments: str, **options: Any) -> tuple[Running, Path]:
        log = box.home.parent / f"{name}.log"
        env = {"PYTHONPATH": str(hook), "WRITES_LOG": str(log)}
        return box.start(*arguments, env=env, **options), log

    def writes(started: tuple[Running, Path]) -> set[str]:
        running, log = started
        running.finish()
        return set(os.fsdecode(log.read_bytes()).splitlines()) - {"/dev/null"}

    looking = {
        "run": watched("run", *SHORT, "--out", "run"),
        "record": watched("record", "record", "m.tar.zst", "--rounds", "2", "--interval", "0.2"),
        "describe": watched("describe", "describe", "--set", "interval_s=0.2"),
        "env": watched("env", "env"),
        "plugins": watched("plugins", "plugins"),
    }
    found = {name: writes(started) for name, started in looking.items()}
    found["vis"] = writes(watched("vis", "run", "-o", "picture.html", program="gpuflight-vis"))
    found["text"] = writes(watched("text", "describe", "run"))
    beginnings = {"run": f"{work}/run", "record": f"{work}/m.tar.zst", "vis": f"{work}/.picture.html"}
    for name, paths in found.items():
        if name in beginnings:
            assert paths, f"{name}: the watch does not work"
        allowed = (beginnings.get(name, "\0"), f"{work}/picture.html" if name == "vis" else "\0")
        assert {path for path in paths if not path.startswith(allowed)} == set(), name
    assert box.names() == {"run", "m.tar.zst", "picture.html"}
