"""Names of error codes. Sources: driver_types.h (cudaError), cuda.h (CUresult, the same numbers) of CUDA 13, nccl.h of
2.28. Only codes that programs meet; any other stays a number."""

from __future__ import annotations

_CUDA = {
    1: "invalid value",
    2: "out of memory",
    3: "initialization error",
    4: "driver shutting down",
    9: "invalid configuration",
    13: "invalid symbol",
    17: "invalid device pointer",
    21: "invalid direction of a copy",
    35: "driver too old for the runtime",
    46: "devices unavailable",
    98: "invalid device function",
    100: "no device",
    101: "invalid device",
    201: "invalid context",
    209: "no kernel image for this GPU",
    214: "uncorrectable ECC error",
    217: "peer access unsupported",
    222: "unsupported PTX version",
    304: "operating system call failed",
    400: "invalid handle",
    401: "illegal state",
    700: "illegal address",
    701: "too many resources requested",
    702: "launch timed out",
    704: "peer access already enabled",
    709: "context is destroyed",
    710: "device-side assert",
    713: "host memory not registered",
    714: "hardware stack error",
    715: "illegal instruction",
    716: "misaligned address",
    718: "invalid program counter",
    719: "launch failed",
    800: "not permitted",
    801: "not supported",
    802: "system not ready",
    803: "driver and runtime do not fit",
    805: "MPS connection failed",
    900: "not allowed while a stream is captured",
    901: "capture invalidated",
    999: "unknown error",
}
_NCCL = {
    1: "CUDA error",
    2: "system error",
    3: "internal error",
    4: "invalid argument",
    5: "invalid usage",
    6: "remote error",
    7: "in progress",
}


def error_name(api: str, code: int) -> str:
    """``error_name("cudaMalloc", 2)`` is ``out of memory``; ``error 4242`` for a code in no table."""
    return (_NCCL if api.startswith("nccl") else _CUDA).get(code, f"error {code}")
