"""Whatever is asked, the answer is one of ours: no 5xx, one shape of errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.unit.server_fixture import LOST, ONE, TWO, Served, small

WORDS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.sampled_from(
        [
            "", "0", "1", "2", "3", "-1", "1e400", "-1e11", "nan", "99999999999999999999", "2024-01-01", "-30",
            "0001-01-01T00:00:00+05:00", "9999-12-31T23:59:59-23:59", "GPU", "Process", "name=init", "cpu_pct>=1",
            "cpu_pct>=1e999", "gpu:0", "pid:1", "pid:2", "->", "Own(a->b)", "json", "msgpack", "ndjson", "text", "html",
            "default", "WzEsMCwwXQ", "WzIsLTEsMF0", ONE.id, TWO.id, LOST.id, f"Own({ONE.id}->{TWO.id})", "\x00", "..",
            "%", "a\nb", 'W/"x"', "*",
        ]
    ),
)  # fmt: skip
_SKIPPED = ("/api/v1/stream", "/api/v1/tokens")
"""Streams do not end by themselves; a token that is made closes the door for all that follows."""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with small() as made:
        yield made


def operations(served: Served, method: str) -> list[tuple[str, list[str]]]:
    document = served.get("/api/v1/openapi.json").json()
    return [
        (path, [parameter["name"] for parameter in found[method].get("parameters", []) if parameter["in"] == "query"])
        for path, found in document["paths"].items()
        if method in found and not path.startswith(_SKIPPED)
    ]


@given(data=st.data())
@settings(max_examples=examples(600), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_question_has_an_answer(served: Served, data: st.DataObject) -> None:
    path, names = data.draw(st.sampled_from(operations(served, "get")))
    check(served, "GET", fill(path, data) + query(names, data), data)


@given(data=st.data())
@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_order_has_an_answer(served: Served, data: st.DataObject) -> None:
    # Not trigger: it may wait as long as it is told to.
    ways = [(path, names) for path, names in operations(served, "post") if not path.endswith("/trigger")]
    path, names = data.draw(st.sampled_from(ways))
    check(served, "POST", fill(path, data) + query(names, data), data)
    if served.controller.references_count > 3:
        served.controller.stop()
    if served.controller.latest is None:
        served.round()


def fill(path: str, data: st.DataObject) -> str:
    parts = [quote(data.draw(WORDS), safe=":()=,") if part.startswith("{") else part for part in path.split("/")]
    return "/".join(parts)


def query(names: list[str], data: st.DataObject) -> str:
    chosen = data.draw(st.lists(st.sampled_from([*names, "unknown"]), max_size=4)) if names else []
    pairs = [f"{name}={quote(data.draw(WORDS))}" for name in chosen]
    return "?" + "&".join(pairs) if pairs else ""


def check(served: Served, method: str, target: str, data: st.DataObject) -> None:
    headers = {
        name: data.draw(st.sampled_from(["", "*/*", "gzip", "text/plain;q=x", "zstd;q=0.1,gzip", ";;,", 'W/"x"']))
        for name in data.draw(st.sets(st.sampled_from(["accept", "accept-encoding", "if-none-match"])))
    }
    body: Any = data.draw(st.sampled_from([None, b"{}", b"[", b'{"type": "memory"}'])) if method == "POST" else None
    answer = served.client.request(method, target, headers=headers, content=body)
    acceptable = answer.status_code < 500 or (answer.status_code == 503 and served.controller.latest is None)
    assert acceptable, (target, headers, answer.text[:500])
    assert not 300 <= answer.status_code < 304, target
    if answer.status_code >= 400:
        assert list(answer.json()["error"]) == ["code", "message", "detail"], answer.text
