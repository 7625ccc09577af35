"""A Round as bytes: the graph file of design.md §3, and the lines of a stream of rounds."""

from __future__ import annotations

from typing import Any

import msgspec

from gpuflight.graph.codec import encode_diff, encode_graph, time_text
from gpuflight.rounds import Round


def encode_round(done: Round) -> bytes:
    """The whole round as one JSON document (no newline at its end)."""
    return encode_graph(done.graph, **_meta(done), round=done.number, env=msgspec.to_builtins(done.env))


def encode_round_diff(done: Round) -> bytes:
    """What changed since the round before, as one line of JSON (no newline); see ``graph.load.read_rounds``."""
    return encode_diff(done.diff, done.number, **_meta(done))


def _meta(done: Round) -> dict[str, Any]:
    return {
        "time": time_text(done.time_ns),
        "duration_s": round(done.duration_s, 6),
        "truncated_by": done.truncated_by,
        "own_cost": msgspec.to_builtins(done.own_cost),
        "coverage": msgspec.to_builtins(done.coverage),
        "findings": msgspec.to_builtins(done.findings),
        "cleared": msgspec.to_builtins(done.cleared),
        "monotonic_s": done.monotonic_s,
    }
