"""A namespace that is read while it is written, step by step: what is shown in the end is what is there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.strategies import graphs

from gpuflight.collectors.fleet_namespace import Namespace
from gpuflight.graph import Graph, nodes
from gpuflight.graph.namespaces import with_namespace
from gpuflight.round_documents import Head, edge_document, entity_document

NAME = "node-1"


class Database:
    """The collections of one namespace, as ``MongoReader`` answers about them. Before each answer the writer goes on
    for as many steps as ``pace`` says."""

    def __init__(self, rounds: list[Graph], pace: Iterator[int]) -> None:
        self.tables: dict[str, dict[str, dict[str, Any]]] = {"entities": {}, "edges": {}}
        self.document: dict[str, Any] = {"_id": NAME, "seq": 0, "complete_seq": 0}
        self.pace = pace
        self.steps = self._write(rounds)

    def _write(self, rounds: list[Graph]) -> Iterator[None]:
        """As the writer does it: the number, the elements, that it is whole."""
        for number, graph in enumerate(rounds, 1):
            self.document["seq"] = number
            yield
            wanted = {
                "entities": [entity_document(NAME, entity) for entity in graph.nodes.values()],
                "edges": [edge_document(NAME, edge) for edge in graph.edges.values()],
            }
            for name, documents in wanted.items():
                table = self.tables[name]
                for document in documents:
                    known = table.get(document.id)
                    if known is None or known["gone"] or known["hash"] != document.digest:
                        table[document.id] = {"_id": document.id, **document.fields, "gone": False, "seq": number}
                        yield
                for id_ in table.keys() - {document.id for document in documents}:
                    if not table[id_]["gone"]:
                        table[id_] = {**table[id_], "gone": True, "seq": number}
                        yield
            self.document.update(complete_seq=number, instance="run", round=number)
            yield

    def go_on(self) -> None:
        for _ in range(next(self.pace, 0)):
            next(self.steps, None)

    def finish(self) -> None:
        for _ in self.steps:
            pass

    def head(self, _namespace: str) -> dict[str, Any]:
        self.go_on()
        return dict(self.document)

    def changed(self, collection: str, _namespace: str, since_seq: int) -> list[dict[str, Any]]:
        self.go_on()
        return [dict(found) for found in self.tables[collection].values() if found["seq"] > since_seq]

    def digests(self, collection: str, _namespace: str) -> dict[str, bytes]:
        self.go_on()
        return {id_: found["hash"] for id_, found in self.tables[collection].items() if not found["gone"]}

    def some(self, collection: str, _namespace: str, ids: list[str]) -> list[dict[str, Any]]:
        self.go_on()
        return [dict(self.tables[collection][id_]) for id_ in ids if id_ in self.tables[collection]]


def shown(space: Namespace) -> Graph:
    assert space.view is not None and space.view.host is not None
    found = Graph(space.view.entities, space.view.connections)
    if space.view.host.metrics or space.view.host.attributes:
        found.try_add_node(space.view.host)
    return found


def expected(graph: Graph) -> Graph:
    loose = {edge.key for edge in graph.dangling()}
    return with_namespace(Graph.of(graph.nodes, {k: e for k, e in graph.edges.items() if k not in loose}), NAME)


@settings(
    max_examples=examples(100), phases=[Phase.explicit, Phase.generate]
)  # what fails is seldom worth minutes of shrinking
@given(
    rounds=st.lists(graphs(max_nodes=4, max_edges=4), min_size=1, max_size=5),
    pace=st.lists(st.integers(0, 6), max_size=60),
    full=st.lists(st.booleans(), max_size=12),
)
def test_reading_while_it_is_written(rounds: list[Graph], pace: list[int], full: list[bool]) -> None:
    database = Database(rounds, iter(pace))
    space = Namespace(NAME)
    for compare in full:
        document = database.head(NAME)
        if document["complete_seq"]:
            space.update(database, _head(document), full=compare)  # type: ignore[arg-type]
    database.finish()
    space.update(database, _head(database.document), full=False)  # type: ignore[arg-type]
    found, wanted = shown(space), expected(rounds[-1])
    hosts = {id_ for id_, entity in (found + wanted).nodes.items() if type(entity) is nodes.Host}
    assert found.edges == wanted.edges
    assert {k: v for k, v in found.nodes.items() if k not in hosts} == {
        k: v for k, v in wanted.nodes.items() if k not in hosts
    }


def _head(document: dict[str, Any]) -> Head:
    return Head(
        namespace=NAME,
        seq=document["seq"],
        complete_seq=document["complete_seq"],
        instance=document.get("instance", ""),
        round=document.get("round", 0),
    )
