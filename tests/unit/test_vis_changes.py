"""What a comparison found is seen in every format that draws, not by colour alone, and only after a comparison."""

from __future__ import annotations

import re
import shutil

import pytest
from tests.unit import vis_scenes
from tests.unit.test_plugin_conformance import HOSTILE, PLAIN, every_renderer, hostile_graph
from tests.unit.vis_files import picture, small, written

from gpuflight.errors import MissingExtra, SourceUnavailable
from gpuflight.graph import Graph
from gpuflight.graph.codec import decode_graph
from gpuflight.registry import plugins
from gpuflight.vis.base import Renderer
from gpuflight.vis.changes import mark_changes
from gpuflight.vis.visual import CHANGES, key_of_changes, signed

THE_GRAPH_ITSELF = {"json", "perfetto"}
"""Formats that are the newer graph or its sessions: nothing is drawn."""
PROCESS, LINE = "Process(pid=43,start=8)", "SendTo(Process(pid=43,start=8)->Process(pid=42,start=7))"
DRAWN_BY_COLOUR = {"graphviz_png", "graphviz_pdf", "png"}
"""Pixels and compressed files, of which the text says nothing."""


def of(renderer: str, changes: dict[str, str], graph: Graph | None = None) -> bytes:
    """A picture with marks."""
    if renderer.startswith("graphviz") and shutil.which("dot") is None:
        pytest.skip("needs Graphviz: apt-get install graphviz")
    laid_out = picture(small() if graph is None else graph)
    mark_changes(laid_out, changes)
    try:
        return written(renderer, laid_out)
    except (MissingExtra, SourceUnavailable) as error:
        pytest.skip(str(error))


def without_colours(data: bytes) -> bytes:
    return re.sub(rb'#[0-9a-f]{6}|viz:color r="\d+" g="\d+" b="\d+"', b"#", data)


@every_renderer
@pytest.mark.parametrize("element", [PROCESS, LINE], ids=["box", "line"])
def test_what_came_went_and_changed_is_told_apart(renderer: str, element: str) -> None:
    """Four pictures of one graph: with nothing marked, and with one element marked as each of the three."""
    found = [of(renderer, {element: change} if change else {}) for change in ("", *CHANGES)]
    if renderer in THE_GRAPH_ITSELF:
        assert found[0] == found[1] == found[3]
        if renderer == "json":
            before, gone = (decode_graph(found[at]) for at in (0, 2))
            ids = [{each.id for each in (*graph.nodes.values(), *graph.edges.values())} for graph in (before, gone)]
            assert ids[0] - ids[1] == {element}
        return
    assert len(set(found)) == 4
    if renderer not in DRAWN_BY_COLOUR:
        assert len(set(map(without_colours, found))) == 4, "by colour alone"


@every_renderer
def test_signs_and_words_stand_only_where_something_was_compared(renderer: str) -> None:
    if renderer in THE_GRAPH_ITSELF | DRAWN_BY_COLOUR | {"html"}:
        return
    plain, marked = of(renderer, {}).decode(), of(renderer, {PROCESS: "removed", LINE: "removed"}).decode()
    for word in ("added", "removed", "changed"):
        assert word not in re.sub(r"<script.*?</script>|<style.*?</style>", "", plain, flags=re.DOTALL)
    said = ("removed",) if renderer in ("csv", "graphml") else ("−", "#8722;", "\\u2212", "&#45;", "&#8722;")
    assert any(word in marked for word in said)


@pytest.mark.parametrize("renderer", ["svg", "dot", "drawio", "mermaid", "pyvis", "gexf", "graphml"])
@pytest.mark.parametrize("change", CHANGES)
def test_the_colours_are_those_of_the_visual_language(renderer: str, change: str) -> None:
    colour = CHANGES[change][1]
    if renderer == "gexf":
        colour = 'r="{}" g="{}" b="{}"'.format(*(int(colour[at : at + 2], 16) for at in (1, 3, 5)))
    plain, marked = of(renderer, {}).decode(), of(renderer, {PROCESS: change}).decode()
    least = plain.count(colour)  # blue is that of processes too
    assert marked.count(colour) > least or (change == "added" and least)


@every_renderer
def test_hostile_names_stay_harmless_when_they_changed(renderer: str) -> None:
    graph = hostile_graph()
    changes = dict.fromkeys([*graph.nodes, *(edge.id for edge in graph.edges.values())], "removed")
    written = of(renderer, changes, graph)
    if plugins(Renderer)[renderer].binary:
        return
    text = written.decode()
    for raw in ("\x1b",) if renderer in PLAIN else (*HOSTILE[:2], "]]><!--", "\x1b"):
        assert raw not in text


def test_mermaid_stays_within_its_limits() -> None:
    graph = vis_scenes.crowd(2000)
    changes = dict.fromkeys([*graph.nodes, *(edge.id for edge in graph.edges.values())], "added")
    data = of("mermaid", changes, graph)
    assert len(data) <= 50_000 and b"+ added" in data


def test_the_sign_is_before_the_words_and_only_where_there_is_one() -> None:
    assert [signed("python3", change) for change in ("", "added", "removed", "odd")] == [
        "python3", "+ python3", "− python3", "python3",
    ]  # fmt: skip
    assert signed("", "changed") == "~"
    assert key_of_changes(["", "removed", "added", "removed", "odd"]) == "+ added · − removed"
    assert key_of_changes([]) == key_of_changes([""]) == ""
