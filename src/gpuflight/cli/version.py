"""``gpuflight version``."""

from __future__ import annotations

import argparse

DESCRIPTION = "Print the version of gpuflight; with --json also of Python and of the machine."

EXAMPLES = ("gpuflight version", "gpuflight version --json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print."""
    from gpuflight import __version__

    if not arguments.json:
        print(f"gpuflight {__version__}")
        return 0
    import platform

    from gpuflight.cli.output import emit_json
    from gpuflight.graph.codec import SCHEMA

    emit_json(
        {
            "gpuflight": __version__,
            "graph_schema": SCHEMA,
            "python": platform.python_version(),
            "kernel": platform.release(),
            "architecture": platform.machine(),
        }
    )
    return 0
