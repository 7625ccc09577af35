"""Copies between host and GPU: from the wrong memory, too small, in the way."""

from __future__ import annotations

from gpuflight.bottlenecks.base import CLEAR, ElementRule, Threshold, Verdict
from gpuflight.bottlenecks.recorded import RELATIONS, Recorded, need, steps_of, sums
from gpuflight.bottlenecks.window import Look, told
from gpuflight.graph import nodes


class PageableCopies(ElementRule):
    """A program copies from or to pageable memory of the host: such copies are staged, slow, and never asynchronous."""

    catalogue_id = "G07"
    subject = nodes.Session
    needs = need(
        "pageable_copies_count",
        "pageable_copies_ms",
        "pageable_copied_bytes",
        "pageable_big_copies_count",
        given_by="sessions: logs that tell the kinds of memory (Nsight Systems, PyTorch, single events)",
    )
    thresholds = {
        "big": Threshold(
            value=10, unit="copies over 1 MiB", source="nsys cuda_memcpy_async; a few load the model", guess=True
        ),
        "time": Threshold(value=1, clear_at=0.5, unit="% of the time", source="nsys cuda_memcpy_async", guess=True),
    }
    whole_session = True
    time_matters = False
    histories = sums(
        "pageable_copies_count", "pageable_copies_ms", "pageable_copied_bytes", "pageable_big_copies_count"
    )
    relations = RELATIONS
    explains = ("blocking_copies",)
    cost_formula = "share of the time in such copies"
    advice = "pin what is copied (pin_memory=True in the DataLoader, tensor.pin_memory(), cudaHostAlloc), non_blocking"
    verify = "nsys analyze --rule cuda_memcpy_async <report>"

    def judge(self, look: Look) -> Verdict:
        seen = Recorded(look)
        count, size = seen.sum("pageable_copies_count"), seen.sum("pageable_copied_bytes")
        big, took_ms = seen.known("pageable_big_copies_count"), seen.known("pageable_copies_ms")
        told_ms = seen.timeline_ms()
        share = 100 * took_ms / told_ms if told_ms else 0.0
        if not count or (big < look.limit("big") and share < look.limit("time")):
            return CLEAR
        return look.fired(
            f"{look.label} copied {told('x_bytes', size)} from or to pageable memory {seen.during()}, in {count:.0f}"
            f" copies ({big:.0f} over 1 MiB) that took {share:.1f} % of the time",
            [
                seen.saw("pageable_copied_bytes", samples_count=int(count)),
                seen.saw("pageable_copies_count"),
                seen.saw("pageable_copies_ms", took_ms),
            ],
            severity="warn" if share >= look.limit("time") else "info",
            entities=seen.around(),
            cost_gpu_s=round(share / 100, 4),
            cost=f"{share:.1f} % of the time",
        )


class SmallCopies(ElementRule):
    """A program copies many small pieces to its GPU: each costs a call and a transfer, whatever its size."""

    catalogue_id = "G08"
    subject = nodes.Session
    needs = need("htod_copies_count", "htod_small_copies_count", "gpu_timeline_ms")
    thresholds = {
        "rate": Threshold(value=1000, clear_at=800, unit="1/s", source="msprof packet.yaml, by analogy", guess=True),
        "small": Threshold(
            value=50, clear_at=45, unit="% below 64 KiB", source="median below 64 KiB, as above", guess=True
        ),
    }
    whole_session = True
    time_matters = False
    histories = sums("htod_copies_count", "htod_small_copies_count")
    relations = RELATIONS
    explains = ("host_bound_idle", "memory_operations_heavy")
    advice = "put small inputs together in one staging buffer and copy that; keep constants on the GPU"
    verify = "gpuflight doctor --from <folder>  # htod_small_copies_count"

    def judge(self, look: Look) -> Verdict:
        seen = Recorded(look)
        copies = seen.sum("htod_copies_count")
        told_ms = seen.wall_ms()
        if not told_ms or not copies:
            return CLEAR
        per_s, small = copies / told_ms * 1e3, 100 * seen.sum("htod_small_copies_count") / copies
        if per_s <= look.limit("rate") or small <= look.limit("small"):
            return CLEAR
        return look.fired(
            f"{look.label} makes {per_s:,.0f} copies/s to its GPU {seen.during()}, {small:.0f} % of them below 64 KiB",
            [seen.saw("htod_copies_count"), seen.saw("htod_small_copies_count"), seen.saw("gpu_timeline_ms")],
            entities=seen.around(),
        )


