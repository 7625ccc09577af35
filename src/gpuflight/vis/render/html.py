"""One self-contained HTML page: the viewer, its style and the picture's data. It loads nothing from anywhere.

The page's own Content-Security-Policy allows exactly the script and the style it was written with, by their hashes, and
nothing else. Names reach the page only as JSON in a data block, in which no ``<`` is left, and from there only as text.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from functools import cache
from html import escape
from importlib import resources
from typing import Any, BinaryIO, ClassVar

import msgspec

from gpuflight.vis.base import Document, Renderer
from gpuflight.vis.model import LayoutGraph
from gpuflight.vis.render.payload import payload
from gpuflight.vis.text import clean

SCRIPTS = ("format.js", "model.js", "palette.js", "edges.js", "draw.js", "panel.js", "search.js", "viewer.js")
PLAIN_MAX_BYTES = 256 * 1024
"""Data up to here is written as plain JSON that a person can read and a tool can grep; larger data is deflated."""


class HtmlDocument(Document):
    """The page before it is bytes: the viewer's data."""

    data: dict[str, Any]


class HtmlRenderer(Renderer):
    """One HTML file with a viewer: pan, zoom, search, fold, details; needs no network."""

    name = "html"
    stability = "beta"
    suffix: ClassVar[str] = ".html"

    def build(self, layout: LayoutGraph) -> HtmlDocument:
        """See Renderer.build."""
        return HtmlDocument(title=clean(layout.title, 200), data=payload(layout))

    def write(self, document: HtmlDocument, file: BinaryIO) -> None:
        """See Renderer.write. The page is UTF-8."""
        page, style, script = _asset("page.html"), _asset("viewer.css"), viewer_script()
        policy = (
            f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data: blob:; "
            "base-uri 'none'; form-action 'none'"
        )
        encoding, data = _encode(document.data)
        parts = {
            "policy": policy,
            "title": escape(document.title),
            "style": style,
            "encoding": encoding,
            "data": data,
            "script": script,
        }
        head, *rest = page.split("{{")
        file.write(head.encode())
        for part in rest:
            name, _, text = part.partition("}}")
            file.write(parts[name].encode())
            file.write(text.encode())


def _encode(data: dict[str, Any]) -> tuple[str, str]:
    """JSON that cannot end its own ``<script>`` element, deflated and in base64 when large."""
    plain = msgspec.json.encode(data)
    if len(plain) > PLAIN_MAX_BYTES:
        return "deflate", base64.b64encode(zlib.compress(plain, 6)).decode()
    safe = plain.replace(b"<", b"\\u003c").replace(b">", b"\\u003e").replace(b"&", b"\\u0026")
    return "json", safe.decode()


@cache
def _asset(name: str) -> str:
    return resources.files("gpuflight.vis.render").joinpath("assets", name).read_text("utf-8")


@cache
def viewer_script() -> str:
    """The viewer as one script: its files in order, inside one function."""
    body = "\n".join(_asset(name) for name in SCRIPTS)
    return f'(() => {{\n"use strict";\n{body}}})();\n'


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
