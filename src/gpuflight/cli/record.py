"""``gpuflight record``: save what every source answers, so that it can be replayed elsewhere."""

from __future__ import annotations

import argparse

from gpuflight.cli.session import add_observe_arguments, positive_seconds

DESCRIPTION = """\
Record this machine: every answer of /proc, /sys, netlink, NVML and tools over some rounds, as one file.

Any command works on it with --replay, on any machine. Secrets in command lines are replaced, and of environments only
harmless variables kept, before anything is written; --no-redact keeps all. It is a tar file: look into it with
`tar --zstd -xf` before you hand it on.
"""

EXAMPLES = (
    "gpuflight record machine.tar.zst",
    "gpuflight record longer.tar.zst --seconds 10 --interval 2",
    "gpuflight record rounds.tar.zst --rounds 3 --interval 1 --json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("out", metavar="OUT", help="the file to write, usually *.tar.zst")
    parser.add_argument("--seconds", metavar="SECONDS", type=positive_seconds, help="how long to record")
    parser.add_argument("--rounds", metavar="N", type=_count, help="how many rounds to record (default 2)")
    parser.add_argument("--interval", metavar="SECONDS", type=positive_seconds, help="time between two rounds")
    parser.add_argument("--no-redact", action="store_true", help="keep command lines and environments as they are")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    parser.add_argument("--json", action="store_true", help="print what was recorded as JSON")
    add_observe_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Record and say what there is in the file."""
    import os

    from gpuflight.cli.session import dump_config, load_settings
    from gpuflight.errors import InputError

    settings = load_settings(arguments)
    if arguments.dump_config:
        return dump_config(settings)
    if arguments.replay is not None:
        raise InputError("a replay cannot be recorded again")

    from gpuflight.cli.env import checks
    from gpuflight.cli.output import emit_json, say
    from gpuflight.cli.progress import Progress
    from gpuflight.cli.rounds import EarlyEnd, run_rounds
    from gpuflight.cli.session import open_controller

    rounds = arguments.rounds if arguments.rounds is not None or arguments.seconds is not None else 2
    last = None
    with (
        EarlyEnd() as early_end,
        Progress(f"recording into {arguments.out}", arguments.seconds) as progress,
        open_controller(
            settings, record=arguments.out, redact=not arguments.no_redact, force=arguments.force
        ) as controller,
    ):
        for last in run_rounds(
            controller, seconds=arguments.seconds, rounds=rounds, early_end=early_end, tick=progress.tick
        ):
            progress.round(last)
            if last.number == 1:
                list(checks(controller.world))  # so that `gpuflight env --replay` has its answers, too
    assert last is not None  # noqa: S101 - there is always a first round
    size = os.path.getsize(arguments.out)
    report = {
        "file": arguments.out,
        "size_bytes": size,
        "rounds": last.number,
        "nodes": len(last.graph.nodes),
        "edges": len(last.graph.edges),
        "redacted": not arguments.no_redact,
    }
    if arguments.json:
        emit_json(report)
    else:
        say(
            f"{arguments.out}: {last.number} rounds, {size} bytes"
            + (
                ", secrets replaced; look into it before you hand it on"
                if not arguments.no_redact
                else ", NOT redacted"
            )
        )
    return 0


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 or more")
    return value
