"""gpuflight-vis as a command."""

from __future__ import annotations

import base64
import http.server
import io
import json
import os
import re
import shutil
import threading
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.conftest import DATA
from tests.unit import vis_scenes

from gpuflight.cli import vis
from gpuflight.graph import Graph, nodes
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


def _picture(path: Path) -> dict[str, Any]:
    """The data of a small page, as the viewer reads it."""
    text = path.read_text("utf-8")
    found = re.search(r'data-encoding="(\w+)">([^<]*)</script>', text)
    assert found is not None
    return json.loads(found[2] if found[1] == "json" else zlib.decompress(base64.b64decode(found[2])))


def _drawn(graph_file: Path, *extra: str) -> dict[str, Any]:
    out = graph_file.with_name("drawn.html")
    assert vis.main([str(graph_file), "-o", str(out), "--force", *extra]) == 0
    return _picture(out)


def test_a_focus_shows_what_is_around_it_and_says_so(graph_file: Path):
    data = _drawn(graph_file, "--focus", "pid:5000", "--depth", "1")
    ids = set(data["boxes"]["id"])
    worker, rank = "Process(pid=5000,start=5100)", "Process(pid=4100,start=4200)"
    assert {worker, rank, "Host(dgx-01)"} <= ids and "Pipe(ino=900000)" in ids
    assert "Process(pid=4101,start=4201)" not in ids, "two lines away"
    assert "Process(pid=700,start=800)" not in ids, "the host is no way to all that runs on it"
    (note,) = [note for note in data["notes"] if note.startswith("Only what is at most 1 line")]
    assert "of 534 entities" in note
    deeper = set(_drawn(graph_file, "--focus", "pid:5000", "--depth", "2")["boxes"]["id"])
    assert deeper > ids and "Process(pid=4101,start=4201)" in deeper
    assert len(_drawn(graph_file, "--focus", "gpu:0", "--focus", "gpu:1", "--depth", "0")["boxes"]["id"]) < 8


def test_kinds_and_metrics_choose(graph_file: Path):
    data = _drawn(graph_file, "--kinds", "gpu,process", "--min-metric", "cpu_pct>100")
    kinds = {data["words"][kind] for kind in data["boxes"]["kind"]}
    assert kinds <= {"Host", "Container", "Process", "Group"}
    assert data["nodes"] == 8 + 2, "the ranks in their container on their host"
    assert any("cpu_pct>100" in note and "2 of them for what the others stand in" in note for note in data["notes"])


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--focus", "nobody"], "nothing in this graph is called 'nobody'"),
        (["--focus", "gpu:0", "--depth", "-1"], "a depth of -1"),
        (["--kinds", "GPU,Toaster"], "there is no kind 'Toaster'"),
        (["--min-metric", "cpu_pct"], "NAME>VALUE"),
        (["--min-metric", "cpu_pct>many"], "NAME>VALUE"),
        (["--min-metric", "cpu_percent>1"], "cpu_pct"),
        (["--min-metric", "cpu_pct>1e9"], "nothing in this graph is cpu_pct>1e9"),
        (["--diff", "/no/such"], "/no/such"),
        (["--noise", "-1"], "--noise"),
        (["--findings", "/no/such"], "--findings /no/such"),
    ],
)
def test_what_cannot_be_chosen_is_one_line(
    graph_file: Path, capsys: pytest.CaptureFixture[str], extra: list[str], words: str
):
    assert vis.main([str(graph_file), *extra]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
    assert os.listdir(graph_file.parent) == ["graph.json"]


def test_a_comparison_colours_what_came_went_and_changed(graph_file: Path):
    before = vis_scenes.h100()
    after = vis_scenes.h100()
    gone, changed = "Process(pid=5000,start=5100)", "Process(pid=4100,start=4200)"
    nodes_now = {name: entity for name, entity in after.nodes.items() if name != gone}
    nodes_now[changed] = msgspec.structs.replace(after.nodes[changed], attributes={"name": "renamed"})
    new = nodes.Process(pid=9999, start=1, attributes={"name": "new"})
    nodes_now[new.id] = new
    links_now = {key: edge for key, edge in after.edges.items() if gone not in key}
    graph_file.write_bytes(Graph.of(nodes_now, links_now).model_dump_json())
    old = graph_file.with_name("old.json")
    old.write_bytes(before.model_dump_json())
    data = _drawn(graph_file, "--diff", str(old))
    changes = dict(zip(data["boxes"]["id"], data["boxes"]["change"], strict=True))
    assert [data["changes"][changes[name]] for name in (gone, changed, new.id)] == ["removed", "changed", "added"]
    assert data["changes"][changes["GPU(uuid=GPU-00000000-aaaa-bbbb-cccc-000000000000)"]] == ""
    (note,) = [note for note in data["notes"] if note.startswith("Compared with")]
    assert "1 entity added" in note and "1 entity removed" in note and "1 entity changed" in note
    assert "removed" in {data["changes"][change] for change in data["links"]["change"]}


def test_findings_of_a_file_and_of_standard_input_mark_nodes_and_edges(
    graph_file: Path, monkeypatch: pytest.MonkeyPatch
):
    graph = vis_scenes.h100()
    edge = next(edge for edge in graph.edges.values() if edge.kind == "Access")
    finding = {"id": "f", "rule": "r", "severity": "critical", "message": "slow", "entities": ["Host(dgx-01)"]}
    finding["edges"] = [edge.id]  # type: ignore[assignment]
    file = graph_file.with_name("findings.json")
    file.write_text(json.dumps({"round": 1, "findings": [finding]}))
    for text in (str(file), "-"):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(json.dumps([finding]).encode())))
        (found,) = _drawn(graph_file, "--findings", text)["findings"]
        assert found["message"] == "slow" and found["boxes"] and found["links"]


