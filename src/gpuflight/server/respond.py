"""Bytes as answers: ETag and 304, the content encoding the client takes, bodies from the cache."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from gpuflight.server.bodies import LEAST_COMPRESSED_BYTES, Encoding, Key
from gpuflight.server.errors import ApiError
from gpuflight.server.repeats import Repeat, matches, request_key
from gpuflight.server.state import ServerState

MEDIA_TYPES = {
    "json": "application/json",
    "msgpack": "application/msgpack",
    "ndjson": "application/x-ndjson",
    "text": "text/plain; charset=utf-8",
}
"""Format → what it is called in headers."""

_UNCHANGED = ("etag", "cache-control", "vary", "gpuflight-round")
"""Headers of a 304."""

_ACCEPTED = {
    "application/json": "json",
    "application/msgpack": "msgpack",
    "application/x-msgpack": "msgpack",
    "application/vnd.msgpack": "msgpack",
    "application/x-ndjson": "ndjson",
    "application/ndjson": "ndjson",
    "application/jsonl": "ndjson",
    "text/plain": "text",
    "text/*": "text",
    "application/*": "json",
    "*/*": "json",
}


async def answer(
    request: Request,
    state: ServerState,
    *,
    number: int,
    representation: str,
    media_type: str,
    build: Callable[[], bytes],
    headers: Mapping[str, str] | None = None,
    repeatable: bool = False,
    etag: str = "",
) -> Response:
    """The body of (round ``number``, ``representation``), from the cache or made by ``build`` in a thread; or 304.

    ``repeatable`` says that the request asks for the latest round, whichever that is, and that a viewer may have the
    answer: as long as the round is the latest one, the same request is answered the short way (``repeats``).
    ``etag`` replaces the one that is made of round and representation.
    """
    # Weak, since one tag stands for all content encodings of a body.
    etag = etag or f'W/"{state.instance_id}-{number}-{zlib.crc32(representation.encode()):08x}"'
    sent = {
        "etag": etag,
        "cache-control": "private, no-cache",
        "vary": "accept, accept-encoding, authorization",
        "gpuflight-round": str(number),
        **(headers or {}),
    }
    known = request.headers.get("if-none-match")
    if known is not None and matches(known, etag):
        return Response(status_code=304, headers={name: sent[name] for name in _UNCHANGED})
    encoding = choose_encoding(request.headers.get("accept-encoding", ""))
    key = Key(number, representation, encoding)
    body = state.bodies.find(key)
    if body is None:
        body = await run_in_threadpool(state.bodies.get, key._replace(encoding="identity"), build)
        if encoding != "identity" and len(body) >= LEAST_COMPRESSED_BYTES:
            body = await run_in_threadpool(state.bodies.get, key, build)
        else:
            encoding = "identity"
    if encoding != "identity":
        sent["content-encoding"] = encoding
    response = Response(body, headers=sent, media_type=media_type)
    if repeatable:
        short = Response(status_code=304, headers={name: value for name, value in sent.items() if name in _UNCHANGED})
        repeat = Repeat(number, etag, key._replace(encoding=encoding), response.raw_headers, short.raw_headers)
        state.repeats.learn(request_key(request.scope)[0], repeat)
    return response


def choose_format(wanted: str | None, accept: str) -> str:
    """The format of an answer: what ``format=`` says, else the best of the Accept header. Raises ApiError 406."""
    if wanted is not None:
        return wanted
    if not accept:
        return "json"
    for _, name in sorted(_weighted(accept), key=lambda item: -item[0]):
        if name in _ACCEPTED:
            return _ACCEPTED[name]
    raise ApiError(406, "not_acceptable", "none of the formats asked for is made here", {"made": list(MEDIA_TYPES)})


def choose_encoding(accept_encoding: str) -> Encoding:
    """The content encoding for an Accept-Encoding header: what the client likes best, zstd before gzip."""
    gzip, zstd = _encoding_weights(accept_encoding)
    if zstd > 0 and zstd >= gzip:
        return "zstd"
    return "gzip" if gzip > 0 else "identity"


def takes_gzip(scope: Scope) -> bool:
    """Whether a request takes gzip, whatever it likes more."""
    header = b",".join(value for name, value in scope["headers"] if name == b"accept-encoding")
    return _encoding_weights(header.decode("latin-1"))[0] > 0


def _encoding_weights(accept_encoding: str) -> tuple[float, float]:
    """What an Accept-Encoding header says of gzip and of zstd."""
    if not accept_encoding:
        return 0.0, 0.0
    weights = {name: weight for weight, name in _weighted(accept_encoding, keep_refused=True)}
    rest = weights.get("*", 0.0)
    return weights.get("gzip", weights.get("x-gzip", rest)), weights.get("zstd", rest)


def _weighted(header: str, *, keep_refused: bool = False) -> list[tuple[float, str]]:
    """(q, value) of each part of a header such as Accept, in its order; without the ones of q=0 unless kept."""
    found = []
    for part in header.split(","):
        name, *parameters = (piece.strip().lower() for piece in part.split(";"))
        weight = 1.0
        for parameter in parameters:
            if parameter.startswith("q="):
                try:
                    weight = float(parameter[2:])
                except ValueError:
                    weight = 0.0
        if name and (weight > 0 or keep_refused):
            found.append((weight, name))
    return found
