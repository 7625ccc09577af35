"""Theoretical occupancy of a launch: how many of an SM's warps its configuration lets run at once.

After NVIDIA's occupancy calculator and the table "technical specifications per compute capability" of the CUDA C++
programming guide: registers are given out to warps in units of 256 and to four warps at a time; shared memory in units
of 128 bytes, with 1 KiB per block for the system, from compute capability 8.0 on (256 bytes and none before).
"""

from __future__ import annotations

import msgspec

_WARP = 32
_REGISTER_UNIT = 256
_WARP_UNIT = 4


class Limits(msgspec.Struct, frozen=True):
    """Of one SM, as CUPTI's device record tells them."""

    warps: int
    blocks: int
    registers: int
    registers_per_block: int
    shared_bytes: int
    compute_major: int


def occupancy(limits: Limits, threads: int, registers: int, shared_bytes: int) -> dict[str, float | int | str] | None:
    """Fields of a kernel_detail line; None where the limits or the launch make no sense. Shares are 0-1."""
    warps = -(-threads // _WARP)
    if not (0 < warps <= limits.warps) or limits.blocks < 1 or registers < 0:
        return None
    by = {"warps": limits.warps // warps, "blocks": limits.blocks}
    if registers and limits.registers and limits.registers_per_block:
        per_warp = -(-registers * _WARP // _REGISTER_UNIT) * _REGISTER_UNIT
        fitting = limits.registers_per_block // per_warp // _WARP_UNIT * _WARP_UNIT
        by["registers"] = fitting // warps * (limits.registers // limits.registers_per_block)
    if limits.shared_bytes:
        unit, reserved = (128, 1024) if limits.compute_major >= 8 else (256, 0)
        needed = -(-(shared_bytes + reserved) // unit) * unit
        if needed:
            by["shared_mem"] = limits.shared_bytes // needed
    active = min(by.values())

    def share(blocks: int) -> float:
        return round(min(blocks * warps / limits.warps, 1.0), 6)

    found: dict[str, float | int | str] = {
        "occupancy": share(active),
        "warp_occupancy": share(by["warps"]),
        "block_occupancy": share(by["blocks"]),
        "limiting_resource": min(by, key=lambda name: by[name]),
        "max_active_blocks": active,
    }
    if "registers" in by:
        found["reg_occupancy"] = share(by["registers"])
    if "shared_mem" in by:
        found["smem_occupancy"] = share(by["shared_mem"])
    return found
