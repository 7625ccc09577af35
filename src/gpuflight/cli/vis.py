"""``gpuflight-vis``: graphs as a picture in one file.

Exit codes: 0 written, 1 the output could not be written or a server failed, 2 an input or an argument cannot be used.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from gpuflight.errors import GpuflightError, InputError

if TYPE_CHECKING:
    from gpuflight.graph.load import LoadedGraph
    from gpuflight.vis.choose import Choice
    from gpuflight.vis.sessions import SessionPicture

GRAPH_FILE = "graph.json"
SAY_FROM_NODES = 3000
"""From this size on each step is told on stderr: it can take seconds."""

_EPILOG = """\
INPUT is a graph.json, a run folder, a stream of rounds (its last one), a recording (*.tar.zst), a graph of
witty-profiler, GPU sessions (a folder of their logs, an event store, an SQLite export of Nsight Systems), or a server:
http://HOST:PORT, https://HOST:PORT, unix:PATH. Several become one picture: graphs of one machine are laid over each
other, other machines stand beside it, with the connections between them.

examples:
  gpuflight-vis graph.json
  gpuflight-vis run-folder -of html -o picture.html --focus gpu:0 --depth 2
  gpuflight-vis graph.json --kinds Host,GPU,Process --min-metric 'cpu_pct>10' -o busy.html
  gpuflight-vis after --diff before -o changes.html
  gpuflight-vis session-logs --layout-engine timeline -of svg -o session.svg

