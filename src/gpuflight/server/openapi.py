"""What FastAPI cannot know of our OpenAPI document: the shape of answers and errors, and who may ask.

Routes answer with plain data (``router``), so that no response model says what it looks like: the keys that each answer
always has are told here, in one table, as are the media types of what is no JSON. The tests hold answers against it.
"""

from __future__ import annotations

import mimetypes
from typing import Any

from fastapi import FastAPI

from gpuflight.registry import plugins
from gpuflight.vis.base import Renderer

_JSON = "application/json"
_ERROR = {"$ref": "#/components/schemas/Error"}
_GRAPH_TYPES = (_JSON, "application/msgpack", "application/x-ndjson", "text/plain")
_CONTROL = ("running", "references_count", "interval_s", "latest_round", "failed_rounds_count", "history")
_COLLECTOR = ("name", "enabled", "settings", "coverage")
_TABLE_TYPES = ("text/csv", "application/x-ndjson", "application/vnd.apache.arrow.stream")
_ENVELOPE = ("env", "content")
_SUBSCRIBER = ("name", "type", "statistics")

_KEYS: dict[str, tuple[str, ...]] = {
    "/api/v1/collectors": ("collectors",),
    "/api/v1/collectors/{name}": _COLLECTOR,
    "/api/v1/collectors/{name}/enable": (*_COLLECTOR, "changed"),
    "/api/v1/collectors/{name}/disable": (*_COLLECTOR, "changed"),
    "/api/v1/control": _CONTROL,
    "/api/v1/control/start": (*_CONTROL, "changed"),
    "/api/v1/control/stop": (*_CONTROL, "changed"),
    "/api/v1/control/trigger": (*_CONTROL, "round", "time"),
    "/api/v1/control/clear": _CONTROL,
    "/api/v1/diff": ("round",),
    "/api/v1/entities": ("round", "time", "count", "entities"),
    "/api/v1/entities/{entity_id}": ("round", "time", "entity", "edges"),
    "/api/v1/edges/{edge_id}": ("round", "time", "edge"),
    "/api/v1/path": ("round", "time", "path"),
    "/api/v1/graph": (),  # a page and a part have no more than each form says
    "/api/v1/graph/view": ("round", "boxes", "links", "routes"),
    "/api/v1/rounds": ("rounds", "truncated"),
    "/api/v1/rounds/latest": ("round", "time", "coverage", "env"),
    "/api/v1/rounds/{number}": ("round", "time", "coverage", "env"),
    "/api/v1/rounds/{number}/diff": ("round",),
    "/api/v1/tokens/{which}": ("revoked",),
    "/api/v1/api-keys/{which}": ("revoked",),
    "/api/v1/auth/login": ("token", "username", "role"),
    "/api/v1/auth/profile": ("username",),
    "/api/v1/events/stream": ("accepted_for_processing", "accepted", "rejected", "errors"),
    "/api/v1/events/session-complete": ("status", "session_id"),
    "/api/v1/events/{kind}": ("status", "eventType", "accepted", "rejected", "errors"),
    "/api/v1/events/admin/retention/run": ("deletedSessions",),
    "/api/v1/events/sessions/{session_id}": ("deleted",),
    "/api/v1/events/source-content": ("sessionId", "files"),
    "/api/v1/events/disassembly": ("sessionId", "functions"),
    "/api/v1/insights/{session_id}": ("sessionId", "insights"),
    "/api/v1/sessions": ("sessions", "sessions_count"),
    "/api/v1/sessions/{session_id}/retention": ("session_id", "retention_days"),
    "/api/v1/sessions/{session_id}/compare": ("kernels", "kernels_count", "before_count", "after_count"),
    "/api/v1/sessions/{session_id}/kernels/top": ("lines", "lines_count", "count", "total_ns"),
    "/api/v1/sessions/{session_id}/kernels": ("kernels",),
    "/api/v1/sessions/{session_id}/kernels/histogram": ("buckets",),
    "/api/v1/sessions/{session_id}/copies": ("copies",),
    "/api/v1/sessions/{session_id}/memset": ("fills",),
    "/api/v1/sessions/{session_id}/waits": ("waits",),
    "/api/v1/sessions/{session_id}/memory": ("memory",),
    "/api/v1/sessions/{session_id}/memory/held": ("held",),
    "/api/v1/sessions/{session_id}/memory/series": ("points",),
    "/api/v1/sessions/{session_id}/scopes": ("nodes", "unmatched_ends_count", "complete"),
    "/api/v1/sessions/{session_id}/profile": ("lines",),
    "/api/v1/sessions/{session_id}/telemetry": ("series",),
    "/api/v1/sessions/{session_id}/counters": ("series",),
    "/api/v1/sessions/{session_id}/report": ("report",),
    "/api/v1/sessions/{session_id}/trace": ("traceEvents",),
    "/compressed_graph": _ENVELOPE,
    "/control/clear": _ENVELOPE,
    "/control/start": _ENVELOPE,
    "/control/stop": _ENVELOPE,
    "/control/trigger": _ENVELOPE,
    "/graph": _ENVELOPE,
    "/healthz": ("status",),
    "/status": _ENVELOPE,
}
"""Path → what the JSON of its success always has, the same for each method; nothing is said of others."""

_ARRAYS = (
    "/api/v1/auth/api-keys",
    "/api/v1/auth/demo-tokens",
    "/api/v1/events/hosts",
    "/api/v1/events/init",
    "/api/v1/events/system",
    "/api/v1/events/profile-samples",
)
"""Whose GET gives a list."""

