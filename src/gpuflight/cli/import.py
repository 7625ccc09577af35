"""``gpuflight import``: traces of other profilers into an event store."""

from __future__ import annotations

import argparse
from typing import Any

DESCRIPTION = """\
Take a trace of another profiler into an event store, where it is a session like any other.

FILE is a trace of the PyTorch profiler (Kineto; JSON, may be gzip) or an SQLite export of Nsight Systems
(`nsys export --type sqlite`). The same file again, or one whose import was cut off, is not stored twice. To look at one
without a store, `gpuflight report FILE` and `gpuflight export FILE` take it as it is.
"""

EXAMPLES = (
    "gpuflight import trace.pt.trace.json --store events",
    "gpuflight import trace.pt.trace.json --store events --json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("files", metavar="FILE", nargs="+", help="traces to import")
    parser.add_argument("--store", metavar="FOLDER", required=True, help="the event store; made if it is not there")
    parser.add_argument("--json", action="store_true", help="print what was imported as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Import one file after the other; say of each what came and what could not. A file that is no trace costs itself
    only; the exit code is then 1, or 2 if none is one."""
    from gpuflight.cli.output import emit_json, say
    from gpuflight.errors import InputError
    from gpuflight.events.imports import open_import
    from gpuflight.events.store import open_store

    refused: dict[str, str] = {}
    traces = []
    for path in arguments.files:
        try:
            traces.append(open_import(path))
        except InputError as error:
            refused[path] = str(error)
    if not traces:
        raise InputError("\n".join(refused.values()))
    store = open_store(arguments.store)
    imported = []
    try:
        for trace in traces:
            try:
                imported.append(_one(store, trace))
            except InputError as error:
                refused[trace.path] = str(error)
    finally:
        store.close()
    if arguments.json:
        emit_json({"imported": imported, "refused": [{"file": f, "reason": r} for f, r in refused.items()]})
    else:
        for one in imported:
            _print(one)
    for reason in refused.values():
        say(f"gpuflight: {reason}")
    return 1 if refused else 0


def _one(store: Any, trace: Any) -> dict[str, Any]:
    import os

    from gpuflight.cli.event_source import ReadProgress
    from gpuflight.cli.output import clean
    from gpuflight.events.load import load_import

    title = f"importing {clean(trace.path)} ({trace.kind})"
    with ReadProgress(title, os.path.getsize(trace.path)) as progress:
        loaded = load_import(store, trace, progress.done)
    return {
        "file": trace.path,
        "kind": trace.kind,
        "sessions": loaded.sessions,
        "rows": loaded.rows,
        "ledger": trace.ledger.dump(),
    }


def _print(one: dict[str, Any]) -> None:
    from gpuflight.cli.output import clean

    sessions = ", ".join(one["sessions"]) or "no session"
    print(f"{clean(one['file'])} ({one['kind']}): {one['rows']} rows as {sessions}")
    for entry in one["ledger"]:
        about = f" ({clean(entry['about'])})" if entry["about"] else ""
        print(f"  {entry['effect']} {entry['count']}: {entry['text']}{about}")
