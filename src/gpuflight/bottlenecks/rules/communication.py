"""Communication between GPUs as one program's session tells it: how much, how hidden, how fast."""

from __future__ import annotations

from gpuflight.bottlenecks.base import CLEAR, ElementRule, Threshold, Unknown, Verdict
from gpuflight.bottlenecks.recorded import RELATIONS, Recorded, need, steps_of, sums
from gpuflight.bottlenecks.window import Look, told
from gpuflight.graph import edges, nodes

_ACTIVE, _OVERLAPPED = "communication_active_ms", "communication_overlapped_ms"
_LEAST_MS = 100.0
"""Less communication than this in what is looked at says nothing about its overlap."""


def _checked(look: Look) -> Recorded:
    """Raises Unknown where the program calls NCCL and none of its kernels is known as NCCL's: another renaming."""
    seen = Recorded(look)
    if look.metric("communication_kernels_count") == 0:
        for edge in look.window.into(look.id, edges.Own):
            process = look.window.entity(edge.source)
            calls = process.metrics.get("nccl_calls_count", 0) if process is not None else 0
            if calls:
                raise Unknown(
                    f"the program called NCCL {calls:.0f} times, yet none of its kernels has a name that is known as"
                    " NCCL's: NCCL may have renamed them"
                )
    return seen


def _unclassified(look: Look) -> str:
    """How much of it is of kernels that no table of names knows, for messages: always said, since names change."""
    share = look.element.metrics.get("communication_unclassified_pct", 0.0)
    names = look.element.attributes.get("communication_unclassified") or []
    return f"{share:.0f} % of its kernels unclassified" + (f": {', '.join(names[:2])}" if share and names else "")


class CommunicationShare(ElementRule):
    """A program's GPU spends much of each step in communication with other GPUs.

    The time in which some kernel of NCCL ran, of the time of steps, or of GPU work where the log names no steps.
    Waiting for other ranks is part of it: a collective runs on every rank until the last one has come. Kernels are
    known by their names, which NCCL changed several times; the share of those that fit no known scheme is said.
    """

    catalogue_id = "C01"
    subject = nodes.Session
    needs = need("communication_kernels_count", _ACTIVE, "steps_ms", attributes=("communication_unclassified",))
    thresholds = {
        "share_warn": Threshold(value=10, clear_at=8, unit="% of the step", source="PyTorch profiler, tb_plugin: 10 %"),
        "share_crit": Threshold(value=40, clear_at=35, unit="% of the step", source="witty diagnosis: 40 %"),
    }
    guard = "work was done on a GPU: at least 5 s in the last minute, or 1 s in a session that is over"
    whole_session = True
    time_matters = False
    histories = sums(_ACTIVE, _OVERLAPPED, "steps_ms")
    relations = RELATIONS
    explains = ()
    cost_formula = "share of the time in communication that no other kernel hides: GPU-seconds per second"
    advice = (
        "larger buckets, overlap with computation, fewer or smaller messages; look at stragglers first: waiting counts"
    )
    verify = "gpuflight doctor --from <folder>; NCCL_DEBUG=INFO <program> | grep -i via"

    def judge(self, look: Look) -> Verdict:
        seen = _checked(look)
        told_ms = seen.wall_ms()
        active_ms = seen.sum(_ACTIVE)
        if not told_ms or not active_ms:
            return CLEAR
        steps_ms = seen.sum("steps_ms") if look.has("steps_ms") else 0.0
        whole_ms, of_what = (steps_ms, "its steps") if steps_ms >= _LEAST_MS else (told_ms, "its GPU work")
        share = min(100 * active_ms / whole_ms, 100.0)
        if share <= look.limit("share_warn"):
            return CLEAR
        exposed = max(active_ms - seen.sum(_OVERLAPPED), 0.0) / told_ms if look.has(_OVERLAPPED) else None
        return look.fired(
            f"{look.label} communicates for {share:.0f} % of {of_what} {seen.during()}"
            f" ({told('x_ms', active_ms)} of {told('x_ms', whole_ms)}; {_unclassified(look)})",
            [
                seen.saw(_ACTIVE, active_ms, samples_count=int(look.metric("communication_kernels_count"))),
                look.saw("communication_share_pct", share, window_s=seen.window_s),
                look.saw(
                    "communication_unclassified_pct", look.element.metrics.get("communication_unclassified_pct", 0)
                ),
            ],
            severity="critical" if share > look.limit("share_crit") else "warn",
            entities=seen.around(),
            cost_gpu_s=None if exposed is None else round(min(exposed, 1.0), 3),
            cost="" if exposed is None else f"{min(100 * exposed, 100):.0f} % of the GPU's time, not hidden",
        )


