"""Requests of commands to a running server: one deadline, no redirects, and one line for whatever goes wrong."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import ssl
import time
from typing import Any
from urllib.parse import urlsplit

from gpuflight.errors import GpuflightError, InputError

DEFAULT_URL = "http://127.0.0.1:9477"
_MAX_BYTES = 64 << 20
_CHUNK_BYTES = 65_536


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """``--url``, ``--token-file``, ``--ca-file``, ``--timeout``."""
    group = parser.add_argument_group("which server, and as whom")
    group.add_argument(
        "--url",
        metavar="URL",
        help=f"http://…, https://… or unix:/path/of/socket (default: $GPUFLIGHT_URL, else {DEFAULT_URL})",
    )
    group.add_argument("--token-file", metavar="FILE", help="the file with the token (default: $GPUFLIGHT_TOKEN)")
    group.add_argument("--ca-file", metavar="FILE", help="PEM certificates to trust instead of the system's")
    group.add_argument("--timeout", metavar="S", type=_seconds, default=30.0, help="longest wait (default 30 s)")


class Rest:
    """A server. Raises InputError for a URL, token or file that cannot be used."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.url: str = arguments.url or os.environ.get("GPUFLIGHT_URL") or DEFAULT_URL
        self._timeout_s: float = arguments.timeout
        self._ca_file: str | None = arguments.ca_file
        token: str | None = getattr(arguments, "token_text", None)  # of the settings, where these name the server
        self._token = _token(arguments.token_file) if token is None else token
        self._prefix = ""
        if self.url.startswith("unix:"):
            if len(self.url) == len("unix:"):
                raise InputError("--url unix: needs the path of the socket")
            return
        try:
            parts = urlsplit(self.url)
            _ = parts.port
        except ValueError as error:
            raise InputError(f"--url {self.url}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise InputError(f"--url {self.url}: give http://HOST:PORT, https://HOST:PORT or unix:PATH")
        if parts.username is not None or parts.password is not None:
            raise InputError("--url: no user or password in it; a token goes into --token-file")
        if not self.url.isascii() or any(ord(char) <= 32 or ord(char) == 127 for char in self.url):
            raise InputError("--url: white space, control characters or letters beyond ASCII in it")
        self._prefix = parts.path.rstrip("/")

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """What the server answers, decoded. Raises InputError for what it refuses, GpuflightError if it fails or is no
        gpuflight-server."""
        headers = {"Accept": "application/json", "User-Agent": "gpuflight"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        try:
            status, raw = self._exchange(method, self._prefix + path, data, headers)
        except TimeoutError:
            raise GpuflightError(f"{self.url}: no answer within {self._timeout_s:g} s") from None
        except ssl.SSLError as error:
            raise GpuflightError(f"{self.url}: TLS: {error.reason or error}") from None
        except (ConnectionRefusedError, FileNotFoundError) as error:
            raise GpuflightError(f"{self.url}: no server is there: {error.strerror}") from None
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            text = (getattr(error, "strerror", None) or str(error) or type(error).__name__).splitlines()[0]
            raise GpuflightError(f"{self.url}: {text}") from None
        return self._understood(status, raw)

    def _exchange(self, method: str, path: str, data: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        until_s = time.monotonic() + self._timeout_s
        connection = self._connection()
        try:
            connection.request(method, path, data, headers)
            answer = connection.getresponse()
            found = bytearray()
            while chunk := answer.read1(_CHUNK_BYTES):
                found += chunk
                if len(found) > _MAX_BYTES:
                    raise http.client.HTTPException(f"the answer is larger than {_MAX_BYTES} bytes")
                if time.monotonic() > until_s:  # the socket's own timeout begins anew with every byte
                    raise TimeoutError
            return answer.status, bytes(found)
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        if self.url.startswith("unix:"):
            return _UnixConnection(self.url[len("unix:") :], self._timeout_s)
        parts = urlsplit(self.url)
        host = parts.hostname or ""
        if parts.scheme == "http":
            return http.client.HTTPConnection(host, parts.port, timeout=self._timeout_s)
        try:
            context = ssl.create_default_context(cafile=self._ca_file)
        except (OSError, ssl.SSLError) as error:
            raise InputError(f"--ca-file {self._ca_file}: {getattr(error, 'strerror', None) or error}") from None
        return http.client.HTTPSConnection(host, parts.port, timeout=self._timeout_s, context=context)

    def _understood(self, status: int, raw: bytes) -> Any:
        try:
            found = json.loads(raw)
        except (ValueError, RecursionError):
            found = None
        if 200 <= status < 300 and isinstance(found, dict):
            return found
        said = found.get("error") if isinstance(found, dict) else None
        if not isinstance(said, dict) or not isinstance(said.get("message"), str):
            text = "redirects are not followed" if 300 <= status < 400 else "that is no gpuflight-server"
            raise GpuflightError(f"{self.url}: status {status}: {text}")
        message = " ".join(said["message"].split())
        if status == 401:
            more = "" if self._token else "; give one with --token-file or $GPUFLIGHT_TOKEN"
            raise InputError(f"{self.url}: {message}{more}")
        if status >= 500 or status == 429:
            raise GpuflightError(f"{self.url}: {message}")
        raise InputError(message)


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            found.settimeout(self.timeout)
            found.connect(self._path)
        except BaseException:
            found.close()
            raise
        self.sock = found


def _token(path: str | None) -> str:
    if path is None:
        token, where = os.environ.get("GPUFLIGHT_TOKEN", "").strip(), "$GPUFLIGHT_TOKEN"
    else:
        try:
            with open(path, "rb") as file:
                token, where = file.read(4096).decode("ascii").strip(), path
        except OSError as error:
            raise InputError(f"--token-file {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise InputError(f"--token-file {path}: holds no token") from None
        if not token:
            raise InputError(f"--token-file {path}: is empty")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise InputError(f"{where}: holds no token")
    return token


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError(f"{text}: must be more than 0 seconds, and at most an hour")
    return value
