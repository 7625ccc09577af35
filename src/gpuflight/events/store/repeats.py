"""What comes again is recognised: by the position in its source, or by (session, wire type, batch number)."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from gpuflight.events.batch import Batch
from gpuflight.events.store.parts import Part, Written
from gpuflight.events.tables import TABLES


class Repeats(ABC):
    """Of a store that knows the positions of its sources and the numbers of its batches."""

    _number_of: Callable[[str], int]

    @abstractmethod
    def _position(self, source: str) -> int | None:
        """How far a source is stored; None: nothing of it."""

    @abstractmethod
    def _known(self, session_no: int) -> dict[tuple[str, int], int]:
        """Digests of the batches that are stored, by wire type and number."""

    def _new_parts(self, parts: Sequence[Part], results: list[Written]) -> list[tuple[Part, Written]]:
        """The parts whose sources are not stored."""
        new: list[tuple[Part, Written]] = []
        reached: dict[str, int] = {}  # by parts of this very write
        for part, written in zip(parts, results, strict=True):
            source = part.source
            if source is not None and not source.renew:
                position = reached.get(source.name, self._position(source.name))
                if position is not None and position >= source.end:
                    written.repeated = True
                    continue
                if position is not None and position > source.start:
                    written.stored_to = position
                    continue
            if source is not None:
                reached[source.name] = source.end
            new.append((part, written))
        return new

    def _new(
        self, batches: Sequence[Batch], written: Written, noted: list[tuple[int, str, int, int]]
    ) -> list[tuple[int, Batch]]:
        """The batches that are not stored yet, with the numbers of their sessions; ``noted`` gets what is to be noted
        as stored."""
        fresh: list[tuple[int, Batch]] = []
        digests: dict[tuple[int, str, int], list[int]] = {}
        for batch in batches:
            session_no = self._number_of(batch.session_id)
            if batch.batch_id is not None and not TABLES[batch.table].key:
                digests.setdefault((session_no, batch.wire_type, batch.batch_id), []).append(_digest(batch))
        repeated: set[tuple[int, str, int]] = set()
        for (session_no, wire_type, batch_id), parts in digests.items():
            # A batch on the wire may come as several: of more than one table, or of rows that lack different columns.
            digest = zlib.crc32(b"".join(part.to_bytes(8, "little") for part in sorted(set(parts))))
            known = self._known(session_no).get((wire_type, batch_id))
            if known is None:
                self._known(session_no)[wire_type, batch_id] = digest
                noted.append((session_no, wire_type, batch_id, digest))
            elif known == digest:
                repeated.add((session_no, wire_type, batch_id))
                written.ledger.add("repeated_batch", subject=wire_type)
            else:
                written.ledger.add("batch_conflict", subject=wire_type)
        for batch in batches:
            session_no = self._number_of(batch.session_id)
            if batch.batch_id is None or (session_no, batch.wire_type, batch.batch_id) not in repeated:
                fresh.append((session_no, batch))
        return fresh


def _digest(batch: Batch) -> int:
    digest = zlib.crc32(f"{batch.table}{batch.count}".encode())
    for name in sorted(batch.columns):
        column = batch.columns[name]
        raw = "\0".join(column).encode("utf-8", "surrogatepass") if isinstance(column, list) else column.tobytes()
        digest = zlib.crc32(raw, zlib.crc32(name.encode(), digest))
    return digest
