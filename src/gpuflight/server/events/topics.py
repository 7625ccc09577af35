"""Events from Kafka: what agents published to one topic per channel, into the same store.

A topic has a thread and a member of the consumer group. What it read of a partition is one source, counted in offsets:
the store knows how far each partition is stored, so that what is read again, because a commit was lost or the server
was killed, is recognised. Offsets are committed only after they are stored. The store is this server's own: what
another server of the group stored and had not committed when it died is stored by both.

A message's value is a line of a log (as gpuflight's agent writes it), or that line once more as a JSON string (as the
original's agent does).
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct, field

from gpuflight.errors import GpuflightError
from gpuflight.events.ledger import Ledger, Place
from gpuflight.server.consume.client import Client, ClientError, Record
from gpuflight.server.events.blocks import Decoded, decode
from gpuflight.server.events.decoders import UnderWay
from gpuflight.server.events.figures import Figures
from gpuflight.server.events.writer import Job
from gpuflight.subscribers.retry import Backoff

if TYPE_CHECKING:
    from gpuflight.server.events.service import EventService
    from gpuflight.server.events.settings import EventsKafka

log = logging.getLogger(__name__)

POLL_S = 0.2
BATCH_S = 0.5
"""How long messages are gathered for one write."""
BATCH_BYTES = 8 << 20
_CHANNELS = (b"device", b"scope", b"system", b"sass")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0


class TopicFigures(Struct, kw_only=True):
    """What one topic gave, and whether it can be read. ``partitions``: those that are ours, and how far they are
    stored."""

    topic: str
    connected: bool = False
    error: str = ""
    messages: int = 0
    repeated: int = 0
    unreadable: int = 0
    partitions: dict[int, int] = field(default_factory=dict)


class TopicReader:
    """Reads one topic of one channel, in a thread of its own."""

    def __init__(self, service: EventService, topic: str, channel: str, make_client: Callable[[], Client]) -> None:
        self.figures = TopicFigures(topic=topic)
        self._service = service
        self._topic = topic
        self._channel = channel
        self._make_client = make_client
        self._decoders: dict[int, UnderWay] = {}
        self._held: dict[int, list[Record]] = {}
        self._held_bytes = 0
        self._first_s = 0.0
        self._client: Client | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"gpuflight-events-{channel}", daemon=True)

    def start(self) -> None:
        """Begin to read. A broker that is not there is tried for ever."""
        self._thread.start()

    def stop(self, deadline_s: float) -> bool:
        """Leave the group; what is not stored is read by whoever goes on."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(deadline_s)
        return not self._thread.is_alive()

    # Told by the client, within poll and close.

    def on_assign(self, partitions: list[int]) -> None:
        """Partitions that are ours from now on."""
        for partition in partitions:
            self.figures.partitions[partition] = -1

    def on_revoke(self, partitions: list[int]) -> None:
        """Partitions that another goes on with; what is stored of them is committed."""
        done = {p: self.figures.partitions[p] for p in partitions if self.figures.partitions.get(p, -1) >= 0}
        if done and self._client is not None:
            self._client.commit(done, wait=True)
        self.on_lost(partitions)

    def on_lost(self, partitions: list[int]) -> None:
        """Partitions that another has already."""
        for partition in partitions:
            self.figures.partitions.pop(partition, None)
            self._decoders.pop(partition, None)
            for record in self._held.pop(partition, ()):
                self._held_bytes -= len(record.value or b"")

    def on_commit(self, offsets: dict[int, int], error: str) -> None:
        """What came of a commit: one that failed is made up for by the next."""
        if error:
            self._failed(error)

    # The thread.

    def _run(self) -> None:
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while not self._stopping.is_set():
            try:
                self._client = self._make_client()
                self._client.start(self)
                while not self._stopping.is_set():
                    if self._step(self._client):
                        backoff.reset()
            except GpuflightError as error:
                self._failed(str(error))
            except Exception as error:  # the thread must outlive a defect
                log.exception("reading %s failed", self._topic)
                self._failed(f"{type(error).__name__}: {error}")
            self._leave()
            if not self._stopping.is_set():
                self._stopping.wait(backoff.pause_s())

    def _step(self, client: Client) -> bool:
        """One message, or a while without one; True if something was stored. Raises what ends this client."""
        try:
            record = client.poll(POLL_S)
        except ClientError as error:
            self._failed(str(error))
            if error.fatal:
                raise
            return False
        if record is not None:
            self.figures.connected, self.figures.error = True, ""
            if not self._held:
                self._first_s = time.monotonic()
            self._held.setdefault(record.partition, []).append(record)
            self._held_bytes += len(record.value or b"")
            self.figures.messages += 1
        full = self._held_bytes >= BATCH_BYTES or time.monotonic() - self._first_s >= BATCH_S
        if not self._held or (record is not None and not full):
            return False
        held, self._held, self._held_bytes = self._held, {}, 0
        done = {partition: self._store(client, partition, records) for partition, records in held.items()}
        self.figures.partitions.update(done)
        client.commit(done, wait=False)
        return True

    def _store(self, client: Client, partition: int, records: list[Record]) -> int:
        """Store what was read of a partition; the offset that it is stored up to. Raises NotStored, EventsOff."""
        from gpuflight.events.store import Part, Source

        ingest, store = self._service.ingest, self._service.store
        name = f"kafka:{self._topic}:{partition}"
        end = records[-1].offset + 1
        position = store.records.position(name)
        renew = False
        if position is not None and position > records[0].offset:
            high = client.high(partition, True)
            # A topic that was deleted and made again counts from nothing: what it holds is not what we have.
            renew = high is not None and high < position
            if not renew:
                self.figures.repeated += sum(record.offset < position for record in records)
                records = [record for record in records if record.offset >= position]
                if not records:
                    return position
        of = self._decoders.get(partition)
        if of is None or of.forgotten:
            of = self._decoders[partition] = UnderWay("")
        blocks = self._decode(of, name, records)
        batches = [batch for block in blocks for batch in block.batches]
        ledger = Ledger()
        for block in blocks:
            ledger.merge(block.ledger)
        source = Source(name, records[0].offset, end, "", renew)
        job = Job(Part(batches, source, ledger), of)
        ingest.writer.put(job)
        written = job.done.result()
        figures: Figures = self._service.figures
        for block in blocks:
            figures.raw_bytes += block.raw_bytes
            figures.count_lines(block)
        figures.count_rows(written)
        return end

    def _decode(self, of: UnderWay, name: str, records: list[Record]) -> list[Decoded]:
        """Messages in order, those of one channel after the other together."""
        found = []
        limit = self._service.settings.max_line_bytes
        for channel, group in itertools.groupby(records, self._channel_of):
            lines = [line for record in group if (line := self._line(record)) is not None]
            place = Place(name, channel, -1, 0)
            found.append(decode(of.decoder, of.ledger, iter((b"\n".join(lines),)), place, limit))
        return found

    def _channel_of(self, record: Record) -> str:
        """The original's agent has one topic for all channels, and the channel for a key."""
        if self._channel:
            return self._channel
        key = record.key or b""
        return key.decode() if key in _CHANNELS else ""

    def _line(self, record: Record) -> bytes | None:
        """The line that a message is; None if it is none."""
        value = record.value
        if value is None:
            return None
        if value.startswith(b'"'):
            try:
                value = msgspec.json.decode(value, type=str).encode("utf-8", "surrogatepass")
            except (msgspec.DecodeError, UnicodeDecodeError):
                self.figures.unreadable += 1
                return None
        return value.replace(b"\n", b" ")

    def _leave(self) -> None:
        """Let go of a client; what is revoked by that is committed."""
        if self._client is not None:
            try:
                self._client.close()
            except Exception as error:  # noqa: BLE001 - it is given up anyway
                log.warning("leaving the group of %s: %s", self._topic, error)
            self._client = None
        self.on_lost(list(self.figures.partitions))
        self._held, self._held_bytes = {}, 0
        self.figures.connected = False

    def _failed(self, error: str) -> None:
        if error != self.figures.error:
            log.warning("%s: %s", self._topic, error)
        self.figures.connected, self.figures.error = False, error


def make_topics(service: EventService, settings: EventsKafka) -> Topics:
    """A reader for each channel of the settings. Raises MissingExtra."""
    from gpuflight.server.consume.kafka import KafkaClient, require

    require()
    topics = [(f"{settings.topic}-{channel}", str(channel)) for channel in settings.channels]
    if settings.plain:
        topics.append((settings.topic, ""))

    def client(topic: str) -> Callable[[], Client]:
        connection = settings.model_copy(update={"topic": topic})
        return lambda: KafkaClient(connection, settings.group)

    return Topics([TopicReader(service, topic, channel, client(topic)) for topic, channel in topics])


class Topics:
    """The readers of all channels."""

    def __init__(self, readers: list[TopicReader]) -> None:
        self.readers = readers

    def start(self) -> None:
        """Begin to read all topics."""
        for reader in self.readers:
            reader.start()

    def stop(self, deadline_s: float) -> bool:
        """Leave the group with all of them, at the same time."""
        if not self.readers:
            return True
        with ThreadPoolExecutor(len(self.readers)) as pool:
            return all(pool.map(lambda reader: reader.stop(deadline_s), self.readers))
