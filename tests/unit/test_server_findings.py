"""Findings and rules over REST, as series of Prometheus, and in the live stream."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from tests.unit.server_fixture import BUSY, HOST, LOST, ONE, Served, small

from gpuflight.graph import nodes
from gpuflight.graph.load import parse_graph
from gpuflight.round_codec import encode_round, encode_round_diff
from gpuflight.rounds import Finding

ID = f"gpu_lost@{LOST.id}"


@pytest.fixture
def served() -> Iterator[Served]:
    with small() as made:
        yield made


def test_open_findings_with_their_evidence(served: Served) -> None:
    answer = served.get("/api/v1/findings").json()
    assert answer["round"] == 2
    [found] = [each for each in answer["findings"] if each["rule"] == "gpu_lost"]
    assert (found["id"], found["severity"], found["entities"]) == (ID, "critical", [LOST.id])
    seen = found["evidence"][0]
    assert (seen["element"], seen["metric"], seen["value"]) == (LOST.id, "state", "lost")
    assert found["cost_gpu_s"] == 1.0 and found["advice"]
    assert msgspec.convert(found, Finding).id == ID


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("severity=critical", [ID]),
        ("severity=info", []),
        ("rule=gpu_lost", [ID]),
        ("rule=xid", []),
        (f"entity={LOST.id}", [ID]),
        (f"entity={BUSY.id}", []),
    ],
)
def test_selected(served: Served, query: str, expected: list[str]) -> None:
    found = served.get(f"/api/v1/findings?{query}").json()["findings"]
    assert [each["id"] for each in found if each["rule"] in ("gpu_lost", "xid")] == expected


def test_what_ended_is_told_once(served: Served) -> None:
    back = nodes.GPU(uuid="GPU-0", attributes={"index": 0, "state": "ok"})
    served.round(HOST, ONE, BUSY, back)
    assert served.get("/api/v1/findings?rule=gpu_lost").json()["findings"] != []  # gone for one round
    served.round()
    answer = served.get("/api/v1/findings?rule=gpu_lost").json()
    assert answer["findings"] == [] and [each["change"] for each in answer["cleared"]] == ["cleared"]
    served.round()
    assert served.get("/api/v1/findings?rule=gpu_lost").json()["cleared"] == []


def test_rules_and_what_they_cannot_say(served: Served) -> None:
    rules = {each["rule"]: each for each in served.get("/api/v1/rules").json()["rules"]}
    assert rules["gpu_lost"]["id"] == "H11" and "state" not in rules["gpu_lost"]
    assert rules["cpu_throttled"]["thresholds"]["throttled_crit"]["value"] == 25.0
    states = {each["rule"]: each for each in served.get("/api/v1/rules?states=true").json()["rules"]}
    assert states["gpu_lost"]["state"] == "fired" and states["gpu_lost"]["open_count"] == 1
    assert states["pcie_degraded"]["state"] == "unknown" and states["pcie_degraded"]["unknown"]
    assert states["cpu_throttled"]["state"] == "no subject"


def test_one_rule(served: Served) -> None:
    assert served.get("/api/v1/rules/gpu_lost").json()["judges"] == ["GPU"]
    error = served.error("GET", "/api/v1/rules/nosuch", 404)
    assert error["code"] == "no_such_rule" and "gpu_lost" in error["detail"]["rules"]


def test_without_rules_one_is_told_so() -> None:
    with Served(HOST, LOST, judged=False) as served:
        served.round()
        assert served.get("/api/v1/findings").json()["findings"] == []
        assert served.error("GET", "/api/v1/rules", 404)["code"] == "no_rules"


def test_series_are_as_many_as_rules(served: Served) -> None:
    text = served.get("/metrics").text
    assert 'gpuflight_findings{severity="critical"} 1' in text
    assert 'gpuflight_rule_findings{rule="gpu_lost",severity="critical"} 1' in text
    assert 'gpuflight_rule_lost_gpus{rule="gpu_lost"} 1' in text
    many = [nodes.GPU(uuid=f"G{n}", attributes={"state": "lost", "state_reason": f"why {n}"}) for n in range(50)]
    served.round(HOST, *many)
    served.round()
    lines = [line for line in served.get("/metrics").text.splitlines() if line.startswith("gpuflight_rule_findings{")]
    assert 'gpuflight_rule_findings{rule="gpu_lost",severity="critical"} 50' in lines
    assert not any("G7" in line for line in lines)


def test_they_travel_with_every_round(served: Served) -> None:
    latest = served.controller.latest
    assert latest is not None
    whole = parse_graph(encode_round(latest))
    assert [each["id"] for each in whole.findings if each["rule"] == "gpu_lost"] == [ID]
    line = msgspec.json.decode(encode_round_diff(latest))
    assert [each["id"] for each in line["findings"] if each["rule"] == "gpu_lost"] == [ID]
    assert line["monotonic_s"] == latest.monotonic_s
