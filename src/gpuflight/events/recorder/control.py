"""Questions and orders to a running recorder: a socket in its session's folder, one JSON line there, one line back.

Only the user of the process and root may: the socket's mode says so, and the kernel tells who is at the other end.
``gpuflight trigger`` and the server use ``ask`` and ``find_recorders``; nothing of numpy or CUPTI is needed for it.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from gpuflight.errors import SourceUnavailable
from gpuflight.events.files.sidecars import LOCK_NAME, owner

SOCKET_NAME = ".gpuflight-control.sock"
_MOST_BYTES = 1 << 20
_PATIENCE_S = 0.5
_DEPTH = 3


class Request(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """``start``: record from now on, for ``for_s`` seconds or ``launches`` kernels (0: no end), with the stack of every
    ``stacks``-th launch (None: as it was); ``stop``; ``flush``: have everything in the files; ``status``: only ask."""

    do: Literal["status", "start", "stop", "flush"]
    for_s: float = 0.0
    launches: int = 0
    stacks: int | None = None
    name: str = ""


class Answer(msgspec.Struct, omit_defaults=True):
    """``state``: recording, waiting, waiting for CUDA, paused, off, closed. ``why``: why nothing is recorded where
    nothing is. ``counts``: records written so far, by kind; ``lost``: records that were lost."""

    ok: bool
    error: str = ""
    state: str = ""
    why: str = ""
    session_id: str = ""
    folder: str = ""
    pid: int = 0
    app: str = ""
    counts: dict[str, int] = msgspec.field(default_factory=dict)
    lost: int = 0
    here_pid: int = 0
    """The process as this process sees it, 0 where it does not; ``pid`` is of the recorder's own namespace."""


class ControlServer:
    """The recorder's end. ``listening``: whether there is a socket; ``why``: why there is none."""

    def __init__(self, folder: str, answer: Callable[[Request], Answer]) -> None:
        self.why = ""
        self._folder = folder
        self._answer = answer
        self._socket: socket.socket | None = None
        try:
            self._socket = _bound(folder)
        except OSError as error:
            self.why = f"no socket can be made in the session's folder: {error.strerror or error}"

    @property
    def listening(self) -> bool:
        return self._socket is not None

    def fileno(self) -> int:
        return -1 if self._socket is None else self._socket.fileno()

    def serve(self) -> None:
        """Answer whoever is there; a client that is slow or talks nonsense costs half a second at most."""
        while self._socket is not None:
            try:
                connection, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                return
            with connection:
                try:
                    self._serve(connection)
                except OSError:
                    continue

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            try:
                os.unlink(f"{self._folder}/{SOCKET_NAME}")
            except OSError:
                pass

    def abandon_in_child(self) -> None:
        """In a forked child: the socket is the parent's, and stays."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(_PATIENCE_S)
        line = _line(connection)  # first: closed with something unread, the other end would lose the answer
        user = _peer(connection)[1]
        if user not in (0, os.geteuid()):
            answer = Answer(ok=False, error="only the user of the process and root may ask it")
        else:
            try:
                if len(line) > _MOST_BYTES:
                    raise ValueError("too long")
                request = msgspec.json.decode(line, type=Request)
                if request.for_s < 0 or request.launches < 0 or (request.stacks or 0) < 0:
                    raise ValueError("numbers must not be negative")
            except ValueError as error:
                answer = Answer(ok=False, error=f"not understood: {error}"[:300])
            else:
                try:
                    answer = self._answer(request)
                except Exception as error:  # noqa: BLE001 - told to who asked; the recorder goes on
                    answer = Answer(ok=False, error=f"{type(error).__name__}: {error}"[:300])
        connection.sendall(msgspec.json.encode(answer) + b"\n")


def ask(folder: str, request: Request, timeout_s: float = 5.0) -> Answer:
    """Ask the recorder of a session's folder. Raises SourceUnavailable where nobody answers."""
    try:
        with _connected(folder, timeout_s) as connection:
            connection.sendall(msgspec.json.encode(request) + b"\n")
            answer = msgspec.json.decode(_line(connection), type=Answer)
            answer.here_pid = _peer(connection)[0]
            return answer
    except FileNotFoundError:
        raise SourceUnavailable(f"{folder}: no recorder listens there") from None
    except ConnectionRefusedError:
        raise SourceUnavailable(f"{folder}: its process is gone") from None
    except PermissionError:
        raise SourceUnavailable(f"{folder}: the process is another user's", "ask as that user, or as root") from None
    except TimeoutError:
        raise SourceUnavailable(f"{folder}: no answer within {timeout_s:g} s") from None
    except (OSError, ValueError) as error:
        raise SourceUnavailable(f"{folder}: {error}") from None


def find_recorders(folders: Iterable[str]) -> list[str]:
    """Folders of sessions, in or below these, whose recorder lives and can be asked."""
    found: list[str] = []
    for folder in folders:
        _find(os.path.abspath(os.path.expanduser(folder)), _DEPTH, found)
    return sorted(set(found))


def _find(folder: str, depth: int, found: list[str]) -> None:
    """Two questions per session that is over, and no listing: there may be thousands."""
    try:
        if stat.S_ISSOCK(os.lstat(f"{folder}/{SOCKET_NAME}").st_mode) and owner(folder) != "gone":
            found.append(folder)
        return
    except OSError:
        if not depth or os.path.lexists(f"{folder}/{LOCK_NAME}"):
            return
    try:
        with os.scandir(folder) as entries:
            inner = [e.path for e in entries if not e.name.startswith(".") and e.is_dir(follow_symlinks=False)]
    except OSError:
        return
    for path in inner:
        _find(path, depth - 1, found)


def _bound(folder: str) -> socket.socket:
    """Through the folder's descriptor: a path may have 107 bytes only."""
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        made.bind(f"/proc/self/fd/{directory}/{SOCKET_NAME}")
        os.chmod(SOCKET_NAME, 0o600, dir_fd=directory)
        made.setblocking(False)
        made.listen(8)
    except OSError:
        made.close()
        raise
    finally:
        os.close(directory)
    return made


def _connected(folder: str, timeout_s: float) -> socket.socket:
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        made.settimeout(timeout_s)
        made.connect(f"/proc/self/fd/{directory}/{SOCKET_NAME}")
    except OSError:
        made.close()
        raise
    finally:
        os.close(directory)
    return made


def _line(connection: socket.socket) -> bytes:
    """What comes until a newline or the end, in the connection's timeout in all; more than a line may have is cut."""
    data = bytearray()
    end_s = time.monotonic() + (connection.gettimeout() or 0.0)
    while not data.endswith(b"\n") and len(data) <= _MOST_BYTES:
        if time.monotonic() > end_s:
            raise TimeoutError
        block = connection.recv(65_536)
        if not block:
            break
        data += block
    return bytes(data)


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as the kernel tells."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    process, user, _ = struct.unpack("3i", told)
    return int(process), int(user)
