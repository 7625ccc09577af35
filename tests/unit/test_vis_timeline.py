"""Sessions as pictures: what is read, where it is placed, and the trace of it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("duckdb")
from tests.unit import vis_scenes
from tests.unit.gpufl_files import CLEAN, GEN
from tests.unit.test_vis_layout import boxes_of

from gpuflight.cli.vis import main
from gpuflight.errors import InputError
from gpuflight.graph import Graph, nodes
from gpuflight.registry import get
from gpuflight.vis.base import Layout, LayoutOptions, Renderer
from gpuflight.vis.layout.timeline import TimelineLayout
from gpuflight.vis.model import Box, LayoutGraph
from gpuflight.vis.render.svg_boxes import in_order
from gpuflight.vis.sessions import is_session_input, load_session_picture, records_of, with_sessions
from gpuflight.vis.timeline import Lane, Slice, Timeline
from gpuflight.vis.visual import SLICES

SESSION = f"Session({CLEAN.name})"
_BAR_KINDS = {kind for kind, _, _ in SLICES.values()}


def placed(path: Path, layout: str = "timeline") -> LayoutGraph:
    with load_session_picture(str(path)) as picture:
        return get(Layout, layout)().layout(picture.graph, with_sessions(LayoutOptions(), [picture]))


def write(layout: LayoutGraph, form: str) -> bytes:
    renderer = get(Renderer, form)()
    file = io.BytesIO()
    renderer.write(renderer.build(layout), file)
    return file.getvalue()


def bars(layout: LayoutGraph) -> list[Box]:
    return [box for box, _ in in_order(layout) if box.kind in _BAR_KINDS]


def made(slices: list[Slice], end_ns: int = 1000) -> LayoutGraph:
    """One lane of a session of the graph."""
    graph = Graph([nodes.Session(session_id="a")])
    timeline = Timeline(
        session="Session(a)", session_id="a", label="a", start_ns=0, end_ns=end_ns, lanes=[Lane("GPU 0", "s", slices)]
    )
    return TimelineLayout().layout(graph, LayoutOptions(timelines=[timeline]))


def test_what_is_a_session():
    assert is_session_input(str(CLEAN)) and is_session_input(str(GEN))
    assert not is_session_input(str(CLEAN / "nothing"))
    assert not is_session_input(__file__) and not is_session_input("/dev/null/x")


def test_a_run_folder_is_its_graph(tmp_path: Path):
    (tmp_path / "graph.json").write_text("{}")
    (tmp_path / "logs").symlink_to(CLEAN)
    assert not is_session_input(str(tmp_path))


def test_a_session_has_its_streams_kernels_and_scopes():
    with load_session_picture(str(CLEAN)) as picture:
        kinds = {entity.kind for entity in picture.graph.nodes.values()}
        assert kinds == {"Session", "Application", "Stream", "Kernel", "Scope"}
        [timeline] = picture.timelines
        assert timeline.session == SESSION and timeline.end_ns > timeline.start_ns
        assert {lane.group for lane in timeline.lanes} >= {"Host", "GPU 0"}
        session = picture.graph.nodes[SESSION]
        kernels = sum(e.count for lane in timeline.lanes for e in lane.slices if e.kind == "kernel")
        assert kernels == session.metrics["launches_count"] > 0, "every launch is in a slice"
        assert records_of(timeline) is not None
    assert records_of(timeline) is None, "the store is gone"
    assert not Path(timeline.store).exists()


def test_several_sessions_and_one_of_them():
    with load_session_picture(str(GEN)) as picture:
        assert len(picture.timelines) > 1
        assert len({timeline.session for timeline in picture.timelines}) == len(picture.timelines)
    with load_session_picture(str(GEN), session=CLEAN.name) as picture:
        assert [timeline.session_id for timeline in picture.timelines] == [CLEAN.name]
    with pytest.raises(InputError), load_session_picture(str(GEN), session="none such"):
        pass
    with pytest.raises(InputError), load_session_picture(str(CLEAN.parent / "nothing")):
        pass


def test_slices_stand_where_they_ran():
    layout = made([Slice(0, 500, "first", "kernel"), Slice(500, 1000, "second", "copy")])
    first, second = bars(layout)
    assert first.x + first.w == pytest.approx(second.x) and first.w == pytest.approx(second.w)
    assert first.y == second.y and (first.category, second.category) == ("gpu", "ipc")
    assert first.lines[0] == "500 ns from 0 ns"


def test_what_overlaps_stands_beneath_and_nothing_covers_another():
    layout = made([Slice(0, 600, "a", "kernel"), Slice(100, 300, "b", "kernel"), Slice(300, 700, "c", "kernel")])
    a, b, c = bars(layout)
    assert a.y < b.y == c.y
    assert b.x + b.w <= c.x + 0.01


def test_bars_stay_in_their_frame():
    layout = placed(GEN)
    for box, parent in boxes_of(layout):
        if parent is not None:
            assert box.x >= parent.x and box.x + box.w <= parent.x + parent.w + 2, box.label
            assert box.y >= parent.y and box.y + box.h <= parent.y + parent.h + 0.01, box.label
    assert layout.width >= max(box.x + box.w for box, _ in boxes_of(layout))


def test_a_short_one_is_seen_and_a_merged_one_says_so():
    layout = made([Slice(10, 11, "x", "kernel", count=40, busy_ns=1)], end_ns=10**9)
    [bar] = bars(layout)
    assert bar.w >= 1 and bar.label == "40 × kernel run: x" and bar.rule
    assert bar.metrics["runs_count"] == 40
    assert ("KernelSlice", 40) in [(entry.key, entry.count) for entry in layout.kinds]


@pytest.mark.parametrize(
    "slices", [[], [Slice(5, 5, "", "kernel")], [Slice(0, 2**62, "\x00<script>", "wait", open=True)]]
)
@pytest.mark.parametrize("end_ns", [0, 1, 2**62])
def test_odd_times_are_drawn(slices: list[Slice], end_ns: int):
    layout = made(slices, end_ns)
    for form in ("svg", "html", "perfetto", "text"):
        assert write(layout, form)
    assert b"<script>" not in write(layout, "svg") + write(layout, "perfetto")


def test_a_graph_without_records_shows_its_sessions_as_bars():
    graph = vis_scenes.h100()
    for number, (start, end) in enumerate(((10**18, 10**18 + 10**9), (10**18 + 5 * 10**8, None), (None, None))):
        known = {name: value for name, value in (("started", start), ("ended", end)) if value is not None}
        graph.try_add_node(
            nodes.Session(
                session_id=str(number), attributes={"name": f"app {number}", **known}, metrics={"duration_s": 2.0}
            )
        )
    layout = TimelineLayout().layout(graph, LayoutOptions())
    first, second = bars(layout)
    assert second.x > first.x and second.lines[-1] == "its end is not in the log"
    assert {box.id for box, _ in boxes_of(layout)} >= set(graph.nodes)


def test_a_graph_without_sessions_is_as_by_default_and_says_so():
    layout = TimelineLayout().layout(vis_scenes.h100(), LayoutOptions())
    assert any("No session" in note for note in layout.notes)
    assert layout.routes


def test_perfetto_has_every_record_while_the_session_is_open():
    with load_session_picture(str(CLEAN)) as picture:
        for name in ("timeline", "default"):
            layout = get(Layout, name)().layout(picture.graph, with_sessions(LayoutOptions(), [picture]))
            trace = json.loads(write(layout, "perfetto"))
            kernels = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
            assert len(kernels) == picture.graph.nodes[SESSION].metrics["launches_count"]
            assert trace["otherData"]["session_id"] == CLEAN.name


def test_perfetto_of_several_sessions_has_their_lanes():
    layout = placed(GEN)
    trace = json.loads(write(layout, "perfetto"))
    names: dict[int, Any] = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert len(names) == len({(t.session, lane.group) for t in layout.timelines for lane in t.lanes})
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0 and event["pid"] in names
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == len(bars(layout))


def test_perfetto_of_a_graph_without_sessions_is_an_empty_trace():
    trace = json.loads(write(TimelineLayout().layout(vis_scenes.h100(), LayoutOptions()), "perfetto"))
    assert trace["traceEvents"] == [] and "no session" in trace["otherData"]["notes"][-1]


@pytest.mark.parametrize(("form", "begin"), [("svg", b"<?xml"), ("html", b"<!doctype"), ("perfetto", b"{")])
def test_the_command_draws_a_session_folder(tmp_path: Path, form: str, begin: bytes):
    target = tmp_path / "out"
    assert main([str(CLEAN), "--layout-engine", "timeline", "-of", form, "-o", str(target)]) == 0
    assert target.read_bytes()[:9].lower().startswith(begin)


def test_the_command_names_the_file_after_the_session(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / CLEAN.name).symlink_to(CLEAN)
    assert main([str(tmp_path / "logs"), "-le", "timeline", "-of", "svg"]) == 0
    assert (tmp_path / "logs" / "session.svg").exists()
