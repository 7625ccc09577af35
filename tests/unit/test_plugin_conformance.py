"""Rules that hold for every registered plugin of every family, and for every layout, renderer and subscriber.

What the built-in ones do beyond these is tested where they are; these run on whatever is registered.
"""

from __future__ import annotations

import io
import os
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from pydantic import BaseModel, ValidationError
from tests.examples import examples
from tests.services.sinks import settings_of
from tests.strategies import graphs
from tests.unit.server_fixture import small

from gpuflight.bottlenecks.base import Rule
from gpuflight.collectors.base import Collector
from gpuflight.errors import DeliveryError, MissingExtra, SourceUnavailable
from gpuflight.graph import Graph, edges, nodes
from gpuflight.graph.codec import encode_graph
from gpuflight.graph.diff import diff
from gpuflight.registry import Plugin, families, plugins
from gpuflight.rounds import Coverage, Environment, Round
from gpuflight.server.base import ServerBackend
from gpuflight.settings import Server, Settings
from gpuflight.subscribers.base import Subscriber
from gpuflight.vis.base import Document, Layout, LayoutOptions, Renderer
from gpuflight.vis.model import Box, LayoutGraph

BASES: tuple[type[Plugin], ...] = (Collector, Layout, Renderer, Subscriber, Rule, ServerBackend)
EVERY = [(base, name) for base in BASES for name in plugins(base)]
every_plugin = pytest.mark.parametrize(("base", "name"), EVERY, ids=[f"{b.family.name}-{name}" for b, name in EVERY])
every_layout = pytest.mark.parametrize("layout", sorted(plugins(Layout)))
every_renderer = pytest.mark.parametrize("renderer", sorted(plugins(Renderer)))
every_subscriber = pytest.mark.parametrize("name", sorted(plugins(Subscriber)))

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "]]><!--",
    "\"'&;{{data}}${x}",
    "a\nb\r\n\x00\x1b[2J",
    "\ud800",
    "‮desrever",
    "x" * 65_536,
    "tcp:80|<port>",
    "__proto__",
)


# --- all of them -----------------------------------------------------------------------------------------------------


def test_every_family_is_checked_here() -> None:
    """A new family has to say here what holds for each of its plugins."""
    ours = {name for name, family in families().items() if family.base.__module__.startswith("gpuflight.")}
    assert ours == {base.family.name for base in BASES}
    assert all(plugins(base) for base in BASES)


@every_plugin
def test_declaration(base: type[Plugin], name: str) -> None:
    cls = plugins(base)[name]
    assert cls.name == name == name.lower() and name.isidentifier()
    assert cls.description and "\n" not in cls.description and not cls.description.endswith(".")
    assert cls.version and cls.stability in ("experimental", "beta", "stable")
    assert issubclass(cls, base)


@every_plugin
def test_settings_are_strict_and_described(base: type[Plugin], name: str) -> None:
    cls = plugins(base)[name].settings_class
    if cls is None:
        return
    assert issubclass(cls, BaseModel)
    for field, info in cls.model_fields.items():
        assert info.description, f"{name}.{field}"
    with pytest.raises(ValidationError, match="no_such_setting"):
        cls(no_such_setting=1)


# --- server backends -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(plugins(ServerBackend)))
def test_a_backend_that_was_told_to_stop_before_it_serves_ends_at_once(name: str) -> None:
    with small() as served:
        backend = plugins(ServerBackend)[name](Settings(server=Server(port=0)))
        backend.check(served.state.tokens)
        backend.bind()
        backend.stop(1.0)
        backend.stop(1.0)
        backend.serve(served.state)


# --- pictures --------------------------------------------------------------------------------------------------------


def hostile_graph() -> Graph:
    """Names that mean something to HTML, XML, DOT, JSON, terminals or JavaScript, wherever a name can be."""
    members: list[Any] = [nodes.Host(hostname="node1")]
    links: list[Any] = []
    for index, text in enumerate(HOSTILE, 1):
        process = nodes.Process(
            pid=index,
            start=1,
            attributes={"name": text, "cmdline": text, text: [text, index]},
            metrics={"rss_bytes": 2**40, text: 1.5},
            unknown={text + "?": text},
        )
        socket = nodes.Socket(protocol="tcp", address=text)
        members += [process, socket, nodes.Container(container_id=text, ns=text)]
        links.append(edges.Host("Host(node1)", process.id))
        links.append(edges.Belong(socket.id, process.id, {text: text}, {"rtt_ms": 1e300}, {"x": text}))
        links.append(edges.SendTo(process.id, f"Pipe({text})"))
    return Graph(members, links)


def options() -> LayoutOptions:
    return LayoutOptions(
        title=HOSTILE[0],
        environment=Environment(hostname=HOSTILE[1], kernel=HOSTILE[3]),
        coverage=[Coverage(collector="x", status="skipped", reason=HOSTILE[0], hint=HOSTILE[2])],
        notes=[HOSTILE[0]],
    )


def lay_out(name: str, graph: Graph, how: LayoutOptions | None = None) -> LayoutGraph:
    layout: Layout = plugins(Layout)[name]()
    return layout.layout(graph, how or LayoutOptions())


