"""Runs the installed commands with fewer rights than the tests have, and checks what every run must hold to.

``Way`` says which rights are taken away (by ``launcher.py``), ``Sandbox`` gives a folder that any user may write in,
``Running.finish`` and ``checked_capture`` assert what is true of every run: no traceback, a line of coverage for every
collector, none failed, no number both known and unknown.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import gpuflight
from gpuflight.cli.runfolder import FILES
from gpuflight.graph import Edge, Entity
from gpuflight.graph.load import LoadedGraph, load_graph, read_rounds

BIN = Path(sys.executable).parent
LAUNCHER = Path(__file__).with_name("launcher.py")
REFUSED = 125
NOBODY = 65534
PATIENCE_S = 90.0
"""Only a broken program takes so long."""

ROOT = os.geteuid() == 0


@dataclass(frozen=True)
class Way:
    """What a run may not do. The defaults take nothing away.

    ``uid``: run as this user, where the tests themselves are root's (else they are an ordinary user's already).
    ``netlink_errno``: socket(AF_NETLINK) fails with it. ``hidepid``: /proc is mounted with this option. ``tmpfs``:
    path → size in bytes of a file system of its own. ``open_files``: the most descriptors.
    """

    name: str
    uid: int | None = None
    netlink_errno: int = 0
    hidepid: str = ""
    tmpfs: Mapping[str, int] = field(default_factory=dict)
    open_files: int = 0

    def command(self, program: Sequence[str]) -> list[str]:
        """``program`` under these limits."""
        asked = {
            "uid": self.uid if ROOT else None,
            "netlink_errno": self.netlink_errno,
            "hidepid": self.hidepid,
            "tmpfs": dict(self.tmpfs),
            "open_files": self.open_files,
            # Where the interpreter lies in somebody's home, it is put where the other user finds it.
            "reveal": [sys.base_prefix, sys.prefix, str(Path(gpuflight.__file__).parents[1])],
        }
        if not any(asked[name] for name in asked if name != "reveal"):
            return list(program)
        return [sys.executable, "-I", "-S", str(LAUNCHER), json.dumps(asked), *program]

    def __str__(self) -> str:
        return self.name


PLAIN = Way("as we are")
USER = Way("ordinary user", uid=NOBODY)
NO_NETLINK = Way("no netlink", netlink_errno=errno.EAFNOSUPPORT)
USER_NO_NETLINK = replace(USER, name="ordinary user, netlink forbidden", netlink_errno=errno.EPERM)
HIDDEN = replace(USER, name="processes hidden", hidepid="2")
NOTHING = replace(HIDDEN, name="no rights at all", netlink_errno=errno.EACCES)


@dataclass(frozen=True)
class Outcome:
    """How a command ended and what it said."""

    code: int
    out: str
    err: str


class Running:
    """A started command."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def finish(self, code: int | tuple[int, ...] = 0) -> Outcome:
        """Wait, and assert that it ended with ``code``, without a traceback or a confession of a defect.

        Skips where this machine does not allow what the command should have been run under.
        """
        try:
            out, err = self.process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        done = Outcome(self.process.returncode, _text(out), _text(err))
        if done.code == REFUSED and "launcher: " in done.err:
            pytest.skip(done.err.strip())
        assert done.code in ((code,) if isinstance(code, int) else code), done
        for text in (done.out, done.err):
            assert "Traceback (most recent call last)" not in text, done
            assert "Exception ignored" not in text, done
            assert "defect of gpuflight" not in text, done
        return done


