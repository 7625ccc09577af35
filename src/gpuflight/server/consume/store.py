"""The store of the consumer: ``subscribers.mongo_writer``, and what it has written read back."""

from __future__ import annotations

import logging

from gpuflight.errors import InputError
from gpuflight.round_documents import Head, StoredRound, graph_from, head_from, parts_from
from gpuflight.subscribers.mongo_writer import MongoWriter

log = logging.getLogger(__name__)


class FleetWriter(MongoWriter):
    """Writes rounds, and reads back the graph that a difference starts from."""

    def head(self, namespace: str) -> Head | None:
        """Which round of a namespace is there; None without one that was ever whole. Raises DeliveryError."""
        with self._calling():
            found = self._database()["namespaces"].find_one({"_id": namespace})
        head = None if found is None else head_from(found)
        return head if head is not None and head.complete_seq else None

    def load(self, namespace: str) -> StoredRound | None:
        """The round of a namespace that is there, with its graph, which may have parts of the next round already if a
        writer died at it; None if there is none that can be read. Raises DeliveryError."""
        head = self.head(namespace)
        if head is None:
            return None
        with self._calling():
            database = self._database()
            alive = {"namespace": namespace, "gone": False}
            entities = list(database["entities"].find(alive))
            edges = list(database["edges"].find(alive))
            owners = [document["_id"] for document in (*entities, *edges) if document.get("parts")]
            wanted = {"namespace": namespace, "owner": {"$in": owners}}
            parts = parts_from(database["parts"].find(wanted)) if owners else {}
        again = self.head(namespace)
        if again is None or again.seq != head.seq:
            raise self._crossed(namespace)
        try:
            graph = graph_from(entities, edges, parts)
        except InputError as error:
            log.warning("%s cannot be read back, and waits for its next whole graph: %s", namespace, error)
            return None
        return StoredRound(
            namespace=namespace,
            instance=head.instance,
            number=head.round,
            time_ns=head.time_ns,
            graph=graph,
            env=head.env,
        )
