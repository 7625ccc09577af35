"""``gpuflight report``: what a GPU session did, how fast, what slowed it down, and what could not be seen."""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING, Any

from gpuflight.cli.event_source import Sessions, add_source_arguments, open_sessions

if TYPE_CHECKING:
    from rich.console import Console

    from gpuflight.events.report.document import Section
    from gpuflight.events.report.model import Report

DESCRIPTION = """\
Report on a GPU session: kernels, copies, waits, memory, telemetry, scopes, profiles, hints, and what was lost.

DIR is a folder of GPU Flight logs of any version (also of a session that still runs, was killed or is damaged), or one
that holds such folders. A session of an event store is named by its id together with --store, one of a server with
--url. Of several sessions in DIR a list is printed, unless --session chooses.
"""

EXAMPLES = (
    "gpuflight report logs",
    "gpuflight report logs --top 5 --json",
    "gpuflight report logs --session all --html report.html --force",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    from gpuflight.cli.rest import add_server_arguments

    add_source_arguments(parser)
    parser.add_argument("--top", metavar="N", type=int, default=20, help="most lines of a list (1 to 1000, default 20)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--html", metavar="FILE", help="write it as one HTML page that needs nothing else")
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")
    add_server_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Read, ask, print."""
    from gpuflight.errors import InputError
    from gpuflight.events.report.build import MAX_TOP

    if not 1 <= arguments.top <= MAX_TOP:
        raise InputError(f"--top {arguments.top}: must be from 1 to {MAX_TOP}")
    if arguments.html and os.path.exists(arguments.html) and not arguments.force:
        raise InputError(f"{arguments.html}: exists already; --force replaces it")
    if arguments.url is not None:
        return _show([_from_server(arguments)], arguments)
    with open_sessions(arguments) as sessions:
        if len(sessions.sessions) > 1 and arguments.session is None:
            return _list(sessions, arguments)
        return _show([_report(sessions, i, arguments.top) for i in range(len(sessions.sessions))], arguments)


def _report(sessions: Sessions, index: int, top: int) -> Report:
    from gpuflight.events.report import build_report

    session = sessions.sessions[index]
    source = sessions.sources.get(session.session_id, "")
    return build_report(
        sessions.store, session, now_ns=time.time_ns(), top=top, source=source, state_now=sessions.state(session)
    )


def _from_server(arguments: argparse.Namespace) -> Report:
    """The server builds it; what comes back has the form of ``Report``."""
    from urllib.parse import quote

    import msgspec

    from gpuflight.cli.rest import Rest
    from gpuflight.errors import GpuflightError, InputError
    from gpuflight.events.report.model import Report

    if arguments.store is not None or arguments.session is not None:
        raise InputError("--url: the server has its own store; give the session's id alone")
    rest = Rest(arguments)
    answer = rest.call("GET", f"/api/v1/sessions/{quote(arguments.what, safe='')}/report?top={arguments.top}")
    try:
        return msgspec.convert(answer.get("report", answer), Report)
    except msgspec.ValidationError as error:
        raise GpuflightError(f"{rest.url}: what it answers is no report: {error}") from None


def _show(reports: list[Report], arguments: argparse.Namespace) -> int:
    if arguments.html:
        _write_page(reports, arguments.html)
    if arguments.json:
        import msgspec

        from gpuflight.cli.output import emit_json

        plain = [msgspec.to_builtins(report) for report in reports]
        emit_json(plain[0] if len(plain) == 1 else {"reports": plain})
    elif not arguments.html:
        from gpuflight.cli.output import console

        out = console()
        for report in reports:
            print_report(report, out)
    return 0


def _write_page(reports: list[Report], path: str) -> None:
    from gpuflight import __version__
    from gpuflight.cli.output import clean, say
    from gpuflight.events.report.html import page

    text = page(reports, f"gpuflight {__version__}")
    partial = f"{path}.part"
    try:
        with open(partial, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        os.replace(partial, path)
    except BaseException:
        if os.path.exists(partial):
            os.unlink(partial)
        raise
    say(f"{clean(path)}: {len(text.encode('utf-8', 'replace')) / 1e3:.0f} kB")


def print_report(report: Report, out: Console) -> None:
    """All sections on the terminal."""
    from gpuflight.events.report.document import sections

    for section in sections(report):
        _print_section(section, out)


def _print_section(section: Section, out: Console) -> None:
    from rich.text import Text

    from gpuflight.cli.output import clean, make_table
    from gpuflight.events.report import words

    style = "bold yellow" if section.tone == "warning" and section.rows else "bold"
    out.print(Text(section.title, style=style))
    if section.note:
        out.print(Text(clean(section.note), style="dim"))
    if section.columns and section.rows:
        columns: list[Any] = [
            (name[:-1], {"justify": "right"}) if name.endswith(">") else name for name in section.columns
        ]
        used = [i for i in range(len(columns)) if any(row[i] is not None for row in section.rows)]
        rows = [[words.plain(row[i]) for i in used] for row in section.rows]
        out.print(make_table([columns[i] for i in used], rows))
    else:
        width = max((len(row[0] or "") for row in section.rows), default=0)
        for row in section.rows:
            out.print(
                Text(f"  {(row[0] or ''):{width}}  ", style="dim").append(clean(words.plain(row[1])), style="not dim")
            )
    out.print()


def _list(sessions: Sessions, arguments: argparse.Namespace) -> int:
    """Which sessions there are, in the order of time."""
    from gpuflight.cli.output import console, emit_json, make_table, say
    from gpuflight.events.query.sessions import describe
    from gpuflight.events.report import words

    lines = describe(sessions.store, sessions.sessions, time.time_ns())
    if arguments.json:
        import msgspec

        listed = []
        for line in lines:
            line.state = sessions.state(line.session) or line.state
            listed.append(msgspec.to_builtins(line) | {"source": sessions.sources.get(line.session.session_id)})
        emit_json({"sessions": listed})
    else:
        rows = []
        for line in lines:
            session = line.session
            first, last = session.start_ns or session.first_event_ns, session.end_ns or session.last_event_ns
            rows.append(
                [
                    session.session_id,
                    session.app,
                    words.moment(first),
                    words.time(last - first) if first is not None and last is not None else None,
                    sessions.state(session) or line.state,
                    words.count(line.records.get("kernel", 0)),
                    words.count(line.lost_count),
                ]
            )
        right = {"justify": "right"}
        columns: list[Any] = ["session", "application", "from", ("lasted", right), "state"]
        columns += [("kernels", right), ("lost", right)]
        console().print(make_table(columns, rows))
    say(f"{len(lines)} sessions; --session ID reports one of them, --session all every one")
    return 0
