"""The REST server: FastAPI on uvicorn. Needs the extra ``server``; nothing of it is imported before it is made."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from gpuflight.errors import ConfigError, MissingExtra
from gpuflight.server.base import ServerBackend
from gpuflight.server.listeners import BACKLOG, UnixListener, check_path, listen_tcp
from gpuflight.server.peers import PeerRoles

if TYPE_CHECKING:
    import uvicorn

    from gpuflight.server.state import ServerState
    from gpuflight.server.tokens import TokenStore

_PACKAGES = ("fastapi", "uvicorn", "httptools", "websockets")
_KEEP_ALIVE_S = 75
_OWN_DESCRIPTORS = 256
"""Descriptors that stay for the rounds: sources, subscribers, spools."""
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
        self._tcp: socket.socket | None = None
        self._unix: UnixListener | None = None
        self._server: uvicorn.Server | None = None
        self._state: ServerState | None = None
        self._asked = False

    def check(self, tokens: TokenStore) -> None:
        from gpuflight.server.hosts import check_bind

        server = self.settings.server
        if server.host is None and server.socket is None:
            raise ConfigError("server.host and server.socket are both null: there is nothing to listen on")
        if server.socket is not None:
            check_path(server.socket)
        PeerRoles(server)  # unknown names
        check_bind(server, tokens)
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
            if server.host is not None:
                self._tcp = listen_tcp(server.host, server.port)
            if server.socket is not None:
                self._unix = UnixListener(server.socket, for_others=PeerRoles(server).for_others)
        except BaseException:
            self._close()
            raise

    def _close(self) -> None:
        for listener in (self._unix, self._tcp):
            if listener is not None:
                listener.close()
        self._tcp = self._unix = None

    def serve(self, state: ServerState, ready: Callable[[str], None] = lambda where: None) -> None:
        import uvicorn

        from gpuflight.server.app import create_app
        from gpuflight.server.transport import ConnectionLimits, HttpProtocol, WebSocketProtocol

        if self._tcp is None and self._unix is None:
            self.bind()
        settings = self.settings.server

        class Protocol(HttpProtocol):
            limits = ConnectionLimits(
                connections=connections_limit(settings.max_connections),
                request_s=settings.request_timeout_s,
                send_s=settings.send_timeout_s,
            )

        config = uvicorn.Config(
            create_app(state),
            http=Protocol,
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
        where = []
        if self._tcp is not None:
            where.append(f"{'https' if settings.tls else 'http'}://{_address_text(self._tcp)}")
        if self._unix is not None:
            where.append(f"unix:{self._unix.path}")
        self._state = state
        unix = self._unix.socket if self._unix is not None else None
        self._server = server = _server_class()(config, lambda: ready(" and ".join(where)), state, unix)
        try:
            if not self._asked:
                server.run(sockets=[self._tcp] if self._tcp is not None else [])
        finally:
            self._server = None
            self._close()

    def stop(self, deadline_s: float) -> None:
        self._asked = True
        server, state = self._server, self._state
        if state is not None:
            state.stopping = True
        if server is not None:
            server.config.timeout_graceful_shutdown = max(1, int(deadline_s - _ABORT_S))
            server.should_exit = True


def connections_limit(wanted: int) -> int:
    """As many connections as are wanted, less if the process may not open so many descriptors: one that clients took
    all of them from could not read its own machine any more."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if allowed == resource.RLIM_INFINITY else max(1, min(wanted, allowed - _OWN_DESCRIPTORS))


def _server_class() -> Any:
    import uvicorn

    class Server(uvicorn.Server):
        """uvicorn's, with the signals left to us, and a word when it answers."""

        def __init__(
            self, config: uvicorn.Config, ready: Callable[[], None], state: ServerState, unix: socket.socket | None
        ) -> None:
            super().__init__(config)
            self._unix = unix
            self._ready = ready
            self._state = state

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Nothing: uvicorn would end the process by the signal it got, before anything is put away."""
            yield

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            """Begin to answer."""
            await super().startup(sockets)
            if self._unix is not None:  # not among ``sockets``: those get the TLS of the address
                make = self.config.http_protocol_class
                loop = asyncio.get_running_loop()
                self.servers.append(
                    await loop.create_unix_server(
                        lambda: make(  # type: ignore[call-arg]
                            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
                        ),
                        sock=self._unix,
                        backlog=BACKLOG,
                    )
                )
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
