"""The first four subscribers, one by one, and the rules that hold for every registered one."""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from pydantic import ValidationError
from tests.services.sinks import settings_of

from gpuflight import round_codec
from gpuflight.errors import DeliveryError
from gpuflight.graph import Graph, nodes
from gpuflight.graph.codec import decode_diff, decode_graph
from gpuflight.graph.diff import apply, diff
from gpuflight.registry import plugins
from gpuflight.rounds import Coverage, Environment, OwnCost, Round
from gpuflight.subscribers import atomic
from gpuflight.subscribers.base import Subscriber, SubscriberSettings
from gpuflight.subscribers.console import Console, ConsoleSettings
from gpuflight.subscribers.encoding import encode_diff_line, encode_round
from gpuflight.subscribers.file_json import FileJson, FileJsonSettings
from gpuflight.subscribers.file_text import FileText, FileTextSettings
from gpuflight.subscribers.memory import Memory, MemorySettings


def make_rounds(count: int) -> list[Round]:
    rounds = []
    before = Graph()
    for number in range(1, count + 1):
        graph = Graph(
            [
                nodes.Process(pid=1, start=1, attributes={"name": "init"}),
                nodes.Process(pid=number + 1, start=2, attributes={"name": 'a "b" </script>\udcff'}),
            ]
        )
        rounds.append(
            Round(
                number=number,
                time_ns=1_700_000_000_000_000_000 + number,
                duration_s=0.25,
                graph=graph,
                diff=diff(before, graph),
                coverage=[Coverage(collector="gpu", status="skipped", reason="no NVML")],
                env=Environment(hostname="h"),
            )
        )
        before = graph
    return rounds


ROUNDS = make_rounds(4)


every_subscriber = pytest.mark.parametrize("name", sorted(plugins(Subscriber)))


@every_subscriber
def test_conformance_constructing_touches_nothing(name: str, tmp_path: Path) -> None:
    cls = plugins(Subscriber)[name]
    settings = settings_of(cls, tmp_path)
    gc.collect()  # what earlier tests left must not end, and be missed, in between
    before = (set(os.listdir("/proc/self/task")), set(os.listdir("/proc/self/fd")))
    subscriber = cls(settings)
    threads, files = set(os.listdir("/proc/self/task")), set(os.listdir("/proc/self/fd"))
    assert threads <= before[0] and files <= before[1]
    assert list(tmp_path.iterdir()) == []
    subscriber.close()


