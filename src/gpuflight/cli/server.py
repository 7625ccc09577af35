"""``gpuflight-server``: settings are checked and shown; the server itself comes with a later release."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from gpuflight.cli.session import add_settings_arguments
from gpuflight.errors import InputError


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``gpuflight-server``."""
    from gpuflight import __version__
    from gpuflight.cli import EXIT_CODES

    parser = argparse.ArgumentParser(
        prog="gpuflight-server",
        description="Keep a host's graph live and serve it. This release checks and prints its settings only.",
        epilog=EXIT_CODES,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"gpuflight {__version__}")
    add_settings_arguments(parser)
    return parser


def run_server(argv: Sequence[str]) -> int:
    """Check the settings, print them if asked to, and say that there is no server yet."""
    from gpuflight.cli.plugin_settings import effective
    from gpuflight.cli.session import dump_config, load_settings

    settings = load_settings(build_parser().parse_args(argv))
    if "--dump-config" in argv:
        return dump_config(settings)
    effective(settings)  # plugins' blocks are checked here
    raise InputError(
        "this release has no server yet: capture with `gpuflight run --offline 60`; the settings are valid, and"
        " `--dump-config` prints them"
    )
