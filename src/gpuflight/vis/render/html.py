"""One self-contained HTML page: the viewer, its style and the picture's data. It loads nothing from anywhere.

The page's own Content-Security-Policy allows exactly the script and the style it was written with, by their hashes, and
nothing else. Names reach the page only as JSON in a data block, in which no ``<`` is left, and from there only as text.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Iterator
from functools import cache
from html import escape
from importlib import resources
from typing import Any, BinaryIO, ClassVar

import msgspec

from gpuflight.vis.base import Document, Renderer
from gpuflight.vis.model import LayoutGraph
from gpuflight.vis.render.payload import payload
from gpuflight.vis.text import clean

SCRIPTS = (
    "format.js",
    "model.js",
    "palette.js",
    "edges.js",
    "draw.js",
    "panel.js",
    "search.js",
    "view.js",
    "viewer.js",
)
"""The viewer itself, the same here and on the live page of a server."""
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
        encoding, data = _encode(document.data)
        block = f'<script type="application/json" id="data" data-encoding="{encoding}">{data}</script>'
        file.writelines(_page(viewer_script(), _policy(viewer_script()), escape(document.title), block, ""))


def live_page() -> tuple[bytes, str]:
    """The same viewer as a page of a server, and its Content-Security-Policy. It holds nothing of any machine: its
    script fetches the picture from where the page came from (``api/v1/graph/view``) and follows the stream of rounds.
    """
    script = viewer_script("live.js")
    policy = _policy(script, connect="'self'")
    page = b"".join(_page(script, policy, "live", "", _asset("token.html")))
    return page, f"{policy}; frame-ancestors 'none'"  # a page cannot say this of itself


def _policy(script: str, connect: str = "") -> str:
    allowed = f"connect-src {connect}; " if connect else ""
    return (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(_asset('viewer.css'))}'; "
        f"img-src data: blob:; {allowed}base-uri 'none'; form-action 'none'"
    )


def _page(script: str, policy: str, title: str, block: str, extra: str) -> Iterator[bytes]:
    parts = {
        "policy": policy, "title": title, "style": _asset("viewer.css"), "extra": extra, "block": block,
        "script": script,
    }  # fmt: skip
    head, *rest = _asset("page.html").split("{{")
    yield head.encode()
    for part in rest:
        name, _, text = part.partition("}}")
        yield parts[name].encode()
        yield text.encode()


def _encode(data: dict[str, Any]) -> tuple[str, str]:
    """JSON that cannot end its own ``<script>`` element, deflated and in base64 when large."""
    plain = msgspec.json.encode(data)
    if len(plain) > PLAIN_MAX_BYTES:
        return "deflate", base64.b64encode(zlib.compress(plain, 2)).decode()
    safe = plain.replace(b"<", b"\\u003c").replace(b">", b"\\u003e").replace(b"&", b"\\u0026")
    return "json", safe.decode()


@cache
def _asset(name: str) -> str:
    return resources.files("gpuflight.vis.render").joinpath("assets", name).read_text("utf-8")


@cache
def viewer_script(start: str = "start.js") -> str:
    """The viewer as one script: its files in order and the one that starts it, inside one function."""
    body = "\n".join(_asset(name) for name in (*SCRIPTS, start))
    return f'(() => {{\n"use strict";\n{body}}})();\n'


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
