"""NVML through the real ``pynvml``: what every GPU of this machine says, once a round, as plain data."""

from gpuflight.sources.nvml.library import IN_USE_REASON, SONAME
from gpuflight.sources.nvml.links import LINK_BYTES_PER_S
from gpuflight.sources.nvml.model import Event, Gpu, GpuProcess, Link, Mig, NvmlSnapshot, Pair
from gpuflight.sources.nvml.source import Nvml

__all__ = [
    "IN_USE_REASON",
    "LINK_BYTES_PER_S",
    "SONAME",
    "Event",
    "Gpu",
    "GpuProcess",
    "Link",
    "Mig",
    "Nvml",
    "NvmlSnapshot",
    "Pair",
]
