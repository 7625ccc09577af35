"""``gpuflight export``: a GPU session as a trace for Perfetto, or its tables for other programs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from typing import Any

from gpuflight.cli.event_source import add_source_arguments, open_sessions

DESCRIPTION = """\
Write a GPU session in a format of other programs.

`--as trace` makes a timeline for https://ui.perfetto.dev or chrome://tracing: lanes per device and stream, scopes and
calls of the host, counters, arrows from calls to what they started. `--as csv`, `ndjson`, `parquet` and `arrow` (an IPC
stream) write one table (--table) or one answer (--query), `--list` says which there are. The session is named as in
`gpuflight report`.
"""

EXAMPLES = (
    "gpuflight export logs --out trace.json",
    "gpuflight export logs --as csv --query top-kernels",
    "gpuflight export logs --as parquet --table kernel --out kernels.parquet --json",
)

FORMATS = ("trace", "csv", "ndjson", "parquet", "arrow")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_source_arguments(parser)
    parser.add_argument("--as", dest="form", choices=FORMATS, default="trace", help="the format (default trace)")
    parser.add_argument("--table", metavar="NAME", help="the table to write (default kernel)")
    parser.add_argument("--query", metavar="NAME", help="an answer to write instead of a table")
    parser.add_argument(
        "--list", action="store_true", help="print the tables and answers there are, and do nothing else"
    )
    parser.add_argument("--out", metavar="FILE", help="the file to write, *.gz compressed (default: standard output)")
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")
    parser.add_argument("--json", action="store_true", help="with --out: print what was written as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Read, write, say what was written."""
    from gpuflight.cli.output import clean, emit_json, say
    from gpuflight.errors import InputError

    if arguments.list:
        return _list(arguments.json)
    _check(arguments)
    with open_sessions(arguments) as sessions:
        if len(sessions.sessions) > 1 and (arguments.form == "trace" or arguments.session is None):
            raise InputError(
                f"{len(sessions.sessions)} sessions are there; --session chooses one (`gpuflight report` lists them)"
            )
        written = _write(sessions, arguments)
    if arguments.out:
        if arguments.json:
            emit_json(written)
        else:
            facts = ", ".join(f"{value} {name}" for name, value in written.items() if isinstance(value, int))
            say(f"{clean(arguments.out)}: {facts}")
    return 0


def _check(arguments: argparse.Namespace) -> None:
    from gpuflight.errors import InputError
    from gpuflight.events.export.tables import QUERIES, columns_of

    if arguments.table is not None and arguments.query is not None:
        raise InputError("--table or --query, not both")
    if arguments.form == "trace" and (arguments.table or arguments.query):
        raise InputError("--table and --query are of tables, not of a trace")
    if arguments.query is not None and arguments.query not in QUERIES:
        raise InputError(f"--query {arguments.query}: there are {', '.join(QUERIES)}")
    if arguments.table is not None:
        columns_of(arguments.table)
    if arguments.json and not arguments.out:
        raise InputError("--json says what was written; it needs --out")
    if arguments.out is None:
        if arguments.form == "parquet":
            raise InputError("parquet needs --out FILE")
    elif os.path.exists(arguments.out) and not arguments.force:
        raise InputError(f"{arguments.out}: exists already; --force replaces it")


def _write(sessions: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    from gpuflight.events.export.arrow import arrow_stream
    from gpuflight.events.export.tables import text_of, write_parquet
    from gpuflight.events.export.trace import TraceCounts, chrome_trace
    from gpuflight.events.query.reader import Reader

    reader = Reader(sessions.store, sessions.sessions)
    what = arguments.query or arguments.table or "kernel"
    if arguments.form == "parquet":
        rows = write_parquet(sessions.store, sessions.sessions, what, arguments.out)
        return {"file": arguments.out, "rows": rows, "bytes": os.path.getsize(arguments.out)}
    counts = TraceCounts()
    if arguments.form == "trace":
        pieces = chrome_trace(reader, counts)
    elif arguments.form == "arrow":
        pieces = arrow_stream(sessions.store, sessions.sessions, what)
    else:
        pieces = text_of(reader, what, arguments.form)
    size = _write_pieces(pieces, arguments.out)
    if arguments.form == "trace":
        return {"file": arguments.out, "events": counts.events, "unplaced": counts.unplaced, "bytes": size}
    return {"file": arguments.out, "bytes": size}


def _write_pieces(pieces: Iterator[bytes], path: str | None) -> int:
    """To standard output or, whole or not at all, to a file. The bytes before compression."""
    size = 0
    if path is None:
        sys.stdout.flush()
        for piece in pieces:
            size += sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
        return size
    import gzip

    partial = f"{path}.part"
    try:
        with gzip.open(partial, "wb", compresslevel=5) if path.endswith(".gz") else open(partial, "wb") as file:
            for piece in pieces:
                size += file.write(piece)
        os.replace(partial, path)
    except BaseException:
        if os.path.exists(partial):
            os.unlink(partial)
        raise
    return size


def _list(as_json: bool) -> int:
    from gpuflight.cli.output import console, emit_json, make_table
    from gpuflight.events.export.tables import QUERIES, columns_of
    from gpuflight.events.tables import TABLES

    if as_json:
        tables = {name: {"doc": table.doc, "columns": dict(columns_of(name))} for name, table in TABLES.items()}
        emit_json({"tables": tables, "queries": list(QUERIES)})
    else:
        rows = [["table", name, table.doc] for name, table in TABLES.items()]
        rows += [["query", name, ""] for name in QUERIES]
        console().print(make_table(["as", "name", "what"], rows))
    return 0
