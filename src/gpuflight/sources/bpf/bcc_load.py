"""Making maps and loading instructions by bpf(2) itself: what libbpf does for the other backend.

Structures: include/uapi/linux/bpf.h. Every function raises OSError as the kernel answers.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import struct
from collections.abc import Mapping

from gpuflight.sources.bpf import syscalls
from gpuflight.sources.bpf.bcc_compiler import LOAD_64_BITS, MapShape, kernel_version
from gpuflight.sources.bpf.verifier import last_words

MAP_CREATE, RAW_TRACEPOINT_OPEN = 0, 17
KPROBE, TRACEPOINT, RAW_TRACEPOINT = syscalls.PROG_TYPE_KPROBE, 5, 17
"""Program types."""

_MAP_FD, _COOKIE = 1, 7
"""Source registers of 64-bit constants: BPF_PSEUDO_MAP_FD, and ours of c/gf_bcc.h."""

_COOKIE_HELPER = 174
_INSTRUCTION = struct.Struct("<BBhi")
_LOG_BYTES = 1 << 20
_NAME_BYTES = 16


class _MapAttr(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_uint32),
        ("key_size", ctypes.c_uint32),
        ("value_size", ctypes.c_uint32),
        ("max_entries", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("inner_map_fd", ctypes.c_uint32),
        ("numa_node", ctypes.c_uint32),
        ("name", ctypes.c_char * _NAME_BYTES),
    ]


class _RawTracepointAttr(ctypes.Structure):
    _fields_ = [("name", ctypes.c_uint64), ("prog_fd", ctypes.c_uint32), ("padding", ctypes.c_uint32)]


class Rejected(OSError):
    """The verifier does not accept a program; ``log`` is what it says, the reason near its end."""

    def __init__(self, code: int, log: str) -> None:
        super().__init__(code, os.strerror(code))
        self.log = log

    @property
    def reason(self) -> str:
        """The verifier's own words, in one line."""
        return last_words(self.log) or self.strerror or ""


def create_map(shape: MapShape, entries: int | None = None) -> int:
    """A map: its descriptor. ``entries``: instead of those of the shape."""
    attr = _MapAttr(
        type=shape.kind,
        key_size=shape.key_bytes,
        value_size=shape.value_bytes,
        max_entries=entries or shape.entries,
        flags=shape.flags,
        name=_name(shape.name),
    )
    return syscalls.bpf(MAP_CREATE, attr)


def load_program(name: str, kind: int, instructions: bytes, expected_attach_type: int = 0) -> int:
    """A program: its descriptor. Raises Rejected with the verifier's log."""
    code = ctypes.create_string_buffer(instructions, len(instructions))
    licence = ctypes.create_string_buffer(b"GPL")
    attr = syscalls.ProgramAttr(
        type=kind,
        count=len(instructions) // 8,
        instructions=ctypes.addressof(code),
        license=ctypes.addressof(licence),
        kernel_version=kernel_version(),  # before 5.0 the kernel compares it for kprobes
        name=_name(name),
        expected_attach_type=expected_attach_type,
    )
    try:
        return syscalls.bpf(syscalls.PROG_LOAD, attr)
    except OSError as error:
        if error.errno == errno.EPERM:
            raise
    # Only a second try asks why: the log of a large program takes time.
    log = ctypes.create_string_buffer(_LOG_BYTES)
    attr.log_level, attr.log_size, attr.log = 1, _LOG_BYTES, ctypes.addressof(log)
    try:
        return syscalls.bpf(syscalls.PROG_LOAD, attr)
    except OSError as error:
        raise Rejected(error.errno or 0, log.value.decode("utf-8", "replace")) from None


def link(instructions: bytes, maps: Mapping[int, int], cookie: int = 0) -> bytes:
    """The instructions with descriptors for references of maps, and the cookie where a program holds it itself."""
    code = bytearray(instructions)
    for offset in range(0, len(code), 8):
        operation, registers, _, value = _INSTRUCTION.unpack_from(code, offset)
        if operation != LOAD_64_BITS:
            continue
        source = registers >> 4
        if source == _MAP_FD:
            _INSTRUCTION.pack_into(code, offset, operation, registers, 0, maps[value])
        elif source == _COOKIE:
            low, high = struct.unpack("<ii", (cookie & (1 << 64) - 1).to_bytes(8, "little"))
            _INSTRUCTION.pack_into(code, offset, operation, registers & 0x0F, 0, low)
            _INSTRUCTION.pack_into(code, offset + 8, 0, 0, 0, high)
    return bytes(code)


def open_raw_tracepoint(program_fd: int, event: str) -> int:
    """A program at a raw tracepoint: the descriptor of the link."""
    name = ctypes.create_string_buffer(event.encode())
    return syscalls.bpf(RAW_TRACEPOINT_OPEN, _RawTracepointAttr(name=ctypes.addressof(name), prog_fd=program_fd))


@functools.cache
def has_cookies() -> bool:
    """Whether programs can ask which of their places fired (bpf_get_attach_cookie, Linux 5.15)."""
    code = b"".join(
        _INSTRUCTION.pack(*instruction)
        for instruction in ((0x85, 0, 0, _COOKIE_HELPER), (0xB7, 0, 0, 0), (0x95, 0, 0, 0))  # call, r0 = 0, exit
    )
    try:
        os.close(load_program("gf_cookies", KPROBE, code))
    except OSError:
        return False
    return True


def _name(text: str) -> bytes:
    return text.encode("ascii", "replace")[: _NAME_BYTES - 1]
