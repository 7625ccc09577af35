"""HTTP requests that cannot be led astray: one deadline over the whole call, addresses checked as they are connected
to, no redirects, no proxies, no cookies. On httpcore, which httpx is made of and comes with the extra ``server``.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from gpuflight.subscribers.netguard import Rules, Target, is_address, resolve

if TYPE_CHECKING:
    import httpcore

_WRITE_BYTES = 65_536
RESPONSE_MAX_BYTES = 65_536
"""What is read of an answer."""


class Answer:
    """Status, headers (lower case) and the beginning of the body of an answer."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body


class Client:
    """One receiver. Used by one thread at a time. Raises ImportError without httpcore.

    ``connect_timeout_s``: time to connect to one address, within the deadline of the call. ``answer_max_bytes``: what
    is read of an answer.
    """

    def __init__(
        self,
        target: Target,
        rules: Rules,
        ssl_context: ssl.SSLContext | None = None,
        *,
        connect_timeout_s: float | None = None,
        answer_max_bytes: int = RESPONSE_MAX_BYTES,
    ) -> None:
        import httpcore

        self._target = target
        self._answer_max_bytes = answer_max_bytes
        self._deadline = _Deadline()
        self._pool = httpcore.ConnectionPool(
            ssl_context=ssl_context,
            max_connections=1,
            keepalive_expiry=60.0,
            network_backend=cast("httpcore.NetworkBackend", _Backend(target, rules, self._deadline, connect_timeout_s)),
        )

    def post(self, headers: list[tuple[bytes, bytes]], body: bytes, timeout_s: float) -> Answer:
        """POST to the target, see ``request``."""
        return self.request("POST", self._target.path, headers, body, timeout_s)

    def request(
        self, method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes, timeout_s: float
    ) -> Answer:
        """A request for a path (with its query) of the target's host, within a deadline. Raises httpcore errors,
        OSError (TimeoutError at the deadline), Refused."""
        import httpcore

        self._deadline.at_s = time.monotonic() + timeout_s
        target = self._target
        url = httpcore.URL(scheme=target.scheme, host=target.host, port=target.port, target=path)
        timeouts = dict.fromkeys(("connect", "read", "write", "pool"), timeout_s)
        with self._pool.stream(
            method, url, headers=headers, content=body, extensions={"timeout": timeouts}
        ) as response:
            found = bytearray()
            for chunk in response.iter_stream():
                found += chunk
                if len(found) > self._answer_max_bytes:
                    break  # leaving the block closes the connection
            known = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in response.headers}
            return Answer(response.status, known, bytes(found[: self._answer_max_bytes]))

    def close(self) -> None:
        """Close the connection."""
        self._pool.close()


class _Deadline:
    at_s = 0.0

    def left_s(self) -> float:
        left_s = self.at_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the deadline has passed")
        return left_s


class _Stream:
    """Each operation gets what is left of the deadline, so that no drip of bytes can stretch it."""

    def __init__(self, stream: httpcore.NetworkStream, deadline: _Deadline) -> None:
        self._stream = stream
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._deadline.left_s())

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        for start in range(0, len(buffer), _WRITE_BYTES):
            part = buffer[start : start + _WRITE_BYTES]
            self._stream.write(part, self._deadline.left_s())

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> _Stream:
        left_s = self._deadline.left_s()
        return _Stream(self._stream.start_tls(ssl_context, server_hostname, left_s), self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class _Backend:
    def __init__(
        self, target: Target, rules: Rules, deadline: _Deadline, connect_timeout_s: float | None = None
    ) -> None:
        self._target = target
        self._rules = rules
        self._deadline = deadline
        self._connect_timeout_s = connect_timeout_s
        import httpcore

        self._plain = httpcore.SyncBackend()
        self._resolver: threading.Thread | None = None

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> _Stream:
        import httpcore

        addresses = self._resolve()
        for address in addresses[:-1]:
            left_s = self._deadline.left_s() / 2
            try:
                return self._connect(address, port, left_s)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
        return self._connect(addresses[-1], port, self._deadline.left_s())

    def _resolve(self) -> list[str]:
        """The addresses, by a thread of its own, since no call of the C library can be given a deadline."""
        if is_address(self._target.host):
            return resolve(self._target, self._rules)
        if self._resolver is not None and self._resolver.is_alive():
            raise TimeoutError("the last attempt to resolve the name has not ended")
        found: list[list[str] | Exception] = []

        def run() -> None:
            try:
                found.append(resolve(self._target, self._rules))
            except Exception as error:  # noqa: BLE001 - raised by whoever waits
                found.append(error)

        self._resolver = threading.Thread(target=run, name="gpuflight-resolve", daemon=True)
        self._resolver.start()
        self._resolver.join(self._deadline.left_s())
        if not found:
            raise TimeoutError("the name was not resolved in time")
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    def _connect(self, address: str, port: int, timeout_s: float) -> _Stream:
        if self._connect_timeout_s is not None:
            timeout_s = min(timeout_s, self._connect_timeout_s)
        # The address that was checked, not the name: it could resolve to another one now.
        return _Stream(self._plain.connect_tcp(address, port, timeout_s), self._deadline)
