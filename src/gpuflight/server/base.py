"""What a server backend is: it serves a controller's rounds until it is told to stop.

``gpuflight-server`` calls, in this order: the constructor, ``check``, ``bind``, ``serve``; and ``stop`` from a signal.
Before ``bind`` nothing of the machine may be touched: another instance may be the one that runs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpuflight.registry import Plugin

if TYPE_CHECKING:
    from gpuflight.server.state import ServerState
    from gpuflight.server.tokens import TokenStore


class ServerBackend(Plugin, family="server_backends", package="gpuflight.server.backends"):
    """Base of every server backend. One that misses a package says so with MissingExtra when it is made.

    ``settings`` are all settings (``gpuflight.settings.Settings``).
    """

    def __init__(self, settings: Any = None) -> None:
        self.settings = settings

    def check(self, tokens: TokenStore) -> None:
        """Refuse settings that cannot or must not be served. Raises ConfigError."""

    def bind(self) -> None:
        """Take what ``serve`` needs of the machine, such as a port. Raises OSError."""

    @abstractmethod
    def serve(self, state: ServerState, ready: Callable[[str], None] = lambda where: None) -> None:
        """Serve until ``stop``; returns when everything under way has ended. ``ready`` is called once requests are
        answered, with where that is."""

    @abstractmethod
    def stop(self, deadline_s: float) -> None:
        """End ``serve`` within so many seconds, from any thread or a signal handler. May be called twice and without
        ``serve``."""
