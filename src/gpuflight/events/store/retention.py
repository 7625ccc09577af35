"""What the event store forgets: sessions past their age, and the oldest ones where there is too much in all."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from gpuflight.events.store.catalogue import Session

_DAY_NS = 86_400 * 10**9


class RetentionSettings(BaseModel):
    """How long events are kept."""

    model_config = ConfigDict(extra="forbid")

    max_age_days: float = Field(
        default=30.0, ge=0, description="sessions of which nothing arrived for so long are deleted (days); 0: never"
    )
    max_bytes: int = Field(
        default=0, ge=0, description="records of at most this size are kept (bytes), the longest idle go; 0: no limit"
    )


def expired(sessions: Sequence[Session], now_ns: int, max_age_days: float) -> list[int]:
    """Numbers of the sessions that are past their age; a session's own ``retention_days`` counts first, 0 keeps it."""
    gone = []
    for session in sessions:
        days = session.retention_days if session.retention_days is not None else max_age_days
        if days > 0 and session.received_ns < now_ns - days * _DAY_NS:
            gone.append(session.session_no)
    return gone
