"""``gpuflight run``: capture this machine for some seconds into a folder, then say what was found; or start a program
with our recorder in it (``cli.launch``)."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import TYPE_CHECKING

from gpuflight.cli.launch import add_recorder_arguments, launch, program_of
from gpuflight.cli.session import add_observe_arguments, positive_seconds
from gpuflight.errors import InputError

if TYPE_CHECKING:
    from gpuflight.rounds import Round

DESCRIPTION = """\
Watch this machine (or a recording of one) for some seconds, write a run folder, and print what was found.

The folder holds graph.json (the last graph), rounds.jsonl.zst (the first graph, then what changed each round),
describe.txt, coverage.json (what could not be seen, and why) and config.json. Ctrl-C and SIGTERM end a capture early;
everything is still written. Nothing else in the folder is ever touched.

With a program behind `--` it is started instead, and every Python in its process tree records what it does on GPUs, as
a session in --out (default: a new folder in ~/.gpufl/traces). The program's exit code, signals and input are its own.
"""

EXAMPLES = (
    "gpuflight run --offline 60",
    "gpuflight run --offline 10 --interval 1 --out capture",
    "gpuflight run --offline 10 --pid 1 --json",
    "gpuflight run --replay machine.tar.zst --out replayed",
    "gpuflight run --out trace --after 60 --for 10 -- python train.py --epochs 3",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--offline", metavar="SECONDS", type=positive_seconds, help="how long to watch")
    parser.add_argument("--interval", metavar="SECONDS", type=positive_seconds, help="time between two rounds")
    parser.add_argument("--out", metavar="DIR", help="the run folder (default: gpuflight-run-<date>-<time>)")
    parser.add_argument("--force", action="store_true", help="replace our files in a folder that is not empty")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    add_observe_arguments(parser)
    add_recorder_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Capture, write, report; or become the program."""
    program = program_of(arguments)
    if program:
        if arguments.offline is not None or arguments.replay is not None:
            raise InputError(f"{program[0]}: either watch this machine (--offline, --replay) or start a program")
        launch(arguments, program)
    from gpuflight.cli.session import dump_config, load_settings

    settings = load_settings(arguments)
    if arguments.dump_config:
        return dump_config(settings)
    if arguments.offline is None and arguments.replay is None:
        raise InputError(
            "say how long to watch: gpuflight run --offline 60, or what to start: gpuflight run -- python …"
        )

    import msgspec

    from gpuflight.cli.coverage import CoverageFold
    from gpuflight.cli.output import console, emit_json, say
    from gpuflight.cli.plugin_settings import effective, make_subscribers
    from gpuflight.cli.progress import Progress
    from gpuflight.cli.rounds import EarlyEnd, run_rounds
    from gpuflight.cli.runfolder import RunFolder, default_folder
    from gpuflight.cli.session import open_controller
    from gpuflight.cli.summary import build, render
    from gpuflight.subscribers.delivery import SubscriberSet

    config = effective(settings)
    subscribers = make_subscribers(settings)
    folder = RunFolder(arguments.out or default_folder(), force=arguments.force)
    coverage = CoverageFold()
    last = None
    with ExitStack() as stack:
        members = SubscriberSet()
        stack.callback(members.close)
        controller = stack.enter_context(open_controller(settings, replay=arguments.replay, subscribers=members))
        folder.open()
        stack.callback(folder.abandon)
        for subscriber in subscribers:
            members.add(subscriber)
        early_end = stack.enter_context(EarlyEnd())
        what = f"replaying {arguments.replay}" if arguments.replay else f"watching for {arguments.offline:g} s"
        with Progress(f"{what} into {folder.path}", arguments.offline if not arguments.replay else None) as progress:
            for completed in run_rounds(controller, seconds=arguments.offline, early_end=early_end, tick=progress.tick):
                last = completed
                folder.add(completed)
                coverage.add(completed.coverage)
                progress.round(completed)
        if last is None:
            raise InputError(f"{arguments.replay}: the recording holds no round")
        lines = coverage.summary()
        folder.finish(
            last,
            {"rounds": last.number, "truncated_by": last.truncated_by, "collectors": msgspec.to_builtins(lines)},
            config,
        )
        if early_end.asked.is_set():
            say("ended early; everything up to here was written")
        members.close()
        for line in members.status():
            statistics = line.statistics
            by = statistics.dropped_by
            failed = statistics.dropped - by.get("replaced", 0) - by.get("interval", 0)
            if failed or line.state == "permanent_error":
                say(f"subscriber {line.name}: {failed} rounds not delivered: {statistics.last_error or line.state}")
            if statistics.queued:
                say(f"subscriber {line.name}: {statistics.queued} rounds wait in its spool: {statistics.last_error}")
    summary = build(last.graph, lines, last.env, last.truncated_by)
    if arguments.json:
        own_cost = msgspec.to_builtins(last.own_cost)
        emit_json({"folder": folder.path, "rounds": last.number, "own_cost": own_cost, **msgspec.to_builtins(summary)})
    else:
        render(summary, console())
        say(f"\n{own_cost_line(last)}written to {folder.path}; draw it with: gpuflight-vis {folder.path}/graph.json")
    return 0


def own_cost_line(done: Round) -> str:
    """What watching cost, as a line for people; empty where a single round leaves nothing to measure."""
    cost = done.own_cost
    if cost is None or cost.cpu_pct is None:
        return ""
    return f"gpuflight itself: {cost.cpu_pct:g} % of one core in the last round, {cost.rss_bytes / 2**20:.0f} MiB\n"
