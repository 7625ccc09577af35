"""The corpus that rules are tried on: what each part shows is found, the healthy ones are silent, the table is true."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from tests.fakes.nvml.build import NoCompiler
from tests.tools.corpus import LABELS, MACHINES, PAGE, PROGRAMS, RECORDINGS, SCENES, episodes, neutral, page, scores

from gpuflight.bottlenecks.backtest import Episode, read_labels
from gpuflight.cli import main

HEALTHY = ("idle.tar.zst", "healthy-training", "idle-gpus", "healthy-program")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Episode]]:
    try:
        return episodes(tmp_path_factory.mktemp("corpus"))
    except NoCompiler as error:
        pytest.skip(str(error))


def test_every_label_is_answered(found: dict[str, list[Episode]]) -> None:
    assert [each for each in scores(found) if each.missed] == []


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_part_has_no_finding_not_even_a_note(name: str, found: dict[str, list[Episode]]) -> None:
    assert found[name] == []


def test_the_table_is_up_to_date(found: dict[str, list[Episode]]) -> None:
    assert PAGE.read_text(encoding="utf-8") == page(scores(found), len(found)), "run `make corpus`"


def test_labels_name_parts_that_there_are() -> None:
    parts = {path.name for path in RECORDINGS.glob("*.tar.zst")} | set(MACHINES) | set(PROGRAMS) | set(SCENES)
    assert {label.recording for label in read_labels(str(LABELS)).expect} <= parts
    assert set(HEALTHY) <= parts


@pytest.mark.parametrize("path", sorted(RECORDINGS.glob("*.tar.zst")), ids=lambda path: path.name)
def test_recordings_are_small_and_say_nothing_of_where_they_were_made(path: Path, tmp_path: Path) -> None:
    assert path.stat().st_size < 1 << 20
    subprocess.run(["tar", "--zstd", "-xf", path], cwd=tmp_path, check=True)
    text = b"".join(each.read_bytes() for each in tmp_path.rglob("*.json*"))
    assert b"/opt/train" in text
    assert b"/work/" not in text and b"/home/" not in text
    copy = tmp_path / "again.tar.zst"
    copy.write_bytes(path.read_bytes())
    neutral(copy)
    assert main(["rules", "test", "--on", str(copy)]) == 0


def test_the_command_says_when_and_how_right(capsys: pytest.CaptureFixture[str]) -> None:
    recording = str(RECORDINGS / "faults.tar.zst")
    assert main(["rules", "test", "--on", recording, "--labels", str(LABELS), "--rule", "cpu_throttled"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"faults\.tar\.zst: 1[45][.\d]* s to", out)
    assert "100 %" in out and "retransmits" not in out


def test_the_command_takes_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    PROGRAMS["pageable-copies"].write(tmp_path / "logs")
    assert main(["rules", "test", "--on", str(tmp_path / "logs")]) == 0
    assert "logs: 0 s to the end: warn: pageable_copies" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    assert main(["rules", "test", "--on", str(tmp_path / "empty")]) == 2
    assert "no GPU session in this folder" in capsys.readouterr().err
