"""GEXF, GraphML, CSV and JSON: read back by readers that are not ours, with the same nodes, edges and values."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import math
from collections import Counter
from typing import Any
from xml.etree import ElementTree

import networkx
import pytest
import xmlschema
from hypothesis import given, settings
from tests.examples import examples
from tests.strategies import graphs
from tests.unit import vis_scenes
from tests.unit.server_fixture import small as server_small
from tests.unit.test_plugin_conformance import HOSTILE, hostile_graph, options
from tests.unit.vis_files import GOLDEN, INF, NAN, golden, picture, small, written

from gpuflight.graph import Graph, edges, nodes
from gpuflight.graph.load import parse_graph
from gpuflight.redaction import redact_argv
from gpuflight.sources.tools import Tools
from gpuflight.vis.changes import compare, mark_changes
from gpuflight.vis.render.tables import RESERVED, elements, unique_names
from gpuflight.vis.text import clean, clean_value

SCHEMA = xmlschema.XMLSchema11(str(GOLDEN / "gexf-1.3.xsd"))
FORMATS = (("gexf", ".gexf"), ("graphml", ".graphml"), ("csv", ".csv"), ("json", ".json"))
every_table = pytest.mark.parametrize("read", ["gexf", "graphml", "csv"])


# --- readers ---------------------------------------------------------------------------------------------------------


def read_gexf(data: bytes) -> tuple[dict[str, dict[str, Any]], list[tuple[str, str, dict[str, Any]]]]:
    graph = networkx.read_gexf(io.BytesIO(data), version="1.3")
    return dict(graph.nodes(data=True)), list(graph.edges(data=True))


def read_graphml(data: bytes) -> tuple[dict[str, dict[str, Any]], list[tuple[str, str, dict[str, Any]]]]:
    graph = networkx.read_graphml(io.BytesIO(data), force_multigraph=True)
    return dict(graph.nodes(data=True)), list(graph.edges(data=True))


def read_csv(data: bytes) -> tuple[dict[str, dict[str, Any]], list[tuple[str, str, dict[str, Any]]]]:
    rows = list(csv.DictReader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True))
    values = [
        {name.removeprefix("'"): text.removeprefix("'") for name, text in row.items() if text != ""} for row in rows
    ]
    found = {row["id"]: row for row in values if row["element"] == "node"}
    return found, [(row["source"], row["target"], row) for row in values if row["element"] == "edge"]


READERS = {"gexf": read_gexf, "graphml": read_graphml, "csv": read_csv}


def same(value: Any, read: Any) -> bool:
    """Whether a reader has the value that the graph had; a column of several types is read as text."""
    if isinstance(value, (list, tuple)):
        items = json.loads(read)
        return len(items) == len(value) and all(
            same(one, other) if isinstance(one, str) else clean_value(one) == other
            for one, other in zip(value, items, strict=True)
        )
    if isinstance(value, bool):
        return read in (value, str(value).lower())
    if isinstance(value, (int, float)):
        number = float(str(read).replace("INF", "inf"))
        return (math.isnan(value) and math.isnan(number)) or number == float(value)
    if len(value) > 4096:
        return str(read).startswith(value[:4096]) and str(read).endswith(f"({len(value)} characters)")
    return str(read) == clean(value)


def check(data: bytes, read: str, graph: Graph) -> None:
    """Nodes, edges and all values of a file are those of the graph."""
    laid_out = picture(graph)
    found, links = READERS[read](data)
    data_of = elements(laid_out)
    assert found.keys() == set(data_of.names.values())
    titles = [
        {(group, key): table.columns[number].title for group, keys in table.of.items() for key, number in keys.items()}
        for table in (data_of.nodes, data_of.edges)
    ]
    for entity in graph.nodes.values():
        row = found[data_of.names[entity.id]]
        assert row["kind"] == entity.kind
        for group in ("attributes", "metrics"):
            for name, value in getattr(entity, group).items():
                if value is None or value == "" or value == []:
                    continue
                assert same(value, row[titles[0][group, name]]), (entity.id, name)
    assert Counter((source, target, row["kind"]) for source, target, row in links) == Counter(
        (data_of.names[source], data_of.names[target], kind) for source, target, kind in graph.edges
    )
    by_key = {(source, target, row["kind"]): row for source, target, row in links}
    for (source, target, kind), edge in graph.edges.items():
        row = by_key[data_of.names[source], data_of.names[target], kind]
        for name, value in edge.metrics.items():
            assert same(value, row[titles[1]["metrics", name]]), (edge.id, name)


# --- any graph -------------------------------------------------------------------------------------------------------


@every_table
@settings(max_examples=examples(40), deadline=None)
@given(graph=graphs(max_nodes=6, max_edges=8))
def test_any_graph_is_read_back(read: str, graph: Graph) -> None:
    data = written(read, graph)
    check(data, read, graph)
    if read == "gexf":
        SCHEMA.validate(data.decode())


@settings(max_examples=examples(40), deadline=None)
@given(graph=graphs(max_nodes=6, max_edges=8))
def test_json_is_the_graph_itself(graph: Graph) -> None:
    again = parse_graph(written("json", graph)).graph
    assert again == parse_graph(graph.model_dump_json()).graph
    assert list(again.nodes) == list(graph.nodes) and list(again.edges) == list(graph.edges)


@pytest.mark.parametrize(("name", "suffix"), FORMATS)
def test_small_graph_is_written_as_it_was(name: str, suffix: str) -> None:
    data, before = golden(name, suffix)
    assert data == before


@every_table
def test_awkward_values_are_read_back(read: str) -> None:
    check(written(read, small()), read, small())


@every_table
def test_hostile_names_are_read_back(read: str) -> None:
    """Every name, wherever it stands; what was cut says so."""
    graph = hostile_graph()
    data = written(read, picture(graph, title=HOSTILE[0], environment=options().environment, notes=[HOSTILE[0]]))
    check(data, read, graph)
    found, _ = READERS[read](data)
    row = found["Process(pid=1,start=1)"]
    assert row["name"] == row["cmdline"] == HOSTILE[0]
    assert any("(65536 characters)" in str(value) for row in found.values() for value in row.values())
    if read == "gexf":
        SCHEMA.validate(data.decode())


def test_hostile_names_survive_in_json() -> None:
    graph = Graph([node for node in hostile_graph().nodes.values() if "\ud800" not in node.id])
    data = written("json", hostile_graph(), title=HOSTILE[0])
    assert set(graph.nodes) <= set(parse_graph(data).graph.nodes)
    assert not set(b"<>&\x00\x1b") & set(data)


# --- GEXF ------------------------------------------------------------------------------------------------------------


def test_r01_numbers_that_are_not_finite_are_those_of_xml_schema() -> None:
    """Not Python's ``inf`` and ``nan``, which Gephi refuses; JSON has null."""
    graph = Graph([nodes.Host(hostname="a", metrics={"x1": INF, "x2": -INF, "x3": NAN, "x4": 1.5})])
    for name in ("gexf", "graphml", "csv"):
        text = written(name, graph).decode("utf-8-sig")
        assert "INF" in text and "-INF" in text and "NaN" in text
        assert '"inf"' not in text and '"nan"' not in text and ">nan<" not in text
    data = json.loads(written("json", graph), parse_constant=pytest.fail)
    assert data["nodes"][0]["metrics"]["x1"] is None


