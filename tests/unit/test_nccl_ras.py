"""NCCL's RAS: the protocol against a server of ours, both forms of its answers, and what the graph says of them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given
from tests.fakes import ras_server
from tests.fakes.collecting import Outcome, check, collect
from tests.fakes.machine import FakeMachine, add_process, rich_machine
from tests.fakes.machine_answers import POD_NETNS, RANK, TRAINER
from tests.fakes.ras_server import FakeJob, FakeRank, Manner, RasServer
from tests.unit.rule_cases.jobs import Fleet, _hung
from tests.unit.test_jobs import hang, played

from gpuflight.collectors import nccl_ras as collecting
from gpuflight.collectors.nccl_ras import NcclRas as RasCollector
from gpuflight.collectors.nccl_ras import NcclRasSettings
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import nodes
from gpuflight.sources import nccl_ras as asking
from gpuflight.sources.nccl_ras import NcclRas, Place, Told, reachable, version_of
from gpuflight.sources.nccl_ras_report import Report, parse
from gpuflight.sources.open import open_world

HERE = "10.0.0.1"


def report_of(job: FakeJob) -> tuple[Report, Report]:
    """From JSON, from the text."""
    return parse(job.json(), structured=True), parse(job.text(), structured=False)


def told_of(*manners: Manner, job: FakeJob | None = None, timeout_s: int = 1) -> tuple[Told, RasServer]:
    """One question to a server that has these manners."""
    with RasServer(job or FakeJob([FakeRank(1), FakeRank(2)]), manners or ("well",)) as server:
        place, source = Place(0, "127.0.0.1", server.port), NcclRas()
        assert source.told(place) is None and source.ask(place, [], 5.0, timeout_s)
        source.wait([place], 20)
        told = source.told(place)
        source.close()
    assert told is not None and told.asked_s == 5.0
    return told, server


# --- answers --------------------------------------------------------------------------------------------------------


def test_a_healthy_job() -> None:
    for report in report_of(FakeJob([FakeRank(1), FakeRank(2)])):
        assert report.version == "2.29.7+cuda12.9"
        assert (report.troubles, report.timeouts_count, report.strange_count) == ([], 0, 0)
    report, text = report_of(FakeJob([FakeRank(1), FakeRank(2)]))
    assert report.lists_all and not text.lists_all
    assert str(report.members[1]) == (
        "0x1f2e3d: rank 1 of 2, RUNNING, 2 Broadcast, 2 Reduce, 2 AllGather, 2 ReduceScatter, 41 AllReduce"
    )


def test_both_forms_name_who_is_behind_and_who_does_not_answer() -> None:
    job = FakeJob([FakeRank(1, HERE, 42), FakeRank(2, HERE, 40), FakeRank(3, HERE, absent="unresponsive")], timeouts=1)
    for report in report_of(job):
        assert report.timeouts_count == 1 and report.strange_count == 0
        assert {
            (trouble.pid, trouble.rank, trouble.what) for trouble in report.troubles if trouble.rank is not None
        } == {
            (2, 1, "is behind (AllReduce 40 of 42)"),
            (3, 2, "does not answer"),
        }
    assert "rank 1 (communicator 0x1f2e3d, process 2 on 10.0.0.1) is behind (AllReduce 40 of 42)" in {
        str(trouble) for trouble in report.troubles
    }


def test_json_tells_states_errors_the_dead_and_those_who_left() -> None:
    ranks = [FakeRank(1), FakeRank(2), FakeRank(3, state="ABORT", error=6), FakeRank(4, absent="dead"),
             FakeRank(5, absent="left"), FakeRank(6, state="INIT")]  # fmt: skip
    report, _ = report_of(FakeJob(ranks))
    assert [(trouble.pid, trouble.what) for trouble in report.troubles] == [
        (3, "reports an error (remote error)"),
        (3, "is in state ABORT, most in RUNNING"),
        (6, "is in state INIT, most in RUNNING"),
        (4, "is considered dead"),
        (5, "has left the communicator"),
    ]


def test_json_without_a_comma_is_read() -> None:
    job = FakeJob([FakeRank(1), FakeRank(2, absent="dead")], version="2.28.9+cuda13.0")
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(job.json())
    assert [trouble.what for trouble in parse(job.json(), structured=True).troubles] == ["is considered dead"]


def test_a_text_that_names_nobody() -> None:
    text = FakeJob([FakeRank(1), FakeRank(2), FakeRank(3, absent="dead")]).text()
    unnamed = b"\n".join(line for line in text.split(b"\n") if b"Process 3" not in line and b"Rank 2" not in line)
    troubles = [str(trouble) for trouble in parse(unnamed, structured=False).troubles]
    assert troubles == [
        "ranks that are not listed do not answer",
        "ranks that are not listed (communicator 0x1f2e3d) do not answer",
    ]
    summary = text.split(b"\nErrors\n")[0] + b"\nErrors\n======\n\nWarnings\n========\n"
    assert [trouble.what for trouble in parse(summary, structured=False).troubles] == [
        "of 1 communicators of 3 ranks: INCOMPLETE"
    ]


def test_a_text_of_states_and_of_a_version_that_counts_all_collectives_together() -> None:
    text = FakeJob([FakeRank(1)], version="2.24.3").text() + b"\n".join((
        b"#0-0 (00000000001f2e3d) ERROR", b"  Asynchronous errors on 2 ranks", b"  2 ranks reported System error",
        b"  Rank 4 -- GPU 0 managed by process 14 on node 10.0.0.1", b"",
        b"#0-0 (00000000001f2e3d) MISMATCH", b"  Communicator ranks have different status",
        b"  6 ranks have status RUNNING",
        b"  Rank 2 has status NOCOMM -- GPU 2 managed by process 12 on node 10.0.0.1",
        b"  Communicator ranks have different collective operation counts",
        b"  5 ranks have launched up to operation 9",
        b"  Rank 3 has not launched any operations -- [process information not found]",
        b"  something that a later version says", b"",
    ))  # fmt: skip
    report = parse(text, structured=False)
    assert [(trouble.pid, trouble.rank, trouble.what) for trouble in report.troubles] == [
        (14, 4, "reports an error (System error)"),
        (12, 2, "has left the communicator"),
        (0, 3, "is behind (collective 0 of 9)"),
    ]
    assert report.strange_count == 1


@pytest.mark.parametrize("structured", [True, False])
def test_half_an_answer_is_none(structured: bool) -> None:
    job = FakeJob([FakeRank(1), FakeRank(2, absent="dead")])
    body = job.json() if structured else job.text()
    for end in (0, 1, len(body) // 2, body.rindex(b"\n}" if structured else b"Warnings")):
        with pytest.raises(SourceUnavailable):
            parse(body[:end], structured=structured)


@given(st.binary() | st.text().map(str.encode), st.booleans(), st.integers(0, 3000))
def test_any_bytes_are_an_answer_or_none(noise: bytes, structured: bool, at: int) -> None:
    job = FakeJob([FakeRank(1), FakeRank(2, all_reduces=9), FakeRank(3, absent="dead")])
    body = job.json() if structured else job.text()
    for garbled in (noise, body[:at] + noise + body[at:], body[:at] + noise):
        try:
            parse(garbled, structured=structured)
        except SourceUnavailable as error:
            assert error.reason and "\n" not in error.reason


# --- asking ---------------------------------------------------------------------------------------------------------


def test_json_is_asked_for_where_it_is_offered() -> None:
    told, server = told_of(timeout_s=3)
    assert told.structured and not told.error and parse(told.body, structured=True).lists_all
    assert server.commands == ["CLIENT PROTOCOL 2", "TIMEOUT 3", "SET FORMAT json", "STATUS"]


def test_an_older_one_is_asked_for_its_text() -> None:
    told, server = told_of(job=FakeJob([FakeRank(1)], version="2.27.3"))
    assert not told.structured and parse(told.body, structured=False).version == "2.27.3"
    assert server.commands[2:] == ["SET FORMAT json", "VERBOSE STATUS"]


@pytest.mark.parametrize(
    ("manner", "error"),
    [
        ("silent", "3 connections were not answered within 0.1 s each"),
        ("slow", "no answer within 1.2 s"),
        ("endless", "its answer is larger than 1 MiB"),
        ("endless line", "what listens there does not speak RAS's protocol"),
        ("closes", "it closed the connection"),
        ("refuses", "it does not take a timeout"),
        ("http", "what listens there does not speak RAS's protocol"),
    ],
)
def test_what_may_go_wrong(manner: Manner, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_EXTRA_S", 0.2)
    monkeypatch.setattr(asking, "MAX_BYTES", 1 << 20)
    if manner == "silent":
        monkeypatch.setattr(asking, "_GREETING_S", 0.1)
    told, server = told_of(manner)
    assert (told.error, told.body) == (error, b"")
    assert server.connections == (3 if manner == "silent" else 1)


@pytest.mark.parametrize("manner", ["garbage", "cut"])
def test_what_comes_may_be_nonsense(manner: Manner) -> None:
    told, _ = told_of(manner)
    with pytest.raises(SourceUnavailable, match="not understood"):
        parse(told.body, structured=told.structured)


def test_a_process_that_is_stopped_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_GREETING_S", 0.3)
    told, server = told_of("silent", "well")
    assert told.structured and not told.error and server.connections == 2


def test_nobody_listens_any_more() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        place = Place(0, "127.0.0.1", gone.getsockname()[1])
    source = NcclRas()
    source.ask(place, [], 1.0, 1)
    source.wait([place], 10)
    told = source.told(place)
    assert told is not None and told.error == "Connection refused"


def test_one_question_at_a_time_and_close_ends_it() -> None:
    before = threading.active_count()
    with RasServer(FakeJob([FakeRank(1)]), ("slow",)) as server:
        place, source = Place(0, "127.0.0.1", server.port), NcclRas()
        assert source.ask(place, [], 1.0, 60) and not source.ask(place, [], 2.0, 60)
        source.wait([place], 0.2)
        assert source.told(place) is None
        (thread,) = (each for each in threading.enumerate() if each.name.startswith("nccl-ras"))
        source.close()
        source.close()
        thread.join(5)
        assert not thread.is_alive()
    assert threading.active_count() <= before


def test_where_to_connect() -> None:
    assert [reachable(address) for address in ("0.0.0.0", "::", "::1", "10.0.0.5")] == [
        "127.0.0.1", "::1", "::1", "10.0.0.5",
    ]  # fmt: skip
    with pytest.raises(SourceUnavailable, match="link-local"):
        reachable("fe80::1")


def test_a_namespace_that_may_not_be_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(netns: int, door: str) -> bool:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(asking, "enter", refuse)
    source, place = NcclRas(), Place(7, "127.0.0.1", 1)
    source.ask(place, ["/proc/1/ns/net"], 1.0, 1)
    source.wait([place], 10)
    told = source.told(place)
    assert told is not None and told.error == "its network namespace cannot be entered: Operation not permitted"
    assert told.hint == "run as root or grant CAP_SYS_ADMIN"


def test_the_version_of_a_library() -> None:
    files = rich_machine().copy()
    files.write("/proc/9/root/venv/site-packages/nvidia_nccl_cu12-2.27.5.dist-info/METADATA", "")
    files.write("/proc/9/root/venv/site-packages/nvidia/nccl/lib/libnccl.so.2", "")
    root = "/proc/9/root"
    assert version_of(files, root, "/usr/lib/libnccl.so.2.29.3") == "2.29.3"
    assert version_of(files, root, "/venv/site-packages/nvidia/nccl/lib/libnccl.so.2") == "2.27.5"
    assert version_of(files, root, "/gone/nvidia/nccl/lib/libnccl.so.2") == ""
    assert version_of(files, root, "/opt/libnccl.so.2") == ""


# --- the collector --------------------------------------------------------------------------------------------------

KEY = ("nccl_ras", f"127.0.0.1:28028 in netns {POD_NETNS}")


def rounds(machine: FakeMachine, count: int = 1, step_s: float = 1.0, **settings: Any) -> list[Outcome]:
    collector = RasCollector(NcclRasSettings(**{"ask": True, "oldest_version": "0", **settings}))
    found = []
    for _ in range(count):
        found.append(collect(collector, machine.next_round(step_s)))
        check(found[-1])
    return found


def said(outcome: Outcome) -> dict[int, Any]:
    """By pid: the attribute, or why it is unknown."""
    return {
        node.pid: node.attributes.get("nccl_ras") or (node.unknown or {})["nccl_ras"]
        for node in outcome.nodes
        if isinstance(node, nodes.Process)
    }


def answer(machine: FakeMachine, job: FakeJob, *, structured: bool = True, age_s: float = 0.0, error: str = "") -> None:
    """What the source tells from now on."""
    body = job.json() if structured else job.text()
    told = Told(machine.clock.monotonic_s() - age_s, b"" if error else body, structured, error)
    machine.tape.answers[KEY] = msgspec.msgpack.encode(told)


def test_ranks_in_a_pod_are_found_by_the_pids_that_they_know() -> None:
    (outcome,) = rounds(FakeMachine(rich_machine()))
    assert said(outcome) == {TRAINER: "answers", RANK: "is behind (AllReduce 41 of 42)"}
    process = next(node for node in outcome.nodes if node.pid == RANK)  # type: ignore[attr-defined]
    assert process.attributes["nccl_ras_troubles"] == [
        "rank 1 (communicator 0x1f2e3d, process 2 on 10.1.0.2) is behind (AllReduce 41 of 42)"
    ]
    assert process.attributes["nccl_ras_communicators"] == [
        "0x1f2e3d: rank 1 of 2, RUNNING, 2 Broadcast, 2 Reduce, 2 AllGather, 2 ReduceScatter, 41 AllReduce"
    ]
    assert process.attributes["nccl_ras_version"] == "2.29.7+cuda12.9" and process.metrics["nccl_ras_age_s"] == 0.5


def test_nobody_is_asked_unless_it_is_wanted() -> None:
    machine = FakeMachine(rich_machine())
    (outcome,) = rounds(machine, ask=False)
    assert said(outcome) == dict.fromkeys((TRAINER, RANK), "not asked (collectors.nccl_ras.ask)")
    assert [(note.hint, note.count) for note in outcome.notes] == [
        ("set collectors.nccl_ras.ask to true where they are newer", 2)
    ]
    assert machine.tape.asked[KEY] == 0
    assert not RasCollector().settings.ask


@pytest.mark.parametrize(("library", "asked"), [("2.29.1", False), ("2.29.2", True), ("2.30", True), ("2", False)])
def test_old_and_unknown_versions_are_not_asked(library: str, asked: bool) -> None:
    files = rich_machine().copy()
    for pid in (TRAINER, RANK):
        raw = files.files[f"/proc/{pid}/maps"]
        files.files[f"/proc/{pid}/maps"] = raw.replace(b"libnccl.so.2", f"libnccl.so.{library}".encode())
    machine = FakeMachine(files)
    (outcome,) = rounds(machine, oldest_version="2.29.2")
    assert (machine.tape.asked[KEY] == 1) is asked
    if not asked:
        version = library if "." in library else "of an unknown version"
        assert said(outcome) == dict.fromkeys((TRAINER, RANK), f"not asked: its NCCL is {version}")


@pytest.mark.parametrize("variable", ["NCCL_RAS_ENABLE=0", "NCCL_RAS_ADDR=evil.example:29000", "NCCL_RAS_ADDR=x:y"])
def test_the_environment_says_whether_and_where_it_listens(variable: str) -> None:
    """Only its port counts, to find the listener among the process's own sockets; its host is never connected to."""
    files = rich_machine().copy()
    for pid in (TRAINER, RANK):
        files.files[f"/proc/{pid}/environ"] += variable.encode() + b"\0"
    machine = FakeMachine(files)
    assert said(rounds(machine)[0]) == {} and not [key for key in machine.tape.asked if key[0] == "nccl_ras"]


