"""The installed command on this very machine: captures, signals, pipes, terminals, users without rights."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from gpuflight.cli.runfolder import FILES
from gpuflight.graph.load import load_graph, read_rounds

GPUFLIGHT = str(Path(sys.executable).with_name("gpuflight"))
PATIENCE_S = 60.0
"""Only a broken program takes so long."""


def environment(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GPUFLIGHT_")}
    return {**kept, "NO_COLOR": "", **extra}


def gpuflight(*arguments: str, cwd: Path, code: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [GPUFLIGHT, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        env=environment(),
        timeout=PATIENCE_S,
        **options,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_capture_of_this_machine(tmp_path: Path) -> None:
    done = gpuflight(
        "run", "--offline", "0.6", "--interval", "0.3", "--pid", str(os.getpid()), "--out", "run", cwd=tmp_path
    )
    assert sorted(os.listdir(tmp_path)) == ["run"]
    assert sorted(os.listdir(tmp_path / "run")) == sorted(FILES)
    loaded = load_graph(tmp_path / "run")
    assert any(getattr(entity, "pid", None) == os.getpid() for entity in loaded.graph)
    numbers = [item.round_number for item in read_rounds(tmp_path / "run" / "rounds.jsonl.zst")]
    assert len(numbers) >= 2, "three, unless this machine is too busy"
    assert numbers == list(range(1, len(numbers) + 1))
    coverage = json.loads((tmp_path / "run" / "coverage.json").read_text())
    assert coverage["rounds"] == len(numbers)
    assert {line["collector"] for line in coverage["collectors"]} >= {"process_tree", "sockets", "core"}
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["interval_s"] == 0.3
    assert config["collectors"]["static"]["pids"] == [os.getpid()]
    assert "GPUs" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "Ctrl-C ends early" in done.stderr


def test_capture_as_json(tmp_path: Path) -> None:
    done = gpuflight("run", "--offline", "0.3", "--json", "--collectors", "process_tree,host", cwd=tmp_path)
    data = json.loads(done.stdout)
    [folder] = os.listdir(tmp_path)
    assert folder.startswith("gpuflight-run-")
    assert data["folder"] == folder
    assert data["rounds"] == 2
    assert data["counts"]["Process"] > 1


def test_a_used_folder_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    gpuflight("run", "--offline", "0.1", "--collectors", "host", "--out", "run", cwd=tmp_path)
    before = {name: (tmp_path / "run" / name).read_bytes() for name in os.listdir(tmp_path / "run")}
    done = gpuflight("run", "--offline", "30", "--collectors", "host", "--out", "run", cwd=tmp_path, code=2)
    assert "not empty" in done.stderr
    assert {name: (tmp_path / "run" / name).read_bytes() for name in os.listdir(tmp_path / "run")} == before
    gpuflight("run", "--offline", "0.1", "--collectors", "host", "--out", "run", "--force", cwd=tmp_path)


def started(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    """A capture of an hour that has written its first round."""
    process = subprocess.Popen(
        [GPUFLIGHT, "run", "--offline", "3600", "--interval", "0.2", "--out", "run", *arguments],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    part = tmp_path / "run" / "rounds.jsonl.zst.part"
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and process.poll() is None:
        if part.exists() and part.stat().st_size > 0:
            return process
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"no capture began: {process.communicate()}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_early_and_everything_is_written(tmp_path: Path, number: signal.Signals) -> None:
    process = started(tmp_path)
    process.send_signal(number)
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert "ended early" in err
    assert sorted(os.listdir(tmp_path / "run")) == sorted(FILES)
    assert load_graph(tmp_path / "run").graph.nodes
    assert "GPUs" in out


def test_a_killed_capture_leaves_its_rounds(tmp_path: Path) -> None:
    process = started(tmp_path)
    process.kill()
    process.communicate()
    assert sorted(os.listdir(tmp_path / "run")) == [".gpuflight.lock", "rounds.jsonl.zst.part"]
    copy = tmp_path / "rounds.jsonl.zst"
    copy.write_bytes((tmp_path / "run" / "rounds.jsonl.zst.part").read_bytes())
    rounds = [item.round_number for item in read_rounds(copy)]
    assert rounds[0] == 1


def test_subscribers_of_the_settings_get_the_rounds(tmp_path: Path) -> None:
    config = {
        "subscribers": [
            {"type": "file_json", "name": "stream", "path": "stream.jsonl", "mode": "append", "content": "diff"},
            {"type": "file_text", "path": "text.txt"},
            {"type": "file_json", "name": "hopeless", "path": "/nonexistent/folder/x"},
        ]
    }
    (tmp_path / "c.json").write_text("\ufeff" + json.dumps(config), encoding="utf-8")
    done = gpuflight("run", "--offline", "0.4", "--interval", "0.2", "--config", "c.json", "--out", "run", cwd=tmp_path)
    assert load_graph(tmp_path / "stream.jsonl").graph == load_graph(tmp_path / "run").graph
    count = json.loads((tmp_path / "run" / "coverage.json").read_text())["rounds"]
    assert (tmp_path / "text.txt").read_text().startswith(f"# round {count},")
    assert f"subscriber hopeless: {count} rounds not delivered: /nonexistent/folder/x: No such file" in done.stderr


def test_output_into_a_closed_pipe(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            "bash",
            "-c",
            f"'{GPUFLIGHT}' describe --collectors process_tree,threads | head -n 1; echo ${{PIPESTATUS[0]}}",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=environment(),
        timeout=PATIENCE_S,
    )
    first, code = done.stdout.splitlines()
    assert first.startswith("graph:")
    assert code in ("0", "141"), "141 unless all fitted into the pipe"
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_closed_and_full_outputs(tmp_path: Path) -> None:
    script = f"'{GPUFLIGHT}' version >&-; echo $?; '{GPUFLIGHT}' version > /dev/full; echo $?"
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, env=environment(), timeout=PATIENCE_S
    )
    assert done.stdout.split() == ["0", "1"]
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_names_that_no_terminal_should_see_in_any_locale(tmp_path: Path) -> None:
    name = "\x1b[31m漢\u202e"
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()", name], stdin=subprocess.PIPE, cwd=tmp_path
    )
    try:
        for locale in ("C", "C.UTF-8"):
            done = subprocess.run(
                [GPUFLIGHT, "describe", "--collectors", "process_tree,static", "--pid", str(process.pid)],
                cwd=tmp_path,
                capture_output=True,
                env=environment(LC_ALL=locale, PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"),
                timeout=PATIENCE_S,
            )
            assert done.returncode == 0, done.stderr
            assert b"\x1b" not in done.stdout
            assert "\u202e".encode() not in done.stdout
            assert f"Process {process.pid} ".encode() in done.stdout
    finally:
        process.communicate()


def on_a_terminal(arguments: list[str], cwd: Path, **extra: str) -> tuple[int, str]:
    """Exit code and everything shown on a terminal of 80 columns."""
    variables = {**environment(), "TERM": "xterm-256color", "COLUMNS": "80", **extra}
    terminal, theirs = pty.openpty()
    process = subprocess.Popen(
        [GPUFLIGHT, *arguments],
        cwd=cwd,
        env={name: value for name, value in variables.items() if value},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    shown = bytearray()
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 1.0)[0]:
            try:
                data = os.read(terminal, 65_536)
            except OSError:  # how a pseudo-terminal says that the other side is gone
                break
            if not data:
                break
            shown += data
    code = process.wait(PATIENCE_S)
    os.close(terminal)
    return code, shown.decode("utf-8", "replace")


def test_progress_with_live_counts_on_a_terminal(tmp_path: Path) -> None:
    arguments = ["run", "--offline", "0.8", "--interval", "0.2", "--collectors", "process_tree", "--out", "run"]
    code, shown = on_a_terminal(arguments, tmp_path)
    assert code == 0, shown
    assert "round 2:" in shown
    assert "nodes" in shown
    assert "\x1b[" in shown


def test_no_colour_means_no_escape_at_all(tmp_path: Path) -> None:
    arguments = ["run", "--offline", "0.2", "--interval", "0.2", "--collectors", "process_tree", "--out", "run"]
    code, shown = on_a_terminal(arguments, tmp_path, NO_COLOR="1")
    assert code == 0, shown
    assert "\x1b[3" not in shown.replace("\x1b[39m", "")
    assert "Busiest" in shown or "nothing" in shown or "GPUs" in shown


def test_record_and_replay_give_the_same_graph(tmp_path: Path) -> None:
    done = gpuflight("record", "m.tar.zst", "--rounds", "2", "--interval", "0.2", "--json", cwd=tmp_path)
    report = json.loads(done.stdout)
    assert report["rounds"] == 2
    assert report["redacted"] is True
    for name in ("a", "b"):
        gpuflight("run", "--replay", "m.tar.zst", "--out", name, cwd=tmp_path)
    a, b = load_graph(tmp_path / "a"), load_graph(tmp_path / "b")
    assert a.graph == b.graph
    assert a.time_ns == b.time_ns
    # A recording holds the first answer of each file in a round; threads that came and went beside it may differ.
    assert len(a.graph.nodes) == pytest.approx(report["nodes"], rel=0.2)
    assert json.loads((tmp_path / "a" / "coverage.json").read_text())["rounds"] == 2
    gpuflight("diff", "a", "m.tar.zst", "--exit-code", cwd=tmp_path)
    described = gpuflight("describe", "--replay", "m.tar.zst", cwd=tmp_path).stdout
    assert described == (tmp_path / "a" / "describe.txt").read_text()
    env = json.loads(gpuflight("env", "--replay", "m.tar.zst", "--json", cwd=tmp_path).stdout)
    assert not [check for check in env["checks"] if "the recording holds no answer" in check["found"]]
    done = gpuflight("record", "m.tar.zst", cwd=tmp_path, code=2)
    assert "exists already" in done.stderr


def test_env_of_this_machine(tmp_path: Path) -> None:
    data = json.loads(gpuflight("env", "--json", cwd=tmp_path).stdout)
    checks = {(check["area"], check["name"]): check for check in data["checks"]}
    assert checks["kernel", "release"]["found"] == os.uname().release
    assert checks["rights", "user"]["state"] == ("yes" if os.geteuid() == 0 else "limited")
    assert ("devices", "NVML") in checks
    assert all(check["hint"] for check in data["checks"] if check["area"] == "extras" and check["state"] == "no")
    gpuflight("env", cwd=tmp_path)


AS_NOBODY = """
import importlib, os, pkgutil, sys
import gpuflight, pydantic, pydantic_settings, rich
# What is imported later may lie where the user may not read: import everything while still root.
for package in (gpuflight, pydantic, pydantic_settings, rich):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__") and "mypy" not in module.name and ".v1" not in module.name:
            try:
                importlib.import_module(module.name)
            except Exception:
                pass
from gpuflight.cli.plugins import every_plugin
every_plugin()
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
from gpuflight.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
@pytest.mark.parametrize(
    "command",
    [["run", "--offline", "0.2", "--interval", "0.2", "--out", "run"], ["env"], ["describe"]],
    ids=lambda c: c[0],
)
def test_an_ordinary_user_sees_less_and_is_told_so(command: list[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="gpuflight-test-") as folder:  # pytest's own folders are closed to others
        os.chmod(folder, 0o777)
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, *command],
            cwd=folder,
            capture_output=True,
            text=True,
            env=environment(),
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        if command[0] == "run":
            assert sorted(os.listdir(os.path.join(folder, "run"))) == sorted(FILES)
            assert "What could not be seen" in done.stdout
            assert "run as root" in done.stdout
            coverage = json.loads(Path(folder, "run", "coverage.json").read_text())
            assert not [line for line in coverage["collectors"] if line["status"] == "failed"]
        if command[0] == "env":
            assert "uid 65534" in done.stdout