def test_r04_a_pid_stays_an_attribute() -> None:
    """``pid`` is a node's parent in GEXF, and networkx takes node data of that name for it; likewise id, start …"""
    data = written("gexf", small())
    assert b" pid=" not in data and b" start=" not in data and b" parents=" not in data
    found, _ = read_gexf(data)
    assert found["Process(pid=42,start=7)"]["process_id"] == 42
    assert found["Process(pid=42,start=7)"]["start_ticks"] == 7
    again = io.BytesIO()  # written once more by networkx: still there
    networkx.write_gexf(networkx.read_gexf(io.BytesIO(data), version="1.3"), again, version="1.3")
    again.seek(0)
    once_more = networkx.read_gexf(again, version="1.3")
    assert once_more.nodes["Process(pid=42,start=7)"]["process_id"] == 42


@every_table
def test_r04_no_reserved_name_of_a_format_is_a_column(read: str) -> None:
    """Whatever an attribute is called, and however it is spelt."""
    names = [*RESERVED, *(name.upper() for name in RESERVED), *(name.title() for name in RESERVED)]
    values: dict[str, Any] = {name: f"value of {name}" for name in names}
    graph = Graph(
        [nodes.Host(hostname="a", attributes=values), nodes.Host(hostname="b")],
        [edges.SendTo("Host(a)", "Host(b)", dict(values))],
    )
    found, links = READERS[read](written(read, graph))
    assert set(values.values()) <= {str(value) for value in found["Host(a)"].values()}
    assert set(values.values()) <= {str(value) for value in links[0][2].values()}


