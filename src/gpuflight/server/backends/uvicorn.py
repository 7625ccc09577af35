"""The REST server: FastAPI on uvicorn. Needs the extra ``server``; nothing of it is imported before it is made."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from gpuflight.errors import ConfigError, MissingExtra
from gpuflight.server.base import ServerBackend

if TYPE_CHECKING:
    import uvicorn

    from gpuflight.server.state import ServerState
    from gpuflight.server.tokens import TokenStore

_PACKAGES = ("fastapi", "uvicorn", "httptools", "websockets")
_BACKLOG = 2048
_KEEP_ALIVE_S = 75
_WEBSOCKET_BYTES = 64 * 1024
"""Largest message of a client, none of which is read."""
_ABORT_S = 1.0
"""Part of the deadline that is kept for ending what did not end by itself."""


class Uvicorn(ServerBackend):
    """Serves the REST API, live streams and metrics over HTTP"""

    stability = "stable"

    def __init__(self, settings: Any = None) -> None:
        super().__init__(settings)
        for package in _PACKAGES:
            if find_spec(package) is None:
                raise MissingExtra(package, "server", "serving over HTTP")
        self._socket: socket.socket | None = None
        self._server: uvicorn.Server | None = None
        self._state: ServerState | None = None
        self._asked = False

    def check(self, tokens: TokenStore) -> None:
        from gpuflight.server.hosts import check_bind

        check_bind(self.settings.server, tokens)
        tls = self.settings.server.tls
        if tls is not None:
            import ssl

            try:
                ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(tls.certificate_file, tls.key_file)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(
                    f"server.tls: {tls.certificate_file} and {tls.key_file} cannot be used: {error}"
                ) from None

    def bind(self) -> None:
        server = self.settings.server
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
        except socket.gaierror as error:
            raise ConfigError(f"server.host: {server.host}: {error.strerror}") from None
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise OSError(error.errno, error.strerror, f"{server.host}:{server.port}") from None
        listener.setblocking(False)
        self._socket = listener

    def serve(self, state: ServerState, ready: Callable[[str], None] = lambda where: None) -> None:
        import uvicorn

        from gpuflight.server.app import create_app
        from gpuflight.server.transport import HttpProtocol, WebSocketProtocol

        if self._socket is None:
            self.bind()
        listener = self._socket
        assert listener is not None  # noqa: S101 - bind gave one or raised
        settings = self.settings.server
        config = uvicorn.Config(
            create_app(state),
            http=HttpProtocol,
            ws=WebSocketProtocol,
            ws_per_message_deflate=False,  # a message is encoded once for all, not compressed for each
            ws_max_size=_WEBSOCKET_BYTES,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # who asks is who connected, whatever a header says
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, int(settings.stop_deadline_s - _ABORT_S)),
            ssl_certfile=settings.tls.certificate_file if settings.tls else None,
            ssl_keyfile=settings.tls.key_file if settings.tls else None,
        )
        where = f"{'https' if settings.tls else 'http'}://{_address_text(listener)}"
        self._state = state
        self._server = server = _server_class()(config, lambda: ready(where), state)
        try:
            if not self._asked:
                server.run(sockets=[listener])
        finally:
            self._server = self._socket = None
            listener.close()

    def stop(self, deadline_s: float) -> None:
        self._asked = True
        server, state = self._server, self._state
        if state is not None:
            state.stopping = True
        if server is not None:
            server.config.timeout_graceful_shutdown = max(1, int(deadline_s - _ABORT_S))
            server.should_exit = True


def _server_class() -> Any:
    import uvicorn

    class Server(uvicorn.Server):
        """uvicorn's, with the signals left to us, and a word when it answers."""

        def __init__(self, config: uvicorn.Config, ready: Callable[[], None], state: ServerState) -> None:
            super().__init__(config)
            self._ready = ready
            self._state = state

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Nothing: uvicorn would end the process by the signal it got, before anything is put away."""
            yield

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            """Begin to answer."""
            await super().startup(sockets)
            if self.started:
                self._ready()

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            """End the streams, which would not end by themselves, then wait for what is under way."""
            if self._state.hub is not None:
                self._state.hub.close()  # here and not in ``stop``: a signal handler must not wait for a lock
            await super().shutdown(sockets)

    return Server


def _address_text(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
