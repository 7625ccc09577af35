"""Names of NCCL's kernels through its versions (docs/faults.md, N25)."""

from __future__ import annotations

import pytest

from gpuflight.collectors.cuda_nccl import NcclNames
from gpuflight.sources.cuda_probe import nccl
from gpuflight.sources.cuda_probe.rows import NameRow
from gpuflight.sources.nccl_kernels import UNCLASSIFIED, NcclKernel, classify


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        (
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)",
            NcclKernel("AllReduce", "sum", "f32", "RING", "LL", "2.19"),
        ),
        (
            "_Z39ncclDevKernel_AllReduce_Sum_f32_RING_LLP11ncclDevCommmP8ncclWork",
            NcclKernel("AllReduce", "sum", "f32", "RING", "LL", "2.19"),
        ),
        (
            "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            NcclKernel("ReduceScatter", "sum", "bf16", "RING", "LL", "2.19"),
        ),
        (
            "ncclDevKernel_AllReduce_Sum_f8e4m3_NVLS_SIMPLE",
            NcclKernel("AllReduce", "sum", "f8e4m3", "NVLS", "SIMPLE", "2.19"),
        ),
        ("ncclDevKernel_AllGather_RING_LL", NcclKernel("AllGather", "", "", "RING", "LL", "2.19")),
        ("ncclDevKernel_SendRecv(ncclDevComm*)", NcclKernel("SendRecv", since="2.19")),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", NcclKernel("Generic", since="2.19")),
        (
            "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)",
            NcclKernel("AllReduce", "sum", "float", "RING", "LL", "2.8"),
        ),
        (
            "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)",
            NcclKernel("SendRecv", "sum", "int8_t", "RING", "SIMPLE", "2.8"),
        ),
        (
            "ncclKernel_ReduceScatter_TREE_LL128_Sum___nv_bfloat16",
            NcclKernel("ReduceScatter", "sum", "__nv_bfloat16", "TREE", "LL128", "2.8"),
        ),
        ("ncclAllReduceRingLLKernel_sum_f32(ncclColl)", NcclKernel("AllReduce", "sum", "f32", "RING", "LL", "2.4")),
        ("ncclBroadcastRingKernel_copy_i8(ncclColl)", NcclKernel("Broadcast", "copy", "i8", "RING", "", "2.4")),
        (
            "ncclSymkDevKernel_AllReduce_RSxLD_AGxST_sum_f32",
            NcclKernel("AllReduce", "sum", "f32", "RSxLD_AGxST", "", "2.27"),
        ),
        ("ncclSymDevKernel_AllGather_LL", NcclKernel("AllGather", "", "", "LL", "", "2.27")),
    ],
)
def test_names_of_every_scheme(name: str, kernel: NcclKernel) -> None:
    assert classify(name) == kernel


@pytest.mark.parametrize(
    "name", ["", "void gemm<float>(float*)", "vectorized_elementwise_kernel", "_Z3addPf", "my_ncclDevKernel_AllReduce"]
)
def test_other_kernels_are_not_nccls(name: str) -> None:
    assert classify(name) is None


def test_a_name_of_nccl_that_no_scheme_fits_is_unclassified() -> None:
    kernel = classify("ncclNextKernel_AllReduce_v5")
    assert kernel is not None and kernel.operation == UNCLASSIFIED


def test_a_name_that_no_scheme_fits_is_in_the_coverage() -> None:
    names = NcclNames()
    assert names.limit()[2] == 0
    known = NameRow(1, 0x10, "_Z39ncclDevKernel_AllReduce_Sum_f32_RING_LLP11ncclDevCommmP8ncclWork", False)
    names.hear([known, known, NameRow(1, 0x20, "_Z4gemmPf", False), NameRow(1, 0x30, "ncclNextKernel_v5", False)])
    reason, hint, count = names.limit()
    assert count == 1 and hint
    assert reason.startswith("50% of NCCL's kernels") and "ncclNextKernel_v5" in reason


def test_numbers_of_the_header() -> None:
    assert (nccl.datatype_name(7), nccl.DATATYPE_BYTES[7]) == ("float32", 4)
    assert nccl.datatype_name(77) == "unknown(77)" and 77 not in nccl.DATATYPE_BYTES
    assert (nccl.reduction_name(4), nccl.reduction_name(5)) == ("avg", "user(5)")
