"""Readings of the host and its GPUs beside the records: taken in a thread of their own, since NVML can hang."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

from gpuflight.errors import SourceUnavailable
from gpuflight.events.format.writer import SessionWriter
from gpuflight.events.recorder import lifecycle
from gpuflight.events.recorder.clock import Clock
from gpuflight.sources.nvml.library import Broken, Library, Lost, Refused, load_bindings

_MIB = 1 << 20
_WAITING = 1000
_NVML_CLOCK_SM, _NVML_CLOCK_MEM, _NVML_TEMPERATURE_GPU = 1, 2, 0

_READINGS: tuple[tuple[str, str, tuple[Any, ...], str, float], ...] = (
    ("temp_c", "nvmlDeviceGetTemperature", (_NVML_TEMPERATURE_GPU,), "", 1),
    ("power_mw", "nvmlDeviceGetPowerUsage", (), "", 1),
    ("clock_sm", "nvmlDeviceGetClockInfo", (_NVML_CLOCK_SM,), "", 1),
    ("clock_mem", "nvmlDeviceGetClockInfo", (_NVML_CLOCK_MEM,), "", 1),
    ("energy_uj", "nvmlDeviceGetTotalEnergyConsumption", (), "", 1000),
)
"""Column of device_metric_batch, function, arguments, attribute of the answer, factor to the column's unit."""
_PAIRS: tuple[tuple[str, tuple[tuple[str, str, int], ...]], ...] = (
    ("nvmlDeviceGetUtilizationRates", (("gpu_util", "gpu", 1), ("mem_util", "memory", 1))),
    ("nvmlDeviceGetMemoryInfo", (("used_mib", "used", _MIB), ("total_mib", "total", _MIB))),
)
_ORDER = (
    *("dt_ns", "device_id", "gpu_util", "mem_util", "temp_c", "power_mw", "used_mib", "total_mib", "clock_sm"),
    *("clock_mem", "energy_uj"),
)


