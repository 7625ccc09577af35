"""SysFs: small files of /sys, each read at most once a round, and what cannot change read once.

Every path is relative to the root (``class/net/eth0/speed``). Readers raise the plain OSError of the system call;
``reason`` turns it into words for ``unknown``. A file that a driver will not answer (EIO of a dead device, EINVAL of an
interface that is down) is one unknown fact, never the end of a scan.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable
from typing import Any

from gpuflight.sources.fs import FileSystem

_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")

_REASONS = {
    errno.ENOENT: "not provided by this kernel or driver",
    errno.ENOTDIR: "not provided by this kernel or driver",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EIO: "the device does not answer (EIO)",
    errno.EINVAL: "the driver has no value for it (EINVAL)",
    errno.EOPNOTSUPP: "not supported by the driver",
    errno.ENODEV: "the device is gone",
    errno.ENXIO: "the device is gone",
    errno.EBUSY: "the device is busy",
}


class SysFs:
    """Files of /sys with two caches: of this round, and of facts that a piece of hardware keeps.

    What is read with ``static=True`` is kept, errors included, until ``recheck_rounds`` rounds have passed (a driver
    may have been loaded since) or its path is forgotten. ``generation`` counts the rechecks: whoever builds something
    from static facts rebuilds it when that number has moved.
    """

    def __init__(self, fs: FileSystem, root: str = "/sys", *, recheck_rounds: int = 120) -> None:
        self._fs = fs
        self._root = root.rstrip("/")
        self._recheck_rounds = recheck_rounds
        self._checked_round = 0
        self._round: dict[str, Any] = {}
        self._static: dict[str, Any] = {}
        self.generation = 0

    def begin_round(self, number: int) -> None:
        """Forget what was read for the last round, and static facts every ``recheck_rounds`` rounds."""
        self._round.clear()
        if number - self._checked_round >= self._recheck_rounds or number < self._checked_round:
            self._checked_round = number
            self._static.clear()
            self.generation += 1

    def forget(self, path: str) -> None:
        """Drop static facts at and below ``path``: the device there is gone, another may come."""
        below = path + "/"
        for key in [key for key in self._static if key[1:] == path or key.startswith(below, 1)]:
            del self._static[key]

    def text(self, path: str, *, static: bool = False) -> str:
        """A file's text without surrounding blanks. Raises OSError."""
        return self._answer("t", path, static)  # type: ignore[no-any-return]

    def number(self, path: str, *, static: bool = False) -> int:
        """A file's one integer, decimal or 0x… . Raises OSError; text that is no number is EINVAL."""
        text = self.text(path, static=static)
        try:
            return int(text, 0) if text.startswith("0x") else int(text)
        except ValueError:
            raise OSError(errno.EINVAL, f"not a number: {text[:40]!r}", path) from None

    def list_dir(self, path: str, *, static: bool = False) -> list[str]:
        """Names in a directory, sorted. Raises OSError."""
        return self._answer("l", path, static)  # type: ignore[no-any-return]

    def real(self, path: str) -> str:
        """Where a link of ``class`` or ``bus`` leads, as a path relative to the root; a static fact.

        The path itself where that cannot be told: on a machine that never happens, but a recording holds only what was
        asked when it was made.
        """
        try:
            return self._answer("r", path, True)  # type: ignore[no-any-return]
        except OSError:
            return path

    def exists(self, path: str, *, static: bool = False) -> bool:
        """Whether there is such a file."""
        try:
            return bool(self._answer("e", path, static))
        except OSError:
            return False

    def _answer(self, kind: str, path: str, static: bool) -> Any:
        # A dict of answers, keyed by question and path; an error is an answer too. Re-raising the same object would
        # grow its traceback for ever, so that a copy is raised.
        cache = self._static if static else self._round
        key = kind + path
        answer = cache.get(key)
        if answer is None:
            try:
                answer = self._ask(kind, path)
            except OSError as error:
                answer = error
            cache[key] = answer
        if isinstance(answer, OSError):
            raise OSError(answer.errno, answer.strerror, path)
        return answer

    def _ask(self, kind: str, path: str) -> Any:
        full = f"{self._root}/{path}" if path else self._root
        if kind == "t":
            return self._fs.read_record(full).decode("utf-8", "replace").strip()
        if kind == "l":
            return sorted(self._fs.listdir(full))
        if kind == "r":
            resolved = self._fs.realpath(full)
            return resolved[len(self._root) + 1 :] if resolved.startswith(self._root + "/") else resolved
        self._fs.stat(full)
        return True


