"""Threads, ended processes, storage, pipes and queues: rows of the kernel as entities and edges; without a kernel."""

from __future__ import annotations

import os
import struct
from typing import Any

import pytest
from tests.fakes import kernel_rows as rows
from tests.fakes.collecting import COLLECTORS, Outcome, check, collect
from tests.fakes.kernel_rows import Rows
from tests.fakes.machine import FakeMachine, rich_machine
from tests.fakes.machine_answers import SERVER, TRAINER, WORKER

from gpuflight.collectors.base import Collector
from gpuflight.collectors.kernel_block import KernelBlock
from gpuflight.collectors.kernel_histograms import SLOTS, Histogram
from gpuflight.collectors.kernel_programs import UNKNOWN, Starts
from gpuflight.collectors.rates import FIRST_READING
from gpuflight.errors import SourceUnavailable
from gpuflight.sources.bpf.base import ProbeBackend, ProbeObject
from gpuflight.sources.bpf.libbpf import _refused
from gpuflight.sources.bpf.probes import Probes

KERNEL = sorted(name for name in COLLECTORS if name.startswith("kernel_"))
IPC_NAMESPACE = 4026531839
SECRET = "hUsH7xQ29vLm4Tz8"


def process(pid: int) -> str:
    return f"Process(pid={pid},start={1000 + pid})"


class Bench:
    """The machine in memory and one collector."""

    def __init__(self, name: str, **settings: Any) -> None:
        self.machine = FakeMachine(rich_machine())
        cls = COLLECTORS[name]
        self.collector: Collector = cls(cls.settings_class(**settings))
        self.answers = self.machine.tape.answers

    def maps(self, name: str, programs: tuple[str, ...], maps: dict[str, Rows], **more: Any) -> None:
        self.answers |= rows.probe_answers(name, programs, maps, **more)
        self.answers |= {
            ("bpf", f"{name} delete {which} {key.hex()}"): rows.packed(True) for which in maps for key, _ in maps[which]
        }

    def round(self, seconds: float = 1.0) -> Outcome:
        outcome = collect(self.collector, self.machine.next_round(seconds))
        check(outcome)
        return outcome


# --- in general ------------------------------------------------------------------------------------------------------


class Refusing(ProbeBackend):
    name = "libbpf"

    def available(self) -> None:
        raise SourceUnavailable("this kernel has no BTF", "a kernel with CONFIG_DEBUG_INFO_BTF")

    def load(self, name: str, **_: object) -> ProbeObject:  # type: ignore[override]
        raise AssertionError("it is not available")


@pytest.mark.parametrize("name", KERNEL)
def test_what_is_missing_is_one_reason_and_one_hint(name: str) -> None:
    bench = Bench(name, **({"system_calls": True} if name == "kernel_ipc" else {}))
    bench.machine.world.probes = Probes(backends=[Refusing()])
    for _ in range(3):
        outcome = bench.round()
        assert (outcome.ok, outcome.reason) == (False, "this kernel has no BTF")
        assert outcome.hint == "a kernel with CONFIG_DEBUG_INFO_BTF"


def test_an_event_that_the_kernel_lacks_is_named() -> None:
    """It is not the type information that is missing."""
    said = ["prog 'on_send': failed to find kernel BTF type ID of 'sock_send_length': -3", "failed to load object"]
    assert _refused("net", 3, said).reason == "this kernel has no event sock_send_length, which the probe net needs"
    assert "type information" in _refused("net", 3, ["Error loading vmlinux BTF: -3", *said]).reason


@pytest.mark.parametrize("name", KERNEL)
def test_probes_that_are_switched_off(name: str) -> None:
    bench = Bench(name, **({"system_calls": True} if name == "kernel_ipc" else {}))
    bench.machine.world.probes = Probes(backend="off")
    assert bench.round().reason == "probes are switched off"


def test_system_calls_are_watched_on_request_only() -> None:
    outcome = Bench("kernel_ipc").round()
    assert not outcome.ok and "was not asked for" in outcome.reason and "system_calls" in outcome.hint


def test_start_times_are_those_of_proc() -> None:
    """ns since boot, in whole clock ticks, rounded down as the kernel does it."""
    assert Starts(100).process_id(5, 12_345_678_901) == "Process(pid=5,start=1234)"
    assert Starts(1000).ticks(12_345_678_901) == 12_345


