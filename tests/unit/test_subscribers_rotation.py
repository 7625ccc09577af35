"""Files begun anew by size and age."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import zstandard
from tests.unit.test_subscribers_sinks import make_rounds

from gpuflight.graph.load import read_rounds
from gpuflight.subscribers import rotation
from gpuflight.subscribers.file_json import FileJson, FileJsonSettings

ROUNDS = make_rounds(9)


def sink(path: Path, **more: Any) -> FileJson:
    return FileJson(FileJsonSettings(path=str(path), mode="append", **more))


def numbers(path: Path) -> list[int]:
    data = path.read_bytes()
    if path.suffix == ".zst":
        data = zstandard.ZstdDecompressor().stream_reader(data).read()
    return [json.loads(line)["round"] for line in data.splitlines()]


@pytest.mark.parametrize("compress", [True, False])
def test_by_size(tmp_path: Path, compress: bool) -> None:
    path = tmp_path / "rounds.jsonl"
    file = sink(path, rotate_bytes=1, rotate_compress=compress)
    for completed in ROUNDS:
        file.deliver(completed)
    old = sorted(set(tmp_path.iterdir()) - {path})
    assert [numbers(found) for found in (*old, path)] == [[number] for number in range(1, 10)]
    assert {found.suffix for found in old} == {".zst" if compress else ".jsonl"}


def test_each_file_of_differences_begins_with_a_whole_round(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    file = sink(path, content="diff")
    file.deliver(ROUNDS[0])
    size = path.stat().st_size
    file = sink(path, content="diff", rotate_bytes=size + 100)
    path.unlink()
    for completed in ROUNDS:
        file.deliver(completed)
    found = sorted(set(tmp_path.iterdir()) - {path})
    assert len(found) > 1
    assert [number for each in (*found, path) for number in numbers(each)] == list(range(1, 10))
    for each in (*found, path):
        assert [loaded.round_number for loaded in read_rounds(str(each))] == numbers(each)


def test_by_age_also_over_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    rounds = make_rounds(4)
    for index, completed in enumerate(rounds):
        completed.time_ns = 1_700_000_000_000_000_000 + index * 10 * 10**9
    file = sink(path, rotate_s=20)
    for completed in rounds[:3]:
        file.deliver(completed)
    assert numbers(path) == [3]
    rounds[3].time_ns = path.stat().st_mtime_ns + 20 * 10**9
    sink(path, rotate_s=20).deliver(rounds[3])
    assert numbers(path) == [4]


def test_only_our_oldest_are_deleted(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    others = [tmp_path / "rounds-notes.jsonl", tmp_path / "rounds-20260101T000000.jsonl", tmp_path / "x.jsonl"]
    for other in others:
        other.write_text("mine")
    file = sink(path, rotate_bytes=1, rotate_keep=2)
    for completed in ROUNDS:
        file.deliver(completed)
    old = sorted(set(tmp_path.iterdir()) - {path, *others})
    assert [numbers(found) for found in old] == [[7], [8]]
    assert all(other.read_text() == "mine" for other in others)


def test_what_cannot_be_compressed_is_kept_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "rounds.jsonl"
    file = sink(path, rotate_bytes=1)
    file.deliver(ROUNDS[0])
    monkeypatch.setattr(rotation.os, "fsync", full)
    old = Path(file._rotation.rotate(ROUNDS[1].time_ns))
    assert numbers(old) == [1]
    assert list(tmp_path.iterdir()) == [old]
