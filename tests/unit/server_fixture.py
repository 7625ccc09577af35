"""A server around a controller with collectors made for the test: no socket, no thread, rounds on demand."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from fastapi.testclient import TestClient
from tests.unit.test_core_controller import FakeWorld, Seeder

from gpuflight.bottlenecks.build import make_engine
from gpuflight.bottlenecks.settings import RulesSettings
from gpuflight.core.controller import Controller
from gpuflight.graph import edges, nodes
from gpuflight.server.app import create_app
from gpuflight.server.hub import StreamHub
from gpuflight.server.state import ServerState
from gpuflight.server.subscriber_manager import SubscriberManager
from gpuflight.server.tokens import TokenStore
from gpuflight.settings import Settings

LOOPBACK = ("127.0.0.1", 50_000)

ONE = nodes.Process(pid=1, start=10, attributes={"name": "init"}, metrics={"cpu_pct": 1.5, "rss_bytes": 4096})
TWO = nodes.Process(pid=2, start=20, attributes={"name": "train"}, metrics={"cpu_pct": 99.0})
FOREIGN = nodes.Process(pid=1, start=10, ns="node-7", attributes={"name": "init"})
HOST = nodes.Host(hostname="box")
LOST = nodes.GPU(
    uuid="GPU-0", attributes={"name": "H200", "index": 0, "state": "lost"}, unknown={"sm_util_pct": "GPU is lost"}
)
BUSY = nodes.GPU(uuid="GPU-1", attributes={"name": "H200", "index": 1}, metrics={"sm_util_pct": 50})


class Served:
    """``client`` talks from the loopback interface as admin; ``seeder`` decides what the next round finds."""

    def __init__(self, *found: Any, links: Any = (), events: Any = None, judged: bool = True, **changes: Any) -> None:
        self.seeder = Seeder(*found, links=links, name="process_tree")
        settings = Settings(interval_s=3600, tombstone_rounds=0, **changes)
        self.subscribers = SubscriberManager()
        world: Any = FakeWorld()
        self.clock = world.clock
        self.controller = Controller(
            world, settings=settings, collectors=[self.seeder], subscribers=self.subscribers,
            judge=make_engine(RulesSettings(enabled=judged), subscribers=self.subscribers.status),
        )  # fmt: skip
        self.state = ServerState(
            controller=self.controller,
            settings=settings,
            subscribers=self.subscribers,
            tokens=TokenStore(),
            hub=StreamHub(),
            plugins=lambda: {"collectors": []},
            events=events,
        )
        self.client = TestClient(
            create_app(self.state),
            base_url="http://127.0.0.1",
            client=LOOPBACK,
            follow_redirects=False,
            raise_server_exceptions=False,
        )

    def round(self, *found: Any) -> int:
        """One more round; with ``found``, of these entities."""
        if found:
            self.seeder.found = list(found)
            ids = {entity.id for entity in found}
            self.seeder.links = [link for link in self.seeder.links if {link.source, link.target} <= ids]
        self.clock.advance(5)
        return self.controller.run_round().number

    def get(self, path: str, status: int = 200, **headers: str) -> Any:
        """GET; the answer must have the status. Names of headers with ``_`` for ``-``."""
        return self.send("GET", path, status, **headers)

    def send(self, method: str, path: str, status: int = 200, body: Any = None, **headers: str) -> Any:
        """Any request, as ``get``."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = self.client.request(method, path, headers=sent, json=body)
        assert answer.status_code == status, answer.text[:1000]
        return answer

    def error(self, method: str, path: str, status: int) -> dict[str, Any]:
        """A request that must fail in the one shape; gives what is under ``error``."""
        answer = self.send(method, path, status).json()
        assert list(answer) == ["error"] and list(answer["error"]) == ["code", "message", "detail"]
        found: dict[str, Any] = answer["error"]
        return found

    def __enter__(self) -> Served:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.controller.close()
        self.subscribers.close()


def small(events: Any = None) -> Served:
    """Three processes (one of another host), a host, two GPUs of which one is lost; two rounds."""
    served = Served(
        ONE,
        TWO,
        FOREIGN,
        HOST,
        LOST,
        BUSY,
        links=[edges.Own(ONE.id, TWO.id), edges.Own(HOST.id, ONE.id)],
        events=events,
    )
    served.round()
    served.round()
    return served
