"""Which round a request is about: the latest, one by its number, or the one that stood at a time."""

from __future__ import annotations

import math
import time

from starlette.concurrency import run_in_threadpool

from gpuflight.graph.codec import time_from_text, time_text
from gpuflight.rounds import Round
from gpuflight.server.errors import ApiError
from gpuflight.server.state import ServerState


def latest_round(state: ServerState) -> Round:
    """The newest round. Raises ApiError 503 before the first."""
    latest = state.controller.latest
    if latest is None:
        raise ApiError(503, "no_round", "no round has been completed yet", headers={"Retry-After": "1"})
    return latest


async def select_round(state: ServerState, number: int | None = None, at: str | None = None) -> Round:
    """The round that a request names by ``number`` or by a time; the latest without either.

    Raises ApiError: 404 for a round that is not, or no longer, here, 422 for what is no time, 503 before any round.
    """
    latest = latest_round(state)
    if number is not None and at is not None:
        raise ApiError(422, "bad_request", "give a round by its number or by a time (at), not both")
    if at is not None:
        number = round_at(state, parse_time(at))
    if number is None or number == latest.number:
        return latest
    wanted = number
    found = await run_in_threadpool(state.past.get, wanted, lambda: state.controller.history.get(wanted))
    if found is None:
        raise no_such_round(state, number)
    return found


def round_at(state: ServerState, time_ns: int) -> int:
    """Number of the last round that had begun at a time, ns since the epoch. Raises ApiError 404 if it is older than
    everything kept."""
    kept = state.controller.history.rounds(0, 2**63)
    found = [done.number for done in kept if done.time_ns <= time_ns]
    if found:
        return found[-1]
    message = f"nothing is kept of {time_text(time_ns)}"
    if kept:
        message += f"; the oldest round here is {kept[0].number}, of {time_text(kept[0].time_ns)}"
    raise ApiError(404, "before_history", message, _kept(kept))


def no_such_round(state: ServerState, number: int) -> ApiError:
    """The error for a round that is not here; it says which ones are."""
    kept = state.controller.history.rounds(0, 2**63)
    detail = _kept(kept)
    what = f"; here are {detail['oldest_round']} to {detail['newest_round']}" if kept else ""
    return ApiError(404, "no_such_round", f"round {number} is not, or no longer, here{what}", detail)


def _kept(kept: list[Round]) -> dict[str, int | str]:
    if not kept:
        return {}
    return {
        "oldest_round": kept[0].number,
        "oldest_time": time_text(kept[0].time_ns),
        "newest_round": kept[-1].number,
        "newest_time": time_text(kept[-1].time_ns),
    }


def parse_time(text: str) -> int:
    """ns since the epoch of an ISO 8601 time (UTC if it does not say), of seconds since the epoch, or of seconds before
    now (``-30``). Raises ApiError 422."""
    text = text.strip().replace(" ", "+")  # a plus sign in a query that was not quoted
    try:
        try:
            number = float(text)
        except ValueError:
            if not any(mark in text[10:] for mark in ("Z", "z", "+", "-")):
                text += "Z"
            time_ns = time_from_text(text)
        else:
            if not math.isfinite(number):
                raise OverflowError
            time_ns = int((time.time() + number if number < 0 else number) * 1e9)
        if time_ns:
            time_text(time_ns)  # within the years that can be written
            return time_ns
    except (ValueError, OverflowError, OSError):
        pass
    raise ApiError(422, "bad_request", f"at: {text!r} is no time: give ISO 8601 or seconds since the epoch")
