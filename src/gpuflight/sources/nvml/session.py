"""NVML from one initialisation to the next: its GPUs by handle, and what became of those that it had before."""

from __future__ import annotations

from msgspec.structs import replace

from gpuflight.sources.nvml.device import Device
from gpuflight.sources.nvml.events import EventReader
from gpuflight.sources.nvml.library import Broken, Doing, Library, Lost, Refused
from gpuflight.sources.nvml.model import Event, Gpu, NvmlSnapshot, Pair
from gpuflight.sources.nvml.pairs import read_pairs

_PAIRS_EVERY_ROUNDS = 100
GONE = "NVML does not list it any more"


class Session:
    """One initialisation of NVML. ``known`` outlives it: every GPU that was ever seen, as it was when it answered."""

    def __init__(self, path: str | None, known: dict[str, Gpu], doing: Doing) -> None:
        """Raises SourceUnavailable and Broken."""
        self.library = Library(path, doing)
        self._known = known
        self._devices: list[Device] = []
        self._nameless: list[tuple[int, str]] = []
        self._count = -1
        self._events: EventReader | None = None
        self._pairs: list[Pair] = []
        self._pairs_of: object = None
        self._pairs_age = 0
        self._versions = (
            self._version("nvmlSystemGetDriverVersion"),
            self._version("nvmlSystemGetNVMLVersion"),
            self._cuda_version(),
        )

    @property
    def has_lost(self) -> bool:
        """Whether a GPU that there should be does not answer: worth initialising again after a while."""
        return bool(self._nameless or len(self._known) > sum(not device.lost for device in self._devices))

    def read(self, now_s: float, wall_ns: int) -> NvmlSnapshot:
        """One round. Raises Broken when the library as a whole fails."""
        self._enumerate()
        gpus: dict[str, Gpu] = {}
        for device in self._devices:
            if not device.lost:
                try:
                    gpu = gpus[device.uuid] = device.read(now_s, wall_ns // 1000)
                    self._known[device.uuid] = device.skeleton()
                    gpu.index = device.index
                    continue
                except Lost:
                    pass
            gpus[device.uuid] = replace(device.skeleton(), state="lost", reason=device.lost)
        events, events_reason = self._read_events(wall_ns)
        nameless = dict(self._nameless)
        for uuid, gpu in self._known.items():
            if uuid not in gpus:
                gpus[uuid] = replace(gpu, state="lost", reason=nameless.pop(gpu.index, GONE))
        driver, nvml, cuda = self._versions
        return NvmlSnapshot(
            wall_ns=wall_ns,
            monotonic_s=now_s,
            driver_version=driver,
            nvml_version=nvml,
            cuda_version=cuda,
            gpus=list(gpus.values()),
            pairs=self._current_pairs(gpus),
            events=events,
            events_reason=events_reason,
            nameless=list(nameless.items()),
        )

    def _enumerate(self) -> None:
        try:
            count = self.library.call("nvmlDeviceGetCount")
        except (Refused, Lost) as error:
            raise Broken(f"nvmlDeviceGetCount: {error}") from error
        if count == self._count:
            return
        self._count = count
        devices, self._nameless = [], []
        lost = {device.uuid: device.lost for device in self._devices if device.lost}
        for index in range(count):
            try:
                handle = self.library.call("nvmlDeviceGetHandleByIndex", index, what=f"GPU {index}")
                device = Device(self.library, handle, index)
            except (Refused, Lost) as error:
                self._nameless.append((index, str(error)))
                continue
            device.lost = lost.get(device.uuid, "")
            devices.append(device)
            self._known.setdefault(device.uuid, device.skeleton())
        self._devices = devices

    def _read_events(self, wall_ns: int) -> tuple[list[Event], str]:
        """Events since the last round, and why there are none to be had. A lost GPU ends the waiting for all others, so
        what it left is taken and then the set is made anew without it."""
        alive = [device for device in self._devices if not device.lost]
        reader, events = self._events, []
        if reader is not None:
            events = reader.read(wall_ns)
            if reader.devices != alive:
                reader.close()
                reader = None
        if reader is None:
            reader = self._events = EventReader(self.library, alive)
            events += reader.read(wall_ns)  # nothing yet, unless that it does not work
        return events, reader.reason

    def _current_pairs(self, gpus: dict[str, Gpu]) -> list[Pair]:
        """Read again only when a GPU or a link came or went, and now and then: it is quadratic."""
        state = [
            (uuid, [link.active for link in gpu.links]) for uuid, gpu in gpus.items() if gpu.state == "ok"
        ]  # fmt: skip
        self._pairs_age += 1
        if state != self._pairs_of or self._pairs_age >= _PAIRS_EVERY_ROUNDS:
            self._pairs = read_pairs(self.library, self._devices)
            self._pairs_of, self._pairs_age = state, 0
        return self._pairs

    def _version(self, function: str) -> str:
        try:
            return str(self.library.call(function))
        except (Refused, Lost):
            return ""

    def _cuda_version(self) -> str:
        for function in ("nvmlSystemGetCudaDriverVersion_v2", "nvmlSystemGetCudaDriverVersion"):
            try:
                number = self.library.call(function)
                return f"{number // 1000}.{number % 1000 // 10}"
            except (Refused, Lost):
                continue
        return ""

    def close(self) -> None:
        """Give NVML back."""
        if self._events is not None:
            self._events.close()
        for device in self._devices:
            device.close()
        self.library.close()
