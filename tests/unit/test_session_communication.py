"""Communication of one session: time and overlap of NCCL's kernels, single collectives, and what is not known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.rule_scenes import Player, Scene, steady
from tests.unit.recorder_rig import recording
from tests.unit.rule_cases.jobs import arriving

from gpuflight.bottlenecks.base import Rule
from gpuflight.bottlenecks.engine import Engine
from gpuflight.collectors.session_communication import add_communication, communication_attributes
from gpuflight.collectors.session_metrics import Values
from gpuflight.events.activity.communication import MARKS, MARKS_NS
from gpuflight.events.activity.session import Activity
from gpuflight.events.activity.summary import Summary
from gpuflight.events.arrays import numpy
from gpuflight.events.batch import Batch
from gpuflight.events.files import SessionReader, find_sessions
from gpuflight.events.ledger import Ledger
from gpuflight.graph import nodes
from gpuflight.registry import plugins

BEGAN = 1_700_000_000 * 10**9
NAMES = {
    1: "gemm",
    2: "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    3: "ncclKernel_AllReduce_RING_LL_Sum_float",
    4: "ncclDevKernelNew_Something",
    5: "void at::native::batch_norm_reduce_statistics_kernel<float, float, int>(int)",
    6: "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
}
MS = 1_000_000


def rig(rows: list[tuple[int, int, float, float]], names: dict[int, str] = NAMES, batches: int = 1) -> Summary:
    """``rows``: (kernel, stream, start in ms, duration in ms)."""
    np = numpy()
    activity = Activity("s")
    texts = list(names.values())
    columns: dict[str, Any] = {"dictionary": ["kernel"] * len(names), "id": np.array(list(names)), "text": texts}
    activity.add(Batch("name", "s", len(names), columns, clock="wall"))
    size = -(-len(rows) // batches)
    for first in range(0, len(rows), size):
        part = rows[first : first + size]
        activity.add(
            Batch(
                "kernel",
                "s",
                len(part),
                {
                    "kernel_id": np.array([row[0] for row in part]),
                    "stream_id": np.array([row[1] for row in part]),
                    "start_ns": np.array([BEGAN + round(row[2] * MS) for row in part]),
                    "duration_ns": np.array([round(row[3] * MS) for row in part]),
                },
                clock="wall",
            )
        )
    return activity.summary(most_kernels=50, most_scopes=10, most_streams=10)


def metrics(summary: Summary) -> Values:
    values = Values()
    add_communication(values, summary)
    return values


@pytest.mark.parametrize("kernel", [2, 3], ids=["new name", "old name"])
def test_n25_time_and_overlap_whatever_nccl_calls_its_kernels(kernel: int) -> None:
    """HTA#208: after a renaming communication was 0."""
    found = metrics(rig([(1, 7, 0, 10), (kernel, 9, 5, 10), (1, 7, 20, 5), (kernel, 9, 30, 4)])).metrics
    assert found["communication_kernels_count"] == 2
    assert found["communication_active_ms"] == pytest.approx(14)
    assert found["communication_overlapped_ms"] == pytest.approx(5)
    assert found["communication_unclassified_pct"] == 0
    assert found["communication_own_streams_count"] == 1


def test_what_several_streams_do_at_once_counts_once() -> None:
    found = metrics(rig([(2, 9, 0, 10), (3, 10, 5, 10), (1, 7, 0, 4), (1, 8, 2, 4)])).metrics
    assert found["communication_active_ms"] == pytest.approx(15)
    assert found["communication_ms"] == pytest.approx(20)
    assert found["communication_overlapped_ms"] == pytest.approx(6)


def test_n25_kernels_that_fit_no_scheme_count_and_are_told() -> None:
    summary = rig([(4, 9, 0, 10), (2, 9, 20, 5), (2, 9, 30, 5), (2, 9, 40, 5)])
    found = metrics(summary)
    assert found.metrics["communication_active_ms"] == pytest.approx(25)
    assert found.metrics["communication_unclassified_pct"] == 25
    assert communication_attributes(summary, found)["communication_unclassified"] == [NAMES[4]]


def test_n26_without_communication_its_time_is_0_and_no_share_is_told() -> None:
    """HTA#247: the overlap was NaN."""
    found = metrics(rig([(1, 7, 0, 10)]))
    assert found.metrics["communication_active_ms"] == 0 and found.metrics["communication_overlapped_ms"] == 0
    assert "communication_unclassified_pct" not in found.metrics
    assert all(value == value for value in found.metrics.values())


