"""NVIDIA GPUs that the machine has, whatever NVML says: on the PCI bus, and as the kernel driver lists them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct

from gpuflight.sources.fs import FileSystem
from gpuflight.sources.pci import PciFunction

NVIDIA = 0x10DE
_DISPLAY = 0x03
_UUID = re.compile(r"^GPU UUID:\s*(GPU-[0-9a-fA-F-]{36})\s*$", re.MULTILINE)
_MODEL = re.compile(r"^Model:\s*(\S.*?)\s*$", re.MULTILINE)


class PresentGpu(Struct, gc=False):
    """A GPU on the PCI bus. ``driver`` is the kernel module bound to it, ``""`` if none; ``uuid`` and ``model`` are
    what /proc/driver/nvidia knows of it, ``""`` if nothing."""

    address: str
    driver: str
    uuid: str = ""
    model: str = ""


def present_gpus(functions: Mapping[str, PciFunction]) -> dict[str, PresentGpu]:
    """Every NVIDIA display controller by PCI address."""
    return {
        address: PresentGpu(address, function.driver)
        for address, function in functions.items()
        if function.vendor_id == NVIDIA and function.class_code >> 16 == _DISPLAY and not function.virtual_function
    }


def identify(gpu: PresentGpu, fs: FileSystem) -> None:
    """Fill in what the nvidia kernel module tells without NVML; of a GPU in ruins it may write question marks."""
    try:
        text = fs.read(f"/proc/driver/nvidia/gpus/{gpu.address}/information").decode("utf-8", "replace")
    except OSError:
        return
    if found := _UUID.search(text):
        gpu.uuid = found[1]
    if found := _MODEL.search(text):
        gpu.model = found[1]
