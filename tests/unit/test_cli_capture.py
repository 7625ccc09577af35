"""The parts of a capture, each alone: pacing of rounds, the run folder, folding coverage, the summary."""

from __future__ import annotations

import io
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zstandard

import gpuflight.cli.rounds as rounds_module
from gpuflight.cli.coverage import CoverageFold
from gpuflight.cli.output import console
from gpuflight.cli.rounds import EarlyEnd, run_rounds
from gpuflight.cli.runfolder import FILES, RunFolder, default_folder
from gpuflight.cli.summary import Summary, build, render
from gpuflight.core.lockfile import AlreadyRunning
from gpuflight.errors import InputError
from gpuflight.graph import Graph, edges, nodes
from gpuflight.graph.diff import diff
from gpuflight.graph.load import load_graph, read_rounds
from gpuflight.rounds import Coverage, Environment, Note, ProgramTime, Round


def make_round(number: int, graph: Graph | None = None, before: Graph | None = None) -> Round:
    graph = graph if graph is not None else Graph([nodes.Process(pid=number, start=1)])
    return Round(
        number=number,
        time_ns=1_700_000_000_000_000_000 + number * 1_000_000_000,
        duration_s=0.1,
        graph=graph,
        diff=diff(before or Graph(), graph),
        coverage=[Coverage(collector="process_tree", status="ok")],
        env=Environment(hostname="h"),
    )


class FakeTime:
    """Time that passes only by waiting and by rounds, each of which takes ``round_s``."""

    def __init__(self, round_s: float = 0.0) -> None:
        self.now_s = 100.0
        self.round_s = round_s
        self.began_at: list[float] = []

    def monotonic(self) -> float:
        return self.now_s


class FakeEarlyEnd(EarlyEnd):
    """``asked`` whose waiting moves the time, and which is set at a given moment."""

    def __init__(self, time: FakeTime, at_s: float | None = None) -> None:
        super().__init__()
        outer = self

        class Asked:
            def is_set(self) -> bool:
                return at_s is not None and time.now_s - 100.0 >= at_s

            def wait(self, timeout_s: float) -> bool:
                time.now_s += timeout_s
                return outer.asked.is_set()

        self.asked: Any = Asked()


class FakeController:
    def __init__(self, time: FakeTime, interval_s: float, recorded_s: list[float] | None = None) -> None:
        self.time = time
        self.number = 0
        self.settings = SimpleNamespace(interval_s=interval_s)
        self.recorded_s = recorded_s
        tape = SimpleNamespace(rounds=list(range(1, len(recorded_s) + 1))) if recorded_s is not None else None
        self.world = SimpleNamespace(tape=tape, clock=SimpleNamespace(monotonic_s=self._recorded_now))

    def _recorded_now(self) -> float:
        assert self.recorded_s is not None
        return self.recorded_s[self.number - 1]

    def run_round(self) -> Round:
        self.number += 1
        self.time.began_at.append(round(self.time.now_s - 100.0, 3))
        self.time.now_s += self.time.round_s
        return make_round(self.number)