def test_who_listens_without_nccl_is_not_asked() -> None:
    files = rich_machine().copy()
    for pid in (TRAINER, RANK):
        raw = files.files[f"/proc/{pid}/maps"]
        files.files[f"/proc/{pid}/maps"] = raw.replace(b"libnccl.so.2", b"libnccl-net.so.2")
    machine = FakeMachine(files)
    outcomes = rounds(machine, 3)
    assert said(outcomes[2]) == {} and machine.tape.asked[KEY] == 0
    assert [note.count for note in outcomes[2].notes] == [2]


def test_without_an_answer_it_is_unknown() -> None:
    machine = FakeMachine(rich_machine())
    machine.tape.answers[KEY] = msgspec.msgpack.encode(None)
    assert said(rounds(machine)[0]) == dict.fromkeys((TRAINER, RANK), "no answer yet")
    answer(machine, FakeJob([]), error="Connection refused")
    (outcome,) = rounds(machine)
    why = f"127.0.0.1:28028 in netns {POD_NETNS}: Connection refused"
    assert said(outcome) == dict.fromkeys((TRAINER, RANK), why)
    assert [note.reason for note in outcome.notes] == [f"NCCL's RAS at {why}"]
    answer(machine, FakeJob([FakeRank(77, "10.1.0.2"), FakeRank(1, "10.9.9.9"), FakeRank(2, "127.0.0.1")]))
    assert said(rounds(machine)[0]) == dict.fromkeys((TRAINER, RANK), "none of its answers names this process")


