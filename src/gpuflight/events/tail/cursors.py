"""Cursor files of gpufl-agent: how far it has sent, so that what it sent is not read again."""

from __future__ import annotations

import zlib
from itertools import islice

import msgspec

from gpuflight.errors import InputError
from gpuflight.events.tail.disk import Disk

_SIGNED_BYTES = 512


class Cursor(msgspec.Struct, rename="camel"):
    """Where the agent stands in a channel of a session: windows below ``file_index`` are sent, and of that one the
    first ``offset`` bytes. ``head_sig``: CRC-32 of a plain window's first 512 bytes, 0 unknown."""

    file_index: int = 1
    offset: int = 0
    head_sig: int = 0
    file_size: int = 0
    file_key: str | None = None

    def fits(self, disk: Disk, path: str, packed: bool) -> bool:
        """Whether a file is the one it was written about, as far as can be told."""
        if not self.head_sig:
            return True
        try:
            if packed:
                start = b"".join(islice(disk.inflate(path), 1))[:_SIGNED_BYTES]
            else:
                descriptor = disk.open(path)
                try:
                    start = disk.read(descriptor, _SIGNED_BYTES, 0)
                finally:
                    disk.close(descriptor)
        except (OSError, ValueError):
            return False
        return zlib.crc32(start) == self.head_sig


class _File(msgspec.Struct):
    streams: dict[str, Cursor]


def read_cursors(path: str) -> dict[tuple[str, str], Cursor]:
    """Cursors by (session id, channel). Raises InputError if the file is none of the agent's."""
    try:
        with open(path, "rb") as file:
            found = msgspec.json.decode(file.read(), type=_File)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as a cursor file of gpufl-agent: {error}") from error
    cursors = {}
    for name, cursor in found.streams.items():
        session_id, _, channel = name.rpartition(".")
        cursors[session_id, channel] = cursor
    return cursors
