"""Cases of the rules about ranks of jobs: eight of them on two hosts, of which one is foreign."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.rule_scenes import Case, Scene, changing

from gpuflight.graph import Edge, Entity, edges, nodes

FAR = "node-b"
_BEGAN_NS = 1_700_000_000 * 10**9


@dataclass
class Fleet:
    """A job of eight ranks, four on each host, healthy but for what ``change`` does to a rank's elements; ``seen`` are
    the ranks in the picture. ``offset_s`` and ``error_s``: of the other host's clock, None for not measured."""

    seen: Sequence[int] = range(8)
    world_size: int | None = 8
    offset_s: float | None = 0.004
    error_s: float | None = 0.0002
    change: Callable[[int, int, dict[str, Any]], None] = lambda n, rank, values: None
    marks: Callable[[int, int], list[str]] | None = None
    far_host: dict[str, Any] = field(default_factory=dict)

    def round(self, n: int) -> list[Entity | Edge]:
        found: list[Entity | Edge] = [nodes.Host(hostname="node-a")]
        metrics = {} if self.offset_s is None else {
            "clock_offset_s": self.offset_s, "clock_offset_error_s": self.error_s or 0.0
        }  # fmt: skip
        found.append(nodes.Host(hostname=FAR, ns=FAR, metrics=metrics, attributes=self.far_host))
        for rank in self.seen:
            found += self._rank(n, rank)
        return found

    def _rank(self, n: int, rank: int) -> list[Entity | Edge]:
        ns = FAR if rank >= 4 else ""
        values: dict[str, Any] = {
            "sm_util_pct": 95.0, "steps_count": 40.0 * n, "step_ms": 120.0, "p50_us": 80.0, "cuda_wait_pct": 40.0,
            "nccl_calls_count": 500 * n, "io_read_bytes_per_s": 2e5, "io_write_bytes_per_s": 0.0,
            "cuda_launches_per_s": 900.0, "ppid": 100, "attributes": {},
        }  # fmt: skip
        self.change(n, rank, values)
        job = {
            "rank": rank,
            "local_rank": rank % 4,
            "job": "torchrun night-7",
            "name": "python",
            "ppid": values["ppid"],
        }
        if self.world_size is not None:
            job["world_size"] = self.world_size
        process_metrics = {
            name: values[name]
            for name in (
                "nccl_calls_count",
                "io_read_bytes_per_s",
                "io_write_bytes_per_s",
                "cuda_launches_per_s",
                "cuda_wait_pct",
            )
            if values[name] is not None
        }
        process = nodes.Process(
            pid=1000 + rank, start=7, ns=ns, attributes={**job, **values["attributes"]}, metrics=process_metrics
        )
        gpu = nodes.GPU(
            uuid=f"GPU-{rank}", ns=ns, attributes={"index": rank % 4}, metrics={"sm_util_pct": values["sm_util_pct"]}
        )
        session_metrics = {}
        if values["step_ms"] is not None:
            session_metrics = {
                "steps_count": values["steps_count"],
                "steps_ms": values["steps_count"] * values["step_ms"],
            }
        attributes: dict[str, Any] = {"state": "live", "step_scope": "train_step"}
        if self.marks is not None:
            attributes["collective_marks"] = self.marks(n, rank)
        session = nodes.Session(session_id=f"s{rank}", ns=ns, attributes=attributes, metrics=session_metrics)
        found: list[Entity | Edge] = [process, gpu, session]
        if values["p50_us"] is not None:
            found += [
                nodes.Kernel(
                    process=f"Process(pid={1000 + rank},start=7)", name=name, ns=ns,
                    metrics={"p50_us": p50_us, "gpu_time_ms": 50.0 * n, "launches_count": 600 * n},
                )
                for name, p50_us in (("gemm", values["p50_us"]), ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 500.0))
            ]  # fmt: skip
        return [*found, edges.Access(process.id, gpu.id), edges.Own(process.id, session.id)]

    def scene(self, count: int = 9, **other: Any) -> Scene:
        return changing(lambda n: self.round(n + 1), count, **other)


def only(rank: int, **values: Any) -> Callable[[int, int, dict[str, Any]], None]:
    """One rank is different."""

    def change(n: int, number: int, known: dict[str, Any]) -> None:
        if number == rank:
            known.update(values)

    return change


def everyone(**values: Any) -> Callable[[int, int, dict[str, Any]], None]:
    return lambda n, number, known: known.update(values)


