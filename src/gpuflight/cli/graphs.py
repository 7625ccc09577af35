"""Getting a graph: from a file, from a recording, or from this machine now."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

import msgspec

from gpuflight.errors import InputError
from gpuflight.graph.load import LoadedGraph, load_graph

if TYPE_CHECKING:
    from gpuflight.settings import Settings

_FIRST_RATE_S = 1.0
"""Rates need two rounds; so far apart are the two of a command that looks once."""


def graph_from(arguments: argparse.Namespace, file: str | None, settings: Settings) -> LoadedGraph:
    """The graph in ``file`` if one is given, else of the last round of ``--replay``, else of this machine now."""
    if file is not None:
        if arguments.replay is not None:
            raise InputError("give a graph file or --replay, not both")
        return load_graph(file)
    return observe(settings, arguments.replay)


def observe(settings: Settings, replay: str | None) -> LoadedGraph:
    """The graph of all of a recording, or of two rounds on this machine a second apart (rates need two)."""
    from gpuflight.cli.rounds import EarlyEnd, run_rounds
    from gpuflight.cli.session import open_controller

    last = None
    pace = settings.model_copy(update={"interval_s": min(_FIRST_RATE_S, settings.interval_s)})
    with open_controller(pace, replay=replay) as controller, EarlyEnd() as early_end:
        for last in run_rounds(controller, seconds=None, rounds=None if replay else 2, early_end=early_end):  # noqa: B007
            pass
    if last is None:
        raise InputError(f"{replay}: the recording holds no round")
    return LoadedGraph(
        last.graph,
        env=msgspec.to_builtins(last.env),
        coverage=msgspec.to_builtins(last.coverage),
        findings=msgspec.to_builtins(last.findings),
        round_number=last.number,
        time_ns=last.time_ns,
        truncated_by=last.truncated_by,
    )


def load_replay_or_graph(path: str) -> LoadedGraph:
    """A graph file, a run folder, a stream of rounds, or a recording (its last round, with the default settings)."""
    if not os.path.isdir(path) and path.endswith((".tar.zst", ".tzst")):
        from gpuflight.settings import Settings

        return observe(Settings(), path)
    return load_graph(path)


def graph_json(loaded: LoadedGraph) -> bytes:
    """The graph in the form of graph.json."""
    from gpuflight.graph import codec

    fields: dict[str, Any] = {
        "round": loaded.round_number,
        "time": codec.time_text(loaded.time_ns) if loaded.time_ns else "",
        "env": loaded.env,
        "coverage": loaded.coverage,
        "findings": loaded.findings,
        "truncated_by": loaded.truncated_by,
    }
    return codec.encode_graph(loaded.graph, **fields) + b"\n"
