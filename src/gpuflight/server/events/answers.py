"""Answers to questions about a session: worked on in a thread, bounded, with an ETag while nothing is written."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from gpuflight.graph import codec
from gpuflight.server.bodies import LEAST_COMPRESSED_BYTES, compress
from gpuflight.server.errors import ApiError
from gpuflight.server.events.requests import off, service_of
from gpuflight.server.events.service import EventService, EventsOff
from gpuflight.server.repeats import matches
from gpuflight.server.respond import choose_encoding
from gpuflight.server.state import ServerState

if TYPE_CHECKING:
    from gpuflight.events.query.reader import Reader
    from gpuflight.events.store import EventStore
    from gpuflight.events.store.catalogue import Session


def no_such_session(session_id: str) -> ApiError:
    """The error for a session that is not here."""
    return ApiError(404, "no_such_session", f"there is no session {session_id[:200]!r}")


def session_of(store: EventStore, session_id: str) -> Session:
    """A session by its id. Raises ApiError 404."""
    found = store.session(session_id)
    if found is None:
        raise no_such_session(session_id)
    return found


async def ask(state: ServerState, question: Callable[[EventStore], Any]) -> Any:
    """What a question about the store gives. Raises ApiError."""
    service = service_of(state)
    try:
        return await service.ask(question)
    except EventsOff as error:
        raise off(error) from None


async def change(state: ServerState, work: Callable[[EventService, EventStore], Any]) -> Any:
    """Have something changed, between two writes. Raises ApiError."""
    service = service_of(state)
    try:
        return await service.between_writes(lambda store: work(service, store))
    except EventsOff as error:
        raise off(error) from None


async def answer(request: Request, state: ServerState, session_id: str, question: Callable[[Reader], Any]) -> Response:
    """The answer to a question about a session, as JSON. Its ETag holds until anything is written; a question that was
    answered with it is not worked on again. Raises ApiError 404, InputError."""
    service = service_of(state)
    etag = _etag(state, service, request)
    known = request.headers.get("if-none-match")
    headers = {"etag": etag, "cache-control": "private, no-cache", "vary": "accept-encoding, authorization"}
    if known is not None and known.strip() != "*" and matches(known, etag):
        return Response(status_code=304, headers=headers)
    encoding = choose_encoding(request.headers.get("accept-encoding", ""))

    def work(store: EventStore) -> tuple[bytes, bool]:
        from gpuflight.events.query.reader import Reader

        body = codec.encode(question(Reader(store, [session_of(store, session_id)])))
        if encoding == "identity" or len(body) < LEAST_COMPRESSED_BYTES:
            return body, False
        return compress(body, encoding), True

    body, compressed = await ask(state, work)
    if compressed:
        headers["content-encoding"] = encoding
    return Response(body, headers=headers, media_type="application/json")


def _etag(state: ServerState, service: EventService, request: Request) -> str:
    """Taken before the question is worked on: what is written meanwhile makes the next one differ."""
    ingest = service.opened
    changes = ingest.writer.changes_count if ingest is not None else 0
    asked = f"{request.url.path}?{request.url.query}".encode()
    return f'W/"{state.instance_id}-events-{changes}-{zlib.crc32(asked):08x}"'
