"""Rounds as documents and back: whatever is in them, exactly, and in documents that a database takes."""

from __future__ import annotations

import math
from typing import Any

import bson
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.strategies import edges, entities, graphs, texts

from gpuflight.document_values import escaped, pack, unescaped, unpack
from gpuflight.errors import InputError
from gpuflight.graph import Edge, Entity, Graph, nodes
from gpuflight.graph.edges import SendTo
from gpuflight.round_documents import (
    Document,
    Head,
    Parts,
    StoredRound,
    document_id,
    edge_document,
    edge_document_id,
    edge_from,
    entity_document,
    entity_from,
    finding_document,
    finding_from,
    graph_from,
    head_fields,
    head_from,
    moment,
    parts_from,
    round_document,
)

BSON_BYTES = 16 * 1024 * 1024
ODD_NAMES = st.one_of(
    st.text(st.characters(), max_size=8),
    st.sampled_from(("", "%", "%int", "%25", "a.b", "$set", "$", ".", "a$b", "\0", "\ud800", "%u0041", "int")),
)
ODD_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.just(10**400), st.just(2**64 - 1), st.just(-(2**63) - 1),
    st.floats(), st.text(st.characters(), max_size=8), st.binary(max_size=8),
)  # fmt: skip
ODD = st.recursive(
    ODD_VALUES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ODD_NAMES, inner, max_size=3),
    max_leaves=10,
)


def through_bson(document: Document) -> dict[str, Any]:
    """As a database gives it back, with the checks that a server makes."""
    raw = bson.encode({"_id": document.id, **document.fields})
    assert len(raw) < BSON_BYTES
    back: dict[str, Any] = bson.decode(raw)
    return back


def the_parts(document: Document, collection: str = "entities") -> Parts:
    """Read in any order, beside those of an older version."""
    of = {"collection": collection, "owner": document.id, "hash": document.digest}
    here = [{**of, "index": index, "data": data} for index, data in enumerate(document.parts)]
    return parts_from([*reversed(here), {**of, "hash": b"older", "index": 0, "data": b"x"}])


