"""One message of the live stream, in the forms that clients take. Each is made once, whoever gets it."""

from __future__ import annotations

import asyncio
from typing import Literal

from msgspec import Struct

from gpuflight.server.gzip_stream import Part, compress_part

SLICE_BYTES = 1024 * 1024
_IN_LOOP_BYTES = 256 * 1024
"""What is no larger is compressed at once: a thread would take longer to begin."""


class Event(Struct):
    """One message to clients: the state of round ``number`` as a whole, or what leads to it from the event before.

    ``data`` is JSON. Each form of the message is made when the first client asks for it, and shared by all.
    """

    number: int
    name: Literal["graph", "diff"]
    id: str
    data: bytes
    sse_pieces: tuple[bytes, ...] = ()
    chunked_pieces: tuple[bytes, ...] = ()
    json_text: str = ""
    gzip_task: asyncio.Future[GzipForm] | None = None

    def sse(self) -> tuple[bytes, ...]:
        """As an event of SSE, in slices: what a connection holds for a slow client is a slice and not a graph."""
        if not self.sse_pieces:
            self.sse_pieces = slices(self._frame())
        return self.sse_pieces

    def chunked(self) -> tuple[bytes, ...]:
        """``sse`` in the chunked encoding of HTTP/1.1."""
        if not self.chunked_pieces:
            self.chunked_pieces = tuple(map(chunk, self.sse()))
        return self.chunked_pieces

    async def gzipped(self) -> GzipForm:
        """``sse`` as a part of gzip streams."""
        if self.gzip_task is None:
            frame = self._frame()
            if len(frame) <= _IN_LOOP_BYTES:
                self.gzip_task = asyncio.get_running_loop().create_future()
                self.gzip_task.set_result(GzipForm.of(frame))
            else:
                self.gzip_task = asyncio.ensure_future(asyncio.to_thread(GzipForm.of, frame))
        return await asyncio.shield(self.gzip_task)

    def _frame(self) -> bytes:
        return b"id: %s\nevent: %s\ndata: %s\n\n" % (self.id.encode(), self.name.encode(), self.data)

    def text(self) -> str:
        """``{"id", "event", "data"}`` as JSON."""
        if not self.json_text:
            self.json_text = f'{{"id":"{self.id}","event":"{self.name}","data":{self.data.decode()}}}'
        return self.json_text


class GzipForm(Struct, frozen=True):
    """A part of gzip streams, and its bytes in slices as they are and as chunks of HTTP/1.1."""

    part: Part
    pieces: tuple[bytes, ...]
    chunked: tuple[bytes, ...]

    @classmethod
    def of(cls, data: bytes) -> GzipForm:
        """Some bytes of a stream, compressed."""
        part = compress_part(data)
        pieces = slices(part.data)
        return cls(part, pieces, tuple(map(chunk, pieces)))


def slices(data: bytes) -> tuple[bytes, ...]:
    """Bytes in pieces of at most SLICE_BYTES."""
    return tuple(data[start : start + SLICE_BYTES] for start in range(0, len(data), SLICE_BYTES))


def chunk(piece: bytes) -> bytes:
    """One chunk of the chunked encoding."""
    return b"%x\r\n%s\r\n" % (len(piece), piece)


class Heartbeat:
    """The type of HEARTBEAT."""


HEARTBEAT = Heartbeat()
"""What a client gets to send when nothing else is to be sent."""
