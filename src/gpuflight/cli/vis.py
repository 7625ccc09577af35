"""``gpuflight-vis``: a saved graph as a picture in one file.

INPUT is a ``graph.json`` of ours, a run folder that holds one, or the JSON of witty-profiler. Exit codes: 0 written,
1 the output could not be written, 2 the input or an argument cannot be used.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from gpuflight.errors import GpuflightError, InputError

if TYPE_CHECKING:
    from gpuflight.graph.load import LoadedGraph

GRAPH_FILE = "graph.json"


def build_parser() -> argparse.ArgumentParser:
    """The command line of gpuflight-vis."""
    parser = argparse.ArgumentParser(
        prog="gpuflight-vis",
        description="Draw a saved graph: what is wired to what, in one file that needs no network.",
        epilog="exit codes: 0 written, 1 the output cannot be written, 2 the input or an argument cannot be used",
    )
    parser.add_argument("input", metavar="INPUT", help="graph.json, a run folder, or a graph of witty-profiler")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="where to write; INPUT with the format's suffix by default"
    )
    parser.add_argument(
        "-le", "--layout-engine", default="default", metavar="NAME", help="how to place (default: default)"
    )
    parser.add_argument("-of", "--format", default="html", metavar="NAME", help="what to write (default: html)")
    parser.add_argument("--title", default="", metavar="TEXT", help="title of the picture; the host name by default")
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run gpuflight-vis; returns the exit code."""
    arguments = build_parser().parse_args(argv)
    try:
        written, size = draw(
            Path(arguments.input),
            Path(arguments.output) if arguments.output else None,
            layout=arguments.layout_engine,
            renderer=arguments.format,
            title=arguments.title,
            force=arguments.force,
        )
    except GpuflightError as error:
        print(f"gpuflight-vis: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(
            f"gpuflight-vis: {error.filename or arguments.output or arguments.input}: {error.strerror}", file=sys.stderr
        )
        return 1
    print(f"{written} ({size / 1024:,.0f} KiB)")
    return 0


def draw(
    source: Path, output: Path | None = None, *, layout: str = "default", renderer: str = "html", title: str = "",
    force: bool = False,
) -> tuple[Path, int]:  # fmt: skip
    """Draw the graph at ``source``; returns the file written and its size in bytes.

    Raises InputError for an unknown layout or format, an input that is no graph, an output that exists without
    ``force``; OSError when the output cannot be written. Nothing is left half-written.
    """
    from gpuflight.registry import get
    from gpuflight.vis.base import Layout, Renderer
    from gpuflight.vis.loaded import layout_options

    engine = get(Layout, layout)()
    writer = get(Renderer, renderer)()
    graph_file = source / GRAPH_FILE if source.is_dir() else source
    target = output if output is not None else _beside(graph_file, writer.suffix)
    if target.is_dir():
        raise InputError(f"{target} is a folder; name a file with -o")
    if target.exists() and not force:
        raise InputError(f"{target} exists; --force overwrites it")
    loaded = _load(graph_file)
    document = writer.build(engine.layout(loaded.graph, layout_options(loaded, title)))
    with atomic_file(target, force=force) as file:
        writer.write(document, file)
        size = file.tell()
    return target, size


def _beside(graph_file: Path, suffix: str) -> Path:
    """``graph.json``, ``graph.json.zst`` → ``graph.html``; never the input itself."""
    if graph_file.suffix in (".zst", ".gz"):
        graph_file = graph_file.with_suffix("")
    target = graph_file.with_suffix(suffix)
    return target if target != graph_file else graph_file.with_name(graph_file.name + suffix)


def _load(path: Path) -> LoadedGraph:
    from gpuflight.graph.load import load_graph

    try:
        return load_graph(str(path))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder") from None
    except PermissionError:
        raise InputError(f"{path} may not be read") from None


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
