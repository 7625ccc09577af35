"""Probes in the kernel: what runs when a function is called or something happens, summed up there, read once a round.

``base`` is the interface, ``libbpf`` and ``bcc_backend`` are behind it; ``probes.Probes`` chooses one of them for a
World and puts the tape under it. Nothing here is loaded before a probe is.
"""

from gpuflight.sources.bpf.base import Link, ProbeBackend, ProbeObject, ProgramCost, Uprobe

__all__ = ["Link", "ProbeBackend", "ProbeObject", "ProgramCost", "Uprobe"]
