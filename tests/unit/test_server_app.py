"""The application as a whole: errors, limits, the examples of its own OpenAPI document."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.server_fixture import Served, small

from gpuflight.server.samples import ORIGIN
from gpuflight.server.tokens import Role


@pytest.fixture
def served() -> Iterator[Served]:
    with small() as made:
        yield made


@pytest.mark.parametrize("path", ["/nothing", "/api/v1", "/api/v1/nothing", "/api/v1/graph/", "/healthz/"])
def test_d14_unknown_paths_are_404_and_never_a_redirect(served: Served, path: str) -> None:
    assert served.error("GET", path, 404)["code"] == "no_such_path"


@pytest.mark.parametrize(
    ("method", "path"), [("DELETE", "/api/v1/graph"), ("POST", "/healthz"), ("GET", "/api/v1/control/start")]
)
def test_d14_a_wrong_method_is_405_and_says_which_are_right(served: Served, method: str, path: str) -> None:
    assert served.error(method, path, 405)["detail"]["allowed"]


@pytest.mark.parametrize(
    "query",
    [
        "round=abc", "round=0", "depth=-1", "limit=0", "kind=Nonsense", "format=yaml", "metric=%3E5", "metric=a%3Eb",
        "attribute=%3Dx", "at=yesterday", "at=nan", "round=1&at=2020-01-01", "cursor=!", "cursor=e30", "unknown=1",
    ],
)  # fmt: skip
def test_bad_parameters_are_422(served: Served, query: str) -> None:
    assert served.error("GET", f"/api/v1/graph?{query}", 422)["message"]


def test_a_request_that_is_too_large_is_413(served: Served) -> None:
    limit = served.state.settings.server.max_request_bytes
    declared = served.client.post("/api/v1/control/clear", content=b"x" * (limit + 1))
    assert declared.status_code == 413 and declared.json()["error"]["code"] == "too_large"


def test_a_request_without_length_is_cut_off_at_the_limit() -> None:
    import asyncio

    from gpuflight.server.middleware import RequestLimit

    sent: list[Any] = []
    read = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass

    async def receive() -> Any:
        nonlocal read
        read += 1
        return {"type": "http.request", "body": b"x" * 40, "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "headers": [], "method": "POST", "path": "/"}
    asyncio.run(RequestLimit(app, 100)(scope, receive, send))
    assert read == 3 and sent[0]["status"] == 413


def test_d06_a_defect_of_a_route_is_a_500_in_the_same_shape_and_rounds_go_on(served: Served) -> None:
    served.state.configuration = lambda: 1 / 0  # type: ignore[assignment,return-value]
    error = served.error("GET", "/api/v1/config", 500)
    assert error["code"] == "defect" and "division" not in error["message"]
    assert served.round() == 3


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"expected_update_interval": "abc"}', b"\xff\xfe", b"null"])
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_d06_no_body_whatever_breaks_a_route_or_ends_the_rounds(served: Served, method: str, body: bytes) -> None:
    for path, operations in served.get("/api/v1/openapi.json").json()["paths"].items():
        if method.lower() in operations and "token" not in path:
            target = path.replace("{name}", "x").replace("{number}", "1").replace("{id}", "x")
            if target == "/api/v1/control/stop":
                continue
            answer = served.client.request(method, target, content=body, headers={"content-type": "application/json"})
            assert answer.status_code < 500, (target, answer.text)
    before = served.controller.run_round().number
    assert served.controller.run_round().number == before + 1


def examples() -> list[tuple[str, str, str, set[str]]]:
    with small() as made:
        document = made.get("/api/v1/openapi.json").json()
    return [
        (method.upper(), path, found["source"], set(operation.get("tags", ())))
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        for found in operation.get("x-codeSamples", ())
    ]


EVENT_TAGS = {"events", "sessions", "API keys", "open backend"}
"""Of operations about GPU sessions: tests/unit/test_server_sessions.py executes their examples."""


@pytest.mark.parametrize(("method", "path", "source"), [found[:3] for found in examples() if not found[3] & EVENT_TAGS])
def test_the_example_of_each_operation_works(served: Served, method: str, path: str, source: str) -> None:
    if path.startswith("/api/v1/tokens"):
        served.state.tokens.create(Role.VIEWER, "grafana")
        served.client.headers["authorization"] = f"Bearer {served.state.tokens.create(Role.ADMIN)[0]}"
    if path.startswith("/api/v1/subscribers"):
        served.subscribers.create({"type": "memory", "name": "recent"})
    answer = _curl(served, source)
    assert answer.request.method == method
    assert answer.status_code < 300, answer.text[:500]


def test_operations_have_examples(served: Served) -> None:
    document = served.get("/api/v1/openapi.json").json()
    without = {
        f"{method} {path}"
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        if "x-codeSamples" not in operation
    }
    assert not without


def test_errors_and_tokens_are_described(served: Served) -> None:
    document = served.get("/api/v1/openapi.json").json()
    assert document["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
    for path, operations in document["paths"].items():
        for operation in operations.values():
            errors = [found for status, found in operation["responses"].items() if int(status) >= 400]
            shapes = {found["content"]["application/json"]["schema"]["$ref"] for found in errors}
            assert shapes == {"#/components/schemas/Error"}, path
            assert ("security" in operation) == (path not in ("/", "/healthz", "/readyz"))
    assert not {"HTTPValidationError", "ValidationError"} & set(document["components"]["schemas"])


def _curl(served: Served, source: str) -> Any:
    words = shlex.split(source)
    assert words[0] == "curl" and words[-1].startswith(ORIGIN)
    method = words[words.index("-X") + 1] if "-X" in words else "GET"
    body = words[words.index("-d") + 1] if "-d" in words else None
    headers = dict(words[at + 1].split(": ", 1) for at, word in enumerate(words) if word == "-H")
    return served.client.request(method, words[-1].removeprefix(ORIGIN), content=body, headers=headers)


def test_health_needs_no_role_and_tells_when_there_is_no_round_yet() -> None:
    with Served() as served:
        assert served.get("/healthz").json() == {"status": "ok"}
        assert served.error("GET", "/readyz", 503)["code"] == "no_round"
        assert served.error("GET", "/api/v1/graph", 503)["code"] == "no_round"
        served.round()
        served.state.stopping = True
        assert served.error("GET", "/readyz", 503)["code"] == "stopping"


PAGE = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("line", re.findall(r"^curl .*", PAGE, re.MULTILINE))
def test_requests_of_the_page(served: Served, line: str) -> None:
    served.clock.advance(time.time() - served.clock.wall_ns() / 1e9 - 6)
    served.round()
    answer = _curl(served, line)
    assert answer.status_code == 200, answer.text


def test_every_operation_of_the_page_is_there(served: Served) -> None:
    paths = served.get("/api/v1/openapi.json").json()["paths"]
    named = re.findall(r"`(GET|POST) (/[^`]*)`", PAGE)
    assert len(named) > 20
    for method, path in named:
        assert method.lower() in paths.get(path, {}), f"{method} {path}"
    others = {"tokens", "stream", "subscribers", *EVENT_TAGS}  # they are told in their own pages
    ours = {
        (method.upper(), path)
        for path, operations in paths.items()
        for method, operation in operations.items()
        if not others & set(operation.get("tags", others)) and "subscriber" not in path
    }
    assert ours <= set(named)


def test_ready_means_that_rounds_still_come(served: Served) -> None:
    assert served.get("/readyz").json()["running"] is False  # nobody expects any
    served.controller.start()
    served.send("POST", "/api/v1/control/trigger")
    error = served.error("GET", "/readyz", 503)  # the clock of the test stands in the year 2023
    assert error["code"] == "late" and error["detail"]["age_s"] > 3 * 3600
    served.controller.world.tape = type("Tape", (), {"rounds": [1]})()  # type: ignore[assignment]
    assert served.get("/readyz").json()["running"] is True
    served.controller.world.tape = None
