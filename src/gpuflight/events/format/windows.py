"""Windows of one channel as generation E has them: written in ``.tmp``, retired, compressed, identified, exported.

Every step is durable before the next one is begun: content, then name, then directory. What a crash leaves is one of
the states that readers know (active file, retired raw file, ``.part``, staged ``.log.gz``).
"""

from __future__ import annotations

import io
import os
import uuid
import zlib
from collections.abc import Callable
from types import ModuleType

import msgspec

from gpuflight.events.files.names import parse_name
from gpuflight.events.files.sidecars import Sidecar

_deflate: ModuleType = zlib
_LEVEL = 6
_crc32: Callable[[bytes, int], int] = zlib.crc32
try:
    from isal import isal_zlib
except ImportError:
    pass
else:
    _deflate, _LEVEL = isal_zlib, 1  # as small as 2 for rows of numbers, and a tenth cheaper
    _crc32 = isal_zlib.crc32

_GZIP = 31
_BLOCK = 1 << 18


def sync_directory(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: str, data: bytes) -> None:
    """A small file that is there whole or not at all."""
    temporary = f"{path}.new"
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, path)


def move_without_replacing(source: str, target: str) -> None:
    """Raises FileExistsError rather than overwrite."""
    os.link(source, target)
    os.unlink(source)


def highest_number(folder: str, channel: str) -> int:
    """Of the windows of a channel that are or were there, sidecars of exported ones included; 0 if none."""
    numbers = [0]
    for directory in (folder, f"{folder}/.tmp"):
        try:
            names = os.listdir(directory)
        except FileNotFoundError:
            continue
        for name in names:
            window = parse_name(directory, name)
            if window is not None and window.channel == channel and window.number is not None:
                numbers.append(window.number)
            parts = name.split(".")
            if name.startswith(f".gpufl-window.{channel}.") and parts[-1] == "json" and parts[-2].isdigit():
                numbers.append(int(parts[-2]))
    return max(numbers)


class Retired(msgspec.Struct):
    """A raw window that waits for its export."""

    path: str
    channel: str
    number: int
    opened_mono_ms: int
    closed_mono_ms: int
    size_bytes: int
    crc32: int


class ActiveWindow:
    """The file that a channel writes. ``size_bytes`` counts what was written, flushed or not; ``crc32`` is of it."""

    def __init__(self, folder: str, channel: str, mono_ms: Callable[[], int]) -> None:
        self.size_bytes = 0
        self.crc32 = 0
        self.first_write_ms = -1
        self._folder = folder
        self._channel = channel
        self._mono_ms = mono_ms
        self._number = highest_number(folder, channel)
        self._path = f"{folder}/.tmp/{channel}.log"
        self._file = open(self._path, "xb")  # noqa: SIM115 (kept open)

    def write(self, line: bytes) -> None:
        if not self.size_bytes:
            self.first_write_ms = self._mono_ms()
        self._file.write(line)
        self.size_bytes += len(line)
        self.crc32 = _crc32(line, self.crc32)

    def flush(self, *, sync: bool) -> None:
        self._file.flush()
        if sync:
            os.fdatasync(self._file.fileno())

    def forget(self) -> None:
        """In a forked child, with nothing in the buffer: the descriptor is closed, the file left as it is."""
        self._file.close()

    def retire(self) -> Retired | None:
        """Ends the window and begins the next one; None if nothing was written."""
        retired = self.end()
        self._file = open(self._path, "xb")  # noqa: SIM115
        sync_directory(f"{self._folder}/.tmp")
        return retired

    def end(self) -> Retired | None:
        """Ends the window for good; None, and no file is left, if nothing was written."""
        self.flush(sync=True)
        self._file.close()
        if not self.size_bytes:
            os.unlink(self._path)
            return None
        self._number += 1
        path = f"{self._folder}/.tmp/{self._channel}.{self._number}.log"
        move_without_replacing(self._path, path)
        opened_ms, size, checksum = self.first_write_ms, self.size_bytes, self.crc32
        retired = Retired(path, self._channel, self._number, opened_ms, self._mono_ms(), size, checksum)
        self.size_bytes, self.crc32, self.first_write_ms = 0, 0, -1
        return retired


def export(folder: str, session_id: str, retired: Retired, *, compress: bool, wall_ms: int) -> None:
    """Compresses a retired window, writes its identity, moves it into the session folder."""
    path, size, checksum = retired.path, retired.size_bytes, retired.crc32
    if compress:
        path, size, checksum = _compressed(path)
    name = os.path.basename(path)
    sidecar = Sidecar(
        window_id=str(uuid.uuid4()),
        session_id=session_id,
        channel=retired.channel,
        window_sequence=retired.number,
        payload_file=name,
        payload_bytes=size,
        payload_crc32=checksum,
        opened_mono_ms=retired.opened_mono_ms,
        closed_mono_ms=retired.closed_mono_ms,
        created_wall_ms=wall_ms,
    )
    fields = msgspec.structs.asdict(sidecar)
    ordered = {key: fields.pop(key) for key in ("schema_version", "type")} | fields
    write_durably(f"{folder}/.gpufl-window.{retired.channel}.{retired.number}.json", msgspec.json.encode(ordered))
    sync_directory(folder)
    move_without_replacing(path, f"{folder}/{name}")
    sync_directory(folder)


def _compressed(raw: str) -> tuple[str, int, int]:
    """(path, bytes, CRC-32) of the compressed file beside the raw one, which is gone then."""
    part = f"{raw}.gz.part"
    size, checksum = 0, 0
    deflater = _deflate.compressobj(_LEVEL, _deflate.DEFLATED, _GZIP)
    room = memoryview(bytearray(_BLOCK))
    with open(raw, "rb", buffering=0) as source, open(part, "wb", buffering=0) as target:
        while True:
            count = source.readinto(room)
            packed = deflater.compress(room[:count]) if count else deflater.flush()
            size += len(packed)
            checksum = _crc32(packed, checksum)
            _write_all(target, packed)
            if not count:
                break
        os.fsync(target.fileno())
    os.rename(part, f"{raw}.gz")
    sync_directory(os.path.dirname(raw))
    os.unlink(raw)
    return f"{raw}.gz", size, checksum


def _write_all(file: io.FileIO, data: bytes) -> None:
    """A bare write may take less than it was given."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) or 0 :]