def test_an_answer_stands_for_a_while_and_an_error_ends_it() -> None:
    machine = FakeMachine(rich_machine())
    healthy = FakeJob([FakeRank(1, "10.1.0.2"), FakeRank(2, "10.1.0.2")])
    answer(machine, healthy)
    collector = RasCollector(NcclRasSettings(ask=True, oldest_version="0", interval_s=10))
    ages = []
    for _ in range(4):
        outcome = collect(collector, machine.next_round(30))
        ages.append(outcome.nodes[0].metrics.get("nccl_ras_age_s"))
    assert ages == [30, 60, None, None], "four intervals and half a minute"
    answer(machine, healthy)
    assert said(collect(collector, machine.next_round())) == {TRAINER: "healthy", RANK: "healthy"}
    answer(machine, healthy, error="no answer within 12 s")
    assert "no answer within 12 s" in said(collect(collector, machine.next_round()))[RANK]


def test_a_text_says_of_those_that_it_does_not_name_that_all_is_well() -> None:
    machine = FakeMachine(rich_machine())
    answer(machine, FakeJob([FakeRank(1, "10.1.0.2"), FakeRank(2, "10.1.0.2")]), structured=False)
    assert said(rounds(machine)[0]) == {TRAINER: "healthy", RANK: "healthy"}
    lost = FakeJob([FakeRank(1, "10.1.0.2"), FakeRank(2, "10.1.0.2", absent="unresponsive")])
    answer(machine, lost, structured=False)
    assert said(rounds(machine)[0]) == {TRAINER: "answers", RANK: "does not answer"}


