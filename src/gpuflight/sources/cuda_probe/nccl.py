"""Numbers of nccl.h: datatypes and reductions."""

from __future__ import annotations

# ncclDataType_t of nccl.h 2.28; 10 and 11 came with 2.24.
_DATATYPES = {
    0: ("int8", 1),
    1: ("uint8", 1),
    2: ("int32", 4),
    3: ("uint32", 4),
    4: ("int64", 8),
    5: ("uint64", 8),
    6: ("float16", 2),
    7: ("float32", 4),
    8: ("float64", 8),
    9: ("bfloat16", 2),
    10: ("float8e4m3", 1),
    11: ("float8e5m2", 1),
}
DATATYPE_BYTES = {number: size for number, (_, size) in _DATATYPES.items()}
"""Bytes of one element by ncclDataType_t."""

_REDUCTIONS = ("sum", "prod", "max", "min", "avg")


def datatype_name(number: int) -> str:
    """``float16``; ``unknown(N)`` for one that is newer than this table."""
    return _DATATYPES[number][0] if number in _DATATYPES else f"unknown({number})"


def reduction_name(number: int) -> str:
    """``sum``; ``user(N)`` for those made by ncclRedOpCreatePreMulSum, which begin after the built-in ones."""
    return _REDUCTIONS[number] if number < len(_REDUCTIONS) else f"user({number})"
