"""Whether gpuflight itself does what it should: its cost, its rounds, its deliveries, its peers."""

from __future__ import annotations

from collections.abc import Iterable

from gpuflight.bottlenecks.base import CLEAR, ElementRule, GroupRule, Need, Threshold, Unknown, Verdict
from gpuflight.bottlenecks.window import Look, Window, evidence
from gpuflight.graph import nodes

_UNINTENDED = frozenset({"replaced", "interval"})
"""Reasons for which a subscriber leaves rounds out as it was told to (subscribers/queue.py)."""


def _host(window: Window) -> nodes.Host:
    for host in window.all(nodes.Host):
        if not host.ns:
            return host
    raise Unknown("the collector host gives no Host")


class CollectorOverBudget(GroupRule):
    """A collector costs more of the machine than watching it is worth."""

    catalogue_id = "M01"
    severity = "info"
    needs = (Need(kind=nodes.Host, given_by="host"),)
    thresholds = {
        "cpu": Threshold(value=1, clear_at=0.7, unit="% of a core", source="weaveworks/scope#812: 70 %", guess=True),
        "interval": Threshold(value=50, clear_at=30, unit="% of the interval", source="as above", guess=True),
    }
    guard = "rounds are at least 4 s apart: who asks for more, gets it"
    persist_s = 60.0
    advice = "switch off what you do not need (collectors.<name>.enabled), or raise interval_s"
    verify = "gpuflight run --offline 30 --json | grep -A20 collectors"

    def judge(self, window: Window) -> Iterable[Verdict]:
        if window.interval_s is None or window.interval_s < 4.0:
            return
        host = _host(window)
        cpu_limit, wall_limit = (window.overrides.threshold(self, name).value for name in ("cpu", "interval"))
        for line in window.round.coverage:
            cpu = line.cpu_ms / 10 / window.interval_s
            wall = line.wall_ms / 10 / window.interval_s
            if line.collector == "core" or (cpu <= cpu_limit and wall <= wall_limit):
                continue
            yield Verdict(
                state="fired", subject=f"{host.id}/{line.collector}", severity=self.severity, entities=[host.id],
                message=f"the collector {line.collector} takes {cpu:.1f} % of a core and {wall:.0f} % of the interval",
                evidence=[
                    evidence(host.id, f"{line.collector}: cpu_ms", line.cpu_ms, window_s=window.interval_s),
                    evidence(host.id, f"{line.collector}: wall_ms", line.wall_ms, window_s=window.interval_s),
                ],
            )  # fmt: skip


class InvalidRecords(ElementRule):
    """A session holds GPU records that cannot be true: no start, an end before the start.

    They are left out of every sum. Some are usual; many mean that its clocks, or its profiler, are broken.
    """

    catalogue_id = "M03"
    subject = nodes.Session
    needs = (Need(kind=nodes.Session, metrics=("invalid_records_count", "launches_count"), given_by="sessions"),)
    thresholds = {"share": Threshold(value=0.1, unit="% of the records", source="parcagpu#23, NVRx PR#115", guess=True)}
    whole_session = True
    advice = "update the driver and CUPTI; if it stays, report the session"
    verify = "gpuflight report <session>"

    def judge(self, look: Look) -> Verdict:
        invalid, launches = look.metric("invalid_records_count"), look.metric("launches_count")
        share = 100 * invalid / launches if launches else 0.0
        if share <= look.limit("share"):
            return CLEAR
        return look.fired(
            f"{invalid:.0f} of {launches:.0f} records of {look.label} have impossible times ({share:.2f} %)",
            [look.saw("invalid_records_count"), look.saw("launches_count")],
        )


class SubscriberBacklog(GroupRule):
    """A subscriber does not keep up: rounds are lost to it, or wait for long."""

    catalogue_id = "M04"
    needs = (Need(kind=nodes.Host, given_by="the statistics of the subscribers"),)
    thresholds = {
        "lag": Threshold(value=5, clear_at=2, unit="intervals", source="contrib#31775: 80 % of the queue", guess=True),
        "dropped": Threshold(value=0, unit="rounds", source="contrib#31775: any drop"),
    }
    advice = "see its last error (gpuflight subscriber list); a spool keeps what a sink that is away would miss"
    verify = "gpuflight subscriber list"

    def judge(self, window: Window) -> Iterable[Verdict]:
        if not window.subscribers:
            return
        host = _host(window)
        before = {each.name: _lost(each) for each in window.subscribers_before}
        for each in window.subscribers:
            lost = _lost(each) - before.get(each.name, _lost(each))
            lag_s = each.statistics.lag_s
            late = window.interval_s is not None and lag_s > max(
                window.overrides.threshold(self, "lag").value * window.interval_s, 30.0
            )
            if lost <= window.overrides.threshold(self, "dropped").value and not late:
                continue
            told = f"{lost} rounds were lost to it" if lost > 0 else f"its oldest round waits for {lag_s:.0f} s"
            yield Verdict(
                state="fired", subject=f"{host.id}/{each.name}", entities=[host.id],
                message=f"the subscriber {each.name} does not keep up: {told}",
                evidence=[
                    evidence(host.id, f"{each.name}: dropped_count", lost),
                    evidence(host.id, f"{each.name}: queued_count", each.statistics.queued),
                    evidence(host.id, f"{each.name}: lag_s", lag_s),
                ],
            )  # fmt: skip


