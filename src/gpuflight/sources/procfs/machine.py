"""What /proc says about the machine as a whole."""

from __future__ import annotations

import os
import struct

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.fs import FileSystem
from gpuflight.sources.procfs.stat import decode

_AT_PAGESZ, _AT_CLKTCK = 6, 17


class Machine:
    """Facts of one machine through its files, so that a recording has them too; each is read once and kept.

    The host's name and the CPUs may change, so that these are kept for a round only.
    """

    def __init__(self, fs: FileSystem, root: str = "/proc") -> None:
        self.fs = fs
        self.root = root
        self._auxv: dict[int, int] | None = None
        self._boot_time_s: float | None = None
        self._hostname: str | None = None
        self._cpu_info: dict[str, str] | None = None
        self._identity: tuple[str, str] | None = None

    def text(self, name: str) -> str:
        """A file directly under /proc, e.g. ``meminfo`` or ``sys/kernel/osrelease``, without the last newline."""
        return decode(self.fs.read(f"{self.root}/{name}")).rstrip("\n")

    @property
    def hostname(self) -> str:
        """Name of the host; identity of its ``Host`` entity."""
        if self._hostname is None:
            try:
                self._hostname = self.text("sys/kernel/hostname") or "localhost"
            except OSError:
                self._hostname = "localhost"
        return self._hostname

    @property
    def ticks_per_second(self) -> int:
        """Clock ticks per second of the times in ``ProcStat``."""
        return self._auxiliary(_AT_CLKTCK) or 100

    @property
    def page_size(self) -> int:
        """Bytes per page of ``rss_pages``: 4,096, on arm64 also 16,384 or 65,536."""
        return self._auxiliary(_AT_PAGESZ) or os.sysconf("SC_PAGE_SIZE")

    @property
    def boot_time_s(self) -> float:
        """When the kernel started, s since the epoch. Raises SourceUnavailable."""
        if self._boot_time_s is None:
            try:
                lines = self.text("stat").split("\n")
            except OSError as error:
                raise SourceUnavailable(
                    f"{self.root}/stat cannot be read: {error.strerror}", "mount procfs there"
                ) from error
            found = [line[6:] for line in lines if line.startswith("btime ")]
            if not found:
                raise SourceUnavailable(f"{self.root}/stat has no btime", "mount procfs there")
            self._boot_time_s = float(found[0])
        return self._boot_time_s

    def identity(self) -> tuple[str, str]:
        """(machine id, boot id): what tells this machine from every other, and this run of it; empty where unknown."""
        if self._identity is None:
            try:
                boot_id = self.text("sys/kernel/random/boot_id").strip()
            except OSError:
                boot_id = ""
            self._identity = self._machine_id(), boot_id
        return self._identity

    def machine_id(self) -> str:
        """The id that systemd or dbus gave this installation; empty without one."""
        return self.identity()[0]

    def _machine_id(self) -> str:
        for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
            try:
                text = decode(self.fs.read(path)).strip()
            except OSError:
                continue
            if text and text != "uninitialized":
                return text
        return ""

    def cpu_info(self) -> dict[str, str]:
        """The fields of the first CPU in /proc/cpuinfo, and ``architecture`` as ``uname -m`` has it if known."""
        if self._cpu_info is None:
            self._cpu_info = self._read_cpu_info()
        return self._cpu_info

    def _read_cpu_info(self) -> dict[str, str]:
        fields: dict[str, str] = {}
        try:
            # One record only: of hundreds of CPUs the whole file takes long.
            text = decode(self.fs.read_record(f"{self.root}/cpuinfo"))
        except OSError:
            text = ""
        for line in text.split("\n\n", 1)[0].split("\n"):
            key, colon, value = line.partition(":")
            if colon:
                fields[key.strip()] = value.strip()
        try:
            fields["architecture"] = self.text("sys/kernel/arch")  # Linux 6.1
        except OSError:
            if "vendor_id" in fields:
                fields["architecture"] = "x86_64" if "lm" in fields.get("flags", "").split() else "i686"
            elif fields.get("CPU architecture") == "8":
                fields["architecture"] = "aarch64"
        return fields

    def _auxiliary(self, key: int) -> int | None:
        """A value of our auxiliary vector: unlike sysconf it comes from the files, so from a recording too."""
        if self._auxv is None:
            try:
                raw = self.fs.read(f"{self.root}/self/auxv")
                self._auxv = dict(struct.iter_unpack("=QQ", raw[: len(raw) // 16 * 16]))
            except OSError:
                self._auxv = {}
        return self._auxv.get(key)
