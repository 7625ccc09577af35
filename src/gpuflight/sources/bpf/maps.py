"""Reading and writing maps by descriptor: in batches where the kernel has them, key by key where not."""

from __future__ import annotations

import ctypes
import errno
import functools

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.bpf import syscalls

HASH, PERCPU_HASH = 1, 5
_ARRAY, _PERCPU_ARRAY, _LRU_PERCPU_HASH = 2, 6, 10
PER_CPU = {PERCPU_HASH, _PERCPU_ARRAY, _LRU_PERCPU_HASH}
ARRAYS = {_ARRAY, _PERCPU_ARRAY}
_CHUNK_BYTES = 256 << 10
_NO_BATCH = {errno.EINVAL, errno.EOPNOTSUPP, syscalls.ENOTSUPP}


@functools.cache
def possible_cpus() -> int:
    """CPUs the kernel keeps a value for, those that could be plugged in included."""
    try:
        with open("/sys/devices/system/cpu/possible", encoding="utf-8") as file:
            return int(file.read().replace("-", ",").split(",")[-1]) + 1
    except OSError as error:
        raise SourceUnavailable(
            f"the number of CPUs cannot be read: {error.strerror}", "raise the limit of open files (ulimit -n)"
        ) from error


class Map:
    """One map of the kernel. The descriptor is the caller's to close. Not for several threads at a time."""

    def __init__(self, fd: int) -> None:
        info = syscalls.map_info(fd)
        self.fd = fd
        self.type: int = info.type
        self.key_size: int = info.key_size
        self.max_entries: int = info.max_entries
        per_cpu = info.type in PER_CPU
        self.value_size: int = (info.value_size + 7) // 8 * 8 * possible_cpus() if per_cpu else info.value_size
        self._batches = True
        self._chunk = 0
        self._keys: ctypes.Array[ctypes.c_char] | None = None
        self._values: ctypes.Array[ctypes.c_char] | None = None

    def items(self) -> list[tuple[bytes, bytes]]:
        """Every key and value. Raises OSError."""
        if self._batches:
            try:
                return [pair for keys, values in self._in_batches() for pair in self._split(keys, values)]
            except OSError as error:
                if error.errno not in _NO_BATCH:
                    raise
                self._batches = False
        found = []
        for key in self.keys():
            value = self.lookup(key)
            if value is not None:  # else it went meanwhile
                found.append((key, value))
        return found

    def packed(self) -> tuple[bytes, bytes]:
        """All keys and all values, one after the other, without an object for each. Raises OSError."""
        if self._batches:
            try:
                chunks = self._in_batches()
                return b"".join(keys for keys, _ in chunks), b"".join(values for _, values in chunks)
            except OSError as error:
                if error.errno not in _NO_BATCH:
                    raise
                self._batches = False
        pairs = self.items()
        return b"".join(key for key, _ in pairs), b"".join(value for _, value in pairs)

    def _in_batches(self) -> list[tuple[bytes, bytes]]:
        """Keys and values of each batch, one after the other."""
        if self._keys is None:
            self._room(min(self.max_entries, max(64, _CHUNK_BYTES // (self.key_size + self.value_size))))
        # A hash map answers with the place of a bucket (4 bytes), an array with an index.
        here, after = (
            ctypes.create_string_buffer(max(8, self.key_size)),
            ctypes.create_string_buffer(max(8, self.key_size)),
        )
        attr = syscalls.BatchAttr(map_fd=self.fd, out_batch=ctypes.addressof(after))
        found: list[tuple[bytes, bytes]] = []
        while True:
            assert self._keys is not None  # noqa: S101
            assert self._values is not None  # noqa: S101
            attr.keys, attr.values, attr.count = (
                ctypes.addressof(self._keys),
                ctypes.addressof(self._values),
                self._chunk,
            )
            last = False
            try:
                syscalls.bpf(syscalls.LOOKUP_BATCH, attr)
            except OSError as error:
                if error.errno == errno.ENOSPC:  # one bucket holds more than our room
                    self._room(self._chunk * 2)
                    continue
                if error.errno != errno.ENOENT:
                    raise
                last = True
            found.append(
                (
                    ctypes.string_at(self._keys, attr.count * self.key_size),
                    ctypes.string_at(self._values, attr.count * self.value_size),
                )
            )
            if last:
                return found
            ctypes.memmove(here, after, len(after))
            attr.in_batch = ctypes.addressof(here)

    def _room(self, entries: int) -> None:
        self._chunk = entries
        self._keys = ctypes.create_string_buffer(entries * self.key_size)
        self._values = ctypes.create_string_buffer(entries * self.value_size)

    def _split(self, keys: bytes, values: bytes) -> list[tuple[bytes, bytes]]:
        key_size, value_size = self.key_size, self.value_size
        return [
            (keys[i * key_size : (i + 1) * key_size], values[i * value_size : (i + 1) * value_size])
            for i in range(len(keys) // key_size)
        ]

    def keys(self) -> list[bytes]:
        """Every key. A key that is deleted while we walk sends the kernel back to the start: none is given twice."""
        found: dict[bytes, None] = {}
        key, after = ctypes.create_string_buffer(self.key_size), ctypes.create_string_buffer(self.key_size)
        attr = syscalls.ElementAttr(map_fd=self.fd, value=ctypes.addressof(after))
        for _ in range(2 * self.max_entries + 1):
            try:
                syscalls.bpf(syscalls.MAP_NEXT_KEY, attr)
            except OSError as error:
                if error.errno == errno.ENOENT:
                    break
                raise
            found[after.raw] = None
            ctypes.memmove(key, after, self.key_size)
            attr.key = ctypes.addressof(key)
        return list(found)

    def lookup(self, key: bytes) -> bytes | None:
        """The value of a key; None if it is not there. Raises OSError."""
        value = ctypes.create_string_buffer(self.value_size)
        try:
            self._element(syscalls.MAP_LOOKUP, key, value)
        except OSError as error:
            if error.errno == errno.ENOENT:
                return None
            raise
        return value.raw

    def update(self, key: bytes, value: bytes) -> None:
        """Set a key. Raises OSError; ValueError for a value of the wrong size."""
        if len(value) != self.value_size:
            raise ValueError(f"the value has {len(value)} bytes, the map takes {self.value_size}")
        self._element(syscalls.MAP_UPDATE, key, ctypes.create_string_buffer(value, len(value)))

    def delete(self, key: bytes) -> bool:
        """Remove a key; False if it was not there. Raises OSError."""
        try:
            self._element(syscalls.MAP_DELETE, key, None)
        except OSError as error:
            if error.errno == errno.ENOENT:
                return False
            raise
        return True

    def clear(self) -> None:
        """Remove every key; an array keeps its keys and gets zeros. Raises OSError."""
        zero = bytes(self.value_size)
        for key in self.keys():
            if self.type in ARRAYS:
                self.update(key, zero)
            else:
                self.delete(key)

    def _element(self, command: int, key: bytes, value: ctypes.Array[ctypes.c_char] | None) -> None:
        if len(key) != self.key_size:
            raise ValueError(f"the key has {len(key)} bytes, the map takes {self.key_size}")
        place = ctypes.create_string_buffer(key, len(key))
        syscalls.bpf(
            command,
            syscalls.ElementAttr(
                map_fd=self.fd, key=ctypes.addressof(place), value=0 if value is None else ctypes.addressof(value)
            ),
        )
