"""The style sheet of an SVG picture: plain classes, which every reader of SVG knows (no variables)."""

from __future__ import annotations

from collections.abc import Iterable

from gpuflight.vis.palette import DARK, LIGHT, Palette, mix
from gpuflight.vis.visual import CATEGORIES, CHANGES, MEDIA

THEMES = ("auto", "light", "dark")

_FIXED = """\
text{font-family:system-ui,sans-serif}
.t{font-size:12px;font-weight:600}
.o{font-size:12px;font-weight:700}
.c{font-size:10.5px}
.s{font-size:10.5px}
.b,.v{font-size:9.5px}
.q{font-size:9.5px;text-anchor:middle}
.m{font-size:9px;font-weight:700;text-anchor:middle}
.h{paint-order:stroke;stroke-width:4px;stroke-linejoin:round}
.g{fill:none;stroke-width:1.4;stroke-linecap:round;stroke-linejoin:round}
.e{fill:none;stroke-linecap:butt;stroke-linejoin:round;opacity:.85}
.k{fill:none;stroke-linejoin:round;stroke-opacity:.5}
.d{stroke-dasharray:5 4}
"""


def style_sheet(theme: str, categories: Iterable[str], looks: Iterable[str]) -> str:
    """Rules for what occurs in a picture, in a fixed order. ``auto`` follows what the reader's system prefers.

    ``looks`` are those of lines and boxes: a medium, or a change.
    """
    kept_categories = [key for key in CATEGORIES if key in set(categories)]
    kept_looks = [key for key in (*MEDIA, *CHANGES) if key in set(looks)]
    if theme == "auto":
        dark = _colours(DARK, kept_categories, kept_looks)
        light = _colours(LIGHT, kept_categories, kept_looks)
        return f"{_FIXED}{light}@media (prefers-color-scheme:dark){{\n{dark}}}\n"
    return _FIXED + _colours(DARK if theme == "dark" else LIGHT, kept_categories, kept_looks)


def _colours(palette: Palette, categories: list[str], looks: list[str]) -> str:
    rules = [
        f".ground{{fill:{palette.ground}}}",
        f".t,.o,.c,.v{{fill:{palette.ink}}}",
        f".s,.b{{fill:{palette.soft}}}",
        f".w{{fill:{palette.surface}}}",
        f".rule{{stroke:{palette.line};stroke-width:1}}",
        f".critical{{fill:{palette.critical}}}",
        f".warn{{fill:{palette.warn}}}",
        f".info{{fill:{palette.info}}}",
        f".r-critical{{fill:none;stroke:{palette.critical}}}",
        f".r-warn{{fill:none;stroke:{palette.warn}}}",
        f".r-info{{fill:none;stroke:{palette.info}}}",
        f".h{{stroke:{palette.ground}}}",
    ]
    for key in categories:
        colour, ground = palette.category(key), palette.tint(key, 0.05)
        line = palette.tint(key, palette.frame_line)
        rules.append(
            f".f-{key}{{fill:{ground};stroke:{line}}}.a-{key}{{fill:{palette.surface};stroke:{line}}}"
            f".k-{key}{{fill:{colour}}}.g-{key}{{stroke:{colour}}}.h-{key}{{stroke:{ground}}}"
            f".z-{key}{{fill:{palette.tint(key, 0.16)}}}.p-{key}{{fill:{palette.tint(key, 0.42)}}}"
        )
    for key in looks:
        colour = palette.change(key) if key in CHANGES else palette.medium(key)
        plate = mix(colour, palette.surface, 0.55)
        rules.append(
            f".e-{key}{{stroke:{colour}}}.i-{key}{{fill:{colour}}}.l-{key}{{fill:{palette.surface};stroke:{plate}}}"
        )
        if key in CHANGES:
            rules.append(f".r-{key}{{fill:none;stroke:{colour}}}")
    return "\n".join(rules) + "\n"
