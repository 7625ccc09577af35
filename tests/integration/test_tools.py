"""Running other programs: what they write, how they fail, and that nothing of them is left behind."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from gpuflight.errors import SourceUnavailable
from gpuflight.sources import tools as module
from gpuflight.sources.clock import ManualClock
from gpuflight.sources.recording import Tape
from gpuflight.sources.tools import Tools

LONG_S = 30.0


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_standard_output_comes_back() -> None:
    assert Tools().run(python("print('hello')"), LONG_S) == b"hello\n"


def test_a_chatty_stderr_never_blocks() -> None:
    """Defect 5 of the reference: a pipe that nobody reads."""
    code = "import sys; sys.stderr.write('x' * 4_000_000); print('done')"
    assert Tools().run(python(code), LONG_S) == b"done\n"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; print('the reason', file=sys.stderr); sys.exit(3)", "failed with code 3: the reason"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", "was ended by signal 15"),
        ("import sys; sys.stdout.write('x' * 20_000_000)", "wrote more than"),
    ],
)
def test_failures_have_reasons(code: str, message: str) -> None:
    with pytest.raises(SourceUnavailable, match=message):
        Tools().run(python(code), LONG_S)


def test_programs_that_cannot_be_started(tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailable, match="gpuflight-no-such-tool is not installed"):
        Tools().run(["gpuflight-no-such-tool"], LONG_S)
    with pytest.raises(SourceUnavailable, match="cannot be started"):
        Tools().run([str(tmp_path)], LONG_S)


@pytest.mark.parametrize("closes_outputs", [False, True])
def test_the_deadline_ends_the_whole_group(tmp_path: Path, closes_outputs: bool) -> None:
    pids = tmp_path / "pids"
    close = "exec >&- 2>&-;" if closes_outputs else ""
    code = f"sleep 60 & echo $$ $! > {pids}.part; mv {pids}.part {pids}; {close} sleep 60"
    with pytest.raises(SourceUnavailable, match="within"):
        Tools().run(["sh", "-c", code], 2.0)
    for pid in pids.read_text().split():
        for _ in range(500):  # the grandchild is reaped by init
            try:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except (FileNotFoundError, ProcessLookupError):
                break
            if state in "ZX":
                break
            time.sleep(0.01)
        else:
            pytest.fail(f"{pid} still runs")


def test_a_descendant_that_keeps_the_output_open_does_not_hold_us() -> None:
    with pytest.raises(SourceUnavailable, match="did not answer within"):
        Tools().run(["sh", "-c", "sleep 60 & echo x"], 0.5)


def test_no_descriptor_is_left() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        Tools().run(python("pass"), LONG_S)
        with pytest.raises(SourceUnavailable):
            Tools().run(python("import sys; sys.exit(1)"), LONG_S)
    assert len(os.listdir("/proc/self/fd")) == before


def test_which_is_asked_once_for_many_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def which(name: str) -> str | None:
        asked.append(name)
        return "/usr/bin/x" if len(asked) > 1 else None

    monkeypatch.setattr(module.shutil, "which", which)
    tools = Tools()
    assert [tools.which("x"), tools.which("x")] == [None, None]
    tools.begin_round(Tools.LOOKUP_ROUNDS)
    assert tools.which("x") == "/usr/bin/x"
    assert asked == ["x", "x"]


def test_tools_are_recorded_and_replayed(tmp_path: Path) -> None:
    path = str(tmp_path / "r")
    tape = Tape.record(path, ManualClock())
    tape.begin_round(1)
    tools = Tools(tape)
    assert tools.run(python("print('hello')"), LONG_S) == b"hello\n"
    with pytest.raises(SourceUnavailable):
        tools.run(["gpuflight-no-such-tool"], LONG_S)
    found = tools.which("sh")
    assert found
    tape.close()

    replayed = Tools(Tape.replay(path))
    assert replayed.run(python("print('hello')"), LONG_S) == b"hello\n"
    with pytest.raises(SourceUnavailable, match="is not installed"):
        replayed.run(["gpuflight-no-such-tool"], LONG_S)
    assert replayed.which("sh") == found
    assert replayed.which("never-asked") is None
    with pytest.raises(SourceUnavailable, match="no answer"):
        replayed.run(["true"], LONG_S)


def test_beside_a_tree_of_files_nothing_is_run() -> None:
    tools = Tools(Tape.blank())
    assert tools.which("sh") is None
    with pytest.raises(SourceUnavailable):
        tools.run(["true"], LONG_S)
