"""The sockets that a server listens on: a TCP port, and a unix socket with a file."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat

from gpuflight.errors import ConfigError

BACKLOG = 2048
_MAX_PATH_BYTES = 107
"""sun_path of sockaddr_un less the final 0 (unix(7))."""


def listen_tcp(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError for a name that does not resolve, OSError with the address."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"server.host: {host}: {error.strerror}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, error.strerror, f"{host}:{port}") from None
    listener.setblocking(False)
    return listener


def check_path(path: str) -> None:
    """Refuse a path that no unix socket can have. Raises ConfigError."""
    if not os.path.isabs(path) or "\0" in path:
        raise ConfigError(f"server.socket: {path!r} is no absolute path")
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise ConfigError(f"server.socket: {path} is longer than a unix socket may be ({_MAX_PATH_BYTES} bytes)")


class UnixListener:
    """A listening unix socket and its file, which is of mode 0600 from its first moment, and 0666 later if
    ``for_others``: then who connected decides.

    A file that is in the way goes only if it is a socket on which nobody listens. Raises OSError with the path.
    """

    def __init__(self, path: str, *, for_others: bool = False) -> None:
        self.path = path
        try:
            _clear(path)
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                # Linux gives the file the mode of the socket (less the umask): there is no moment in which others may.
                os.fchmod(self.socket.fileno(), 0o600)
                self.socket.bind(path)
                found = os.lstat(path)
                self._file = (found.st_dev, found.st_ino)
                try:
                    self.socket.listen(BACKLOG)
                    if for_others:
                        os.chmod(path, 0o666)  # noqa: S103 - who may is decided by the user who connected
                except OSError:
                    self._remove()
                    raise
            except OSError:
                self.socket.close()
                raise
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from None
        self.socket.setblocking(False)

    def close(self) -> None:
        """Listen no more, and remove the file if it is still ours. May be called twice."""
        self._remove()  # first: as long as we listen, nobody takes the file for a stale one
        self.socket.close()

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            found = os.lstat(self.path)
            if (found.st_dev, found.st_ino) == self._file:
                os.unlink(self.path)


def _clear(path: str) -> None:
    """Remove a socket on which nobody listens. Raises OSError for anything else that is there."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "there is a file that is no socket; it stays as it is")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a listener whose queue is full answers EAGAIN
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except FileNotFoundError:
            return
        except BlockingIOError:
            pass
    raise OSError(errno.EADDRINUSE, "somebody listens on this socket")
