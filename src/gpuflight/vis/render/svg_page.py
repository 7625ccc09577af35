"""What stands around an SVG picture: its title above it; legend, findings and notes below."""

from __future__ import annotations

from gpuflight.vis.glyph_widths import cut_to, text_width, wrapped
from gpuflight.vis.model import LayoutGraph
from gpuflight.vis.render.payload import time_text
from gpuflight.vis.render.svg_boxes import RANK, number, triangle
from gpuflight.vis.render.xml_text import xml
from gpuflight.vis.text import clean, plural
from gpuflight.vis.visual import CHANGES, GLYPHS, MEDIA, signed

HEAD = 50.0
FINDINGS_MAX = 12
NOTES_MAX = 12
_LINE = 18.0


def head(layout: LayoutGraph, width: float) -> str:
    """Title, and where and when this was."""
    title = cut_to(clean(layout.title, 200), width - 32, 17, bold=True)
    environment = layout.environment
    facts = [
        environment.hostname if environment.hostname != layout.title else "",
        f"kernel {environment.kernel}" if environment.kernel else "",
        time_text(layout.time_ns),
        f"round {layout.round_number}" if layout.round_number else "",
        plural(layout.nodes_count, "entity"),
        plural(layout.edges_count, "edge"),
    ]
    said = cut_to(clean(" · ".join(fact for fact in facts if fact), 400), width - 32, 11)
    return (
        f'<text class="o" x="16" y="25" style="font-size:17px">{xml(title)}</text>'
        f'<text class="s" x="16" y="42" style="font-size:11px">{xml(said)}</text>'
    )


class Foot:
    """Legend, findings and notes, in lines of ``width``; ``height`` is what they need, ``parts`` is their SVG."""

    def __init__(
        self, layout: LayoutGraph, width: float, media: set[str], changes: set[str], without_words: int
    ) -> None:
        self.width = width
        self.parts: list[str] = []
        self.height = 10.0
        self.glyphs: set[str] = set()
        self.categories: set[str] = set()
        if layout.kinds or media:
            self._legend(layout, media, changes)
        self._findings(layout)
        self._notes(layout, without_words)
        self.height += 8

    def _heading(self, words: str) -> None:
        self.height += 4
        self.parts.append(
            f'<path class="rule" d="M16 {number(self.height)}H{number(self.width - 16)}"/>'
            f'<text class="s" x="16" y="{number(self.height + 18)}" font-weight="600">{words}</text>'
        )
        self.height += 40

    def _legend(self, layout: LayoutGraph, media: set[str], changes: set[str]) -> None:
        self._heading("Legend")
        x = 16.0
        for entry in layout.kinds:
            kind = entry.key if entry.key in GLYPHS else "?"
            self.glyphs.add(kind)
            self.categories.add(entry.category)
            words = plural(entry.count, clean(entry.label, 60))
            mark = (
                f'<use href="#g-{kind.replace("?", "unknown")}" class="g g-{entry.category}" x="{{x}}" y="{{y}}"'
                ' width="12" height="12"/>'
            )
            x = self._entry(x, mark, words, 18)
        x = self._break(x)
        for entry in layout.media:
            if entry.key in media:
                dash = f' stroke-dasharray="{MEDIA[entry.key][3]}"' if MEDIA[entry.key][3] else ""
                mark = f'<path class="e e-{entry.key}" d="M{{x}} {{middle}}h20" stroke-width="2"{dash}/>'
                x = self._entry(x, mark, f"{entry.label} ({entry.count})", 26)
        for change in CHANGES:
            if change in changes:
                dashed = " d" if change == "removed" else ""
                mark = (
                    f'<rect class="r-{change}{dashed}" x="{{x}}" y="{{y}}" width="20" height="12" rx="4"'
                    ' stroke-width="1.8"/>'
                )
                x = self._entry(x, mark, signed(change, change), 26)
        self._break(x)

    def _entry(self, x: float, mark: str, words: str, indent: float) -> float:
        width = indent + text_width(words, 10.5) + 18
        if x > 16 and x + width > self.width - 16:
            x = self._break(x)
        y = self.height - 4
        places = {"x": number(x), "y": number(y - 6), "middle": number(y)}
        self.parts.append(mark.format(**places))
        said = cut_to(words, self.width - 32 - indent, 10.5)
        self.parts.append(f'<text class="s" x="{number(x + indent)}" y="{number(y + 3.8)}">{xml(said)}</text>')
        return x + width

    def _break(self, x: float) -> float:
        if x > 16:
            self.height += _LINE
        return 16.0

    def _findings(self, layout: LayoutGraph) -> None:
        if not layout.findings:
            return
        self._heading("Findings")
        ordered = sorted(layout.findings, key=lambda finding: (-RANK[finding.severity], finding.id))
        for finding in ordered[:FINDINGS_MAX]:
            self.parts.append(f'<path class="{finding.severity}" d="{triangle(24, self.height - 4)}"/>')
            self.parts.append(f'<text class="m w" x="24" y="{number(self.height + 0.6)}">!</text>')
            said = f"{finding.severity}: {finding.message}"
            if finding.cost:
                said += f" — {finding.cost}"
            self._lines(clean(said, 600), 40, "v", 11.0, 2)
            if finding.advice:
                self._lines("→ " + clean(finding.advice, 600), 40, "s", 10.5, 2)
        if len(ordered) > FINDINGS_MAX:
            self._lines(f"and {plural(len(ordered) - FINDINGS_MAX, 'finding')} more", 40, "s", 10.5, 1)

    def _notes(self, layout: LayoutGraph, without_words: int) -> None:
        notes = [clean(note, 600) for note in layout.notes]
        if without_words:
            notes.append(f"{plural(without_words, 'line')} without words: there is no room for them")
        for line in layout.coverage:
            if line.status != "ok":
                notes.append(clean(f"{line.collector} {line.status}: {line.reason}", 400))
        if not notes:
            return
        self._heading("Notes")
        for note in notes[:NOTES_MAX]:
            self._lines(note, 16, "s", 10.5, 3)
        if len(notes) > NOTES_MAX:
            self._lines(f"and {len(notes) - NOTES_MAX} more", 16, "s", 10.5, 1)

    def _lines(self, text: str, x: float, look: str, size: float, lines_max: int) -> None:
        for line in wrapped(text, self.width - x - 16, size, lines_max):
            self.parts.append(
                f'<text class="{look}" x="{number(x)}" y="{number(self.height)}" style="font-size:{size:g}px">'
                f"{xml(line)}</text>"
            )
            self.height += 16
        self.height += 2
