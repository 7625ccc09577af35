"""Which GPU a CUDA program means by device 0, 1, …: the rules of CUDA_VISIBLE_DEVICES, as values and functions.

A program counts the devices that CUDA shows it. Which these are follows, in this order, from

1. the GPUs of the machine, in the order of their PCI addresses;
2. those of them that its container may use (``allocated``);
3. ``CUDA_DEVICE_ORDER``: ``PCI_BUS_ID``, or by default the fastest first. Who is the fastest only the driver knows, so
   that numbers mean something by default only among GPUs of one model;
4. ``CUDA_VISIBLE_DEVICES``, read when the program first uses CUDA: numbers of that order, or beginnings of UUIDs.

Sources: CUDA C++ Programming Guide, "CUDA Environment Variables"; NVIDIA MIG User Guide, "CUDA Device Enumeration".
Where these leave it open (and drivers differ) the answer is a reason, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from msgspec import Struct

MIXED = (
    "its GPUs are of several models, and CUDA numbers the fastest first, which only the driver can tell:"
    " set CUDA_DEVICE_ORDER=PCI_BUS_ID"
)
SEVERAL_MIGS = "which of the MIG instances of a GPU a program gets is the driver's choice: name one by its UUID"
MIG_AND_GPU = "which devices a program sees beside a GPU in MIG mode is the driver's choice: name one by its UUID"
NOT_SO_MANY = "CUDA shows this process fewer devices"

_NUMBER = re.compile(r"\d{1,9}", re.ASCII)
_OLD_MIG = re.compile(r"MIG-(GPU-[0-9a-fA-F-]+)/(\d{1,4})/(\d{1,4})", re.ASCII)
_NVIDIA_MAJOR = "195"


class CudaMig(NamedTuple):
    """A MIG device that CUDA can use."""

    uuid: str
    gpu_instance: int | None = None
    compute_instance: int | None = None


class CudaGpu(NamedTuple):
    """What decides how CUDA numbers a GPU. ``number`` is NVML's index, ``minor`` that of /dev/nvidiaN; ``mig`` whether
    MIG mode is on: then only ``migs`` can be used."""

    uuid: str
    number: int
    address: str = ""
    model: str = ""
    minor: int | None = None
    mig: bool = False
    migs: tuple[CudaMig, ...] = ()


class CudaDevice(NamedTuple):
    """A device as CUDA counts them: a GPU (``uuid`` == ``gpu``), or a MIG device of a GPU."""

    uuid: str
    gpu: str


class Visible(Struct, frozen=True):
    """The devices of a process by CUDA's numbers. Of a number that cannot be told the reason stands in its place;
    ``beyond`` is the reason of every higher number. ``complete``: whether the list is all that the process can use.
    ``sure``: False if the program may have changed its environment unseen."""

    devices: tuple[CudaDevice | str, ...] = ()
    beyond: str = NOT_SO_MANY
    complete: bool = True
    sure: bool = True

    def device(self, number: int) -> CudaDevice | str:
        """The device of a number, or why it cannot be told."""
        if number < 0:
            return "the process chose no device yet"
        return self.devices[number] if number < len(self.devices) else self.beyond

    @property
    def only(self) -> CudaDevice | None:
        """The one device that there is for the process; None if there are more, none, or some unknown."""
        one = self.devices[0] if self.complete and self.sure and len(self.devices) == 1 else None
        return one if isinstance(one, CudaDevice) else None


def visible_devices(
    gpus: Sequence[CudaGpu], visible: str | None, order: str | None = None, *, disorder: str = ""
) -> Visible:
    """The devices of a process that may use ``gpus``, by the values of CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER (None
    is not set). ``disorder``: why the GPUs cannot be counted at all, if they cannot."""
    pool = sorted(gpus, key=lambda gpu: (gpu.address, gpu.number))
    if not disorder and order != "PCI_BUS_ID" and len(pool) > 1 and len({gpu.model or gpu.uuid for gpu in pool}) > 1:
        disorder = MIXED
    if visible is None:
        return _all(pool, disorder)
    if not visible.strip():
        return Visible(beyond="CUDA_VISIBLE_DEVICES is empty: the process has no device")
    found: list[CudaDevice | str] = []
    told: set[str] = set()
    beyond = NOT_SO_MANY
    for word in visible.split(","):
        word = word.strip()
        device = _named(word, pool, disorder)
        if device is None:  # what CUDA cannot use ends the list
            beyond = f"CUDA_VISIBLE_DEVICES ends at {word[:60]!r}, which is no device of the process"
            break
        key = device.uuid if isinstance(device, CudaDevice) else word.lstrip("0")
        if key in told:
            return Visible(beyond=f"CUDA_VISIBLE_DEVICES names {word[:60]!r} twice, which CUDA refuses as a whole")
        told.add(key)
        found.append(device)
    return Visible(_checked(found), beyond)


def _all(pool: list[CudaGpu], disorder: str) -> Visible:
    """Without CUDA_VISIBLE_DEVICES."""
    usable = [gpu for gpu in pool if not gpu.mig or gpu.migs]
    if any(gpu.mig for gpu in usable):
        if len(usable) > 1:
            return Visible(beyond=MIG_AND_GPU, complete=False)
        return Visible((_of(usable[0]),))
    if disorder:
        return Visible((disorder,) * len(usable), disorder, complete=False)
    return Visible(tuple(_of(gpu) for gpu in usable))


def _of(gpu: CudaGpu) -> CudaDevice | str:
    """The device that CUDA makes of a GPU."""
    if not gpu.mig:
        return CudaDevice(gpu.uuid, gpu.uuid)
    if len(gpu.migs) == 1:
        return CudaDevice(gpu.migs[0].uuid, gpu.uuid)
    return SEVERAL_MIGS


def _named(word: str, pool: list[CudaGpu], disorder: str) -> CudaDevice | str | None:
    """What one word of CUDA_VISIBLE_DEVICES means; None for nothing."""
    if _NUMBER.fullmatch(word):
        number = int(word)
        if number >= len(pool):
            return None
        if len(pool) > 1 and any(gpu.mig for gpu in pool):
            return MIG_AND_GPU
        return disorder or _usable(pool[number])
    if word.startswith("GPU-"):
        found = [gpu for gpu in pool if gpu.uuid.startswith(word)]
        return _usable(found[0]) if len(found) == 1 else None
    if old := _OLD_MIG.fullmatch(word):
        place = (int(old[2]), int(old[3]))
        migs = [
            CudaDevice(mig.uuid, gpu.uuid)
            for gpu in pool
            if gpu.uuid == old[1]
            for mig in gpu.migs
            if (mig.gpu_instance, mig.compute_instance) == place
        ]
    elif word.startswith("MIG-"):
        migs = [CudaDevice(mig.uuid, gpu.uuid) for gpu in pool for mig in gpu.migs if mig.uuid.startswith(word)]
    else:
        return None
    return migs[0] if len(migs) == 1 else None


def _usable(gpu: CudaGpu) -> CudaDevice | str | None:
    return None if gpu.mig and not gpu.migs else _of(gpu)


def _checked(found: list[CudaDevice | str]) -> tuple[CudaDevice | str, ...]:
    """Whole GPUs are not counted beside MIG devices, on most drivers: then no number is sure."""
    whole = {isinstance(device, CudaDevice) and device.uuid == device.gpu for device in found}
    migs = any(
        device == SEVERAL_MIGS or (isinstance(device, CudaDevice) and device.uuid != device.gpu) for device in found
    )
    return (MIG_AND_GPU,) * len(found) if migs and True in whole else tuple(found)


# --- containers -----------------------------------------------------------------------------------------------------


class Allocated(NamedTuple):
    """The GPUs that a process may use at all; ``reason`` if that cannot be told (then ``gpus`` are all)."""

    gpus: tuple[CudaGpu, ...]
    reason: str = ""


def allocated(
    gpus: Sequence[CudaGpu],
    *,
    files: Collection[int] | None = None,
    permitted: Collection[int] | None = None,
    requested: str | None = None,
) -> Allocated:
    """What a container leaves of ``gpus``.

    ``files``: minors of the /dev/nvidiaN that there are in it, ``permitted``: those that its device cgroup lets it open
    (version 1 says so); None: not known. Only without ``files`` is NVIDIA_VISIBLE_DEVICES (``requested``) believed,
    which images set too, except of MIG devices, which have no file of that name.
    """
    kept = list(gpus)
    if files is not None or permitted is not None:
        if any(gpu.minor is None for gpu in gpus):
            return Allocated(tuple(gpus), "NVML does not say which /dev/nvidiaN is which GPU")
        for minors in (files, permitted):
            if minors is not None:
                kept = [gpu for gpu in kept if gpu.minor in minors]
    words = [word.strip() for word in (requested or "").split(",") if word.strip()]
    if words in ([], ["void"], ["all"]):
        return Allocated(tuple(kept))
    if files is None and words == ["none"]:
        return Allocated(())
    chosen = _requested(gpus, words)
    if chosen is None:
        if files is None:
            return Allocated(
                tuple(kept), f"NVIDIA_VISIBLE_DEVICES={(requested or '')[:60]} names GPUs that are not seen here"
            )
        return Allocated(tuple(kept))
    if files is None:
        kept = [gpu for gpu in kept if gpu.uuid in chosen]
    return Allocated(tuple(_with_migs(gpu, chosen.get(gpu.uuid)) for gpu in kept))


def _with_migs(gpu: CudaGpu, uuids: set[str] | None) -> CudaGpu:
    return gpu if not uuids else gpu._replace(migs=tuple(mig for mig in gpu.migs if mig.uuid in uuids))


def _requested(gpus: Sequence[CudaGpu], words: list[str]) -> dict[str, set[str]] | None:
    """UUIDs of GPUs, each with those of its MIG devices that are asked for (none: the GPU as it is); None if a word
    means nothing here. Numbers are NVML's: ``0``, or ``0:1`` for the second MIG device of the first GPU."""
    by_number = {gpu.number: gpu for gpu in gpus}
    found: dict[str, set[str]] = {}
    for word in words:
        number, colon, mig_number = word.partition(":")
        if _NUMBER.fullmatch(number) and (not colon or _NUMBER.fullmatch(mig_number)):
            gpu = by_number.get(int(number))
            if gpu is None or (colon and int(mig_number) >= len(gpu.migs)):
                return None
            found.setdefault(gpu.uuid, set()).update({gpu.migs[int(mig_number)].uuid} if colon else ())
            continue
        matches = [(gpu.uuid, "") for gpu in gpus if gpu.uuid == word]
        matches += [(gpu.uuid, mig.uuid) for gpu in gpus for mig in gpu.migs if mig.uuid == word]
        if len(matches) != 1:
            return None
        found.setdefault(matches[0][0], set()).update({matches[0][1]} - {""})
    return found


def minors_of(names: Collection[str]) -> set[int]:
    """Minor numbers of the GPUs among the names in a /dev."""
    return {int(name[6:]) for name in names if name.startswith("nvidia") and _NUMBER.fullmatch(name[6:])}


def permitted_minors(device_list: str) -> set[int] | None:
    """Minors of /dev/nvidiaN in a ``devices.list`` of cgroup v1; None if all are permitted."""
    found = set()
    for line in device_list.split("\n"):
        kind, _, rest = line.partition(" ")
        number, _, rights = rest.partition(" ")
        major, _, minor = number.partition(":")
        if kind == "a" or (kind == "c" and major in ("*", _NVIDIA_MAJOR) and minor == "*" and "r" in rights):
            return None
        if kind == "c" and major == _NVIDIA_MAJOR and _NUMBER.fullmatch(minor) and int(minor) < 255:
            found.add(int(minor))
    return found
