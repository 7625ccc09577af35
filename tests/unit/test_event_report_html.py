"""The page of a report: well-formed, alone, and whatever the log says is only text."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("duckdb")
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.unit.gpufl_files import CLEAN, GEN
from tests.unit.test_event_report import one, reports

from gpuflight.events.report.html import page
from gpuflight.events.report.model import Report

_VOID = {"meta", "line", "rect", "polyline", "polygon"}


class Page(HTMLParser):
    """Elements in order, checked to be closed; everything that would load or run something."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.text: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.elements: set[str] = set()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        for name, value in attrs:
            assert not name.startswith("on") and name not in ("src", "srcset", "action"), (tag, name)
            if name == "id":
                self.ids.append(value or "")
            if name == "href":
                self.links.append(value or "")
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return one(CLEAN, tmp_path_factory.mktemp("report"))


def test_one_file_that_needs_nothing(report: Report) -> None:
    text = page([report], "gpuflight 1")
    found = Page(text)
    assert not found.elements & {"script", "link", "img", "iframe", "object", "embed", "form", "base"}
    assert not re.search(r"url\(|@import|https?://", text)
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text and "svg" in found.elements
    assert len(found.ids) == len(set(found.ids))
    assert {link.removeprefix("#") for link in found.links} <= set(found.ids)
    shown = "".join(found.text)
    for word in (
        "fixture_app",
        "softmax_warp_forward<float, 10>",
        "Fills (memset)",
        "GPU busy",
        'λ_unicode_kernel "quoted"',
    ):
        assert word in shown


def test_several_sessions_on_one_page(tmp_path: Path) -> None:
    made = list(reports(GEN / "v1.3.0rc1-segments", tmp_path).values())
    found = Page(page(made, "gpuflight 1"))
    assert len(found.ids) == len(set(found.ids))
    assert {"#r0", "#r1", "#r2"} <= set(found.links)


@given(
    st.text(st.characters(), max_size=40) | st.sampled_from(["</title><script>alert(1)</script>", "' onload='x", "]]>"])
)
@settings(max_examples=examples(60), deadline=None)
def test_hostile_names_are_text(report: Report, name: str) -> None:
    import msgspec

    raw = msgspec.to_builtins(report)
    raw["head"]["app"] = raw["head"]["hostname"] = name
    for kernel in raw["top_kernels"]:
        kernel["name"] = name
    raw["losses"].append(
        {"reason": "x", "about": name, "effect": "lost", "text": name, "count": 1, "size_bytes": 0, "place": ""}
    )
    raw["scopes"][0]["name"] = name
    changed = msgspec.convert(raw, Report)
    text = page([changed], name)
    found = Page(text)
    assert "script" not in found.elements
    encoded = text.encode("utf-8", "backslashreplace")
    assert not re.search(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]", encoded.replace(b"\r", b""))
