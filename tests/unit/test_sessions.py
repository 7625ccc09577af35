"""GPU sessions in the graph: joined to the right process and GPU, or to none; rates over the right time; an end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.fakes.collecting import Outcome, check, collect
from tests.fakes.machine import CONTAINER, FakeMachine, add_process, rich_machine
from tests.fakes.machine_answers import SERVER, TRAINER, nvml_snapshot

from gpuflight.collectors.session_names import shown_name
from gpuflight.collectors.session_processes import (
    NO_HOST_NAME,
    NO_PID,
    NO_START,
    NOT_FOUND,
    OTHER_HOST,
    OTHER_USER,
    SEVERAL,
)
from gpuflight.collectors.session_rates import CATCHING_UP, NOTHING_NEW
from gpuflight.collectors.sessions import Sessions, SessionsSettings
from gpuflight.events.activity.summary import (
    CopySum,
    DeviceFacts,
    KernelSum,
    MemorySum,
    ScopeSum,
    StreamSum,
    Summary,
    WaitSum,
)
from gpuflight.events.reading import Reading
from gpuflight.graph import Edge, Entity
from gpuflight.graph.paths import path
from gpuflight.sources.open import open_world
from gpuflight.sources.session_logs import SessionLogs
from gpuflight.vis.base import LayoutOptions
from gpuflight.vis.layout.item import Item, walk
from gpuflight.vis.layout.tree import Forest

BEGAN_NS = 1_700_000_100 * 10**9
"""When the sessions begin: the machine booted 100 s before, its processes began 13 to 51 s after that."""

SECOND = 10**9


def kernel(
    count: int = 10, total_ns: int = 1_000_000, name: str | None = "gemm", number: int = 1, **more: Any
) -> KernelSum:
    values = {"min_ns": 10, "max_ns": 90, "p50_ns": 50, "p99_ns": 80, "lanes": [(7, count, total_ns)], **more}
    return KernelSum(number, name, count, total_ns, **values)


def session(name: str = "s", pid: int | None = SERVER, **more: Any) -> Summary:
    values = {"hostname": "node1", "app": "train", "start_ns": BEGAN_NS, "writer": "alive", **more}
    return Summary(session_id=name, pid=pid, **values)


class Rig:
    """A machine on which the logs say what a test says."""

    def __init__(self, *sessions: Summary, machine: FakeMachine | None = None, **settings: Any) -> None:
        self.machine = machine or FakeMachine(rich_machine())
        self.collector = Sessions(SessionsSettings(**settings))
        self.reading = Reading(list(sessions), ["/logs"])
        self.machine.tape.answers["session_logs", "reading"] = lambda: msgspec.msgpack.encode(self.reading)

    def round(self, *sessions: Summary, seconds: float = 5.0) -> Outcome:
        if sessions:
            self.reading.sessions = list(sessions)
        outcome = collect(self.collector, self.machine.next_round(seconds), [])
        check(outcome)
        return outcome


def entity(outcome: Outcome, identifier: str) -> Entity:
    return outcome.graph.nodes[identifier]


def owners(outcome: Outcome, name: str = "s") -> list[str]:
    return [edge.source for edge in outcome.edges if edge.target == f"Session({name})" and edge.kind == "Own"]


def why(outcome: Outcome, name: str = "s") -> str:
    return (entity(outcome, f"Session({name})").unknown or {}).get("process", "")


def edge_of(outcome: Outcome, kind: str, source: str, target: str) -> Edge:
    return outcome.graph.edges[source, target, kind]


SERVER_ID = f"Process(pid={SERVER},start={1000 + SERVER})"
TRAINER_ID = f"Process(pid={TRAINER},start={1000 + TRAINER})"


# --- whose session it is ---------------------------------------------------------------------------------------------


def test_of_a_process_of_the_host() -> None:
    assert owners(Rig(session()).round()) == [SERVER_ID]


@pytest.mark.parametrize("name", ["job-0", "trainer", CONTAINER[:12]])
def test_of_a_process_in_a_container_that_sees_another_pid(name: str) -> None:
    """The log says pid 1: in the pod that is the trainer, on the host systemd."""
    assert owners(Rig(session(pid=1, hostname=name)).round()) == [TRAINER_ID]


def test_the_name_that_the_program_was_started_with() -> None:
    files = rich_machine().copy()
    files.write(f"/proc/{TRAINER}/environ", b"HOSTNAME=own-name\0")
    assert owners(Rig(session(pid=1, hostname="own-name"), machine=FakeMachine(files)).round()) == [TRAINER_ID]


def test_not_of_a_later_process_with_its_pid() -> None:
    """The server began 13 s after the machine; the session before."""
    outcome = Rig(session(start_ns=1_700_000_005 * SECOND)).round()
    assert owners(outcome) == [] and why(outcome) == NOT_FOUND
    assert edge_of(outcome, "Host", "Host(node1)", "Session(s)")


def test_not_of_a_process_of_this_host_if_another_wrote_it() -> None:
    outcome = Rig(session(hostname="node-7")).round()
    assert outcome.nodes == [] and outcome.notes[0].count == 1
    outcome = Rig(session(hostname="node-7", devices=[DeviceFacts(0, "GPU-x")]), other_hosts=True).round()
    assert [node.id for node in outcome.nodes] == ["Session(s)", "Application(train)"]
    assert why(outcome) == OTHER_HOST and [edge.kind for edge in outcome.edges] == ["HasAttribute"]


def test_not_of_a_process_whose_own_pid_it_is_not() -> None:
    """The trainer is pid 4101 to us, and pid 1 to itself: a log that says 4101 is not its."""
    outcome = Rig(session(pid=TRAINER, hostname="job-0"), other_hosts=True).round()
    assert owners(outcome) == []


def machine_with_twins(holder: bool) -> FakeMachine:
    """Two containers with the host's name, in each of which a process has pid 7."""
    files = rich_machine().copy()
    for pid in (5001, 5002):
        fds = {3: "/dev/nvidia3"} if holder and pid == 5002 else {3: "socket:[1]"}
        add_process(files, pid, "train", nspids=f"{pid}\t7", fds=fds)
    return FakeMachine(files)