@pytest.mark.parametrize(
    ("seconds", "interval_s", "round_s", "expected"),
    [
        (10, 5, 0.0, [0, 5, 10]),
        (10, 4, 0.1, [0, 4, 8, 10]),
        (3, 5, 0.1, [0, 3]),
        (10, 5, 7.0, [0, 7, 14]),
        (1, 0.25, 0.0, [0, 0.25, 0.5, 0.75, 1]),
        (0.01, 5, 0.0, [0]),
        (2, 2, 0.5, [0, 2]),
    ],
)
def test_rounds_begin_at_the_interval_and_the_last_one_at_the_end(
    seconds: float, interval_s: float, round_s: float, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    time = FakeTime(round_s)
    monkeypatch.setattr(rounds_module.time, "monotonic", time.monotonic)
    controller: Any = FakeController(time, interval_s)
    done = list(run_rounds(controller, seconds=seconds, early_end=FakeEarlyEnd(time)))
    assert time.began_at == expected
    assert [completed.number for completed in done] == list(range(1, len(expected) + 1))


def test_a_number_of_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    time = FakeTime()
    monkeypatch.setattr(rounds_module.time, "monotonic", time.monotonic)
    controller: Any = FakeController(time, 2.0)
    assert len(list(run_rounds(controller, seconds=None, rounds=3, early_end=FakeEarlyEnd(time)))) == 3
    assert time.began_at == [0, 2, 4]


def test_asked_to_end_while_waiting_takes_no_further_round(monkeypatch: pytest.MonkeyPatch) -> None:
    time = FakeTime()
    monkeypatch.setattr(rounds_module.time, "monotonic", time.monotonic)
    controller: Any = FakeController(time, 5.0)
    ticks: list[float] = []
    done = list(run_rounds(controller, seconds=60, early_end=FakeEarlyEnd(time, at_s=7.0), tick=ticks.append))
    assert len(done) == 2
    assert ticks == sorted(ticks)
    assert len(ticks) > 20


def test_a_recording_is_run_through_by_its_own_clock() -> None:
    for seconds, expected in ((None, 4), (5.0, 2), (100.0, 4)):
        controller: Any = FakeController(FakeTime(), 1.0, recorded_s=[50.0, 55.0, 60.0, 65.0])
        assert len(list(run_rounds(controller, seconds=seconds, early_end=EarlyEnd()))) == expected


def test_first_signal_asks_second_interrupts() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with EarlyEnd() as early_end:
        signal.raise_signal(signal.SIGTERM)
        assert early_end.asked.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


# --- run folder -----------------------------------------------------------------------------------------------------


def capture(folder: RunFolder, count: int = 3) -> list[Round]:
    folder.open()
    before = Graph()
    done = []
    for number in range(1, count + 1):
        graph = Graph(
            [nodes.Process(pid=1, start=1, metrics={"cpu_pct": float(number)}), nodes.Process(pid=number + 1, start=1)]
        )
        completed = make_round(number, graph, before)
        folder.add(completed)
        done.append(completed)
        before = graph
    folder.finish(done[-1], {"rounds": count}, {"interval_s": 5.0})
    return done


def test_run_folder_holds_the_five_files(tmp_path: Path) -> None:
    done = capture(RunFolder(str(tmp_path / "a" / "b")))
    folder = tmp_path / "a" / "b"
    assert sorted(os.listdir(folder)) == sorted(FILES)
    assert load_graph(folder).graph == done[-1].graph
    assert [loaded.graph for loaded in read_rounds(folder / "rounds.jsonl.zst")] == [item.graph for item in done]
    assert json.loads((folder / "coverage.json").read_text()) == {"rounds": 3}
    assert json.loads((folder / "config.json").read_text()) == {"interval_s": 5.0}
    assert "Process" in (folder / "describe.txt").read_text()


def test_the_stream_is_one_whole_graph_and_then_differences(tmp_path: Path) -> None:
    capture(RunFolder(str(tmp_path / "run")))
    data = zstandard.ZstdDecompressor().stream_reader((tmp_path / "run" / "rounds.jsonl.zst").read_bytes()).read()
    lines = [json.loads(line) for line in data.splitlines()]
    assert ["nodes" in line for line in lines] == [True, False, False]
    assert lines[1]["type"] == "diff"


def test_what_a_killed_capture_left_can_be_read(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path / "run"))
    folder.open()
    first = make_round(1)
    folder.add(first)
    folder.add(make_round(2, Graph([nodes.Process(pid=2, start=1)]), first.graph))
    left = tmp_path / "run" / "rounds.jsonl.zst.part"
    copy = tmp_path / "rounds.jsonl.zst"
    copy.write_bytes(left.read_bytes())
    assert [loaded.round_number for loaded in read_rounds(copy)] == [1, 2]


def test_a_folder_with_anything_in_it_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    (tmp_path / "graph.json").write_text("mine too")
    with pytest.raises(InputError, match="not empty"):
        RunFolder(str(tmp_path)).open()
    assert sorted(os.listdir(tmp_path)) == ["graph.json", "mine.txt"]
    assert (tmp_path / "graph.json").read_text() == "mine too"


def test_force_replaces_our_files_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "graph.json").write_text("precious")
    (tmp_path / "graph.json").write_text("old")
    capture(RunFolder(str(tmp_path), force=True))
    assert (tmp_path / "mine.txt").read_text() == "precious"
    assert (tmp_path / "sub" / "graph.json").read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == sorted([*FILES, "mine.txt", "sub"])
    assert load_graph(tmp_path).round_number == 3


def test_an_empty_folder_is_fine_and_a_file_is_not(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    capture(RunFolder(str(tmp_path / "empty")))
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError):
            RunFolder(str(path)).open()
    assert (tmp_path / "file").read_text() == "x"


def test_abandoning_without_a_round_leaves_no_trace(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path / "run"))
    folder.open()
    folder.abandon()
    assert not (tmp_path / "run").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "x").write_text("x")
    folder = RunFolder(str(tmp_path / "mine"), force=True)
    folder.open()
    folder.abandon()
    assert os.listdir(tmp_path / "mine") == ["x"]


