"""Findings sent out: webhooks by template, and OpenTelemetry logs and metrics, both to a real receiver of HTTP."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError
from tests.fakes.http_receiver import Answer, Receiver

from gpuflight.errors import DeliveryError
from gpuflight.graph import Graph, nodes
from gpuflight.graph.diff import Diff
from gpuflight.rounds import Coverage, Environment, Evidence, Finding, OwnCost, Round, Severity
from gpuflight.subscribers.webhook import Webhook, WebhookSettings

HOT = "GPU 3 is slowed by heat at 88 °C"


def finding(name: str = "hot", severity: Severity = "critical", **other: Any) -> Finding:
    seen = [Evidence(element="GPU(uuid=G3)", metric="temperature_celsius", value=88, unit="°C")]
    return Finding(id=f"{name}@GPU(uuid=G3)", rule=name, severity=severity, message=HOT, entities=["GPU(uuid=G3)"],
                   evidence=seen, **other)  # fmt: skip


def round_of(number: int, *findings: Finding) -> Round:
    gpu = nodes.GPU(uuid="G3", attributes={"index": 3}, metrics={"temperature_celsius": 88, "memory_used_bytes": 2**30})
    host = nodes.Host(hostname="box", metrics={"cpu_busy_pct": 12.5})
    return Round(
        number=number, time_ns=1_700_000_000_000_000_000 + number, duration_s=0.1, graph=Graph([gpu, host], []),
        diff=Diff(), coverage=[Coverage(collector="nvml", status="ok", cpu_ms=2.5)], env=Environment(hostname="box"),
        findings=list(findings), own_cost=OwnCost(cpu_pct=1.0, rss_bytes=1000),
    )  # fmt: skip


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as made:
        yield made


def webhook(receiver: Receiver, **settings: Any) -> Webhook:
    made = Webhook(WebhookSettings(url=receiver.url, **settings))
    made.start()
    return made


def deliver(subscriber: Any, done: Round) -> None:
    subscriber.send(subscriber.pack(done, done.number - 1))


def test_one_request_for_each_that_opens_and_one_when_it_ends(receiver: Receiver) -> None:
    sink = webhook(receiver)
    deliver(sink, round_of(1))
    deliver(sink, round_of(2, finding(), finding("other")))
    deliver(sink, round_of(3, finding(), finding("other")))
    deliver(sink, round_of(4, finding("other")))
    sink.close()
    told = [json.loads(each.body) for each in receiver.received]
    assert [(t["round"], t["change"], t["finding"]["rule"]) for t in told] == [
        (2, "opened", "hot"), (2, "opened", "other"), (4, "cleared", "hot"),
    ]  # fmt: skip
    assert told[0]["finding"]["evidence"][0]["value"] == 88
    keys = [each.headers["idempotency-key"] for each in receiver.received]
    assert len(set(keys)) == 3


def test_what_rounds_in_between_said_is_not_lost(receiver: Receiver) -> None:
    sink = webhook(receiver)
    deliver(sink, round_of(1))
    deliver(sink, round_of(9, finding()))
    sink.close()
    assert [json.loads(each.body)["change"] for each in receiver.received] == ["opened"]


def test_a_template_of_json_stays_json_whatever_names_hold(receiver: Receiver) -> None:
    hostile = finding(advice='"},{"evil": "\n')
    sink = webhook(receiver, template={"text": "{icon} {severity}: {message} on {hostname}", "more": ["{advice}", 7]})
    deliver(sink, round_of(1, hostile))
    sink.close()
    body = json.loads(receiver.received[0].body)
    assert body == {"text": f"\N{LARGE RED CIRCLE} critical: {HOT} on box", "more": ['"},{"evil": "\n', 7]}


@pytest.mark.parametrize(
    "template", [{"text": "{nosuch}"}, {"text": "{message.__class__}"}, {"text": "{"}, {"a": [[[[[[[[[["x"]]]]]]]]]]}]
)
def test_a_template_that_cannot_be_filled_is_refused_at_once(template: Any) -> None:
    with pytest.raises(ValidationError):
        WebhookSettings(url="http://127.0.0.1:1/", template=template)


def test_only_what_is_wanted(receiver: Receiver) -> None:
    sink = webhook(receiver, severities=["critical"], changes=["opened"])
    symptom = finding("symptom", explained_by="hot@GPU(uuid=G3)")
    deliver(sink, round_of(1, finding(severity="warn"), symptom))
    assert receiver.received == []
    deliver(sink, round_of(2))
    sink.close()
    assert receiver.received == []


def test_a_storm_is_cut_and_says_so(receiver: Receiver) -> None:
    sink = webhook(receiver, max_per_round=3)
    deliver(sink, round_of(1, *(finding(f"r{n}") for n in range(10))))
    sink.close()
    told = [json.loads(each.body)["finding"]["message"] for each in receiver.received]
    assert told == [HOT] * 3 + ["and 7 further changes"]


def test_a_receiver_that_refuses_is_told_as_for_rounds() -> None:
    with Receiver(lambda _: Answer(status=503)) as receiver:
        sink = webhook(receiver)
        with pytest.raises(DeliveryError) as caught:
            deliver(sink, round_of(1, finding()))
        sink.close()
    assert caught.value.retryable


def _otlp(receiver: Receiver, **settings: Any) -> Any:
    pytest.importorskip("opentelemetry.sdk")
    from gpuflight.subscribers.otlp import Otlp, OtlpSettings

    made = Otlp(OtlpSettings(url=receiver.url.partition("/rounds")[0], **settings))
    made.start()
    return made


def test_metrics_as_a_collector_reads_them(receiver: Receiver) -> None:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    sink = _otlp(receiver)
    deliver(sink, round_of(1, finding()))
    sink.close()
    request = next(each for each in receiver.received if each.path.endswith("/v1/metrics"))
    assert request.headers["content-type"] == "application/x-protobuf"
    read = ExportMetricsServiceRequest.FromString(gzip.decompress(request.body))
    resource = {a.key: a.value.string_value for a in read.resource_metrics[0].resource.attributes}
    assert resource["service.name"] == "gpuflight" and resource["host.name"] == "box"
    found = {m.name: m for m in read.resource_metrics[0].scope_metrics[0].metrics}
    heat = found["gpuflight.gpu.temperature_celsius"]
    assert heat.unit == "Cel" and heat.gauge.data_points[0].as_int == 88
    assert found["gpuflight.host.cpu_busy_pct"].gauge.data_points[0].as_double == 12.5
    assert found["gpuflight.findings_count"].gauge.data_points[0].as_int == 1
    assert heat.gauge.data_points[0].time_unix_nano == 1_700_000_000_000_000_001


def test_findings_as_log_records(receiver: Receiver) -> None:
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

    sink = _otlp(receiver, metrics=False, compression="none")
    deliver(sink, round_of(1, finding()))
    deliver(sink, round_of(2, finding()))
    deliver(sink, round_of(3))
    sink.close()
    assert [each.path for each in receiver.received] == ["/v1/logs"] * 2
    records = [
        ExportLogsServiceRequest.FromString(each.body).resource_logs[0].scope_logs[0].log_records[0]
        for each in receiver.received
    ]
    assert [record.body.string_value for record in records] == [HOT, HOT]
    assert [record.severity_number for record in records] == [21, 9]
    attributes = {a.key: a.value for a in records[0].attributes}
    assert attributes["gpuflight.rule"].string_value == "hot"
    assert attributes["gpuflight.evidence.temperature_celsius"].int_value == 88


def test_series_are_bounded_by_gpus_and_rules() -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    from gpuflight.subscribers.otlp import _metrics

    done = round_of(1, finding())
    crowd = [nodes.Process(pid=n, start=1, metrics={"cpu_pct": 1.0}) for n in range(1, 500)]
    done.graph = Graph([*done.graph, *crowd], [])
    read = ExportMetricsServiceRequest.FromString(_metrics(done))
    names = [m.name for m in read.resource_metrics[0].scope_metrics[0].metrics]
    assert len(names) < 20 and not any("process" in name.lower() for name in names)
