"""What ``gpuflight doctor`` looks at: this machine, a recording, saved rounds, GPU session logs, a server."""

from __future__ import annotations

import argparse
import os
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from gpuflight.bottlenecks.build import make_engine
from gpuflight.bottlenecks.diagnosis import Diagnosis, diagnose, place
from gpuflight.bottlenecks.engine import Engine
from gpuflight.cli.output import clean, say
from gpuflight.cli.plugin_settings import make_rules
from gpuflight.errors import InputError, MissingExtra
from gpuflight.graph import Edge, Entity, Graph, nodes
from gpuflight.graph.diff import Diff, diff
from gpuflight.graph.load import LoadedGraph, load_graph, read_rounds
from gpuflight.rounds import Coverage, Environment, Finding, Round

if TYPE_CHECKING:
    from gpuflight.settings import Settings

_INTERVAL_S = 1.0
_RECORDED = (nodes.Session, nodes.Kernel, nodes.Stream, nodes.Scope)
"""Kinds of which a session's log tells; rules about others cannot say anything of it."""
_HEAD_BYTES = 1 << 16
_KINETO = (b'"traceEvents"', b'"deviceProperties"')
_FIRST_VERDICT_ROUND = 3
T = TypeVar("T")


def look(arguments: argparse.Namespace, settings: Settings) -> tuple[Diagnosis, LoadedGraph]:
    """The diagnosis, and the graph to draw it on. Raises GpuflightError, ConfigError, InputError."""
    source: str | None = arguments.source
    if source is None:
        return _machine(settings, arguments.seconds, None)
    if source.startswith(("http://", "https://", "unix:")):
        return _server(arguments, source)
    if not os.path.exists(source):
        raise InputError(f"{source}: there is no such file or folder")
    if source.endswith((".tar.zst", ".tzst")) and not os.path.isdir(source):
        return _machine(settings, None, source)
    if os.path.isdir(source):
        stream = next((path for name in ("rounds.jsonl.zst", "rounds.jsonl")
                       if os.path.exists(path := os.path.join(source, name))), None)  # fmt: skip
        if stream is not None:
            return _rounds(settings, stream, source)
        if not os.path.exists(os.path.join(source, "graph.json")):
            return _sessions(settings, source)
    if ".jsonl" in os.path.basename(source) or ".ndjson" in os.path.basename(source):
        return _rounds(settings, source, source)
    if os.path.isfile(source) and _is_trace(source):
        return _sessions(settings, source)
    return _snapshot(settings, load_graph(source), source)


def _engine(settings: Settings, *, snapshot: bool = False, about: Sequence[type[Entity] | type[Edge]] = ()) -> Engine:
    engine = make_engine(make_rules(settings), snapshot=snapshot, about=about)
    if engine is None:
        raise InputError("the setting rules.enabled is false: nothing judges")
    return engine


def _machine(settings: Settings, seconds: float | None, replay: str | None) -> tuple[Diagnosis, LoadedGraph]:
    """Rounds a second apart on this machine, or all rounds of a recording."""
    from gpuflight.cli.progress import Progress
    from gpuflight.cli.rounds import EarlyEnd, run_rounds
    from gpuflight.cli.session import open_controller

    pace = settings.model_copy(update={"interval_s": min(_INTERVAL_S, settings.interval_s)})
    pace._file, pace._file_name = settings._file, settings._file_name
    engine = _engine(pace)
    last: Round | None = None
    first_s = 0.0
    what = f"replaying {replay}" if replay else f"looking for {seconds:g} s"
    with open_controller(pace, replay=replay, judge=engine) as controller, EarlyEnd() as early_end:
        with Progress(what, seconds) as progress:
            for last in run_rounds(controller, seconds=seconds, early_end=early_end, tick=progress.tick):
                if last.number == 1:
                    first_s = last.monotonic_s or 0.0
                progress.round(last)
                if replay is None and last.number == _FIRST_VERDICT_ROUND:
                    say(_first_verdict(last, (last.monotonic_s or first_s) - first_s))
        if last is None:
            raise InputError(f"{replay}: the recording holds no round")
        return _told(engine, last, replay or "this machine", first_s)


def _first_verdict(done: Round, seconds: float) -> str:
    """A line for who waits: the first findings are there long before the last ones are sure."""
    if not done.findings:
        return f"after {seconds:.0f} s: nothing found yet"
    more = f", and {len(done.findings) - 1} more" if len(done.findings) > 1 else ""
    return f"after {seconds:.0f} s: {done.findings[0].severity}: {clean(done.findings[0].message)}{more}"


def _told(engine: Engine, last: Round, source: str, first_s: float) -> tuple[Diagnosis, LoadedGraph]:
    diagnosis = diagnose(
        engine,
        source,
        last.findings,
        last.graph,
        last.coverage,
        hostname=last.env.hostname,
        seconds=round((last.monotonic_s or first_s) - first_s, 1),
        rounds_count=last.number,
    )
    loaded = LoadedGraph(
        last.graph,
        env=msgspec.to_builtins(last.env),
        coverage=msgspec.to_builtins(last.coverage),
        round_number=last.number,
        time_ns=last.time_ns,
        truncated_by=last.truncated_by,
    )
    return diagnosis, loaded


