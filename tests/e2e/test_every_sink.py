"""Every registered subscriber in the installed server, each with a real receiver: set up by the configuration and over
REST, tried over REST and by the command line, and back after ``kill -9`` of the server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
from tests.e2e.test_server_real import PATIENCE_S, Instance, running, wait_ready
from tests.services.s3 import wait_for
from tests.services.sinks import RECEIVERS, values_of

from gpuflight.registry import plugins
from gpuflight.settings.dump import MASK
from gpuflight.subscribers.base import Subscriber

TYPES = sorted(name for name, cls in plugins(Subscriber).items() if cls.__module__.startswith("gpuflight."))
ROOT = "/api/v1/subscribers"


def entry(kind: str, origin: str, folder: Path) -> dict[str, Any]:
    """An entry of its own for each origin: no two write the same file."""
    own = folder / f"{origin}-{kind}"
    own.mkdir(exist_ok=True)
    return {**values_of(kind, own), "name": f"{origin}-{kind}"}


def command(server: Instance | None, *words: str, stdin: str = "") -> tuple[int, str]:
    """``gpuflight subscriber …``: exit code and what it said."""
    url = ["--url", server.url] if server is not None else []
    done = subprocess.run(
        [Path(sys.executable).with_name("gpuflight"), "subscriber", *words, *url],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


def overview(server: Instance) -> dict[str, dict[str, Any]]:
    """Name → state and statistics; none has lost count."""
    lines = httpx.get(f"{server.url}{ROOT}", timeout=PATIENCE_S).json()["subscribers"]
    for line in lines:
        counts = line["statistics"]
        assert counts["received"] == counts["sent"] + counts["dropped"] + counts["queued"]
    return {line["name"]: line for line in lines}


def wait_sent(server: Instance, names: list[str], count: int = 2) -> None:
    """Until each has delivered so many rounds, and lost none but to newer ones."""

    def all_have() -> bool:
        lines = overview(server)
        for name in names:
            assert set(lines[name]["statistics"].get("dropped_by", {})) <= {"replaced"}, lines[name]
        return all(lines[name]["statistics"]["sent"] >= count for name in names)

    wait_for(all_have)


def test_every_type_has_a_receiver_here() -> None:
    assert sorted(RECEIVERS) == TYPES


def test_every_sink_by_configuration_and_over_rest_and_after_a_restart(tmp_path: Path) -> None:
    of_file = [entry(kind, "file", tmp_path) for kind in TYPES]
    reach = {"folders": [str(tmp_path)], "url_hosts": ["127.0.0.1"], "loopback": True}
    config = {"subscribers": of_file, "server": {"reach": reach}}
    config["collectors"] = {name: {"enabled": False} for name in ("sockets", "threads", "unix_sockets")}
    by_file, by_rest = [f"file-{kind}" for kind in TYPES], [f"rest-{kind}" for kind in TYPES]
    with running(tmp_path, config=config) as server:
        wait_ready(server.url)
        wait_sent(server, by_file)
        for kind in TYPES:
            # Settings by stdin, since some hold secrets.
            code, said = command(server, "create", "--file", "-", stdin=json.dumps(entry(kind, "rest", tmp_path)))
            assert (code, said) == (0, f"rest-{kind}: created\n"), kind
        wait_sent(server, by_rest)
        for name in (*by_file, *by_rest):
            tried = httpx.post(f"{server.url}{ROOT}/{name}/test", timeout=PATIENCE_S).json()
            assert tried["ok"] is True, (name, tried)
        code, said = command(server, "test", by_rest[0])
        assert code == 0 and said.startswith(f"{by_rest[0]}: ok in "), said
        assert {name: line["origin"] for name, line in overview(server).items()} == {
            **dict.fromkeys(by_file, "configuration"),
            **dict.fromkeys(by_rest, "rest"),
        }
        shown = httpx.get(f"{server.url}{ROOT}/rest-s3").json()["settings"]
        assert shown["secret_key"] == shown["access_key"] == MASK
        code, said = command(server, "pause", "rest-memory")
        assert (code, said) == (0, "rest-memory: paused\n")
        server.process.kill()
        server.process.wait()
    with running(tmp_path, config=config) as server:
        wait_ready(server.url)
        lines = overview(server)
        assert set(lines) == {*by_file, *by_rest}
        assert lines["rest-memory"]["state"] == "paused"
        assert command(server, "resume", "rest-memory")[0] == 0
        wait_sent(server, [*by_file, *by_rest])
        for name in by_rest:
            code, said = command(server, "delete", name)
            assert code == 0 and said.startswith(f"{name}: deleted")  # a database under load may not answer in time
        code, said = command(server, "delete", "file-memory")
        assert code == 2 and "comes from the configuration" in said
        assert set(overview(server)) == set(by_file)


def test_every_sink_of_a_configuration_is_tried_without_a_server(tmp_path: Path) -> None:
    path = tmp_path / "server.json"
    path.write_text(json.dumps({"subscribers": [entry(kind, "file", tmp_path) for kind in TYPES]}))
    code, said = command(None, "test", "--config", str(path), "--json")
    assert code == 0, said
    found = json.loads(said[said.index('{\n  "subscribers"') :])  # the console has printed its round before
    assert {line["name"]: line["ok"] for line in found["subscribers"]} == {f"file-{kind}": True for kind in TYPES}
