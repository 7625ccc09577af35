"""What the probe's rows of NCCL become: bytes on the wires, small messages, and why some are unknown."""

from __future__ import annotations

from typing import Any

import pytest

from gpuflight.collectors.cuda_metrics import process_values
from gpuflight.collectors.cuda_rows import Counters, Rows
from gpuflight.sources.cuda_probe.rows import CommunicatorRow, NcclRow


def call(operation: str = "ncclAllReduce", size: int = 1000, communicator: int = 1, **other: Any) -> NcclRow:
    values: dict[str, Any] = {
        "pid": 7, "operation": operation, "communicator": communicator, "datatype": "float16", "reduction": "",
        "calls": 10, "bytes": size, "bytes_unknown_calls": 0, "host_ns": 1, "host_ns_max": 1, "errors": 0, "last_ns": 1,
        "small_calls": 4, **other,
    }  # fmt: skip
    return NcclRow(**values)


def group(communicator: int, ranks: int) -> CommunicatorRow:
    return CommunicatorRow(7, communicator, ranks, 0, 0, 1, False)


@pytest.mark.parametrize(
    ("operation", "factor"),
    [
        ("ncclAllReduce", 2 * 7 / 8),
        ("ncclReduceScatter", 7),
        ("ncclAllGather", 7),
        ("ncclAlltoAll", 7),
        ("ncclBroadcast", 1),
        ("ncclSend", 1),
        ("ncclRecv", 0),
    ],
)
def test_bus_bytes_are_those_of_nccl_tests(operation: str, factor: float) -> None:
    rows = Rows(nccl=[call(operation, 8000)], communicators=[group(1, 8)])
    assert process_values(7, rows, Counters()).metrics["nccl_bus_bytes"] == round(8000 * factor)


def test_groups_of_different_sizes_count_by_theirs() -> None:
    rows = Rows(nccl=[call(size=800), call(size=800, communicator=2)], communicators=[group(1, 8), group(2, 2)])
    values = process_values(7, rows, Counters())
    assert values.metrics["nccl_bus_bytes"] == 1400 + 800
    assert values.metrics["nccl_small_calls_count"] == 8


def test_a_group_that_was_made_unseen_leaves_it_unknown() -> None:
    for communicators in ([], [group(1, 0)]):
        values = process_values(7, Rows(nccl=[call()], communicators=communicators), Counters())
        assert "nccl_bus_bytes" not in values.metrics and "made unseen" in values.unknown["nccl_bus_bytes"]
        assert values.metrics["nccl_bytes"] == 1000


def test_a_data_type_of_unknown_size_leaves_sizes_unknown() -> None:
    rows = Rows(nccl=[call(bytes_unknown_calls=3)], communicators=[group(1, 8)])
    values = process_values(7, rows, Counters())
    assert {"nccl_bytes", "nccl_bus_bytes", "nccl_small_calls_count"} <= set(values.unknown)
    assert not {"nccl_bytes", "nccl_bus_bytes", "nccl_small_calls_count"} & set(values.metrics)
