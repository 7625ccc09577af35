"""GPU performance monitoring (GPM): which units of a GPU worked, from two samples of the driver's counters.

NVML's utilisation says only that some kernel was there; these say how much of the GPU it kept busy. Drivers give them
for Hopper and later. A sample is taken once a round, and what is told is the mean since the sample before, so it costs
two calls and no waiting.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from gpuflight.sources.nvml.library import (
    FUNCTION_NOT_FOUND,
    NOT_SUPPORTED,
    NOT_SUPPORTED_REASON,
    Broken,
    Lost,
    Refused,
    reason_of,
)

if TYPE_CHECKING:
    from gpuflight.sources.nvml.library import Library

UNITS = {2: "sm_active_pct", 3: "sm_occupancy_pct", 5: "tensor_active_pct", 10: "dram_active_pct"}
"""Ids of NVML_GPM_METRIC_* by our names: SMs that were busy, warps of those that could be there, SMs' time in tensor
operations, bandwidth of the memory."""

BUSY = {1: "sm_util_pct"}
"""The share of time in which any kernel ran: of MIG devices NVML tells it in no other way."""

FIRST_SAMPLE = "it needs two samples; this was the first"


class Gpm:
    """Of one GPU, or of one GPU instance of it (``gpu_instance``). ``metrics``: ids by name."""

    def __init__(
        self, library: Library, handle: Any, what: str, metrics: dict[int, str], gpu_instance: int | None = None
    ) -> None:
        self._library = library
        self._handle = handle
        self._what = what
        self._metrics = metrics
        self._gpu_instance = gpu_instance
        self._samples: list[Any] = []  # the last one, and the one that the next goes into
        self._sampled = False
        self._asked = False
        self._never = ""

    def read(self, metrics: dict[str, Any], unknown: dict[str, str]) -> None:
        """Add what is known since the last time, and why the rest is not. Raises Lost and Broken."""
        why = self._never
        if not why:
            try:
                why = self._read(metrics, unknown)
            except Refused as refused:
                self._sampled = False
                why = refused.reason
                if refused.code in (NOT_SUPPORTED, FUNCTION_NOT_FOUND):
                    self._never = why
        if why:
            unknown.update(dict.fromkeys(self._metrics.values(), why))

    def _read(self, metrics: dict[str, Any], unknown: dict[str, str]) -> str:
        """Why there is nothing, empty if there is."""
        if not self._asked:
            if not self._call("nvmlGpmQueryDeviceSupport", self._handle).isSupportedDevice:
                raise Refused(NOT_SUPPORTED, NOT_SUPPORTED_REASON)
            self._asked = True
        while len(self._samples) < 2:
            self._samples.append(self._call("nvmlGpmSampleAlloc"))
        before, now = self._samples
        if self._gpu_instance is None:
            self._call("nvmlGpmSampleGet", self._handle, now)
        else:
            self._call("nvmlGpmMigSampleGet", self._handle, self._gpu_instance, now)
        self._samples = [now, before]
        if not self._sampled:
            self._sampled = True
            return FIRST_SAMPLE
        asked = self._library.nv.c_nvmlGpmMetricsGet_t()
        asked.version = self._library.nv.NVML_GPM_METRICS_GET_VERSION
        asked.numMetrics = len(self._metrics)
        asked.sample1, asked.sample2 = before, now
        for place, identifier in enumerate(self._metrics):
            asked.metrics[place].metricId = identifier
        self._call("nvmlGpmMetricsGet", asked)
        for place, name in enumerate(self._metrics.values()):
            answer = asked.metrics[place]
            if answer.nvmlReturn:
                unknown[name] = reason_of(answer.nvmlReturn)
            elif not 0.0 <= answer.value <= 1e6:  # not a number, or what is left of another driver's structure
                unknown[name] = "NVML gives a number that makes no sense"
            else:
                metrics[name] = round(min(answer.value, 100.0), 3)
                unknown.pop(name, None)
        return ""

    def _call(self, function: str, *arguments: Any) -> Any:
        return self._library.call(function, *arguments, what=self._what)

    def close(self) -> None:
        """Give the samples back."""
        samples, self._samples = self._samples, []
        for sample in samples:
            with contextlib.suppress(Refused, Lost, Broken):
                self._call("nvmlGpmSampleFree", sample)
