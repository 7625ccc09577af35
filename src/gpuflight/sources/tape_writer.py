"""Writing a recording: streams the rounds into a temporary file that takes its name at the end."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import tarfile
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import IO, Any

import zstandard

from gpuflight.errors import InputError
from gpuflight.sources.clock import Clock
from gpuflight.sources.tape_lines import SCHEMA, encode, line_of

FORGET_ROUNDS = 64
"""Every so many rounds, the keys that were not asked for as long are forgotten: the processes behind them are gone."""

Redactor = Callable[[str, str, bytes], bytes]
"""(source, key, answer) → the answer as it may be stored."""


class Writer:
    """Streams the rounds into a temporary file beside the target."""

    def __init__(
        self, path: str, clock: Clock, hostname: str, redactor: Redactor | None, version: str, force: bool
    ) -> None:
        self._path = os.path.abspath(path)
        self._temporary = f"{self._path}.part-{os.getpid()}"
        self._clock = clock
        self._redactor = redactor
        self._force = force
        self._lock = threading.Lock()
        self._round = 0
        self._began: dict[str, Any] = {}
        self._answers: dict[str, list[bytes]] = {}  # of the current round: source → lines
        # [digest of the newest answer, round it was last asked in, how often before in that round]
        self._last: dict[tuple[str, str], list[Any]] = {}
        self._rounds_count = 0
        self._open = False
        if not force and os.path.lexists(self._path):
            raise InputError(f"{path} exists already; choose another name or pass --force")
        try:
            descriptor = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from error
        self._file: IO[bytes] = os.fdopen(descriptor, "wb")
        self._compressor = zstandard.ZstdCompressor(level=3).stream_writer(self._file, closefd=False)
        self._tar = tarfile.open(fileobj=self._compressor, mode="w|", format=tarfile.PAX_FORMAT)  # noqa: SIM115
        self._open = True
        self._add(
            "meta.json",
            line_of(
                {
                    "schema": SCHEMA,
                    "version": version,
                    "hostname": hostname,
                    "time": datetime.fromtimestamp(clock.wall_ns() / 1e9, UTC).isoformat(),
                    "redacted": redactor is not None,
                }
            ),
        )

    def begin_round(self, number: int) -> None:
        with self._lock:
            if not self._open:
                return
            try:
                self._flush()
            except OSError as error:
                self._open = False
                self._remove()
                error.filename = self._path
                raise
            self._round = number
            self._began = {
                "round": number,
                "wall_ns": self._clock.wall_ns(),
                "monotonic_s": self._clock.monotonic_s(),
            }

    def keep(self, source: str, key: str, answer: bytes | Exception) -> None:
        if isinstance(answer, bytes) and self._redactor is not None:
            answer = self._redactor(source, key, answer)
        line = encode(key, answer)
        digest = hashlib.blake2b(line, digest_size=16).digest()
        with self._lock:
            if not self._open or not self._began:  # a thread that was left behind, or before the first round
                return
            last = self._last.get((source, key))
            if last is None:
                last = self._last[source, key] = [b"", self._round, 0]
            elif last[1] == self._round:
                last[2] += 1
            else:
                last[1:] = self._round, 0
            if last[0] == digest:
                return
            last[0] = digest
            if last[2]:  # a process that ended between two questions of one round
                line = encode(key, answer, last[2])
            self._answers.setdefault(source, []).append(line)

    def close(self) -> None:
        with self._lock:
            if not self._open:
                return
            self._open = False
            try:
                self._flush()
                self._add("end.json", line_of({"rounds_count": self._rounds_count}))
                self._tar.close()
                self._compressor.close()  # type: ignore[no-untyped-call]
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
                self._publish()
            except OSError as error:
                self._remove()
                if isinstance(error, FileExistsError):
                    raise InputError(f"cannot write {self._path}: {error.strerror}") from error
                error.filename = self._path
                raise

    def discard(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                self._remove()

    def _publish(self) -> None:
        if self._force:
            os.replace(self._temporary, self._path)
            return
        try:
            os.link(self._temporary, self._path)  # unlike rename never replaces a file that appeared meanwhile
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            if os.path.lexists(self._path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self._path) from None
            os.rename(self._temporary, self._path)
        else:
            os.unlink(self._temporary)

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            os.unlink(self._temporary)

    def _flush(self) -> None:
        """Write the round that ends."""
        if not self._began:
            return
        folder = f"{self._round:04d}"
        self._add(f"{folder}/round.json", line_of(self._began))
        for source, lines in sorted(self._answers.items()):
            self._add(f"{folder}/{source}.jsonl", b"".join(lines))
        self._answers = {}
        self._rounds_count += 1
        self._began = {}
        if self._rounds_count % FORGET_ROUNDS == 0:  # keys of what is gone; asked again, they are simply stored again
            oldest = self._round - FORGET_ROUNDS
            self._last = {key: last for key, last in self._last.items() if last[1] >= oldest}

    def _add(self, name: str, content: bytes) -> None:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        member.mode = 0o600
        member.mtime = self._clock.wall_ns() // 1_000_000_000
        try:
            self._tar.addfile(member, io.BytesIO(content))
        except OSError as error:
            error.filename = self._path  # a full disk is told by its name
            raise
