"""The JSON form: dump and load are inverse, whatever text and numbers the world holds."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import entities, graphs, json_values, texts

from gpuflight.errors import InputError
from gpuflight.graph import Graph, edges, nodes
from gpuflight.graph.codec import SCHEMA, decode_document, decode_graph, encode_graph, time_from_text, time_text
from gpuflight.graph.edges import EDGE_KINDS
from gpuflight.graph.load import load_graph, parse_graph
from gpuflight.graph.nodes import NODE_KINDS


@given(graphs())
def test_load_is_the_inverse_of_dump(graph: Graph) -> None:
    assert decode_graph(encode_graph(graph)) == graph


@given(graphs())
def test_the_json_text_is_what_any_reader_reads(graph: Graph) -> None:
    plain = json.loads(encode_graph(graph))
    assert plain["schema"] == SCHEMA
    assert [node["id"] for node in plain.get("nodes", [])] == list(graph.nodes)
    assert [(e["source"], e["target"], e["kind"]) for e in plain.get("edges", [])] == list(graph.edges)
    assert all(plain["edge_kinds"][e["kind"]]["category"] for e in plain.get("edges", []))


@given(graphs())
def test_dumping_to_dictionaries_says_the_same_as_the_text(graph: Graph) -> None:
    assert msgspec.json.decode(msgspec.json.encode(graph.model_dump())) == json.loads(graph.model_dump_json())


@given(graphs())
def test_the_order_of_elements_survives(graph: Graph) -> None:
    loaded = decode_graph(encode_graph(graph))
    assert list(loaded.nodes) == list(graph.nodes)
    assert list(loaded.edges) == list(graph.edges)


@given(st.lists(entities(), max_size=4), texts(surrogates=True))
def test_lone_surrogates_never_stop_a_dump(members: list[Any], name: str) -> None:
    """They come from file names that are no UTF-8; JSON cannot hold them, so they are escaped, and loading works."""
    graph = Graph([*members, nodes.Process(pid=1, start=1, attributes={"name": name})])
    loaded = decode_graph(encode_graph(graph))
    assert loaded.nodes.keys() == graph.nodes.keys()
    told = loaded.nodes["Process(pid=1,start=1)"].attributes["name"]
    told.encode()
    if name.isascii():
        assert told == name


def test_a_lone_surrogate_in_an_id_keeps_edges_together() -> None:
    mount = nodes.Mount(path="/mnt/\udcff")
    graph = Graph([mount, nodes.Process(pid=1, start=1)], [edges.Access("Process(pid=1,start=1)", mount.id)])
    loaded = decode_graph(encode_graph(graph))
    assert len(loaded.nodes) == 2
    assert not loaded.dangling()


def test_every_kind_survives() -> None:
    values = {"int": 3, "str": "x"}
    members = [
        kind(**{name: values[_type_name(kind, name)] for name in kind.__struct_fields__ if name not in _base()})
        for kind in NODE_KINDS.values()
    ]
    links = [kind(members[0].id, members[1].id) for kind in EDGE_KINDS.values()]
    graph = Graph(members, links)
    assert len(graph.nodes) == len(NODE_KINDS)
    assert len(graph.edges) == len(EDGE_KINDS)
    assert decode_graph(encode_graph(graph)) == graph


def test_unknown_is_written_and_read_as_unknown_never_as_zero() -> None:
    gpu = nodes.GPU(uuid="a", metrics={"power_watts": 300}, unknown={"sm_util_pct": "not supported"})
    [plain] = json.loads(encode_graph(Graph([gpu])))["nodes"]
    assert plain["unknown"] == {"sm_util_pct": "not supported"}
    assert "sm_util_pct" not in plain["metrics"]


def test_kinds_that_nobody_declares_are_kept() -> None:
    text = json.dumps(
        {
            "schema": SCHEMA,
            "nodes": [
                {"kind": "Toaster", "id": "Toaster(7)", "attributes": {"slots": 2}, "metrics": {"heat_watts": 3}}
            ],
            "edges": [{"kind": "Toasts", "source": "Toaster(7)", "target": "Toaster(7)", "attributes": {"a": 1}}],
        }
    )
    graph = decode_graph(text)
    [node] = graph.nodes.values()
    assert (node.id, node.attributes["original_kind"], node.attributes["slots"]) == ("Toaster(7)", "Toaster", 2)
    assert node.metrics == {"heat_watts": 3}
    [edge] = graph.edges.values()
    assert edge.attributes == {"a": 1, "original_kind": "Toasts"}
    assert decode_graph(encode_graph(graph)) == graph


def test_a_newer_schema_is_refused_with_both_numbers() -> None:
    with pytest.raises(InputError, match=str(SCHEMA + 1)):
        decode_graph(json.dumps({"schema": SCHEMA + 1, "nodes": [], "edges": []}))


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"schema": "x"}', '{"schema": 1, "nodes": 3}', '{"schema": 1, "nodes": [7]}', "\xff"],
)
def test_what_is_no_graph_is_an_input_error(text: str) -> None:
    with pytest.raises(InputError):
        decode_graph(text)
    with pytest.raises(InputError):
        parse_graph(text.encode("latin-1"))


@given(json_values())
def test_any_json_is_a_graph_or_an_input_error(value: Any) -> None:
    for shape in (value, {"schema": 1, "nodes": value}, {"schema": 1, "edges": value}, {"nodes": [value], "edges": []}):
        data = json.dumps(shape).encode()
        try:
            loaded = parse_graph(data).graph
        except InputError:
            continue
        decode_graph(encode_graph(loaded))


@given(graphs(max_nodes=3), st.data())
def test_a_damaged_file_is_a_graph_or_an_input_error(graph: Graph, data: st.DataObject) -> None:
    text = bytearray(encode_graph(graph))
    place = data.draw(st.integers(0, len(text) - 1))
    text[place] = data.draw(st.integers(0, 255))
    try:
        parse_graph(bytes(text))
    except InputError as error:
        assert "\n" not in str(error)


def test_a_deeply_nested_file_is_an_input_error() -> None:
    for depth in (100, 2_000, 200_000):
        with pytest.raises(InputError):
            parse_graph(b'{"nodes": ' + b"[" * depth + b"]" * depth + b', "edges": 1}')
        with pytest.raises(InputError):
            parse_graph(b'{"schema": 1, "nodes": [' + b'{"a":' * depth + b"1" + b"}" * depth + b"]}")


def test_files_plain_compressed_and_with_a_byte_order_mark(tmp_path: Path, machine: Graph) -> None:
    data = encode_graph(machine, round=3, env={"hostname": "node1"})
    for name, content in (
        ("plain.json", data),
        ("bom.json", b"\xef\xbb\xbf" + data),
        ("packed.json.zst", zstandard.compress(data)),
        ("packed.json.gz", gzip.compress(data)),
        ("frames.json.zst", zstandard.compress(data) + zstandard.compress(b"\n")),
        ("members.json.gz", gzip.compress(data[:50]) + gzip.compress(data[50:])),
    ):
        (tmp_path / name).write_bytes(content)
        loaded = load_graph(tmp_path / name)
        assert loaded.graph == machine
        assert (loaded.round_number, loaded.env["hostname"], loaded.origin) == (3, "node1", "gpuflight")
    (tmp_path / "graph.json").write_bytes(data)
    assert load_graph(tmp_path).graph == machine


def test_files_that_cannot_be_read_are_input_errors_with_their_name(tmp_path: Path) -> None:
    (tmp_path / "cut.json.zst").write_bytes(zstandard.compress(b"x" * 1000)[:-5])
    packed = gzip.compress(b"x" * 1000)
    (tmp_path / "cut.json.gz").write_bytes(packed[:-5])
    (tmp_path / "flipped.json.gz").write_bytes(packed[:12] + bytes([packed[12] ^ 255]) + packed[13:])
    (tmp_path / "head.json.gz").write_bytes(b"\x1f\x8b\x08")
    (tmp_path / "tail.json.gz").write_bytes(packed + b"garbage")
    (tmp_path / "empty.json").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    for name in (
        "cut.json.zst",
        "cut.json.gz",
        "flipped.json.gz",
        "head.json.gz",
        "tail.json.gz",
        "empty.json",
        "folder",
        "absent.json",
    ):
        with pytest.raises(InputError, match=name):
            load_graph(tmp_path / name)


def test_a_witty_file_is_recognised(data_dir: Path) -> None:
    loaded = load_graph(data_dir / "witty" / "vllm-tp4-npu.json")
    assert loaded.origin == "witty-profiler"
    assert len(loaded.graph.nodes) == 129


def test_the_rest_of_a_document_survives(machine: Graph) -> None:
    parsed = decode_document(
        encode_graph(machine, round=9, time=time_text(1_700_000_000_123_456_000), coverage=[{"collector": "x"}])
    )
    assert parsed.round == 9
    assert parsed.coverage == [{"collector": "x"}]
    assert time_from_text(parsed.time) == 1_700_000_000_123_456_000


def _base() -> tuple[str, ...]:
    return ("id", "attributes", "metrics", "unknown", "ns")


def _type_name(kind: Any, name: str) -> str:
    return str(kind.__annotations__[name])


def test_a_file_that_cannot_be_read_is_named_once(tmp_path: Path) -> None:
    damaged = tmp_path / "graph.json"
    damaged.write_bytes(b"\x28\xb5\x2f\xfd and no more")
    for name in (str(tmp_path / "nope.json"), str(damaged)):
        with pytest.raises(InputError) as caught:
            load_graph(name)
        assert str(caught.value).count(name) == 1
