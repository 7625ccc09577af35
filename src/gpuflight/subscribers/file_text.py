"""The subscriber that writes the described graph to a file."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gpuflight.graph import codec
from gpuflight.rounds import Round
from gpuflight.subscribers.atomic import append_whole, write_atomic
from gpuflight.subscribers.base import Outside, PackedSettings, PackedSubscriber, Parcel, delivery_error, parcel
from gpuflight.subscribers.file_json import permitted, try_beside


class FileTextSettings(PackedSettings):
    """Settings of the text file subscriber."""

    path: str = Field(min_length=1, description="the file")
    mode: Literal["replace", "append"] = Field(
        default="replace", description="replace the file atomically each round, or append to it"
    )


class FileText(PackedSubscriber):
    """Writes the graph as text for people and language models to a file."""

    stability = "stable"
    settings_class = FileTextSettings

    def outside(self) -> Outside:
        spool = (f"{self.settings.spool_folder}/spool",) if self.settings.spool_folder else ()
        return Outside(paths=(self.settings.path, *spool))

    def pack(self, completed: Round, after: int | None) -> Parcel:
        title = f"# round {completed.number}, {codec.time_text(completed.time_ns)}\n"
        text = title + completed.graph.describe().rstrip("\n") + "\n"
        return parcel(completed, text.encode(errors="backslashreplace"))

    def send(self, packed: Parcel) -> None:
        write = write_atomic if self.settings.mode == "replace" else append_whole
        path = permitted(self, self.settings.path)
        try:
            write(path, packed.data)
        except OSError as error:
            raise delivery_error(error, self.settings.path) from error

    def trial(self, completed: Round) -> None:
        """Writes a file beside it and deletes it."""
        try_beside(permitted(self, self.settings.path))
