"""An APIRouter whose routes answer with plain data, msgspec structs included, written as JSON by msgspec.

FastAPI alone would send every answer through a response model and ``jsonable_encoder``, hundreds of times slower.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from gpuflight.server.errors import JsonResponse


class PlainRouter(APIRouter):
    """For endpoints that are coroutines and return data or a Response."""

    def add_api_route(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        """As APIRouter's, without a response model."""
        options["response_model"] = None
        super().add_api_route(path, _answering(endpoint), **options)


def _answering(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(endpoint)
    async def answering(*positional: Any, **named: Any) -> Response:
        result = await endpoint(*positional, **named)
        if isinstance(result, Response):
            return result
        return JsonResponse(result, headers={"cache-control": "no-store"})

    return answering
