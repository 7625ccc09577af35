"""The subscriber that writes rounds as JSON to a file."""

from __future__ import annotations

import os
from typing import Any, Literal

from pydantic import Field, model_validator

from gpuflight.errors import DeliveryError
from gpuflight.rounds import Round
from gpuflight.subscribers.atomic import append_whole, write_atomic
from gpuflight.subscribers.base import Outside, PackedSettings, PackedSubscriber, Parcel, delivery_error, parcel
from gpuflight.subscribers.encoding import encode_diff_line, encode_round
from gpuflight.subscribers.netguard import Refused, check_path
from gpuflight.subscribers.rotation import Rotation


class FileJsonSettings(PackedSettings):
    """Settings of the JSON file subscriber."""

    path: str = Field(min_length=1, description="the file")
    mode: Literal["replace", "append"] = Field(
        default="replace", description="replace the file atomically each round, or append one line (JSONL)"
    )
    content: Literal["graph", "diff"] = Field(
        default="graph",
        description="the whole round, or (append only) what changed, with a whole round first and after a gap",
    )
    rotate_bytes: int = Field(
        default=0, ge=0, description="append: begin a new file when it is at least so large (bytes); 0: never"
    )
    rotate_s: float = Field(
        default=0.0, ge=0, description="append: begin a new file when it is at least so old (s); 0: never"
    )
    rotate_keep: int = Field(default=0, ge=0, description="append: old files kept; 0: all")
    rotate_compress: bool = Field(default=True, description="append: compress old files with zstd")

    @model_validator(mode="after")
    def _diffs_need_what_was_before(self) -> FileJsonSettings:
        if self.content == "diff" and self.mode != "append":
            raise ValueError("content diff needs mode append: a difference says nothing without the round before it")
        return self


class FileJson(PackedSubscriber):
    """Writes rounds as JSON to a file, replacing it or appending lines."""

    stability = "stable"
    settings_class = FileJsonSettings

    def __init__(self, settings: Any = None) -> None:
        super().__init__(settings)
        self._rotation = Rotation(
            self.settings.path,
            max_bytes=self.settings.rotate_bytes if self.settings.mode == "append" else 0,
            max_age_s=self.settings.rotate_s if self.settings.mode == "append" else 0.0,
            keep=self.settings.rotate_keep,
            compress=self.settings.rotate_compress,
        )

    def outside(self) -> Outside:
        spool = (f"{self.settings.spool_folder}/spool",) if self.settings.spool_folder else ()
        return Outside(paths=(self.settings.path, *spool))

    def pack(self, completed: Round, after: int | None) -> Parcel:
        follows = self.settings.content == "diff" and after == completed.number - 1
        if not follows or self._rotation.due(completed.time_ns):  # every file begins with a whole round
            return parcel(completed, encode_round(completed) + b"\n")
        return parcel(completed, encode_diff_line(completed) + b"\n", after)

    def send(self, packed: Parcel) -> None:
        write = write_atomic if self.settings.mode == "replace" else append_whole
        path = permitted(self, self.settings.path)
        try:
            if packed.base is None and self._rotation.due(packed.time_ns):
                self._rotation.rotate(packed.time_ns)
            write(path, packed.data)
            self._rotation.written(packed.time_ns)
        except OSError as error:
            raise delivery_error(error, self.settings.path) from error

    def trial(self, completed: Round) -> None:
        """Writes a file beside it and deletes it."""
        try_beside(permitted(self, self.settings.path))


def permitted(subscriber: PackedSubscriber, path: str) -> str:
    """The path as the rules allow it now: a link may have changed since the subscriber was made."""
    if subscriber.rules is None:
        return path
    try:
        return check_path(path, subscriber.rules)
    except Refused as error:
        raise DeliveryError(str(error), retryable=False) from error


def try_beside(path: str) -> None:
    """Write a file beside ``path`` and delete it; check that ``path`` could be written itself. Raises DeliveryError."""
    beside = f"{os.path.realpath(path)}.{os.getpid()}-{os.urandom(4).hex()}.trial"
    try:
        write_atomic(beside, b"gpuflight trial\n")
        os.unlink(beside)
        if os.path.exists(path):
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK)
            os.close(descriptor)
    except OSError as error:
        raise delivery_error(error, path) from error
