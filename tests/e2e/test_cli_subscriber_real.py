"""``gpuflight subscriber`` against the installed server: roles, a unix socket, what may be reached, a dead server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.e2e.test_server_real import PATIENCE_S, running
from tests.services.s3 import SECRET, settings, wait_for

BIN = Path(sys.executable)


def run(*words: str, stdin: str = "") -> tuple[int, str, str]:
    """Exit code, stdout, stderr; never a traceback, and errors on one line."""
    done = subprocess.run(
        [BIN.with_name("gpuflight"), "subscriber", *words],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert "Traceback" not in done.stderr and "defect" not in done.stderr
    assert len(done.stderr.splitlines()) == (1 if done.stderr else 0)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def tokens(tmp_path: Path) -> dict[str, str]:
    """Role → a file with a token of it."""
    files = {}
    for role in ("viewer", "operator", "admin"):
        made = subprocess.run(
            [BIN.with_name("gpuflight"), "token", "create", "--role", role, "--file", tmp_path / "tokens.json"],
            capture_output=True,
            check=True,
        )
        path = tmp_path / f"{role}.token"
        path.write_bytes(made.stdout)
        files[role] = str(path)
    return files


def test_each_role_may_what_it_may(tmp_path: Path, tokens: dict[str, str]) -> None:
    memory = ("create", "type=memory", "name=last-hour", "rounds_count=720")
    with running(tmp_path, config={"subscribers": [{"type": "memory", "name": "recent"}]}) as server:

        def as_role(role: str, *words: str) -> tuple[int, str, str]:
            return run(*words, "--url", server.url, "--token-file", tokens[role])

        wait_for(lambda: httpx.get(f"{server.url}/readyz").status_code == 200)
        code, _, err = run("list", "--url", server.url)
        assert code == 2 and "--token-file" in err
        code, out, _ = as_role("viewer", "list", "--json")
        assert code == 0 and json.loads(out)["subscribers"][0]["name"] == "recent"
        assert as_role("viewer", "stats", "recent")[0] == 0
        for words in (("pause", "recent"), ("test", "recent"), ("delete", "recent"), memory):
            code, out, err = as_role("viewer", *words)
            assert (code, out) == (2, "") and err, words
        assert as_role("operator", "pause", "recent")[:2] == (0, "recent: paused\n")
        assert as_role("operator", "list")[1].count("paused") == 1
        assert as_role("operator", "resume", "recent")[0] == 0
        assert as_role("operator", *memory)[0] == 2
        assert as_role("admin", *memory)[:2] == (0, "last-hour: created\n")
        code, _, err = as_role("admin", *memory)
        assert code == 2 and "already" in err
        code, out, _ = as_role("admin", "test", "last-hour")
        assert code == 0 and out.startswith("last-hour: ok in ")
        assert as_role("admin", "delete", "last-hour")[:2] == (0, "last-hour: deleted\n")
        code, _, err = as_role("admin", "delete", "last-hour")
        assert code == 2 and "there is no subscriber 'last-hour'" in err
        (tmp_path / "wrong.token").write_text("gpfl_wrong")
        assert run("list", "--url", server.url, "--token-file", str(tmp_path / "wrong.token"))[0] == 2


def test_over_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "gpuflight.sock"
    with running(tmp_path, config={"server": {"socket": str(path)}}) as server:
        assert server.url
        assert run("create", "type=memory", "name=by-socket", "--url", f"unix:{path}")[0] == 0
        assert "by-socket" in run("list", "--url", f"unix:{path}")[1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "not among the hosts"),
        ({"bucket": "a/b"}, "bucket: "),
        ({"endpoint_url": "ftp://x"}, "endpoint_url: "),
        ({"endpoint_url": "http://169.254.169.254/"}, "never called"),
        ({"secret_key": None}, "access_key and secret_key go together"),
        ({"no_such": 1}, "no_such: unknown key"),
        ({"type": "s4"}, "there is no subscriber type 's4'"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_created_is_one_line_without_secrets(
    change: dict[str, Any], said: str, tmp_path: Path, shared: str
) -> None:
    entry = {**settings("http://storage.example:9000", "rounds", session_token=SECRET), **change}
    code, out, err = run("create", "--file", "-", "--url", shared, stdin=json.dumps(entry))
    assert (code, out) == (2, "") and said in err and SECRET not in err


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server that allows nothing."""
    with running(tmp_path_factory.mktemp("server")) as server:
        yield server.url


def test_a_server_that_dies_is_one_line(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        url = server.url
        assert run("list", "--url", url)[:2] == (0, "none\n")
        server.process.kill()
        server.process.wait()
        code, _, err = run("list", "--url", url)
    assert code == 1 and "no server is there" in err
