"""``gpuflight doctor --from`` a folder with the recordings of all ranks of a job."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.gpufl_files import START_NS, line, session_folder
from tests.unit.recorded_program import findings

from gpuflight.cli import main

MS = 1_000_000
NAMES = {"1": "gemm", "2": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"}
STEPS = 60


def write_rank(folder: Path, rank: int, *, slow: int, size: int = 8, host: str = "node-1") -> None:
    """A rank that computes for 20 ms (``slow``: for 36 ms, and so comes last) and then reduces with the others."""
    session = f"rank-{rank}"
    rows: list[list[int]] = []
    for step in range(STEPS):
        began = step * 50 * MS
        took = (36 if rank == slow else 20) * MS + rank * 1000
        together = began + 36 * MS + 7000
        rows.append([began, 1, 7, took, 2 * step + 1])
        rows.append([began + took, 2, 9, together + 4 * MS - (began + took), 2 * step + 2])
    log = (
        line("job_start", session, pid=100 + rank, app="train.py", hostname=host, ts_ns=START_NS, rank=rank,
             world_size=size, local_rank=rank % 4, job="torchrun night-7", cuda_static_devices=[
                 {"id": 0, "name": "NVIDIA H100", "uuid": f"GPU-{rank}"}])
        + line("dictionary_update", session, kernel_dict=NAMES)
        + b"".join(
            line("kernel_event_batch", session, batch_id=n // 512 + 1, base_time_ns=START_NS,
                 columns=["dt_ns", "kernel_id", "stream_id", "duration_ns", "corr_id"], rows=rows[n : n + 512])
            for n in range(0, len(rows), 512)
        )
        + line("shutdown", session, pid=100 + rank, app="train.py", ts_ns=START_NS + STEPS * 50 * MS)
    )  # fmt: skip
    session_folder(folder, {"device.1.log.gz": log}, session)


def test_the_slow_rank_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(8):
        write_rank(tmp_path, rank, slow=5)
    main(["doctor", "--from", str(tmp_path), "--json"])
    found = findings(capsys.readouterr().out)
    straggler = found["straggler_rank"]
    assert straggler.get("confirmed", True) and found["arrival_skew"].get("confirmed", True)
    assert straggler["entities"][0] == "Session(rank-5)"
    assert "rank 5 of torchrun night-7" in straggler["message"] and "all 8 ranks" in straggler["message"]
    skew = found["arrival_skew"]
    assert "mostly rank 5" in skew["message"] and skew["explained_by"] == straggler["id"]
    assert found["exposed_communication"]["message"].count("0 % of its communication")


def test_ranks_that_are_alike_are_fine_and_of_several_hosts_have_no_common_clock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(8):
        write_rank(tmp_path, rank, slow=-1, host=f"node-{rank // 4}")
    main(["doctor", "--from", str(tmp_path), "--json"])
    text = capsys.readouterr().out
    assert {"straggler_rank", "arrival_skew"}.isdisjoint(findings(text))
    assert "how the clocks of node-0, node-1 differed" in text
