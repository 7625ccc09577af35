"""Names of log files, of all generations.

| generation | active | finished | order |
|---|---|---|---|
| A | ``<base>.<ch>.<N>.log``, from 0 | the same | 0 is the oldest |
| B | ``<base>.<ch>.log`` | ``<base>.<ch>.<N>.log[.gz]`` | 1 is the newest |
| C | ``<session>/<ch>.log`` | ``<ch>.<N>.log.gz``, at the end ``<ch>.log.gz`` | 1 is the newest, un-numbered newer |
| D, E | ``<session>/.tmp/<ch>.log`` | ``<session>/<ch>.<N>.log.gz`` | 1 is the oldest |
"""

from __future__ import annotations

import re
from typing import NamedTuple

CHANNELS = ("device", "scope", "system", "sass")

_NAME = re.compile(
    r"(?:(?P<base>.+)\.)?(?P<channel>device|scope|system|sass)(?:\.(?P<index>\d{1,9}))?\.log(?P<gz>\.gz)?(?P<part>\.part)?"
)


class Window(NamedTuple):
    """A log file. ``number`` None: un-numbered. ``base``: what stands before the channel in flat folders."""

    path: str
    channel: str
    number: int | None
    base: str = ""
    compressed: bool = False
    part: bool = False
    temporary: bool = False

    @property
    def name(self) -> str:
        return self.path.rsplit("/", 1)[-1]


def parse_name(folder: str, name: str, *, temporary: bool = False) -> Window | None:
    """What a file's name says; None if it is no log file."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    index = match["index"]
    return Window(
        f"{folder}/{name}",
        match["channel"],
        None if index is None else int(index),
        match["base"] or "",
        match["gz"] is not None,
        match["part"] is not None,
        temporary,
    )