class BlockingCopies(ElementRule):
    """A program's steps contain copies or fills that stop the host until they are over.

    A call blocked if it came back only when the copy had ended.
    """

    catalogue_id = "G09"
    subject = nodes.Session
    needs = need(
        "blocking_copies_count",
        "blocking_copies_ms",
        "steps_count",
        "gpu_timeline_ms",
        given_by="sessions, cupti: logs with the times of calls",
    )
    thresholds = {
        "steps": Threshold(
            value=10, clear_at=7, unit="% of the steps have one", source="nsys cuda_memcpy_sync", guess=True
        ),
        "time": Threshold(
            value=10, clear_at=7, unit="% of the time, where no steps are known", source="as above", guess=True
        ),
        "idle": Threshold(
            value=10, clear_at=7, unit="% of the time", source="a busy GPU loses nothing by it", guess=True
        ),
    }
    guard = "the GPU is idle for more than a tenth of the time"
    whole_session = True
    time_matters = False
    histories = sums("blocking_copies_count", "blocking_copies_ms", "steps_count", "gpu_active_ms")
    relations = RELATIONS
    explains = ("sync_heavy", "host_bound_idle")
    cost_formula = "share of the time in such calls, at most"
    advice = "cudaMemcpyAsync / cudaMemsetAsync, non_blocking=True from pinned memory; .item() and .cpu() copy too"
    verify = "nsys analyze --rule cuda_memcpy_sync --rule cuda_memset_sync <report>"

    def judge(self, look: Look) -> Verdict:
        seen = Recorded(look)
        blocking = seen.sum("blocking_copies_count")
        told_ms = seen.wall_ms()
        idle = seen.idle_share()
        if not told_ms or not blocking or idle is None or 100 * idle <= look.limit("idle"):
            return CLEAR
        blocked_ms = seen.sum("blocking_copies_ms")
        share = 100 * blocked_ms / told_ms
        steps = seen.known("steps_count")
        if steps:
            exact = look.element.metrics.get("steps_with_blocking_copies_pct") if not seen.live else None
            in_steps = min(100 * blocking / steps, 100.0) if exact is None else exact
            if in_steps <= look.limit("steps") or share < 0.1:
                return CLEAR
            where = f"about {in_steps:.0f} % of its {steps:.0f} steps have one"
        elif share <= look.limit("time"):
            return CLEAR
        else:
            where = f"its log has no steps ({steps:.0f})"
        return look.fired(
            f"{look.label} made {blocking:.0f} copies or fills {seen.during()} that stopped it until they were over"
            f" ({share:.1f} % of the time); {where}",
            [seen.saw("blocking_copies_count"), seen.saw("blocking_copies_ms", samples_count=int(blocking)),
             seen.saw("gpu_timeline_ms")],
            entities=seen.around(),
            cost_gpu_s=round(min(blocked_ms / told_ms, idle), 4),
            cost=f"up to {min(share, 100 * idle):.1f} % of the GPU's time",
        )  # fmt: skip


class MemoryOperationsHeavy(ElementRule):
    """Copying, filling and allocating memory take much of each step, while kernels do not fill the GPU."""

    catalogue_id = "G21"
    subject = nodes.Session
    needs = need("copy_time_ms", "memset_time_ms", "allocation_time_ms", "kernels_active_ms", "steps_count")
    thresholds = {
        "per_step": Threshold(value=10, clear_at=8, unit="ms per step", source="msprof memory.yaml: 10 ms"),
        "kernels": Threshold(
            value=90, unit="% of the time", source="else the copies are hidden by kernels", guess=True, falling=True
        ),
    }
    guard = "at least 3 steps; kernels run less than 90 % of the time"
    whole_session = True
    time_matters = False
    histories = sums("copy_time_ms", "memset_time_ms", "allocation_time_ms", "kernels_active_ms", "steps_count")
    relations = RELATIONS
    explains = ("gpu_idle_gaps",)
    cost_formula = "share of the time in which no kernel runs, at most"
    advice = "a caching allocator, buffers that are kept, copies on a stream of their own ahead of the step"
    verify = "gpuflight doctor --from <folder>  # copy_time_ms, allocation_time_ms and steps_count"

    def judge(self, look: Look) -> Verdict:
        seen = Recorded(look)
        look.metric("copy_time_ms")
        if not (told_ms := seen.wall_ms()):
            return CLEAR
        steps, kernels_ms = steps_of(seen), seen.sum("kernels_active_ms")
        if 100 * kernels_ms / told_ms >= look.limit("kernels"):
            return CLEAR
        parts = {name: seen.known(name) for name in ("copy_time_ms", "memset_time_ms", "allocation_time_ms")}
        per_step = sum(parts.values()) / steps
        if per_step <= look.limit("per_step"):
            return CLEAR
        lost = min(sum(parts.values()), told_ms - kernels_ms) / told_ms
        return look.fired(
            f"{look.label} spends {per_step:.1f} ms per step on memory {seen.during()} (copies"
            f" {parts['copy_time_ms'] / steps:.1f}, fills {parts['memset_time_ms'] / steps:.1f}, allocations"
            f" {parts['allocation_time_ms'] / steps:.1f}); kernels run {100 * kernels_ms / told_ms:.0f} % of the time",
            [*(seen.saw(name, value) for name, value in parts.items()), seen.saw("steps_count")],
            entities=seen.around(),
            cost_gpu_s=round(max(lost, 0.0), 4),
            cost=f"up to {100 * max(lost, 0.0):.0f} % of the GPU's time",
        )
