"""``gpuflight agent``: ship GPU Flight logs to an HTTP receiver or Kafka, and copies to S3."""

from __future__ import annotations

import argparse
import signal
import threading
from types import FrameType

from gpuflight.agent.options import ALIASES, BY_FLAG, OPTIONS

DESCRIPTION = """\
Send the logs of GPU Flight's client, of every version, to a receiver: gpuflight-server, GPU Flight's own backend, or
Kafka (--type=kafka --brokers=HOST:9092). Takes the flags, environment variables, configuration file and positions of
gpufl-agent. Over HTTP a finished window goes as the file it is, to Kafka each line as it is written. Nothing counts as
delivered without proof, and nothing is deleted unless it is asked for.

A flag goes before the file of --config, and that before the environment. Secrets are better given in a file or in the
environment: a command line is seen by everybody on the machine.
"""

EXAMPLES = (
    "gpuflight agent --folder=logs --type=http --url=https://gpuflight.example.com --token-file=token --exit-if-empty",
    "gpuflight agent --config=agent.json --exit-when-drained",
)

EXIT_CODES = "of this command also: 1 something was not delivered and will not be · 3 ended before everything was sent"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--config", metavar="FILE", help="configuration file of gpufl-agent (JSON; TOML and YAML too)")
    aliases: dict[str, list[str]] = {}
    for alias, flag in ALIASES.items():
        aliases.setdefault(flag, []).append(f"--{alias}")
    for option in OPTIONS:
        names = [f"--{option.flag}", *aliases.get(option.flag, [])]
        text = f"{option.help}; ${option.variable}".replace("%", "%%")
        if option.kind == "switch":
            parser.add_argument(*names, dest=option.flag, nargs="?", const="true", metavar="true|false", help=text)
        else:
            parser.add_argument(*names, dest=option.flag, metavar="VALUE", help=text)
    parser.add_argument("--json", action="store_true", help="at the end print what was sent as JSON")
    parser.add_argument("--verbose", action="store_true", help="say more")
    parser.epilog = f"{parser.epilog}\n{EXIT_CODES}"


def run(arguments: argparse.Namespace) -> int:
    """Ship until told to end, or until all is done."""
    import logging
    import sys

    import msgspec

    from gpuflight.agent.options import make_settings
    from gpuflight.agent.secrets import hide_arguments
    from gpuflight.cli.output import emit_json, say

    given = vars(arguments)
    flags = {flag: given[flag] for flag in BY_FLAG if given.get(flag) is not None}
    exposed = {flag: flags[flag] for flag in flags if BY_FLAG[flag].kind == "secret" and flags[flag]}
    hidden = hide_arguments(exposed.values())
    for flag in exposed:
        more = "" if hidden else ", and it still stands there"
        better = f"use --{flag}-file or ${BY_FLAG[flag].variable}"
        say(f"--{flag}: everybody on this machine could read it in the command line{more}; {better}")
    settings = make_settings(flags, config=arguments.config)

    from gpuflight.agent.agent import make_agent

    level = logging.DEBUG if arguments.verbose else logging.INFO
    logging.basicConfig(level=level, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    for noisy in ("httpcore", "botocore", "urllib3", "watchfiles"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    stop = threading.Event()

    def end(number: int, _frame: FrameType | None) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)  # a second one ends it at once

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    agent = make_agent(settings)
    try:
        code = agent.run(stop)
    finally:
        agent.close()
    if arguments.json:
        emit_json({**msgspec.to_builtins(agent.totals.counts), "exit_code": code})
    return code
