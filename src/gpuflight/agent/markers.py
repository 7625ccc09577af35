"""What the agent leaves in a session's folder, as gpufl-agent does: acknowledgements, losses, how it ended."""

from __future__ import annotations

import json
import os
from typing import Any

from gpuflight.subscribers.atomic import sync_folder, write_all

UPLOADED = ".uploaded"
FAILED = ".failed"


def acknowledge(folder: str, channel: str, number: int, window_id: str) -> None:
    """A window has arrived and the receiver said so. Raises OSError."""
    _write(f"{folder}/.gpufl-window-ack.{channel}.{number}", f"{window_id}\n".encode())


def note_loss(folder: str, channel: str, number: int, reason: str) -> None:
    """A window cannot be delivered as what it was. Raises OSError."""
    marker: dict[str, Any] = {"schema_version": 1, "source": "gpufl-agent", "channel": channel}
    marker |= {"window_sequence": number, "reason": reason}
    path = f"{folder}/.gpufl-transport-loss.agent-{channel}.{number}.json"
    data = json.dumps(marker, separators=(",", ":")).encode()
    try:
        with open(path, "rb") as file:
            if file.read() == data:
                return
    except OSError:
        pass
    _write(path, data)


def forget_loss(folder: str, channel: str, number: int) -> None:
    """What was thought lost has arrived."""
    remove(f"{folder}/.gpufl-transport-loss.agent-{channel}.{number}.json")


def close(folder: str, reason: str = "") -> None:
    """The session is over: everything has arrived, or, with a reason, not. Raises OSError."""
    _write(
        f"{folder}/{FAILED if reason else UPLOADED}",
        f"{reason}\n".encode("utf-8", "backslashreplace") if reason else b"",
    )
    remove(f"{folder}/{UPLOADED if reason else FAILED}")


def reopen(folder: str) -> None:
    """The session goes on after all."""
    for name in (UPLOADED, FAILED):
        remove(f"{folder}/{name}")


def remove(path: str) -> None:
    """Delete a file of ours; nothing if it is not there. Raises OSError."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    sync_folder(os.path.dirname(path))


def _write(path: str, data: bytes) -> None:
    """In one step and synced. A link of that name is replaced, never followed: it may be of somebody who may less. What
    a kill leaves half written has a name of its own, by which the next try of the same mark replaces it."""
    folder, name = os.path.split(path)
    temporary = f"{folder}/.gpufl-agent.{name.lstrip('.')}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        try:
            descriptor = os.open(temporary, flags, 0o644)
        except FileExistsError:
            os.unlink(temporary)
            descriptor = os.open(temporary, flags, 0o644)
        try:
            write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, path)
    except OSError as error:
        try:
            os.unlink(temporary)
        except OSError:
            pass
        error.filename, error.filename2 = path, None
        raise
    sync_folder(folder)
