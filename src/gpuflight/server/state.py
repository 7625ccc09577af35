"""What all requests share."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpuflight.server.bodies import BodyCache
from gpuflight.server.kept import Kept
from gpuflight.server.repeats import Repeats

if TYPE_CHECKING:
    from gpuflight.core.controller import Controller
    from gpuflight.graph import Graph
    from gpuflight.rounds import Round
    from gpuflight.settings import Settings


class ServerState:
    """Everything that a route works with; at ``app.state.gpuflight``, and by ``deps.state`` in a route.

    ``configuration`` gives the effective configuration, secrets masked, and ``plugins`` every plugin by family; both
    come from the layer above, which knows all families. ``instance_id`` is new in each process: it tells an ETag or an
    event of this process from one of the process before, whose rounds had the same numbers.
    """

    def __init__(
        self,
        *,
        controller: Controller,
        settings: Settings,
        subscribers: Any = None,
        hub: Any = None,
        tokens: Any = None,
        bodies: BodyCache | None = None,
        configuration: Callable[[], dict[str, Any]] | None = None,
        plugins: Callable[[], dict[str, Any]] | None = None,
        consumer: Any = None,
        events: Any = None,
    ) -> None:
        self.controller = controller
        self.settings = settings
        self.subscribers = subscribers
        self.hub = hub
        self.tokens = tokens
        self.bodies = bodies if bodies is not None else BodyCache()
        self.configuration = configuration
        self.plugins = plugins
        self.consumer = consumer
        self.events = events
        self.past: Kept[int, Round | None] = Kept(4)
        """Past rounds asked for last: each is put together from differences."""
        self.parts: Kept[tuple[int, str], Graph] = Kept(4)
        """Selected parts of graphs, by round and selection: a client reads one page by page."""
        self.repeats = Repeats()
        self.instance_id = secrets.token_hex(6)
        self.started_s = time.monotonic()
        self.stopping = False
        self.waiting: Any = None  # limiter of requests that wait for a round; belongs to the event loop

    def clear_bodies(self) -> None:
        """Forget what was made of past rounds."""
        self.bodies.clear()
        self.past.clear()
        self.parts.clear()