def test_r19_gexf_is_valid_against_its_schema() -> None:
    for graph in (small(), vis_scenes.h100(), Graph(), Graph([nodes.Host(hostname="alone")])):
        SCHEMA.validate(written("gexf", graph).decode())
    broken = written("gexf", small()).replace(b'type="long"', b'type="int64"', 1).decode()
    assert not SCHEMA.is_valid(broken)
    assert not SCHEMA.is_valid(written("gexf", small()).replace(b'target="GPU(uuid=GPU-0)"', b'target="?"', 1).decode())


@pytest.mark.parametrize("layout", ["default"])
def test_gexf_has_places_sizes_and_colours(layout: str) -> None:
    laid_out = picture(vis_scenes.h100(), layout)
    data = written("gexf", laid_out)
    found, links = read_gexf(data)
    assert all({"position", "size", "color"} <= row["viz"].keys() for row in found.values())
    rank = found["Process(pid=4100,start=4200)"]["viz"]
    gpu = next(row for row in found.values() if row["kind"] == "GPU" and row["index"] == 0)["viz"]
    assert gpu["position"]["y"] < rank["position"]["y"] < 0, "up is up, and work stands above its GPU"
    assert gpu["color"] != rank["color"] and gpu["size"] > 0
    drawn = ElementTree.fromstring(data).findall(".//{http://gexf.net/1.3}edge")
    assert len(drawn) == len(links)
    assert all(edge.find("{http://gexf.net/1.3/viz}color") is not None for edge in drawn)
    wide = [edge.find("{http://gexf.net/1.3/viz}thickness") for edge in drawn]
    assert any(found is not None and float(found.get("value", 0)) > 1 for found in wide)


@every_table
def test_types_of_columns_fit_all_their_values(read: str) -> None:
    found, _ = READERS[read](written(read, small()))
    rank, worker = found["Process(pid=42,start=7)"], found["Process(pid=43,start=8)"]
    assert float(rank["rss_bytes"]) == 2**40 and float(worker["rss_bytes"]) == 2**64
    assert (rank["state"], worker["state"]) == ("S", "3")
    assert json.loads(rank["unknown"]) == {"fds_count": "may not be read"}
    assert json.loads(rank["cmdline"]) == ["python3", "train.py"]
    assert "image" not in found["Container(5f1c)"]
    assert str(found["Socket(tcp,10.0.0.7:80)"]["missing"]).lower() == "true"
    if read != "csv":
        assert isinstance(rank["process_id"], int) and isinstance(rank["cpu_pct"], float)


@every_table
def test_what_a_comparison_found_is_a_column(read: str) -> None:
    before, after = small(), small()
    after.try_add_node(nodes.Process(pid=44, start=9))
    comparison = compare(before, after)
    laid_out = picture(comparison.graph)
    mark_changes(laid_out, comparison.changes)
    found, _ = READERS[read](written(read, laid_out))
    assert found["Process(pid=44,start=9)"]["change"] == "added"
    assert "change" not in found["Host(box)"]
    assert "change" not in READERS[read](written(read, picture(after)))[0]["Process(pid=44,start=9)"]


