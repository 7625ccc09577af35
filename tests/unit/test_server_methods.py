"""HEAD is GET without the body; a method that is not there says which ones are."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from tests.unit.server_fixture import Served, small
from tests.unit.test_server_app import EVENT_TAGS

from gpuflight.server.tokens import Role
from gpuflight.server.transport import SCOPE_KEY


@pytest.fixture
def served() -> Iterator[Served]:
    with small() as made:
        yield made


def _gets() -> list[str]:
    with small() as made:
        document = made.get("/api/v1/openapi.json").json()
    found = []
    for path, operations in document["paths"].items():
        if set(operations.get("get", {}).get("tags", ())) & EVENT_TAGS:
            continue
        source = next(iter(operations.get("get", {}).get("x-codeSamples", ())), None)
        if source is not None and "/subscribers/" not in path:
            found.append(source["source"].split("9477", 1)[1].rstrip("'"))
    return found


_OWN = ("date", "gpuflight-time-ns")


@pytest.mark.parametrize("target", _gets())
def test_head_is_get_without_a_body(served: Served, target: str) -> None:
    get, head = served.get(target), served.send("HEAD", target)
    assert head.content == b""
    if target.startswith(("/metrics", "/readyz")):  # whose length changes with the time
        assert head.headers["content-type"] == get.headers["content-type"]
        return
    assert {k: v for k, v in head.headers.items() if k not in _OWN} == {
        k: v for k, v in get.headers.items() if k not in _OWN
    }
    if "content-encoding" not in get.headers and "text/event-stream" not in get.headers["content-type"]:
        assert int(head.headers["content-length"]) == len(get.content)


def test_head_knows_etags_encodings_and_errors(served: Served) -> None:
    tag = served.send("HEAD", "/api/v1/graph").headers["etag"]
    assert served.get("/api/v1/graph").headers["etag"] == tag
    assert served.send("HEAD", "/api/v1/graph", 304, if_none_match=tag).headers["etag"] == tag
    whole = served.send("HEAD", "/api/v1/graph", accept_encoding="gzip")
    assert whole.headers["content-encoding"] == "gzip" and whole.content == b""
    assert served.send("HEAD", "/nothing", 404).content == b""
    assert served.send("HEAD", "/api/v1/graph?unknown=1", 422).content == b""
    refused = served.send("HEAD", "/api/v1/control/trigger", 405)
    assert refused.headers["allow"] == "POST" and refused.content == b""
    served.state.tokens.create(Role.VIEWER)
    assert served.send("HEAD", "/api/v1/graph", 401).content == b""


def test_head_of_a_stream_ends(served: Served) -> None:
    class Untouched:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} of the connection was used")

    async def test() -> None:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            await asyncio.Event().wait()

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "HEAD", "scheme": "http",
            "path": "/api/v1/stream", "raw_path": b"/api/v1/stream", "query_string": b"", "root_path": "",
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "headers": [(b"host", b"127.0.0.1")],
            SCOPE_KEY: Untouched(),
        }  # fmt: skip
        app: Any = served.client.app
        async with asyncio.timeout(10):
            await app(scope, receive, send)
        assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
        assert sent[0]["status"] == 200 and not sent[1]["body"] and not sent[1].get("more_body")
        assert served.state.hub.clients_count == 0

    asyncio.run(test())


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("OPTIONS", "/api/v1/graph", {"GET", "HEAD"}),
        ("DELETE", "/api/v1/subscribers", {"GET", "HEAD", "POST"}),
        ("POST", "/api/v1/subscribers/x", {"GET", "HEAD", "PATCH", "DELETE"}),
        ("OPTIONS", "/api/v1/control/start", {"POST"}),
        ("TRACE", "/healthz", {"GET", "HEAD"}),
        ("BREW", "/api/v1/openapi.json", {"GET", "HEAD"}),
    ],
)
def test_what_is_not_possible_says_what_is(served: Served, method: str, path: str, allowed: set[str]) -> None:
    answer = served.send(method, path, 405)
    assert set(answer.headers["allow"].split(", ")) == allowed == set(answer.json()["error"]["detail"]["allowed"])


def test_preflight_is_answered_for_allowed_origins_only() -> None:
    ask = {"access_control_request_method": "GET"}
    with Served(server={"cors_origins": ["https://dash.example"]}) as served:
        served.round()
        answer = served.send("OPTIONS", "/api/v1/graph", origin="https://dash.example", **ask)
        assert answer.headers["access-control-allow-origin"] == "https://dash.example"
        stranger = served.send("OPTIONS", "/api/v1/graph", 400, origin="https://evil.example", **ask)
        assert "access-control-allow-origin" not in stranger.headers
        assert served.send("OPTIONS", "/api/v1/graph", 405).headers["allow"] == "GET, HEAD"
