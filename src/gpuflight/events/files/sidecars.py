"""What stands beside the windows of a session: identities, acknowledgements, loss markers, the owner's lock."""

from __future__ import annotations

import fcntl
import os
import re
import struct
from typing import Literal

import msgspec

from gpuflight.events.files.inflate import open_regular

LOCK_NAME = ".gpufl-session.lock"
_SIDECAR = re.compile(r"\.gpufl-window\.(device|scope|system|sass)\.(\d{1,9})\.json")
_ACK = re.compile(r"\.gpufl-window-ack\.(device|scope|system|sass)\.(\d{1,9})")
_LOSS = re.compile(r"\.gpufl-transport-loss\.(.+)\.json")
_SMALL = 1 << 20

Key = tuple[str, int]


class Sidecar(msgspec.Struct):
    """Identity of a window, written before its payload. ``payload_crc32``: of the file's bytes as they lie there."""

    window_id: str
    session_id: str
    channel: str
    window_sequence: int
    payload_file: str
    payload_bytes: int
    payload_crc32: int
    opened_mono_ms: int = -1
    closed_mono_ms: int = -1
    created_wall_ms: int = -1
    schema_version: int = 1
    type: str = "transport_window"


class Loss(msgspec.Struct):
    """A loss that the writer or the agent has noted."""

    channel: str = ""
    reason: str = ""
    window_index: int | None = None
    window_sequence: int | None = None

    @property
    def window(self) -> int | None:
        return self.window_sequence if self.window_sequence is not None else self.window_index


class Companions(msgspec.Struct):
    """All of them, of one folder. ``bad_sidecars``: those that cannot be read."""

    sidecars: dict[Key, Sidecar] = msgspec.field(default_factory=dict)
    bad_sidecars: list[Key] = msgspec.field(default_factory=list)
    acknowledged: set[Key] = msgspec.field(default_factory=set)
    losses: list[Loss] = msgspec.field(default_factory=list)
    has_lock: bool = False
    uploaded: bool = False
    failed: bool = False


def read_companions(folder: str, names: list[str]) -> Companions:
    """Reads those among a folder's names; what vanishes meanwhile counts as not there."""
    found = Companions(has_lock=LOCK_NAME in names, uploaded=".uploaded" in names, failed=".failed" in names)
    for name in names:
        if not name.startswith(".gpufl-"):
            continue
        if sidecar := _SIDECAR.fullmatch(name):
            key = (sidecar[1], int(sidecar[2]))
            try:
                found.sidecars[key] = msgspec.json.decode(_read(f"{folder}/{name}"), type=Sidecar)
            except FileNotFoundError:
                continue
            except (OSError, ValueError, RecursionError):
                found.bad_sidecars.append(key)
        elif ack := _ACK.fullmatch(name):
            found.acknowledged.add((ack[1], int(ack[2])))
        elif loss := _LOSS.fullmatch(name):
            try:
                found.losses.append(msgspec.json.decode(_read(f"{folder}/{name}"), type=Loss))
            except FileNotFoundError:
                continue
            except (OSError, ValueError, RecursionError):
                found.losses.append(Loss(channel=loss[1], reason="unreadable loss marker"))
    return found


def _read(path: str) -> bytes:
    with open(path, "rb", opener=open_regular) as file:
        return file.read(_SMALL)


HELD: set[tuple[int, int]] = set()
"""(device, inode) of the lock files that this process holds. Such a file must not be opened and closed here: by POSIX
any close in the process gives its locks back."""


def owner(folder: str) -> Literal["alive", "gone", "unknown"]:
    """Whether a process holds the session's lock. Only asked, never taken; the file alone means nothing.

    ``unknown``: a session without a lock file, or one that may not be opened.
    """
    try:
        status = os.stat(f"{folder}/{LOCK_NAME}")
        if (status.st_dev, status.st_ino) in HELD:
            return "alive"
        descriptor = os.open(f"{folder}/{LOCK_NAME}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return "unknown"
    try:
        question = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, question)
    except OSError:
        return "unknown"
    finally:
        os.close(descriptor)
    return "gone" if struct.unpack("hhqqi4x", answer)[0] == fcntl.F_UNLCK else "alive"
