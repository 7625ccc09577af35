"""PCIe and NVLink of GPUs: links slower than they could be, and links that err."""

from __future__ import annotations

from gpuflight.bottlenecks.base import CLEAR, ElementRule, Need, Threshold, Unknown, Verdict
from gpuflight.bottlenecks.window import Look
from gpuflight.graph import nodes

_LINK = ("pcie_gen", "pcie_gen_max", "pcie_width", "pcie_width_max")
_NO_NVLINK = "NVML lists no NVLink"


class PcieDegraded(ElementRule):
    """A GPU's PCIe link runs slower or narrower than it could, while the GPU works.

    An idle GPU lowers its link on purpose, so only a working one is judged. What the link can do is what NVML says for
    this GPU in this slot, so a wide card in a narrow slot is no fault.
    """

    catalogue_id = "H01"
    subject = nodes.GPU
    needs = (Need(kind=nodes.GPU, metrics=(*_LINK, "sm_util_pct"), given_by="nvml"),)
    thresholds = {"missing_lanes": Threshold(value=0, unit="", source="DCGM, health watch of PCIe: any loss")}
    guard = "the GPU works (sm_util_pct above 0)"
    persist_s = 60.0
    explains = ("exposed_communication", "memory_operations_heavy")
    advice = "seat the card anew, check riser and slot, and the link speed set in the BIOS"
    verify = "nvidia-smi --query-gpu=index,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current --format=csv"

    def judge(self, look: Look) -> Verdict:
        gen, gen_max, width, width_max = (look.metric(name) for name in _LINK)
        if look.metric("sm_util_pct") <= 0 or (gen >= gen_max and width_max - width <= look.limit("missing_lanes")):
            return CLEAR
        lost = 100 * (1 - (width * 2**gen) / (width_max * 2**gen_max))
        return look.fired(
            f"{look.label} works over PCIe gen {gen:g} x{width:g}, it could gen {gen_max:g} x{width_max:g}: about"
            f" {lost:.0f} % of the bandwidth is missing",
            [look.saw(name) for name in (*_LINK, "sm_util_pct")],
        )


class PcieReplays(ElementRule):
    """A GPU's PCIe link repeats packets more often than its generation allows: it is at the edge of failing."""

    catalogue_id = "H02"
    subject = nodes.GPU
    needs = (Need(kind=nodes.GPU, metrics=("pcie_replays_count", "pcie_gen", "pcie_width"), given_by="nvml"),)
    thresholds = {
        f"gen{gen}": Threshold(value=limit, unit="replays per minute and lane", source="DCGM, health watch of PCIe")
        for gen, limit in ((1, 0.15), (2, 0.3), (3, 0.48), (4, 0.96), (5, 1.92), (6, 3.84))
    }
    persist_rounds = 1
    histories = {nodes.GPU: {"pcie_replays_count": 300.0}}
    time_matters = False
    explains = ("pcie_degraded",)
    advice = "seat the card anew, check riser and cables; if it stays, replace the card"
    verify = "nvidia-smi --query-gpu=index,pcie.replay.counter --format=csv -l 60"

    def judge(self, look: Look) -> Verdict:
        window_s = 300.0
        rose = look.increase("pcie_replays_count", window_s)
        if rose <= 0:
            return CLEAR
        width, gen = look.metric("pcie_width"), int(look.metric("pcie_gen"))
        seen_s = min(window_s, look.history("pcie_replays_count", window_s, least=0.0).covered_s(look.window.now_s))
        if seen_s < 60.0 and rose < 10:
            raise Unknown("pcie_replays_count of GPU: watched for less than a minute")
        per_minute_lane = rose / max(width, 1) / max(seen_s, 60.0) * 60.0
        limit = look.limit(f"gen{min(max(gen, 1), 6)}")
        if per_minute_lane <= limit:
            return CLEAR
        return look.fired(
            f"{look.label} repeated {rose:.0f} PCIe packets in {seen_s:.0f} s: {per_minute_lane:.2f} per minute and"
            f" lane, gen {gen} allows {limit:g}",
            [look.saw("pcie_replays_count", rose, window_s=seen_s, samples_count=2), look.saw("pcie_gen"),
             look.saw("pcie_width")],
        )  # fmt: skip


class NvlinkErrors(ElementRule):
    """NVLinks of a GPU are down or err, so what goes between GPUs is slower, or takes another way."""

    catalogue_id = "H03"
    subject = nodes.GPU
    severity = "warn"
    needs = (
        Need(
            kind=nodes.GPU,
            metrics=("nvlink_count", "nvlink_active_count", "nvlink_errors_count", "nvlink_errors_per_s"),
            attributes=("nvlinks_down",),
            given_by="nvml",
        ),
    )
    thresholds = {
        "inactive_links": Threshold(value=0, unit="links", source="NVIDIA, system validation: max_inactive_nvlinks 0"),
        "errors_warn": Threshold(value=0, unit="errors in 5 minutes", source="DCGM, health watch of NVLink: any"),
        "errors_per_s_crit": Threshold(value=100, unit="1/s", source="DCGM, CRC errors"),
    }
    guard = "the GPU has NVLinks and at least one of them is up (with all down it is just not bridged)"
    persist_rounds = 1
    histories = {nodes.GPU: {"nvlink_errors_count": 300.0}}
    time_matters = False
    explains = ("exposed_communication", "slow_collective", "no_p2p", "straggler_rank", "asymmetric_nvlink")
    advice = "look for NVLink messages (Xid 74) in dmesg; reset the GPU; if links stay down, reseat or replace it"
    verify = "nvidia-smi nvlink --status && nvidia-smi nvlink -e"

    def judge(self, look: Look) -> Verdict:
        if (look.element.unknown or {}).get("nvlink_count") == _NO_NVLINK:
            return CLEAR
        count, active = look.metric("nvlink_count"), look.metric("nvlink_active_count")
        down = count - active
        if active > 0 and down > look.limit("inactive_links"):
            return look.fired(
                f"{down:.0f} of {count:.0f} NVLinks of {look.label} are down",
                [look.saw("nvlink_count"), look.saw("nvlink_active_count"), look.saw("nvlinks_down")],
                severity="critical",
            )
        if not look.has("nvlink_errors_count"):
            if active == 0:
                return CLEAR
            look.metric("nvlink_errors_count")
        rose = look.increase("nvlink_errors_count", 300.0)
        if rose <= look.limit("errors_warn"):
            return CLEAR
        per_s = look.element.metrics.get("nvlink_errors_per_s", 0.0)
        return look.fired(
            f"NVLinks of {look.label} had {rose:.0f} errors in the last 5 minutes ({per_s:.1f}/s now)",
            [look.saw("nvlink_errors_count", rose, window_s=300.0, samples_count=2)],
            severity="critical" if per_s >= look.limit("errors_per_s_crit") else "warn",
        )
