"""``/metrics`` in the text format of Prometheus. Labels are bounded: collectors, subscribers, GPUs, reasons; nothing
that comes and goes, such as processes and connections."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping

from fastapi import Depends
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from gpuflight import __version__
from gpuflight.graph.nodes import GPU
from gpuflight.rounds import Round
from gpuflight.server.auth import Role, require
from gpuflight.server.consume.metrics import add_metrics
from gpuflight.server.deps import State
from gpuflight.server.events.figures import add_metrics as add_event_metrics
from gpuflight.server.hub import StreamHub
from gpuflight.server.router import PlainRouter
from gpuflight.server.samples import sample
from gpuflight.server.state import ServerState

router = PlainRouter(tags=["metrics"], dependencies=[Depends(require(Role.VIEWER))])

_STATUSES = ("ok", "stale", "skipped", "failed")
_SEVERITIES = ("info", "warn", "critical")


@router.get("/metrics", summary="Metrics for Prometheus", openapi_extra=sample("GET", "/metrics"))
async def metrics(state: State) -> Response:
    """Rounds, collectors, subscribers, GPUs and gpuflight's own cost. What is unknown has no sample."""
    # In a thread: the size of the event store is asked of a database.
    text = exposition(state) if state.events is None else await run_in_threadpool(exposition, state)
    return Response(
        text.encode(errors="backslashreplace"),
        media_type="text/plain; version=0.0.4; charset=utf-8",
        headers={"cache-control": "no-store"},
    )


class _Text:
    """Families of samples, in the order they were begun."""

    def __init__(self) -> None:
        self._families: dict[str, list[str]] = {}

    def add(
        self, name: str, kind: str, help_text: str, value: float | int | None, labels: Mapping[str, str] | None = None
    ) -> None:
        """One sample; nothing for a value that is not known."""
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            return
        full = f"gpuflight_{name}"
        lines = self._families.setdefault(full, [f"# HELP {full} {help_text}", f"# TYPE {full} {kind}"])
        inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in (labels or {}).items())
        lines.append(f"{full}{{{inside}}} {value!r}" if inside else f"{full} {value!r}")

    def text(self) -> str:
        """Everything, one line each."""
        return "".join(line + "\n" for lines in self._families.values() for line in lines)


def exposition(state: ServerState) -> str:
    """All metrics of a server as text."""
    text = _Text()
    controller = state.controller
    text.add("build_info", "gauge", "Version of gpuflight.", 1, {"version": __version__})
    text.add("uptime_seconds", "gauge", "Time since the server was made.", round(time.monotonic() - state.started_s, 3))
    text.add("rounds_running", "gauge", "1 while rounds are made.", int(controller.running))
    text.add("rounds_references", "gauge", "Starts that were not stopped.", controller.references_count)
    text.add("rounds_failed_total", "counter", "Rounds that failed as a whole.", controller.failed_rounds_count)
    text.add("history_bytes", "gauge", "Memory of the rounds kept.", controller.history.used_bytes)
    text.add("bodies_bytes", "gauge", "Memory of the answers kept.", state.bodies.used_bytes)
    text.add("bodies_built_total", "counter", "Answers that were built.", state.bodies.built_count)
    text.add("bodies_hits_total", "counter", "Answers that were there already.", state.bodies.hits_count)
    latest = controller.latest
    if latest is not None:
        _round(text, latest)
        _collectors(text, latest)
        _gpus(text, latest)
    _subscribers(text, state)
    if state.hub is not None:
        _stream(text, state.hub)
    if state.consumer is not None:
        add_metrics(text.add, state.consumer.figures())
    if state.events is not None:
        add_event_metrics(text.add, state.events.figures, state.events.state())
    return text.text()


def _round(text: _Text, done: Round) -> None:
    text.add("round_number", "counter", "Number of the latest round.", done.number)
    text.add("round_start_timestamp_seconds", "gauge", "When the latest round began.", done.time_ns / 1e9)
    text.add("round_duration_seconds", "gauge", "What the latest round took.", round(done.duration_s, 6))
    text.add("round_truncated", "gauge", "1 if a limit ended the latest round early.", int(bool(done.truncated_by)))
    text.add("graph_nodes", "gauge", "Entities of the latest graph.", len(done.graph.nodes))
    text.add("graph_edges", "gauge", "Edges of the latest graph.", len(done.graph.edges))
    for severity in _SEVERITIES:
        count = sum(finding.severity == severity for finding in done.findings)
        text.add("findings", "gauge", "Findings of the latest round.", count, {"severity": severity})
    _findings(text, done)
    own = done.own_cost
    if own is not None:
        text.add("own_cpu_percent", "gauge", "CPU time of gpuflight, % of one core.", own.cpu_pct)
        text.add("own_resident_bytes", "gauge", "Resident memory of gpuflight.", own.rss_bytes)
        text.add("own_threads", "gauge", "Threads of gpuflight.", own.threads_count)
        text.add("own_descriptors", "gauge", "Open descriptors of gpuflight.", own.fds_count)


