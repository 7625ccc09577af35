"""Opening a graph that somebody saved: our JSON, a run folder, a stream of rounds, or witty-profiler's JSON."""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

import msgspec
import zstandard
from msgspec import Struct, field

from gpuflight.errors import InputError
from gpuflight.graph.codec import Document, decode_diff, decode_document, graph_of, time_from_text
from gpuflight.graph.diff import apply
from gpuflight.graph.graph import Graph
from gpuflight.graph.witty import load_witty, looks_like_witty

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_GZIP_MAGIC = b"\x1f\x8b"
_DIFF = b'{"type":"diff"'
_DAMAGED = (zstandard.ZstdError, gzip.BadGzipFile, zlib.error, EOFError)
_MAX_INPUT_BYTES = 4 << 30


class LoadedGraph(Struct):
    """A graph as read from a file, with what the file says about it. ``coverage`` and ``findings`` are dictionaries."""

    graph: Graph
    env: dict[str, Any] = field(default_factory=dict)
    coverage: list[Any] = field(default_factory=list)
    findings: list[Any] = field(default_factory=list)
    round_number: int = 0
    time_ns: int = 0
    monotonic_s: float | None = None
    truncated_by: str = ""
    origin: str = "gpuflight"


def load_graph(path: str | os.PathLike[str]) -> LoadedGraph:
    """Read a graph: a file, a run folder (its ``graph.json``), or a stream of rounds (its last one).

    Files may be compressed with zstd or gzip. Raises InputError with one line: what, where, what to do.
    """
    name = os.fspath(path)
    if os.path.isdir(name):
        inner = os.path.join(name, "graph.json")
        if not os.path.exists(inner):
            raise InputError(f"{name}: no graph.json in this folder; is it a run folder of `gpuflight run`?")
        name = inner
    last: LoadedGraph | None = None
    if _is_stream(name):
        for last in read_rounds(name):  # noqa: B007 - the last one is what is wanted
            pass
        if last is None:
            raise InputError(f"{name}: no round in this file")
        return last
    with _opened(name) as file:
        data = file.read(_MAX_INPUT_BYTES)
    try:
        return parse_graph(data)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def parse_graph(data: bytes) -> LoadedGraph:
    """The graph in a JSON text, ours or witty-profiler's. Raises InputError."""
    data = data.removeprefix(b"\xef\xbb\xbf")
    if not data.strip():
        raise InputError("the file is empty")
    if data.startswith(_DIFF):
        raise InputError("holds what changed only; put it behind the whole round it follows, in a file *.jsonl")
    if b'"schema"' in data[:200]:
        return _loaded(decode_document(data))
    plain = _plain(data)
    if looks_like_witty(plain):
        env = plain.get("env") if isinstance(plain, dict) else None
        return LoadedGraph(load_witty(plain), env=env if isinstance(env, dict) else {}, origin="witty-profiler")
    if isinstance(plain, dict) and isinstance(plain.get("schema"), int):
        return _loaded(decode_document(data))
    raise InputError("neither a graph of gpuflight (no schema) nor one of witty-profiler")


def _plain(data: bytes) -> Any:
    """JSON as Python objects. What Python's own writer lets pass (NaN, lone surrogates) is read as well."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        try:
            return json.loads(data)
        except ValueError:
            raise InputError(f"not JSON: {error}") from None
        except RecursionError:
            raise InputError("not a graph: nested too deeply") from None
    except RecursionError:
        raise InputError("not a graph: nested too deeply") from None


def read_rounds(path: str | os.PathLike[str]) -> Iterator[LoadedGraph]:
    """Every round of a stream (``rounds.jsonl``, also ``.zst``, ``.gz``): full graphs and differences, as whole graphs.

    A last line that was cut off ends the stream; anything else that is wrong raises InputError with the line's number.
    """
    name = os.fspath(path)
    current: LoadedGraph | None = None
    with _opened(name) as file:
        lines = io.TextIOWrapper(file, encoding="utf-8", errors="replace", newline="\n")
        number = 0
        while True:
            try:
                line = lines.readline()
            except (zstandard.ZstdError, EOFError):
                return  # cut off in the middle of a frame
            if not line:
                return
            number += 1
            if not line.strip():
                continue
            complete = line.endswith("\n")
            try:
                current = _next_round(line, current)
            except InputError as error:
                if not complete:
                    return
                raise InputError(f"{name}, line {number}: {error}") from None
            yield current


def _next_round(line: str, before: LoadedGraph | None) -> LoadedGraph:
    if not line.startswith(_DIFF.decode()):
        return _loaded(decode_document(line))
    if before is None:
        raise InputError("a difference without a graph before it")
    change, meta = decode_diff(line, before.graph)
    return LoadedGraph(
        apply(change, before.graph),
        env=before.env,
        coverage=meta.coverage,
        findings=meta.findings,
        round_number=meta.round,
        time_ns=time_from_text(meta.time),
        monotonic_s=meta.monotonic_s,
        truncated_by=meta.truncated_by,
    )


def _loaded(parsed: Document) -> LoadedGraph:
    return LoadedGraph(
        graph_of(parsed),
        env=parsed.env,
        coverage=parsed.coverage,
        findings=parsed.findings,
        round_number=parsed.round,
        time_ns=time_from_text(parsed.time),
        monotonic_s=parsed.monotonic_s,
        truncated_by=parsed.truncated_by,
    )


def _is_stream(name: str) -> bool:
    return name.removesuffix(".zst").removesuffix(".gz").endswith((".jsonl", ".ndjson"))


@contextmanager
def _opened(name: str) -> Iterator[BinaryIO]:
    try:
        with open(name, "rb") as file:
            head = file.read(4)
            file.seek(0)
            if head == _ZSTD_MAGIC:
                with zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True) as reader:
                    yield reader
            elif head.startswith(_GZIP_MAGIC):
                with gzip.GzipFile(fileobj=file, mode="rb") as unpacked:
                    yield cast("BinaryIO", unpacked)
            else:
                yield file
    except _DAMAGED as error:  # of gzip, some are OSErrors
        kind = "zstd" if isinstance(error, zstandard.ZstdError) else "gzip"
        raise InputError(f"{name}: damaged {kind} file ({error})") from None
    except OSError as error:
        raise InputError(f"{name}: {error.strerror or error}") from None