@every_table
def test_a_name_is_one_column_for_all_kinds(read: str) -> None:
    """A disk is identified by its name, a process has one; an index identifies a NUMA node, a GPU has one."""
    graph = Graph(
        [nodes.Disk(name="sda"), nodes.Process(pid=1, start=1, attributes={"name": "init"}), nodes.Numa(index=1)]
    )
    graph.try_add_node(nodes.GPU(uuid="GPU-0", attributes={"index": 0}))
    found, _ = READERS[read](written(read, graph))
    assert (found["Disk(sda)"]["name"], found["Process(pid=1,start=1)"]["name"]) == ("sda", "init")
    assert (str(found["Numa(1)"]["index"]), str(found["GPU(uuid=GPU-0)"]["index"])) == ("1", "0")
    graph.try_add_node(nodes.Disk(name="sdb", attributes={"name": "the large one"}))
    found, _ = READERS[read](written(read, graph))
    assert (found["Disk(sdb)"]["name"], found["Disk(sdb)"]["name (2)"]) == ("sdb", "the large one")


def test_names_stay_different_after_cleaning() -> None:
    raw = ["a\x00", "a\u2400", "", "x" * 70_000, "x" * 70_000 + "y", "\ud800", "\udfff", "(empty)"]
    names = unique_names(raw)
    assert len(set(names.values())) == len(raw)
    assert names["a\u2400"] == "a\u2400" and names["(empty)"] == "(empty)", "what needs no cleaning keeps its name"
    assert all(len(name) < 1100 for name in names.values())


# --- CSV -------------------------------------------------------------------------------------------------------------


def test_no_cell_is_a_formula_and_none_too_long_for_a_spreadsheet() -> None:
    graph = small()
    graph.try_add_node(
        nodes.Host(hostname="@SUM(1)", attributes={"a": "-2+3", "b": "\t=1", "c": ["x" * 40_000] * 9, "'q": "'q"})
    )
    text = written("csv", graph).decode()
    assert text.startswith("\ufeffelement,")
    for row in csv.reader(io.StringIO(text[1:], newline="")):
        for cell in row:
            assert len(cell) <= 32_767 and "\n" not in cell and "\r" not in cell
            if cell[:1] in ("=", "+", "-", "@", "\t", "|", "%"):
                float(cell)  # a number, which is no formula
    found, _ = read_csv(text.encode())
    assert found["Process(pid=43,start=8)"]["name"] == '=cmd|" /C calc"!A0'
    assert found["Host(@SUM(1))"]["a"] == "-2+3"


# --- all of them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gexf", "graphml", "csv", "json", "drawio", "mermaid", "dot", "pyvis"])
def test_secrets_stay_redacted(name: str) -> None:
    pytest.importorskip("pyvis") if name == "pyvis" else None
    argv = redact_argv(["serve", "--api-key", "hunter2-very-secret", "--token=hunter2-very-secret"])
    graph = Graph([nodes.Process(pid=1, start=1, attributes={"name": "serve", "cmdline": argv})])
    assert b"hunter2" not in written(name, graph)


def test_the_server_exports_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a media type that no browser takes for a page; without Graphviz, one line says how to get it."""
    monkeypatch.setattr(Tools, "which", lambda self, name: None)
    with server_small() as served:
        types = {"gexf": "application/xml", "graphml": "application/xml", "csv": "text/csv", "json": "application/json"}
        types |= {"drawio": "application/xml", "mermaid": "text/plain", "dot": "text/vnd.graphviz"}
        for name, media_type in types.items():
            answer = served.get(f"/api/v1/graph/export?format={name}")
            assert answer.headers["content-type"].split(";")[0] == media_type, name
            assert answer.headers["x-content-type-options"] == "nosniff" and len(answer.content) > 100
        if importlib.util.find_spec("graphviz"):
            said = served.error("GET", "/api/v1/graph/export?format=graphviz_svg", 503)["message"]
            assert "install graphviz" in said and "\n" not in said
