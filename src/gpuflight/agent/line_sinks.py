"""Where single lines go: Kafka, or HTTP where they are sent as they are written."""

from __future__ import annotations

import logging
import queue
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from msgspec import Struct, field
from pydantic import ValidationError

from gpuflight.agent.dead_letters import DeadLetters
from gpuflight.agent.gate import FIRST_S, LONGEST_S, Gate
from gpuflight.agent.receiver import Outcome, Receiver, Verdict
from gpuflight.agent.secrets import read_secret
from gpuflight.agent.send import REFUSALS, gzipped
from gpuflight.agent.settings import AgentSettings, Publisher, brokers_of
from gpuflight.agent.totals import Totals
from gpuflight.errors import ConfigError, DeliveryError, GpuflightError, MissingExtra
from gpuflight.events.tail import Chunk
from gpuflight.settings.problems import problems
from gpuflight.subscribers.kafka_client import KafkaClient, MessageTooLarge
from gpuflight.subscribers.kafka_settings import KafkaConnection
from gpuflight.subscribers.kafka_wire import Message
from gpuflight.subscribers.netguard import ANYTHING
from gpuflight.subscribers.retry import Backoff

log = logging.getLogger(__name__)

_SESSION = re.compile(rb'"session_id"\s*:\s*"([^"\\]{1,200})"')
_TYPE = re.compile(rb'"type"\s*:\s*"([A-Za-z0-9_.-]{1,100})"')
_OVERHEAD_BYTES = 512
"""Of a message beside its key and value: headers and what Kafka puts around a record and a batch."""


class Pending(Struct, eq=False):
    """A chunk on its way. ``next_line``: those before it are dealt with. ``most_lines``: no more at a time (0: as
    set)."""

    chunk: Chunk
    lines: list[bytes]
    next_line: int = 0
    most_lines: int = 0
    refusals: int = 0
    rejected: int = 0
    due_s: float = 0.0
    backoff: Backoff = field(default_factory=lambda: Backoff(FIRST_S, LONGEST_S))

    @property
    def done(self) -> bool:
        return self.next_line >= len(self.lines)

    def session_of(self, line: bytes) -> str:
        """Session folders are named by it; in flat folders lines name theirs."""
        if self.chunk.session_id:
            return self.chunk.session_id
        found = _SESSION.search(line)
        return found[1].decode("utf-8", "replace") if found else ""


class LineSink(Protocol):
    """``deliver`` moves the ``next_line`` of each as far as it comes, in order within a channel of a session; what goes
    wrong closes the gate. ``complete`` says that a session is over; None: not now."""

    def deliver(self, pending: Sequence[Pending]) -> None: ...

    def complete(self, session_id: str) -> str | None:
        """Empty once it is said, else why it never will be; None: to be tried again."""
        ...

    def close(self) -> None: ...


