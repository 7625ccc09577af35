"""The rounds topic: how a round becomes Kafka messages, and how messages become rounds again. No Kafka client in here.

A round's bytes (the JSON of ``round_codec``, under a content coding) are cut into parts that fit into a message. Every
part is one message. Its **key** is the namespace, so that all rounds of one host are in one partition, in order. Its
**value** is the part. Its **headers**, numbers as decimal ASCII:

============ ==========================================================================================================
gpuflight    format of all this: ``1``
instance     which run of gpuflight numbered the round; numbers begin anew with each
round        number of the round
time_ns      when it was taken, ns since the epoch
content      ``graph``: the whole round; ``diff``: what changed since the round ``base``
base         only with ``diff``
encoding     ``none``, ``gzip`` or ``zstd``: content coding of the whole, before it was cut
part, parts  which part this is, from 0, and of how many
crc32        of the whole as it was cut (zlib.crc32)
============ ==========================================================================================================

A round that was tried again comes again, as a whole: readers take it by (namespace, instance, round). A message with
the header ``gpuflight-trial`` is a trial delivery, and no round.
"""

from __future__ import annotations

import functools
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, cast

import zstandard
from msgspec import Struct

FORMAT = b"1"
FORMAT_HEADER = "gpuflight"
TRIAL_HEADER = "gpuflight-trial"
DEFAULT_TOPIC = "gpuflight.rounds"

PARTS_MAX = 100_000
MESSAGE_OVERHEAD_BYTES = 512
"""Upper bound of what a message takes beside key, value and texts of the headers: batch (61), record (21), lengths."""

_NUMBERS_BYTES = sum(len(name) for name in ("round", "time_ns", "crc32", "base")) + 20 + 20 + 10 + 20
"""Upper bound of the headers that are different for each round."""

_STEP_BYTES = 4096
_THE_ONLY_PART = (("part", b"0"), ("parts", b"1"))

Content = Literal["graph", "diff"]
Encoding = Literal["none", "gzip", "zstd"]
Headers = Iterable[tuple[str, bytes | None]] | Mapping[str, bytes | None]


class Message(Struct, frozen=True, gc=False):
    """One message of the topic."""

    key: bytes
    headers: list[tuple[str, bytes]]
    value: bytes


class RoundMessage(Struct, frozen=True, kw_only=True):
    """A round as it came out of the topic. ``data`` is its JSON, decoded; ``base`` is None unless a difference."""

    namespace: str
    instance: str
    number: int
    time_ns: int
    content: Content
    base: int | None
    data: bytes


class Envelope(Struct, frozen=True):
    """What is the same in the messages of many rounds. ``room_bytes`` is how large a part may be with it, and headers
    that are as long as they can be."""

    key: bytes
    headers: tuple[tuple[str, bytes], ...]
    room_bytes: int
    crc32: Callable[[bytes], int]


def envelope(
    namespace: str,
    instance: str,
    content: Content,
    encoding: Encoding,
    max_message_bytes: int,
    *,
    trial: bool = False,
) -> Envelope:
    """For the rounds of one instance that are encoded in the same way, in messages of that size."""
    key = namespace.encode()
    headers = [
        (FORMAT_HEADER, FORMAT),
        ("instance", instance.encode()),
        ("content", content.encode()),
        ("encoding", encoding.encode()),
    ]
    if trial:
        headers.append((TRIAL_HEADER, b"true"))
    size_bytes = MESSAGE_OVERHEAD_BYTES + len(key) + sum(len(name) + len(value) for name, value in headers)
    return Envelope(key, tuple(headers), max_message_bytes - size_bytes - _NUMBERS_BYTES, _crc32())