def test_of_several_with_that_pid_the_one_that_has_a_gpu_open() -> None:
    assert owners(Rig(session(pid=7), machine=machine_with_twins(True)).round()) == ["Process(pid=5002,start=6002)"]
    outcome = Rig(session(pid=7), machine=machine_with_twins(False)).round()
    assert owners(outcome) == [] and why(outcome) == SEVERAL


def test_one_that_names_gpus_is_not_of_a_process_without_any() -> None:
    """As where a container with the host's name has ended and its pid is that of something else on the host."""
    devices = [DeviceFacts(0, "GPU-x")]
    outcome = Rig(session(devices=devices)).round()
    assert owners(outcome) == [] and why(outcome) == NOT_FOUND
    assert owners(Rig(session(pid=1, hostname="job-0", devices=devices)).round()) == [TRAINER_ID]


def test_old_logs_without_a_host_name() -> None:
    """Only a process that has a GPU open is believed."""
    assert owners(Rig(session(hostname="", pid=1)).round()) == [TRAINER_ID]
    outcome = Rig(session(hostname="")).round()
    assert owners(outcome) == [] and why(outcome) == NO_HOST_NAME


@pytest.mark.parametrize(("more", "reason"), [({"pid": None}, NO_PID), ({"start_ns": None}, NO_START)])
def test_what_is_missing_to_tell(more: dict[str, Any], reason: str) -> None:
    assert why(Rig(session(**more)).round()) == reason


