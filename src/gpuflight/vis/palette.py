"""Colours of a picture on a light and on a dark ground, as the viewer has them (``viewer.css``, ``palette.js``)."""

from __future__ import annotations

from dataclasses import dataclass

from gpuflight.vis.visual import CATEGORIES, CHANGES, MEDIA


@dataclass(frozen=True)
class Palette:
    """The colours of one theme. ``at`` is the column of ``CATEGORIES`` and ``MEDIA`` that it takes."""

    at: int
    ground: str
    surface: str
    ink: str
    soft: str
    line: str
    critical: str
    warn: str
    info: str
    frame_line: float

    def category(self, key: str) -> str:
        """Colour of a category."""
        return CATEGORIES[key][self.at]

    def medium(self, key: str) -> str:
        """Colour of a medium."""
        return MEDIA[key][self.at]

    def change(self, key: str) -> str:
        """Colour of what a comparison found."""
        return CHANGES[key][self.at]

    def tint(self, key: str, share: float) -> str:
        """Colour of a category, thinned on the surface."""
        return mix(self.category(key), self.surface, share)


LIGHT = Palette(
    1, "#eef1f5", "#ffffff", "#1b2430", "#5a6675", "#d3dae3", "#b3261e", "#8a5a00", "#0072b2", frame_line=0.42
)  # fmt: skip
DARK = Palette(
    2, "#12161c", "#1b2129", "#e6ebf2", "#9ba8b8", "#323c49", "#ff8a80", "#f0b040", "#56b4e9", frame_line=0.5
)  # fmt: skip


def mix(front: str, back: str, share: float) -> str:
    """``front`` laid over ``back``, ``share`` of it: 0 is all ``back``."""
    pairs = ((int(front[at : at + 2], 16), int(back[at : at + 2], 16)) for at in (1, 3, 5))
    return "#" + "".join(f"{round(a * share + b * (1 - share)):02x}" for a, b in pairs)
