"""One message of the live stream, in the forms that clients take. Each is made once, whoever gets it."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

SLICE_BYTES = 1024 * 1024


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

    def sse(self) -> tuple[bytes, ...]:
        """As an event of SSE, in slices: what a connection holds for a slow client is a slice and not a graph."""
        if not self.sse_pieces:
            frame = b"id: %s\nevent: %s\ndata: %s\n\n" % (self.id.encode(), self.name.encode(), self.data)
            self.sse_pieces = tuple(frame[start : start + SLICE_BYTES] for start in range(0, len(frame), SLICE_BYTES))
        return self.sse_pieces

    def chunked(self) -> tuple[bytes, ...]:
        """``sse`` in the chunked encoding of HTTP/1.1."""
        if not self.chunked_pieces:
            self.chunked_pieces = tuple(map(chunk, self.sse()))
        return self.chunked_pieces

    def text(self) -> str:
        """``{"id", "event", "data"}`` as JSON."""
        if not self.json_text:
            self.json_text = f'{{"id":"{self.id}","event":"{self.name}","data":{self.data.decode()}}}'
        return self.json_text


def chunk(piece: bytes) -> bytes:
    """One chunk of the chunked encoding."""
    return b"%x\r\n%s\r\n" % (len(piece), piece)


class Heartbeat:
    """The type of HEARTBEAT."""


HEARTBEAT = Heartbeat()
"""What a client gets to send when nothing else is to be sent."""
