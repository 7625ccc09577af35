"""What is asked of the reader of running sessions (``events.live``), and what it answers; light to import."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from gpuflight.events.activity.summary import Summary


class LiveSettings(BaseModel):
    """How much is read at a time, and what of it is told."""

    model_config = ConfigDict(extra="forbid")

    bytes_per_round: int = Field(default=16 << 20, ge=4096, description="log lines read in one round, at most (bytes)")
    recent_s: float = Field(
        default=300.0,
        gt=0,
        description="sessions are read that were written to in this time, or whose writer lives (s)",
    )
    notify: bool = Field(default=True, description="let the kernel tell of changes, else look again")
    kernels_per_session: int = Field(
        default=20, ge=1, le=1000, description="kernels told one by one; the longest in all"
    )
    scopes_per_session: int = Field(default=20, ge=0, le=1000, description="scopes told one by one; the longest in all")
    streams_per_session: int = Field(default=32, ge=1, le=1000, description="streams told one by one; the busiest")
    max_sessions: int = Field(default=2000, ge=1, description="sessions followed at a time; the longest quiet go first")


class Reading(msgspec.Struct):
    """What is known after a round. ``lost``: windows and lines lost since the last one, that belong to no session.
    ``hidden``: sessions that are there and too old; ``dropped``: that were more than ``max_sessions``;
    ``waiting``: that are read, but there was no time to sum them up. ``closed``: folders and files that may not be
    read."""

    sessions: list[Summary] = msgspec.field(default_factory=list)
    folders: list[str] = msgspec.field(default_factory=list)
    lag_bytes: int = 0
    lost: int = 0
    hidden: int = 0
    dropped: int = 0
    waiting: int = 0
    closed: int = 0


def folders_of(patterns: Iterable[str], root: str = "") -> list[str]:
    """The folders that are there, of patterns with ``*`` and ``~``; ``root``: before each, of a tree of fixtures."""
    wanted = (root + os.path.abspath(os.path.expanduser(pattern)) for pattern in patterns)
    found = (folder for pattern in wanted for folder in sorted(glob.glob(pattern)))
    return [folder for folder in dict.fromkeys(found) if os.path.isdir(folder)]
