"""NVLinks of one GPU: state, version, errors, and what is at the other end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpuflight.sources.nvml.library import Refused
from gpuflight.sources.nvml.model import Link
from gpuflight.sources.sysfs import pci_address

if TYPE_CHECKING:
    from gpuflight.sources.nvml.library import Library

MAX_LINKS = 36
_FIELD_COUNT, _FIELD_REPLAY, _FIELD_RECOVERY, _FIELD_CRC, _FIELD_STATE = 91, 161, 162, 163, 165
_ERROR_FIELDS = (_FIELD_REPLAY, _FIELD_RECOVERY, _FIELD_CRC)
_ERROR_COUNTERS = (0, 1, 2, 3)  # nvmlNvLinkErrorCounter_t: replay, recovery, CRC of flits, CRC of data

VERSIONS = {1: "1.0", 2: "2.0", 3: "2.2", 4: "3.0", 5: "3.1", 6: "4.0", 7: "5.0", 8: "6.0"}
"""nvmlDeviceGetNvLinkVersion answers with an enumeration (nvmlNvlinkVersion_t), not the version: an A100 says 5, which
is 3.1 (open-mpi/hwloc#658)."""

LINK_BYTES_PER_S = {"1.0": 20e9, "2.0": 25e9, "2.2": 25e9, "3.0": 25e9, "3.1": 25e9, "4.0": 25e9, "5.0": 50e9}
"""One link in one direction. NVIDIA's data sheets give the sum of both directions over all links of a GPU: P100 4 links
160 GB/s, V100 6 links 300 GB/s, A100 12 links 600 GB/s, H100 18 links 900 GB/s, B200 18 links 1,800 GB/s. 6.0 is left
out until a data sheet says how its links are counted."""

_UP = (1, 2)
"""NVML_NVLINK_STATE_ACTIVE and _SLEEP: a link that saves power is not down."""

_REMOTE = {0: "gpu", 1: "npu", 2: "switch"}


class LinkReader:
    """Reads the links of one GPU. What is at the other end is read once per link, and again when its state changes."""

    def __init__(self, library: Library, handle: Any, what: str) -> None:
        self._library = library
        self._handle = handle
        self._what = what
        self._count: int | None = None
        self._reason = ""
        self._by_field = True
        self._known: dict[int, Link] = {}

    def read(self) -> list[Link]:
        """Every link. Raises Refused if the GPU has none, or does not say."""
        if self._count is None:
            self._count, self._reason = self._find_count()
        if not self._count:
            raise Refused(3, self._reason)
        fields = self._fields(self._count) if self._by_field else {}
        return [self._link(number, fields) for number in range(self._count)]

    def _call(self, function: str, *arguments: Any) -> Any:
        return self._library.call(function, self._handle, *arguments, what=self._what)

    def _find_count(self) -> tuple[int, str]:
        try:
            value = self._call("nvmlDeviceGetFieldValues", [_FIELD_COUNT])[0]
            if value.nvmlReturn == 0:
                return int(value.value.uiVal), "the GPU has no NVLink"
        except Refused:
            pass
        for number in range(MAX_LINKS):
            try:
                self._call("nvmlDeviceGetNvLinkState", number)
            except Refused as refused:
                return number, refused.reason
        return MAX_LINKS, ""

    def _fields(self, count: int) -> dict[tuple[int, int], int]:
        """(field, link) → value, in a single call for the GPU; only those that the driver gave."""
        wanted = [(field, number) for number in range(count) for field in (_FIELD_STATE, *_ERROR_FIELDS)]
        try:
            values = self._call("nvmlDeviceGetFieldValues", wanted)
        except Refused:
            values = ()
        found = {
            key: int(value.value.uiVal if value.valueType == 1 else value.value.ullVal)
            for key, value in zip(wanted, values, strict=False)
            if value.nvmlReturn == 0
        }
        self._by_field = bool(found)  # a driver that knows none of them today will not tomorrow
        return found

    def _link(self, number: int, fields: dict[tuple[int, int], int]) -> Link:
        state = fields.get((_FIELD_STATE, number))
        if state is None:
            try:
                state = self._call("nvmlDeviceGetNvLinkState", number)
            except Refused:
                state = None
        active = None if state is None else state in _UP
        known = self._known.get(number)
        if known is None or known.active != active:
            known = self._identify(number, active, known)
            self._known[number] = known
        errors = [fields[field, number] for field in _ERROR_FIELDS if (field, number) in fields]
        if not errors and active is not None:
            for counter in _ERROR_COUNTERS:
                try:
                    errors.append(self._call("nvmlDeviceGetNvLinkErrorCounter", number, counter))
                except Refused:
                    continue
        return Link(number, active, known.version, known.remote, known.remote_address, sum(errors) if errors else None)

    def _identify(self, number: int, active: bool | None, before: Link | None) -> Link:
        """Version and other end; of a link that went down what it was before, for NVML then gives nothing."""
        link = Link(number, active)
        if before is not None:
            link.version, link.remote, link.remote_address = before.version, before.remote, before.remote_address
        try:
            link.version = VERSIONS.get(self._call("nvmlDeviceGetNvLinkVersion", number), link.version)
        except Refused:
            pass
        try:
            kind = self._call("nvmlDeviceGetNvLinkRemoteDeviceType", number)
            link.remote = _REMOTE.get(kind, link.remote)  # type: ignore[assignment]
        except Refused:
            pass
        try:
            link.remote_address = address_of(self._call("nvmlDeviceGetNvLinkRemotePciInfo", number)) or (
                link.remote_address
            )
        except Refused:
            pass
        return link


def address_of(info: Any) -> str:
    """``dddd:bb:dd.f`` in lower case of an nvmlPciInfo_t; empty where the driver fills in no address."""
    text = info.busId.decode("ascii", "replace") if isinstance(info.busId, bytes) else str(info.busId)
    if not text:
        text = f"{info.domain:08x}:{info.bus:02x}:{info.device:02x}.0"
    address = pci_address(text)
    return "" if address.startswith("ffff") else address
