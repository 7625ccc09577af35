"""Which kernels are NCCL's, and what they do, by the names that NCCL's versions gave them.

NCCL renamed its kernels three times, and tools that knew one scheme saw no communication at all in the next. So each
scheme is a row of a table; a name that is NCCL's by its beginning and fits no row is *unclassified*, which is counted
and shown: a share above zero says that the table needs a new row.
"""

from __future__ import annotations

import re
from functools import lru_cache

from msgspec import Struct

UNCLASSIFIED = "unclassified"


class NcclKernel(Struct, frozen=True):
    """One kernel of NCCL. What a name does not tell is empty: a *generic* kernel runs whatever its arguments say.

    ``operation``: "AllReduce", "SendRecv", "Generic", …, or UNCLASSIFIED. ``reduction``: "sum", … ``datatype``: as NCCL
    abbreviates it ("f32", "bf16"). ``algorithm``: "RING", "TREE", "NVLS", … ``protocol``: "LL", "LL128", "SIMPLE".
    ``since``: first NCCL version with such names.
    """

    operation: str
    reduction: str = ""
    datatype: str = ""
    algorithm: str = ""
    protocol: str = ""
    since: str = ""


_OPERATION = "AllReduce|AllGather|ReduceScatter|Reduce|Broadcast|SendRecv|Send|Recv|AlltoAll|AllToAll|Gather|Scatter"
_TYPE = r"[a-z]+\d*(?:_t|e\dm\d)?"
_ALGORITHM = "RING|TREE|COLLNET_DIRECT|COLLNET_CHAIN|COLLNET|NVLS_TREE|NVLS|PAT"
_PROTOCOL = "LL128|LL|SIMPLE"
_REDUCTION = "Sum|Prod|MinMax|Max|Min|Avg|PreMulSum|SumPostDiv"

_SCHEMES: tuple[tuple[str, re.Pattern[str]], ...] = (
    # ncclSymkDevKernel_AllReduce_RSxLD_AGxST_sum_f32, ncclSymDevKernel_AllGather_LL: kernels on symmetric memory
    (
        "2.27",
        re.compile(
            rf"ncclSymk?DevKernel_(?P<operation>{_OPERATION})_(?P<algorithm>[A-Za-z0-9]+(?:_[A-Z][A-Za-z0-9]*)*?)"
            rf"(?:_(?P<reduction>{_REDUCTION.lower()})_(?P<datatype>{_TYPE}))?$",
        ),
    ),
    # ncclDevKernel_AllReduce_Sum_f32_RING_LL, ncclDevKernel_AllGather_RING_LL, ncclDevKernel_SendRecv
    (
        "2.19",
        re.compile(
            rf"ncclDevKernel_(?P<operation>{_OPERATION})(?:_(?P<reduction>{_REDUCTION})_(?P<datatype>{_TYPE}))?"
            rf"(?:_(?P<algorithm>{_ALGORITHM})_(?P<protocol>{_PROTOCOL}))?$"
        ),
    ),
    ("2.19", re.compile(r"ncclDevKernel_(?P<operation>Generic|OneRankReduce)(?:_\w+)?$")),
    # ncclKernel_AllReduce_RING_LL_Sum_float
    (
        "2.8",
        re.compile(
            rf"ncclKernel_(?P<operation>{_OPERATION})_(?P<algorithm>{_ALGORITHM})_(?P<protocol>{_PROTOCOL})"
            rf"_(?P<reduction>{_REDUCTION})_(?P<datatype>\w+)$"
        ),
    ),
    ("2.8", re.compile(r"ncclKernel_(?P<operation>Generic)(?:_\w+)?$")),
    # ncclAllReduceRingLLKernel_sum_f32, ncclSendRecvKernel_copy_i8
    (
        "2.4",
        re.compile(
            rf"nccl(?P<operation>{_OPERATION})(?P<algorithm>Ring|Tree|CollNet)?(?P<protocol>LL128|LL)?Kernel"
            rf"(?:_(?P<reduction>[a-z]+)_(?P<datatype>{_TYPE}))?$"
        ),
    ),
)
"""Newest first: NCCL version that brought the names, and what they look like."""

_OURS = re.compile(r"nccl\w*Kernel|oneRankReduce|ncclDev")
_MANGLED = re.compile(r"_Z(\d+)(?=nccl|oneRank)")


@lru_cache(maxsize=4096)
def classify(name: str) -> NcclKernel | None:
    """The kernel of this name, mangled or not, arguments and template parameters or not; None if it is not NCCL's."""
    bare = _bare(name)
    if not _OURS.match(bare):
        return None
    for since, pattern in _SCHEMES:
        if found := pattern.match(bare):
            told = {key: value or "" for key, value in found.groupdict().items()}
            told["reduction"] = told.get("reduction", "").lower()
            told["algorithm"] = told.get("algorithm", "").upper() if since != "2.27" else told["algorithm"]
            return NcclKernel(**told, since=since)
    return NcclKernel(UNCLASSIFIED)


def _bare(name: str) -> str:
    if found := _MANGLED.match(name):
        return name[found.end() : found.end() + int(found[1])]
    bare = name.strip().removeprefix("void ")
    return re.split(r"[(<]", bare, maxsplit=1)[0].strip()