@pytest.mark.parametrize(("uid", "joined"), [(1000, True), (0, True), (None, True), (1001, False), (65534, False)])
def test_nobody_is_told_to_do_what_another_user_wrote(uid: int | None, joined: bool) -> None:
    outcome = Rig(session(uid=uid)).round()
    assert owners(outcome) == ([SERVER_ID] if joined else [])
    assert why(outcome) == ("" if joined else OTHER_USER)


def test_hostile_names() -> None:
    """Of whoever may write a log: nothing of it breaks a line or an id, or is longer than can be read."""
    evil = "\x1b[2J\n" + "x" * 5000
    devices = [DeviceFacts(0, evil, evil), DeviceFacts(1, "GPU-1", evil)]
    hostile = running(10, 1, folder=evil, kind=evil, engine=evil, run_id=evil, app=evil, devices=devices)
    hostile.kernels, hostile.scopes = [kernel(name=evil)], [ScopeSum(f"{evil}|{evil}", evil, 0, 1, 0, 1, 1)]
    outcome = Rig(msgspec.structs.replace(hostile, session_id=evil)).round()
    assert {node.kind for node in outcome.nodes} >= {"Session", "Kernel", "Scope", "Application"}
    for node in outcome.nodes:
        texts = [text for text in node.attributes.values() if isinstance(text, str)]
        assert node.id.isprintable() and len(node.id) < 1000
        assert all(text.isprintable() and len(text) < 300 for text in texts), texts
    assert "GPU" not in {node.kind for node in outcome.nodes if evil[:4] in node.id}


def test_kernel_threads_write_no_logs() -> None:
    assert owners(Rig(session(pid=2)).round()) == []


# --- where it ran ----------------------------------------------------------------------------------------------------


def busy_session(devices: list[DeviceFacts], **more: Any) -> Summary:
    values: dict[str, Any] = {
        "launches": 10, "kernel_ns": 1_000_000, "busy_ns": 900_000, "kernels": [kernel()], "kernels_count": 1,
        "streams": [StreamSum(7, None if len(devices) > 1 else 0, 10, 1_000_000)], "streams_count": 1,
        "device_latest_ns": BEGAN_NS, "devices": devices, **more,
    }  # fmt: skip
    return session(pid=1, hostname="job-0", **values)


def test_session_process_kernel_stream_gpu() -> None:
    outcome = Rig(busy_session([DeviceFacts(0, "GPU-x", "H100")])).round()
    gemm, stream = f"Kernel({TRAINER_ID},gemm)", f"Stream({TRAINER_ID},7)"
    assert edge_of(outcome, "Launch", TRAINER_ID, gemm)
    assert edge_of(outcome, "RunOn", gemm, stream).metrics == {"launches_count": 10, "gpu_time_ms": 1.0}
    assert edge_of(outcome, "RunOn", stream, "GPU(uuid=GPU-x)")
    assert edge_of(outcome, "Belong", stream, "Session(s)")
    assert entity(outcome, "GPU(uuid=GPU-x)").attributes == {"name": "H100"}
    found = path(outcome.graph, gemm, "GPU(uuid=GPU-x)")
    assert found is not None and [hop.target for hop in found.hops] == [stream, "GPU(uuid=GPU-x)"]


def test_a_mig_device() -> None:
    outcome = Rig(busy_session([DeviceFacts(0, "MIG-x")])).round()
    assert edge_of(outcome, "RunOn", f"Stream({TRAINER_ID},7)", "MigInstance(uuid=MIG-x)")


def test_of_several_gpus_the_one_that_nvml_sees_the_process_on() -> None:
    raw = nvml_snapshot()
    if raw is None:
        pytest.skip("the fake NVML needs a C compiler")
    uuids = [gpu["uuid"] for gpu in msgspec.json.decode(raw)["gpus"]]
    devices = [DeviceFacts(index, uuid) for index, uuid in enumerate(uuids)]
    outcome = Rig(busy_session(devices)).round()
    stream = f"Stream({TRAINER_ID},7)"
    assert [edge.target for edge in outcome.edges if edge.source == stream and edge.kind == "RunOn"] == [
        f"GPU(uuid={uuids[0]})"
    ]
    elsewhere = Rig(busy_session(devices[2:])).round()
    assert "gpu" in (entity(elsewhere, stream).unknown or {})
    assert not [edge for edge in elsewhere.edges if edge.source == stream and edge.kind == "RunOn"]