def same(one: Any, other: Any) -> bool:
    """Equal with NaN equal to itself, 1 other than 1.0 and True."""
    if isinstance(one, float) and isinstance(other, float):
        return (math.isnan(one) and math.isnan(other)) or (
            one == other and math.copysign(1, one) == math.copysign(1, other)
        )
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return isinstance(other, list) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def names_of(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [*value, *(name for item in value.values() for name in names_of(item))]
    return [name for item in value for name in names_of(item)] if isinstance(value, list) else []


@given(ODD)
def test_any_value_comes_back(value: Any) -> None:
    packed = pack(value)
    back = bson.decode(bson.encode({"v": packed}))["v"]
    assert same(value, unpack(back))
    for name in names_of(packed):
        assert name and "." not in name and not name.startswith("$") and "\0" not in name


@given(st.lists(ODD_NAMES, unique=True, max_size=6))
def test_names_stay_apart(names: list[str]) -> None:
    assert [unescaped(escaped(name)) for name in names] == names


def test_what_is_nested_deeper_than_bson_allows_comes_back() -> None:
    deep: Any = 2**70
    for _ in range(150):
        deep = {"a.b": [deep]}
    back = bson.decode(bson.encode({"v": pack(deep)}))["v"]
    assert same(unpack(back), deep)
    assert str(back).count("{") < 100


def test_what_no_graph_holds_is_refused() -> None:
    with pytest.raises(TypeError, match="object"):
        pack({"a": object()})


@given(entities())
def test_any_entity_comes_back(entity: Entity) -> None:
    document = entity_document("node-1", entity)
    assert entity_from(through_bson(document), the_parts(document)) == entity


@given(edges())
def test_any_edge_comes_back(edge: Edge) -> None:
    document = edge_document("node-1", edge)
    assert edge_from(through_bson(document), the_parts(document, "edges")) == edge


@given(
    st.dictionaries(ODD_NAMES, ODD_VALUES, max_size=3),
    st.dictionaries(ODD_NAMES, st.floats() | st.integers(), max_size=3),
)
def test_attributes_and_metrics_of_any_name(attributes: dict[str, Any], metrics: dict[str, Any]) -> None:
    entity = nodes.Device(name="\ud800" + "n", attributes=attributes, metrics=metrics, unknown={"$x.y": "\0"})
    document = entity_document("node-1", entity)
    back = entity_from(through_bson(document), the_parts(document))
    assert back.id == entity.id and back.unknown == entity.unknown
    assert same(back.attributes, attributes) and same(back.metrics, metrics)


@settings(max_examples=examples(50))
@given(graphs())
def test_any_graph_comes_back(graph: Graph) -> None:
    there = [entity_document("n", entity) for entity in graph.nodes.values()]
    between = [edge_document("n", edge) for edge in graph.edges.values()]
    assert len({document.id for document in there}) == len(graph.nodes)
    assert len({document.id for document in between}) == len(graph.edges)
    assert graph_from(map(through_bson, there), map(through_bson, between)) == graph


@pytest.mark.parametrize("value", ["x" * 40_000_000, list(range(3_000_000)), "é\ud800" * 1_000_000])
def test_no_element_is_too_large(value: Any) -> None:
    entity = nodes.Device(name="d" * 2_000_000, attributes={"big": value})
    document = entity_document("node-1", entity)
    assert document.parts and max(map(len, document.parts)) < BSON_BYTES - 1_000_000
    back = through_bson(document)
    assert len(bson.encode(back)) < 2000
    assert entity_from(back, the_parts(document)) == entity
    with pytest.raises(InputError, match="parts"):
        entity_from(back, {})
    edge = SendTo(entity.id, "x", {"big": value})
    edge_doc = edge_document("node-1", edge)
    assert edge_from(through_bson(edge_doc), the_parts(edge_doc, "edges")) == edge


def test_what_stays_inline_fits_in_a_document_however_it_is_made() -> None:
    """A list of small numbers is what grows most on its way from MessagePack to BSON."""
    entity = nodes.Device(name="d", attributes={"small": [1] * 520_000})
    document = entity_document("n", entity)
    assert not document.parts
    assert entity_from(through_bson(document)) == entity


@given(texts(surrogates=True), texts(surrogates=True), texts(surrogates=True), texts(surrogates=True))
def test_ids_of_edges_are_unambiguous(a: str, b: str, c: str, d: str) -> None:
    one, other = edge_document_id("n", a, b, "SendTo"), edge_document_id("n", c, d, "SendTo")
    assert (one == other) == ((a, b) == (c, d))


def test_ids_that_could_be_read_in_two_ways_or_are_too_long() -> None:
    assert edge_document_id("n", "a->b", "c", "SendTo") != edge_document_id("n", "a", "b->c", "SendTo")
    assert document_id("n", "Process(pid=1,start=2)") == "n/Process(pid=1,start=2)"
    long = [document_id("n", "x" * 5000 + end) for end in "ab"]
    assert long[0] != long[1] and all(len(text.encode()) <= 512 and text.startswith("n#") for text in long)
    assert all(len(document_id("n" * 128, text).encode()) <= 512 for text in ("é" * 200, "é" * 2000, "x" * 383))
    bson.encode({"_id": document_id("n", "\ud800")})


def test_a_namespace_has_to_be_one() -> None:
    with pytest.raises(ValueError, match="namespace"):
        StoredRound(namespace="a/b", instance="i", number=1, time_ns=0, graph=Graph())


def test_equal_elements_have_equal_digests_and_others_do_not() -> None:
    def digest(**values: Any) -> bytes:
        return entity_document("n", nodes.Process(pid=1, start=1, **values)).digest

    assert digest(metrics={"a": 1}) == digest(metrics={"a": 1})
    others = [{}, {"metrics": {"a": 1}}, {"metrics": {"a": 1.0}}, {"attributes": {"a": 1}}, {"attributes": {"a": True}}]
    assert len({digest(**values) for values in others}) == len(others)


def test_kinds_that_nobody_declares_are_kept() -> None:
    document = through_bson(entity_document("n", nodes.Process(pid=1, start=1)))
    back = entity_from({**document, "kind": "Quantum"})
    assert type(back) is nodes.Device and back.attributes["original_kind"] == "Quantum" and back.id == document["id"]
    assert (
        type(edge_from({**through_bson(edge_document("n", SendTo("a", "b"))), "kind": "Entangled"})).__name__
        == "HasAttribute"
    )


@pytest.mark.parametrize(
    "broken", [{"_id": "n/x"}, {"_id": "n/x", "parts": 2, "hash": b""}, {"_id": "n/x", "identity": 3}]
)
def test_a_document_that_is_none_of_ours(broken: dict[str, Any]) -> None:
    for read in (entity_from, edge_from, finding_from):
        with pytest.raises(InputError):
            read({"kind": "Process", **broken})


@given(st.dictionaries(ODD_NAMES, ODD, max_size=3))
def test_a_finding_comes_back(evidence: dict[str, Any]) -> None:
    finding = {"id": "H11(GPU(GPU-1))", "rule": "H11", "severity": "critical", "message": "lost", "evidence": evidence}
    document = finding_document("n", finding)
    assert same(finding_from(through_bson(document), the_parts(document, "findings")), finding)


def stored(instance: str = "i", number: int = 1, time_ns: int = 1000, **values: Any) -> StoredRound:
    return StoredRound(namespace="n", instance=instance, number=number, time_ns=time_ns, graph=Graph(), **values)


def test_a_round_with_a_coverage_beyond_16_mb() -> None:
    document = round_document(stored(coverage=[{"collector": "x", "reason": "y" * 20_000_000}]))
    assert document.parts and len(bson.encode(through_bson(document))) < 2000
    assert through_bson(document)["round"] == 1


HEAD = Head(namespace="n", seq=3, complete_seq=3, instance="b", round=5, time_ns=1000, past=["a"])
DAY_NS = 86_400 * 10**9


@pytest.mark.parametrize(
    ("head", "round_", "why"),
    [
        (Head(namespace="n"), stored("x", 1, 1), ""),
        (HEAD, stored("b", 6, 1), ""),  # its own numbers, not its clock, which may be set back
        (HEAD, stored("b", 5, 2000), "repeated"),
        (HEAD, stored("b", 4, 2000), "older"),
        (HEAD, stored("c", 1, 1001), ""),
        (HEAD, stored("c", 1, 1000), "older"),
        (HEAD, stored("a", 99, 2000), "older"),  # it was replaced by b, whatever its clock says
        (msgspec.structs.replace(HEAD, time_ns=DAY_NS), stored("c", 1, 1001), ""),  # a head of the future
    ],
)
def test_which_round_is_newer(head: Head, round_: StoredRound, why: str) -> None:
    assert head.refuses(round_, now_ns=10_000) == why


def test_a_head_comes_back() -> None:
    fields = head_fields(stored("c", 7, 2**63 + 5, env={"a.b": 1}, findings=[{}]), HEAD, 9, 77)
    head = head_from(bson.decode(bson.encode({"_id": "n", "seq": 9, **fields})))
    assert head.complete and (head.instance, head.round, head.time_ns) == ("c", 7, 2**63 + 5)
    assert head.past == ["a", "b"] and head.env == {"a.b": 1} and head.findings_count == 1
    with pytest.raises(InputError):
        head_from({"_id": "n", "seq": "x"})


@given(st.integers(-(2**70), 2**70))
def test_any_time_is_a_moment(time_ns: int) -> None:
    bson.encode({"t": moment(time_ns)})
