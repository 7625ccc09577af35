"""Is the process alive, and are its rounds coming? Anyone may ask; nothing is told about the machine."""

from __future__ import annotations

import time
from typing import Any

from gpuflight.server.deps import State
from gpuflight.server.errors import ApiError
from gpuflight.server.router import PlainRouter
from gpuflight.server.samples import sample

router = PlainRouter(tags=["health"])

_LATE_INTERVALS = 3


@router.get("/healthz", summary="The process answers", openapi_extra=sample("GET", "/healthz"))
async def healthz() -> dict[str, Any]:
    """200 as long as the process can answer at all."""
    return {"status": "ok"}


@router.get(
    "/readyz",
    summary="There is a round, and it is not old",
    responses={503: {"description": "not ready"}},
    openapi_extra=sample("GET", "/readyz"),
)
async def readyz(state: State) -> dict[str, Any]:
    """200 when there is a round that is not old; else 503 with the reason."""
    controller = state.controller
    latest = controller.latest
    if state.stopping:
        raise ApiError(503, "stopping", "the server is stopping")
    if latest is None:
        raise ApiError(503, "no_round", "no round has been completed yet")
    age_s = max(0.0, (time.time_ns() - latest.time_ns) / 1e9)
    settings = state.settings
    allowed_s = _LATE_INTERVALS * settings.interval_s + settings.limits.round_deadline_s
    tape = getattr(controller.world, "tape", None)
    replaying = tape is not None and bool(tape.rounds)  # its rounds have the time of the recording
    if controller.running and not replaying and age_s > allowed_s:
        raise ApiError(
            503, "late", f"the last round began {age_s:.0f} s ago, expected within {allowed_s:.0f} s", {"age_s": age_s}
        )
    return {"status": "ok", "round": latest.number, "age_s": round(age_s, 3), "running": controller.running}