def _findings(text: _Text, done: Round) -> None:
    """One series per rule and severity with an open finding: as many as there are rules at most, whatever is found."""
    counts = Counter((finding.rule, finding.severity) for finding in done.findings)
    lost: dict[str, float] = {}
    for finding in done.findings:
        if finding.cost_gpu_s is not None and not finding.explained_by:
            lost[finding.rule] = lost.get(finding.rule, 0.0) + finding.cost_gpu_s
    for (rule, severity), count in sorted(counts.items()):
        text.add("rule_findings", "gauge", "Open findings by rule.", count, {"rule": rule, "severity": severity})
    for rule, gpus in sorted(lost.items()):
        text.add("rule_lost_gpus", "gauge", "GPUs' worth lost, as far as known.", round(gpus, 6), {"rule": rule})


def _collectors(text: _Text, done: Round) -> None:
    for line in done.coverage:
        labels = {"collector": line.collector}
        for status in _STATUSES:
            value = int(line.status == status)
            text.add("collector_status", "gauge", "1 for the status it has.", value, {**labels, "status": status})
        text.add("collector_wall_seconds", "gauge", "Time of the collector in the round.", line.wall_ms / 1e3, labels)
        text.add("collector_cpu_seconds", "gauge", "CPU of the collector in the round.", line.cpu_ms / 1e3, labels)
        text.add("collector_nodes", "gauge", "Entities the collector reported.", line.nodes_count, labels)
        text.add("collector_edges", "gauge", "Edges the collector reported.", line.edges_count, labels)
        lost = sum(line.losses.values())
        text.add("collector_losses", "gauge", "What it could not report this round.", lost, labels)


def _subscribers(text: _Text, state: ServerState) -> None:
    if state.subscribers is None:
        return
    for line in state.subscribers.status():
        labels, counts = {"subscriber": line.name, "type": line.type}, line.statistics
        text.add("subscriber_ok", "gauge", "1 while deliveries go well.", int(line.state == "ok"), labels)
        text.add("subscriber_received_total", "counter", "Rounds offered.", counts.received, labels)
        text.add("subscriber_sent_total", "counter", "Rounds delivered.", counts.sent, labels)
        text.add("subscriber_queued", "gauge", "Rounds that wait.", counts.queued, labels)
        text.add("subscriber_queued_bytes", "gauge", "Size of what waits.", counts.queued_bytes, labels)
        text.add("subscriber_lag_seconds", "gauge", "Age of the oldest round that waits.", counts.lag_s, labels)
        text.add("subscriber_retries_total", "counter", "Deliveries tried again.", counts.retries, labels)
        text.add("subscriber_errors_total", "counter", "Errors.", counts.errors, labels)
        for reason, count in sorted(counts.dropped_by.items()):
            labelled = {**labels, "reason": reason}
            text.add("subscriber_dropped_total", "counter", "Rounds given up.", count, labelled)


def _stream(text: _Text, hub: StreamHub) -> None:
    text.add("stream_clients", "gauge", "Clients of the live stream.", hub.clients_count)
    text.add("stream_events_total", "counter", "Events encoded, each once for all clients.", hub.events_count)
    text.add("stream_coalesced_total", "counter", "Times that a client did not keep up.", hub.coalesced_count)
    text.add("stream_merged_total", "counter", "Differences put together of several rounds.", hub.merged_count)
    text.add("stream_aborted_total", "counter", "Clients cut off because they did not read.", hub.aborted_count)
    for reason, count in sorted(hub.closed_counts.items()):
        text.add("stream_closed_total", "counter", "Streams that ended, by reason.", count, {"reason": reason})


def _gpus(text: _Text, done: Round) -> None:
    gpus: Iterable[GPU] = done.graph.of_kind(GPU)
    for gpu in gpus:
        labels = {"gpu": str(gpu.attributes.get("index", "")), "id": gpu.id, "name": gpu.label}
        if gpu.ns:
            labels["namespace"] = gpu.ns
        text.add("gpu_lost", "gauge", "1 for a GPU that answers no more.", int(_is_lost(gpu)), labels)
        for name, value in gpu.metrics.items():
            text.add(f"gpu_{_metric_name(name)}", "gauge", "As in the graph; the unit ends the name.", value, labels)


def _is_lost(gpu: GPU) -> bool:
    return gpu.attributes.get("state") == "lost" or gpu.attributes.get("lost") is True


def _metric_name(name: str) -> str:
    return "".join(letter if letter.isascii() and (letter.isalnum() or letter == "_") else "_" for letter in name)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