def test_copies_and_memory_are_at_the_gpu() -> None:
    copies = [CopySum("HtoD", None, 2, 4000, 1000), CopySum("DtoH", None, 1, 50, 100), CopySum("DtoD", None, 1, 9, 1)]
    memory = [MemorySum(0, False, 3, 1, 1, 200, 500), MemorySum(None, True, 1, 0, 0, 64, 64)]
    rig = Rig(busy_session([DeviceFacts(0, "GPU-x")], copies=copies, memory=memory))
    rig.round()
    more = [CopySum("HtoD", None, 3, 14_000, 2000), *copies[1:]]
    latest = BEGAN_NS + 5 * SECOND
    outcome = rig.round(busy_session([DeviceFacts(0, "GPU-x")], copies=more, memory=memory, device_latest_ns=latest))
    up = edge_of(outcome, "Transfer", TRAINER_ID, "GPU(uuid=GPU-x)")
    assert up.metrics == {
        "copies_count": 3, "copied_bytes": 14_000, "copy_bytes_per_s": 2000.0, "copy_time_ms": 0.002
    }  # fmt: skip
    assert edge_of(outcome, "Transfer", "GPU(uuid=GPU-x)", TRAINER_ID).metrics["copy_bytes_per_s"] == 0
    access = edge_of(outcome, "Access", TRAINER_ID, "GPU(uuid=GPU-x)")
    assert access.metrics == {"held_bytes": 200, "alloc_peak_bytes": 500}
    metrics = entity(outcome, "Session(s)").metrics
    assert (metrics["copy_htod_bytes_per_s"], metrics["copied_dtod_bytes"], metrics["copies_count"]) == (2000, 9, 5)
    assert (metrics["held_bytes"], metrics["alloc_peak_bytes"], metrics["pinned_held_bytes"]) == (200, 500, 64)
    assert metrics["frees_unmatched_count"] == 1


# --- rates -----------------------------------------------------------------------------------------------------------


def running(launches: int, seconds: float, **more: Any) -> Summary:
    """A session that has launched so much by then, each launch 1 ms long."""
    total_ns = launches * 1_000_000
    values: dict[str, Any] = {
        "launches": launches, "kernel_ns": total_ns, "busy_ns": total_ns, "kernels": [kernel(launches, total_ns)],
        "kernels_count": 1, "device_latest_ns": BEGAN_NS + int(seconds * SECOND), "events": launches, **more,
    }  # fmt: skip
    return session(**values)


GEMM = f"Kernel({SERVER_ID},gemm)"


def test_rates_of_the_round() -> None:
    rig = Rig(running(100, 1, waits=[WaitSum("stream", 1, 10, 10)], host_latest_ns=BEGAN_NS))
    first = entity(rig.round(), "Session(s)")
    assert first.metrics["launches_count"] == 100 and "launches_per_s" in (first.unknown or {})
    waits = [WaitSum("stream", 2, 10 + 500_000_000, 9), WaitSum("event", 1, 500_000_000, 9)]
    outcome = rig.round(running(1100, 6, waits=waits, host_latest_ns=BEGAN_NS + 5 * SECOND))
    metrics = entity(outcome, "Session(s)").metrics
    assert (metrics["launches_per_s"], metrics["busy_pct"], metrics["sync_wait_pct"]) == (200, 20, 20)
    gemm = entity(outcome, GEMM).metrics
    assert (gemm["launches_per_s"], gemm["gpu_time_pct"], gemm["mean_us"], gemm["launches_count"]) == (
        200,
        20,
        1000,
        1100,
    )


