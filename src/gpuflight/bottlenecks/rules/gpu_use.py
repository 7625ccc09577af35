"""GPUs that are held and not used, or unevenly."""

from __future__ import annotations

from collections.abc import Iterable

from gpuflight.bottlenecks.base import CLEAR, ElementRule, GroupRule, Need, Threshold, Unknown, Verdict
from gpuflight.bottlenecks.window import Look, Window, evidence, name_of
from gpuflight.graph import edges, nodes

_IDLE_WINDOW_S = 1800.0
_MIG_WINDOW_S = 300.0


class IdleReservedGpu(ElementRule):
    """A process holds a GPU and does not use it."""

    catalogue_id = "H17"
    subject = nodes.GPU
    severity = "info"
    needs = (Need(kind=nodes.GPU, metrics=("sm_util_pct", "processes_count"), given_by="nvml"),)
    thresholds = {"util": Threshold(value=1, unit="%", source="SageMaker: p5 below 10 %", guess=True, falling=True)}
    guard = "at least one process holds the GPU"
    persist_rounds = 1
    every_round = True
    histories = {nodes.GPU: {"sm_util_pct": _IDLE_WINDOW_S}}
    relations = (edges.Access,)
    cost_formula = "the whole GPU"
    advice = "ask its owner: notebooks and debuggers hold GPUs over night; end what is not needed"
    verify = "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv"

    def judge(self, look: Look) -> Verdict:
        if look.metric("processes_count") < 1 or look.metric("sm_util_pct") >= look.limit("util"):
            return CLEAR
        limit = look.limit("util")
        series = look.history("sm_util_pct", _IDLE_WINDOW_S, least=0.99)
        busy = series.share(look.window.now_s, _IDLE_WINDOW_S, lambda value: value >= limit)
        if busy is None or busy > 0:
            return CLEAR
        users = look.window.users(look.element)
        names = ", ".join(name_of(look.window, user.id) for user in users[:3]) or "a process"
        return look.fired(
            f"{names} holds {look.label} and did not use it for {_IDLE_WINDOW_S / 60:.0f} minutes"
            f" ({look.metric('sm_util_pct'):.0f} % busy)",
            [look.saw("sm_util_pct", samples_count=max(series.rounds_count, 1), window_s=_IDLE_WINDOW_S),
             look.saw("processes_count")],
            entities=[user.id for user in users[:8]],
            cost_gpu_s=1.0,
            cost="this GPU",
        )  # fmt: skip


class MigImbalance(GroupRule):
    """One MIG instance of a GPU is full of work while a sibling does nothing."""

    catalogue_id = "H15"
    severity = "info"
    needs = (
        Need(kind=nodes.MigInstance, metrics=("sm_util_pct",), given_by="nvml, where the driver has GPM (Hopper on)"),
    )
    thresholds = {
        "busy": Threshold(value=90, unit="%", source="dcgm-exporter#430 asks for it", guess=True),
        "idle": Threshold(value=10, unit="%", source="as above", guess=True, falling=True),
    }
    persist_rounds = 1
    histories = {nodes.MigInstance: {"sm_util_pct": _MIG_WINDOW_S}}
    relations = (edges.Belong,)
    cost_formula = "the idle instance's share of the GPU: unknown"
    advice = "cut the GPU into other sizes, or move work to the idle instance"
    verify = "dcgmi dmon -e 1002 -i <gpu>/<instance>"

    def judge(self, window: Window) -> Iterable[Verdict]:
        by_gpu: dict[str, list[nodes.MigInstance]] = {}
        for instance in window.all(nodes.MigInstance):
            for edge in window.out_of(instance.id, edges.Belong):
                by_gpu.setdefault(edge.target, []).append(instance)
        for gpu, instances in by_gpu.items():
            if len(instances) < 2:
                continue
            means: dict[str, float] = {}
            for instance in instances:
                series = window.history(instance, "sm_util_pct")
                if series is not None and series.covered_s(window.now_s) >= _MIG_WINDOW_S * 0.99:
                    mean = series.mean(window.now_s, _MIG_WINDOW_S)
                    if mean is not None:
                        means[instance.id] = mean
            if len(means) < len(instances):
                unread = next(each for each in instances if each.id not in means)
                why = (unread.unknown or {}).get("sm_util_pct") or "not known for 5 minutes yet"
                yield Verdict(state="unknown", subject=gpu, reason=f"sm_util_pct of MigInstance: {why}")
                continue
            most, least = max(means, key=means.__getitem__), min(means, key=means.__getitem__)
            busy, idle = window.overrides.threshold(self, "busy").value, window.overrides.threshold(self, "idle").value
            if means[most] > busy and means[least] < idle:
                yield Verdict(
                    state="fired", subject=gpu, severity="info", entities=[gpu, most, least], advice=self.advice,
                    evidence=[
                        evidence(each, "sm_util_pct", means[each], window_s=_MIG_WINDOW_S) for each in (most, least)
                    ],
                    message=f"{name_of(window, most)} is {means[most]:.0f} % busy and {name_of(window, least)} of the"
                    f" same GPU {means[least]:.0f} %",
                )  # fmt: skip
            else:
                yield Verdict(state="clear", subject=gpu)
        if not by_gpu and any(True for _ in window.all(nodes.MigInstance)):
            raise Unknown("MIG instances without their GPU")
