"""Whether gpuflight itself loses what it is to see."""

from __future__ import annotations

from collections.abc import Iterable

from gpuflight.bottlenecks.base import GroupRule, Need, Threshold, Verdict
from gpuflight.bottlenecks.window import Window, evidence
from gpuflight.graph import nodes


class RecordsDropped(GroupRule):
    """A collector lost records, so its numbers are too low."""

    catalogue_id = "M02"
    needs = (Need(kind=nodes.Host, given_by="losses on the coverage lines"),)
    thresholds = {"losses_count": Threshold(value=0, unit="", source="parca-agent#3197: silent drops")}
    persist_rounds = 1
    clear_rounds = 1
    advice = "give the collector more room (docs/settings.md), or let it watch less"
    verify = "gpuflight coverage"

    def judge(self, window: Window) -> Iterable[Verdict]:
        host = next(window.all(nodes.Host), None)
        for line in window.round.coverage:
            lost = {what: count for what, count in line.losses.items() if "lost" in what or "dropped" in what}
            if host is None or sum(lost.values()) <= window.overrides.threshold(self, "losses_count").value:
                continue
            told = ", ".join(f"{count} {what}" for what, count in lost.items())
            yield Verdict(
                state="fired",
                subject=f"{host.id}/{line.collector}",
                entities=[host.id],
                evidence=[evidence(host.id, f"{line.collector}: {what}", count) for what, count in lost.items()],
                message=f"the collector {line.collector} lost records in this round: {told}; its numbers are too low",
            )
