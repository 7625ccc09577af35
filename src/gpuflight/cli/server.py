"""``gpuflight-server``: keep this host's graph live, serve it, and deliver every round where it is wanted."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import TYPE_CHECKING, Any

from gpuflight.cli.consume import KINDS, for_consumer, lock_path, make_consumer
from gpuflight.cli.session import add_replay_argument, add_settings_arguments
from gpuflight.errors import GpuflightError, MissingExtra

if TYPE_CHECKING:
    from gpuflight.collectors.base import Collector
    from gpuflight.server.base import ServerBackend
    from gpuflight.server.events.service import EventService
    from gpuflight.settings import Settings

DESCRIPTION = """\
Keep this host's graph live, serve it over HTTP (docs/server.md), and deliver every round to the subscribers.

Listens on loopback only, unless a token is configured (`gpuflight token create`). One instance per user and host runs;
a second one is refused and touches nothing. SIGTERM and Ctrl-C end it: requests under way and deliveries are finished
within server.stop_deadline_s.
"""

EXAMPLES = (
    "gpuflight-server",
    "gpuflight-server --config server.json",
    "gpuflight-server --set server.port=8080 --set interval_s=2",
    "gpuflight-server --consume kafka --config consumer.json",
)


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``gpuflight-server``."""
    from gpuflight import __version__
    from gpuflight.cli import epilog

    parser = argparse.ArgumentParser(
        prog="gpuflight-server",
        description=DESCRIPTION,
        epilog=epilog(EXAMPLES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"gpuflight {__version__}")
    parser.add_argument(
        "--backend",
        metavar="NAME",
        default="uvicorn",
        help="uvicorn serves over HTTP; offline only makes and delivers rounds, without the extra `server`",
    )
    parser.add_argument(
        "--socket",
        metavar="PATH",
        help="also listen on this unix socket (server.socket); with `--set server.host=null` on nothing else",
    )
    parser.add_argument(
        "--consume",
        choices=KINDS,
        help="take the rounds of a fleet from there into MongoDB, and serve the fleet in place of this host; what the"
        " section `consume` of the settings says (docs/fleet.md)",
    )
    add_replay_argument(parser)
    add_settings_arguments(parser)
    return parser


def run_server(argv: Sequence[str]) -> int:
    """Serve until a signal comes. Returns the exit code."""
    from gpuflight.bottlenecks.build import make_engine
    from gpuflight.cli.plugin_settings import effective, make_rules, make_subscribers
    from gpuflight.cli.session import dump_config, load_settings, start_logging

    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.consume and arguments.replay:
        parser.error("--consume: not with --replay, a recording holds no topic")
    settings = load_settings(arguments)
    if arguments.consume:
        settings = for_consumer(settings)
    if arguments.dump_config:
        return dump_config(settings)
    configuration = effective(settings)  # plugins' blocks are checked here
    collectors, disabled = all_collectors(settings, configuration)
    subscribers = make_subscribers(settings)
    rules = make_rules(settings)
    start_logging(settings)
    backend = make_backend(arguments.backend, settings)
    consumer = make_consumer(settings) if arguments.consume else None

    from gpuflight.cli.plugins import every_plugin, probes_folder
    from gpuflight.core.controller import Controller
    from gpuflight.core.lockfile import LockFile, default_lock_path
    from gpuflight.server.fanout import Fanout
    from gpuflight.server.hub import StreamHub
    from gpuflight.server.state import ServerState
    from gpuflight.server.subscriber_manager import SubscriberManager
    from gpuflight.server.tokens import TokenStore
    from gpuflight.sources.open import open_world

    tokens = TokenStore.from_settings(settings.server.auth)
    backend.check(tokens)
    with ExitStack() as stack:
        lock = LockFile(default_lock_path() if consumer is None else lock_path())
        lock.acquire()
        stack.callback(lock.release)
        backend.bind()
        world = open_world(
            replay=arguments.replay, probes=settings.probes.backend, probe_costs=settings.probes.own_cost
        )
        if consumer is not None:
            from gpuflight.server.consume.coverage import ConsumeCoverage

            collectors.append(ConsumeCoverage(consumer))
        members, hub = SubscriberManager.from_settings(settings), StreamHub()
        controller = Controller(
            world, settings=settings, collectors=collectors, subscribers=Fanout(hub, members),
            judge=make_engine(rules, subscribers=members.status),
        )  # fmt: skip
        deadline = Deadline(settings.server.stop_deadline_s)
        stack.callback(lambda: members.close(max(0.5, deadline.left_s())))
        stack.callback(controller.close)
        if consumer is not None:
            stack.callback(lambda: consumer.stop(max(0.5, deadline.left_s())))
        for name in disabled:
            controller.set_enabled(name, False)
        for subscriber in subscribers:
            members.add(subscriber)
        members.restore()
        events = start_events(settings)
        if events is not None:
            stack.callback(lambda: events.stop(max(0.5, deadline.left_s())))
        state = ServerState(
            controller=controller,
            settings=settings,
            subscribers=members,
            hub=hub,
            tokens=tokens,
            configuration=lambda: configuration,
            plugins=lambda: every_plugin(probes_folder(settings)),
            consumer=consumer,
            events=events,
        )

        def ready(where: str) -> None:
            text = f"serving {where}" if where else "making rounds, serving nobody"
            print(f"gpuflight-server: {text}", file=sys.stderr, flush=True)

        stack.enter_context(StopSignals(lambda: backend.stop(deadline.begin())))
        if consumer is not None:
            consumer.start()
        controller.start()
        backend.serve(state, ready)
    return 0


def make_backend(name: str, settings: Settings) -> ServerBackend:
    """The backend of a name. Raises InputError if there is none; MissingExtra, with what can be done without it."""
    from gpuflight.registry import get
    from gpuflight.server.base import ServerBackend

    try:
        backend: ServerBackend = get(ServerBackend, name)(settings)
    except MissingExtra as error:
        raise _Missing(f"{error}; `--backend offline` delivers rounds to subscribers without it") from None
    return backend


class _Missing(GpuflightError):
    exit_code = MissingExtra.exit_code


def all_collectors(settings: Settings, configuration: dict[str, Any]) -> tuple[list[Collector], list[str]]:
    """Every collector with its settings, since any may be switched on later, and the names of those switched off."""
    from gpuflight.cli.plugin_settings import make_collectors, select_collectors

    blocks = configuration["collectors"]
    collectors = make_collectors(select_collectors(settings, list(blocks)))
    return collectors, [name for name, block in blocks.items() if not block["enabled"]]


def start_events(settings: Settings) -> EventService | None:
    """GPU sessions of agents; None where they are not wanted, or (with a line that says so) not possible."""
    import os

    from gpuflight.cli.plugin_settings import make_events
    from gpuflight.server.events.service import EventService
    from gpuflight.subscribers.spool import state_folder

    wanted = make_events(settings)
    if not wanted.enabled:
        return None
    folder = wanted.folder or os.path.join(settings.server.state_folder or state_folder(), "events")
    if wanted.kafka is not None:
        from gpuflight.server.consume.kafka import require

        require()  # who names topics is not served without them
    service = EventService(wanted, folder)
    try:
        service.start()
    except MissingExtra as error:
        print(f"gpuflight-server: no GPU sessions: {error}", file=sys.stderr, flush=True)
        return None
    return service


class Deadline:
    """A time to end in, which runs from ``begin``."""

    def __init__(self, total_s: float) -> None:
        self._total_s = total_s
        self._end_s: float | None = None

    def begin(self) -> float:
        """Start, if it did not; gives the seconds left."""
        if self._end_s is None:
            self._end_s = time.monotonic() + self._total_s
        return self.left_s()

    def left_s(self) -> float:
        """Seconds left; all of them before ``begin``."""
        return self._total_s if self._end_s is None else self._end_s - time.monotonic()


class StopSignals:
    """While entered, the first SIGTERM, SIGINT or SIGHUP calls ``stop``; a second one raises KeyboardInterrupt."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._asked = False
        self._before: list[tuple[signal.Signals, Any]] = []

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup asks for
                    self._before.append((number, signal.signal(number, self._handle)))
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before:
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        self._stop()
