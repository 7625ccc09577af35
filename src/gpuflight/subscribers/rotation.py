"""Files that are appended to, begun anew by size and age; the old ones compressed and, beyond a number, deleted."""

from __future__ import annotations

import os
import time

import zstandard

from gpuflight.subscribers.atomic import sync_folder


class Rotation:
    """When ``path`` has to make room for a new file, and how. 0 is no bound. Times are ns since the epoch."""

    def __init__(self, path: str, *, max_bytes: int, max_age_s: float, keep: int, compress: bool) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._max_age_ns = int(max_age_s * 1e9)
        self._keep = keep
        self._compress = compress
        self._begun_ns: int | None = None

    def due(self, now_ns: int) -> bool:
        """Whether the file that there is has reached a bound. A file of an earlier run is as old as its last change."""
        if not self._max_bytes and not self._max_age_ns:
            return False
        try:
            status = os.stat(self.path)
        except OSError:
            return False
        begun_ns = self._begun_ns if self._begun_ns is not None else status.st_mtime_ns
        return status.st_size > 0 and (
            bool(self._max_bytes and status.st_size >= self._max_bytes)
            or bool(self._max_age_ns and now_ns - begun_ns >= self._max_age_ns)
        )

    def written(self, now_ns: int) -> None:
        """Something was appended; the first time makes the age of the file."""
        if self._begun_ns is None:
            self._begun_ns = now_ns

    def rotate(self, now_ns: int) -> str:
        """Move the file away; returns where it is now. Raises OSError; then nothing of it is lost."""
        real = os.path.realpath(self.path)
        stem, suffix = os.path.splitext(real)
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now_ns // 10**9)) + f".{now_ns % 10**9:09d}Z"
        old = f"{stem}-{stamp}{suffix}"
        if os.path.exists(old) or os.path.exists(old + ".zst"):
            raise FileExistsError(17, "a file of that time exists", old)
        os.rename(real, old)
        self._begun_ns = None
        if self._compress:
            old = _compressed(old)
        sync_folder(os.path.dirname(real))
        self._delete_oldest(stem, suffix)
        return old

    def _delete_oldest(self, stem: str, suffix: str) -> None:
        if not self._keep:
            return
        folder, begin = os.path.split(f"{stem}-")
        ends = (suffix, f"{suffix}.zst")
        old = sorted(
            name for name in os.listdir(folder) if name.startswith(begin) and _is_stamp(name[len(begin) :], ends)
        )
        for name in old[: -self._keep]:
            os.unlink(os.path.join(folder, name))


def _is_stamp(rest: str, ends: tuple[str, str]) -> bool:
    """Whether a file is one of ours: only those are ever deleted."""
    for end in ends:
        stamp = rest.removesuffix(end)
        if rest.endswith(end) and len(stamp) == 26 and stamp[8] == "T" and stamp[-1] == "Z":
            return (stamp[:8] + stamp[9:15] + stamp[16:25]).isdigit()
    return False


def _compressed(path: str) -> str:
    """``path`` replaced by ``path.zst``; if that fails the file stays as it is."""
    target, temporary = f"{path}.zst", f"{path}.zst.tmp"
    try:
        with open(path, "rb") as source, open(temporary, "wb") as sink:
            zstandard.ZstdCompressor(level=3).copy_stream(source, sink)
            sink.flush()
            os.fsync(sink.fileno())
        os.rename(temporary, target)
    except OSError:
        try:
            os.unlink(temporary)
        except FileNotFoundError:
            pass
        return path
    os.unlink(path)
    return target