def _rounds(settings: Settings, path: str, source: str) -> tuple[Diagnosis, LoadedGraph]:
    """Every round of a stream, judged one after the other as when they were made."""
    engine = _engine(settings)
    last: Round | None = None
    first_s: float | None = None
    findings: list[Finding] = []
    for last in replayed(read_rounds(path)):
        if first_s is None:
            first_s = last.monotonic_s if last.monotonic_s is not None else last.time_ns / 1e9
        findings = engine.judge(last).findings
    if last is None or first_s is None:
        raise InputError(f"{source}: no round in it")
    last.findings = findings
    if last.monotonic_s is None:
        last.monotonic_s = last.time_ns / 1e9
    return _told(engine, last, source, first_s)


def replayed(stream: Iterator[LoadedGraph]) -> Iterator[Round]:
    """Saved rounds as the core made them: each with what changed since the one before."""
    before: Graph | None = None
    for number, loaded in enumerate(stream, 1):
        yield as_round(loaded, number, before)
        before = loaded.graph


def as_round(loaded: LoadedGraph, number: int = 1, before: Graph | None = None) -> Round:
    """A loaded graph as a round; parts of its description that this version does not read are left out."""
    known = {k: v for k, v in loaded.env.items() if k in Environment.__struct_fields__ and isinstance(v, str)}
    return Round(
        number=number,
        time_ns=loaded.time_ns,
        duration_s=0.0,
        graph=loaded.graph,
        diff=diff(before, loaded.graph) if before is not None else Diff(),
        coverage=_each(loaded.coverage, Coverage),
        env=Environment(**known),
        monotonic_s=loaded.monotonic_s,
        truncated_by=loaded.truncated_by,
    )


def _snapshot(settings: Settings, loaded: LoadedGraph, source: str) -> tuple[Diagnosis, LoadedGraph]:
    """One saved graph: what it holds of findings stands; what is met at this one moment is told as not confirmed."""
    engine = _engine(settings, snapshot=True)
    done = as_round(loaded)
    saved = _each(loaded.findings, Finding)
    met = [each for each in engine.judge(done).findings if each.id not in {one.id for one in saved}]
    diagnosis, _ = _told(engine, done, source, done.monotonic_s or 0.0)
    diagnosis.findings = [*saved, *(each for each in met if each.confirmed), *(e for e in met if not e.confirmed)]
    diagnosis.places = {each.id: place(loaded.graph, each) for each in diagnosis.findings}
    if saved:
        diagnosis.rules["fired"] = max(diagnosis.rules.get("fired", 0), len({each.rule for each in saved}))
    return diagnosis, loaded


def _sessions(settings: Settings, path: str) -> tuple[Diagnosis, LoadedGraph]:
    """GPU sessions that were recorded: the graph that the collector of sessions makes of whole logs, with the facts of
    their records; judged by the rules, each of which needs but one look at what is over."""
    try:
        from gpuflight.cli.doctor_sessions import recorded
    except ModuleNotFoundError as error:
        raise MissingExtra(str(error.name), "events", "reading GPU session logs") from None
    engine = _engine(settings, about=_RECORDED)
    done = recorded(path)
    done.findings = engine.judge(done).findings
    return _told(engine, done, path, 0.0)


def _is_trace(path: str) -> bool:
    """Whether a file is a trace of another profiler: an SQLite file, or JSON that begins as the PyTorch profiler's."""
    with open(path, "rb") as file:
        head = file.read(_HEAD_BYTES)
    if head.startswith(b"\x1f\x8b"):
        head = zlib.decompressobj(31).decompress(head, _HEAD_BYTES)
    return head.startswith(b"SQLite format 3") or any(word in head for word in _KINETO)


def _server(arguments: argparse.Namespace, url: str) -> tuple[Diagnosis, LoadedGraph]:
    """What a running server found; it has judged all its rounds."""
    from gpuflight.bottlenecks.survey import RuleState
    from gpuflight.cli.rest import Rest
    from gpuflight.graph.codec import decode_document, graph_of, time_from_text

    arguments.url = url
    rest = Rest(arguments)
    document = decode_document(msgspec.json.encode(rest.call("GET", "/api/v1/graph")))
    graph = graph_of(document)
    findings = _each(document.findings, Finding)
    states = _each(rest.call("GET", "/api/v1/rules?states=true")["rules"], RuleState)
    counts: dict[str, int] = {}
    for state in states:
        counts[state.state] = counts.get(state.state, 0) + 1
    from gpuflight.bottlenecks.build import all_rules
    from gpuflight.bottlenecks.diagnosis import unjudged
    from gpuflight.bottlenecks.settings import RulesSettings

    coverage = _each(document.coverage, Coverage)
    rules = {rule.name: rule for rule in all_rules(RulesSettings())}
    diagnosis = Diagnosis(
        source=url,
        hostname=str(document.env.get("hostname", "")),
        rounds_count=document.round,
        findings=findings,
        places={each.id: place(graph, each) for each in findings},
        rules=counts,
        states=states,
        unjudged=unjudged((s for s in states if s.rule in rules), rules, coverage),
        coverage=coverage,
    )
    loaded = LoadedGraph(
        graph,
        env=document.env,
        coverage=document.coverage,
        round_number=document.round,
        time_ns=time_from_text(document.time),
    )
    return diagnosis, loaded


def _each(parts: Sequence[Any], kind: type[T]) -> list[T]:
    """The parts that this version reads."""
    fitting = []
    for part in parts:
        try:
            fitting.append(part if isinstance(part, kind) else msgspec.convert(part, kind))
        except (msgspec.ValidationError, TypeError):
            continue
    return fitting
