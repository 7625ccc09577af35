"""``gpuflight trigger`` and its REST: recorders are told to record, by what they are, here and on several hosts."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")
pytest.importorskip("cupti")
from tests.unit.recorder_rig import recording
from tests.unit.server_fixture import BUSY, Served

from gpuflight.cli import main
from gpuflight.collectors.sessions import Sessions, SessionsSettings
from gpuflight.core.controller import Controller
from gpuflight.events.recorder import trigger as module
from gpuflight.events.recorder.control import Request
from gpuflight.events.recorder.trigger import Choice, recorders, trigger
from gpuflight.server.auth import Role

ROOT = "/api/v1/recorders"


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    """Two recorders that record nothing until they are told."""
    with (
        recording(tmp_path, app="train", on_demand=True) as (first, _),
        recording(tmp_path, app="serve", on_demand=True) as (second, _),
    ):
        yield first, second


def test_a_program_is_chosen_by_any_of_its_names(two: tuple[Any, Any], tmp_path: Path) -> None:
    first, second = two
    result = trigger([str(tmp_path)], Choice(names=("train", "nobody")), Request("start", for_s=60))
    (outcome,) = result.outcomes
    assert (outcome.status, outcome.state, outcome.session_id) == ("done", "recording", first.session_id)
    assert (result.unmatched, second.state) == (["name nobody"], "waiting")
    chosen = trigger([str(tmp_path)], Choice(sessions=(second.session_id,)), Request("start"))
    assert [one.app for one in chosen.outcomes] == ["serve"]
    by_pid = trigger([str(tmp_path)], Choice(pids=(first.pid,)), Request("stop"))
    assert {one.app for one in by_pid.outcomes} == {"train", "serve"} and not by_pid.unmatched
    assert {one.state for one in recorders([str(tmp_path)])} == {"waiting"}


def test_a_job_is_all_its_ranks(two: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_job", lambda answer: "8812" if answer.app == "train" else "")
    result = trigger([str(tmp_path)], Choice(jobs=("8812",)), Request("start"))
    assert [(one.app, one.job) for one in result.outcomes] == [("train", "8812")]


def test_one_that_does_not_answer_fails_and_the_others_do_not(two: tuple[Any, Any], tmp_path: Path) -> None:
    first, second = two
    with first._work:  # its thread waits for this
        result = trigger([str(tmp_path)], Choice(everything=True), Request("start"), 0.3)
    outcomes = {one.session_id: one for one in result.outcomes}
    assert outcomes[second.session_id].status == "done"
    assert outcomes[first.session_id].status == "failed" and "no answer" in outcomes[first.session_id].reason


def test_the_command_here(two: tuple[Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, _ = two
    place = ["--folder", str(tmp_path)]
    assert main(["trigger", "--name", "train", "--launches", "5", "--stacks", "2", *place]) == 0
    assert "done, recording" in capsys.readouterr().out
    assert first.stacks.every == 2
    assert main(["trigger", "--pid", "1", *place]) == 1
    assert "nothing that is recorded: pid 1" in capsys.readouterr().out
    assert main(["trigger", "status", "--json", *place]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["done_count"], told["failed_count"]) == (2, 0)
    assert main(["trigger", *place]) == main(["trigger", "stop", "--all", "--for", "1", *place]) == 2
    assert main(["trigger", "--all", "--folder", str(tmp_path / "nothing")]) == 1


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    sessions = Sessions(SessionsSettings(folders=[str(tmp_path)]))
    with Served(BUSY) as made:
        monkeypatch.setattr(Controller, "collectors", property(lambda _: [sessions]))
        yield made


def test_the_server_tells_recorders_of_folders_it_follows(
    two: tuple[Any, Any], served: Served, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with recording(tmp_path_factory.mktemp("other"), app="elsewhere", on_demand=True) as (elsewhere, _):
        found = served.get(ROOT).json()
        assert {one["app"] for one in found["recorders"]} == {"train", "serve"}
        answer = served.client.post(f"{ROOT}/trigger", json={"all": True, "for_s": 30}).json()
        assert (answer["done_count"], answer["failed_count"]) == (2, 0)
        assert {one["state"] for one in answer["recorders"]} == {"recording"} and elsewhere.state == "waiting"
    assert served.client.post(f"{ROOT}/trigger", json={"for_s": 30}).status_code == 422


def test_operators_only(served: Served) -> None:
    viewer, operator = (served.state.tokens.create(role)[0] for role in (Role.VIEWER, Role.OPERATOR))
    for token, status in ((viewer, 403), (operator, 200)):
        head = {"authorization": f"Bearer {token}"}
        assert served.client.get(ROOT, headers=head).status_code == status
        assert served.client.post(f"{ROOT}/trigger", json={"all": True}, headers=head).status_code == status


class Host(BaseHTTPRequestHandler):
    """A server that answers, or (below /slow) does so too late."""

    let_go = threading.Event()

    def do_POST(self) -> None:
        if self.path.startswith("/slow"):
            self.let_go.wait(10)
        order = json.loads(self.rfile.read(int(self.headers["content-length"])))
        one = {"status": "done", "session_id": "s", "folder": "/f", "pid": 7, "app": order["names"][0]}
        told = {"hostname": "far", "done_count": 1, "failed_count": 0, "recorders": [one], "unmatched": []}
        body = json.dumps(told).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def test_many_hosts_at_once_and_a_partial_result_is_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Host)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    good = f"http://127.0.0.1:{server.server_port}"
    try:
        assert main(["trigger", "--name", "train", "--hosts", good, f"{good}/again"]) == 0
        assert capsys.readouterr().out.count("far: pid 7 train (s): done") == 2
        urls = [good, "http://127.0.0.1:1", f"{good}/slow"]
        assert main(["trigger", "--name", "train", "--timeout", "0.5", "--json", "--hosts", *urls]) == 1
        told = json.loads(capsys.readouterr().out)
        assert told["done_count"] == 1 and told["failed_count"] == 2
        reasons = [host.get("reason", "") for host in told["hosts"]]
        assert reasons[0] == "" and "no server is there" in reasons[1] and "no answer" in reasons[2]
        settings = tmp_path / "settings.json"
        settings.write_text(json.dumps({"remotes": [{"url": good, "name": "far"}]}))
        assert main(["trigger", "--name", "train", "--remotes", "--config", str(settings)]) == 0
    finally:
        Host.let_go.set()
        server.shutdown()
        server.server_close()
