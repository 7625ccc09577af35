"""``gpuflight run -- python train.py …``: the program with our recorder in it, in our place.

The program replaces this process (exec): its exit code, signals, terminal and input are its own, and nothing of ours
stays behind but two environment variables, by which every Python of its process tree begins to be recorded.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import signal
import sys
import time
from typing import NoReturn

from gpuflight.cli.session import positive_seconds
from gpuflight.errors import InputError

_ISOLATING = {
    "I": "isolates itself from PYTHONPATH",
    "E": "ignores PYTHONPATH",
    "S": "runs no sitecustomize",
}
_WITH_VALUE = "XWcm"


def add_recorder_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a recorded program, and the program."""
    group = parser.add_argument_group("a program to record, instead of this machine")
    group.add_argument("--name", metavar="APP", help="its name in the session (default: that of its script)")
    group.add_argument("--kinds", metavar="NAMES", help="what is recorded, separated by commas: see docs/recorder.md")
    group.add_argument("--after", metavar="SECONDS", type=positive_seconds, help="begin that long after its start")
    group.add_argument("--for", metavar="SECONDS", type=positive_seconds, dest="for_s", help="record for so long")
    group.add_argument("--launches", metavar="COUNT", type=_count, help="record so many kernels")
    group.add_argument("--on-demand", action="store_true", help="record nothing until `gpuflight trigger` says so")
    group.add_argument("--stacks", metavar="N", type=_count, help="with the Python stack of every Nth launch")
    group.add_argument("--no-metrics", action="store_true", help="without readings of the host and its GPUs")
    group.add_argument("--quiet", action="store_true", help="say nothing on stderr, whatever happens")
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="-- PROGRAM …", help="what to start, e.g. `-- python train.py`"
    )


def program_of(arguments: argparse.Namespace) -> list[str]:
    """The program and its arguments; empty if none was given."""
    program: list[str] = arguments.program
    return program[1:] if program[:1] == ["--"] else program


def launch(arguments: argparse.Namespace, program: list[str]) -> NoReturn:
    """Become the program. Raises InputError if it cannot be started."""
    from gpuflight.events.recorder.options import DEFAULT_FOLDER, DEFAULT_KINDS, Options, encoded

    executable = shutil.which(program[0])
    if executable is None:
        raise InputError(f"{program[0]}: there is no such program, or it may not be run")
    folder = arguments.out or f"{DEFAULT_FOLDER}/{time.strftime('%Y%m%d-%H%M%S')}_{secrets.token_hex(4)}"
    options = Options(
        app=arguments.name or "",
        folder=os.path.abspath(os.path.expanduser(folder)),
        kinds=tuple(word.strip() for word in arguments.kinds.split(",")) if arguments.kinds else DEFAULT_KINDS,
        after_s=arguments.after or 0.0,
        for_s=arguments.for_s or 0.0,
        launches=arguments.launches or 0,
        on_demand=arguments.on_demand,
        stacks=arguments.stacks or 0,
        metrics_interval_s=0.0 if arguments.no_metrics else 1.0,
        quiet=arguments.quiet,
    ).checked()
    environment = recorded_environment(encoded(options))
    if not arguments.quiet:
        why_not = _why_not(program)
        if why_not:
            print(f"gpuflight: nothing will be recorded: {why_not}", file=sys.stderr)
        else:
            print(f"gpuflight: recording into {options.folder}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and what is ignored stays so in a program
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execve(executable, program, environment)  # noqa: S606 - what the user asked to start
    except OSError as error:
        raise InputError(f"{program[0]}: cannot be started: {error.strerror}") from error


def recorded_environment(options: str) -> dict[str, str]:
    """Ours, with what begins the recorder in every Python."""
    from gpuflight.events.recorder import inject
    from gpuflight.events.recorder.options import ENVIRONMENT

    folder = os.path.dirname(os.path.abspath(inject.__file__))
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{before}" if before else folder, ENVIRONMENT: options}


def _why_not(program: list[str]) -> str:
    """Why a Python with these flags runs without us; empty if it does not, or is no Python."""
    if not os.path.basename(program[0]).startswith("python"):
        return ""
    for argument in program[1:]:
        if not argument.startswith("-") or argument in ("-", "--"):
            return ""
        if argument.startswith("--"):
            continue
        for letter in argument[1:]:
            if letter in _ISOLATING:
                return f"python -{letter} {_ISOLATING[letter]}; call gpuflight.init() in the program instead"
            if letter in _WITH_VALUE:
                if letter in "cm":
                    return ""
                break
    return ""


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return value