def test_abandoning_after_a_round_keeps_the_stream(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path / "run"))
    folder.open()
    folder.add(make_round(1))
    folder.abandon()
    assert os.listdir(tmp_path / "run") == ["rounds.jsonl.zst.part"]


def test_default_folder_never_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = default_folder(0.0)
    (tmp_path / first).mkdir()
    second = default_folder(0.0)
    assert second == f"{first}-2"


# --- coverage and summary -------------------------------------------------------------------------------------------


def test_what_programs_in_the_kernel_cost_adds_up() -> None:
    fold = CoverageFold()
    for runs in (10, 5):
        spent = [ProgramTime(program="on_send", runs_count=runs, run_ms=0.25)]
        fold.add([Coverage(collector="kernel_net", status="ok", programs=spent)])
    [line] = fold.summary()
    assert line.programs == [ProgramTime(program="on_send", runs_count=15, run_ms=0.5)]


def test_coverage_folds_over_rounds() -> None:
    fold = CoverageFold()
    fold.add(
        [Coverage(collector="a", status="ok", wall_ms=10, cpu_ms=2, losses={"vanished processes": 1}, nodes_count=5)]
    )
    fold.add([Coverage(collector="a", status="failed", reason="broke", hint="fix", wall_ms=30, cpu_ms=4)])
    fold.add(
        [
            Coverage(
                collector="a", status="ok", wall_ms=20, cpu_ms=3, losses={"vanished processes": 2},
                notes=[Note(reason="n", count=2)], nodes_count=7,
            )
        ]
    )  # fmt: skip
    fold.add(
        [Coverage(collector="a", status="ok", wall_ms=20, cpu_ms=3, notes=[Note(reason="n", count=1)], nodes_count=6)]
    )
    [line] = fold.summary()
    assert (line.status, line.reason, line.hint) == ("ok", "broke", "fix")
    assert line.rounds == {"ok": 3, "failed": 1}
    assert (line.wall_ms, line.wall_ms_max, line.cpu_ms, line.nodes_count) == (20, 30, 3, 6)
    assert line.losses == {"vanished processes": 3}
    assert [(note.reason, note.count) for note in line.notes] == [("n", 2)]


def machine() -> Graph:
    """Two GPUs, one of them lost and one with MIG; three processes, two of which talk over a pipe."""
    content: list[Any] = [
        nodes.Host(
            hostname="box", attributes={"kernel": "6.1"}, metrics={"cpus_count": 8, "memory_total_bytes": 1 << 34}
        ),
        nodes.Process(
            pid=10, start=1, attributes={"name": "train\x1b[31m"}, metrics={"cpu_pct": 250.0, "rss_bytes": 1 << 30}
        ),
        nodes.Process(pid=11, start=2, attributes={"name": "loader"}, metrics={"cpu_pct": 50.0}),
        nodes.Process(pid=12, start=3, attributes={"name": "idle"}, metrics={"cpu_pct": 0.0}),
        nodes.Process(pid=13, start=3, attributes={"name": "gone", "ended_round": 3}, metrics={"cpu_pct": 99.0}),
        nodes.GPU(
            uuid="GPU-a",
            attributes={"index": 0, "name": "H100", "state": "ok"},
            metrics={
                "sm_util_pct": 97.0,
                "memory_used_bytes": 1 << 30,
                "memory_total_bytes": 80 << 30,
                "power_watts": 512.0,
            },
            unknown={"temperature_celsius": "not supported"},
        ),
        nodes.GPU(uuid="GPU-b", attributes={"index": 1, "name": "H100", "state": "lost"}),
        nodes.MigInstance(uuid="MIG-1"),
        nodes.Numa(index=0),
        nodes.Numa(index=1),
        nodes.Pipe(inode=5),
        nodes.Mount(path="/data"),
    ]
    wires: list[Any] = [
        edges.Access("Process(pid=10,start=1)", "GPU(uuid=GPU-a)", {}, {"memory_used_bytes": 3 << 28}),
        edges.Access("Process(pid=11,start=2)", "MigInstance(uuid=MIG-1)", {}, {"memory_used_bytes": 1 << 20}),
        edges.Access("Process(pid=13,start=3)", "GPU(uuid=GPU-a)", {}, {}),
        edges.Belong("MigInstance(uuid=MIG-1)", "GPU(uuid=GPU-a)"),
        edges.Affinity("GPU(uuid=GPU-a)", "Numa(1)"),
        edges.NumaAccess("Process(pid=10,start=1)", "Numa(0)", {}, {"resident_bytes": 10}),
        edges.NumaAccess("Process(pid=10,start=1)", "Numa(1)", {}, {"resident_bytes": 90}),
        edges.SendTo("Process(pid=11,start=2)", "Pipe(ino=5)"),
        edges.SendTo("Pipe(ino=5)", "Process(pid=10,start=1)"),
        edges.Access("Process(pid=11,start=2)", "Mount(/data)"),
    ]
    return Graph(content, wires)