def cut(data: bytes, around: Envelope, number: int, time_ns: int, base: int | None) -> list[Message]:
    """The messages of a round, none of which is larger than the envelope says, whatever of it is counted. ``base`` is
    None for a whole round. Raises ValueError if that leaves no room, or if there would be more than ``PARTS_MAX``."""
    headers = [
        *around.headers,
        ("round", b"%d" % number),
        ("time_ns", b"%d" % time_ns),
        ("crc32", b"%d" % around.crc32(data)),
    ]
    if base is not None:
        headers.append(("base", b"%d" % base))
    if len(data) <= around.room_bytes:  # by far the most
        headers += _THE_ONLY_PART
        return [Message(around.key, headers, data)]
    spare_bytes = _NUMBERS_BYTES - sum(len(name) + len(value) for name, value in headers[len(around.headers) :])
    room_bytes = around.room_bytes + spare_bytes
    if room_bytes <= 0:
        raise ValueError("messages have no room for a part of a round: they may be larger, or the namespace shorter")
    parts = max(1, -(-len(data) // room_bytes))
    if parts > PARTS_MAX:
        raise ValueError(f"a round of {len(data)} bytes would be {parts} messages of at most {room_bytes} bytes of it")
    size_bytes = -(-len(data) // parts)  # about equal, so that none is tiny
    return [
        Message(
            around.key,
            [*headers, ("part", b"%d" % part), ("parts", b"%d" % parts)],
            data[part * size_bytes : (part + 1) * size_bytes],
        )
        for part in range(parts)
    ]


class Counts(Struct):
    """What became of the messages. *rounds* were put together; *repeats* are messages of a round that is complete
    already, *duplicates* parts that were there already; *trials* and *foreign* (not of this format) are passed over;
    *malformed* cannot be read; *lost* are rounds that will never be complete, *corrupt* rounds complete but damaged."""

    messages: int = 0
    rounds: int = 0
    repeats: int = 0
    duplicates: int = 0
    trials: int = 0
    foreign: int = 0
    malformed: int = 0
    lost: int = 0
    corrupt: int = 0


class _Head(Struct, frozen=True):
    """What the headers of a part say."""

    instance: str
    number: int
    time_ns: int
    content: Content
    base: int | None
    encoding: Encoding
    part: int
    parts: int
    crc32: int


class _Unfinished(Struct):
    """The parts of one try of one round, as far as they have come."""

    head: _Head
    parts: dict[int, bytes]
    partition: int
    offset: int
    since_s: float
    size_bytes: int = 0


_Round = tuple[bytes, str, int]  # key, instance, number
_Try = tuple[bytes, str, int, int, int]  # and crc32, parts: another try may be cut otherwise


class Assembler:
    """Puts rounds together. Of one thread.

    What is held is bounded by ``max_bytes`` and ``max_age_s`` (on ``clock``): beyond, the oldest unfinished round is
    lost. One is lost also when a later round of the same instance is complete, since an instance sends one round after
    the other. A round larger than ``max_round_bytes`` when decoded is corrupt.
    """

    def __init__(
        self,
        *,
        max_bytes: int = 256 * 1024 * 1024,
        max_round_bytes: int = 1024 * 1024 * 1024,
        max_age_s: float = 3600.0,
        max_remembered: int = 10_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = Counts()
        self._max_bytes = max_bytes
        self._max_round_bytes = max_round_bytes
        self._max_age_s = max_age_s
        self._max_remembered = max_remembered
        self._clock = clock
        self._unfinished: OrderedDict[_Try, _Unfinished] = OrderedDict()
        self._finished: OrderedDict[_Round, int] = OrderedDict()  # with the partition
        self._bytes = 0

    @property
    def held_bytes(self) -> int:
        """Size of the parts that wait for others."""
        return self._bytes

    def add(
        self, key: bytes | None, headers: Headers | None, value: bytes | None, *, partition: int = 0, offset: int = 0
    ) -> RoundMessage | None:
        """Take a message; the round, if it is complete with this one. ``partition`` and ``offset`` say where it was
        found, for ``held_back``. Never raises for what a message contains."""
        self.counts.messages += 1
        now_s = self._clock()
        self._expire(now_s)
        found = dict(headers.items() if isinstance(headers, Mapping) else headers or ())
        if TRIAL_HEADER in found:
            self.counts.trials += 1
            return None
        if found.get(FORMAT_HEADER) != FORMAT:
            self.counts.foreign += 1
            return None
        head = _head(found)
        namespace = _text(key)
        if head is None or key is None or namespace is None or value is None:
            self.counts.malformed += 1
            return None
        if (key, head.instance, head.number) in self._finished:
            self.counts.repeats += 1
            return None
        whole = self._take(key, head, value, _Unfinished(head, {}, partition, offset, now_s))
        if whole is None:
            return None
        data = _decoded(whole, head, self._max_round_bytes)
        if data is None:
            self.counts.corrupt += 1
            return None
        self._finish(key, head, partition)
        self.counts.rounds += 1
        return RoundMessage(
            namespace=namespace,
            instance=head.instance,
            number=head.number,
            time_ns=head.time_ns,
            content=head.content,
            base=head.base,
            data=data,
        )

    def held_back(self, partition: int = 0) -> int | None:
        """The smallest offset in a partition that belongs to an unfinished round: whoever starts reading there misses
        nothing. None if no round of it is unfinished."""
        return min((held.offset for held in self._unfinished.values() if held.partition == partition), default=None)

    def forget(self, partition: int) -> None:
        """Drop all that is known of a partition: it is read by another from now on, or again. Nothing is lost."""
        for name in [name for name, held in self._unfinished.items() if held.partition == partition]:
            self._drop(name)
        for done in [done for done, where in self._finished.items() if where == partition]:
            del self._finished[done]

    def _take(self, key: bytes, head: _Head, value: bytes, fresh: _Unfinished) -> bytes | None:
        name: _Try = (key, head.instance, head.number, head.crc32, head.parts)
        held = self._unfinished.setdefault(name, fresh)
        if head.part in held.parts:
            self.counts.duplicates += 1
            return None
        held.parts[head.part] = value
        held.size_bytes += len(value)
        self._bytes += len(value)
        if len(held.parts) < head.parts:
            while self._bytes > self._max_bytes:
                self._lose(next(iter(self._unfinished)))
            return None
        self._drop(name)
        return b"".join(held.parts[part] for part in range(head.parts)) if head.parts > 1 else value

    def _finish(self, key: bytes, head: _Head, partition: int) -> None:
        self._finished[(key, head.instance, head.number)] = partition
        while len(self._finished) > self._max_remembered:
            self._finished.popitem(last=False)
        for name in [n for n in self._unfinished if n[0] == key and n[1] == head.instance and n[2] <= head.number]:
            if name[2] == head.number:  # another try of this one
                self._drop(name)
            else:
                self._lose(name)

    def _expire(self, now_s: float) -> None:
        while self._unfinished:
            name, held = next(iter(self._unfinished.items()))
            if now_s - held.since_s <= self._max_age_s:
                return
            self._lose(name)

    def _lose(self, name: _Try) -> None:
        self._drop(name)
        # A round is lost once, with the last of its tries.
        if not any(other[:3] == name[:3] for other in self._unfinished):
            self.counts.lost += 1

    def _drop(self, name: _Try) -> None:
        self._bytes -= self._unfinished.pop(name).size_bytes


@functools.cache
def _crc32() -> Callable[[bytes], int]:
    """The same sum, several times as fast where isal is installed."""
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib.crc32
    return isal_zlib.crc32


def _head(found: Mapping[str, bytes | None]) -> _Head | None:
    """The headers of a part; None if something is missing or makes no sense."""
    instance, content, encoding = (_text(found.get(name)) for name in ("instance", "content", "encoding"))
    number, time_ns, base, part, parts, crc32 = (
        _number(found.get(name)) for name in ("round", "time_ns", "base", "part", "parts", "crc32")
    )
    if number is None or time_ns is None or part is None or parts is None or crc32 is None or not instance:
        return None
    if not part < parts <= PARTS_MAX or crc32 >= 1 << 32:
        return None
    if content not in ("graph", "diff") or encoding not in ("none", "gzip", "zstd"):
        return None
    if (content == "diff") != (base is not None):
        return None
    return _Head(instance, number, time_ns, cast(Content, content), base, cast(Encoding, encoding), part, parts, crc32)


def _text(raw: bytes | None) -> str | None:
    try:
        return None if raw is None else bytes(raw).decode()
    except UnicodeDecodeError:
        return None


def _number(raw: bytes | None) -> int | None:
    # isdigit of bytes is ASCII only; no sign, no blank, no underscore.
    return int(raw) if raw is not None and raw.isdigit() and len(raw) <= 20 else None


def _decoded(whole: bytes, head: _Head, max_bytes: int) -> bytes | None:
    """The whole without its content coding; None if it is damaged or too large."""
    if _crc32()(whole) != head.crc32:
        return None
    if head.encoding == "none":
        return whole if len(whole) <= max_bytes else None
    try:
        if head.encoding == "zstd":
            return _unzstd(whole, max_bytes)
        reader = zlib.decompressobj(wbits=31)
        data = reader.decompress(whole, max_bytes)
        return data if reader.eof and not reader.unused_data else None
    except (zlib.error, zstandard.ZstdError):
        return None


def _unzstd(whole: bytes, max_bytes: int) -> bytes | None:
    says_bytes = zstandard.frame_content_size(whole)
    if says_bytes > max_bytes:
        return None
    if says_bytes >= 0:
        return zstandard.ZstdDecompressor().decompress(whole, allow_extra_data=False)
    # A writer that did not know the size beforehand: in small steps, so that little can become no more than much.
    reader = zstandard.ZstdDecompressor().decompressobj()
    data = bytearray()
    for start in range(0, len(whole), _STEP_BYTES):
        if reader.eof or len(data) > max_bytes:
            return None
        data += reader.decompress(whole[start : start + _STEP_BYTES])
    return bytes(data) if reader.eof and not reader.unused_data and len(data) <= max_bytes else None
