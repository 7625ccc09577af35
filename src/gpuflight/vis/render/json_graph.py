"""The graph as JSON, in the form that gpuflight's own files have (docs/graph.md): what is drawn can be read again.

With ``--focus`` and the like it is the part that was chosen, with ``--diff`` the newer graph. ``<``, ``>`` and ``&``
are written as escapes, so that the text is harmless wherever it is put. A number that is not finite is ``null``, and
unknown to who reads it.
"""

from __future__ import annotations

from typing import Any, BinaryIO, ClassVar

import msgspec

from gpuflight.graph import edge_id
from gpuflight.graph.codec import SCHEMA, edge_kind_table, encode, time_text
from gpuflight.graph.codec import Document as GraphFile
from gpuflight.vis.base import Document, Renderer
from gpuflight.vis.changes import REMOVED
from gpuflight.vis.model import LayoutGraph
from gpuflight.vis.render.tables import boxes_by_id
from gpuflight.vis.text import clean


class JsonDocument(Document):
    """A graph file before it is bytes."""

    data: GraphFile


class JsonRenderer(Renderer):
    """JSON: the graph itself, as gpuflight reads it again."""

    name = "json"
    suffix: ClassVar[str] = ".json"

    def build(self, layout: LayoutGraph) -> JsonDocument:
        """See Renderer.build."""
        boxes = boxes_by_id(layout.boxes)
        gone = {box_id for box_id, box in boxes.items() if box.change == REMOVED}
        gone |= {edge_id((link.source, link.target, link.kind)) for link in layout.links if link.change == REMOVED}
        environment: dict[str, Any] = msgspec.to_builtins(layout.environment)
        return JsonDocument(
            title=clean(layout.title, 200),
            data=GraphFile(
                schema=SCHEMA,
                round=layout.round_number,
                time=_time(layout.time_ns),
                env={name: value for name, value in environment.items() if value},
                edge_kinds=edge_kind_table(),
                nodes=[entity for entity in layout.entities if entity.id not in gone],
                edges=[edge for edge in layout.edges if not gone or edge.id not in gone],
                coverage=[msgspec.to_builtins(line) for line in layout.coverage],
                findings=[msgspec.to_builtins(finding) for finding in layout.findings],
            ),
        )

    def write(self, document: JsonDocument, file: BinaryIO) -> None:
        """See Renderer.write."""
        data = encode(document.data)
        for raw, safe in ((b"<", b"\\u003c"), (b">", b"\\u003e"), (b"&", b"\\u0026")):
            data = data.replace(raw, safe)  # in JSON these stand inside texts only
        file.write(data)
        file.write(b"\n")


def _time(time_ns: int) -> str:
    try:
        return time_text(time_ns) if time_ns else ""
    except (ValueError, OverflowError, OSError):
        return ""