def test_kernels_without_names_may_be_nccls() -> None:
    found = metrics(rig([(1, 7, 0, 10), (77, 7, 20, 5)]))
    assert "communication_active_ms" not in found.metrics
    assert "names of 1 kernels were lost" in found.unknown["communication_active_ms"]


def test_one_stream_for_all_is_no_stream_of_its_own() -> None:
    assert metrics(rig([(1, 7, 0, 10), (2, 7, 20, 5)])).metrics["communication_own_streams_count"] == 0


def test_synchronised_batch_norms_are_counted() -> None:
    assert metrics(rig([(5, 7, n, 0.1) for n in range(6)])).metrics["sync_batch_norms_count"] == 6


@pytest.mark.parametrize("batches", [1, 7])
def test_single_collectives_are_numbered_on_their_stream(batches: int) -> None:
    rows = [(6 if n % 4 == 3 else 2, 9, 10.0 * n, 2) for n in range(20)] + [(2, 5, 500, 1)]
    summary = rig(rows, batches=batches)
    assert summary.communication is not None
    marks = summary.communication.marks
    assert [mark.number for mark in marks] == [n for n in range(20) if n % 4 != 3], "a send does not wait for all"
    assert marks[4].start_ns == BEGAN + 50 * MS and marks[4].end_ns == marks[4].start_ns + 2 * MS
    told = communication_attributes(summary, Values())["collective_marks"]
    assert told[0] == f"0:AllReduce:{BEGAN}:{BEGAN + 2 * MS}"


@pytest.mark.parametrize("every_ms", [0.05, 3.0, 700.0, 20_000.0])
def test_ranks_that_look_at_different_moments_have_numbers_in_common(every_ms: float) -> None:
    rows = [(2, 9, every_ms * n, every_ms / 2) for n in range(30_000 if every_ms < 1 else 8_000)]
    ranks = []
    for until in (len(rows), len(rows) - min(int(10_000 / every_ms), len(rows) // 4)):
        summary = rig(rows[:until], batches=50)
        assert summary.communication is not None
        marks = summary.communication.marks
        assert len(marks) <= MARKS
        ranks.append({mark.number for mark in marks})
        span = marks[-1].start_ns - marks[0].start_ns
        assert span >= MARKS_NS * 0.4 or len(rows) * every_ms * MS < MARKS_NS
    if every_ms * MARKS >= 10_000 or len(rows) * every_ms > 10_000:
        assert ranks[0] & ranks[1]


def test_what_was_lost_leaves_collectives_without_numbers() -> None:
    summary = rig([(2, 9, n, 0.5) for n in range(5)])
    summary.losses = 3
    values = Values()
    assert "collective_marks" not in communication_attributes(summary, values)
    assert "cannot be numbered" in values.unknown["collective_marks"]


def test_a_recorded_session_tells_which_rank_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that ranks can be compared when their processes are long over."""
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "node-1", "SECRET_TOKEN": "x"}.items():
        monkeypatch.setenv(name, value)
    with recording(tmp_path):
        pass
    (found,) = find_sessions(str(tmp_path))
    activity = Activity(found.session_id)
    for batch in SessionReader(found, Ledger()):
        activity.add(batch)
    told = activity.summary(most_kernels=1, most_scopes=1, most_streams=1).job
    assert told == {"rank": 5, "world_size": 8, "job": "torchrun node-1", "job_launcher": "torchrun"}


def test_recorded_ranks_of_several_hosts_cannot_be_put_on_one_clock() -> None:
    def ranks(*hosts: str) -> Scene:
        told = arriving(5, 4.0, offset_s=0.0)
        return steady(
            nodes.Host(hostname="h"),
            *(
                nodes.Session(
                    session_id=f"s{rank}",
                    attributes={
                        "rank": rank, "world_size": 8, "job": "j", "hostname": hosts[rank % len(hosts)],
                        "collective_marks": told(1, rank),
                    },
                )
                for rank in range(8)
            ),
            seconds=60,
        )  # fmt: skip

    for hosts, expected in ((("a",), 1), (("a", "b"), 0)):
        engine = Engine([plugins(Rule)["arrival_skew"]()])
        assert len(Player(engine).play(ranks(*hosts))[-1].findings) == expected
        reasons = list(engine.survey()[0].unknown)
        assert reasons == ([] if expected else ["how the clocks of a, b differed when this was recorded is not known"])
