"""One GPU: every reading of a round, each a value or the reason why there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpuflight.sources.nvml.gpm import BUSY, UNITS, Gpm
from gpuflight.sources.nvml.library import (
    DEPRECATED,
    FUNCTION_NOT_FOUND,
    IN_USE,
    NOT_SUPPORTED_REASON,
    VERSION_MISMATCH,
    Lost,
    Refused,
)
from gpuflight.sources.nvml.links import LinkReader, address_of
from gpuflight.sources.nvml.model import Gpu, Mig
from gpuflight.sources.nvml.processes import Utilisation, list_processes
from gpuflight.sources.nvml.readings import (
    DYNAMIC,
    FABRIC_STATES,
    FIELD_SCOPES,
    FIELDS,
    STATIC,
    THROUGHPUT,
    Reading,
)
from gpuflight.sources.sysfs import format_list

if TYPE_CHECKING:
    from gpuflight.sources.nvml.library import Library

BUSY_RETRY_S = 30.0
"""How long a reading that another client of the driver holds is left alone."""

_MASK_LONGS = 64  # 4,096 CPUs or nodes
_NEXT_GENERATION = (FUNCTION_NOT_FOUND, VERSION_MISMATCH, DEPRECATED)


class Device:
    """A GPU that NVML gives a handle to. Once lost it is never called again; see ``lost``."""

    def __init__(self, library: Library, handle: Any, index: int) -> None:
        """Raises Lost, Broken, and Refused if the GPU has no UUID."""
        self._library = library
        self.handle = handle
        self.index = index
        self.lost = ""
        self._what = f"GPU {index}"
        self._busy_until_s: dict[tuple[str, ...], float] = {}
        self._links = LinkReader(library, handle, self._what)
        self._utilisation = Utilisation()
        self._units = Gpm(library, handle, self._what, UNITS)
        self._instances: dict[int, Gpm] = {}
        self.uuid: str = self._call("nvmlDeviceGetUUID")
        self._static = Gpu(uuid=self.uuid, index=index)
        self._read_static(self._static)

    def skeleton(self) -> Gpu:
        """What does not change: all that is left of a GPU once it is lost."""
        known = self._static
        return Gpu(
            uuid=known.uuid,
            index=known.index,
            address=known.address,
            facts=dict(known.facts),
            metrics=dict(known.metrics),
        )

    def read(self, now_s: float, wall_us: int) -> Gpu:
        """Everything, now. Raises Lost (and remembers it) and Broken."""
        try:
            return self._read(now_s, wall_us)
        except Lost as lost:
            self.lost = str(lost)
            raise

    def _read(self, now_s: float, wall_us: int) -> Gpu:
        gpu = self.skeleton()
        gpu.unknown = dict(self._static.unknown)
        for reading in DYNAMIC:
            self._take(reading, gpu, now_s)
        self._memory(self.handle, gpu.facts, gpu.metrics, gpu.unknown)
        self._fields(gpu, now_s)
        self._fabric(gpu)
        self._units.read(gpu.metrics, gpu.unknown)
        try:
            gpu.links = self._links.read()
        except Refused as refused:
            gpu.unknown["nvlinks"] = refused.reason
        total = gpu.metrics.get("memory_total_bytes")
        gpu.processes, gpu.processes_garbled_count, gpu.processes_reason = list_processes(
            self._library, self.handle, self._what, int(total) if total else None
        )
        if gpu.facts.get("mig_mode") == "enabled":
            self._migs(gpu)
        self._utilisation.apply(
            self._library, self.handle, self._what, gpu.processes, wall_us, gpu.metrics.get("sm_util_pct")
        )
        return gpu

    def _call(self, function: str, *arguments: Any, handle: Any = None) -> Any:
        return self._library.call(function, handle or self.handle, *arguments, what=self._what)

    def _take(self, reading: Reading, gpu: Gpu, now_s: float) -> None:
        """Do one row of the table."""
        until_s = self._busy_until_s.get(reading.names)
        if until_s is not None and now_s < until_s:
            refused = Refused(IN_USE)
        else:
            for function, arguments in reading.calls:
                try:
                    values = reading.convert(self._call(function, *arguments))
                except Refused as error:
                    refused = error
                    if error.code in _NEXT_GENERATION:
                        continue
                    break
                into = {"fact": gpu.facts, "metric": gpu.metrics, "counter": gpu.counters}[reading.into]
                into.update(zip(reading.names, values, strict=False))
                return
            if refused.code == IN_USE:
                self._busy_until_s[reading.names] = now_s + BUSY_RETRY_S
        gpu.unknown.update(dict.fromkeys(reading.names, refused.reason))

    def _read_static(self, gpu: Gpu) -> None:
        for reading in STATIC:
            self._take(reading, gpu, 0.0)
        gpu.facts["index"] = self.index
        try:
            info = self._call("nvmlDeviceGetPciInfo")
            gpu.address = address_of(info)
        except Refused as refused:
            gpu.unknown["pci_address"] = refused.reason
        if gpu.address:
            gpu.facts["pci_address"] = gpu.address
        # Memory affinity is the host node next to the GPU; nvmlDeviceGetNumaNodeId is the node that the GPU's own
        # memory forms on coherent platforms, which is another thing.
        self._mask("numa_nodes", gpu, "nvmlDeviceGetMemoryAffinity", _MASK_LONGS, 0)
        self._mask("cpus", gpu, "nvmlDeviceGetCpuAffinity", _MASK_LONGS)
        try:
            gpu.facts["own_memory_numa_node"] = self._call("nvmlDeviceGetNumaNodeId")
        except Refused:
            pass  # true of every GPU whose memory is no NUMA node: nothing worth telling

    def _mask(self, name: str, gpu: Gpu, function: str, *arguments: Any) -> None:
        try:
            words = self._call(function, *arguments)
        except Refused as refused:
            gpu.unknown[name] = refused.reason
            return
        bits = [64 * at + bit for at, word in enumerate(words) if word for bit in range(64) if word >> bit & 1]
        if bits:
            gpu.facts[name] = format_list(bits)
        else:
            gpu.unknown[name] = "the driver names none"

    def _memory(self, handle: Any, facts: dict[str, Any], metrics: dict[str, Any], unknown: dict[str, str]) -> None:
        names = ("memory_total_bytes", "memory_used_bytes", "memory_free_bytes")
        try:
            memory = self._call("nvmlDeviceGetMemoryInfo", self._library.nv.nvmlMemory_v2, handle=handle)
            metrics["memory_reserved_bytes"] = memory.reserved
        except (Refused, AttributeError):  # AttributeError: bindings that know no v2
            try:
                memory = self._call("nvmlDeviceGetMemoryInfo", handle=handle)
            except Refused as refused:
                unknown.update(dict.fromkeys((*names, "memory_reserved_bytes"), refused.reason))
                return
            # The first version counts what the driver keeps for itself as used.
            facts["memory_used_includes_reserved"] = True
            unknown["memory_reserved_bytes"] = "the driver is too old for it"
        metrics.update(zip(names, (memory.total, memory.used, memory.free), strict=True))

    def _fields(self, gpu: Gpu, now_s: float) -> None:
        wanted = [(field, FIELD_SCOPES.get(field, 0)) for field in FIELDS]
        refused = NOT_SUPPORTED_REASON
        try:
            values = list(self._call("nvmlDeviceGetFieldValues", wanted))
        except Refused as error:
            refused, values = error.reason, []
        got = {value.fieldId: value for value in values if value.nvmlReturn == 0}
        for field, (into, name, factor) in FIELDS.items():
            value = got.get(field)
            if value is None:
                if not name.startswith("pcie_"):  # these have another way
                    gpu.unknown[name + ("_per_s" if into == "counter" else "")] = refused
                continue
            number = value.value.uiVal if value.valueType == 1 else value.value.ullVal
            (gpu.counters if into == "counter" else gpu.metrics)[name] = number * factor
        if "pcie_tx_bytes" not in gpu.counters or "pcie_rx_bytes" not in gpu.counters:
            for name in ("pcie_tx_bytes", "pcie_rx_bytes"):
                gpu.counters.pop(name, None)
            for reading in THROUGHPUT:
                self._take(reading, gpu, now_s)

    def _fabric(self, gpu: Gpu) -> None:
        nv = self._library.nv
        refused = Refused(FUNCTION_NOT_FOUND)
        for function, structure in (
            ("nvmlDeviceGetGpuFabricInfoV", "c_nvmlGpuFabricInfo_v2_t"),
            ("nvmlDeviceGetGpuFabricInfo", "c_nvmlGpuFabricInfo_t"),
        ):
            make = getattr(nv, structure, None)
            if make is None:
                continue
            info = make()
            try:
                self._call(function, nv.byref(info))
            except Refused as error:
                refused = error
                if error.code in _NEXT_GENERATION:
                    continue
                break
            state = FABRIC_STATES.get(info.state, f"unknown ({info.state})")
            gpu.facts["fabric_state"] = state
            if state == "completed":
                gpu.facts["fabric_status"] = "ok" if info.status == 0 else f"NVML error {info.status}"
                gpu.facts["fabric_clique"] = info.cliqueId
                gpu.facts["fabric_cluster"] = bytes(info.clusterUuid).hex()
            degraded = getattr(info, "healthMask", 0) & 0x3  # 1 degraded, 2 not (nvml.h, GPU_FABRIC_HEALTH_MASK)
            if degraded:
                gpu.facts["fabric_bandwidth_degraded"] = degraded == 1
            return
        gpu.unknown["fabric_state"] = refused.reason

    def _migs(self, gpu: Gpu) -> None:
        try:
            count = self._call("nvmlDeviceGetMaxMigDeviceCount")
        except Refused as refused:
            gpu.unknown["mig_devices"] = refused.reason
            return
        known = {(process.pid, process.gpu_instance, process.compute_instance) for process in gpu.processes}
        for number in range(count):
            try:
                handle = self._call("nvmlDeviceGetMigDeviceHandleByIndex", number)
            except Refused:
                continue  # that slot holds no device
            try:
                mig = Mig(uuid=self._call("nvmlDeviceGetUUID", handle=handle))
            except Refused as refused:
                gpu.unknown["mig_devices"] = refused.reason
                continue
            self._mig(mig, handle)
            self._instance(mig)
            gpu.migs.append(mig)
            total = mig.metrics.get("memory_total_bytes")
            processes, garbled, reason = list_processes(
                self._library, handle, self._what, int(total) if total else None
            )
            gpu.processes_garbled_count += garbled
            if reason and not gpu.processes_reason:
                mig.unknown["processes"] = reason
            for process in processes:
                if process.gpu_instance is None:
                    process.gpu_instance, process.compute_instance = mig.gpu_instance, mig.compute_instance
                key = (process.pid, process.gpu_instance, process.compute_instance)
                if key not in known:
                    known.add(key)
                    gpu.processes.append(process)

    def _instance(self, mig: Mig) -> None:
        """What GPM says of a MIG device's GPU instance, where it has it for itself."""
        number = mig.gpu_instance
        if number is None or mig.compute_instance != 0:
            return
        if number not in self._instances:
            self._instances[number] = Gpm(self._library, self.handle, self._what, BUSY | UNITS, number)
        known = dict(mig.metrics), dict(mig.unknown)
        self._instances[number].read(mig.metrics, mig.unknown)
        if "sm_util_pct" in known[0]:  # this driver tells it itself
            mig.metrics["sm_util_pct"] = known[0]["sm_util_pct"]
            mig.unknown.pop("sm_util_pct", None)

    def close(self) -> None:
        """Give back what NVML keeps for it."""
        for gpm in (self._units, *self._instances.values()):
            gpm.close()

    def _mig(self, mig: Mig, handle: Any) -> None:
        try:
            mig.gpu_instance = self._call("nvmlDeviceGetGpuInstanceId", handle=handle)
            mig.compute_instance = self._call("nvmlDeviceGetComputeInstanceId", handle=handle)
        except Refused as refused:
            mig.unknown["gpu_instance"] = refused.reason
        try:
            mig.facts["name"] = name = self._call("nvmlDeviceGetName", handle=handle)
            _, mark, profile = name.partition(" MIG ")
            if mark:
                mig.facts["profile"] = profile
        except Refused as refused:
            mig.unknown["name"] = refused.reason
        try:
            slices = self._call("nvmlDeviceGetAttributes", handle=handle)
            mig.metrics["multiprocessors_count"] = slices.multiprocessorCount
            mig.metrics["gpu_slices_count"] = slices.gpuInstanceSliceCount
            mig.metrics["compute_slices_count"] = slices.computeInstanceSliceCount
        except Refused as refused:
            mig.unknown["multiprocessors_count"] = refused.reason
        self._memory(handle, mig.facts, mig.metrics, mig.unknown)
        try:
            rates = self._call("nvmlDeviceGetUtilizationRates", handle=handle)
            mig.metrics["sm_util_pct"], mig.metrics["memory_util_pct"] = rates.gpu, rates.memory
        except Refused as refused:
            mig.unknown["sm_util_pct"] = mig.unknown["memory_util_pct"] = refused.reason
