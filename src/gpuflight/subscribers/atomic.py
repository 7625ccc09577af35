"""Writing files so that a reader, a crash or a full disk never sees half of one."""

from __future__ import annotations

import os
import stat


def write_atomic(path: str, data: bytes, *, sync: bool = True, mode: int = 0o666) -> None:
    """Replace the content of ``path`` in one step: a temporary file beside it, fsync, rename, fsync of the folder.

    A symbolic link is followed, and the permissions of a file that exists are kept; a new one gets ``mode`` less the
    umask. Raises OSError; then the file is as it was and nothing is left beside it.
    """
    target = os.path.realpath(path)
    try:
        mode = os.stat(target).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(22, "not a regular file", path)
        permissions: int | None = stat.S_IMODE(mode)
    except FileNotFoundError:
        permissions = None
    folder = os.path.dirname(target)
    temporary = os.path.join(folder, f".{os.path.basename(target)[:200]}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        try:
            if permissions is not None:
                os.fchmod(descriptor, permissions)
            write_all(descriptor, data)
            if sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, target)
    except BaseException as error:
        os.unlink(temporary)
        if isinstance(error, OSError):
            error.filename = path  # not the temporary one
        raise
    if sync:
        sync_folder(folder)


def append_whole(path: str, data: bytes, *, sync: bool = True) -> None:
    """Append ``data`` to ``path`` whole or not at all: what a failed write left is cut off again. A half line that a
    crash left at the end is closed with a newline first. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(22, "not a regular file", path)
        size = status.st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            data = b"\n" + data
        try:
            write_all(descriptor, data)
        except BaseException:
            os.ftruncate(descriptor, size)
            raise
        if sync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    """``os.write`` until all is written."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_folder(folder: str) -> None:
    """Make a rename in ``folder`` survive a crash; quietly nothing on file systems that cannot."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)
