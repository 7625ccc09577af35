"""The picture's graph as text, for people in a terminal and for language models: what ``gpuflight describe`` prints."""

from __future__ import annotations

from typing import BinaryIO, ClassVar

from gpuflight.graph import Graph
from gpuflight.vis.base import Document, Renderer
from gpuflight.vis.model import LayoutGraph
from gpuflight.vis.text import clean


class TextDocument(Document):
    """The text, its lines without anything that a terminal obeys."""

    lines: list[str]


class TextRenderer(Renderer):
    """Compact text: programs as a tree with what they send where, the hardware, findings and notes."""

    name = "text"
    stability = "beta"
    suffix: ClassVar[str] = ".txt"

    def build(self, layout: LayoutGraph) -> TextDocument:
        """See Renderer.build."""
        graph = Graph(layout.entities, layout.edges)
        lines = [clean(layout.title, 200), ""] if layout.title else []
        lines += [clean(line) for line in graph.describe().rstrip("\n").split("\n")]
        if layout.findings:
            lines += ["", "Findings"]
            for finding in layout.findings:
                lines.append("  " + clean(f"{finding.severity}: {finding.message}"))
                lines += [f"    → {clean(finding.advice)}"] if finding.advice else []
        notes = [clean(note) for note in layout.notes]
        notes += [
            clean(f"{line.collector} {line.status}: {line.reason}") for line in layout.coverage if line.status != "ok"
        ]
        if notes:
            lines += ["", "Notes", *(f"  {note}" for note in notes)]
        return TextDocument(title=clean(layout.title, 200), lines=lines)

    def write(self, document: TextDocument, file: BinaryIO) -> None:
        """See Renderer.write. The file is UTF-8."""
        file.write(("\n".join(document.lines) + "\n").encode())