def open_files() -> set[str]:
    """What this process holds open: descriptor and what it leads to, for whoever reads a failure."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return found


@every_subscriber
def test_conformance_delivers_and_leaves_nothing_open(name: str, tmp_path: Path) -> None:
    cls = plugins(Subscriber)[name]
    settings = settings_of(cls, tmp_path)
    before = open_files()
    for _ in range(5):
        subscriber = cls(settings)
        subscriber.start()
        for completed in ROUNDS:
            subscriber.deliver(completed)
        subscriber.flush(time.monotonic() + 60)
        subscriber.close()
    gc.collect()
    assert open_files() <= before  # what the receiver's own starting left may end meanwhile


@every_subscriber
def test_conformance_of_the_declaration(name: str) -> None:
    cls = plugins(Subscriber)[name]
    assert cls.description, "first line of the docstring"
    assert issubclass(cls.settings_class, SubscriberSettings)
    for field, info in cls.settings_class.model_fields.items():
        assert info.description, f"{name}.{field} has no description"
    with pytest.raises(ValidationError):
        cls.settings_class(path="x", nonsense=1)


def test_memory_is_bounded() -> None:
    memory = Memory(MemorySettings(rounds_count=2))
    assert memory.latest is None
    for completed in ROUNDS:
        memory.deliver(completed)
    assert memory.rounds() == ROUNDS[-2:]
    assert memory.latest is ROUNDS[-1]


def test_console_summary_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    Console().deliver(ROUNDS[1])
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert "round 2: 2 nodes, 0 edges, +/-/~ 1/1/0, 250 ms; gpu skipped" in out


@pytest.mark.parametrize("content", ["text", "graph", "diff"])
def test_console_contents(content: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace")
    monkeypatch.setattr(sys, "stderr", stream)
    Console(ConsoleSettings(stream="stderr", content=content)).deliver(ROUNDS[1])
    stream.flush()
    text = stream.buffer.getvalue().decode()  # type: ignore[attr-defined]
    if content == "text":
        assert "init" in text
    else:
        assert json.loads(text)["round"] == 2


def test_console_that_is_gone_is_an_error_of_delivery(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(DeliveryError) as caught:
            Console().deliver(ROUNDS[0])
        assert not caught.value.retryable
        with pytest.raises(BrokenPipeError):
            stream.flush()
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.raises(DeliveryError, match="closed"):
        Console().deliver(ROUNDS[0])


def test_file_json_replaces(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    sink = FileJson(FileJsonSettings(path=str(path)))
    for completed in ROUNDS:
        sink.deliver(completed)
    assert json.loads(path.read_bytes())["round"] == 4
    assert [entry.name for entry in tmp_path.iterdir()] == ["graph.json"]


def test_file_json_appends_one_line_a_round(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    sink = FileJson(FileJsonSettings(path=str(path), mode="append"))
    for completed in ROUNDS:
        sink.deliver(completed)
    assert [json.loads(line)["round"] for line in path.read_bytes().splitlines()] == [1, 2, 3, 4]


def test_file_json_diffs_lead_from_the_first_graph_to_the_last(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    sink = FileJson(FileJsonSettings(path=str(path), mode="append", content="diff"))
    plain = [_plain(completed) for completed in ROUNDS]
    for completed in plain:
        sink.deliver(completed)
    first, *rest = path.read_bytes().splitlines()
    graph = decode_graph(first)
    for line in rest:
        graph = apply(decode_diff(line, graph)[0], graph)
    assert graph == plain[-1].graph


def test_file_json_writes_a_whole_graph_after_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    sink = FileJson(FileJsonSettings(path=str(path), mode="append", content="diff"))
    for completed in (ROUNDS[0], ROUNDS[1], ROUNDS[3]):
        sink.deliver(completed)
    kinds = ["nodes" in json.loads(line) for line in path.read_bytes().splitlines()]
    assert kinds == [True, False, True]


def test_file_json_refuses_diffs_that_say_nothing() -> None:
    with pytest.raises(ValidationError, match="needs mode append"):
        FileJsonSettings(path="x", content="diff")


@pytest.mark.parametrize("mode", ["replace", "append"])
def test_file_text(tmp_path: Path, mode: Any) -> None:
    path = tmp_path / "graph.txt"
    sink = FileText(FileTextSettings(path=str(path), mode=mode))
    for completed in ROUNDS[:2]:
        sink.deliver(completed)
    titles = [line for line in path.read_text().splitlines() if line.startswith("# round")]
    assert [title.split(",")[0] for title in titles] == (
        ["# round 2"] if mode == "replace" else ["# round 1", "# round 2"]
    )
    assert "init" in path.read_text()


@pytest.mark.parametrize("cls", [FileJson, FileText])
@pytest.mark.parametrize("mode", ["replace", "append"])
def test_unwritable_targets_are_permanent_errors(tmp_path: Path, cls: Any, mode: str) -> None:
    for target in (tmp_path / "absent" / "f", tmp_path, Path("/dev/null")):
        sink = cls(cls.settings_class(path=str(target), mode=mode))
        with pytest.raises(DeliveryError) as caught:
            sink.deliver(ROUNDS[0])
        assert not caught.value.retryable
        assert str(target) in str(caught.value)


@pytest.mark.parametrize("mode", ["replace", "append"])
def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    sink = FileJson(FileJsonSettings(path=str(path), mode=mode))
    sink.deliver(ROUNDS[0])
    before = path.read_bytes()
    real_write = os.write

    def half_a_write(descriptor: int, data: Any) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(descriptor, bytes(data)[: len(data) // 2])

    monkeypatch.setattr(atomic.os, "write", half_a_write)
    with pytest.raises(DeliveryError) as caught:
        sink.deliver(ROUNDS[1])
    monkeypatch.undo()
    assert caught.value.retryable
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["f"]
    sink.deliver(ROUNDS[1])
    assert path.read_bytes() != before


def test_append_closes_a_half_line_of_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b'{"a": 1}\n{"hal')
    atomic.append_whole(str(path), b'{"b": 2}\n')
    assert path.read_bytes() == b'{"a": 1}\n{"hal\n{"b": 2}\n'


def test_atomic_write_follows_links_and_keeps_permissions(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"old")
    target.chmod(0o640)
    link = tmp_path / "link"
    link.symlink_to(target)
    atomic.write_atomic(str(link), b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert target.stat().st_mode & 0o777 == 0o640


def test_a_round_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = make_rounds(2)
    assert encode_round(first) is encode_round(first)
    assert encode_round(second) is not encode_round(first)


def _plain(completed: Round) -> Round:
    """The round without the name that JSON can only hold escaped."""
    graph = Graph(
        [
            nodes.Process(pid=entity.pid, start=entity.start, metrics={"rss_bytes": completed.number})
            for entity in completed.graph
        ]
    )
    if completed.number == 1:
        before = Graph()
    else:
        before = Graph(
            [
                nodes.Process(pid=pid, start=start, metrics={"rss_bytes": completed.number - 1})
                for pid, start in ((1, 1), (completed.number, 2))
            ]
        )
    return Round(
        number=completed.number,
        time_ns=completed.time_ns,
        duration_s=completed.duration_s,
        graph=graph,
        diff=diff(before, graph),
        coverage=[],
        env=completed.env,
    )


def test_files_say_everything_that_the_round_says() -> None:
    """One encoder for files, sinks and the server: nothing a round carries may be missing from one of them."""
    done = structs.replace(make_rounds(3)[-1], own_cost=OwnCost(cpu_pct=1.5, rss_bytes=1), truncated_by="depth")
    assert json.loads(encode_round(done))["own_cost"] == {"cpu_pct": 1.5, "rss_bytes": 1}
    assert encode_round(done) == round_codec.encode_round(done)
    assert encode_diff_line(done) == round_codec.encode_round_diff(done)