def test_two_jobs_at_one_place_are_told_apart() -> None:
    """SO_REUSEPORT: who is asked, the kernel chooses. JSON names the processes of the answer; a text does not."""
    files = rich_machine().copy()
    environ = files.files[f"/proc/{RANK}/environ"]
    files.files[f"/proc/{RANK}/environ"] = environ.replace(b"MASTER_PORT=29500", b"MASTER_PORT=29501")
    for structured in (True, False):
        machine = FakeMachine(files)
        answer(machine, FakeJob([FakeRank(1, "10.1.0.2")]), structured=structured)
        first = "healthy" if structured else "none of its answers names this process"
        assert said(rounds(machine)[0]) == {TRAINER: first, RANK: "none of its answers names this process"}


def test_a_pid_that_two_have_is_nobody() -> None:
    files = rich_machine().copy()
    add_process(files, 4103, "twin", netns=POD_NETNS, nspids="4103\t2", fds={3: "/dev/nvidia2"})
    (outcome,) = rounds(FakeMachine(files))
    assert said(outcome) == {TRAINER: "answers", RANK: "none of its answers names this process"}
    assert outcome.losses == {"processes named by RAS that could be several": 2}


def test_nobody_says_anything_of_anothers_process() -> None:
    files = rich_machine().copy()
    add_process(files, 4105, "victim", netns=POD_NETNS, nspids="4105\t9", uid=1001, fds={3: "/dev/nvidia2"})
    machine = FakeMachine(files)
    answer(machine, FakeJob([FakeRank(1, "10.1.0.2"), FakeRank(9, "10.1.0.2", absent="dead")]))
    assert said(rounds(machine)[0]).keys() == {TRAINER, RANK}


