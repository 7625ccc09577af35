"""Every example of the README, of docs/ and of every ``--help`` is executed here."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from tests.conftest import ROOT
from tests.docs_text import PAGES, blocks, commands
from tests.e2e.test_server_real import running, wait_ready
from tests.fakes.http_receiver import Receiver

from gpuflight.cli import COMMANDS
from gpuflight.graph import Graph, edges, nodes
from gpuflight.graph.codec import encode_graph

BIN = Path(sys.executable).parent
PATIENCE_S = 120.0


def shell(line: str, cwd: Path, **more: str) -> None:
    """Run a line as a reader would, except that a capture lasts less than a second."""
    line = re.sub(r"--offline [\d.]+", "--offline 0.5", line)
    line = re.sub(r"--(interval|seconds) [\d.]+", r"--\1 0.2", line)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GPUFLIGHT_")}
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=cwd,
        env={**variables, "PATH": f"{BIN}:{variables['PATH']}", "GPUFLIGHT_INTERVAL_S": "0.2", **more},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    # What the doctor finds here, and whether something records here, is not in the hands of the page.
    fine = {"gpuflight doctor": (0, 1, 2), "gpuflight trigger": (0, 1, 2)}
    expected = next((codes for command, codes in fine.items() if line.startswith(command)), (0,))
    assert done.returncode in expected, f"{line}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr


def probes(path: Path) -> None:
    """The ready probes, as somebody would have copied them: nobody else may write them."""
    path.mkdir(mode=0o755)
    for source in (ROOT / "configs/probes").iterdir():
        shutil.copyfile(source, path / source.name)
        (path / source.name).chmod(0o644)


def machine(path: Path, *, later: bool = False) -> None:
    """A graph of a machine with GPUs and a network card, which the one that runs the tests may not have."""
    content = [
        nodes.Host(hostname="box"),
        nodes.Process(pid=10, start=1, attributes={"name": "train"}, metrics={"cpu_pct": 91.0 if later else 90.0}),
        nodes.GPU(uuid="GPU-a", attributes={"index": 0, "name": "H100"}),
        nodes.GPU(uuid="GPU-b", attributes={"index": 1, "name": "H100"}),
        nodes.PciDevice(address="0000:00:01.0"),
        nodes.Nic(name="eth0"),
    ]
    wires = [
        edges.AttachedTo("GPU(uuid=GPU-a)", "PciDevice(0000:00:01.0)"),
        edges.AttachedTo("GPU(uuid=GPU-b)", "PciDevice(0000:00:01.0)"),
        edges.AttachedTo("Nic(eth0)", "PciDevice(0000:00:01.0)"),
        edges.Access("Process(pid=10,start=1)", "GPU(uuid=GPU-a)"),
    ]
    path.mkdir()
    (path / "graph.json").write_bytes(encode_graph(Graph(content, wires), env={"hostname": "box"}))


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recording")
    shell("gpuflight record machine.tar.zst --rounds 2 --interval 1", folder)
    return folder / "machine.tar.zst"


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_commands_of_a_page(page: Path, tmp_path: Path) -> None:
    machine(tmp_path / "with-gpus")
    if page.name == "events.md":
        shutil.copytree(ROOT / "tests/data/gpufl/gen/v1.3.0rc1-clean", tmp_path / "logs")
        shutil.copy(ROOT / "tests/data/imports/torch.pt.trace.json", tmp_path / "trace.pt.trace.json")
    if page.name == "user-probes.md":
        probes(tmp_path / "probes")
    if page.name == "recorder.md":
        (tmp_path / "train.py").write_text("print('trained')")
    for line in commands(page):
        if line.startswith("make "):
            continue  # tests/unit/test_docs.py
        if re.search(r"\b(gpu|nic):", line):
            line = line.replace("capture", "with-gpus")
        shell(line, tmp_path)


@pytest.mark.parametrize(
    "block", [block for page in PAGES for block in blocks(page) if block.language == "python"],
    ids=lambda block: f"{block.page.name}:{block.line}",
)  # fmt: skip
def test_python_of_a_page(block: object, tmp_path: Path) -> None:
    machine(tmp_path / "capture")
    text: str = block.text  # type: ignore[attr-defined]
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_of_help(command: str, tmp_path: Path, recording: Path) -> None:
    (tmp_path / "machine.tar.zst").hardlink_to(recording)
    if command == "rules":
        shutil.copytree(ROOT / "configs/rules", tmp_path / "configs/rules")
        shell("gpuflight run --offline 1 --out capture", tmp_path)
    elif command not in ("run", "record"):
        machine(tmp_path / "capture")
        machine(tmp_path / "before")
        machine(tmp_path / "after", later=True)
    if command == "run":
        (tmp_path / "train.py").write_text("print('trained')")
    if command == "record":
        (tmp_path / "machine.tar.zst").unlink()
    examples = import_module(f"gpuflight.cli.{command}").EXAMPLES
    if command == "subscriber":  # of a running server
        config = {"interval_s": 0.2, "subscribers": [{"type": "file_json", "path": str(tmp_path / "graph.json")}]}
        with running(tmp_path, config=config) as server:
            wait_ready(server.url)
            for example in examples:
                shell(example, tmp_path, GPUFLIGHT_URL=server.url)
        return
    if command == "agent":  # to a receiver
        (tmp_path / "token").write_text("gpfl_0123")
        shutil.copytree(ROOT / "tests/data/gpufl/gen/v1.3.0rc1-clean", tmp_path / "logs")
        with Receiver() as receiver:
            url = f"http://127.0.0.1:{receiver.port}"
            publisher = {"type": "http", "hostUrl": url, "authTokenFile": str(tmp_path / "token")}
            source = {"folder": str(tmp_path / "logs")}
            (tmp_path / "agent.json").write_text(json.dumps({"source": source, "publisher": publisher}))
            for example in examples:
                example = example.replace("https://gpuflight.example.com", url)
                shell(example, tmp_path, GPUFL_AGENT_STATE_FOLDER=str(tmp_path / "state"))
            assert receiver.received[-1].path == "/api/v1/events/session-complete"
        return
    if command == "plugins":
        probes(tmp_path / "probes")
    if command in ("report", "export", "import"):
        shutil.copytree(ROOT / "tests/data/gpufl/gen/v1.3.0rc1-clean", tmp_path / "logs")
        shutil.copy(ROOT / "tests/data/imports/torch.pt.trace.json", tmp_path / "trace.pt.trace.json")
    for example in examples:
        shell(example, tmp_path)