def _lost(status: object) -> int:
    by: dict[str, int] = status.statistics.dropped_by  # type: ignore[attr-defined]
    return sum(count for reason, count in by.items() if reason not in _UNINTENDED)


class IncompleteRound(GroupRule):
    """The picture is not whole: a limit ended the expansion, or a collector failed or did not answer."""

    catalogue_id = "M06"
    severity = "info"
    needs = (Need(kind=nodes.Host, given_by="every round's coverage"),)
    advice = "raise the limit that is named (limits.*), or see why the collector fails (its coverage line)"
    verify = "gpuflight env"

    def judge(self, window: Window) -> Iterable[Verdict]:
        host = _host(window)
        if window.round.truncated_by:
            count = len(window.round.graph.nodes)
            yield Verdict(
                state="fired", subject=f"{host.id}/truncated", severity="warn", entities=[host.id],
                message=f"the expansion ended at the limit {window.round.truncated_by} with {count} entities",
                evidence=[evidence(host.id, "truncated_by", window.round.truncated_by),
                          evidence(host.id, "nodes_count", count)],
            )  # fmt: skip
        for line in window.round.coverage:
            if line.status in ("failed", "stale"):
                yield Verdict(
                    state="fired", subject=f"{host.id}/{line.collector}", severity="info", entities=[host.id],
                    message=f"the collector {line.collector} {line.status} ({line.age_rounds} rounds): {line.reason}",
                    evidence=[evidence(host.id, f"{line.collector}: status", line.status),
                              evidence(host.id, f"{line.collector}: age_rounds", line.age_rounds)],
                )  # fmt: skip


class ProfilerOverhead(ElementRule):
    """Profiling slows the program down.

    Measured where a recorder's window was switched on and off: the step with it against the step without.
    """

    catalogue_id = "M07"
    subject = nodes.Session
    severity = "info"
    needs = (
        Need(kind=nodes.Session, metrics=("profiler_overhead_pct",), given_by="sessions, of recorders with windows"),
    )
    thresholds = {"overhead": Threshold(value=1, unit="% of the step", source="parca-agent#3213: -64 %", guess=True)}
    whole_session = True
    explains = ("step_outliers", "fail_slow")
    advice = "record in windows (gpuflight run --after 60 --for 10 -- …), or without stacks"
    verify = "gpuflight run --after 60 --for 10 -- <program>"

    def judge(self, look: Look) -> Verdict:
        overhead = look.metric("profiler_overhead_pct")
        if overhead <= look.limit("overhead"):
            return CLEAR
        return look.fired(
            f"{look.label} takes {overhead:.1f} % longer per step while it is recorded",
            [look.saw("profiler_overhead_pct")],
        )


class StaleRemote(GroupRule):
    """Another instance has not answered for several intervals: what is shown of it is old."""

    catalogue_id = "M05"
    needs = (Need(kind=nodes.Host, metrics=("stale_s", "round_age_s"), attributes=("stale",), given_by="remote"),)
    thresholds = {
        "age": Threshold(value=3, clear_at=3, unit="intervals", source="microsoft/pai#889: stale metrics on failure"),
        "least": Threshold(value=15, unit="s", source="shorter ones are jitter", guess=True),
    }
    guard = "this host pulls other instances"
    advice = "is the other host up, and its gpuflight-server? its note on the coverage line says what failed"
    verify = "curl -sS http://<peer>:9477/readyz"

    def judge(self, window: Window) -> Iterable[Verdict]:
        for host in window.all(nodes.Host):
            if not host.ns or not host.attributes.get("stale"):
                continue
            age_s = host.metrics.get("stale_s")
            if age_s is None:
                yield Verdict(state="unknown", subject=host.id, reason="stale_s of Host: not told")
                continue
            interval_s = window.interval_s or 5.0
            least_s = window.overrides.threshold(self, "least").value
            if age_s > max(window.overrides.threshold(self, "age").value * interval_s, least_s):
                yield Verdict(
                    state="fired", subject=host.id, entities=[host.id],
                    message=f"{host.attributes.get('name') or host.ns} has not answered for {age_s:.0f} s",
                    evidence=[evidence(host.id, "stale_s", age_s)],
                )  # fmt: skip
