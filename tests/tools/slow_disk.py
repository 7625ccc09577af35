"""A real disk that is slow, or hangs: a loop device on a file of a FUSE file system that takes its time.

    with slow_disk(pause_s) as disk:    # pause_s: a number all share; each read is answered after so many seconds
        os.open(disk.path, os.O_RDONLY | os.O_DIRECT)

For root on Linux with FUSE and loop devices; anything missing is an OSError. The file system answers in a process of
its own, which ends with the one that made it; then the kernel takes the disk away too.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import multiprocessing.sharedctypes
import os
import signal
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

SIZE_BYTES = 64 << 20
CLONE_NEWNS, MS_REC_PRIVATE, _MNT_DETACH = 0x00020000, 0x4000 | 0x40000, 2
# <linux/fuse.h>: what is asked of one file that is read, and no more
_GETATTR, _OPEN, _READ, _FLUSH, _RELEASE, _INIT, _ACCESS = 3, 14, 15, 25, 18, 26, 34
_FORGET, _INTERRUPT, _BATCH_FORGET = 2, 36, 42  # want no answer
_NOT_CACHED = 1  # FOPEN_DIRECT_IO: each read is asked for
# <linux/loop.h>
_LOOP_CONFIGURE, _LOOP_CTL_GET_FREE = 0x4C0A, 0x4C82
_LOOP_CONFIG_BYTES, _FLAGS_AT = 304, 60
_READ_ONLY, _AUTOCLEAR = 1, 4


class SlowDisk(NamedTuple):
    """``path``: the device. ``name``: as the kernel calls it."""

    path: str
    name: str


@contextlib.contextmanager
def slow_disk(pause_s: ctypes.c_double) -> Iterator[SlowDisk]:
    """The disk, in a mount namespace of this process's own."""
    libc = ctypes.CDLL(None, use_errno=True)

    def checked(result: int, what: str) -> None:
        if result < 0:
            raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")

    checked(libc.unshare(CLONE_NEWNS), "a mount namespace")
    checked(libc.mount(b"none", b"/", None, MS_REC_PRIVATE, None), "a private mount namespace")
    fuse = os.open("/dev/fuse", os.O_RDWR)
    with tempfile.NamedTemporaryFile(prefix="gpuflight-slow-") as place, contextlib.ExitStack() as stack:
        options = f"fd={fuse},rootmode=100000,user_id=0,group_id=0".encode()  # its root is a file
        checked(libc.mount(b"slow", place.name.encode(), b"fuse", 0, options), "mounting with FUSE")
        stack.callback(libc.umount2, place.name.encode(), _MNT_DETACH)
        server = os.fork()
        if server == 0:
            libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            try:
                _serve(fuse, pause_s)
            finally:
                os._exit(0)
        os.close(fuse)
        stack.callback(os.waitpid, server, 0)
        stack.callback(os.kill, server, signal.SIGKILL)
        device, path = _loop_device(place.name)
        stack.callback(os.close, device)
        yield SlowDisk(path, os.path.basename(path))


def new_pause(seconds: float) -> ctypes.c_double:
    """A number that is shared with the processes forked later."""
    return multiprocessing.sharedctypes.RawValue(ctypes.c_double, seconds)


def _loop_device(file: str) -> tuple[int, str]:
    """(descriptor, path) of a device that is there as long as the descriptor is."""
    backing = os.open(file, os.O_RDONLY)
    control = os.open("/dev/loop-control", os.O_RDWR)
    try:
        for _ in range(20):  # somebody else may take the free one first
            path = f"/dev/loop{fcntl.ioctl(control, _LOOP_CTL_GET_FREE)}"
            device = os.open(path, os.O_RDONLY)
            config = bytearray(_LOOP_CONFIG_BYTES)
            struct.pack_into("<II", config, 0, backing, 512)
            struct.pack_into("<I", config, _FLAGS_AT, _READ_ONLY | _AUTOCLEAR)
            try:
                fcntl.ioctl(device, _LOOP_CONFIGURE, config)
            except OSError as error:
                os.close(device)
                if error.errno != errno.EBUSY:
                    raise
            else:
                return device, path
        raise OSError(errno.EBUSY, "no free loop device")
    finally:
        os.close(control)
        os.close(backing)


def _serve(fuse: int, pause_s: ctypes.c_double) -> None:
    """Answer until the file system is gone. Reads wait in threads of their own."""
    # inode, size, blocks, 3 times, their nanoseconds, mode, links, user, group, device, block size, flags
    attributes = struct.pack("<6Q3I7I", 1, SIZE_BYTES, SIZE_BYTES // 512, *[0] * 6, 0o100400, 1, 0, 0, 0, 4096, 0)
    while True:
        try:
            request = os.read(fuse, (1 << 20) + 4096)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EINTR):  # a question was taken back
                continue
            return
        _, asked, number = struct.unpack_from("<IIQ", request)
        if asked == _READ:
            size = struct.unpack_from("<I", request, 40 + 16)[0]
            threading.Thread(target=_answer_late, args=(fuse, number, size, pause_s), daemon=True).start()
        elif asked == _INIT:
            readahead = struct.unpack_from("<I", request, 48)[0]
            _answer(fuse, number, struct.pack("<4I2H2I2H8I", 7, 31, readahead, 0, 64, 48, 1 << 17, 1, 32, 0, *[0] * 8))
        elif asked == _GETATTR:
            _answer(fuse, number, struct.pack("<QII", 3600, 0, 0) + attributes)
        elif asked == _OPEN:
            _answer(fuse, number, struct.pack("<QII", 1, _NOT_CACHED, 0))
        elif asked in (_FLUSH, _RELEASE, _ACCESS):
            _answer(fuse, number, b"")
        elif asked not in (_FORGET, _INTERRUPT, _BATCH_FORGET):
            _answer(fuse, number, b"", -errno.ENOSYS)


def _answer(fuse: int, number: int, body: bytes, error: int = 0) -> None:
    with contextlib.suppress(OSError):  # who asked is gone
        os.write(fuse, struct.pack("<IiQ", 16 + len(body), error, number) + body)


def _answer_late(fuse: int, number: int, size: int, pause_s: ctypes.c_double) -> None:
    began = time.monotonic()
    while (left := began + pause_s.value - time.monotonic()) > 0:
        time.sleep(min(left, 0.05))
    _answer(fuse, number, bytes(size))
