"""The run folder: what one capture leaves behind. Files appear whole; nothing else in the folder is ever touched."""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import IO, Any

import zstandard

from gpuflight.core.lockfile import LockFile
from gpuflight.errors import InputError
from gpuflight.rounds import Round
from gpuflight.subscribers.atomic import sync_folder, write_atomic
from gpuflight.subscribers.encoding import encode_diff_line, encode_round

FILES = ("graph.json", "rounds.jsonl.zst", "describe.txt", "coverage.json", "config.json")


def default_folder(now_s: float | None = None) -> str:
    """``gpuflight-run-20260102-030405`` (local time), with a number behind it if that exists."""
    name = time.strftime("gpuflight-run-%Y%m%d-%H%M%S", time.localtime(now_s))
    candidate, number = name, 1
    while os.path.lexists(candidate):
        number += 1
        candidate = f"{name}-{number}"
    return candidate


class RunFolder:
    """Writes one capture. ``open`` refuses a folder with anything in it unless ``force``; then only FILES are replaced.

    While a capture runs it holds a lock file in the folder: a second one there is refused and touches nothing.
    ``rounds.jsonl.zst`` grows as ``rounds.jsonl.zst.part``, readable to the last round even if we are killed.
    """

    def __init__(self, path: str, *, force: bool = False) -> None:
        self.path = path
        self._force = force
        self._stream: IO[bytes] | None = None
        self._compressor = zstandard.ZstdCompressor(level=3)
        self._previous: int | None = None
        self._lock = LockFile(os.path.join(path, ".gpuflight.lock"), remove=True)

    def open(self) -> None:
        """Make the folder and begin the stream of rounds. Raises InputError."""
        try:
            os.makedirs(self.path, exist_ok=True)
            if not self._force and os.listdir(self.path):
                raise InputError(
                    f"{self.path}: not empty; choose another folder, or --force to replace our files in it"
                )
            self._lock.acquire()
            self._stream = open(self._part, "wb")  # noqa: SIM115 - open as long as the capture lasts
        except NotADirectoryError as error:
            raise InputError(f"{self.path}: is in the way and not a folder") from error
        except FileExistsError as error:
            raise InputError(f"{self.path}: exists and is not a folder") from error
        except OSError as error:
            raise InputError(f"{self.path}: cannot be written: {error.strerror}") from error

    def add(self, completed: Round) -> None:
        """Append a round to the stream: the first one, and any after a gap, whole; else what changed."""
        follows = self._previous is not None and completed.number == self._previous + 1
        line = encode_diff_line(completed) if follows else encode_round(completed)
        assert self._stream is not None  # noqa: S101 - open() was called
        # A frame for each round: whatever ends us, every round up to the last one is whole.
        try:
            self._stream.write(self._compressor.compress(line + b"\n"))
            self._stream.flush()
        except OSError as error:
            error.filename = self._part  # a full disk is told by its name
            raise
        self._previous = completed.number

    def finish(self, last: Round, coverage: Any, config: Any) -> None:
        """Write everything else and put the stream under its name."""
        assert self._stream is not None  # noqa: S101 - open() was called
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        os.replace(self._part, os.path.join(self.path, "rounds.jsonl.zst"))
        self._write("graph.json", encode_round(last) + b"\n")
        self._write("describe.txt", (last.graph.describe().rstrip("\n") + "\n").encode(errors="backslashreplace"))
        self._write("coverage.json", _json(coverage))
        self._write("config.json", _json(config))
        self._lock.release()
        sync_folder(self.path)

    def abandon(self) -> None:
        """Without a single round there is nothing to keep: remove the stream, and the folder if it is empty."""
        if self._stream is None or self._stream.closed:
            self._lock.release()
            return
        with contextlib.suppress(OSError):  # what did not fit has been told already
            self._stream.close()
        self._lock.release()
        if self._previous is None:
            os.unlink(self._part)
            try:
                os.rmdir(self.path)
            except OSError:
                pass

    @property
    def _part(self) -> str:
        return os.path.join(self.path, "rounds.jsonl.zst.part")

    def _write(self, name: str, data: bytes) -> None:
        write_atomic(os.path.join(self.path, name), data)


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