def test_a_loader_that_inherited_the_socket_is_no_rank() -> None:
    files = rich_machine().copy()
    add_process(files, 4104, "loader", netns=POD_NETNS, nspids="4104\t3", ppid=RANK, start=9_000_000,
                fds={3: "/dev/nvidia1", 10: "socket:[604]"})  # fmt: skip
    assert said(rounds(FakeMachine(files))[0]).keys() == {TRAINER, RANK}


def test_what_others_wrote_is_short_and_harmless() -> None:
    machine = FakeMachine(rich_machine())
    job = FakeJob([FakeRank(1, "10.1.0.2"), FakeRank(2, "10.1.0.2")], version="\x1b[2J\n" + "v" * 999)
    body = job.__class__(job.ranks).json().replace(b"2.29.7+cuda12.9", msgspec.json.encode(job.version)[1:-1])
    machine.tape.answers[KEY] = msgspec.msgpack.encode(Told(0.0 + machine.clock.monotonic_s(), body, True))
    version = rounds(machine)[0].nodes[0].attributes["nccl_ras_version"]
    assert version.startswith("?[2J?vvv") and len(version) == 160 and version.endswith("…")


def test_one_question_per_job_and_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = FakeMachine(rich_machine())
    source, asked = machine.world.nccl_ras, []
    monkeypatch.setattr(NcclRas, "replaying", property(lambda self: False))
    monkeypatch.setattr(source, "ask", lambda place, doors, now_s, timeout_s: asked.append((place, doors)) or True)
    monkeypatch.setattr(source, "wait", lambda places, seconds: None)
    rounds(machine, 25, interval_s=10)
    assert len(asked) == 3, "seconds 1, 11 and 21"
    assert asked[0] == (Place(POD_NETNS, "127.0.0.1", 28028), [f"/proc/{TRAINER}/ns/net", f"/proc/{RANK}/ns/net"])


