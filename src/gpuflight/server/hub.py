"""The live stream: every round, encoded once, to any number of clients, none of which can hold up another.

A client has a bounded queue of references to shared bytes. One that does not keep up loses its queue and gets all that
changed meanwhile as one difference instead (it is *coalesced*), as does one that comes again; where the history does
not reach so far back, or that would be no less, it gets the newest graph whole. One to which nothing could be sent for
``stall_s`` is closed.

The core's thread calls ``publish``, which never waits; everything else happens in the server's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal, Protocol

from msgspec.structs import replace

from gpuflight.graph.diff import merge_diffs
from gpuflight.round_codec import encode_round, encode_round_diff
from gpuflight.rounds import Round
from gpuflight.server.hub_events import HEARTBEAT, Event, Heartbeat

log = logging.getLogger(__name__)

TOO_SLOW = "too slow: nothing could be sent for a while"
STOPPING = "the server is stopping"


class PastRounds(Protocol):
    """What the hub needs of ``core.history.History``."""

    def rounds(self, first: int, last: int) -> list[Round]:
        """The rounds kept of these numbers, oldest first, with their differences."""


class StreamClient:
    """One reader of the stream. ``async for`` gives Events and HEARTBEATs until ``reason`` says why it ended.

    The reader wraps each send in ``sending``/``sent`` so that the hub sees one that stands still. ``abort`` is called
    when it must end at once.
    """

    def __init__(self, hub: StreamHub, position: int, abort: Callable[[], None] | None) -> None:
        self.reason = ""
        self.position = position
        """Number of the round that the client was given last."""
        self._tail = position
        """Number of the round that it has once its queue is empty."""
        self.coalesced_count = 0
        self.aborted = False
        self._hub = hub
        self._abort = abort
        self._queue: deque[Event] = deque()
        self._behind = False
        self._beat = False
        self._waiter: asyncio.Future[None] | None = None
        self._sending_since_s: float | None = None
        self._close_at_s = 0.0
        self._idle_since_s = hub.now_s()
        self._holds = False
        """Whether it has the state of the round at ``position``, so that a difference from there leads on."""

    def __aiter__(self) -> AsyncIterator[Event | Heartbeat]:
        return self

    async def __anext__(self) -> Event | Heartbeat:
        while True:
            if self.reason:
                raise StopAsyncIteration
            if self._behind:
                event = await self._hub.catch_up(self.position, self._holds)
                if self.reason:
                    continue
                if event is not None:
                    self.position = self._tail = event.number
                    self._holds = True
                    self._behind = not self._hub.is_newest(event.number)
                    return event
            elif self._queue:
                event = self._queue.popleft()
                self.position = event.number
                return event
            if self._beat:
                self._beat = False
                return HEARTBEAT
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def takes(self, number: int) -> bool:
        """Whether the difference that leads to this round is of use here."""
        return not self._behind and not self.reason and number == self._tail + 1

    def sending(self) -> None:
        """A send begins."""
        self._sending_since_s = self._hub.now_s()

    def sent(self) -> None:
        """The send is done."""
        self._sending_since_s = None
        self._idle_since_s = self._hub.now_s()

    def close(self, reason: str) -> None:
        """End the iteration; the first reason stays."""
        if not self.reason:
            self.reason = reason
            self._close_at_s = self._hub.now_s()
            self._queue.clear()
            self._wake()

    def _push(self, number: int, event: Event | None) -> None:
        """The newest round; without event if no difference leads to it from the round before."""
        if number <= self._tail:
            return
        if self._behind:
            self._wake()
            return
        if event is None or number != self._tail + 1:
            self._fall_behind()
        elif len(self._queue) >= self._hub.queue_events:
            self.coalesced_count += 1
            self._hub.coalesced_count += 1
            self._fall_behind()
        else:
            self._queue.append(event)
            self._tail = number
        self._wake()

    def _fall_behind(self) -> None:
        self._queue.clear()
        self._behind = True

    def _tick(self, now_s: float) -> None:
        hub = self._hub
        if self.reason:
            if now_s - self._close_at_s >= hub.grace_s and self._abort is not None:
                abort, self._abort = self._abort, None
                self.aborted = True
                hub.aborted_count += 1
                abort()
            return
        if self._sending_since_s is not None:
            if now_s - self._sending_since_s >= hub.stall_s:
                self.close(TOO_SLOW)
        elif now_s - self._idle_since_s >= hub.heartbeat_s:
            self._beat = True
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class StreamHub:
    """Publisher of rounds to stream clients.

    Event ids are ``NUMBER-INSTANCE``: the number of the round, and a word that is new in each process, because the
    process after this one counts its rounds from 1 again.
    """

    def __init__(
        self,
        *,
        queue_events: int = 8,
        max_clients: int = 1000,
        heartbeat_s: float = 15.0,
        stall_s: float = 30.0,
        grace_s: float = 2.0,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.instance = secrets.token_hex(4)
        self.queue_events = queue_events
        self.max_clients = max_clients
        self.heartbeat_s = heartbeat_s
        self.stall_s = stall_s
        self.grace_s = grace_s
        self.now_s = now_s
        self.events_count = 0
        self.coalesced_count = 0
        self.merged_count = 0
        self.aborted_count = 0
        self.closed_counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        # Under the lock: shared with the core's thread.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._clients: set[StreamClient] = set()
        self._inbox: deque[tuple[Round, bool]] = deque()
        self._scheduled = False
        self._last = (0, 0, 0)
        self._closed = False
        # Only in the loop.
        self._newest: Round | None = None
        self._newest_graph: Event | None = None
        self._history: PastRounds | None = None
        self._merged: dict[tuple[int, int], asyncio.Task[Event | None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def clients_count(self) -> int:
        """How many clients are connected."""
        return len(self._clients)

    def statistics(self) -> dict[str, Any]:
        """What happened so far, for ``/metrics``: all counters but ``clients``."""
        return {
            "clients": len(self._clients),
            "events": self.events_count,
            "coalesced": self.coalesced_count,
            "merged": self.merged_count,
            "aborted": self.aborted_count,
            "closed": dict(self.closed_counts),
        }

    def publish(self, done: Round, /) -> None:
        """Take over a round. Never blocks, encodes nothing; from any thread."""
        counts = done.diff.counts()
        nodes_count, edges_count = len(done.graph.nodes), len(done.graph.edges)
        with self._lock:
            number, old_nodes, old_edges = self._last
            # After ``Controller.clear`` a difference is one to the empty graph: it does not lead on.
            follows = (
                done.number == number + 1
                and old_nodes + counts["nodes_added"] - counts["nodes_removed"] == nodes_count
                and old_edges + counts["edges_added"] - counts["edges_removed"] == edges_count
            )
            self._last = (done.number, nodes_count, edges_count)
            if not self._clients or self._closed or self._loop is None:
                return
            if len(self._inbox) >= self.queue_events:  # the loop stands still: what it missed comes as a whole graph
                self._inbox.clear()
                follows = False
            self._inbox.append((done, follows))
            if self._scheduled:
                return
            try:
                self._loop.call_soon_threadsafe(self._deliver)
                self._scheduled = True
            except RuntimeError:  # the loop was closed
                self._inbox.clear()

    def attach(
        self,
        latest: Round | None,
        *,
        last_event_id: str | None = None,
        history: PastRounds | None = None,
        abort: Callable[[], None] | None = None,
    ) -> StreamClient | None:
        """A new client, in the event loop; None if there are too many or the server is stopping.

        ``latest`` is the newest round. With the id of an event of this process, the client starts after it if
        ``history`` has that round; else with the newest graph. ``detach`` must follow in any case.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._closed or len(self._clients) >= self.max_clients:
                return None
            if self._loop is not loop:
                self._loop, self._scheduled = loop, False
            client = StreamClient(self, latest.number if latest is not None else self._last[0], abort)
            self._clients.add(client)
        if latest is not None and (self._newest is None or self._newest.number < latest.number):
            self._newest, self._newest_graph = latest, None
        self._history = history
        since = self._number_of(last_event_id)
        if latest is None:
            client._fall_behind()
        elif since is None or since > latest.number:
            client.position = -1
            client._fall_behind()
        else:
            client.position, client._holds = since, True
            if since < latest.number:
                client._fall_behind()
        if self._timer is None:
            self._timer = loop.call_later(self._tick_s, self._on_timer)
        return client

    def detach(self, client: StreamClient) -> None:
        """Forget a client: the one place where they go, however they ended. May be called twice."""
        with self._lock:
            if client not in self._clients:
                return
            self._clients.discard(client)
            self.closed_counts[client.reason or "client went away"] += 1
            if self._clients:
                return
            self._inbox.clear()
        self._newest = self._newest_graph = self._history = None
        self._merged.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self, reason: str = STOPPING) -> None:
        """End every stream and take no more; from any thread. To be called before the server stops: it waits for its
        connections. May be called twice."""
        with self._lock:
            self._closed = True
            loop = self._loop
        if loop is not None:
            try:
                loop.call_soon_threadsafe(self._close_all, reason)
            except RuntimeError:
                pass

    def tick(self) -> None:
        """Heartbeats for the idle, an end for those who stand still; the hub's timer calls it."""
        now_s = self.now_s()
        for client in list(self._clients):
            client._tick(now_s)

    def is_newest(self, number: int) -> bool:
        """Whether there is no round after this one."""
        return self._newest is None or self._newest.number <= number

    async def catch_up(self, position: int, holds: bool) -> Event | None:
        """What leads to the newest round from round ``position``, made once for all who come from there; None if that
        is the newest. ``holds``: whether the client has that round, else it needs the graph."""
        newest = self._newest
        if newest is None or newest.number <= position:
            return None
        if holds:
            way = (position, newest.number)
            task = self._merged.get(way)
            if task is None:
                task = self._merged[way] = asyncio.create_task(self._merge(position, newest))
            event = await asyncio.shield(task)  # shared: it goes on if this client goes
            if event is not None:
                return event
        return self.newest_graph(position)

    def newest_graph(self, after: int) -> Event | None:
        """The newest round whole, if its number is above ``after``."""
        newest = self._newest
        if newest is None or newest.number <= after:
            return None
        if self._newest_graph is None or self._newest_graph.number != newest.number:
            self._newest_graph = self._event(newest.number, "graph", encode_round(newest))
        return self._newest_graph

    @property
    def _tick_s(self) -> float:
        return max(0.05, min(self.heartbeat_s / 3, self.stall_s / 3, self.grace_s))

    def _on_timer(self) -> None:
        self.tick()
        self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._on_timer)

    def _close_all(self, reason: str) -> None:
        for client in list(self._clients):
            client.close(reason)

    def _deliver(self) -> None:
        with self._lock:
            self._scheduled = False
            arrived = list(self._inbox)
            self._inbox.clear()
            clients = list(self._clients)
        for done, follows in arrived:
            if self._newest is None or done.number > self._newest.number:
                self._newest, self._newest_graph = done, None
                self._merged.clear()
            event = None
            if follows and any(client.takes(done.number) for client in clients):
                event = self._event(done.number, "diff", encode_round_diff(done))
            for client in clients:
                client._push(done.number, event)

    async def _merge(self, since: int, latest: Round) -> Event | None:
        """What changed from a past round to a newer one; None if it is not known, or no less than the graph."""
        history = self._history

        def work() -> bytes | None:
            past = history.rounds(since, latest.number) if history is not None else []
            if [done.number for done in past] != list(range(since, latest.number + 1)):
                return None
            merged = merge_diffs(*(done.diff for done in past[1:]))
            if sum(merged.counts().values()) > len(latest.graph.nodes) + len(latest.graph.edges):
                return None
            return encode_round_diff(replace(latest, diff=merged))

        try:
            data = await asyncio.to_thread(work)
        except Exception:
            log.exception("differences could not be put together; clients get the whole graph")
            return None
        if data is None:
            return None
        self.merged_count += 1
        return self._event(latest.number, "diff", data)

    def _number_of(self, event_id: str | None) -> int | None:
        number, _, instance = (event_id or "").strip().partition("-")
        if instance != self.instance or not number.isascii() or not number.isdigit() or len(number) > 18:
            return None
        return int(number)

    def _event(self, number: int, name: Literal["graph", "diff"], data: bytes) -> Event:
        self.events_count += 1
        return Event(number, name, f"{number}-{self.instance}", data)