@pytest.mark.parametrize(
    "us, slot", [(0, 0), (1, 1), (2, 2), (3, 2), (4, 3), (1023, 10), (1024, 11), (2**40, SLOTS - 1)]
)
def test_slots_of_a_histogram(us: int, slot: int) -> None:
    found = Histogram.of(struct.unpack(f"={3 + SLOTS}Q", rows.histogram([us])))
    assert found.slots[slot] == 1 == sum(found.slots)
    low, high = (0, 1) if slot == 0 else (2 ** (slot - 1), 2**slot)
    assert low <= found.percentile_us(0.5) <= high


def test_percentiles_lie_in_the_slot_of_the_value() -> None:
    found = Histogram(100, 0, tuple([0, 50, 0, 0, 45, 0, 0, 0, 5] + [0] * (SLOTS - 9)))
    assert 1 <= found.percentile_us(0.5) <= 2
    assert 8 <= found.percentile_us(0.9) <= 16
    assert 128 <= found.percentile_us(0.99) <= 256
    assert found.percentile_us(1.0) == 256
    assert Histogram(0, 0, (0,) * SLOTS).percentile_us(0.5) == 0.0


# --- threads ---------------------------------------------------------------------------------------------------------


def threads(bench: Bench, *records: bytes) -> None:
    bench.maps("tasks", ("each_thread",), {})
    bench.answers["bpf", "tasks iterate each_thread"] = rows.packed(b"".join(records))


def test_threads_and_their_process() -> None:
    bench = Bench("kernel_sched")
    start = 1000 + TRAINER
    first = [rows.thread(TRAINER, TRAINER, start, (10**9, 10**6, 10, 1, 5, 0)),
             rows.thread(TRAINER, TRAINER + 1, start, (0, 0, 0, 0, 0, 0), start + 1)]  # fmt: skip
    threads(bench, *first)
    node = bench.round().graph.nodes[process(TRAINER)]
    assert not node.metrics and node.unknown is not None and node.unknown["run_delay_pct"] == FIRST_READING
    threads(bench, rows.thread(TRAINER, TRAINER, start, (10**9 + 3 * 10**8, 10**6 + 2 * 10**8, 14, 2, 9, 1)),
            rows.thread(TRAINER, TRAINER + 1, start, (10**8, 0, 6, 0, 0, 0), start + 1))  # fmt: skip
    graph = bench.round(2.0).graph
    assert graph.nodes[process(TRAINER)].metrics == {
        "run_delay_pct": 10.0,
        "context_switches_voluntary_per_s": 5.0,
        "context_switches_involuntary_per_s": 0.5,
        "minor_faults_per_s": 2.0,
        "major_faults_per_s": 0.5,
    }
    main = graph.nodes[f"Thread(tid={TRAINER},start={start})"].metrics
    assert (main["cpu_pct"], main["run_delay_pct"], main["off_cpu_pct"]) == (15.0, 10.0, 75.0)
    assert (process(TRAINER), f"Thread(tid={TRAINER + 1},start={start + 1})", "Own") in graph.edges


def test_a_process_of_one_thread_is_off_the_cpu_itself() -> None:
    bench = Bench("kernel_sched")
    start = 1000 + SERVER
    threads(bench, rows.thread(SERVER, SERVER, start, (0, 0, 0, 0, 0, 0)))
    bench.round()
    graph = bench.round().graph
    assert graph.nodes[process(SERVER)].metrics["off_cpu_pct"] == 100.0
    assert not [node for node in graph.nodes.values() if node.kind == "Thread"]


def test_threads_beyond_the_limit_are_counted_and_the_busiest_shown() -> None:
    bench = Bench("kernel_sched", max_threads=2)
    start = 1000 + TRAINER
    threads(bench, *(rows.thread(TRAINER, TRAINER + n, start, (0,) * 6, start + n) for n in range(5)))
    bench.round()
    threads(bench, *(rows.thread(TRAINER, TRAINER + n, start, (n * 10**6, 0, 0, 0, 0, 0), start + n) for n in range(5)))
    outcome = bench.round()
    assert outcome.losses == {"threads beyond max_threads": 3}
    shown = sorted(node.id for node in outcome.nodes if node.kind == "Thread")
    assert shown == [f"Thread(tid={TRAINER + n},start={start + n})" for n in (3, 4)]


