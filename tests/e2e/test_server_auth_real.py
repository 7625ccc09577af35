"""Tokens and the stream of the installed programs: `gpuflight token`, `gpuflight-server`, their file, their end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
from tests.e2e.test_server_real import PATIENCE_S, Instance, running

from gpuflight.graph.codec import decode_diff, decode_graph
from gpuflight.graph.diff import apply
from gpuflight.server.hub import STOPPING

GPUFLIGHT = str(Path(sys.executable).with_name("gpuflight"))


def token(folder: Path, *arguments: str) -> str:
    words = [GPUFLIGHT, "token", *arguments, "--config", str(folder / "server.json")]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GPUFLIGHT_")}
    return subprocess.run(words, env=variables, capture_output=True, text=True, check=True).stdout.strip()


def test_a_token_made_while_the_server_runs_closes_the_door_and_opens_it(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        url = server.url
        assert httpx.get(f"{url}/api/v1/tokens").json() == {"tokens": []}
        viewer = {"authorization": f"Bearer {token(tmp_path, 'create', '--role', 'viewer', '--name', 'v')}"}
        operator = {"authorization": f"Bearer {token(tmp_path, 'create', '--role', 'operator')}"}
        assert httpx.get(f"{url}/api/v1/control").status_code == 401
        assert httpx.get(f"{url}/api/v1/control", headers=viewer).status_code == 200
        assert httpx.post(f"{url}/api/v1/control/trigger", headers=viewer, timeout=PATIENCE_S).status_code == 403
        assert httpx.post(f"{url}/api/v1/control/trigger", headers=operator, timeout=PATIENCE_S).status_code == 200
        assert httpx.get(f"{url}/api/v1/tokens", headers=operator).status_code == 403
        assert httpx.get(f"{url}/healthz").status_code == 200
        assert httpx.get(f"{url}/healthz", headers={"host": "evil.example"}).status_code == 421
        with httpx.stream("GET", f"{url}/api/v1/stream", headers=viewer, timeout=PATIENCE_S) as stream:
            lines = stream.iter_lines()
            assert next(line for line in lines if line.startswith("event: ")) == "event: graph"
            token(tmp_path, "revoke", "v")
            last = [line for line in lines if line.startswith("data: ")][-1]
            assert "token" in json.loads(last[6:])["reason"]
        assert httpx.get(f"{url}/api/v1/control", headers=viewer).status_code == 401


def test_brute_force_over_the_wire(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        url = server.url
        right = {"authorization": f"Bearer {token(tmp_path, 'create', '--role', 'viewer')}"}
        codes = [
            httpx.get(f"{url}/api/v1/control", headers={"authorization": f"Bearer gpfl_{number}"}).status_code
            for number in range(15)
        ]
        assert codes[:10] == [401] * 10 and codes[-1] == 429
        refused = httpx.get(f"{url}/api/v1/control", headers=right)
        assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 60


def test_the_stream_of_this_machine_fits_together_and_ends_with_the_server(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        graph, numbers, reason = None, [], ""
        with httpx.stream("GET", f"{server.url}/api/v1/stream", timeout=PATIENCE_S) as stream:
            name = ""
            for line in stream.iter_lines():
                if line.startswith("event: "):
                    name = line[7:]
                elif line.startswith("data: ") and name == "end":
                    reason = json.loads(line[6:])["reason"]
                elif line.startswith("data: "):
                    data = line[6:].encode()
                    if name == "graph":
                        graph = decode_graph(data)
                    else:
                        assert graph is not None
                        graph = apply(decode_diff(data, graph)[0], graph)
                    numbers.append(json.loads(data)["round"])
                    if len(numbers) == 4:
                        server.process.send_signal(signal.SIGTERM)
        assert graph is not None and graph.nodes and reason == STOPPING
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert server.finish() == 0


def test_no_token_no_other_address_than_loopback(tmp_path: Path) -> None:
    server = Instance(tmp_path, config={"server": {"host": "0.0.0.0"}})
    assert server.finish() == 2
    assert b"gpuflight token create" in server.said


def test_a_broken_token_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokens.json").write_text("{")
    server = Instance(tmp_path)
    assert server.finish() == 2
    assert b"tokens.json" in server.said and server.said.count(b"\n") == 1
