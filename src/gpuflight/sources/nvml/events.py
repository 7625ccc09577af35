"""XIDs and other events of the GPUs, collected by NVML between two rounds."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpuflight.sources.nvml.library import TIMEOUT, Broken, Lost, Refused
from gpuflight.sources.nvml.model import Event

if TYPE_CHECKING:
    from gpuflight.sources.nvml.device import Device
    from gpuflight.sources.nvml.library import Library

KINDS = {
    0x0001: "ecc_single_bit",
    0x0002: "ecc_double_bit",
    0x0008: "xid",
    0x0100: "mig_config_change",
    0x0200: "ecc_single_bit_storm",
    0x0400: "dram_retirement",
    0x0800: "dram_retirement_failure",
    0x1000: "poison_non_fatal",
    0x2000: "poison_fatal",
    0x4000: "gpu_unavailable",
    0x8000: "gpu_recovery_action",
}
"""nvmlEventType* worth telling; changes of clock, P-state and power source are not."""

_MOST_PER_ROUND = 1_000


class EventReader:
    """An event set over all GPUs. What happened before it was made is not known."""

    def __init__(self, library: Library, devices: Sequence[Device]) -> None:
        self._library = library
        self.devices = list(devices)
        self.reason = ""
        self._uuids: dict[int | None, str] = {}
        self._set: Any = None
        try:
            self._set = library.call("nvmlEventSetCreate")
        except (Refused, Lost) as error:
            self.reason = str(error)
            return
        refusals = []
        for device in devices:
            try:
                supported = library.call("nvmlDeviceGetSupportedEventTypes", device.handle, what=f"GPU {device.index}")
                wanted = supported & sum(KINDS)
                if wanted:
                    library.call("nvmlDeviceRegisterEvents", device.handle, wanted, self._set)
                    self._uuids[_address(device.handle)] = device.uuid
            except (Refused, Lost) as error:
                refusals.append(str(error))
        if not self._uuids and refusals:
            self.reason = refusals[0]

    def read(self, wall_ns: int) -> list[Event]:
        """Events since the last call, without waiting for any. Raises Broken."""
        events: list[Event] = []
        while self._set is not None and self._uuids and len(events) < _MOST_PER_ROUND:
            try:
                data = self._library.call("nvmlEventSetWait", self._set, 0)
            except Refused as refused:
                if refused.code != TIMEOUT:
                    self.reason = refused.reason
                break
            except Lost as lost:
                self.reason = str(lost)
                break
            uuid = self._uuids.get(_address(data.device), "")
            kind = KINDS.get(data.eventType, f"0x{data.eventType:x}")
            events.append(Event(uuid, kind, int(data.eventData), wall_ns))
        return events

    def close(self) -> None:
        """Give the event set back."""
        if self._set is not None:
            try:
                self._library.call("nvmlEventSetFree", self._set)
            except (Refused, Lost, Broken):
                pass  # of a library that is going away
            self._set = None


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