class Facts:
    """Attributes, metrics and unknowns of one entity, filled file by file.

    A file that cannot be read leaves its name in ``unknown`` with the reason; with ``optional`` it leaves nothing, for
    facts that most devices of the kind do not have.
    """

    __slots__ = ("_sysfs", "attributes", "metrics", "unknown")

    def __init__(self, sysfs: SysFs) -> None:
        self._sysfs = sysfs
        self.attributes: dict[str, Any] = {}
        self.metrics: dict[str, int | float] = {}
        self.unknown: dict[str, str] = {}

    def text(self, name: str, path: str, *, static: bool = True, optional: bool = False) -> str:
        """Attribute ``name`` from a file; empty text counts as absent. Returns it, or ""."""
        try:
            text = self._sysfs.text(path, static=static)
        except OSError as error:
            if not optional:
                self.unknown[name] = reason(error)
            return ""
        if text:
            self.attributes[name] = text
        return text

    def number(
        self, name: str, path: str, *, static: bool = False, optional: bool = False, scale: int | float = 1
    ) -> int | float | None:
        """Metric ``name`` from a file, times ``scale``. Returns it, or None."""
        try:
            value = self._sysfs.number(path, static=static) * scale
        except OSError as error:
            if not optional:
                self.unknown[name] = reason(error)
            return None
        self.metrics[name] = value
        return value

    def numa_node(self, path: str) -> int | None:
        """Attribute ``numa_node`` from a device's file of that name; -1 is unknown, not node 0."""
        try:
            node = self._sysfs.number(path, static=True)
        except OSError as error:
            self.unknown["numa_node"] = reason(error)
            return None
        if node < 0:
            self.unknown["numa_node"] = "the firmware does not say (-1)"
            return None
        self.attributes["numa_node"] = node
        return node

    def put(self, name: str, value: int | float | None, why: str = "") -> None:
        """Metric ``name``, or the reason why there is none."""
        if value is None:
            self.unknown[name] = why
        else:
            self.metrics[name] = value


def reason(error: OSError) -> str:
    """Words for ``unknown``: what an error of a system call means for the fact that was asked for."""
    known = _REASONS.get(error.errno or 0)
    if known is not None:
        return known
    return f"{error.strerror or 'unreadable'} ({errno.errorcode.get(error.errno or 0, error.errno)})"


def parse_list(text: str) -> list[int]:
    """``"0-3,8"`` → ``[0, 1, 2, 3, 8]``: the kernel's list format (cpumap_print_to_pagebuf). Raises ValueError."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        if not part:
            continue
        first, dash, last = part.partition("-")
        if dash:
            last, _, stride = last.partition(":")  # "0-31:2/4" appears in boot parameters only, not in sysfs
            if stride:
                raise ValueError(f"strides are not supported: {text!r}")
            numbers.extend(range(int(first), int(last) + 1))
        else:
            numbers.append(int(first))
    return numbers


def format_list(numbers: Iterable[int]) -> str:
    """``[0, 1, 2, 3, 8]`` → ``"0-3,8"``; sorts and deduplicates."""
    parts: list[str] = []
    first = last = -2
    for number in sorted(set(numbers)):
        if number == last + 1:
            last = number
            continue
        if first >= 0:
            parts.append(str(first) if first == last else f"{first}-{last}")
        first = last = number
    if first >= 0:
        parts.append(str(first) if first == last else f"{first}-{last}")
    return ",".join(parts)


def pci_address(text: str) -> str:
    """A PCI address as sysfs writes it (``0000:3b:00.0``) from NVML's or a tool's form (``00000000:3B:00.0``).

    Empty if ``text`` is none.
    """
    text = text.strip().lower()
    if re.fullmatch(r"[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", text):
        return "0000:" + text
    if not _PCI_ADDRESS.fullmatch(text):
        return ""
    domain, rest = text.split(":", 1)
    return f"{int(domain, 16):04x}:{rest}"


def pci_address_in(path: str) -> str:
    """The innermost PCI address on a real path under ``devices``; empty for a virtual device."""
    for part in reversed(path.split("/")):
        if _PCI_ADDRESS.fullmatch(part):
            return part
    return ""


def disk_of_device(sysfs: SysFs, device: str) -> str:
    """Name of the disk that holds block device ``major:minor`` (a partition counts to its disk). Raises OSError."""
    return _disk_at(sysfs, f"dev/block/{device}")


def disk_of_name(sysfs: SysFs, name: str) -> str:
    """As disk_of_device, for a block device's kernel name (``nvme0n1p2`` → ``nvme0n1``). Raises OSError."""
    return _disk_at(sysfs, f"class/block/{name}")


def _disk_at(sysfs: SysFs, link: str) -> str:
    if not sysfs.exists(link, static=True):
        raise OSError(errno.ENOENT, "no such block device", link)
    path = sysfs.real(link)
    parts = path.split("/")
    return parts[-2] if sysfs.exists(path + "/partition", static=True) else parts[-1]
