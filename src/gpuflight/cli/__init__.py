"""The command line: one file per command, imported only when that command is used.

``main`` is the only place where an exception becomes an exit code:

0    done
1    something failed while running
2    wrong usage, or settings or input that cannot be used
130  ended by a second Ctrl-C (the first one ends a capture early, and is a success)
141  the reader of our output went away
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from gpuflight import __version__
from gpuflight.errors import GpuflightError

COMMANDS = {
    "run": "capture this machine for some seconds into a folder",
    "doctor": "what holds this machine back, where, at what cost, and what to do",
    "rules": "the rules that judge: list, explain, check your own, try them on recordings",
    "describe": "a graph as compact text",
    "diff": "what changed between two graphs",
    "path": "the way data takes between two entities, and its narrowest hop",
    "trigger": "record now in programs that run under a recorder, here or on many hosts",
    "record": "save what every source answers, to replay it elsewhere",
    "env": "what this machine lets gpuflight see, and how to see more",
    "agent": "send the logs of GPU Flight's client to a receiver, Kafka and S3",
    "report": "what a GPU session did, what slowed it down, and what could not be seen",
    "export": "a GPU session as a trace for Perfetto, or its tables as CSV, NDJSON, Parquet or Arrow",
    "import": "traces of the PyTorch profiler and Nsight Systems into an event store",
    "subscriber": "where rounds are delivered: types, trial deliveries, and those of a running server",
    "token": "the access tokens of a server: create, list, revoke",
    "plugins": "every collector, subscriber, layout and renderer there is",
    "version": "the version",
}
"""Every command and what it does; each is the module of its name in this package."""

EXIT_CODES = "exit codes: 0 done · 1 failed · 2 wrong usage, settings or input · 130 interrupted · 141 output closed"


def main(argv: Sequence[str] | None = None) -> int:
    """``gpuflight``. Returns the exit code."""
    return guarded("gpuflight", lambda: _gpuflight(list(sys.argv[1:] if argv is None else argv)))


def server_main(argv: Sequence[str] | None = None) -> int:
    """``gpuflight-server``. Returns the exit code."""

    def server() -> int:
        from gpuflight.cli.server import run_server

        return run_server(list(sys.argv[1:] if argv is None else argv))

    return guarded("gpuflight-server", server)


def vis_main(argv: Sequence[str] | None = None) -> int:
    """``gpuflight-vis``. Returns the exit code."""

    def vis() -> int:
        from gpuflight.cli.vis import main as draw

        return draw(list(sys.argv[1:] if argv is None else argv))

    return guarded("gpuflight-vis", vis)


def guarded(program: str, command: Callable[[], int]) -> int:
    """Run a command; whatever it raises becomes one line on stderr and an exit code. ``GPUFLIGHT_DEBUG=1`` shows the
    traceback as well."""
    _prepare_streams()
    try:
        try:
            code = command()
        except SystemExit as end:  # argparse: 0 after --help, 2 after wrong usage
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        sys.stdout.flush()
        return code
    except GpuflightError as error:
        _debug()
        first, *rest = str(error).splitlines() or [type(error).__name__]
        _complain("\n".join([f"{program}: {first}", *(f"{program}: {line}" for line in rest)]))
        return error.exit_code
    except KeyboardInterrupt:
        _complain(f"{program}: interrupted")
        return 130
    except BrokenPipeError:
        _debug()
        # The interpreter flushes stdout once more at its end, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        _debug()
        _complain(
            f"{program}: {error.filename + ': ' if isinstance(error.filename, str) else ''}{error.strerror or error}"
        )
        return 1
    except Exception as error:  # noqa: BLE001 - the edge of a command
        _debug()
        text = (str(error).splitlines() or [""])[0]
        _complain(
            f"{program}: this is a defect of gpuflight: {type(error).__name__}: {text}\n"
            f"{program}: set GPUFLIGHT_DEBUG=1 to see where, and please report it"
        )
        return 1


def build_parser(argv: Sequence[str] = (), *, everything: bool = False) -> argparse.ArgumentParser:
    """The parser of ``gpuflight``; the arguments only of the command that ``argv`` names, unless ``everything``."""
    parser = argparse.ArgumentParser(
        prog="gpuflight",
        description="See a GPU machine whole: what is wired to what, what each GPU does, and what holds it back.",
        epilog=f"`gpuflight COMMAND --help` tells more. {EXIT_CODES}",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"gpuflight {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    wanted = next((word for word in argv if not word.startswith("-")), None)
    for name, summary in COMMANDS.items():
        if everything or name == wanted:
            module = import_module(f"gpuflight.cli.{name}")
            command = commands.add_parser(
                name,
                help=summary,
                description=module.DESCRIPTION,
                epilog=epilog(module.EXAMPLES),
                formatter_class=argparse.RawDescriptionHelpFormatter,
                allow_abbrev=False,
            )
            module.add_arguments(command)
            command.set_defaults(run=module.run)
        else:
            commands.add_parser(name, help=summary)
    return parser


def epilog(examples: Sequence[str]) -> str:
    """Examples and exit codes, as they end a ``--help``. Every example is executed by the tests."""
    return "\n".join(["examples:", *(f"  {example}" for example in examples), "", EXIT_CODES])


def _gpuflight(argv: list[str]) -> int:
    parser = build_parser(argv)
    if not argv:
        parser.print_help()
        return 2
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.error("a command is missing")
    code: int = arguments.run(arguments)
    return code


def _prepare_streams() -> None:
    """Output never fails for a name that the terminal cannot show, nor for a stream that was closed before us."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - stays open to the end
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _complain(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        pass


def _debug() -> None:
    if os.environ.get("GPUFLIGHT_DEBUG", "0") not in ("", "0"):
        import traceback

        traceback.print_exc()