def process_id(rank: int) -> str:
    return f"Process({f'ns={FAR},' if rank >= 4 else ''}pid={1000 + rank},start=7)"


# --- arrival ---------------------------------------------------------------------------------------------------------


def arriving(
    late_rank: int = -1, late_ms: float = 0.0, offset_s: float = 0.004, shift: int = 0
) -> Callable[[int, int], list[str]]:
    """Marks of all-reduces each 50 ms that take 3 ms; one rank comes late; clocks of the other host are ahead."""

    def marks(n: int, rank: int) -> list[str]:
        lines = []
        for number in range(n * 40, n * 40 + 32):
            began = _BEGAN_NS + number * 50_000_000
            begin = began + int(late_ms * 1e6) * (rank == late_rank) + (rank % 3) * 10_000
            end = began + int(max(late_ms, 0.0) * 1e6) + 3_000_000
            if rank >= 4:
                begin, end = begin + int(offset_s * 1e9), end + int(offset_s * 1e9)
            lines.append(f"{number + (shift if rank == 2 else 0)}:AllReduce:{begin}:{end}")
        return lines

    return marks


def _frozen(n: int, **more: Any) -> dict[str, Any]:
    """From the third round on nothing is called any more."""
    return {"nccl_calls_count": 500 * min(n, 3), "steps_count": 40.0 * min(n, 3), **more}


def _hung(n: int, rank: int, values: dict[str, Any], idle: Sequence[int] = (6,), **more: Any) -> None:
    """All ranks but ``idle`` spin in a collective; those do nothing."""
    values.update(_frozen(n, cuda_launches_per_s=0.0 if n > 3 else 900.0, io_read_bytes_per_s=0.0, sm_util_pct=100.0))
    if rank in idle and n > 3:
        values.update(sm_util_pct=0.0, cuda_wait_pct=0.0)
    values.update(more)


def _checkpoint(n: int, rank: int, values: dict[str, Any]) -> None:
    """Rank 0 writes for minutes; the others wait for it in a barrier, which is a collective."""
    _hung(n, rank, values, idle=(0,))
    if rank == 0 and n > 3:
        values.update(io_write_bytes_per_s=8e8, cuda_wait_pct=0.0)


def _over(n: int, rank: int, values: dict[str, Any]) -> None:
    """The job does nothing any more, and no GPU waits."""
    _hung(n, rank, values, idle=range(8))


def _ras(n: int, rank: int, values: dict[str, Any]) -> None:
    _hung(n, rank, values, attributes={"nccl_ras": "healthy"})


def _ras_names(n: int, rank: int, values: dict[str, Any]) -> None:
    """RAS does not reach rank 3, which waits like all others."""
    said = "does not answer" if rank == 3 else "answers"
    _hung(n, rank, values, idle=(), attributes={"nccl_ras": said, "nccl_ras_troubles": ["rank 3 does not answer"]})


def _blind(n: int, rank: int, values: dict[str, Any]) -> None:
    _hung(n, rank, values, io_read_bytes_per_s=None, io_write_bytes_per_s=None)


_LONG = {"count": 24, "step_s": 20.0}
_UNEVEN = {"count": 20, "step_s": 20.0}