def summary_of(graph: Graph, coverage: list[Coverage]) -> Summary:
    fold = CoverageFold()
    fold.add(coverage)
    return build(graph, fold.summary(), Environment(hostname="box", kernel="6.1"))


COVERAGE = [
    Coverage(collector="nvml", status="ok", losses={"vanished processes": 2}),
    Coverage(collector="rdma", status="skipped", reason="no RDMA device\x1b"),
    Coverage(
        collector="sockets", status="ok", notes=[Note(reason="foreign sockets", hint="grant CAP_NET_ADMIN", count=3)]
    ),
]


def test_summary_data() -> None:
    summary = summary_of(machine(), COVERAGE)
    first, second = summary.devices
    assert (first.index, first.numa, first.util_pct, first.temperature_celsius) == (0, [1], 97.0, None)
    assert [(process.pid, process.memory_used_bytes, process.numa) for process in first.processes] == [
        (10, 3 << 28, [1, 0]),
        (11, 1 << 20, []),
    ]
    assert (second.state, second.processes) == ("lost", [])
    assert [process.pid for process in summary.busy] == [10, 11], "not who is idle, not who has ended"
    [talk] = summary.talks
    assert (talk.source_name, talk.target_name, talk.directed, talk.kinds) == (
        "loader (11)",
        "train\x1b[31m (10)",
        True,
        ["Pipe"],
    )
    assert [(item.collector, item.status, item.count) for item in summary.unseen] == [
        ("rdma", "skipped", 1),
        ("sockets", "partial", 3),
    ]
    assert summary.losses == {"nvml": {"vanished processes": 2}}
    assert summary.counts["Process"] == 3


def shown(summary: Summary, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("COLUMNS", raising=False)
    stream = io.StringIO()
    render(summary, console(stream))
    return stream.getvalue()


def test_summary_on_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(summary_of(machine(), COVERAGE), monkeypatch)
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    for expected in (
        "box · kernel 6.1 · 8 CPUs · memory 16 GiB",
        "97 %",
        "1 GiB of 80 GiB",
        "512 W",
        "lost",
        "train\\x1b[31m (10)",
        "768 MiB",
        "1, 0",
        "250 %",
        "loader (11)",
        "1 Pipe",
        "rdma, skipped: no RDMA device\\x1b",
        "sockets, partial: foreign sockets (3×)",
        "→ grant CAP_NET_ADMIN",
        "nvml lost: 2 vanished processes",
    ):
        assert expected in text, expected


def test_summary_says_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    coverage = [Coverage(collector="nvml", status="skipped", reason="no NVML library", hint="install the driver")]
    text = shown(summary_of(Graph([nodes.Host(hostname="box")]), coverage), monkeypatch)
    assert "none seen: no NVML library" in text
    assert "→ install the driver" in text


def test_summary_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(summary_of(Graph(), []), monkeypatch)
    assert "nothing seen" in text
    summary = summary_of(Graph(), [])
    summary.truncated_by = "nodes"
    assert "cut short: nodes" in shown(summary, monkeypatch)


def test_summary_shortens_long_lists_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Graph(nodes.Process(pid=pid, start=1, metrics={"cpu_pct": float(pid)}) for pid in range(1, 31))
    text = shown(summary_of(graph, []), monkeypatch)
    assert "… and 22 more that used the CPU" in text


def test_a_second_capture_into_the_same_folder_is_refused_and_touches_nothing(tmp_path: Path) -> None:
    first = RunFolder(str(tmp_path / "run"))
    first.open()
    before = {entry.name: entry.stat().st_mtime_ns for entry in (tmp_path / "run").iterdir()}
    with pytest.raises(AlreadyRunning, match=rf"pid {os.getpid()}"):
        RunFolder(str(tmp_path / "run"), force=True).open()
    assert {entry.name: entry.stat().st_mtime_ns for entry in (tmp_path / "run").iterdir()} == before
    first.abandon()
    assert not (tmp_path / "run").exists()
