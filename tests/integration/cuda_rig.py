"""What the tests of the CUDA probe share: the compiled fakes, a loaded probe, and why there may be neither."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from tests.fakes.cuda.build import Fakes, why_not

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.bpf.probes import Probes
from gpuflight.sources.cuda_probe.probe import CudaProbe
from gpuflight.sources.cuda_probe.rows import CudaRows


@cache
def why_no_probe() -> str:
    """Why no probe can be loaded here; empty if one can."""
    if reason := why_not():
        return reason
    try:
        CudaProbe(Probes()).close()
    except SourceUnavailable as error:
        return str(error)
    return ""


@cache
def compiled() -> Fakes:
    """The fakes, once per run of the tests."""
    return Fakes.compile(Path(tempfile.mkdtemp(prefix="gpuflight-fake-cuda-")))


@contextmanager
def loaded(probes: Probes | None = None, **options: object) -> Iterator[CudaProbe]:
    """A probe of its own."""
    probe = CudaProbe(probes or Probes(), **options)  # type: ignore[arg-type]
    try:
        yield probe
    finally:
        probe.close()


def read_of_ended(probe: CudaProbe, pid: int) -> tuple[CudaRows, int]:
    """The reading that holds the end of a process that was waited for, and when it ended (ns)."""
    rows = probe.read()
    for event in rows.life:
        if event.event == "exit" and event.pid == pid:
            return rows, event.time_ns
    return rows, time.monotonic_ns()
