"""``gpuflight doctor``: what holds this machine back, where, at what cost, and what to do."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from gpuflight.cli.session import add_settings_arguments, positive_seconds
from gpuflight.errors import GpuflightError, InputError

if TYPE_CHECKING:
    from gpuflight.bottlenecks.diagnosis import Diagnosis

DESCRIPTION = """\
Say what holds this machine back: findings, the costliest first, each with the numbers it rests on, its place, its cost,
what to do and how to check it; then what could not be judged, and how to see it.

Looks at this machine for some seconds, or at what --from names: a recording, a graph.json or run folder, a stream of
rounds, a folder with GPU session logs, a trace of the PyTorch profiler or an SQLite export of Nsight Systems, or the
URL of a gpuflight-server.

exit codes: 0 healthy, 1 warnings, 2 critical, 3 could not judge (also what --from names cannot be read)
"""

EXAMPLES = (
    "gpuflight doctor",
    "gpuflight doctor --seconds 60 --html doctor.html --force",
    "gpuflight doctor --from capture --json",
    "gpuflight doctor --seconds 5 --fail-on critical",
)

_EXIT = {"healthy": 0, "warn": 1, "critical": 2, "unknown": 3}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    from gpuflight.cli.rest import add_server_arguments

    parser.add_argument(
        "--seconds", metavar="S", type=positive_seconds, default=15.0, help="how long to look (default 15)"
    )
    parser.add_argument("--from", dest="source", metavar="WHAT", help="judge this instead of the machine now")
    parser.add_argument("--json", action="store_true", help="print the diagnosis as JSON")
    parser.add_argument("--html", metavar="FILE", help="also draw the machine with the findings on it, one HTML file")
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")
    parser.add_argument(
        "--fail-on",
        choices=("info", "warn", "critical"),
        default="warn",
        help="least severity that makes the exit code other than 0 (default warn)",
    )
    parser.add_argument("--all", action="store_true", help="list every rule that could not judge, and why")
    add_settings_arguments(parser)
    add_server_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Look, judge, print. The exit code is the verdict."""
    from gpuflight.cli.session import dump_config, load_settings

    try:
        settings = load_settings(arguments)
        if arguments.dump_config:
            return dump_config(settings)
        if arguments.html and os.path.exists(arguments.html) and not arguments.force:
            raise InputError(f"{arguments.html}: exists already; --force replaces it")

        from gpuflight.cli.doctor_sources import look

        diagnosis, loaded = look(arguments, settings)
    except GpuflightError as error:
        print(f"gpuflight: {error}", file=sys.stderr)
        return 3
    if arguments.html:
        from gpuflight.cli.doctor_page import write_page

        write_page(diagnosis, loaded, arguments.html, force=arguments.force)
    if arguments.json:
        import msgspec

        from gpuflight.cli.output import emit_json

        emit_json({"verdict": diagnosis.verdict, **msgspec.to_builtins(diagnosis)})
    else:
        from gpuflight.cli.doctor_text import text
        from gpuflight.cli.output import console

        text(diagnosis, console(), every_rule=arguments.all)
        if arguments.html:
            print(f"\npicture: {arguments.html}")
    return exit_code(diagnosis, arguments.fail_on)


def exit_code(diagnosis: Diagnosis, fail_on: str) -> int:
    """The verdict as an exit code; a verdict below ``fail_on`` is 0."""
    verdict = diagnosis.verdict
    if fail_on == "info" and verdict == "healthy" and any(finding.confirmed for finding in diagnosis.findings):
        return 1
    return 0 if verdict == "warn" and fail_on == "critical" else _EXIT[verdict]
