"""Requests with events: their head to a Block, their body within its bounds, and what went wrong to an answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import ClientDisconnect, Request

from gpuflight.server.errors import ApiError
from gpuflight.server.events.body import TooLarge, encoding_of
from gpuflight.server.events.service import Busy, EventService, EventsOff
from gpuflight.server.events.writer import NotStored
from gpuflight.server.state import ServerState

if TYPE_CHECKING:
    from gpuflight.server.events.ingest import Block, Taken

RETRY_S = 1
"""After so long a sender that was refused for want of room may come again."""

_MAX_HEADER_LENGTH = 256


def service_of(state: ServerState) -> EventService:
    """The service. Raises ApiError 404 where there are no GPU sessions."""
    service = state.events
    if not isinstance(service, EventService):
        raise ApiError(404, "events_off", "this server has no GPU sessions (events.enabled, and the extra `events`)")
    return service


def off(error: EventsOff) -> ApiError:
    """The answer where the store cannot be opened."""
    return ApiError(503, "events_off", str(error), headers={"Retry-After": "5"})


@asynccontextmanager
async def receive(request: Request, service: EventService) -> AsyncIterator[Block]:
    """The block that a request brings; while the context lasts, its size counts as being taken in. Raises ApiError."""
    from gpuflight.server.events.ingest import Block

    head = _head(request)
    figures = service.figures
    try:
        service.enter()
    except Busy:
        figures.refused["busy"] += 1
        raise _busy() from None
    size = 0
    try:
        chunks: list[bytes] = []
        declared = request.headers.get("content-length", "")
        if declared.isdigit():
            service.admit(int(declared))
            size = int(declared)
        taken = 0
        async for chunk in request.stream():
            taken += len(chunk)
            if taken > service.settings.max_body_bytes:
                raise ApiError(413, "too_large", f"a request may have {service.settings.max_body_bytes} bytes")
            if taken > size:
                service.admit(taken - size)
                size = taken
            chunks.append(chunk)
        figures.body_bytes += taken
        yield Block(body=b"".join(chunks), **head)
    except Busy:
        figures.refused["busy"] += 1
        raise _busy() from None
    except ClientDisconnect:
        figures.refused["disconnected"] += 1
        raise ApiError(400, "disconnected", "the body did not come to its end") from None
    finally:
        service.leave(size)


async def taken(service: EventService, block: Block) -> Taken:
    """Take a block in. Raises ApiError."""
    import asyncio

    from gpuflight.server.events.ingest import ChecksumMismatch, WindowConflict

    refused = service.figures.refused
    try:
        ingest = service.opened
        if ingest is None:
            ingest = await asyncio.get_running_loop().run_in_executor(None, lambda: service.ingest)
        return await ingest.take(block)
    except EventsOff as error:
        refused["store_not_open"] += 1
        raise off(error) from None
    except TooLarge:
        refused["too_large"] += 1
        limit = service.settings.max_block_bytes
        raise ApiError(413, "too_large", f"events may be {limit} bytes when decompressed") from None
    except ChecksumMismatch:
        refused["checksum"] += 1
        raise ApiError(400, "checksum_mismatch", "the body does not have the CRC-32 that its header says") from None
    except WindowConflict:
        refused["window_conflict"] += 1
        raise ApiError(
            409, "window_identity_conflict", "a window of this id is stored already, and its content was another"
        ) from None
    except NotStored as error:
        refused["not_stored"] += 1
        raise ApiError(503, "not_stored", str(error), headers={"Retry-After": "5"}) from None


def answer_of(block: Block, result: Taken) -> dict[str, Any]:
    """The answer to a block that is stored."""
    answer: dict[str, Any] = {
        "accepted_for_processing": True,
        "accepted": result.accepted,
        "rejected": result.rejected,
        "errors": msgspec.to_builtins(result.errors),
    }
    if result.repeated:
        answer["repeated"] = True
    if result.damaged:
        answer["damaged"] = result.damaged
    if block.window_id:
        # A window that could only be read in part is stored, but its file is worth keeping.
        answer["window_acknowledged"] = not result.damaged
    return answer


def _busy() -> ApiError:
    return ApiError(
        429,
        "busy",
        "too much is being taken in at the moment; nothing of this was taken",
        {"retry_after_s": RETRY_S},
        headers={"Retry-After": str(RETRY_S)},
    )


def _head(request: Request) -> dict[str, Any]:
    encoding = encoding_of(request.headers.get("content-encoding", ""))
    if encoding is None:
        raise ApiError(
            415,
            "unsupported_encoding",
            "the content encoding may be gzip, zstd or identity",
            {"made": ["gzip", "zstd"]},
        )
    return {
        "encoding": encoding,
        "session_id": _text(request, "x-gpuflight-session-id"),
        "hostname": _text(request, "x-gpuflight-hostname"),
        "window_id": _text(request, "x-gpuflight-window-id"),
        "channel": _text(request, "x-gpuflight-window-channel"),
        "window_number": _number(request, "x-gpuflight-window-sequence", 2**53, -1),
        "crc32": _number(request, "x-gpuflight-window-crc32", 2**32 - 1, None),
    }


def _text(request: Request, name: str) -> str:
    value = request.headers.get(name, "").strip()
    if len(value) > _MAX_HEADER_LENGTH:
        raise ApiError(422, "bad_request", f"{name}: longer than {_MAX_HEADER_LENGTH} characters")
    return value


def _number(request: Request, name: str, most: int, without: int | None) -> int | None:
    value = request.headers.get(name, "").strip()
    if not value:
        return without
    if not (value.isascii() and value.isdigit() and len(value) < 20 and int(value) <= most):
        raise ApiError(422, "bad_request", f"{name}: {value[:40]!r} is no whole number up to {most}")
    return int(value)
