"""Which paths may be asked for their status: those on file systems of this machine.

``stat`` on a file of a dead NFS server blocks for ever, and a thread in that state cannot be ended. So a file behind a
descriptor is asked only if the mount it lies on, in its process's own mount namespace, is of a known local type.
"""

from __future__ import annotations

from collections.abc import Callable

LOCAL_TYPES = frozenset(
    (
        *(
            "bcachefs",
            "btrfs",
            "erofs",
            "exfat",
            "ext2",
            "ext3",
            "ext4",
            "f2fs",
            "iso9660",
            "jfs",
            "overlay",
            "reiserfs",
        ),
        *("rootfs", "squashfs", "udf", "vfat", "xfs", "zfs"),  # on disks
        *("devpts", "devtmpfs", "efivarfs", "hugetlbfs", "mqueue", "proc", "pstore", "ramfs", "securityfs", "sysfs"),
        *("tmpfs", "tracefs"),  # of the kernel
    )
)
"""Types whose status is answered without a network or a user-space server."""

_KERNEL_INTERNAL = ("/memfd:", "/SYSV", "/anon_hugepage", "/dmabuf")


class LocalPaths:
    """Answers ``is_local`` from the mount table of the process's mount namespace, each read once and kept."""

    def __init__(self, mountinfo: Callable[[int], bytes], namespace: Callable[[int], int]) -> None:
        self._mountinfo = mountinfo
        self._namespace = namespace
        self._tables: dict[int, list[tuple[str, bool]]] = {}

    def forget(self) -> None:
        """Read the tables again when next asked: mounts come and go."""
        self._tables.clear()

    def is_local(self, pid: int, path: str) -> bool:
        """Whether the path, as process ``pid`` sees it, lies on a local file system; False if that cannot be known."""
        if path.startswith(_KERNEL_INTERNAL):
            return True
        try:
            namespace = self._namespace(pid)
            table = self._tables.get(namespace)
            if table is None:
                table = self._tables[namespace] = parse_mounts(self._mountinfo(pid))
        except (OSError, ValueError):
            return False
        for prefix, local in table:  # longest first
            if path.startswith(prefix):
                return local
        return False


def parse_mounts(raw: bytes) -> list[tuple[str, bool]]:
    """(mount point with a ``/`` at its end, whether local) of a mountinfo file, longest first, later mounts first."""
    mounts = []
    for line in raw.decode("utf-8", "surrogateescape").split("\n"):
        fields, dash, rest = line.partition(" - ")
        columns = fields.split(" ")
        if not dash or len(columns) < 5:
            continue
        point = unescape(columns[4])
        mounts.append((point if point.endswith("/") else point + "/", rest.split(" ", 1)[0] in LOCAL_TYPES))
    mounts.reverse()
    mounts.sort(key=lambda mount: len(mount[0]), reverse=True)  # stable: of equals the last mounted stays first
    return mounts


def unescape(text: str) -> str:
    """Octal escapes of mount tables: ``\\040`` is a space."""
    if "\\" not in text:
        return text
    parts = text.split("\\")
    out = [parts[0]]
    for part in parts[1:]:
        code = part[:3]
        out.append(chr(int(code, 8)) + part[3:] if len(code) == 3 and code.isdigit() else "\\" + part)
    return "".join(out)