CASES = {
    "straggler_rank": Case(
        fires=Fleet(change=only(5, p50_us=160.0)).scene(),
        about=process_id(5),
        clear=Fleet().scene(),
        unknown=Fleet(seen=[0, 1, 4], change=only(1, p50_us=160.0)).scene(),
        also={
            "by its steps": ("warn", Fleet(change=only(2, step_ms=170.0, p50_us=None)).scene()),
            "more than twice": ("critical", Fleet(change=only(2, step_ms=300.0, p50_us=None)).scene()),
            "five of eight seen": ("warn", Fleet(seen=[0, 1, 2, 3, 5], change=only(5, p50_us=160.0)).scene()),
            "two ranks": ("clear", Fleet(seen=[0, 1], world_size=2, change=only(1, p50_us=160.0)).scene()),
            "nothing to compare": ("unknown", Fleet(change=everyone(p50_us=None, step_ms=None)).scene()),
            "first steps": ("unknown", Fleet(change=only(2, step_ms=300.0)).scene(2)),
        },
    ),
    "arrival_skew": Case(
        fires=Fleet(marks=arriving(5, 4.0)).scene(),
        about=process_id(5),
        clear=Fleet(marks=arriving()).scene(),
        unknown=Fleet(marks=arriving(5, 4.0), error_s=0.008).scene(),
        also={
            "clocks that are apart are no skew": ("clear", Fleet(marks=arriving(offset_s=3.5), offset_s=3.5).scene()),
            "clock not measured": ("unknown", Fleet(marks=arriving(5, 4.0), offset_s=None).scene()),
            "one host needs no clock": (
                "warn",
                Fleet(seen=range(4), world_size=4, offset_s=None, marks=arriving(2, 4.0)).scene(),
            ),
            "numbers that are not alike": ("unknown", Fleet(marks=arriving(shift=1)).scene()),
            "not told": ("unknown", Fleet().scene()),
        },
    ),
    "collective_hang": Case(
        fires=Fleet(change=_hung).scene(**_LONG),
        about=process_id(6),
        severity="critical",
        clear=Fleet().scene(**_LONG),
        unknown=Fleet(seen=[0, 1, 2], change=_hung).scene(**_LONG),
        also={
            "RAS says healthy": ("critical", Fleet(change=_ras).scene(**_LONG)),
            "RAS names a rank": ("critical", Fleet(change=_ras_names).scene(**_LONG)),
            "all wait": ("critical", Fleet(change=lambda n, r, v: _hung(n, r, v, idle=())).scene(**_LONG)),
            "long checkpoint": ("clear", Fleet(change=_checkpoint).scene(**_LONG)),
            "it may be a checkpoint": ("unknown", Fleet(change=_blind).scene(**_LONG)),
            "over": ("clear", Fleet(change=_over).scene(**_LONG)),
            "four minutes": ("clear", Fleet(change=_hung).scene(count=14, step_s=20.0)),
            "not yet begun": ("unknown", Fleet(change=everyone(nccl_calls_count=3)).scene(**_LONG)),
            "no probe": ("unknown", Fleet(change=everyone(nccl_calls_count=None)).scene(**_LONG)),
            "old picture": ("unknown", Fleet(change=_hung, far_host={"stale": True}).scene(**_LONG)),
            "nobody says how many": ("unknown", Fleet(world_size=None, change=_hung).scene(**_LONG)),
        },
    ),
    "gpu_load_imbalance": Case(
        fires=Fleet(change=only(3, sm_util_pct=20.0)).scene(**_UNEVEN),
        about="GPU(uuid=GPU-3)",
        clear=Fleet().scene(**_UNEVEN),
        unknown=Fleet(change=only(3, sm_util_pct=20.0)).scene(count=6, step_s=20.0),
        also={
            "on both sides of a border": (
                "clear",
                Fleet(change=lambda n, r, v: v.update(sm_util_pct=89.0 + 2 * (r % 2))).scene(**_UNEVEN),
            ),
            "one rank": ("clear", Fleet(seen=[0], world_size=1).scene(**_UNEVEN)),
        },
    ),
}


def _steps(series: Sequence[float], **attributes: Any) -> Scene:
    """A session whose steps take ``series[n]`` ms in round n; 40 of them a round."""
    sums = [0.0]
    for value in series:
        sums.append(sums[-1] + 40 * value)

    def one(n: int) -> list[Entity]:
        metrics = {"steps_count": 40.0 * (n + 2), "steps_ms": 9000.0 + sums[n + 1]}
        return [nodes.Session(session_id="s", attributes={"state": "live", **attributes}, metrics=metrics)]

    return changing(one, len(series), step_s=15.0)


def _noisy(level: float, count: int) -> list[float]:
    """Around a level, by a few percent; the same in every run."""
    return [level * (1 + 0.02 * ((n * 7919) % 11 - 5) / 5) for n in range(count)]


CASES |= {
    "fail_slow": Case(
        fires=_steps([*_noisy(120, 40), *_noisy(150, 20)]),
        about="Session(s)",
        clear=_steps(_noisy(120, 60)),
        unknown=_steps(_noisy(120, 12)),
        also={
            "one long pause": ("clear", _steps([*_noisy(120, 30), 900, *_noisy(120, 29)])),
            "slower by little": ("clear", _steps([*_noisy(120, 40), *_noisy(127, 20)])),
            "faster": ("clear", _steps([*_noisy(150, 40), *_noisy(120, 20)])),
            "over": ("clear", _steps([*_noisy(120, 40), *_noisy(150, 20)], state="ended: shutdown")),
        },
    ),
}
