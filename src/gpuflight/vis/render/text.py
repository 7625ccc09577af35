"""The picture's graph as text, for people in a terminal and for language models: what ``gpuflight describe`` prints."""

from __future__ import annotations

from typing import BinaryIO, ClassVar

from gpuflight.graph import Graph
from gpuflight.vis.base import Document, Renderer
from gpuflight.vis.model import LayoutGraph
from gpuflight.vis.render.tables import boxes_by_id
from gpuflight.vis.text import clean
from gpuflight.vis.visual import CHANGES, signed

CHANGES_MAX = 200


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
        lines += _changes(layout)
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


def _changes(layout: LayoutGraph) -> list[str]:
    """What a comparison found, entities before edges, a line each."""
    held = {entity.id for entity in layout.entities}
    boxes, links = boxes_by_id(layout.boxes), [link for link in layout.links if link.change in CHANGES]
    found = [signed(name, box.change) for name, box in boxes.items() if name in held and box.change in CHANGES]
    found += [signed(f"{link.kind} {link.source} → {link.target}", link.change) for link in links]
    if len(found) > CHANGES_MAX:
        found[CHANGES_MAX:] = [f"and {len(found) - CHANGES_MAX} more"]
    return ["", "Changes", *(f"  {clean(line)}" for line in found)] if found else []