class Metrics:
    """``why``: why there are no readings of GPUs, empty while there are. ``taken``: readings; ``dropped``: that waited
    too long to be written."""

    def __init__(self, clock: Clock, interval_s: float, *, nvml: str | None = None, proc: str = "/proc") -> None:
        self.why = ""
        self.taken = 0
        self.dropped = 0
        self.gpus: list[dict[str, Any]] = []
        self._clock = clock
        self._interval_s = interval_s
        self._nvml = nvml
        self._proc = proc
        self._host: deque[tuple[int, int | None, int, int]] = deque(maxlen=_WAITING)
        self._readings: deque[tuple[int, str, int, dict[str, int]]] = deque(maxlen=_WAITING)
        self._end = threading.Event()
        self._ticks: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._interval_s and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gpuflight-metrics", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end. It is not waited for: a call of NVML may never return."""
        self._end.set()

    def _run(self) -> None:
        library = self._open()
        while True:
            self.look_at_host()
            if library is not None:
                try:
                    self.look_at_gpus(library)
                except Broken as error:
                    self.why = str(error)
                    library = None
            if self._end.wait(self._interval_s):
                break
        if library is not None:
            library.close()

    def _open(self) -> Library | None:
        try:
            with lifecycle.imports:
                load_bindings(self._nvml)
            return Library(self._nvml)
        except SourceUnavailable as error:
            self.why = str(error)
        except Exception as error:  # noqa: BLE001 - a broken binding costs the readings, not the program
            self.why = f"{type(error).__name__}: {error}"[:200]
        return None

    def look_at_host(self) -> None:
        """One reading of CPU and memory."""
        try:  # an encoding that is there already: others are imported
            with open(f"{self._proc}/stat", encoding="utf-8") as file:
                ticks = [int(word) for word in file.readline().split()[1:9]]
            with open(f"{self._proc}/meminfo", encoding="utf-8") as file:
                told = dict(line.split(":", 1) for line in file)
            total_kib, free_kib = (int(told[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
        except (OSError, ValueError, KeyError, IndexError):
            return
        idle, everything = ticks[3] + ticks[4], sum(ticks)
        before, self._ticks = self._ticks, (idle, everything)
        cpu = None
        if before is not None and everything > before[1]:
            cpu = round(10_000 * (1 - (idle - before[0]) / (everything - before[1])))
        self.dropped += len(self._host) == _WAITING
        self._host.append((self._clock.now_ns(), cpu, (total_kib - free_kib) >> 10, total_kib >> 10))
        self.taken += 1

    def look_at_gpus(self, library: Library) -> None:
        """One reading of every GPU. Raises Broken if NVML is gone."""
        found = []
        for index in range(self._ask(library, "nvmlDeviceGetCount") or 0):
            handle = self._ask(library, "nvmlDeviceGetHandleByIndex", index)
            uuid = _text(self._ask(library, "nvmlDeviceGetUUID", handle)) if handle is not None else ""
            if not uuid:
                continue
            gpu: dict[str, Any] = {"uuid": uuid, "index": index, "vendor": "NVIDIA"}
            gpu["name"] = _text(self._ask(library, "nvmlDeviceGetName", handle))
            memory = self._ask(library, "nvmlDeviceGetMemoryInfo", handle)
            if memory is not None:
                gpu["total_mib"] = int(memory.total) // _MIB
            found.append(gpu)
            values = self._read(library, handle)
            if values:
                self.dropped += len(self._readings) == _WAITING
                self._readings.append((self._clock.now_ns(), uuid, index, values))
        self.gpus = found

    def _read(self, library: Library, handle: Any) -> dict[str, int]:
        values: dict[str, int] = {}
        for function, parts in _PAIRS:
            answer = self._ask(library, function, handle)
            if answer is not None:
                values.update({column: int(getattr(answer, name)) // unit for column, name, unit in parts})
        for column, function, arguments, _, factor in _READINGS:
            answer = self._ask(library, function, handle, *arguments)
            if answer is not None:
                values[column] = round(answer * factor)
        return values

    @staticmethod
    def _ask(library: Library, function: str, *arguments: Any) -> Any:
        """An answer, None where this GPU has none."""
        try:
            return library.call(function, *arguments)
        except (Refused, Lost):
            return None

    def write(self, writer: SessionWriter, hostname: str, numbers: Mapping[str, int]) -> None:
        """What was read since. ``numbers``: CUDA's number of a GPU by its UUID; the readings of others are left out."""
        while self._host:
            time_ns, cpu, used, total = self._host.popleft()
            row: dict[str, Any] = {"dt_ns": [time_ns]}
            if cpu is not None:
                row["cpu_pct_x100"] = [cpu]
            writer.rows(
                "host_metric_batch", {**row, "ram_used_mib": [used], "ram_total_mib": [total]}, hostname=hostname
            )
        while self._readings:
            time_ns, uuid, _, values = self._readings.popleft()
            if uuid in numbers:
                told = {"dt_ns": time_ns, "device_id": numbers[uuid], **values}
                writer.rows("device_metric_batch", {name: [told[name]] for name in _ORDER if name in told})

    def numbers(
        self, devices: Mapping[int, Mapping[str, Any]], environ: Mapping[str, str] = os.environ
    ) -> dict[str, int]:
        """CUDA's numbers by UUID: as CUPTI told them, else as they follow from the environment; empty where neither
        tells."""
        told = {str(line["uuid"]): number for number, line in devices.items() if "uuid" in line}
        if told:
            return told
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            ordered = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu["name"] for gpu in self.gpus}) == 1
            return {gpu["uuid"]: gpu["index"] for gpu in self.gpus} if ordered else {}
        words = [word.strip() for word in visible.split(",")]
        found = {}
        for number, word in enumerate(words):
            fitting = [gpu["uuid"] for gpu in self.gpus if word.startswith("GPU-") and gpu["uuid"].startswith(word)]
            if len(fitting) != 1:
                return {}
            found[fitting[0]] = number
        return found


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value or "")
