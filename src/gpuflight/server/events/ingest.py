"""Blocks of lines from agents: decoded in threads, stored together, acknowledged when they are safe.

A block is known by its window's id, or by a hash of its content where it has none, so that one that comes again is
stored once. The store keeps ``1 + CRC-32`` of a window as its source's position: the same id with other content is a
conflict, not a repetition.
"""

from __future__ import annotations

import asyncio
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from gpuflight.events.ledger import Place
from gpuflight.server.events.blocks import Decoded, LineError, decode
from gpuflight.server.events.body import TooLarge, pieces
from gpuflight.server.events.decoders import Decoders, UnderWay
from gpuflight.server.events.figures import Figures
from gpuflight.server.events.settings import EventsSettings
from gpuflight.server.events.writer import Job, NotStored, StoreWriter

if TYPE_CHECKING:
    from gpuflight.events.store import EventStore, Written


class WindowConflict(Exception):
    """A window of this id is stored, and its content was another."""


class ChecksumMismatch(Exception):
    """The body is not what its sender took the checksum of."""


class Block(Struct, kw_only=True):
    """What one request brings. ``session_id``: what the sender says, may be empty. ``crc32``: of the body, as the
    sender says; None if it does not."""

    body: bytes
    encoding: str = ""
    session_id: str = ""
    channel: str = ""
    window_id: str = ""
    window_number: int = -1
    crc32: int | None = None
    hostname: str = ""
    ip_addr: str = ""


class Taken(Struct, kw_only=True):
    """What became of a block: it is stored. ``repeated``: it was already."""

    accepted: int = 0
    rejected: int = 0
    errors: list[LineError] = field(default_factory=list)
    repeated: bool = False
    damaged: str = ""
    rows: int = 0


class Ingest:
    """Takes blocks in; of any number of requests at a time."""

    def __init__(self, store: EventStore, settings: EventsSettings, figures: Figures) -> None:
        self._store = store
        self._settings = settings
        self._figures = figures
        self.decoders = Decoders(settings.max_sessions_under_way, settings.session_idle_s)
        self.writer = StoreWriter(store, self.decoders.forget)
        self._pool = ThreadPoolExecutor(settings.workers_count, thread_name_prefix="gpuflight-events-decode")

    async def take(self, block: Block) -> Taken:
        """Decode and store a block; returns when it is safe. Raises TooLarge, WindowConflict, ChecksumMismatch,
        NotStored."""
        loop = asyncio.get_running_loop()
        try:
            decoding = loop.run_in_executor(self._pool, self._decode, block)
        except RuntimeError:  # the pool is shut
            raise NotStored("the server is stopping") from None
        decoded, stored = await decoding
        if stored is None:
            self._figures.repeated += 1
            return Taken(repeated=True)
        written = await asyncio.wrap_future(stored)
        if decoded is None or written.repeated:
            self._figures.repeated += 1
            return Taken(repeated=True)
        if written.stored_to is not None:
            raise WindowConflict
        self._figures.count_stored(decoded, written)
        return Taken(
            accepted=decoded.accepted,
            rejected=decoded.rejected,
            errors=decoded.errors,
            damaged=decoded.damaged,
            rows=written.rows,
        )

    def close(self, deadline_s: float) -> bool:
        """Store what is under way, then end."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        return self.writer.close(deadline_s)

    def _decode(self, block: Block) -> tuple[Decoded | None, Future[Written] | None]:
        """In a thread: what the block holds, and what becomes of it. No Decoded: it is stored already, or is about to
        be, by another request."""
        from gpuflight.events.store import Part, Source

        checksum = zlib.crc32(block.body)
        if block.crc32 is not None and block.crc32 != checksum:
            raise ChecksumMismatch
        session_id = block.session_id or session_of(block)
        name, end = source_of(block, session_id, checksum)
        position = self._store.records.position(name)
        if position is not None:
            _same_or_conflict(position, end)
            return None, None
        self.writer.wait_for_room()
        of = self._under_way(session_id)
        with of.lock:
            waiting = of.waiting.get(name)
            if waiting is not None:
                _same_or_conflict(waiting[0], end)
                return None, waiting[1]
            # Of which channel it is decides what is a copy of what; where nobody says, each block is one of its own.
            place = Place(name, block.channel or name, block.window_number, 0)
            content = pieces(block.body, block.encoding, self._settings.max_block_bytes)
            try:
                decoded = decode(of.decoder, of.ledger, content, place, self._settings.max_line_bytes)
            except BaseException:
                self.decoders.forget(of)
                raise
            self._figures.raw_bytes += decoded.raw_bytes
            job = Job(Part(decoded.batches, Source(name, 0, end, session_id), decoded.ledger), of)
            of.waiting[name] = (end, job.done)
            if not of.host_told and (block.hostname or block.ip_addr) and session_id:
                of.host_told = True
                job.done.add_done_callback(lambda _: self._learn_host(block, session_id))
            try:
                self.writer.put(job)
            except NotStored:
                self.decoders.forget(of)
                raise
        return decoded, job.done

    def _under_way(self, session_id: str) -> UnderWay:
        if not session_id:
            return UnderWay("")  # lines that name their sessions, if any: nothing to keep
        start_ns = None
        if not self.decoders.known(session_id):
            session = self._store.session(session_id)
            start_ns = session.start_ns if session is not None else None
        return self.decoders.get(session_id, start_ns)

    def _learn_host(self, block: Block, session_id: str) -> None:
        """Old clients do not tell their host in the log; their agents do in the request."""
        session = self._store.session(session_id)
        if session is not None and session.hostname is None:
            facts: dict[str, Any] = {"hostname": block.hostname or None, "ip_addr": block.ip_addr or None}
            self._store.catalogue.learn(session.session_no, session.received_ns, facts)


def session_of(block: Block) -> str:
    """The session that the first line of a block names, if that can be seen at once."""
    if block.encoding:
        return ""
    mark = b'"session_id":"'
    head = block.body[:4096].replace(b'"session_id": "', mark)
    start = head.find(mark)
    end = head.find(b'"', start + len(mark))
    if start < 0 or end < 0:
        return ""
    found = head[start + len(mark) : end].decode("utf-8", "replace")
    return "" if "\\" in found else found


def source_of(block: Block, session_id: str, checksum: int) -> tuple[str, int]:
    """Name and end of the source that a block is."""
    if block.window_id:
        return f"window:{session_id}:{block.window_id}", 1 + checksum
    digest = blake2b(block.body, digest_size=16, person=b"gpuflight-block").hexdigest()
    return f"block:{session_id}:{digest}", 1


def _same_or_conflict(position: int, end: int) -> None:
    if position != end:
        raise WindowConflict


__all__ = ["Block", "ChecksumMismatch", "Ingest", "Taken", "TooLarge", "WindowConflict"]
