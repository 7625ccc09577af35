"""Cookies: what one hooked function is, in the 64 bits that the kernel hands to our programs (``c/cuda.h``)."""

from __future__ import annotations

from enum import IntEnum


class Class(IntEnum):
    """What the kernel side does with a call: ``enum call_class``."""

    PLAIN = 1
    SYNC_DEVICE = 2
    SYNC_STREAM = 3
    SYNC_EVENT = 4
    STREAM_CREATE = 5
    STREAM_DESTROY = 6
    EVENT_CREATE = 7
    EVENT_DESTROY = 8
    EVENT_RECORD = 9
    SET_DEVICE = 10
    RESET_DEVICE = 11
    ALLOC = 12
    ALLOC_PITCH = 13
    ALLOC_3D = 14
    FREE = 15
    COPY = 16
    COPY_3D = 17
    COPY_3D_PEER = 18
    COPY_BATCH = 19
    COPY_DRIVER_2D = 20
    COPY_DRIVER_3D = 21
    MEMSET = 22
    MEMSET_3D = 23
    HANDLE_OF = 24
    NAME_OF = 25
    CAPTURE_BEGIN = 26
    CAPTURE_END = 27
    WAIT_EVENT = 28
    CONTEXT_CREATE = 29
    CONTEXT_SET = 30
    COLLECTIVE = 31
    COMM_CREATE = 32
    COMM_CREATE_ALL = 33
    COMM_SPLIT = 34
    COMM_DESTROY = 35
    NCCL_PLAIN = 36
    # Not calls of cuda_call: programs of their own.
    LAUNCH = 40
    LAUNCH_CONFIG = 41
    LAUNCH_GRAPH = 42
    REGISTER = 43
    ENVIRONMENT = 44


class Memory(IntEnum):
    """``enum memory_kind``."""

    DEVICE = 0
    ASYNC = 1
    MANAGED = 2
    HOST = 3
    REGISTERED = 4


class Direction(IntEnum):
    """``enum direction``; the first five are cudaMemcpyKind."""

    HTOH = 0
    HTOD = 1
    DTOH = 2
    DTOD = 3
    DEFAULT = 4
    PTOP = 5
    MEMSET = 6


API_BITS = 10
FILE_NUMBERS = 1024


def pack(
    api: int,
    call_class: int,
    *,
    per_thread: bool = False,
    driver: bool = False,
    blocks: bool = False,
    a: int = 0,
    b: int = 0,
    stream: int = 0,
    d: int = 0,
    shift: int = 0,
    detail: int = 0,
    file_number: int = 0,
) -> int:
    """One cookie; ``a`` to ``d`` and ``stream`` are numbers of arguments, from 1, and 0 for none.

    Arguments beyond the sixth lie on the stack on x86-64, so that the program has to read it; so do structures that
    are passed by value.
    """
    stack = max(a, b, stream, d) > 6 or call_class in (Class.ALLOC_3D, Class.MEMSET_3D)
    return (
        api
        | call_class << 10
        | per_thread << 16
        | driver << 17
        | blocks << 18
        | stack << 19
        | a << 20
        | b << 24
        | stream << 28
        | d << 32
        | shift << 36
        | detail << 40
        | file_number << 48
    )