class Sandbox:
    """``work`` is where commands are started; ``home`` is home, TMPDIR and the like, and must stay empty."""

    def __init__(self, folder: Path) -> None:
        self.work = folder / "work"
        self.home = folder / "home"
        for path in (self.work, self.home):
            path.mkdir()
            path.chmod(0o777)

    def environment(self, extra: Mapping[str, str | None] = {}) -> dict[str, str]:
        """The variables of a command: ours, without settings of gpuflight, with ``extra`` (None takes one away)."""
        ours = {name: value for name, value in os.environ.items() if not name.startswith(("GPUFLIGHT_", "XDG_"))}
        names = ("HOME", "TMPDIR", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")
        merged = {**ours, **dict.fromkeys(names, str(self.home)), "PYTHONDONTWRITEBYTECODE": "1", **extra}
        return {name: value for name, value in merged.items() if value is not None}

    def start(
        self, *arguments: str, way: Way = PLAIN, program: str = "gpuflight", env: Mapping[str, str | None] = {},
        **options: Any,
    ) -> Running:  # fmt: skip
        """Start an installed command here."""
        return Running(
            subprocess.Popen(
                way.command([str(BIN / program), *arguments]),
                **{
                    "cwd": self.work,
                    "env": self.environment(env),
                    "stdin": subprocess.DEVNULL,
                    "stdout": subprocess.PIPE,
                    "stderr": subprocess.PIPE,
                    **options,
                },
            )
        )

    def run(self, *arguments: str, code: int | tuple[int, ...] = 0, **options: Any) -> Outcome:
        """Start, and wait for the end."""
        return self.start(*arguments, **options).finish(code)

    def capture(self, name: str = "run") -> Capture:
        """The run folder ``name``, checked."""
        return checked_capture(self.work / name)

    def names(self) -> set[str]:
        """What there is where the commands were started. Asserts that they left nothing at home."""
        assert list(self.home.rglob("*")) == []
        return set(os.listdir(self.work))


@contextmanager
def sandbox() -> Iterator[Sandbox]:
    """A sandbox for some time. Not below pytest's own folder, which is closed to other users."""
    folder = Path(tempfile.mkdtemp(prefix="gpuflight-ways-"))
    folder.chmod(0o755)
    try:
        yield Sandbox(folder)
    finally:
        shutil.rmtree(folder)


@dataclass(frozen=True)
class Capture:
    """What a run folder holds."""

    loaded: LoadedGraph
    lines: dict[str, dict[str, Any]]
    """Coverage by collector."""

    def said(self, collector: str) -> str:
        """Everything that a collector could not see: reason and hint, notes, losses."""
        line = self.lines[collector]
        notes = [f"{note['reason']} → {note.get('hint', '')}" for note in line["notes"]]
        return "\n".join([f"{line['reason']} → {line['hint']}", *notes, *line["losses"]])


def checked_capture(folder: Path) -> Capture:
    """Load a run folder and assert everything that must be true of any capture on any machine."""
    assert sorted(os.listdir(folder)) == sorted(FILES)
    config = json.loads((folder / "config.json").read_bytes())
    coverage = json.loads((folder / "coverage.json").read_bytes())
    lines = {line["collector"]: line for line in coverage["collectors"]}
    assert len(lines) == len(coverage["collectors"])
    assert lines.keys() == {n for n, block in config["collectors"].items() if block["enabled"]} | {"core", "rules"}
    for line in lines.values():
        check_coverage(line)
        assert sum(line["rounds"].values()) == coverage["rounds"], line
        assert "failed" not in line["rounds"], line
    loaded = load_graph(folder)
    check_graph(loaded)
    rounds = list(read_rounds(folder / "rounds.jsonl.zst"))
    assert len(rounds) == coverage["rounds"]
    assert rounds[-1].graph == loaded.graph
    return Capture(loaded, lines)


def check_coverage(line: Mapping[str, Any]) -> None:
    """One collector's line: a known status, not failed, and where it is not ok the reason and what to do about it."""
    assert line["status"] in ("ok", "stale", "skipped"), line
    if line["status"] != "ok":
        assert line["reason"], line
        assert line["hint"], line
    for note in line.get("notes", []):
        assert note["reason"], line
    for what, count in line.get("losses", {}).items():
        assert what, line
        assert count > 0, line


def check_graph(loaded: LoadedGraph) -> None:
    """Every graph: it is of some host, nothing dangles, and a number is either known or unknown for a reason."""
    assert loaded.env["hostname"]
    assert loaded.graph.nodes
    assert loaded.graph.dangling() == []
    elements: list[Entity | Edge] = [*loaded.graph.nodes.values(), *loaded.graph.edges.values()]
    for element in elements:
        for name, reason in (element.unknown or {}).items():
            assert name not in element.metrics, (element.id, name)
            assert reason, (element.id, name)
        for name, value in element.metrics.items():
            assert isinstance(value, int | float), (element.id, name)
            assert value - value == 0, (element.id, name)  # neither NaN nor infinite


def _text(data: bytes | None) -> str:
    return (data or b"").decode("utf-8", "replace")
