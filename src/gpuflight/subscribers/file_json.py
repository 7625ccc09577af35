"""The subscriber that writes rounds as JSON to a file."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from gpuflight.rounds import Round
from gpuflight.subscribers.atomic import append_whole, write_atomic
from gpuflight.subscribers.base import Subscriber, SubscriberSettings, delivery_error
from gpuflight.subscribers.encoding import encode_diff_line, encode_round


class FileJsonSettings(SubscriberSettings):
    """Settings of the JSON file subscriber."""

    path: str = Field(min_length=1, description="the file")
    mode: Literal["replace", "append"] = Field(
        default="replace", description="replace the file atomically each round, or append one line (JSONL)"
    )
    content: Literal["graph", "diff"] = Field(
        default="graph",
        description="the whole round, or (append only) what changed, with a whole round first and after a gap",
    )

    @model_validator(mode="after")
    def _diffs_need_what_was_before(self) -> FileJsonSettings:
        if self.content == "diff" and self.mode != "append":
            raise ValueError("content diff needs mode append: a difference says nothing without the round before it")
        return self


class FileJson(Subscriber):
    """Writes rounds as JSON to a file, replacing it or appending lines."""

    stability = "stable"
    settings_class = FileJsonSettings

    def __init__(self, settings: Any = None) -> None:
        super().__init__(settings)
        self._last_number: int | None = None

    def deliver(self, completed: Round) -> None:
        follows = self._last_number is not None and completed.number == self._last_number + 1
        encode = encode_diff_line if self.settings.content == "diff" and follows else encode_round
        write = write_atomic if self.settings.mode == "replace" else append_whole
        try:
            write(self.settings.path, encode(completed) + b"\n")
        except OSError as error:
            raise delivery_error(error, self.settings.path) from error
        self._last_number = completed.number
