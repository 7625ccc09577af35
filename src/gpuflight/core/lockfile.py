"""A lock file that names its holder, so that one instance per host watches and the second one says who does."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from typing import Any

from gpuflight.errors import GpuflightError


class AlreadyRunning(GpuflightError):
    """Another instance holds the lock. ``holder`` is what its lock file says (pid, since)."""

    def __init__(self, path: str, holder: dict[str, Any]) -> None:
        who = f"pid {holder['pid']}, since {holder.get('since', 'an unknown time')}" if "pid" in holder else "unknown"
        super().__init__(f"another gpuflight is running ({who}); lock file {path}")
        self.path = path
        self.holder = holder


def default_lock_path() -> str:
    """The lock of this user's instance on this host: in the run-time folder, which a reboot empties."""
    folder = os.environ.get("XDG_RUNTIME_DIR") or ("/run" if os.geteuid() == 0 else "/tmp")  # noqa: S108
    return os.path.join(folder, f"gpuflight-{os.geteuid()}.lock")


class LockFile:
    """``acquire`` takes the lock or raises AlreadyRunning and leaves everything as it was; ``release`` gives it back.

    The kernel holds the lock (flock), so that it ends with its holder, however that dies. The file itself stays, unless
    ``remove`` is set: then it goes with the lock, and whoever waits at the door checks that it is still the same file.
    """

    def __init__(self, path: str, *, remove: bool = False) -> None:
        self.path = path
        self._remove = remove
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock. Raises AlreadyRunning, OSError."""
        while (descriptor := self._locked()) is None:
            pass
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "since": since}).encode() + b"\n", 0)
        self._descriptor = descriptor

    def _locked(self) -> int | None:
        """A descriptor of the locked file; None if its holder removed it at that moment."""
        # O_NOFOLLOW: in a shared folder somebody else could have put a link here.
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _read_holder(descriptor)
            os.close(descriptor)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise AlreadyRunning(self.path, holder) from None
            raise
        try:
            named = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            named = None
        if named is None or not os.path.samestat(named, os.fstat(descriptor)):
            os.close(descriptor)
            return None
        return descriptor

    def release(self) -> None:
        """Give the lock back; nothing happens if it is not held."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.ftruncate(descriptor, 0)
            if self._remove:
                os.unlink(self.path)
            os.close(descriptor)


def _read_holder(descriptor: int) -> dict[str, Any]:
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0) or b"{}")
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}
