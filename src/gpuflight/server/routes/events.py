"""Events of GPU sessions from agents: windows and blocks of lines, and single events, in the dialects of agents.

An answer of 200 says that what was sent is stored and safe. What the original's agents do with answers: any 2xx goes
on, ``window_acknowledged`` lets them delete a window, 409 and 402 count as sent unless ``window_identity_conflict`` is
in the body, everything else is tried again.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from fastapi import Depends, Request

from gpuflight.server.auth import require_ingest
from gpuflight.server.deps import State
from gpuflight.server.errors import ApiError
from gpuflight.server.events.requests import answer_of, receive, service_of, taken
from gpuflight.server.events.samples import EVENT, LINES, SESSION
from gpuflight.server.router import PlainRouter
from gpuflight.server.samples import sample

ROOT = "/api/v1/events"
router = PlainRouter(prefix=ROOT, tags=["events"], dependencies=[Depends(require_ingest)])

_CHANNELS = frozenset(("device", "scope", "system", "sass"))
_KIND = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {"description": "the body does not have the checksum that its sender says"},
    409: {"description": "a window of this id is stored, and its content was another"},
    413: {"description": "the body is too large, as it is or decompressed"},
    415: {"description": "a content encoding that is not taken"},
    429: {"description": "too much is being taken in: wait for Retry-After (or too many wrong tokens)"},
    503: {"description": "it could not be stored; send it again"},
}


def _header(name: str, text: str, kind: str = "string") -> dict[str, Any]:
    return {"name": name, "in": "header", "required": False, "description": text, "schema": {"type": kind}}


_STREAM_DOCUMENT: dict[str, Any] = {
    **sample("POST", f"{ROOT}/stream", text=LINES, headers={"Content-Type": "application/x-ndjson"}),
    "parameters": [
        _header("X-GpuFlight-Session-Id", "session of the lines, and of those that name none"),
        _header("X-GpuFlight-Hostname", "host of the session, if its log does not say"),
        _header("X-GpuFlight-Window-Id", "what is sent is this window: stored once, however often it comes"),
        _header("X-GpuFlight-Window-Channel", "channel of the window"),
        _header("X-GpuFlight-Window-Sequence", "number of the window in its channel", "integer"),
        _header("X-GpuFlight-Window-CRC32", "CRC-32 of the body as it is sent", "integer"),
        _header("Content-Encoding", "gzip, zstd or none"),
    ],
    "requestBody": {"content": {"application/x-ndjson": {"schema": {"type": "string"}}}, "required": False},
}


@router.post("/stream", summary="A window or a block of lines", responses=_RESPONSES, openapi_extra=_STREAM_DOCUMENT)
async def stream(request: Request, state: State) -> dict[str, Any]:
    """Lines of a log as they are, one JSON object a line, of one session or several. ``accepted`` and ``rejected``
    count lines, ``errors`` names those that were of no use (the first 1,000). A window or block that was stored before
    is acknowledged and stored once: a window by its id and checksum, a block by its content."""
    service = service_of(state)
    async with receive(request, service) as block:
        return answer_of(block, await taken(service, block))


@router.post(
    "/session-complete",
    summary="Everything of a session was sent",
    responses={503: _RESPONSES[503], 429: _RESPONSES[429]},
    openapi_extra={
        **sample("POST", f"{ROOT}/session-complete", headers={"X-GpuFlight-Session-Id": SESSION}),
        "parameters": [_header("X-GpuFlight-Session-Id", "the session; required")],
    },
)
async def session_complete(request: Request, state: State) -> dict[str, Any]:
    """After the last window. From then on the session counts as complete, unless something of it is noted as lost."""
    session_id = request.headers.get("x-gpuflight-session-id", "").strip()
    if not 0 < len(session_id) <= 256:
        raise ApiError(422, "bad_request", "X-GpuFlight-Session-Id: names no session")
    service = service_of(state)
    await service.between_writes(lambda store: store.complete(session_id))
    return {"status": "success", "session_id": session_id}


@router.post(
    "/{kind}",
    summary="Single events, by type or channel",
    responses={**_RESPONSES, 422: {"description": "not an event"}},
    openapi_extra={
        **sample("POST", f"{ROOT}/kernel_event", EVENT),
        "requestBody": {
            "content": {
                "application/json": {"schema": {"type": "object"}},
                "application/x-ndjson": {"schema": {"type": "string"}},
            },
            "required": True,
        },
    },
)
async def single(request: Request, state: State, kind: str) -> dict[str, Any]:
    """``kind`` is a type of event, or a channel (device, scope, system, sass). The body is the event itself, or an
    envelope ``{"data": "<the line>", "agentSendingTime", "type", "hostname", "ipAddr"}``; with the content type
    ``application/x-ndjson``, lines."""
    if not _KIND.fullmatch(kind):
        raise ApiError(422, "bad_request", f"{kind[:100]!r} is no type of event")
    service = service_of(state)
    async with receive(request, service) as block:
        if kind in _CHANNELS:
            block.channel = kind
        elif request.headers.get("x-key", "") in _CHANNELS:
            block.channel = request.headers["x-key"]
        lines = "json" not in request.headers.get("content-type", "json").replace("ndjson", "").replace("jsonl", "")
        if not lines:
            _open_envelope(block, service.settings.max_block_bytes)
        result = await taken(service, block)
        if result.rejected and not lines and not result.accepted:
            first = result.errors[0] if result.errors else None
            reason = first.reason if first is not None else "not_json"
            raise ApiError(422, "bad_event", f"this is no event: {reason}", msgspec.to_builtins(result.errors))
        answer = answer_of(block, result)
        return {"status": "success", "message": "stored", "eventType": kind, **answer}


def _open_envelope(block: Any, limit: int) -> None:
    """Take the line out of the envelope of an agent; a body that is none is the event itself."""
    from gpuflight.server.events.body import Damaged, TooLarge, pieces

    try:
        body = b"".join(pieces(block.body, block.encoding, limit))
    except TooLarge:
        raise ApiError(413, "too_large", f"events may be {limit} bytes when decompressed") from None
    except Damaged as error:
        raise ApiError(422, "bad_request", f"the body cannot be decompressed: {error}") from None
    block.body, block.encoding = body, ""
    try:
        envelope = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return  # told as a line that is no JSON
    if not isinstance(envelope, dict) or "data" not in envelope:
        block.body = body.replace(b"\r\n", b"\n").replace(b"\n", b" ")  # an event that was written over several lines
        return
    data = envelope["data"]
    text = data if isinstance(data, str) else msgspec.json.encode(data).decode()
    block.body = text.encode("utf-8", "surrogatepass")
    for name, field in (("hostname", "hostname"), ("ipAddr", "ip_addr")):
        value = envelope.get(name)
        if isinstance(value, str) and len(value) <= 256:
            setattr(block, field, value)
