"""The subscriber that sends findings and figures to an OpenTelemetry collector (OTLP over HTTP, protobuf).

The data model and the encoding are those of the OpenTelemetry SDK; queue, retry, deadlines and the guard of addresses
are ours, as for every subscriber.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
from pydantic import Field, SecretStr, field_validator

from gpuflight import __version__
from gpuflight.errors import DeliveryError, MissingExtra
from gpuflight.graph.nodes import GPU, Host
from gpuflight.rounds import Finding, Round
from gpuflight.subscribers.base import Outside, PackedSettings, PackedSubscriber, Parcel, parcel
from gpuflight.subscribers.encoding import Encoding
from gpuflight.subscribers.http_post import HttpPost, HttpPostSettings
from gpuflight.subscribers.netguard import Refused, split_url

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import Metric

_UNITS = (
    ("_bytes_per_s", "By/s"), ("_bits_per_s", "bit/s"), ("_per_s", "1/s"), ("_bytes", "By"), ("_pct", "%"),
    ("_celsius", "Cel"), ("_watts", "W"), ("_joules", "J"), ("_hz", "Hz"), ("_cores", "{core}"), ("_ns", "ns"),
    ("_us", "us"), ("_ms", "ms"), ("_s", "s"), ("_count", "1"),
)  # fmt: skip
"""UCUM units by the suffix of our metrics' names, as OpenTelemetry wants them."""
_SEVERITY = {"info": 9, "warn": 13, "critical": 21}
"""INFO, WARN and FATAL of the log data model."""


class OtlpSettings(PackedSettings):
    """Settings of the OpenTelemetry subscriber."""

    url: str = Field(
        min_length=1, max_length=2000, description="base URL of the collector, as http://collector:4318; /v1/… is added"
    )
    logs: bool = Field(default=True, description="send findings that open, change and end as log records")
    metrics: bool = Field(default=True, description="send figures of host and GPUs, findings by rule, and own cost")
    compression: Encoding = Field(default="gzip", description="content coding of the body (gzip or none)")
    headers: dict[str, SecretStr] = Field(
        default_factory=dict, description="further headers, such as Authorization; shown masked"
    )
    tls_ca_file: str | None = Field(
        default=None, min_length=1, description="path of PEM certificates to trust instead of the system's"
    )

    @field_validator("url")
    @classmethod
    def _is_a_url(cls, value: str) -> str:
        try:
            split_url(value)
        except Refused as error:
            raise ValueError(str(error)) from None
        if "?" in value or "#" in value:
            raise ValueError("a base URL without query")
        return value.rstrip("/")

    @field_validator("compression")
    @classmethod
    def _is_known_to_collectors(cls, value: Encoding) -> Encoding:
        if value == "zstd":
            raise ValueError("collectors take gzip or none")
        return value


class _Protobuf(HttpPost):
    """Posts protobuf to one path of the collector."""

    abstract = True
    content_type = "application/x-protobuf"


