"""Pictures that Graphviz draws: SVG, PNG and PDF of the DOT text, placed by its program ``dot``.

``dot`` needs more than a minute for a thousand boxes with two thousand lines, so it has a limit of time; larger
pictures are the business of our own layouts and their formats.
"""

from __future__ import annotations

import os
import re
import tempfile
from typing import Any, BinaryIO, ClassVar

from gpuflight.errors import MissingExtra, SourceUnavailable
from gpuflight.sources.tools import Tools
from gpuflight.vis.base import Renderer
from gpuflight.vis.model import LayoutGraph
from gpuflight.vis.render.dot import DotDocument, dot_document

TIMEOUT_S = 60.0
_DATE = re.compile(rb"(/CreationDate \(D:)(\d+)")
HOW_TO_GET_IT = "install Graphviz: apt-get install graphviz, dnf install graphviz or brew install graphviz"


class _Graphviz(Renderer):
    """Base of the formats that the program ``dot`` writes."""

    abstract = True
    form: ClassVar[str]

    def build(self, layout: LayoutGraph) -> DotDocument:
        """See Renderer.build."""
        return dot_document(layout)

    def write(self, document: DotDocument, file: BinaryIO) -> None:
        """See Renderer.write. Raises MissingExtra without the package, SourceUnavailable without the program or when it
        takes longer than TIMEOUT_S."""
        command = self._command()
        tools = Tools()
        if tools.which(str(command[0])) is None:
            raise SourceUnavailable(f"{self.name}: the program dot is not on PATH", HOW_TO_GET_IT)
        handle, name = tempfile.mkstemp(suffix=".dot")
        try:
            with os.fdopen(handle, "wb") as source:
                source.write("\n".join(document.lines).encode())
            file.write(_undated(tools.run([*map(str, command), name], TIMEOUT_S)))
        except SourceUnavailable as error:
            size = f"{document.boxes_count} boxes and {document.lines_count} lines"
            raise SourceUnavailable(
                f"{self.name}: {error.reason} on {size}",
                "draw a part of it (--focus, --kinds), or choose a format that gpuflight places itself, such as html",
            ) from None
        finally:
            os.unlink(name)

    def _command(self) -> list[Any]:
        try:
            from graphviz.backend.dot_command import command
        except ImportError:
            raise MissingExtra("graphviz", "graphviz", self.name) from None
        made: list[Any] = command("dot", self.form)
        return made


def _undated(data: bytes) -> bytes:
    """A file without the time at which it was made: the same document gives the same bytes. No byte is added or taken,
    since a PDF counts them."""
    return _DATE.sub(lambda match: match[1] + b"0" * len(match[2]), data) if data.startswith(b"%PDF") else data


class GraphvizSvgRenderer(_Graphviz):
    """SVG placed and drawn by Graphviz (needs its program dot)."""

    name = "graphviz_svg"
    suffix: ClassVar[str] = ".svg"
    form: ClassVar[str] = "svg"


class GraphvizPngRenderer(_Graphviz):
    """PNG placed and drawn by Graphviz (needs its program dot)."""

    name = "graphviz_png"
    suffix: ClassVar[str] = ".png"
    binary: ClassVar[bool] = True
    form: ClassVar[str] = "png"


class GraphvizPdfRenderer(_Graphviz):
    """PDF placed and drawn by Graphviz (needs its program dot)."""

    name = "graphviz_pdf"
    suffix: ClassVar[str] = ".pdf"
    binary: ClassVar[bool] = True
    form: ClassVar[str] = "pdf"