# --- to the finding -------------------------------------------------------------------------------------------------


@contextmanager
def rank_process(folder: Path, *rest: str) -> Iterator[tuple[int, int]]:
    """(pid, port) of a process with a made-up NCCL and GPU, in whose answer it is behind another rank."""
    library, gpu = folder / "libnccl.so.2.29.7", folder / "gpu"
    library.write_bytes(b"\x7fELF" + bytes(8192))
    gpu.touch()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environ = {**os.environ, "NCCL_RAS_ADDR": f"localhost:{port}", "RANK": "6", "WORLD_SIZE": "8", "MASTER_ADDR": "n1"}
    command = [sys.executable, ras_server.__file__, str(library), str(gpu), str(port), *rest]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            if process.stdout.readline() != b"ready\n":
                pytest.skip("no network namespace can be made")
            yield process.pid, port
        finally:
            process.stdin.close()


@pytest.fixture
def gpu_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in /dev/shm (elsewhere open files are not looked at) whose files pass for GPUs."""
    folder = Path(f"/dev/shm/gpuflight-ras-{os.getpid()}")
    folder.mkdir()
    monkeypatch.setattr(collecting, "ACCELERATORS", (f"{folder}/gpu",))
    yield folder
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def seen(replay: Path | None, record: Path | None, pid: int) -> list[nodes.Process]:
    """What two rounds say of a process."""
    world = open_world(replay=replay, record=record, probes="off")
    collector = RasCollector(NcclRasSettings(ask=True))
    found = []
    for number in (1, 2):
        world.begin_round(number)
        outcome = collect(collector, world)
        check(outcome)
        found += [node for node in outcome.nodes if isinstance(node, nodes.Process) and node.pid == pid]
    collector.close()
    world.close()
    return found


def test_from_a_listener_to_the_finding_and_the_replay(gpu_folder: Path, tmp_path: Path) -> None:
    with rank_process(gpu_folder) as (pid, _):
        live = seen(None, tmp_path / "x.tar.zst", pid)
    said = live[1].attributes["nccl_ras"]
    assert said == "is behind (AllReduce 41 of 42)" and live[1].attributes["nccl_ras_version"] == "2.29.7+cuda12.9"
    again = seen(tmp_path / "x.tar.zst", None, pid)
    assert [node.attributes for node in again] == [node.attributes for node in live]
    assert [node.unknown for node in again] == [node.unknown for node in live]

    def change(n: int, rank: int, values: dict[str, Any]) -> None:
        _hung(n, rank, values, idle=(), attributes=live[1].attributes if rank == 6 else {"nccl_ras": "answers"})

    found, _ = played("collective_hang", Fleet(change=change).scene(count=24, step_s=20.0))
    assert "rank 6 is not there; NCCL's RAS says of rank 6: is behind (AllReduce 41 of 42)" in found[0].message


@pytest.mark.skipif(os.geteuid() != 0, reason="entering a network namespace needs root")
def test_a_rank_in_another_network_namespace_is_asked_there(gpu_folder: Path) -> None:
    with rank_process(gpu_folder, "netns") as (pid, _):
        live = seen(None, None, pid)
    assert live[1].attributes.get("nccl_ras") == "is behind (AllReduce 41 of 42)", live[1].unknown


def test_whom_ras_names_is_named_and_is_evidence() -> None:
    found, _ = hang("RAS names a rank")
    assert "rank 3 is not there; NCCL's RAS says of rank 3: does not answer" in found[0].message
    assert ("nccl_ras", "does not answer") in {(each.metric, each.value) for each in found[0].evidence}
    assert found[0].entities[0].endswith("pid=1003,start=7)")


def test_what_ras_says_of_others_is_quoted() -> None:
    def change(n: int, rank: int, values: dict[str, Any]) -> None:
        told = {"nccl_ras": "answers", "nccl_ras_troubles": ["rank 9 (process 5 on 10.0.0.9) is considered dead"]}
        _hung(n, rank, values, attributes=told)

    found, _ = played("collective_hang", Fleet(change=change).scene(count=24, step_s=20.0))
    assert "rank 6 is not there; NCCL's RAS says: rank 9 (process 5 on 10.0.0.9) is considered dead" in found[0].message