def test_a_buffer_of_the_writer_makes_no_rate_that_cannot_be() -> None:
    """What came in one round covers 20 s of the log: it is spread over these."""
    rig = Rig(running(100, 0.5))
    rig.round()
    metrics = entity(rig.round(running(20_100, 20.5)), "Session(s)").metrics
    assert (metrics["launches_per_s"], metrics["busy_pct"]) == (1000, 100)


def test_nothing_new_is_unknown_for_a_while_and_then_0() -> None:
    rig = Rig()
    now_ns = rig.machine.clock.wall_ns()
    one = running(100, 1, read_ns=now_ns, last_event_ns=now_ns)
    rig.round(one)
    found = entity(rig.round(one), "Session(s)")
    assert (found.unknown or {})["launches_per_s"] == NOTHING_NEW
    found = entity(rig.round(one, seconds=60), "Session(s)")
    assert (found.metrics["launches_per_s"], found.metrics["busy_pct"]) == (0, 0)


def test_no_rates_while_the_log_is_behind() -> None:
    rig = Rig(running(100, 1))
    rig.round()
    outcome = rig.round(running(5000, 6, lag_bytes=10))
    assert (entity(outcome, "Session(s)").unknown or {})["launches_per_s"] == CATCHING_UP
    assert (entity(outcome, GEMM).unknown or {})["launches_per_s"] == CATCHING_UP
    assert entity(outcome, "Session(s)").metrics["lag_bytes"] == 10
    outcome = rig.round(running(9000, 11))
    assert (entity(outcome, "Session(s)").unknown or {})["launches_per_s"] == CATCHING_UP
    assert entity(rig.round(running(9500, 16)), "Session(s)").metrics["launches_per_s"] == 100


def test_synthetic_kernels_give_no_busy_time() -> None:
    rig = Rig(running(100, 1, synthetic=True))
    rig.round()
    outcome = rig.round(running(200, 6, synthetic=True))
    assert "busy_pct" in (entity(outcome, "Session(s)").unknown or {})
    assert entity(outcome, GEMM).attributes == {"synthetic": True}


def test_a_kernel_that_was_among_the_rest_has_no_rate_yet() -> None:
    rig = Rig(running(100, 1, kernels_count=2))
    rig.round()
    both = [kernel(300, 300_000_000), kernel(50, 1_000_000, "late", 2)]
    outcome = rig.round(running(350, 6, kernels=both, kernels_count=2))
    assert "launches_per_s" in (entity(outcome, f"Kernel({SERVER_ID},late)").unknown or {})
    assert entity(outcome, GEMM).metrics["launches_per_s"] == 40


# --- several sessions, many kernels ----------------------------------------------------------------------------------


def test_kernels_of_two_sessions_of_a_process_are_added_up() -> None:
    rig = Rig(running(100, 1), msgspec.structs.replace(running(50, 1), session_id="t"))
    rig.round()
    outcome = rig.round(running(200, 6), msgspec.structs.replace(running(75, 6), session_id="t"))
    gemm = entity(outcome, GEMM)
    assert (gemm.metrics["launches_count"], gemm.metrics["launches_per_s"]) == (275, 25)
    assert "p50_us" in (gemm.unknown or {})
    assert sum(node.id == GEMM for node in outcome.nodes) == 1
    assert owners(outcome, "s") == owners(outcome, "t") == [SERVER_ID]


def test_what_is_told_in_sum_only_is_noted() -> None:
    many = running(100, 1, kernels=[kernel(60, 50_000_000)], kernels_count=9, streams_count=3, scopes_count=5)
    outcome = Rig(many).round()
    metrics = entity(outcome, "Session(s)").metrics
    assert (metrics["other_kernels_count"], metrics["other_launches_count"]) == (8, 40)
    assert metrics["other_gpu_time_ms"] == 50
    assert {note.reason.split()[0]: note.count for note in outcome.notes} == {"kernels": 8, "streams": 3, "scopes": 5}


