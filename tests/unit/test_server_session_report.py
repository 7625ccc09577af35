"""Reports, traces and tables of stored sessions over HTTP, and `gpuflight report --url`."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("duckdb")
from tests.unit import arrow_reader
from tests.unit.events_fixture import SESSION, EventServer
from tests.unit.test_event_report_html import Page
from tests.unit.test_server_sessions import fill

from gpuflight.events.report import Report

ROOT = f"/api/v1/sessions/{SESSION}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EventServer]:
    with EventServer(tmp_path_factory.mktemp("events")) as made:
        fill(made)
        yield made


def test_a_report_is_that_of_the_command(server: EventServer) -> None:
    answer = server.get(f"{ROOT}/report?top=3")
    report = msgspec.convert(answer.json()["report"], Report)
    assert report.kernels.count == 48 and len(report.top_kernels) == 3
    assert report.head.session_id == SESSION
    again = server.client.get(f"{ROOT}/report?top=3", headers={"if-none-match": answer.headers["etag"]})
    assert again.status_code == 304


def test_a_report_as_a_page(server: EventServer) -> None:
    answer = server.get(f"{ROOT}/report?format=html")
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert "script" not in Page(answer.text).elements


def test_a_trace_is_a_stream(server: EventServer) -> None:
    answer = server.get(f"{ROOT}/trace")
    assert answer.headers["content-disposition"] == f'attachment; filename="{SESSION}.json"'
    trace = json.loads(answer.text)
    assert sum(event.get("cat") == "kernel" for event in trace["traceEvents"]) == 48


@pytest.mark.parametrize(("name", "count"), [("kernel", 48), ("memset", 6), ("top-kernels", 5)])
def test_tables(server: EventServer, name: str, count: int) -> None:
    lines = server.get(f"{ROOT}/tables/{name}?format=ndjson").text.splitlines()
    rows = list(csv.DictReader(io.StringIO(server.get(f"{ROOT}/tables/{name}").text, newline="")))
    _, batch, _ = arrow_reader.read(server.get(f"{ROOT}/tables/{name}?format=arrow").content)
    assert len(lines) == len(rows) == len(batch) == count


def test_what_there_is_not(server: EventServer) -> None:
    for path, status in (
        (f"{ROOT}/tables/nope", 404),
        (f"{ROOT}/report?top=0", 422),
        (f"{ROOT}/report?format=pdf", 422),
        ("/api/v1/sessions/nope/report", 404),
        ("/api/v1/sessions/nope/report?format=html", 404),
        ("/api/v1/sessions/nope/trace", 404),
        ("/api/v1/sessions/nope/tables/kernel", 404),
    ):
        answer = server.client.get(path)
        assert answer.status_code == status, path
        assert answer.json()["error"]["message"]


def test_the_command_asks_a_server(
    server: EventServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from gpuflight.cli import main
    from gpuflight.cli.rest import Rest

    def call(self: Rest, method: str, path: str, body: object = None) -> object:
        answer = server.client.request(method, path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    monkeypatch.setattr(Rest, "call", call)
    assert main(["report", SESSION, "--url", "http://127.0.0.1:1", "--top", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kernels"]["count"] == 48
    assert main(["report", SESSION, "--url", "http://127.0.0.1:1", "--html", str(tmp_path / "r.html")]) == 0
    assert Page((tmp_path / "r.html").read_text()).ids
    assert main(["report", SESSION, "--url", "http://127.0.0.1:1", "--store", "x"]) == 2