_RECORDS = "/api/v1/sessions/{session_id}/"
"""Questions about the records of a session have an ETag too."""

_EVENTS = ("/api/v1/events/", "/api/v1/sessions", "/api/v1/insights/")
"""404 where there are no GPU sessions at all."""

_CACHED = (
    "/api/v1/graph",
    "/api/v1/graph/export",
    "/api/v1/graph/view",
    "/graph",
    "/compressed_graph",
    "/api/v1/rounds/{number}/diff",
    "/api/v1/diff",
)
"""Answers that have an ETag."""

_OPEN = ("/", "/healthz", "/readyz")
"""No token is needed."""

_ERRORS = {
    401: "no token, or one that is not valid",
    403: "the role is not enough, or a page of another origin asks",
    404: "there is no such thing, or no longer",
    406: "none of the forms asked for is made",
    409: "it can mean several things, or it conflicts with what is there",
    413: "the body is too large",
    421: "this server does not answer to that name",
    422: "a parameter, or the body, does not fit",
    429: "too many wrong tokens; wait for Retry-After",
    500: "a defect",
    503: "there is no round yet, or the server is stopping",
    504: "the round did not come in time",
}
_ABOUT_ROUNDS = {"round", "at", "from", "to", "around", "family"}


def install(app: FastAPI) -> None:
    """Have ``app.openapi`` give the completed document."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            complete(generate())
        assert app.openapi_schema is not None  # noqa: S101 - FastAPI keeps what it gives
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def complete(document: dict[str, Any]) -> None:
    """Lay what is known here onto FastAPI's document."""
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):  # no answer of ours looks like that
        schemas.pop(name, None)
    schemas["Error"] = {
        "type": "object",
        "required": ["error"],
        "additionalProperties": False,
        "properties": {
            "error": {
                "type": "object",
                "required": ["code", "message", "detail"],
                "additionalProperties": False,
                "properties": {
                    "code": {"type": "string", "description": "for programs"},
                    "message": {"type": "string", "description": "for people"},
                    "detail": {"description": "what more is known"},
                },
            }
        },
    }
    components["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer", "description": "`gpuflight token create`; docs/security.md"}
    }
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            _success(path, method, operation)
            if method == "get" and (path in _CACHED or path.startswith(_RECORDS)):
                operation["responses"].setdefault("304", {"description": "the same as the ETag given"})
            for status in _errors(path, method, operation):
                response = operation["responses"].setdefault(str(status), {"description": _ERRORS[status]})
                if status == 422:
                    response["description"] = _ERRORS[status]
                response["content"] = {_JSON: {"schema": _ERROR}}
            for status, response in operation["responses"].items():
                if int(status) >= 400:
                    response["content"] = {_JSON: {"schema": _ERROR}}
            if path not in _OPEN:
                operation["security"] = [{}, {"token": []}]


def _success(path: str, method: str, operation: dict[str, Any]) -> None:
    for status, response in operation["responses"].items():
        content = response.get("content", {})
        if not status.startswith("2") or status == "204" or (content and _JSON not in content):
            continue
        schema: dict[str, Any] = {"type": "array" if method == "get" and path in _ARRAYS else "object"}
        if required := _KEYS.get(path):
            schema["required"] = list(required)
        content[_JSON] = {"schema": schema}
        if path == "/metrics":
            content = {"text/plain": {"schema": {"type": "string"}}}
        elif path == "/":
            content = {"text/html": {"schema": {"type": "string"}}}
        elif path == "/api/v1/graph/export":
            content = {media_type: {} for media_type in export_types()}
        elif path == "/api/v1/sessions/{session_id}/report":
            content["text/html"] = {"schema": {"type": "string"}}
        elif path == "/api/v1/sessions/{session_id}/tables/{name}":
            content = {media_type: {"schema": {"type": "string"}} for media_type in _TABLE_TYPES}
        elif path == "/api/v1/graph":
            content |= {media_type: {} for media_type in _GRAPH_TYPES[1:]}
        response["content"] = content


_PICTURE_TYPES = {
    # Python's table depends on the system's, which knows few of these.
    ".gexf": "application/xml", ".graphml": "application/xml", ".drawio": "application/xml", ".csv": "text/csv",
    ".gv": "text/vnd.graphviz", ".mmd": "text/plain",
}  # fmt: skip


def export_types() -> list[str]:
    """The media types of the registered renderers."""
    return sorted({media_type_of(renderer.suffix) for renderer in plugins(Renderer).values()})


def media_type_of(suffix: str) -> str:
    """The media type of a file that ends so."""
    if suffix in _PICTURE_TYPES:
        return _PICTURE_TYPES[suffix]
    return mimetypes.guess_type("graph" + suffix)[0] or "application/octet-stream"


def _errors(path: str, method: str, operation: dict[str, Any]) -> set[int]:
    names = {parameter["name"] for parameter in operation.get("parameters", ())}
    found = {421, 500}
    if path not in _OPEN:
        found |= {401, 403, 429}
    if path not in ("/", "/healthz"):
        found.add(503)
    if names:
        found.add(422)
    if "{" in path or names & _ABOUT_ROUNDS or path.startswith(_EVENTS):
        found.add(404)
    if names & {"around", "from"}:
        found.add(409)
    if path == "/api/v1/graph":
        found.add(406)
    if method != "get":
        found.add(413)
    if path == "/api/v1/tokens/{which}":
        found.add(409)
    if path.endswith(("/trigger", "/test")):
        found.add(504)
    return found