class Otlp(PackedSubscriber):
    """Sends findings as logs, and figures of host and GPUs as metrics, to an OpenTelemetry collector."""

    settings_class = OtlpSettings

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._told: dict[str, Finding] = {}
        self._posts = {
            "metrics": self._poster("/v1/metrics") if self.settings.metrics else None,
            "logs": self._poster("/v1/logs") if self.settings.logs else None,
        }

    def _poster(self, path: str) -> _Protobuf:
        own = self.settings
        return _Protobuf(
            HttpPostSettings(
                url=own.url + path, compression=own.compression, headers=own.headers, tls_ca_file=own.tls_ca_file,
                deliver_deadline_s=own.deliver_deadline_s,
            )
        )  # fmt: skip

    def outside(self) -> Outside:
        files = (self.settings.tls_ca_file, self.settings.spool_folder and f"{self.settings.spool_folder}/spool")
        urls = tuple(post.settings.url for post in self._posts.values() if post is not None)
        return Outside(paths=tuple(path for path in files if path), urls=urls)

    def start(self) -> None:
        try:
            import opentelemetry.exporter.otlp.proto.common
            import opentelemetry.sdk  # noqa: F401
        except ImportError as error:
            missing = MissingExtra(error.name or "opentelemetry-sdk", "otlp", "otlp")
            raise DeliveryError(str(missing), retryable=False) from error
        for post in self._posts.values():
            if post is not None:
                post.rules = self.rules
                post.start()

    def pack(self, completed: Round, after: int | None) -> Parcel:
        metrics = _metrics(completed) if self.settings.metrics else b""
        logs = self._logs(completed) if self.settings.logs else b""
        return parcel(completed, msgspec.msgpack.encode((metrics, logs)))

    def send(self, packed: Parcel) -> None:
        bodies: tuple[bytes, bytes] = msgspec.msgpack.decode(packed.data, type=tuple[bytes, bytes])
        for (name, post), body in zip(self._posts.items(), bodies, strict=True):
            if post is not None and body:
                post.send_body(packed, body, name)

    def trial(self, completed: Round) -> None:
        """Sends the figures of the round once; findings are not told."""
        post = self._posts["metrics"] or self._posts["logs"]
        if post is not None:
            post.send_body(parcel(completed, b""), _metrics(completed) if self._posts["metrics"] else b"", "trial")

    def close(self) -> None:
        for post in self._posts.values():
            if post is not None:
                post.close()

    def _logs(self, completed: Round) -> bytes:
        """Log records of what changed since the round that was packed before; empty if nothing did."""
        from opentelemetry._logs import LogRecord, SeverityNumber
        from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
        from opentelemetry.sdk._logs import ReadableLogRecord

        known, self._told = self._told, {finding.id: finding for finding in completed.findings}
        changes = [("opened", f) for i, f in self._told.items() if i not in known]
        changes += [("updated", f) for i, f in self._told.items() if i in known and known[i].severity != f.severity]
        changes += [("cleared", f) for i, f in known.items() if i not in self._told]
        if not changes:
            return b""
        resource, scope = _resource(completed), _scope()
        records = []
        for change, finding in changes:
            severity = 9 if change == "cleared" else _SEVERITY[finding.severity]
            attributes: dict[str, Any] = {
                "gpuflight.finding.id": finding.id,
                "gpuflight.finding.change": change,
                "gpuflight.rule": finding.rule,
                "gpuflight.entities": finding.entities,
                "gpuflight.edges": finding.edges,
                "gpuflight.advice": finding.advice,
            }
            if finding.cost_gpu_s is not None:
                attributes["gpuflight.cost_gpus"] = finding.cost_gpu_s
            for seen in finding.evidence:
                attributes[f"gpuflight.evidence.{seen.metric}"] = seen.value
            record = LogRecord(
                timestamp=completed.time_ns, observed_timestamp=completed.time_ns, severity_text=finding.severity,
                severity_number=SeverityNumber(severity), body=finding.message, attributes=attributes,
                event_name="gpuflight.finding",
            )  # fmt: skip
            records.append(ReadableLogRecord(record, resource, scope))
        encoded: bytes = encode_logs(records).SerializeToString()
        return encoded


def _resource(completed: Round) -> Any:
    from opentelemetry.sdk.resources import Resource

    env = completed.env
    known = {"service.name": "gpuflight", "service.version": __version__}
    return Resource({**known, "host.name": env.hostname, "host.id": env.machine_id})


def _scope() -> Any:
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    return InstrumentationScope("gpuflight", __version__)


def _metrics(completed: Round) -> bytes:
    """Gauges of the host, of each GPU, of findings by rule and of gpuflight's own cost: as many series as there are
    GPUs, rules and collectors, whatever else is in the graph."""
    from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
    from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics

    points: dict[str, list[tuple[dict[str, Any], float]]] = {}
    for entity in completed.graph.of_kind(Host):
        if not entity.ns:
            for name, value in entity.metrics.items():
                points.setdefault(f"gpuflight.host.{name}", []).append(({}, value))
    for gpu in completed.graph.of_kind(GPU):
        if not gpu.ns:
            labels = {"gpu.uuid": gpu.uuid, "gpu.index": gpu.attributes.get("index", -1)}
            for name, value in gpu.metrics.items():
                points.setdefault(f"gpuflight.gpu.{name}", []).append((labels, value))
    for (rule, severity), count in Counter((f.rule, f.severity) for f in completed.findings).items():
        points.setdefault("gpuflight.findings_count", []).append(({"rule": rule, "severity": severity}, count))
    for line in completed.coverage:
        points.setdefault("gpuflight.collector.cpu_ms", []).append(({"collector": line.collector}, line.cpu_ms))
    own = completed.own_cost
    if own is not None:
        points["gpuflight.own.rss_bytes"] = [({}, own.rss_bytes)]
        if own.cpu_pct is not None:
            points["gpuflight.own.cpu_pct"] = [({}, own.cpu_pct)]
    metrics = [_gauge(name, found, completed.time_ns) for name, found in points.items()]
    data = MetricsData([ResourceMetrics(_resource(completed), [ScopeMetrics(_scope(), metrics, "")], "")])
    encoded: bytes = encode_metrics(data).SerializeToString()
    return encoded


def _gauge(name: str, found: list[tuple[dict[str, Any], float]], time_ns: int) -> Metric:
    from opentelemetry.sdk.metrics.export import Gauge, Metric, NumberDataPoint

    unit = next((unit for suffix, unit in _UNITS if name.endswith(suffix)), "1")
    points = [NumberDataPoint(labels, time_ns, time_ns, value) for labels, value in found]
    return Metric(name, None, unit, Gauge(points))
