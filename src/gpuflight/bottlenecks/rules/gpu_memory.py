"""Memory of GPUs: errors, shortage, fragmentation, and memory that nobody lives to use."""

from __future__ import annotations

from gpuflight.bottlenecks.base import CLEAR, ElementRule, Need, Threshold, Unknown, Verdict
from gpuflight.bottlenecks.window import Look, told
from gpuflight.graph import edges, nodes

_ECC_WINDOW_S = 3600.0


class MemoryErrors(ElementRule):
    """A GPU's memory errs: uncorrectable errors, rows that cannot be or wait to be remapped, too many retired pages.

    Volatile counters (since the driver was loaded) are judged by what is added while gpuflight looks.
    """

    catalogue_id = "H05"
    subject = nodes.GPU
    needs = (
        Need(
            kind=nodes.GPU,
            metrics=(
                "ecc_uncorrected_volatile_count", "ecc_corrected_volatile_count", "row_remap_failed",
                "row_remap_pending", "pages_retired_single_bit_count", "pages_retired_double_bit_count",
            ),
            given_by="nvml",
        ),
    )  # fmt: skip
    thresholds = {
        "uncorrected": Threshold(value=0, unit="errors", source="DCGM, health watch of memory: any DBE"),
        "corrected": Threshold(
            value=10, unit="errors in an hour", source="DCGM: SBE > 10; the hour is ours", guess=True
        ),
        "retired": Threshold(value=63, unit="pages", source="DCGM: more than 63 retired pages"),
        "retired_double": Threshold(value=15, unit="pages", source="DCGM: 15 by double-bit errors"),
    }
    persist_rounds = 1
    histories = {
        nodes.GPU: {"ecc_uncorrected_volatile_count": _ECC_WINDOW_S, "ecc_corrected_volatile_count": _ECC_WINDOW_S}
    }
    time_matters = False
    explains = ("gpu_lost", "straggler_rank")
    advice = "drain the node and reset the GPU so that rows are remapped; if remapping failed, have it replaced"
    verify = "nvidia-smi -q -d ECC,ROW_REMAPPER,PAGE_RETIREMENT"

    def judge(self, look: Look) -> Verdict:
        known = look.element.metrics
        states = (
            ("row_remap_failed", 0.0, "critical", "could not remap a row of its memory (1 failure)"),
            ("pages_retired_double_bit_count", look.limit("retired_double") - 1, "warn", "retired {} pages"),
            ("row_remap_pending", 0.0, "warn", "waits for a reset to remap rows of its memory (1 pending)"),
        )  # fmt: skip
        for metric, limit, severity, text in states:
            if known.get(metric, 0) > limit:
                return look.fired(
                    f"{look.label} {text.format(int(known[metric]))}",
                    [look.saw(metric)],
                    severity="critical" if severity == "critical" else "warn",
                )
        retired = known.get("pages_retired_single_bit_count", 0) + known.get("pages_retired_double_bit_count", 0)
        if retired > look.limit("retired"):
            return look.fired(
                f"{look.label} retired {retired:.0f} pages of its memory, {look.limit('retired'):.0f} is the limit",
                [look.saw("pages_retired_single_bit_count"), look.saw("pages_retired_double_bit_count")],
                severity="critical",
            )
        if "ecc_uncorrected_volatile_count" not in known and "row_remap_failed" not in known:
            look.metric("ecc_uncorrected_volatile_count")
        for metric, name, severity in (
            ("ecc_uncorrected_volatile_count", "uncorrected", "critical"),
            ("ecc_corrected_volatile_count", "corrected", "warn"),
        ):
            if metric not in known:
                continue
            rose = look.increase(metric, _ECC_WINDOW_S)
            if rose > look.limit(name):
                return look.fired(
                    f"{look.label} had {rose:.0f} {name} memory errors within the last hour",
                    [look.saw(metric, rose, samples_count=2, window_s=_ECC_WINDOW_S)],
                    severity="critical" if severity == "critical" else "warn",
                )
        return CLEAR