class ExposedCommunication(ElementRule):
    """Most of a program's communication is not hidden behind computation.

    Of the time in which a kernel of NCCL ran, the part in which another kernel ran too (the definition of HTA and
    TraceLens, over all streams).
    """

    catalogue_id = "C02"
    subject = nodes.Session
    needs = need(_ACTIVE, _OVERLAPPED, "communication_own_streams_count")
    thresholds = {
        "overlap": Threshold(
            value=50,
            clear_at=55,
            unit="% of communication",
            source="HTA get_comm_comp_overlap",
            guess=True,
            falling=True,
        ),
        "share": Threshold(value=5, clear_at=3, unit="% of GPU work", source="less is not worth it", guess=True),
    }
    guard = "communication has a stream of its own (inference on one stream cannot overlap) and takes 5 % of the time"
    whole_session = True
    time_matters = False
    histories = sums(_ACTIVE, _OVERLAPPED)
    relations = RELATIONS
    explains = ("communication_share",)
    cost_formula = "share of the time in communication that no other kernel hides: GPU-seconds per second"
    advice = (
        "let communication begin while gradients are still computed (DDP buckets, FSDP prefetch, --overlap-grad-reduce"
        " of Megatron), and check that CUDA_DEVICE_MAX_CONNECTIONS fits the framework"
    )
    verify = "gpuflight export <folder> --as trace, then look at the stream of NCCL's kernels in ui.perfetto.dev"

    def judge(self, look: Look) -> Verdict:
        seen = _checked(look)
        told_ms = seen.wall_ms()
        active_ms = seen.sum(_ACTIVE)
        if not told_ms or active_ms < _LEAST_MS or 100 * active_ms / told_ms <= look.limit("share"):
            return CLEAR
        if look.metric("communication_own_streams_count") < 1:
            return CLEAR
        overlapped_ms = min(seen.sum(_OVERLAPPED), active_ms)
        overlap = 100 * overlapped_ms / active_ms
        if overlap >= look.limit("overlap"):
            return CLEAR
        exposed = min((active_ms - overlapped_ms) / told_ms, 1.0)
        return look.fired(
            f"{look.label} hides {overlap:.0f} % of its communication behind computation {seen.during()}:"
            f" {told('x_ms', active_ms - overlapped_ms)} of {told('x_ms', active_ms)} are exposed"
            f" ({_unclassified(look)})",
            [seen.saw(_ACTIVE, active_ms), seen.saw(_OVERLAPPED, overlapped_ms)],
            entities=seen.around(),
            cost_gpu_s=round(exposed, 3),
            cost=f"{100 * exposed:.0f} % of the GPU's time",
        )


class SyncBatchNorm(ElementRule):
    """A model synchronises batch norms across ranks so often that its steps wait for many small collectives.

    Counted by the kernel that puts the statistics of all ranks together, which PyTorch's SyncBatchNorm and that of apex
    launch once per forward pass of each layer.
    """

    catalogue_id = "C12"
    subject = nodes.Session
    needs = need("sync_batch_norms_count", "steps_count")
    thresholds = {
        "per_step": Threshold(value=20, clear_at=18, unit="per step", source="msprof sync_batchnorm.yaml: 20")
    }
    guard = "at least 10 steps"
    whole_session = True
    time_matters = False
    histories = sums("sync_batch_norms_count", "steps_count")
    relations = RELATIONS
    explains = ("communication_share", "small_packets", "exposed_communication")
    advice = (
        "synchronise only where batches per GPU are small, use group or layer norm, or freeze the statistics; each"
        " synchronised layer is one collective forward and one backward"
    )
    verify = "gpuflight doctor --from <folder>"

    def judge(self, look: Look) -> Verdict:
        seen = Recorded(look)
        if not look.metric("sync_batch_norms_count"):
            return CLEAR
        count = seen.sum("sync_batch_norms_count")
        if not count:
            return CLEAR
        steps = steps_of(seen)
        per_step = count / steps
        if per_step <= look.limit("per_step"):
            return CLEAR
        return look.fired(
            f"{look.label} synchronises batch norms {per_step:.0f} times per step {seen.during()}"
            f" ({count:.0f} in {steps:.0f} steps)",
            [seen.saw("sync_batch_norms_count", count, int(count)), seen.saw("steps_count", steps, int(steps))],
            entities=seen.around(),
        )