def test_graphs_of_two_machines_stand_beside_each_other_joined(tmp_path: Path):
    from tests.unit.test_vis_hosts import A, B, host

    for at, name in ((A, "here"), (B, "there")):
        (tmp_path / f"{name}.json").write_bytes(host(at, name).model_dump_json())
    out = tmp_path / "both.html"
    assert vis.main([str(tmp_path / "here.json"), str(tmp_path / "there.json"), "-o", str(out)]) == 0
    data = _picture(out)
    assert {"Host(here)", "Host(ns=there,there)", "Process(pid=1,start=1)", "Process(ns=there,pid=1,start=1)"} <= set(
        data["boxes"]["id"]
    )
    assert [data["words"][kind] for kind in data["links"]["kind"]].count("ConnectTo") == 1


def test_graphs_of_one_machine_are_laid_over_each_other(graph_file: Path):
    other = graph_file.with_name("more.json")
    more = [nodes.Host(hostname="dgx-01"), nodes.Process(pid=77777, start=1)]
    other.write_bytes(Graph(more).model_dump_json())
    out = graph_file.with_name("both.html")
    assert vis.main([str(graph_file), str(other), "-o", str(out)]) == 0
    data = _picture(out)
    assert data["nodes"] == 535 and "Process(pid=77777,start=1)" in data["boxes"]["id"]


def test_a_server_and_a_stream_are_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            body = vis_scenes.h100().model_dump_json()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        assert vis.main([url]) == 2
        assert "-o" in capsys.readouterr().err
        out = tmp_path / "live.html"
        assert vis.main([url, "-o", str(out)]) == 0
        thread.join()
    assert asked == ["/api/v1/graph"] and _picture(out)["nodes"] == 534
    assert vis.main([url, "-o", str(tmp_path / "none.html"), "--timeout", "5"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_big_graphs_tell_their_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = tmp_path / "graph.json"
    source.write_bytes(Graph([nodes.Process(pid=at, start=1) for at in range(3100)]).model_dump_json())
    assert vis.main([str(source)]) == 0
    said = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in said] == ["placing", "writing"]


def test_open_shows_the_file(graph_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    shown: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: bool(shown.append(url)))
    assert vis.main([str(graph_file), "--open"]) == 0
    assert shown == [graph_file.with_suffix(".html").as_uri()]
    assert "nothing here opens" in capsys.readouterr().err