class GpuMemoryNearFull(ElementRule):
    """A GPU's memory is nearly full.

    Frameworks reserve memory ahead (vLLM takes 90 % on purpose), so a steady level is only told; one that grows is
    warned of.
    """

    catalogue_id = "H12"
    subject = nodes.GPU
    severity = "info"
    needs = (Need(kind=nodes.GPU, metrics=("memory_used_bytes", "memory_total_bytes"), given_by="nvml"),)
    thresholds = {
        "used": Threshold(value=90, clear_at=87, unit="%", source="PyTorch profiler, tb_plugin: 90 %"),
        "growth": Threshold(value=5, unit="% of all in 5 minutes", source="SageMaker: +5 % of the moving average"),
    }
    persist_s = 60.0
    histories = {nodes.GPU: {"memory_used_bytes": 300.0}}
    time_matters = False
    relations = (edges.Access,)
    advice = "smaller batch, gradient checkpointing, or a cap of the cache (gpu_memory_utilization, max_split_size_mb)"
    verify = "nvidia-smi --query-gpu=index,memory.used,memory.total --format=csv -l 10"

    def judge(self, look: Look) -> Verdict:
        used, total = look.metric("memory_used_bytes"), look.metric("memory_total_bytes")
        share = 100 * used / total if total else 0.0
        if share <= look.limit("used"):
            return CLEAR
        series = look.window.history(look.element, "memory_used_bytes")
        grown = 100 * (used - min(series.values)) / total if series is not None and series.values else 0.0
        grows = grown > look.limit("growth")
        users = look.window.users(look.element)
        return look.fired(
            f"{look.label} has {told('x_bytes', used)} of {told('x_bytes', total)} in use ({share:.0f} %)"
            + (f", {grown:.0f} % more than 5 minutes ago" if grows else ""),
            [look.saw("memory_used_bytes"), look.saw("memory_total_bytes")],
            severity="warn" if grows else "info",
            entities=[user.id for user in users[:8]],
        )


class MemoryFragmentation(ElementRule):
    """A framework holds much more GPU memory than it uses, and had to retry allocations: its memory is in pieces."""

    catalogue_id = "H13"
    subject = nodes.Session
    needs = (
        Need(
            kind=nodes.Session,
            metrics=("allocator_reserved_bytes", "allocator_allocated_bytes", "allocator_retries_count"),
            given_by="sessions, where the program writes torch's memory statistics",
        ),
    )
    thresholds = {
        "unused": Threshold(value=20, clear_at=15, unit="% of what is reserved", source="PyTorch counters", guess=True)
    }
    histories = {nodes.Session: {"allocator_retries_count": 600.0}}
    time_matters = False
    persist_rounds = 1
    advice = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and fewer different sizes"
    verify = "python -c 'import torch; print(torch.cuda.memory_summary())'  # in the program"

    def judge(self, look: Look) -> Verdict:
        reserved, allocated = look.metric("allocator_reserved_bytes"), look.metric("allocator_allocated_bytes")
        unused = 100 * (reserved - allocated) / reserved if reserved else 0.0
        retried = look.increase("allocator_retries_count", 600.0)
        if unused <= look.limit("unused") or retried <= 0:
            return CLEAR
        return look.fired(
            f"{look.label} reserves {told('x_bytes', reserved)} and uses {told('x_bytes', allocated)}"
            f" ({unused:.0f} % idle), and {retried:.0f} allocations had to be tried again",
            [look.saw("allocator_reserved_bytes"), look.saw("allocator_allocated_bytes"),
             look.saw("allocator_retries_count", retried, samples_count=2, window_s=600.0)],
        )  # fmt: skip


class ZombieMemory(ElementRule):
    """Memory of a GPU is taken although no living process holds it."""

    catalogue_id = "H14"
    subject = nodes.GPU
    needs = (
        Need(
            kind=nodes.GPU,
            metrics=("memory_unmatched_bytes", "memory_unattributed_bytes", "processes_count"),
            attributes=("foreign_pidns",),
            given_by="nvml",
        ),
    )
    thresholds = {"held": Threshold(value=15 * 2**20, unit="bytes", source="gcm: 15 MiB without a process")}
    guard = "gpuflight sees the host's processes (else a process of another container looks like none)"
    persist_s = 10.0
    explains = ("gpu_memory_near_full",)
    advice = "look for defunct or stopped programs (fuser -v /dev/nvidia*); when there are none, reset the GPU"
    verify = "fuser -v /dev/nvidia*; nvidia-smi"

    def judge(self, look: Look) -> Verdict:
        if look.element.attributes.get("foreign_pidns"):
            raise Unknown("memory_unmatched_bytes of GPU: gpuflight is in another pid namespace than NVML's processes")
        unmatched = look.metric("memory_unmatched_bytes")
        if unmatched > look.limit("held"):
            return look.fired(
                f"{told('x_bytes', unmatched)} of {look.label} are held by processes that do not live any more",
                [look.saw("memory_unmatched_bytes")],
            )
        if look.metric("processes_count") > 0:
            return CLEAR
        held = look.metric("memory_unattributed_bytes")
        if held <= look.limit("held"):
            return CLEAR
        return look.fired(
            f"{told('x_bytes', held)} of {look.label} are in use, and NVML names no process (0) that uses it",
            [look.saw("memory_unattributed_bytes"), look.saw("processes_count")],
        )
