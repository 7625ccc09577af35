"""The picture that ``gpuflight doctor --html`` writes: the machine, the findings on nodes and edges."""

from __future__ import annotations

from pathlib import Path

from gpuflight.bottlenecks.diagnosis import Diagnosis
from gpuflight.cli.vis import atomic_file
from gpuflight.graph.load import LoadedGraph
from gpuflight.registry import get


def write_page(diagnosis: Diagnosis, loaded: LoadedGraph, path: str, *, force: bool) -> None:
    """Draw ``loaded`` with the findings. Raises InputError if the file exists, OSError if it cannot be written."""
    from gpuflight.vis.base import Layout, Renderer
    from gpuflight.vis.loaded import layout_options

    loaded.findings = list(diagnosis.findings)
    options = layout_options(loaded, f"Doctor: {diagnosis.hostname or diagnosis.source}")
    writer = get(Renderer, "html")()
    document = writer.build(get(Layout, "default")().layout(loaded.graph, options))
    with atomic_file(Path(path), force=force) as file:
        writer.write(document, file)