def render(name: str, laid_out: LayoutGraph) -> bytes:
    renderer: Renderer = plugins(Renderer)[name]()
    document = renderer.build(laid_out)
    assert isinstance(document, Document)
    first, second = io.BytesIO(), io.BytesIO()
    try:
        renderer.write(document, first)
    except (MissingExtra, SourceUnavailable) as error:
        assert "\n" not in str(error) and "install" in str(error), error
        pytest.skip(str(error))
    renderer.write(document, second)
    assert first.getvalue() == second.getvalue(), "the same document, other bytes"
    return first.getvalue()


def has_what_it_needs(name: str) -> bool:
    """Whether a renderer's package and program are installed."""
    try:
        renderer: Renderer = plugins(Renderer)[name]()
        renderer.write(renderer.build(lay_out("default", Graph())), io.BytesIO())
    except (MissingExtra, SourceUnavailable):
        return False
    return True


@cache
def ready() -> list[str]:
    """Renderers that can be tried often: those of Graphviz start a program, and draw what ``dot`` writes as text; PyVis
    pages carry a library and have a test of their own."""
    slow = [name for name in plugins(Renderer) if name.startswith("graphviz_") or name == "pyvis"]
    return [name for name in plugins(Renderer) if name not in slow and has_what_it_needs(name)]


PLAIN = {"csv", "text"}
"""Formats in which a tag is text like any other; what means something in them is tested where they are."""


def ids_of(boxes: list[Box]) -> list[str]:
    found = []
    pending = list(boxes)
    while pending:
        box = pending.pop()
        pending += box.children
        if not box.synthetic and not box.missing:
            found.append(box.id)
    return found


@every_layout
@settings(max_examples=examples(25))
@given(graph=graphs(max_nodes=10, max_edges=16))
def test_any_graph_is_laid_out_and_drawn(layout: str, graph: Graph) -> None:
    before = encode_graph(graph)
    first, second = lay_out(layout, graph), lay_out(layout, graph)
    assert encode_graph(graph) == before, "the graph was changed"
    assert msgspec.json.encode(first) == msgspec.json.encode(second), "the same graph, another picture"
    assert (first.nodes_count, first.edges_count) == (len(graph.nodes), len(graph.edges))
    assert sorted(ids_of(first.boxes)) == sorted(graph.nodes), "every entity has one box"
    assert [entity.id for entity in first.entities] == list(graph.nodes), "other formats need the graph's own elements"
    assert [edge.key for edge in first.edges] == list(graph.edges)
    for renderer in ready():
        assert render(renderer, first)


@every_layout
@every_renderer
def test_hostile_names_do_nothing(layout: str, renderer: str) -> None:
    written = render(renderer, lay_out(layout, hostile_graph(), options()))
    assert plugins(Renderer)[renderer].suffix.startswith(".")
    if plugins(Renderer)[renderer].binary:
        return
    text = written.decode("utf-8")  # whatever the names are
    for raw in ("\x1b",) if renderer in PLAIN else ("<script>alert(1)", "<img src=x", "]]><!--", "\x1b"):
        assert raw not in text, raw


@every_layout
@every_renderer
def test_nothing_at_all_is_a_picture_too(layout: str, renderer: str) -> None:
    assert render(renderer, lay_out(layout, Graph()))


# --- subscribers -----------------------------------------------------------------------------------------------------


def make_round(number: int, graph: Graph) -> Round:
    return Round(
        number=number,
        time_ns=1_700_000_000_000_000_000 + number,
        duration_s=0.5,
        graph=graph,
        diff=diff(Graph(), graph),
        coverage=[Coverage(collector="x", status="failed", reason=HOSTILE[0])],
        env=Environment(hostname=HOSTILE[1]),
    )


@every_subscriber
def test_a_round_is_delivered_whatever_is_in_it_and_left_as_it_was(name: str, tmp_path: Path) -> None:
    cls = plugins(Subscriber)[name]
    subscriber = cls(settings_of(cls, tmp_path))
    completed = make_round(1, hostile_graph())
    before = encode_graph(completed.graph)
    subscriber.start()
    for _ in range(2):
        subscriber.deliver(completed)
    subscriber.deliver(make_round(3, Graph()))
    subscriber.flush(time.monotonic() + 60)
    subscriber.close()
    assert encode_graph(completed.graph) == before


@every_subscriber
def test_close_is_safe_at_any_point(name: str, tmp_path: Path) -> None:
    """Without a start, and after a start that failed; nothing is left open."""
    cls = plugins(Subscriber)[name]
    settings = settings_of(cls, tmp_path)
    before = (threading.active_count(), len(os.listdir("/proc/self/fd")))
    cls(settings).close()
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    subscriber = cls(settings_of(cls, blocked))
    try:
        subscriber.start()
        subscriber.deliver(make_round(1, Graph()))
    except DeliveryError as error:
        assert str(error)
    subscriber.close()
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


def test_the_interface_names_its_tests() -> None:
    from gpuflight.subscribers import base

    assert base.__doc__ is not None and "tests/unit/test_plugin_conformance.py" in base.__doc__
