"""The subscriber that writes the described graph to a file."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gpuflight.graph import codec
from gpuflight.rounds import Round
from gpuflight.subscribers.atomic import append_whole, write_atomic
from gpuflight.subscribers.base import Subscriber, SubscriberSettings, delivery_error


class FileTextSettings(SubscriberSettings):
    """Settings of the text file subscriber."""

    path: str = Field(min_length=1, description="the file")
    mode: Literal["replace", "append"] = Field(
        default="replace", description="replace the file atomically each round, or append to it"
    )


class FileText(Subscriber):
    """Writes the graph as text for people and language models to a file."""

    stability = "stable"
    settings_class = FileTextSettings

    def deliver(self, completed: Round) -> None:
        title = f"# round {completed.number}, {codec.time_text(completed.time_ns)}\n"
        data = (title + completed.graph.describe().rstrip("\n") + "\n").encode(errors="backslashreplace")
        write = write_atomic if self.settings.mode == "replace" else append_whole
        try:
            write(self.settings.path, data)
        except OSError as error:
            raise delivery_error(error, self.settings.path) from error
