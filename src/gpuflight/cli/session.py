"""What every command that observes shares: its options, its settings, and the opened world under a controller."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gpuflight.errors import ConfigError

if TYPE_CHECKING:
    from gpuflight.bottlenecks.engine import Engine
    from gpuflight.core.controller import Controller
    from gpuflight.settings import Settings
    from gpuflight.subscribers.delivery import SubscriberSet


SCOPED_DEPTH = 2
"""Waves of expansion from processes given by ``--pid``."""


def add_settings_arguments(parser: argparse.ArgumentParser) -> None:
    """``--config``, ``--set``, ``--dump-config``, ``--log-level``."""
    group = parser.add_argument_group("settings", "command line > environment (GPUFLIGHT_…) > file > defaults")
    group.add_argument("--config", metavar="FILE", help="settings as JSON, TOML or YAML")
    group.add_argument(
        "--set",
        metavar="PATH=VALUE",
        action="append",
        default=[],
        help="one setting, e.g. limits.max_nodes=1000; may be given again",
    )
    group.add_argument(
        "--dump-config", action="store_true", help="print the effective settings, secrets masked, and do nothing else"
    )
    group.add_argument("--log-level", choices=("debug", "info", "warning", "error"), help="least severity to log")


def add_replay_argument(parser: argparse._ActionsContainer) -> None:
    """``--replay``."""
    parser.add_argument(
        "--replay", metavar="FILE", help="work on a recording of `gpuflight record`, not on this machine"
    )


def add_observe_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say what is observed, with those of ``add_settings_arguments``."""
    group = parser.add_argument_group("what to observe")
    group.add_argument(
        "--pid",
        metavar="PID",
        type=_pid,
        nargs="+",
        action="extend",
        help="only these processes, what they are connected with, and the hardware",
    )
    group.add_argument(
        "--collectors", metavar="NAMES", help="only these collectors, separated by commas (see `gpuflight plugins`)"
    )
    add_replay_argument(group)
    add_settings_arguments(parser)


def load_settings(arguments: argparse.Namespace) -> Settings:
    """The effective settings of a command. Raises ConfigError."""
    from gpuflight.settings import load
    from gpuflight.settings.load import set_path

    overrides: dict[str, Any] = {}
    for assignment in arguments.set:
        set_path(overrides, assignment)
    if getattr(arguments, "interval", None) is not None:
        set_path(overrides, f"interval_s={arguments.interval}")
    if arguments.log_level is not None:
        set_path(overrides, f"log_level={arguments.log_level}")
    if getattr(arguments, "socket", None) is not None:
        set_path(overrides, f"server.socket={arguments.socket}")
    if getattr(arguments, "pid", None):
        set_path(overrides, f"collectors.static.pids={arguments.pid}")
        for collector in ("process_tree", "sockets", "unix_sockets"):
            set_path(overrides, f"collectors.{collector}.seed_all=false")
    settings = load(arguments.config, overrides)
    if getattr(arguments, "pid", None):
        # One wave finds what the processes are connected with, the next says what that is; further leads everywhere.
        settings.limits.max_depth = min(settings.limits.max_depth, SCOPED_DEPTH)
    if getattr(arguments, "collectors", None) is not None:
        from gpuflight.cli.plugin_settings import select_collectors

        names = [name.strip() for name in arguments.collectors.split(",") if name.strip()]
        if not names:
            raise ConfigError("--collectors: give at least one name")
        settings = select_collectors(settings, names)
    return settings


def dump_config(settings: Settings) -> int:
    """``--dump-config``: print and touch nothing else. Returns the exit code."""
    from gpuflight.cli.output import emit_json
    from gpuflight.cli.plugin_settings import effective

    emit_json(effective(settings))
    return 0


def start_logging(settings: Settings) -> None:
    """Log to stderr from the configured severity on."""
    import logging

    logging.basicConfig(level=settings.log_level.upper(), format="gpuflight: %(levelname)s: %(name)s: %(message)s")


@contextmanager
def open_controller(
    settings: Settings,
    *,
    replay: str | None = None,
    record: str | None = None,
    redact: bool = True,
    force: bool = False,
    subscribers: SubscriberSet | None = None,
    judge: Engine | None = None,
) -> Iterator[Controller]:
    """A controller on this machine or a recording, its collectors and rules made from the settings (unless ``judge`` is
    given); closed at the end."""
    from gpuflight.bottlenecks.build import make_engine
    from gpuflight.cli.plugin_settings import make_collectors, make_rules
    from gpuflight.core.controller import Controller
    from gpuflight.sources.open import open_world

    start_logging(settings)
    collectors = make_collectors(settings)
    if judge is None:
        judge = make_engine(make_rules(settings), subscribers=subscribers.status if subscribers is not None else None)
    world = open_world(
        replay=replay, record=record, redact=redact, force=force,
        probes=settings.probes.backend, probe_costs=settings.probes.own_cost,
    )  # fmt: skip
    controller = Controller(world, settings=settings, collectors=collectors, subscribers=subscribers, judge=judge)
    try:
        yield controller
    except BaseException:
        if record is not None and world.tape is not None:
            world.tape.discard()
        raise
    finally:
        controller.close()


def _pid(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is no process id")
    return value


def positive_seconds(text: str) -> float:
    """An argparse type: seconds, more than 0 and at most a year."""
    value = float(text)
    if not 0 < value <= 366 * 86_400:
        raise argparse.ArgumentTypeError(f"{text}: must be more than 0 seconds, and at most a year")
    return value