def test_a_reused_thread_id_starts_anew() -> None:
    bench = Bench("kernel_sched")
    start, tid = 1000 + SERVER, SERVER + 7
    main = rows.thread(SERVER, SERVER, start, (0,) * 6)
    threads(bench, main, rows.thread(SERVER, tid, start, (0, 0, 900, 0, 0, 0), start + 1))
    bench.round()
    threads(bench, main, rows.thread(SERVER, tid, start, (0, 0, 4, 0, 0, 0), start + 50))
    graph = bench.round().graph
    assert graph.nodes[f"Thread(tid={tid},start={start + 50})"].metrics["context_switches_voluntary_per_s"] == 4
    assert f"Thread(tid={tid},start={start + 1})" not in graph.nodes


def test_a_process_that_proc_does_not_show_is_left_out() -> None:
    """It ended between the two looks."""
    bench = Bench("kernel_sched")
    threads(bench, rows.thread(77, 77, 5, (0,) * 6), rows.thread(SERVER, SERVER, 1000 + SERVER, (0,) * 6))
    assert bench.round().ids[0] == {process(SERVER)}


def test_a_kernel_that_counts_no_delay_says_so() -> None:
    bench = Bench("kernel_sched")
    for ran in (0, 10**8):
        threads(bench, rows.thread(SERVER, SERVER, 1000 + SERVER, (ran, UNKNOWN, 0, 0, 0, 0)))
        node = bench.round().graph.nodes[process(SERVER)]
    assert (node.unknown or {}).keys() == {"run_delay_pct", "off_cpu_pct"}
    assert not {"run_delay_pct", "off_cpu_pct"} & node.metrics.keys() and "minor_faults_per_s" in node.metrics


def test_single_waits() -> None:
    bench = Bench("kernel_sched", latency=True)
    start = 1000 + SERVER
    threads(bench, rows.thread(SERVER, SERVER, start, (0,) * 6))
    programs = ("on_wakeup", "on_wakeup_new", "on_switch")
    bench.maps("sched", programs, {"waits": [rows.sched_waits(SERVER, start, [5] * 4, [900])]})
    bench.round()
    gone = rows.sched_waits(77, 5, [1], [])
    bench.maps("sched", programs, {"waits": [rows.sched_waits(SERVER, start, [5] * 4 + [70] * 2, [900] * 3), gone]})
    node = bench.round().graph.nodes[process(SERVER)]
    assert node.attributes["run_queue_wait_us_log2"] == [0] * 7 + [2]
    assert sum(node.attributes["sleep_us_log2"]) == 2
    assert node.metrics["run_queue_wait_mean_ms"] == 0.07
    assert bench.machine.tape.asked["bpf", f"sched delete waits {gone[0].hex()}"] == 1


def test_without_the_programs_of_single_waits_the_sums_stand() -> None:
    bench = Bench("kernel_sched", latency=True)
    threads(bench, rows.thread(SERVER, SERVER, 1000 + SERVER, (0,) * 6))
    outcome = bench.round()
    assert outcome.ok and process(SERVER) in outcome.graph.nodes
    assert [note.reason for note in outcome.notes] == ["this machine has no bpf; single waits are not measured"]


# --- ended processes -------------------------------------------------------------------------------------------------


def events(bench: Bench, *records: bytes) -> None:
    bench.answers["bpf", "process drain events"] = rows.drained(bench.machine.clock, 200.0, list(records))


def test_ended_processes() -> None:
    bench = Bench("kernel_process")
    parent = (SERVER, 1000 + SERVER)
    events(
        bench,
        rows.executed(9001, 20_000, [b"tool", f"--password={SECRET}".encode()], parent),
        rows.ended(9001, 20_000, 3 << 8, parent, lifetime_ms=12.5, used=(2_500_000, 7, 1, 4096, 512), uid=1000),
        rows.ended(9002, 20_001, 0x8B, (9001, 20_000)),
        rows.ended(9003, 20_002, 0, (4, 4), used=(0, 1, 0, 0, 0)),
    )
    outcome = bench.round()
    graph = outcome.graph
    first = graph.nodes["Process(pid=9001,start=20000)"]
    assert first.attributes["exit_code"] == 3 and first.attributes["cmdline"] == "tool --password=***"
    assert first.attributes["ended"] is True and first.attributes["uid"] == 1000
    assert first.metrics == {
        "lifetime_ms": 12.5,
        "cpu_ms": 2.5,
        "minor_faults_count": 7,
        "major_faults_count": 1,
        "io_read_bytes": 4096,
        "io_write_bytes": 512,
    }
    second = graph.nodes["Process(pid=9002,start=20001)"]
    assert second.attributes["exit_signal"] == 11 and second.attributes["core_dumped"] is True
    assert "exit_code" not in second.attributes and "cmdline" in (second.unknown or {})
    assert (process(SERVER), first.id, "Own") in graph.edges and (first.id, second.id, "Own") in graph.edges
    third = graph.nodes["Process(pid=9003,start=20002)"]
    assert "cpu_ms" in (third.unknown or {}) and "cpu_ms" not in third.metrics, "not counted yet is not 0"
    assert ("Host(node1)", third.id, "Host") in graph.edges, "its parent is nowhere to be seen"
    assert SECRET not in repr(outcome)