class KafkaLines:
    """A topic per channel, the session as key, the raw line as value. Arrived is what the brokers acknowledged."""

    def __init__(self, settings: AgentSettings, dead: DeadLetters, gate: Gate, totals: Totals) -> None:
        self._publisher = settings.publisher
        self._dead = dead
        self._gate = gate
        self._totals = totals
        try:
            import confluent_kafka  # noqa: F401 - told before anything is done
        except ImportError as error:
            raise MissingExtra("confluent-kafka", "kafka", "the agent's kafka") from error
        self._clients: dict[str, KafkaClient] = {}
        self._opened: set[str] = set()
        for source in settings.sources:
            for channel in source.logTypes:
                self._clients.setdefault(channel, self._client(channel))

    def _client(self, channel: str) -> KafkaClient:
        publisher = self._publisher
        try:
            connection = kafka_connection(publisher, f"{publisher.topicPrefix}-{channel}")
        except ValidationError as error:
            lines = (line for _, line in problems(error, KafkaConnection))
            raise ConfigError("\n".join(lines)) from None
        return KafkaClient(
            connection,
            ANYTHING,
            deadline_s=publisher.deadlineSeconds,
            compression=publisher.compression,
            fixed_limit_bytes=publisher.maxMessageBytes,
        )

    def deliver(self, pending: Sequence[Pending]) -> None:
        by_channel: dict[str, list[Pending]] = {}
        for one in pending:
            by_channel.setdefault(one.chunk.channel, []).append(one)
        for channel, mine in by_channel.items():
            client = self._clients[channel]
            try:
                if channel not in self._opened:
                    client.open()
                    self._opened.add(channel)
                arrived = client.deliver((self._messages(client, one) for one in mine), self._publisher.deadlineSeconds)
            except MessageTooLarge as error:
                if not client.shrink():
                    self._refused(mine[0], str(error))
                continue
            except DeliveryError as error:
                if error.blames_item:
                    self._refused(mine[0], str(error))
                else:
                    self._gate.close(str(error), error.retry_after_s)
                continue
            self._gate.open()
            for one in mine[:arrived]:
                self._totals.sent(lines=len(one.lines) - one.next_line, size_bytes=len(one.chunk.data))
                one.next_line = len(one.lines)

    def _messages(self, client: KafkaClient, one: Pending) -> list[Message]:
        found = []
        for line in one.lines:
            key = one.session_of(line).encode("utf-8", "surrogateescape")
            if len(line) + len(key) + _OVERHEAD_BYTES > client.limit_bytes:
                self._refuse_line(one, line, f"larger than a message may be ({client.limit_bytes} bytes)")
                continue
            found.append(Message(key, [], line))
        return found

    def _refuse_line(self, one: Pending, line: bytes, reason: str) -> None:
        # Asked again by each try; kept and counted once.
        number = next(index for index, known in enumerate(one.lines) if known is line)
        if number >= one.rejected:
            one.rejected = number + 1
            self._dead.lines(one.session_of(line), one.chunk.channel, [(line, reason)])
            self._totals.lost(f"{one.chunk.path}: a line of {len(line)} bytes: {reason}")

    def _refused(self, one: Pending, reason: str) -> None:
        one.refusals += 1
        self._gate.close(reason)
        if one.refusals >= REFUSALS:
            self._dead.lines(one.chunk.session_id, one.chunk.channel, [(line, reason) for line in one.lines])
            self._totals.lost(f"{one.chunk.path}: {len(one.lines)} lines given up: {reason}")
            one.next_line = len(one.lines)

    def complete(self, session_id: str) -> str | None:
        return ""

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


