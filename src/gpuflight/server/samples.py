"""Examples of requests, for the OpenAPI document. The tests execute each one, in the order of the paths."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

ORIGIN = "http://127.0.0.1:9477"


def sample(
    method: str, target: str, body: Any = None, *, text: str | None = None, headers: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """``openapi_extra`` of a route: a request to ``target`` (path and query) as a curl command, in the extension
    ``x-codeSamples`` that documentation tools show. ``body`` is sent as JSON, ``text`` as it is."""
    words = ["curl", "-sS"]
    if method != "GET":
        words += ["-X", method]
    if body is not None:
        words += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    for name, value in (headers or {}).items():
        words += ["-H", f"{name}: {value}"]
    if text is not None:
        words += ["-d", text]
    return {"x-codeSamples": [{"lang": "Shell", "source": shlex.join([*words, ORIGIN + target])}]}
