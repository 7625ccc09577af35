"""A FileSystem whose answers go over a Tape: records another one, or replays it."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from typing import Any

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.fs import FileSystem, Stat, StatVfs
from gpuflight.sources.recording import Tape


class RecordingFs:
    """Asks ``inner`` through ``tape``. One source per top folder: ``proc``, ``sys``, everything else ``files``."""

    def __init__(self, inner: FileSystem, tape: Tape) -> None:
        self._inner = inner
        self._tape = tape

    def read(self, path: str) -> bytes:
        return self._ask("read", path, lambda: self._inner.read(path))

    def read_record(self, path: str) -> bytes:
        return self._ask("read", path, lambda: self._inner.read_record(path))

    def listdir(self, path: str) -> list[str]:
        names: list[str] = self._ask_json("list", path, lambda: self._inner.listdir(path))
        return names

    def readlink(self, path: str) -> str:
        return str(self._ask_json("link", path, lambda: self._inner.readlink(path)))

    def realpath(self, path: str) -> str:
        return str(self._ask_json("real", path, lambda: self._inner.realpath(path)))

    def stat(self, path: str) -> Stat:
        return Stat(*self._ask_json("stat", path, lambda: self._inner.stat(path)))

    def lstat(self, path: str) -> Stat:
        return Stat(*self._ask_json("lstat", path, lambda: self._inner.lstat(path)))

    def statvfs(self, path: str) -> StatVfs:
        return StatVfs(*self._ask_json("statvfs", path, lambda: self._inner.statvfs(path)))

    def _ask_json(self, what: str, path: str, live: Callable[[], Any]) -> Any:
        # ASCII only: names that are not UTF-8 keep their surrogates as escapes.
        return json.loads(self._ask(what, path, lambda: json.dumps(live()).encode("ascii")))

    def _ask(self, what: str, path: str, live: Callable[[], bytes]) -> bytes:
        return self._tape.ask(source_of(path), f"{what} {path}", live)


class ReplayFs(RecordingFs):
    """Answers from ``tape`` alone; a path that was never asked for does not exist."""

    def __init__(self, tape: Tape) -> None:
        super().__init__(_NO_FILES, tape)

    def _ask(self, what: str, path: str, live: Callable[[], bytes]) -> bytes:
        try:
            return super()._ask(what, path, live)
        except OSError as error:
            raise OSError(
                error.errno, error.strerror, path
            ) from None  # the subclass and the path, as the kernel has it
        except SourceUnavailable:
            raise FileNotFoundError(errno.ENOENT, "not in this recording", path) from None


class _NoFiles:
    """Nothing at all: a replay never asks it."""

    def __getattr__(self, name: str) -> Callable[[str], Any]:
        def missing(path: str) -> Any:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

        return missing


_NO_FILES: Any = _NoFiles()


def source_of(path: str) -> str:
    """Under which source of a recording the answers about a path are kept."""
    top = path.split("/", 2)[1] if path.count("/") else ""
    return top if top in ("proc", "sys") else "files"
