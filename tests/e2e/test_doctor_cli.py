"""``gpuflight doctor`` as people run it: everything that --from takes, exit codes, 80 columns, JSON, the picture."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.chromium import CHROMIUM, Chromium
from tests.conftest import ROOT
from tests.e2e.test_server_real import running, wait_ready
from tests.unit.recorded_program import MS, Program

from gpuflight.cli import main
from gpuflight.graph import Graph, edges, nodes
from gpuflight.graph.codec import encode_graph
from gpuflight.rounds import Evidence, Finding

DOCTOR = [str(Path(sys.executable).with_name("gpuflight")), "doctor"]
RECORDING = ROOT / "tests/data/recordings/faults.tar.zst"
IDLE = ROOT / "tests/data/recordings/idle.tar.zst"
SERVER = nodes.Socket(protocol="tcp", address="10.0.0.1:80")
CLIENT = nodes.Socket(protocol="tcp", address="10.0.0.2:4000")
WIRE = edges.ConnectTo(CLIENT.id, SERVER.id, {}, {"send_queue_bytes": 5 << 20})
GPU = nodes.GPU(uuid="GPU-1", attributes={"index": 0, "name": "H100"}, metrics={"temperature_celsius": 60})


def doctor(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GPUFLIGHT_")}
    return subprocess.run(
        [*DOCTOR, *map(str, arguments)], env={**environment, **variables}, capture_output=True, text=True, timeout=120
    )


def finding(severity: Any, *, edge: bool = False) -> Finding:
    where = {"edges": [WIRE.id], "entities": []} if edge else {"entities": [GPU.id], "edges": []}
    seen = Evidence(element=WIRE.id if edge else GPU.id, metric="x_count", value=7, unit="", samples_count=1)
    rule = "send_queue_pressure" if edge else "gpu_lost"
    return Finding(
        id=f"{rule}@{severity}", rule=rule, severity=severity, message=f"seven of {severity}", evidence=[seen],
        advice="do it", verify="look", **where,
    )  # fmt: skip


def saved(path: Path, *findings: Finding, healthy: bool = True) -> Path:
    elements: list[Any] = [GPU, SERVER, CLIENT] if healthy else [nodes.Pipe(inode=1)]
    graph = Graph(elements, [WIRE] if healthy else [])
    path.write_bytes(encode_graph(graph, env={"hostname": "box"}, findings=list(findings)))
    return path


@pytest.mark.parametrize(
    ("severities", "fail_on", "code"),
    [
        ((), "warn", 0), (("info",), "warn", 0), (("info",), "info", 1), (("warn",), "warn", 1),
        (("warn",), "critical", 0), (("warn", "critical"), "warn", 2), (("critical",), "critical", 2),
    ],
)  # fmt: skip
def test_exit_codes(
    severities: tuple[str, ...], fail_on: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path / "graph.json", *map(finding, severities))
    assert main(["doctor", "--from", str(path), "--fail-on", fail_on]) == code
    out = capsys.readouterr().out
    assert all(f"seven of {severity}" in out for severity in severities)


def test_what_cannot_be_judged_is_3(tmp_path: Path) -> None:
    done = doctor("--from", saved(tmp_path / "graph.json", healthy=False), "--set", 'rules.only=["gpu_lost"]')
    assert (done.returncode, "could not judge" in done.stdout) == (3, True), done.stdout + done.stderr
    (tmp_path / "empty").mkdir()
    for bad in (tmp_path / "nothing", tmp_path / "empty"):
        done = doctor("--from", bad)
        assert done.returncode == 3 and str(bad) in done.stderr and "Traceback" not in done.stderr
    (tmp_path / "bad.json").write_text("{")
    assert doctor("--from", tmp_path / "bad.json").returncode == 3
    (tmp_path / "bad.tar.zst").write_bytes(RECORDING.read_bytes()[:5000])
    assert doctor("--from", tmp_path / "bad.tar.zst").returncode == 3
    assert doctor("--from", "http://127.0.0.1:9").returncode == 3


def narrow(text: str) -> None:
    assert [row for row in text.splitlines() if len(row) > 80] == []


def test_a_recording_reads_well_in_80_columns() -> None:
    done = doctor("--from", RECORDING, "--all", COLUMNS="200")
    assert done.returncode == 1
    assert "2 GiB of GPU 0 are held by processes that do not live any more" in done.stdout
    assert "Could not be judged" in done.stdout and "where" in done.stdout and "check" in done.stdout
    narrow(done.stdout)


def test_an_idle_machine_is_healthy() -> None:
    done = doctor("--from", IDLE, "--fail-on", "info")
    assert done.returncode == 0, done.stdout
    assert "nothing found that holds it back" in done.stdout


def test_json_says_all_that_the_text_says() -> None:
    done = doctor("--from", RECORDING, "--json")
    told = json.loads(done.stdout)
    assert (told["verdict"], told["hostname"], told["rounds_count"]) == ("warn", "box", 8)
    assert [each["rule"] for each in told["findings"]] == ["zombie_memory"]
    assert told["findings"][0]["evidence"][0]["unit"] == "B"
    assert told["places"][told["findings"][0]["id"]][-1] == "GPU 0"
    assert sum(told["rules"].values()) == len(told["states"])
    assert all(each["reason"] and each["rules"] for each in told["unjudged"])


def test_run_folders_streams_and_logs(tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("gpuflight")
    command = [program, "run", "--offline", "1", "--interval", "0.5", "--out", tmp_path / "capture"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    Program(load_ns=40 * MS).write(tmp_path / "logs")
    for source, rounds in (("capture", 2), ("capture/rounds.jsonl.zst", 2), ("capture/graph.json", 1), ("logs", 1)):
        done = doctor("--from", tmp_path / source, "--json")
        told = json.loads(done.stdout)
        assert told["rounds_count"] >= rounds, source
        assert done.returncode == {"healthy": 0, "warn": 1, "critical": 2}[told["verdict"]], source
        text = doctor("--from", tmp_path / source)
        narrow(text.stdout)
    assert told["findings"][0]["rule"] == "data_loader_starvation"


def test_a_server(tmp_path: Path) -> None:
    with running(tmp_path, config={"interval_s": 0.2}) as server:
        wait_ready(server.url)
        done = doctor("--from", server.url, "--json")
        told = json.loads(done.stdout)
        assert told["source"] == server.url and told["rounds_count"] >= 1 and told["rules"].get("clear", 0) > 5
        narrow(doctor("--from", server.url).stdout)


def test_this_machine_says_something_before_the_end() -> None:
    done = doctor("--seconds", "3", "--fail-on", "critical")
    assert done.returncode in (0, 2)
    assert re.search(r"^after \d s: ", done.stderr, re.MULTILINE)
    narrow(done.stdout)


def test_the_picture_is_not_replaced_unasked(tmp_path: Path) -> None:
    path = saved(tmp_path / "graph.json")
    (tmp_path / "d.html").write_text("mine")
    done = doctor("--from", path, "--html", tmp_path / "d.html")
    assert done.returncode == 3 and "--force" in done.stderr
    assert (tmp_path / "d.html").read_text() == "mine"
    assert doctor("--from", path, "--html", tmp_path / "d.html", "--force").returncode == 0


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
def test_the_picture_has_findings_on_nodes_and_edges(tmp_path: Path) -> None:
    path = saved(tmp_path / "graph.json", finding("critical"), finding("warn", edge=True))
    page = tmp_path / "doctor.html"
    assert doctor("--from", path, "--html", page).returncode == 2
    (tmp_path / "profile").mkdir()
    with Chromium(tmp_path / "profile") as browser:
        for domain in ("Page", "Runtime", "Log"):
            browser.call(f"{domain}.enable")
        browser.call("Page.navigate", url=page.as_uri())
        browser.until("document.documentElement.dataset.ready === 'yes'")
        told = browser.js("document.getElementById('findings').textContent")
        assert "seven of critical" in told and "seven of warn" in told
        assert "Doctor: box" in browser.js("document.documentElement.textContent")
        marked = "gpuflightViewer.{}.filter((it) => it.severity === '{}').length"
        assert browser.js(marked.format("lines", "warn")) == 1
        assert browser.js(marked.format("model.boxes", "critical")) >= 1
        assert browser.said() == []
