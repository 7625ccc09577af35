"""Whole instances in one process that pull each other: collectors, core, server; only the network is missing.

with Instances(a=["b"], b=["a"]) as net:
    net.round()
    net["a"].graph
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from fastapi.testclient import TestClient
from tests.fakes.machine import FakeMachine, rich_machine

from gpuflight.collectors.host import Host
from gpuflight.collectors.process_tree import ProcessTree
from gpuflight.collectors.remote import Remote, RemoteSettings
from gpuflight.collectors.static import Static, StaticSettings
from gpuflight.core.controller import Controller
from gpuflight.graph import Graph
from gpuflight.server.app import create_app
from gpuflight.server.hub import StreamHub
from gpuflight.server.state import ServerState
from gpuflight.server.subscriber_manager import SubscriberManager
from gpuflight.server.tokens import TokenStore
from gpuflight.settings import Settings
from gpuflight.sources.http import Answer, Request


class _NoThreads:
    """In place of the pool: peers are asked when the test says so."""

    def stop(self, timeout_s: float) -> None:
        """Nothing to stop."""


class Wires:
    """In place of the HTTP source of one instance: it reaches the others by name."""

    replaying = recording = False

    def __init__(self, net: Instances) -> None:
        self._net = net

    def get(self, request: Request) -> Answer:
        """Ask the instance that the URL names; one that is dead refuses."""
        name, _, path = request.url.partition("://")[2].partition("/")
        instance = self._net[name]
        if not instance.alive:
            return Answer(request.url, error="Connection refused")
        headers = {"if-none-match": request.etag} if request.etag else {}
        sent_ns = time.time_ns()
        got = instance.client.get(f"/{path}?{request.query}" if request.query else f"/{path}", headers=headers)
        return Answer(request.url, got.status_code, dict(got.headers), got.content, sent_ns, time.time_ns())

    def close(self) -> None:
        """Nothing is open."""


class Instance:
    """One of them. ``alive``: whether it answers and makes rounds."""

    def __init__(self, net: Instances, name: str, pulls: list[str], options: dict[str, Any]) -> None:
        files = rich_machine()
        files.write("/proc/sys/kernel/hostname", name + "\n")
        files.write("/etc/machine-id", f"m-{name}\n")
        files.write("/proc/sys/kernel/random/boot_id", f"b-{name}\n")
        self.machine = FakeMachine(files)
        self.machine.world.http = Wires(net)  # type: ignore[assignment]
        peers = [{"url": f"http://{peer}", "name": peer} for peer in pulls]
        self.remote = Remote(RemoteSettings.model_validate({"peers": peers, **options}))
        self.remote._pool = _NoThreads()  # type: ignore[assignment]
        self.alive = True
        settings = Settings(interval_s=3600, tombstone_rounds=0)
        subscribers = SubscriberManager()
        collectors = [self.remote, Host(), ProcessTree(), Static(StaticSettings(pids=[1]))]
        self.controller = Controller(
            self.machine.world, settings=settings, collectors=collectors, subscribers=subscribers
        )
        state = ServerState(
            controller=self.controller, settings=settings, subscribers=subscribers, tokens=TokenStore(), hub=StreamHub()
        )
        self.client = TestClient(create_app(state), base_url="http://127.0.0.1", client=("127.0.0.1", 50_000))

    @property
    def graph(self) -> Graph:
        """Of its newest round."""
        assert self.controller.latest is not None
        return self.controller.latest.graph

    @property
    def hosts(self) -> list[str]:
        """The machines in it, each as often as it is drawn."""
        return sorted(entity.hostname for entity in self.graph if entity.kind == "Host")

    def round(self) -> None:
        """Ask all peers, then make a round."""
        self.machine.clock.advance(1.0)
        if self.remote._own is not None:
            for peer in self.remote._peers:
                peer.poll(self.machine.world.http, self.remote._own)
        self.controller.run_round()


class Instances:
    """Instances by name, each with the names of those that it pulls."""

    def __init__(self, options: dict[str, Any] | None = None, **pulls: list[str]) -> None:
        self._all = {name: Instance(self, name, peers, options or {}) for name, peers in pulls.items()}

    def __getitem__(self, name: str) -> Instance:
        return self._all[name]

    def __iter__(self) -> Any:
        return iter(self._all.values())

    def round(self, times: int = 1) -> None:
        """A round of each that lives, in their order."""
        for _ in range(times):
            for instance in self:
                if instance.alive:
                    instance.round()

    def __enter__(self) -> Instances:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for instance in self:
            instance.controller.close()
