"""gpuflight-vis as a command."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from tests.conftest import DATA
from tests.unit import vis_scenes

from gpuflight.cli import vis
from gpuflight.rounds import Finding
from gpuflight.vis.loaded import layout_options

WITTY = DATA / "witty" / "vllm-tp4-npu.json"


@pytest.fixture
def graph_file(tmp_path: Path) -> Path:
    """The H100 host as ``graph.json``."""
    path = tmp_path / "graph.json"
    path.write_bytes(vis_scenes.h100().model_dump_json())
    return path


def test_writes_beside_the_input(graph_file: Path, capsys: pytest.CaptureFixture[str]):
    assert vis.main([str(graph_file)]) == 0
    page = graph_file.with_suffix(".html")
    assert page.read_text().startswith("<!doctype html>")
    assert str(page) in capsys.readouterr().out


def test_a_run_folder_is_read_by_its_graph(graph_file: Path):
    assert vis.main([str(graph_file.parent)]) == 0
    assert graph_file.with_suffix(".html").exists()


def test_the_graph_of_the_reference_system_is_read(tmp_path: Path):
    source = tmp_path / "reference.json"
    shutil.copy(WITTY, source)
    assert vis.main([str(source), "--title", "vLLM on Ascend"]) == 0
    text = source.with_suffix(".html").read_text()
    assert "<title>vLLM on Ascend · gpuflight</title>" in text
    assert "Read from a graph of witty-profiler" in text


def test_never_overwrites_without_force(graph_file: Path, capsys: pytest.CaptureFixture[str]):
    target = graph_file.with_name("mine.html")
    target.write_text("precious")
    assert vis.main([str(graph_file), "-o", str(target)]) == 2
    assert target.read_text() == "precious"
    assert capsys.readouterr().err == f"gpuflight-vis: {target} exists; --force overwrites it\n"
    assert vis.main([str(graph_file), "-o", str(target), "--force"]) == 0
    assert target.read_text().startswith("<!doctype html>")


def test_a_file_that_appears_while_drawing_stays(tmp_path: Path):
    target = tmp_path / "a.html"
    with pytest.raises(Exception, match="exists"), vis.atomic_file(target, force=False) as file:
        file.write(b"ours")
        target.write_text("theirs")
    assert target.read_text() == "theirs"
    assert os.listdir(tmp_path) == ["a.html"]


def test_a_failure_leaves_nothing_behind(tmp_path: Path):
    target = tmp_path / "a.html"
    with pytest.raises(RuntimeError), vis.atomic_file(target, force=True) as file:
        file.write(b"half")
        raise RuntimeError
    assert os.listdir(tmp_path) == []


def test_the_file_has_the_rights_of_a_new_file(graph_file: Path):
    vis.main([str(graph_file)])
    mask = os.umask(0)
    os.umask(mask)
    assert graph_file.with_suffix(".html").stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["-le", "nope"], ["layouts", "'nope'", "default"]),
        (["-of", "docx"], ["renderers", "'docx'", "html"]),
        (["--layout-engine", "nope"], ["default"]),
    ],
)
def test_an_unknown_layout_or_format_names_the_known_ones(
    graph_file: Path, capsys: pytest.CaptureFixture[str], extra: list[str], words: list[str]
):
    assert vis.main([str(graph_file), *extra]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and all(word in said for word in words)
    assert not graph_file.with_suffix(".html").exists()


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "\x00", '{"a": 1}', "5"])
def test_what_is_no_graph_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str):
    source = tmp_path / "graph.json"
    source.write_text(content)
    assert vis.main([str(source)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("gpuflight-vis: ") and said.count("\n") == 1
    assert os.listdir(tmp_path) == ["graph.json"]


def test_a_missing_input_and_an_empty_folder_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for source in (tmp_path / "none.json", tmp_path):
        assert vis.main([str(source)]) == 2
        said = capsys.readouterr().err
        assert str(source) in said and said.count("\n") == 1


def test_a_folder_as_output_and_one_that_is_missing(graph_file: Path, capsys: pytest.CaptureFixture[str]):
    assert vis.main([str(graph_file), "-o", str(graph_file.parent)]) == 2
    assert "folder" in capsys.readouterr().err
    assert vis.main([str(graph_file), "-o", str(graph_file.parent / "no" / "such.html")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_the_same_input_gives_the_same_bytes(graph_file: Path):
    pages = []
    for name in ("a.html", "b.html"):
        vis.main([str(graph_file), "-o", str(graph_file.with_name(name))])
        pages.append(graph_file.with_name(name).read_bytes())
    assert pages[0] == pages[1]


def test_coverage_findings_and_environment_of_the_file_reach_the_page(tmp_path: Path):
    from gpuflight.graph.load import load_graph

    data = json.loads(vis_scenes.h100().model_dump_json())
    data.update(
        schema=1, round=7, time="2026-11-29T10:00:00Z", env={"hostname": "dgx-09", "odd": 5},
        coverage=[{"collector": "nvml", "status": "failed", "reason": "gone"}, {"what": "is this"}],
        findings=[{"id": "f", "rule": "r", "severity": "warn", "message": "m"}, 7],
    )  # fmt: skip
    source = tmp_path / "graph.json"
    source.write_text(json.dumps(data))
    options = layout_options(load_graph(str(source)))
    assert options.environment.hostname == "dgx-09" and options.round_number == 7
    assert [line.reason for line in options.coverage] == ["gone"]
    assert options.findings == [Finding(id="f", rule="r", severity="warn", message="m")]
    assert sum("left out" in note for note in options.notes) == 2
    assert vis.main([str(source)]) == 0


def test_works_under_a_plain_locale(graph_file: Path, monkeypatch: pytest.MonkeyPatch):
    import subprocess
    import sys

    data = json.loads(graph_file.read_bytes())
    data["nodes"][0]["attributes"]["name"] = "🚀 ünïcode"
    graph_file.write_text(json.dumps(data))
    done = subprocess.run(
        [sys.executable, "-m", "gpuflight.cli.vis", str(graph_file)],
        env={**os.environ, "LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "🚀 ünïcode" in graph_file.with_suffix(".html").read_text("utf-8")