exit codes: 0 written, 1 the output cannot be written or a server failed, 2 an input or an argument cannot be used"""


def build_parser() -> argparse.ArgumentParser:
    """The command line of gpuflight-vis."""
    parser = argparse.ArgumentParser(
        prog="gpuflight-vis",
        description="Draw graphs: what is wired to what, in one file that needs no network.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("input", metavar="INPUT", nargs="+", help="what to draw, see below")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="where to write; the first INPUT with the format's suffix by default"
    )
    parser.add_argument(
        "-le", "--layout-engine", default="default", metavar="NAME", help="how to place (default: default)"
    )
    parser.add_argument("-of", "--format", default="html", metavar="NAME", help="what to write (default: html)")
    parser.add_argument("--title", default="", metavar="TEXT", help="title of the picture; the host name by default")
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    parser.add_argument("--open", action="store_true", help="show the file afterwards, in what opens such files")
    shown = parser.add_argument_group("what is shown (a note in the picture says what is left out)")
    shown.add_argument(
        "--focus",
        action="append",
        default=[],
        metavar="ID",
        help="only what is around an entity: an id, pid:42, gpu:0, a name; may be given again",
    )
    shown.add_argument(
        "--depth", type=int, default=1, metavar="N", help="with --focus: how many lines away (default 1)"
    )
    shown.add_argument(
        "--kinds", action="append", default=[], metavar="KINDS", help="only entities of these kinds: GPU,Process"
    )
    shown.add_argument(
        "--min-metric",
        action="append",
        default=[],
        metavar="NAME>VALUE",
        help="only what has such a metric, and both ends of edges that have it; several are alternatives",
    )
    compared = parser.add_argument_group("comparing and judging")
    compared.add_argument("--diff", metavar="OTHER", help="an INPUT from before: colour what came, went and changed")
    compared.add_argument(
        "--noise",
        type=float,
        default=10.0,
        metavar="PCT",
        help="with --diff: metrics that moved by at most so much did not change (default 10)",
    )
    compared.add_argument(
        "--findings", metavar="FILE", help="JSON with findings in place of those of the INPUT; - reads standard input"
    )
    server = parser.add_argument_group("for an INPUT that is a server")
    server.add_argument("--token-file", metavar="FILE", help="the file with the token (default: $GPUFLIGHT_TOKEN)")
    server.add_argument("--ca-file", metavar="FILE", help="PEM certificates to trust instead of the system's")
    server.add_argument("--timeout", metavar="S", type=float, default=30.0, help="longest wait (default 30 s)")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run gpuflight-vis; returns the exit code."""
    arguments = build_parser().parse_args(argv)
    try:
        written, size = run(arguments)
    except GpuflightError as error:
        print(f"gpuflight-vis: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        named = error.filename or arguments.output or arguments.input[0]
        print(f"gpuflight-vis: {named}: {error.strerror or error}", file=sys.stderr)
        return 1
    print(f"{written} ({size / 1024:,.0f} KiB)")
    if arguments.open and not _show(written):
        print(f"gpuflight-vis: nothing here opens {written}", file=sys.stderr)
    return 0


def run(arguments: argparse.Namespace) -> tuple[Path, int]:
    """Draw what the arguments say; returns the file written and its size in bytes.

    Raises InputError for what cannot be used, an output that exists without ``--force`` included; OSError when the
    output cannot be written. Nothing is left half-written.
    """
    from gpuflight.registry import get
    from gpuflight.vis.base import Layout, Renderer

    layout = get(Layout, arguments.layout_engine)()
    renderer = get(Renderer, arguments.format)()
    if not 0 <= arguments.noise < float("inf"):
        raise InputError("--noise: must be 0 percent or more")
    target = _target(arguments, renderer.suffix)
    if target.is_dir():
        raise InputError(f"{target} is a folder; name a file with -o")
    if target.exists() and not arguments.force:
        raise InputError(f"{target} exists; --force overwrites it")
    with contextlib.ExitStack() as stack:
        return target, _draw(stack, target, layout, renderer, arguments)


def _draw(stack: contextlib.ExitStack, target: Path, layout: Any, renderer: Any, arguments: argparse.Namespace) -> int:
    from gpuflight.cli import vis_inputs
    from gpuflight.vis.choose import Choice

    sessions: list[SessionPicture] = []
    loaded = [vis_inputs.load_any(name, arguments, stack, sessions) for name in arguments.input]
    one = vis_inputs.merge_inputs(loaded, arguments.input)
    if arguments.findings is not None:
        one.findings = vis_inputs.read_findings(arguments.findings)
    before = vis_inputs.load_input(arguments.diff, arguments) if arguments.diff is not None else None
    choice = Choice(arguments.focus, arguments.depth, arguments.kinds, arguments.min_metric)
    return _write(one, target, layout, renderer, choice, before, sessions, arguments)


def _write(
    loaded: LoadedGraph,
    target: Path,
    layout: Any,
    renderer: Any,
    choice: Choice,
    before: LoadedGraph | None,
    sessions: Sequence[SessionPicture],
    arguments: argparse.Namespace,
) -> int:
    from gpuflight.vis.loaded import layout_options
    from gpuflight.vis.picture import make_picture
    from gpuflight.vis.sessions import with_sessions

    def tell(step: str) -> None:
        if len(loaded.graph.nodes) >= SAY_FROM_NODES:
            print(f"gpuflight-vis: {step}", file=sys.stderr, flush=True)

    tell(f"placing {len(loaded.graph.nodes):,} entities and {len(loaded.graph.edges):,} edges ({layout.name})")
    picture = make_picture(
        loaded.graph,
        with_sessions(layout_options(loaded, arguments.title), sessions),
        layout,
        choice=choice,
        before=before.graph if before is not None else None,
        before_name=str(arguments.diff),
        noise=arguments.noise / 100,
    )
    tell(f"writing {target}")
    document = renderer.build(picture)
    if target.exists():
        with open(target, "rb") as previous:
            document = renderer.keep(document, previous)
    with atomic_file(target, force=arguments.force) as file:
        renderer.write(document, file)
        return file.tell()


def _target(arguments: argparse.Namespace, suffix: str) -> Path:
    """``-o``, or beside the first input: ``graph.json``, ``graph.json.zst`` → ``graph.html``; never an input itself."""
    if arguments.output is not None:
        return Path(arguments.output)
    from gpuflight.cli.vis_inputs import is_url

    first = arguments.input[0]
    if is_url(first):
        raise InputError(f"{first}: name the file to write with -o")
    path = Path(first)
    if path.is_dir():
        from gpuflight.vis.sessions import is_session_input

        path = path / ("session" if is_session_input(first) else GRAPH_FILE)
    if path.suffix in (".zst", ".gz"):
        path = path.with_suffix("")
    target = path.with_suffix(suffix)
    inputs = {Path(name) for name in (first, *arguments.input)} | {path}
    return target if target not in inputs else path.with_name(f"{path.stem}.picture{suffix}")


def _show(path: Path) -> bool:
    import webbrowser

    return webbrowser.open(path.resolve().as_uri())


@contextlib.contextmanager
def atomic_file(target: Path, *, force: bool) -> Iterator[BinaryIO]:
    """A binary file that appears as ``target`` whole or not at all: written beside it, synced, renamed.

    Without ``force`` a file that appeared in the meantime stays: InputError.
    """
    handle, name = tempfile.mkstemp(prefix=f".{target.name[:60]}.", suffix=".part", dir=target.parent or ".")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        if force:
            os.replace(name, target)
        else:
            try:
                os.link(name, target)
            except FileExistsError:
                raise InputError(f"{target} exists; --force overwrites it") from None
            except OSError:  # a file system without hard links
                if target.exists():
                    raise InputError(f"{target} exists; --force overwrites it") from None
                os.replace(name, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


if __name__ == "__main__":
    sys.exit(main())
