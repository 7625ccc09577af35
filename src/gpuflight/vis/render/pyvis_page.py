"""A page of PyVis (https://pyvis.readthedocs.io): boxes as nodes of vis-network, at the places of the layout.

The page is PyVis's own with its libraries inside it, less what it would fetch from elsewhere; a Content-Security-Policy
keeps it so. Nothing is placed in the browser (physics is off), so a large picture is there at once. Names reach the
page as JSON in which no ``<`` is left. For more than BOXES_MAX boxes the inner ones are left out, and a line says so:
the format ``html`` shows them all.
"""

from __future__ import annotations

import re
from html import escape
from typing import Any, BinaryIO, ClassVar

from gpuflight.errors import MissingExtra
from gpuflight.vis.base import Document, Renderer
from gpuflight.vis.model import LayoutGraph
from gpuflight.vis.render.shown import ShownBox, ShownLine, shown
from gpuflight.vis.text import clean, human, plural
from gpuflight.vis.visual import CATEGORIES, CHANGES, MEDIA, signed

BOXES_MAX = 5_000
LABEL_LIMIT = 80
TITLE_VALUES_MAX = 24
_POLICY = (
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data:; font-src data:; base-uri 'none'; form-action 'none'\">"
)
_ELSEWHERE = re.compile(
    r"""<link\b[^>]*\bhref="https?:[^>]*>|<script\b[^>]*\bsrc="https?:[^>]*>\s*</script>|<!--.*?-->""", re.DOTALL
)
_HEADINGS = re.compile(r"<center>\s*<h1>.*?</h1>\s*</center>", re.DOTALL)


class PyvisDocument(Document):
    """Nodes and edges as vis-network takes them, and the lines above the picture."""

    nodes: list[dict[str, Any]]
    edges: list[dict[str, Any]]
    notes: list[str]


class PyvisRenderer(Renderer):
    """PyVis page: boxes as nodes of vis-network in one HTML file without network (needs the package pyvis)."""

    name = "pyvis"
    suffix: ClassVar[str] = ".pyvis.html"

    def build(self, layout: LayoutGraph) -> PyvisDocument:
        """See Renderer.build."""
        picture = shown(layout)
        boxes = picture.boxes[:BOXES_MAX]
        lines = [line for line in picture.lines if line.source < len(boxes) and line.target < len(boxes)]
        notes = [clean(note) for note in (*layout.notes, picture.key_of_changes()) if note]
        if left_out := len(picture.boxes) - len(boxes):
            notes.append(
                f"{plural(left_out, 'box')} and {plural(len(picture.lines) - len(lines), 'line')} left out: more than "
                f"{BOXES_MAX:,} boxes make a browser stand still here; the format html shows all"
            )
        return PyvisDocument(
            title=clean(layout.title, 200),
            nodes=[_node(item) for item in boxes],
            edges=[_edge(line) for line in lines],
            notes=notes,
        )

    def write(self, document: PyvisDocument, file: BinaryIO) -> None:
        """See Renderer.write. UTF-8 whatever the locale. Raises MissingExtra without the package."""
        try:
            from pyvis.network import Network
        except ImportError:
            raise MissingExtra("pyvis", "pyvis", "the format pyvis") from None
        network = Network(height="92vh", width="100%", directed=True, cdn_resources="in_line")
        network.toggle_physics(False)
        for node in document.nodes:
            network.add_node(**node)
        network.edges.extend(document.edges)
        # "smooth" edges are looked for anew at each frame.
        network.set_options('{"physics":{"enabled":false},"edges":{"smooth":false},"interaction":{"hover":true}}')
        page = network.generate_html(notebook=False)
        file.write(_offline(page, document).encode("utf-8", "backslashreplace"))


def _offline(page: str, document: PyvisDocument) -> str:
    """PyVis's page without what it fetches and with our heading, which it would not escape."""
    page = _HEADINGS.sub("", _ELSEWHERE.sub("", page))
    notes = "".join(f"<p>{escape(note)}</p>" for note in document.notes)
    heading = f'<div style="font:13px sans-serif;margin:4px 8px"><b>{escape(document.title)}</b>{notes}</div>'
    page = page.replace('<meta charset="utf-8">', f'<meta charset="utf-8">{_POLICY}', 1)
    page = page.replace("</head>", f"<title>{escape(document.title)}</title></head>", 1)
    return page.replace("<body>", f"<body>{heading}", 1)


def _node(item: ShownBox) -> dict[str, Any]:
    box = item.box
    colour = CHANGES.get(box.change, CATEGORIES.get(box.category, CATEGORIES["group"]))[1]
    frame = item.is_frame
    values = [*box.lines, *(f"{bar.label}: {bar.text}" for bar in box.bars)]
    values += [f"{name}: {human(name, value)}" for name, value in (*box.attributes.items(), *box.metrics.items())]
    values += [f"{name}: unknown, {reason}" for name, reason in box.unknown.items()]
    text = [clean(box.id, 300), *(clean(value, 300) for value in values[:TITLE_VALUES_MAX])]
    if len(values) > TITLE_VALUES_MAX:
        text.append(f"… and {len(values) - TITLE_VALUES_MAX} more")
    return {
        "n_id": item.number,
        "label": clean(signed(box.label, box.change), LABEL_LIMIT)
        or " ",  # PyVis takes the number for a label that is empty
        "title": "\n".join(text),
        "shape": "box",
        # What holds others is its header: a box as large as it is would lie over them.
        "x": round(box.x + box.w / 2, 2),
        "y": round(box.y + (min(box.header, box.h) / 2 if frame else box.h / 2), 2),
        "color": {"border": colour, "background": "#e8edf3" if frame else "#ffffff"},
        "kind": clean(box.kind, LABEL_LIMIT),
        "borderWidth": 3 if box.role == "group" or box.change in CHANGES else 1,
        **({"shapeProperties": {"borderDashes": [5, 4]}} if box.change == "removed" else {}),
        "font": {"size": max(1, round(12 * box.scale))},
        "physics": False,
    }


def _edge(line: ShownLine) -> dict[str, Any]:
    route = line.route
    _, colour, _, dashes = MEDIA.get(route.medium, MEDIA["attribute"])
    heads = [head for head, is_there in (("to", route.forward), ("from", route.backward)) if is_there]
    return {
        "from": line.source,
        "to": line.target,
        "title": signed(clean(route.label, 300) or route.medium, route.change),
        "color": CHANGES.get(route.change, ("", colour))[1],
        "dashes": bool(dashes) or route.change == "removed",
        **({"label": CHANGES[route.change][0]} if route.change in CHANGES else {}),
        "arrows": ", ".join(heads),
        "width": round(1 + 3 * route.weight, 2),
    }
