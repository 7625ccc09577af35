"""Control, collectors, plugins, configuration and metrics over REST: what they say is so."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.unit.server_fixture import ONE, TWO, Served, small

from gpuflight.errors import DeliveryError
from gpuflight.rounds import Round
from gpuflight.server.fanout import Fanout
from gpuflight.subscribers.base import Subscriber


@pytest.fixture
def served() -> Iterator[Served]:
    with small() as made:
        yield made


def test_d14_d15_start_and_stop_tell_the_truth_about_references(served: Served) -> None:
    def post(what: str) -> tuple[bool, int, bool]:
        answer = served.send("POST", f"/api/v1/control/{what}").json()
        return answer["running"], answer["references_count"], answer["changed"]

    assert post("stop") == (False, 0, False)
    assert post("start") == (True, 1, True)
    assert post("start") == (True, 2, False)
    assert post("stop") == (True, 1, False)
    assert served.get("/api/v1/control").json()["running"] is True
    assert post("stop") == (False, 0, True)
    assert served.get("/api/v1/control").json()["running"] is False


def test_d15_a_start_that_fails_is_an_error_and_changes_nothing(served: Served, monkeypatch: Any) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr("gpuflight.core.controller.threading.Thread.start", refuse)
        with pytest.raises(RuntimeError):
            served.controller.start()
    status = served.get("/api/v1/control").json()
    assert (status["running"], status["references_count"]) == (False, 0)
    served.controller.close()
    assert served.error("POST", "/api/v1/control/start", 503)["code"] == "unavailable"


@pytest.mark.parametrize("running", [False, True])
def test_trigger_gives_a_round_that_began_after_it(served: Served, running: bool) -> None:
    if running:
        served.send("POST", "/api/v1/control/start")
    before = served.get("/api/v1/control").json()["latest_round"]
    answer = served.send("POST", "/api/v1/control/trigger").json()
    assert answer["round"] > before and answer["latest_round"] >= answer["round"]


def test_a_round_that_does_not_come_in_time_is_a_504(served: Served) -> None:
    served.send("POST", "/api/v1/control/start")
    served.send("POST", "/api/v1/control/trigger")
    served.seeder.block = threading.Event()
    try:
        assert served.error("POST", "/api/v1/control/trigger?timeout_s=0.05", 504)["code"] == "no_round_in_time"
        assert served.get("/api/v1/graph").status_code == 200  # nobody else waits
    finally:
        served.seeder.block.set()
        served.seeder.block = None


def test_clear_forgets(served: Served) -> None:
    answer = served.send("POST", "/api/v1/control/clear").json()
    assert answer["latest_round"] is None and answer["history"]["rounds_count"] == 0
    assert served.error("GET", "/api/v1/graph", 503)["code"] == "no_round"
    assert served.round() == 3
    assert served.get("/api/v1/rounds").json()["rounds"][0]["round"] == 3


def test_a_collector_is_switched_off_and_on(served: Served) -> None:
    off = served.send("POST", "/api/v1/collectors/process_tree/disable").json()
    assert (off["enabled"], off["changed"]) == (False, True)
    assert served.send("POST", "/api/v1/collectors/process_tree/disable").json()["changed"] is False
    calls = served.seeder.calls
    served.round()
    assert served.seeder.calls == calls
    assert served.get("/api/v1/graph").json().get("nodes", []) == []
    assert served.get("/api/v1/collectors/process_tree").json()["coverage"] is None
    served.send("POST", "/api/v1/collectors/process_tree/enable")
    served.round()
    assert served.get("/api/v1/collectors").json()["collectors"][0]["coverage"]["nodes_count"] == 6
    assert served.error("POST", "/api/v1/collectors/nothing/enable", 404)["detail"]["collectors"] == ["process_tree"]


def test_what_a_collector_said_before_it_was_switched_off_does_not_come_back(served: Served) -> None:
    served.controller.set_enabled("process_tree", False)
    served.round()
    served.controller.set_enabled("process_tree", True)
    served.seeder.error = OSError("broken")
    served.round()
    assert served.get("/api/v1/graph").json().get("nodes", []) == []
    assert served.get("/api/v1/collectors/process_tree").json()["coverage"]["status"] == "failed"


def test_d06_a_collector_that_raises_anything_costs_its_round_only(served: Served) -> None:
    served.seeder.error = SystemExit("gone")
    served.round()
    assert served.get("/api/v1/collectors/process_tree").json()["coverage"]["status"] != "ok"
    served.seeder.error = None
    served.round()
    assert served.get("/api/v1/collectors/process_tree").json()["coverage"]["status"] == "ok"


class Broken(Subscriber):
    """Fails at each delivery."""

    abstract = True

    def deliver(self, completed: Round) -> None:
        raise DeliveryError('no "way"\n', retryable=False)


def test_d09_the_graph_needs_no_subscriber_and_metrics_tell_how_each_does(served: Served) -> None:
    assert served.get("/api/v1/graph").json()["round"] == 2
    served.subscribers.add(Broken())
    served.round()
    assert served.subscribers.flush(30)
    text = served.get("/metrics").text
    assert 'gpuflight_subscriber_received_total{subscriber="broken",type="broken"} 1\n' in text
    assert 'gpuflight_subscriber_dropped_total{subscriber="broken",type="broken",reason="failed"} 1\n' in text
    served.subscribers.remove("broken")
    served.round()
    assert served.get("/api/v1/graph").json()["round"] == 4


def test_metrics_are_well_formed_and_bounded(served: Served) -> None:
    import re

    text = served.get("/metrics").text
    types: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in types, "a family stands in one piece"
            types[name] = kind
        elif not line.startswith("#"):
            found = re.fullmatch(r'([a-z_0-9]+)(?:\{[a-z]+="[^"\n]*"(?:,[a-z]+="[^"\n]*")*\})? (\S+)', line)
            assert found and found[1] in types, line
            float(found[2])
    assert "gpuflight_graph_nodes 6\n" in text and 'gpuflight_collector_nodes{collector="process_tree"} 6\n' in text
    lines = len(text.splitlines())
    served.round(ONE, TWO, *(type(ONE)(pid=pid, start=pid) for pid in range(10, 500)))
    assert len(served.get("/metrics").text.splitlines()) <= lines


def test_secrets_of_the_configuration_are_masked() -> None:
    with Served(server={"auth": {"token": "hunter2-hunter2"}}) as served:
        text = served.get("/api/v1/config").text
        assert "hunter2" not in text and "********" in text


def test_plugins(served: Served) -> None:
    assert served.get("/api/v1/plugins?family=collectors").json() == {"collectors": []}
    assert served.error("GET", "/api/v1/plugins?family=x", 404)["detail"]["families"] == ["collectors"]


def test_a_receiver_that_raises_costs_the_others_nothing() -> None:
    class Member:
        def __init__(self, error: Exception | None = None) -> None:
            self.got: list[Any] = []
            self.error = error

        def publish(self, done: Any) -> None:
            if self.error:
                raise self.error
            self.got.append(done)

    first, second, late = Member(ValueError("no")), Member(), Member()
    fanout = Fanout(first, second)
    with small() as served:
        assert served.controller.latest is not None
        fanout.publish(served.controller.latest)
        fanout.add(late)
        fanout.publish(served.controller.latest)
    assert (len(second.got), len(late.got), fanout.failures_count) == (2, 1, 2)


class Hangs(Subscriber):
    """Never returns from a delivery until it may."""

    abstract = True

    def __init__(self, settings: Any = None) -> None:
        super().__init__(settings)
        self.called, self.may_go = threading.Event(), threading.Event()

    def deliver(self, completed: Round) -> None:
        self.called.set()
        self.may_go.wait()


def test_d07_a_receiver_that_hangs_delays_no_request(served: Served) -> None:
    hangs = Hangs()
    served.subscribers.add(hangs)
    try:
        served.round()
        assert hangs.called.wait(60)
        assert served.send("POST", "/api/v1/control/trigger").json()["round"] == 4
        assert served.get("/api/v1/graph").json()["round"] == 4
        assert 'gpuflight_subscriber_queued{subscriber="hangs",type="hangs"} 2\n' in served.get("/metrics").text
    finally:
        hangs.may_go.set()