class HttpLines:
    """Lines by HTTP: some in a request (``live``), or a request for each (``legacy``)."""

    def __init__(self, settings: AgentSettings, dead: DeadLetters, gate: Gate, totals: Totals) -> None:
        self._publisher = settings.publisher
        self._legacy = settings.publisher.uploadMode == "legacy"
        self._dead = dead
        self._gate = gate
        self._totals = totals
        self._free: queue.SimpleQueue[Receiver] = queue.SimpleQueue()
        self._receivers = [Receiver(settings.publisher) for _ in range(settings.senders)]
        for receiver in self._receivers:
            self._free.put(receiver)
        self._pool = ThreadPoolExecutor(settings.senders, thread_name_prefix="gpuflight-agent")
        self._refusals: dict[str, int] = {}

    def deliver(self, pending: Sequence[Pending]) -> None:
        groups: dict[tuple[str, str, str], list[Pending]] = {}
        for one in pending:
            base = one.chunk.origin.stream.base
            groups.setdefault((one.chunk.folder, base, one.chunk.channel), []).append(one)
        for done in [self._pool.submit(self._deliver, group) for group in groups.values()]:
            done.result()

    def _deliver(self, group: list[Pending]) -> None:
        receiver = self._free.get()
        try:
            for one in group:
                while not one.done:
                    waits = self._gate.closed_for_s() > 0 or time.monotonic() < one.due_s
                    if waits or not self._step(receiver, one):
                        return
        except GpuflightError as error:
            self._gate.close(str(error))
        finally:
            self._free.put(receiver)

    def _step(self, receiver: Receiver, one: Pending) -> bool:
        """Send the next lines; whether that has moved something."""
        count, outcome = self._send(receiver, one)
        lines = one.lines[one.next_line : one.next_line + count]
        if outcome.verdict is Verdict.TOO_LARGE and count > 1:
            one.most_lines = max(1, count // 2)
            return True
        if outcome.verdict is Verdict.DELIVERED:
            self._gate.open()
            if outcome.rejected:
                listed = [
                    (lines[rejected.line - 1], f"{rejected.type} {rejected.reason}".strip())
                    for rejected in outcome.lines
                    if 0 < rejected.line <= len(lines)
                ]
                self._given_up(one, listed, outcome.rejected, outcome.text)
            self._totals.sent(lines=count - outcome.rejected, size_bytes=sum(map(len, lines)))
        elif outcome.verdict is Verdict.WAIT:
            self._gate.close(outcome.text, outcome.retry_after_s)
            return False
        else:
            one.refusals += outcome.verdict is Verdict.REFUSED
            if outcome.verdict is Verdict.RETRY or (outcome.verdict is Verdict.REFUSED and one.refusals < REFUSALS):
                one.due_s = time.monotonic() + one.backoff.pause_s(outcome.retry_after_s)
                log.warning("%s: trying again: %s", one.chunk.path, outcome.text)
                return False
            self._given_up(one, [(line, outcome.text) for line in lines], count, outcome.text)
        one.next_line += count
        one.refusals = 0
        one.backoff.reset()
        return True

    def _send(self, receiver: Receiver, one: Pending) -> tuple[int, Outcome]:
        first = one.lines[one.next_line]
        session_id = one.session_of(first)
        if self._legacy:
            found = _TYPE.search(first)
            if found is None:
                return 1, Outcome(Verdict.TOO_LARGE, "the line has no type")
            return 1, receiver.event(found[1].decode(), first, one.chunk.channel, time.time_ns() // 1_000_000)
        count = size_bytes = 0
        most = one.most_lines or self._publisher.streamMaxLines
        for line in one.lines[one.next_line : one.next_line + most]:
            if count and (
                size_bytes + len(line) > self._publisher.streamMaxBytes or one.session_of(line) != session_id
            ):
                break
            count += 1
            size_bytes += len(line) + 1
        data = b"\n".join(one.lines[one.next_line : one.next_line + count]) + b"\n"
        return count, receiver.window(session_id, gzipped(data), None)

    def _given_up(self, one: Pending, listed: list[tuple[bytes, str]], count: int, text: str) -> None:
        one.rejected += count
        session_id = one.session_of(listed[0][0]) if listed else one.chunk.session_id
        self._dead.lines(session_id, one.chunk.channel, listed)
        self._totals.lost(f"{one.chunk.path}: {count} lines not taken: {text}")

    def complete(self, session_id: str) -> str | None:
        receiver = self._free.get()
        try:
            outcome = receiver.complete(session_id)
        except GpuflightError as error:
            self._gate.close(str(error))
            return None
        finally:
            self._free.put(receiver)
        if outcome.verdict is Verdict.DELIVERED or outcome.status in (404, 405, 409, 501):
            self._refusals.pop(session_id, None)
            return ""
        if outcome.verdict in (Verdict.REFUSED, Verdict.TOO_LARGE):
            self._refusals[session_id] = self._refusals.get(session_id, 0) + 1
            if self._refusals[session_id] >= REFUSALS:
                return f"session-complete refused: {outcome.text}"
        self._gate.close(outcome.text, outcome.retry_after_s)
        return None

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        for receiver in self._receivers:
            receiver.close()


def kafka_connection(publisher: Publisher, topic: str) -> KafkaConnection:
    """How the cluster is reached. Raises ValidationError, ConfigError."""
    secret = read_secret(publisher.saslPassword, publisher.saslPasswordFile)
    found = {
        "brokers": brokers_of(publisher.bootstrapServers),
        "topic": topic,
        "security_protocol": publisher.securityProtocol,
        "tls_ca_file": publisher.tlsCaFile,
        "sasl_mechanism": publisher.saslMechanism,
        "sasl_username": publisher.saslUsername,
        "sasl_password": secret,
        "client": {"linger.ms": publisher.lingerMs, "client.id": "gpuflight-agent"},
    }
    return KafkaConnection.model_validate(found)


def pendings(chunks: Sequence[Chunk]) -> Iterator[Pending]:
    """Chunks made ready."""
    for chunk in chunks:
        yield Pending(chunk, chunk.lines())
