"""How far everything was committed, in one file that is there whole or as it was before, whatever happens.

A first line with a checksum, then JSON. Written beside, synced, renamed over, folder synced: at no moment is there
none. A file that is damaged is kept beside (``.damaged-N``). An empty one is a state like any other: nothing known yet.
"""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from typing import Literal

import msgspec

from gpuflight.errors import InputError
from gpuflight.events.format.windows import sync_directory, write_durably
from gpuflight.events.tail.cursors import Cursor, read_cursors
from gpuflight.events.tail.window import StreamState

_HEAD = b"gpuflight tail 1 "
_QUARANTINED = 100


class State(msgspec.Struct):
    streams: list[StreamState] = msgspec.field(default_factory=list)


class Loaded(msgspec.Struct):
    """``how``: ``none`` there was no file, ``damaged`` it was put aside as ``aside``, ``cursors`` it is the agent's."""

    how: Literal["none", "state", "damaged", "cursors"] = "none"
    streams: list[StreamState] = msgspec.field(default_factory=list)
    cursors: dict[tuple[str, str], Cursor] = msgspec.field(default_factory=dict)
    aside: str = ""


class Checkpoint:
    """One file, held by one tailer at a time. Raises InputError if another has it, or it cannot be written there."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        try:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            self._lock = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InputError(f"{self.path}: no checkpoint can be kept there: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise InputError(f"{self.path}: another process follows log files with this checkpoint") from None

    def load(self) -> Loaded:
        """What the file says; a damaged one is renamed. Raises InputError if it cannot be read at all."""
        try:
            with open(self.path, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            return Loaded()
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read: {error.strerror}") from error
        if not data.strip():
            return Loaded("none")
        head, _, body = data.partition(b"\n")
        try:
            if head.startswith(_HEAD) and int(head[len(_HEAD) :], 16) == zlib.crc32(body):
                return Loaded("state", _decode(body).streams)
        except (ValueError, RecursionError):
            pass
        if data.lstrip()[:1] == b"{":
            try:
                return Loaded("cursors", cursors=read_cursors(self.path))
            except InputError:
                pass
        return Loaded("damaged", aside=self._quarantine())

    def save(self, streams: list[StreamState]) -> None:
        """Durable when it returns. Raises OSError; the old one stands then."""
        body = _encode(State(streams))
        write_durably(self.path, _HEAD + f"{zlib.crc32(body):08x}\n".encode() + body)
        sync_directory(os.path.dirname(self.path))

    def close(self) -> None:
        """Let another tailer have it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _quarantine(self) -> str:
        for number in range(1, _QUARANTINED):
            aside = f"{self.path}.damaged-{number}"
            if not os.path.exists(aside):
                break
        os.rename(self.path, aside)
        return aside


def _encode(state: State) -> bytes:
    try:
        return msgspec.json.encode(state)
    except UnicodeEncodeError:  # names that are no UTF-8, as Python holds them: only json writes and reads those
        return json.dumps(msgspec.to_builtins(state)).encode()


def _decode(body: bytes) -> State:
    try:
        return msgspec.json.decode(body, type=State)
    except msgspec.ValidationError:
        raise
    except ValueError:
        return msgspec.convert(json.loads(body), State)