def test_two_records_of_one_end_are_one_process() -> None:
    """Its last two threads went together, and both were the last."""
    bench = Bench("kernel_process")
    events(bench, rows.executed(9001, 20_000, [b"tool"]), rows.ended(9001, 20_000, 0, used=(1, 1, 0, 0, 0)),
           rows.ended(9001, 20_000, 5 << 8, used=(2_000_000, 1, 0, UNKNOWN, UNKNOWN)))  # fmt: skip
    [node] = [node for node in bench.round().nodes if node.attributes.get("ended")]
    assert node.attributes["exit_code"] == 5 and node.attributes["cmdline"] == "tool"
    assert node.metrics["cpu_ms"] == 2.0
    assert {"io_read_bytes", "io_write_bytes"} == (node.unknown or {}).keys(), "what the kernel does not count is not 0"


def test_starts_and_ends_per_second_stand_at_the_host() -> None:
    bench = Bench("kernel_process")
    events(bench)
    bench.round()
    events(bench, *(rows.executed(9001 + n, 20_000, [b"x"]) for n in range(6)), rows.ended(9001, 20_000, 0))
    host = next(node for node in bench.round().nodes if node.kind == "Host" and node.metrics)
    assert host.metrics == {"program_starts_per_s": 6.0, "process_ends_per_s": 1.0}


def test_of_too_many_those_that_lived_longest_are_shown() -> None:
    bench = Bench("kernel_process", ended_limit=2)
    events(bench, *(rows.ended(9000 + n, 20_000, 0, lifetime_ms=float(n)) for n in range(5)))
    outcome = bench.round()
    assert outcome.losses == {"ended processes beyond ended_limit": 3}
    assert [node.id for node in outcome.nodes if node.attributes.get("ended")] == [
        "Process(pid=9004,start=20000)",
        "Process(pid=9003,start=20000)",
    ]


def test_a_program_is_that_of_the_last_exec_and_says_if_it_was_cut() -> None:
    bench = Bench("kernel_process")
    events(bench, rows.executed(9001, 20_000, [b"first"]), rows.executed(9001, 20_000, [b"second"], length=5000),
           rows.ended(9001, 20_000, 0))  # fmt: skip
    node = bench.round().graph.nodes["Process(pid=9001,start=20000)"]
    assert node.attributes["cmdline"] == "second" and node.attributes["cmdline_cut"] is True


def test_records_that_make_no_sense_and_lost_ones_are_counted() -> None:
    bench = Bench("kernel_process")
    events(bench, b"\x02\0\0\0", rows.ended(9001, 20_000, 0)[:70])
    bench.answers["bpf", "process lost events"] = rows.packed(9)
    assert bench.round().losses == {
        "records of the kernel that make no sense": 2,
        "records that found no room": 9,
    }


# --- storage ---------------------------------------------------------------------------------------------------------


def test_block_requests() -> None:
    bench = Bench("kernel_block")
    start = 1000 + TRAINER
    programs = ("on_io_start", "on_io_sent", "on_io_done")
    bench.maps("block", programs, {"io": [rows.block(TRAINER, start, 0, b"nvme0n1", 4096, [80])]})
    edge = bench.round().graph.edges[process(TRAINER), "Disk(nvme0n1)", "Access"]
    assert (edge.unknown or {})["reads_per_s"] == FIRST_READING
    io = [
        rows.block(TRAINER, start, 0, b"nvme0n1", 4096 + 8192, [80, 500, 500]),
        rows.block(TRAINER, start, 1, b"nvme0n1", 1000, [3000]),
        rows.block(SERVER, 1000 + SERVER, 0, b"nvme0n1", 512, [90]),
        rows.block(0, 0, 1, b"nvme0n1", 512, [90]),
    ]
    bench.maps("block", programs, {"io": io})
    graph = bench.round(2.0).graph
    edge = graph.edges[process(TRAINER), "Disk(nvme0n1)", "Access"]
    assert (edge.metrics["reads_per_s"], edge.metrics["read_bytes_per_s"]) == (1.0, 4096)
    assert (edge.metrics["writes_per_s"], edge.metrics["write_bytes_per_s"]) == (0.5, 500)
    assert edge.metrics["read_latency_mean_ms"] == 0.5 and edge.attributes["read_latency_us_log2"] == [0] * 9 + [2]
    disk = graph.nodes["Disk(nvme0n1)"]
    assert sum(disk.attributes["read_latency_us_log2"]) == 3, "of all processes"
    assert sum(disk.attributes["write_latency_us_log2"]) == 2, "of those that cannot be named too"


