"""What a server backend is: it serves a controller's rounds until it is told to stop."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from gpuflight.registry import Plugin

if TYPE_CHECKING:
    from gpuflight.core.controller import Controller


class ServerBackend(Plugin, family="server_backends", package="gpuflight.server"):
    """Base of every server backend. One that misses a package says so with MissingExtra when it is made."""

    def __init__(self, settings: Any = None) -> None:
        self.settings = settings

    @abstractmethod
    def serve(self, controller: Controller) -> None:
        """Serve until ``stop``; returns when everything under way has ended."""

    @abstractmethod
    def stop(self, deadline_s: float) -> None:
        """End ``serve`` within so many seconds, from any thread. May be called twice and without ``serve``."""
