"""GPUs that report errors, are not ready, or are gone."""

from __future__ import annotations

from datetime import datetime

from gpuflight.bottlenecks.base import CLEAR, ElementRule, Need, Threshold, Unknown, Verdict
from gpuflight.bottlenecks.window import Look
from gpuflight.graph import nodes

_GRAVE_XIDS = frozenset({48, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140})
"""XIDs of the hardware (NVIDIA, XID catalogue: ECC, row remapping, NVLink, fallen off the bus, contained errors, GSP);
the grouping is ours."""
_APPLICATION_XIDS = frozenset({13, 31, 43, 45})
"""XIDs that a program causes as a rule (same source): exception, page fault, reset channel, preemptive cleanup."""


class Xid(ElementRule):
    """The driver reported an error of a GPU (Xid)."""

    catalogue_id = "H04"
    subject = nodes.GPU
    needs = (
        Need(kind=nodes.GPU, metrics=("xid_events_count",), attributes=("last_xid", "last_xid_time"), given_by="nvml"),
    )
    thresholds = {
        "hold_s": Threshold(value=300, unit="s", source="an event is told for so long, then it is history", guess=True)
    }
    persist_rounds = 1
    clear_rounds = 1
    histories = {nodes.GPU: {"xid_events_count": 300.0}}
    explains = ("gpu_lost", "nvlink_errors", "memory_errors", "collective_hang", "straggler_rank")
    advice = "look the number up in NVIDIA's XID catalogue; 79 and 95 ask for a reset or a reboot"
    verify = "dmesg | grep -i 'NVRM: Xid'"

    def judge(self, look: Look) -> Verdict:
        code = look.element.attributes.get("last_xid")
        if code is None:
            look.metric("xid_events_count")
            return CLEAR
        text = str(look.attribute("last_xid_time"))
        hold_s, now_s = look.limit("hold_s"), look.window.now_s
        series = look.window.history(look.element, "xid_events_count")
        if series is None or not series.increase(now_s, hold_s):
            # Not counted under our eyes. The time it carries is of a clock that may be set: believed only while we have
            # not watched for as long ourselves.
            age_s = look.window.time_ns / 1e9 - datetime.fromisoformat(text).timestamp()
            if not 0 <= age_s <= hold_s or (series is not None and series.covered_s(now_s) >= hold_s):
                return CLEAR
        grave, program = code in _GRAVE_XIDS, code in _APPLICATION_XIDS
        kind = "hardware" if grave else "as a rule caused by a program" if program else "see the catalogue"
        return look.fired(
            f"{look.label} reported Xid {code} at {text} ({kind})",
            [look.saw("last_xid", int(code)), look.saw("last_xid_time")],
            severity="critical" if grave else "warn",
        )


class GpuNotReady(ElementRule):
    """A GPU is not set up for work: persistence is off, or the fabric is not ready."""

    catalogue_id = "H10"
    subject = nodes.GPU
    needs = (
        Need(
            kind=nodes.GPU,
            attributes=("persistence", "fabric_state", "fabric_status", "fabric_bandwidth_degraded"),
            given_by="nvml",
        ),
    )
    guard = "a fabric is judged only where the GPU has one"
    advice = "nvidia-smi -pm 1 (or nvidia-persistenced); for the fabric: systemctl status nvidia-fabricmanager"
    verify = "nvidia-smi -q | grep -E 'Persistence|Fabric' -A4"

    def judge(self, look: Look) -> Verdict:
        fabric = look.element.attributes.get("fabric_state")
        status = look.element.attributes.get("fabric_status")
        if fabric in ("not_started", "in_progress") or (status is not None and status != "ok"):
            seen = [look.saw(name) for name in ("fabric_state", "fabric_status") if name in look.element.attributes]
            return look.fired(
                f"the fabric of {look.label} is not ready: {fabric}" + (f", {status}" if status else ""),
                seen,
                severity="critical",
                advice="systemctl status nvidia-fabricmanager; without it no NVLink works",
            )
        if look.element.attributes.get("fabric_bandwidth_degraded"):
            return look.fired(
                f"the fabric of {look.label} runs with less bandwidth",
                [look.saw("fabric_bandwidth_degraded", "yes")],
                severity="warn",
            )
        if look.attribute("persistence") != "disabled":
            return CLEAR
        return look.fired(
            f"persistence mode of {look.label} is off: the driver unloads it when its last program ends",
            [look.saw("persistence")],
            severity="info",
        )


class GpuLost(ElementRule):
    """A GPU is gone: it does not answer, or is not on the PCI bus any more."""

    catalogue_id = "H11"
    subject = nodes.GPU
    severity = "critical"
    needs = (Need(kind=nodes.GPU, attributes=("state", "state_reason", "on_pci_bus"), given_by="nvml"),)
    guard = "NVML as a whole answers (else all GPUs are unreachable, and nothing is known)"
    persist_rounds = 1
    explains = ("collective_hang", "straggler_rank", "nvlink_errors", "zombie_memory", "asymmetric_nvlink", "no_p2p")
    cost_formula = "the whole GPU"
    advice = "drain the node, look for Xid 79 in dmesg, then power-cycle it: a reset of the GPU will not bring it back"
    verify = "nvidia-smi -L; lspci -d 10de:"

    def judge(self, look: Look) -> Verdict:
        state = look.attribute("state")
        if state == "unreachable":
            raise Unknown(f"state of GPU: {look.element.attributes.get('state_reason') or 'unreachable'}")
        off_bus = look.element.attributes.get("on_pci_bus") is False
        if state != "lost" and not off_bus:
            return CLEAR
        reason = look.element.attributes.get("state_reason") or ("it is not on the PCI bus" if off_bus else state)
        return look.fired(
            f"{look.label} is lost: {reason} (1 GPU less)",
            [look.saw("state"), look.saw("state_reason", str(reason))],
            cost_gpu_s=1.0,
            cost="this GPU",
        )
