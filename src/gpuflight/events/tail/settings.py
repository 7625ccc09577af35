"""What can be set of a tailer."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from gpuflight.events.files.names import CHANNELS


class TailSettings(BaseModel):
    """How log folders are followed."""

    model_config = ConfigDict(extra="forbid")

    channels: tuple[str, ...] = Field(default=CHANNELS, description="channels that are read")
    begin: Literal["beginning", "end"] = Field(
        default="beginning", description="where files begin that are there already when there is no checkpoint yet"
    )
    after_damage: Literal["beginning", "end"] = Field(
        default="beginning", description="the same where the checkpoint is damaged"
    )
    notify: bool = Field(default=True, description="let the kernel tell of changes (extra `events`), else look again")
    network: bool | None = Field(
        default=None, description="trust neither inode nor device numbers; unset: on network file systems only"
    )
    poll_interval_s: float = Field(default=0.25, gt=0, description="files that change are looked at so often (s)")
    idle_poll_s: float = Field(default=20.0, gt=0, description="idle files at least so often, without notification (s)")
    sweep_s: float = Field(default=30.0, gt=0, description="idle files at least so often, with notification (s)")
    chunk_bytes: int = Field(default=1 << 20, ge=64, description="lines handed out together (bytes)")
    poll_bytes: int = Field(default=8 << 20, ge=64, description="handed out by one poll, of all files (bytes)")
    max_line_bytes: int = Field(default=64 << 20, ge=64, description="longer lines are skipped and counted (bytes)")
    max_uncommitted_bytes: int = Field(
        default=64 << 20, ge=64, description="handed out and not committed, of all files; then reading waits (bytes)"
    )
    max_uncommitted_bytes_per_channel: int = Field(
        default=16 << 20, ge=64, description="the same for one channel of one session (bytes)"
    )
    max_open_files: int = Field(default=256, ge=1, description="log files kept open between polls")
    max_inflating: int = Field(default=16, ge=1, description="compressed windows read at a time")
    hole_wait_s: float = Field(default=5.0, ge=0, description="a missing window is waited for so long (s)")
    gone_wait_s: float = Field(
        default=5.0, ge=0, description="a deleted file is kept open so long after its end was read (s)"
    )
    settle_s: float = Field(default=30.0, ge=0, description="a cut compressed file that no longer grows is final (s)")
    save_interval_s: float = Field(default=1.0, ge=0, description="the checkpoint is written at most so often (s)")
    forget_after_s: float = Field(default=86_400.0, ge=0, description="files that are gone are forgotten then (s)")
    max_gone: int = Field(default=10_000, ge=0, description="files that are gone and still remembered, at most")