def test_kernels_without_events_of_whole_requests_time_the_device() -> None:
    bench = Bench("kernel_block")
    del bench.answers["bpf", "block attach on_io_start"]
    io = [rows.block(TRAINER, 1000 + TRAINER, 0, b"sda", 4096, [80])]
    bench.maps("block", ("on_issue", "on_complete"), {"io": io})
    for _ in range(2):
        assert (process(TRAINER), "Disk(sda)", "Access") in bench.round().graph.edges
    assert isinstance(bench.collector, KernelBlock) and set(bench.collector.programs) == {"on_issue", "on_complete"}


def test_uses_that_rest_are_dropped() -> None:
    bench = Bench("kernel_block")
    io = [rows.block(TRAINER, 1000 + TRAINER, 0, b"sda", 4096, [80])]
    bench.maps("block", ("on_io_start", "on_io_sent", "on_io_done"), {"io": io})
    for _ in range(25):
        bench.round()
    assert bench.machine.tape.asked["bpf", f"block delete io {io[0][0].hex()}"] == 1


# --- pipes, queues, semaphores ---------------------------------------------------------------------------------------


def ipc(bench: Bench, *found: tuple[bytes, bytes]) -> Outcome:
    bench.maps("ipc", ("on_return",), {"ipc": list(found)})
    return bench.round()


def use(
    kind: int, number: int, scope: int, pid: int, read: tuple[int, int], written: tuple[int, int]
) -> tuple[bytes, bytes]:
    return rows.ipc(kind, number, scope, pid, 1000 + pid, read, written)


def test_pipes_queues_and_semaphores() -> None:
    bench = Bench("kernel_ipc", system_calls=True)
    ipc(bench)
    graph = ipc(
        bench,
        use(1, 555, 0, SERVER, (0, 0), (1000, 4)),
        use(1, 555, 0, WORKER, (600, 2), (0, 0)),
        use(1, 556, 0, WORKER, (5, 1), (5, 1)),
        use(3, 3, IPC_NAMESPACE, SERVER, (0, 0), (128, 2)),
        use(4, 11, IPC_NAMESPACE, WORKER, (0, 0), (0, 5)),
        use(3, 9, 1, WORKER, (0, 0), (1, 1)),
        use(2, 404, 26, WORKER, (0, 0), (1, 1)),
    ).graph
    assert graph.edges[process(SERVER), "Pipe(ino=555)", "SendTo"].metrics == {"bytes_per_s": 1000, "writes_per_s": 4}
    assert graph.edges["Pipe(ino=555)", process(WORKER), "SendTo"].metrics == {"bytes_per_s": 600, "reads_per_s": 2}
    assert "Pipe(ino=556)" not in graph.nodes, "within one process"
    queue = graph.edges[process(SERVER), "MessageQueue(sysv,3)", "Access"]
    assert queue.attributes["ends"] == "w" and queue.metrics["written_bytes_per_s"] == 128
    assert graph.edges[process(WORKER), "Semaphore(sysv,11)", "Access"].metrics == {"operations_per_s": 5}
    assert bench.collector.losses == {
        "System V objects of other ipc namespaces": 1,
        "POSIX message queues that were gone, or not open to us, when their traffic was read": 1,
    }


def test_a_posix_queue_has_the_id_that_the_snapshot_gives_it() -> None:
    bench = Bench("kernel_ipc", system_calls=True)
    known = bench.machine.next_round().ipc.posix_queues()
    (device, inode), queue = next(iter(known.items()))
    scope = os.major(device) << 20 | os.minor(device)
    graph = ipc(bench, use(2, inode, scope, SERVER, (70, 1), (0, 0))).graph
    assert (process(SERVER), f"MessageQueue(posix,{queue.key})", "Access") in graph.edges
