"""How GPUs reach each other and the network: peers, links, the nearest card."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from gpuflight.bottlenecks.base import CLEAR, ElementRule, GroupRule, Need, Threshold, Unknown, Verdict
from gpuflight.bottlenecks.window import Look, Window, evidence, name_of
from gpuflight.graph import edges, nodes

_NEAR, _FAR = ("PIX", "PXB"), ("PHB", "NODE", "SYS")
"""Classes of nvidia-smi topo -m: at most PCIe switches in between; the host bridge or worse."""


class NicTooFar(GroupRule):
    """A program's GPU talks to the network through a card beyond the host bridge, although a nearer one is there."""

    catalogue_id = "C08"
    needs = (
        Need(kind=nodes.RdmaDevice, given_by="rdma"),
        Need(kind=nodes.GPU, given_by="nvml"),
    )
    thresholds = {
        "near_cards": Threshold(value=0, unit="cards nearer", source="NCCL's path classes (PIX, PXB, PHB, SYS)")
    }
    relations = (edges.Access, edges.Proximity)
    every_rounds = 3
    explains = ("slow_collective", "exposed_communication", "straggler_rank")
    advice = "NCCL_IB_HCA=<the near card>, or NCCL_CROSS_NIC=0; bind the rank's GPU and card together"
    verify = "nvidia-smi topo -m; NCCL_DEBUG=INFO <program> | grep -i 'NET/IB'"

    def judge(self, window: Window) -> Iterable[Verdict]:
        for gpu in window.all(nodes.GPU):
            if gpu.ns:
                continue
            distance = {
                edge.target: str(edge.attributes.get("distance", ""))
                for edge in window.out_of(gpu.id, edges.Proximity)
                if edge.target.startswith("RdmaDevice(")
            }
            near = sorted(device for device, how in distance.items() if how in _NEAR)
            for user in window.users(gpu):
                used = [e.target for e in window.out_of(user.id, edges.Access) if e.target.startswith("RdmaDevice(")]
                if not used:
                    continue
                if not distance:
                    raise Unknown("distance of Proximity: the PCI tree does not say how far cards are")
                far = [device for device in used if distance.get(device) in _FAR]
                if not far or any(device in near for device in used):
                    continue
                if len(near) <= window.overrides.threshold(self, "near_cards").value:
                    continue
                yield Verdict(
                    state="fired", subject=f"{user.id}/{gpu.id}", severity=self.severity,
                    entities=[user.id, gpu.id, far[0], near[0]], edges=[f"Proximity({gpu.id}->{far[0]})"],
                    evidence=[
                        evidence(f"Proximity({gpu.id}->{far[0]})", "distance", distance[far[0]]),
                        evidence(f"Proximity({gpu.id}->{near[0]})", "distance", distance[near[0]]),
                        evidence(gpu.id, "near_cards_count", len(near)),
                    ],
                    message=f"{name_of(window, user.id)} on {name_of(window, gpu.id)} uses {name_of(window, far[0])}"
                    f" ({distance[far[0]]}) while {len(near)} nearer would do, {name_of(window, near[0])}"
                    f" ({distance[near[0]]})",
                )  # fmt: skip


class NoP2p(ElementRule):
    """Two GPUs of a host that are near each other cannot read each other's memory: what they exchange goes through the
    host."""

    catalogue_id = "C09"
    subject = edges.Proximity
    needs = (Need(kind=edges.Proximity, attributes=("p2p_read", "p2p_write", "distance"), given_by="nvml"),)
    thresholds = {"p2p": Threshold(value=0, unit="", source="nccl#2329: falls back silently")}
    guard = "between GPUs connected by NVLink or PCIe switches only: across CPU sockets it is usual"
    explains = ("slow_collective", "exposed_communication")
    advice = "check ACS and IOMMU (both block P2P), and that containers share the IPC namespace (--ipc=host)"
    verify = "nvidia-smi topo -p2p r; NCCL_DEBUG=INFO <program> | grep -iE 'P2P|SHM'"

    def judge(self, look: Look) -> Verdict:
        if not (look.element.source.startswith("GPU(") and look.element.target.startswith("GPU(")):
            return CLEAR
        distance = str(look.attribute("distance"))
        if not distance.startswith("NV") and distance not in _NEAR:
            return CLEAR
        states = {name: str(look.attribute(name)) for name in ("p2p_read", "p2p_write")}
        bad = {name: state for name, state in states.items() if state.lower() != "ok"}
        if not bad:
            return CLEAR
        return look.fired(
            f"{look.label} ({distance}) cannot use P2P: "
            + ", ".join(f"{name.removeprefix('p2p_')} {state}" for name, state in bad.items())
            + f" ({len(bad)} of 2)",
            [*(look.saw(name) for name in bad), look.saw("distance")],
            entities=[look.element.source, look.element.target],
        )


class AsymmetricNvlink(GroupRule):
    """One GPU has fewer active NVLinks than others of its model on this host."""

    catalogue_id = "C10"
    needs = (Need(kind=nodes.GPU, metrics=("nvlink_active_count",), attributes=("name",), given_by="nvml"),)
    thresholds = {"missing": Threshold(value=0, unit="links", source="nccl#1182: one fewer halves the ring")}
    every_rounds = 3
    guard = "at least three GPUs of one model, most of them with the same number"
    explains = ("slow_collective", "straggler_rank", "exposed_communication")
    advice = "reset the GPU; if links stay away, reseat or replace it (nvidia-smi nvlink -s names the links)"
    verify = "nvidia-smi nvlink --status"

    def judge(self, window: Window) -> Iterable[Verdict]:
        models: dict[str, list[nodes.GPU]] = {}
        for gpu in window.all(nodes.GPU):
            if not gpu.ns:
                models.setdefault(str(gpu.attributes.get("name", "")), []).append(gpu)
        for gpus in models.values():
            known = [gpu for gpu in gpus if "nvlink_active_count" in gpu.metrics]
            if len(gpus) >= 3 and not known:
                why = (gpus[0].unknown or {}).get("nvlink_active_count") or "not measured here"
                yield Verdict(state="unknown", subject=gpus[0].id, reason=f"nvlink_active_count of GPU: {why}")
            if len(known) < 3:
                continue
            usual, how_many = Counter(gpu.metrics["nvlink_active_count"] for gpu in known).most_common(1)[0]
            if how_many * 2 <= len(known):
                continue
            for gpu in known:
                active = gpu.metrics["nvlink_active_count"]
                if usual - active > window.overrides.threshold(self, "missing", gpu).value:
                    other = next(each for each in known if each.metrics["nvlink_active_count"] == usual)
                    yield Verdict(
                        state="fired", subject=gpu.id, severity=self.severity, entities=[gpu.id],
                        evidence=[evidence(gpu.id, "nvlink_active_count", active),
                                  evidence(other.id, "nvlink_active_count", usual, samples_count=how_many)],
                        message=f"{name_of(window, gpu.id)} has {active:.0f} active NVLinks, {how_many} others of its"
                        f" model have {usual:.0f}",
                    )  # fmt: skip
