"""The one shape of every error that the API gives: ``{"error": {"code", "message", "detail"}}``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from gpuflight.errors import ConfigError, GpuflightError, InputError
from gpuflight.graph import codec

log = logging.getLogger(__name__)


class ApiError(Exception):
    """An answer that is no success: HTTP status, a code for programs, a message for people, and what more is known."""

    def __init__(
        self, status: int, code: str, message: str, detail: Any = None, *, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.detail = detail
        self.headers = dict(headers or {})


class JsonResponse(Response):
    """Plain data as JSON, by msgspec."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body; text that is not valid Unicode is escaped, not refused."""
        return codec.encode(content)


def error_body(code: str, message: str, detail: Any = None) -> bytes:
    """The body of an error, as JSON."""
    return codec.encode({"error": {"code": code, "message": message, "detail": detail}})


def error_response(
    status: int, code: str, message: str, detail: Any = None, headers: Mapping[str, str] | None = None
) -> Response:
    """An error as a response; never kept by a cache."""
    return Response(
        error_body(code, message, detail),
        status,
        {**(headers or {}), "cache-control": "no-store"},
        media_type="application/json",
    )


def install(app: FastAPI) -> None:
    """Give every exception the one shape."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(RequestValidationError, _validation)
    app.add_exception_handler(GpuflightError, _gpuflight_error)
    app.add_exception_handler(Exception, _defect)


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)  # noqa: S101 - registered for this class
    return error_response(error.status, error.code, error.message, error.detail, error.headers)


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101
    status = error.status_code
    if status == HTTPStatus.NOT_FOUND and error.detail == HTTPStatus.NOT_FOUND.phrase:
        return error_response(status, "no_such_path", f"there is nothing at {request.url.path}")
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed: list[str] = request.app.state.gpuflight_allowed(request.scope["path"])
        message = f"{request.method} is not possible at {request.url.path}"
        headers = {"Allow": ", ".join(allowed)}
        return error_response(status, "method_not_allowed", message, {"allowed": allowed}, headers)
    if status == HTTPStatus.BAD_REQUEST:  # FastAPI's, of a body that is no text; JSON that is none is 422 there too
        return error_response(422, "bad_request", str(error.detail), None, error.headers)
    code = HTTPStatus(status).phrase.lower().replace(" ", "_").replace("-", "_")
    return error_response(status, code, str(error.detail), None, error.headers)


async def _validation(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)  # noqa: S101
    # Not the input itself: it may hold a secret, and need not be JSON.
    detail = [
        {"where": ".".join(map(str, found.get("loc", ()))), "problem": found.get("msg", "")} for found in error.errors()
    ]
    first = detail[0] if detail else {"where": "request", "problem": "not valid"}
    return error_response(422, "bad_request", f"{first['where']}: {first['problem']}", detail)


async def _gpuflight_error(_: Request, error: Exception) -> Response:
    """What one of our layers refused on purpose: the client's doing if it is about input, else ours."""
    if isinstance(error, (InputError, ConfigError)):
        return error_response(422, "bad_request", str(error))
    return error_response(503, "unavailable", str(error))


async def _defect(request: Request, error: Exception) -> Response:
    connection = request.scope.get("gpuflight.transport")  # transport.SCOPE_KEY
    if isinstance(error, RuntimeError) and connection is not None and connection.is_closing():
        # uvloop raises this at a write after the connection was closed, by the client or by our own stop.
        log.debug("%s %s: the connection was closed", request.method, request.url.path, exc_info=error)
    else:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return error_response(500, "defect", "this is a defect of gpuflight; the server's log says more")