def test_of_many_sessions_the_last_ones_are_detailed() -> None:
    sessions = [msgspec.structs.replace(running(10, 1), session_id=f"s{n}", pid=None) for n in range(4)]
    outcome = Rig(*sessions, detailed_sessions=1).round()
    assert [node.id for node in outcome.nodes if node.kind == "Kernel"] == ["Kernel(Session(s3),gemm)"]
    assert outcome.notes[-1].count == 3 or outcome.notes[0].count == 3


def test_losses_and_lag_are_told() -> None:
    rig = Rig(session(losses=4))
    rig.reading.lost, rig.reading.dropped, rig.reading.lag_bytes = 3, 2, 10
    outcome = rig.round()
    assert sorted(outcome.losses.values()) == [2, 3]
    assert entity(outcome, "Session(s)").metrics["losses_count"] == 4
    assert any("lags behind" in note.reason for note in outcome.notes)


def test_where_nothing_changed_the_objects_are_those_of_the_last_round(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    one = running(100, 1)
    monkeypatch.setattr(SessionLogs, "taped", lambda self, live, kind: Reading([one], ["/logs"]))
    rounds = [rig.round(seconds=60) for _ in range(4)]
    assert all(a is b for a, b in zip(rounds[2].nodes, rounds[3].nodes, strict=True))
    assert all(a is b for a, b in zip(rounds[2].edges, rounds[3].edges, strict=True))
    assert rounds[1].nodes[0] is not rounds[0].nodes[0]


# --- its end ---------------------------------------------------------------------------------------------------------


def test_an_ended_session_stays_for_a_while() -> None:
    rig = Rig(session(), keep_ended_s=60)
    assert entity(rig.round(), "Session(s)").attributes["state"] == "live"
    ended = session(end="shutdown", end_ns=BEGAN_NS + 10 * SECOND)
    found = entity(rig.round(ended), "Session(s)")
    assert found.attributes["state"] == "ended: shutdown" and found.attributes["ended"].startswith(
        "2023-11-14T22:15:10"
    )
    assert entity(rig.round(seconds=50), "Session(s)")
    assert rig.round(seconds=15).nodes == []
    assert rig.round().nodes == []


def test_the_process_ends_without_a_word() -> None:
    rig = Rig(running(100, 1), machine=FakeMachine(rich_machine().copy()), keep_ended_s=60)
    assert owners(rig.round()) == [SERVER_ID]
    rig.machine.fs.remove(f"/proc/{SERVER}")
    outcome = rig.round()
    assert entity(outcome, "Session(s)").attributes["state"] == "ended: process gone"
    assert owners(outcome) == [] and SERVER_ID not in outcome.graph.nodes
    assert edge_of(outcome, "Launch", "Session(s)", GEMM)  # the kernels are still those of that process
    assert rig.round(seconds=100).nodes == []


def test_the_pid_is_given_to_another() -> None:
    files = rich_machine().copy()
    rig = Rig(session(), machine=FakeMachine(files))
    rig.round()
    add_process(files, SERVER, "other", start=9999)
    assert owners(rig.round()) == []


@pytest.mark.parametrize(("writer", "state"), [("gone", "ended: writer gone"), ("unknown", "live"), ("alive", "live")])
def test_a_writer_that_is_no_process_of_ours(writer: str, state: str) -> None:
    rig = Rig()
    quiet = session(pid=99, writer=writer, read_ns=rig.machine.clock.wall_ns())
    assert entity(rig.round(quiet), "Session(s)").attributes["state"] == state
    outcome = rig.round(seconds=1000)
    assert (
        outcome.nodes == [] or writer == "alive" or entity(outcome, "Session(s)").attributes["state"] == "ended: silent"
    )


def test_a_session_that_is_over_goes_from_the_reader_too(tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "s"
    folder.mkdir(parents=True)
    (folder / "device.log").write_bytes(b'{"type":"shutdown","session_id":"s","ts_ns":1}\n')
    world = open_world("")
    collector = Sessions(SessionsSettings(folders=[str(tmp_path / "logs")], keep_ended_s=0, notify=False))
    world.begin_round(1)
    collector.observe(world)
    assert collector._live is not None and collector.seed().nodes == []
    collector.observe(world)
    assert collector._live.read().sessions == []
    collector.close()
    world.close()


# --- what is not there -----------------------------------------------------------------------------------------------


def test_without_folders_it_says_so(tmp_path: Path) -> None:
    collector = Sessions(SessionsSettings(folders=[str(tmp_path / "none")]))
    outcome = collect(collector, open_world(""), [])
    assert not outcome.ok and "no folder" in outcome.reason and "folders" in outcome.hint
    collector.close()


def test_without_folders_nothing_heavy_is_loaded(tmp_path: Path) -> None:
    """Most hosts have no such logs: they pay for no numpy."""
    code = f"""
import sys
from gpuflight.collectors.sessions import Sessions, SessionsSettings
from gpuflight.errors import SourceUnavailable
from gpuflight.sources.open import open_world
world = open_world()
world.begin_round(1)
try:
    Sessions(SessionsSettings(folders=[{str(tmp_path / "none")!r}])).observe(world)
except SourceUnavailable:
    print({{"numpy", "watchfiles", "gpuflight.events.live"}} & sys.modules.keys())
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.strip() == b"set()"


def test_without_numpy_it_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    outcome = collect(Sessions(SessionsSettings(folders=[str(tmp_path)])), open_world(""), [])
    assert not outcome.ok
    assert "numpy" in outcome.reason and outcome.hint == "pip install 'gpuflight[events]'"


def test_a_damaged_recording() -> None:
    rig = Rig()
    rig.machine.tape.answers["session_logs", "reading"] = b"\xc1"
    assert "makes no sense" in rig.round().reason


def test_names_that_are_long_or_odd() -> None:
    assert shown_name("a" * 300) != shown_name("a" * 301) and len(shown_name("a" * 300)) < 220
    assert shown_name("a\x1b[2J\nb") == "a\ufffd[2J\ufffdb"


def test_how_it_is_drawn() -> None:
    """The session in its process, streams in the session, kernels in their stream, each with its figures."""
    devices = [DeviceFacts(0, "GPU-x")]
    rig = Rig(busy_session(devices))
    rig.round()
    later = {"launches": 110, "busy_ns": 100_900_000, "device_latest_ns": BEGAN_NS + 5 * SECOND}
    outcome = rig.round(busy_session(devices, kernels=[kernel(110, 101_000_000)], **later))
    forest = Forest(outcome.graph, LayoutOptions())
    forest.build()
    items: dict[str, Item] = {item.id: item for item in walk(forest.root)}
    trail = []
    here: Item | None = items[f"Kernel({TRAINER_ID},gemm)"]
    while here is not None and here.kind != "Process":
        trail.append((here.kind, list(here.lines)))
        here = here.parent
    assert trail == [
        ("Kernel", ["20 /s · 2 % · mean 918 µs"]),
        ("Stream", []),
        ("Session", ["live · 20 /s · busy 2 %"]),
    ]


def test_a_session_says_which_rank_of_which_job_its_program_is() -> None:
    outcome = Rig(session()).round()
    (entity,) = [each for each in outcome.nodes if each.kind == "Session"]
    (process,) = [each for each in outcome.nodes if each.kind == "Process"]
    assert process.id.startswith(f"Process(pid={SERVER},")
    for told in (entity, process):
        facts = {name: told.attributes.get(name) for name in ("rank", "world_size", "local_rank", "job")}
        assert facts == {"rank": 0, "world_size": 2, "local_rank": 0, "job": "torchrun 10.0.0.1:29500"}
