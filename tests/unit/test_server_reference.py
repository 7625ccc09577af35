"""The routes of the reference system: its envelope, its form, our graph."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.unit.server_fixture import ONE, Served, small

from gpuflight.graph.load import parse_graph


@pytest.fixture
def served() -> Iterator[Served]:
    with small() as made:
        yield made


def test_the_graph_in_its_form_loads_here_with_the_same_ids(served: Served) -> None:
    answer = served.get("/graph")
    assert list(answer.json()) == ["env", "content"]
    assert answer.json()["env"] == {"local_ip": "127.0.0.1", "hostname": "box", "machine_id": ""}
    assert served.controller.latest is not None
    assert parse_graph(answer.content).graph == served.controller.latest.graph
    process = next(node for node in answer.json()["content"]["nodes"] if node.get("pid") == 1)
    assert process["entity_type"] == "ProcessEntity" and process["name"] == ONE.attributes["name"]
    served.get("/graph", 304, if_none_match=answer.headers["etag"])
    served.round(ONE)
    assert len(served.get("/graph").json()["content"]["nodes"]) == 1


def test_text_status_and_control(served: Served) -> None:
    assert "train" in served.get("/compressed_graph").json()["content"]
    assert served.get("/status").json()["content"]["running"] is False
    assert served.send("POST", "/control/start").json()["content"]["running"] is True
    assert served.send("POST", "/control/trigger").json()["content"]["round"] >= 3
    stopped = served.send("POST", "/control/stop").json()["content"]
    assert (stopped["changed"], stopped["references_count"]) == (True, 0)
    assert served.get("/status").json()["content"]["running"] is False
    assert served.send("POST", "/control/clear").json()["env"]["local_ip"] == "127.0.0.1"
    assert served.error("GET", "/graph", 503)["code"] == "no_round"
    assert served.error("GET", "/control/stop", 405)["code"] == "method_not_allowed"
