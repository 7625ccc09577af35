"""Sending one window: as the file it is, or, where that cannot be, its lines."""

from __future__ import annotations

import logging
import os
import zlib
from typing import Literal

from msgspec import Struct

from gpuflight.agent import markers
from gpuflight.agent.archive import Archive, TooLarge
from gpuflight.agent.batches import LineReader, Lines, content_crc32, is_damaged
from gpuflight.agent.dead_letters import DeadLetters
from gpuflight.agent.inside import Inside
from gpuflight.agent.plan import Item
from gpuflight.agent.progress import Progress, Sent
from gpuflight.agent.receiver import Outcome, Receiver, Verdict
from gpuflight.agent.settings import AgentSettings
from gpuflight.errors import DeliveryError
from gpuflight.events.tail.disk import Disk

log = logging.getLogger(__name__)

REFUSALS = 3
"""So often a window may be refused before it is given up: what stands between may have answered in its place."""


class Result(Struct):
    """``done``: nothing more to do for this window. ``wait``: the receiver takes nothing now. ``retry``: this window
    has to wait, others need not."""

    state: Literal["done", "retry", "wait"]
    text: str = ""
    retry_after_s: float | None = None
    refused: bool = False
    lines: int = 0
    size_bytes: int = 0


class _Stop(Exception):
    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.text)
        self.outcome = outcome


class WindowSender:
    """Thread-safe but for the receiver, of which each thread brings its own."""

    def __init__(
        self, settings: AgentSettings, progress: Progress, dead: DeadLetters, archive: Archive | None = None
    ) -> None:
        self._settings = settings
        self._progress = progress
        self._dead = dead
        self._archive = archive
        self._inside = Inside(source.folder for source in settings.sources)

    def send(self, receiver: Receiver, item: Item, refusals: int) -> Result:
        """Deliver a window, note it, archive it. ``refusals``: how often it was refused before. Raises OSError where
        the window, or the note of it, cannot be read or written."""
        why_not = self._inside.why_not(item.window.path)
        if why_not:
            log.error("%s: %s", item.window.path, why_not)
            self._progress.note(item.folder, item.key, Sent("dead", note=why_not))
            return Result("done", why_not)
        sent = item.sent
        result = Result("done")
        if sent is None or sent.state == "part":
            try:
                sent, result = self._deliver(receiver, item)
            except _Stop as stop:
                outcome = stop.outcome
                if outcome.verdict is Verdict.WAIT:
                    return Result("wait", outcome.text, outcome.retry_after_s)
                if outcome.verdict is Verdict.RETRY:
                    return Result("retry", outcome.text, outcome.retry_after_s)
                if refusals + 1 < REFUSALS:
                    return Result("retry", outcome.text, refused=True)
                self._dead.window(item.session_id, item.window.path, outcome.text)
                self._progress.note(item.folder, item.key, Sent("dead", note=outcome.text[:300]))
                log.error("%s: given up: %s", item.window.path, outcome.text)
                return Result("done", outcome.text)
        if self._archive is not None and not sent.archived:
            try:
                self._archive.put(item.session_id, item.window.channel, item.window.path)
            except TooLarge as error:
                log.error("%s", error)
                self._progress.note(item.folder, item.key, Sent("dead", note=str(error)))
                return result
            except DeliveryError as error:  # keys, rights, buckets: somebody can put it right, and nothing is lost
                item.sent = sent
                return Result("retry", f"not archived: {error}", error.retry_after_s)
            sent.archived = True
            self._progress.note(item.folder, item.key, sent)
            if self._settings.archiver is not None and self._settings.archiver.deleteAfterUpload:
                self._delete(item)
        return result

    def _deliver(self, receiver: Receiver, item: Item) -> tuple[Sent, Result]:
        window = item.window
        if item.twin is not None:
            crc32, size_bytes = content_crc32(window.path, window.compressed)
            same = (crc32, size_bytes) == content_crc32(item.twin.path, item.twin.compressed)
            half_written = window.compressed and not item.twin.compressed and is_damaged(window.path)
            if same or half_written:
                sent = Sent("sent", crc32=crc32)
                self._progress.note(item.folder, item.key, sent)
                return sent, Result("done")
        damage = ""
        if item.verbatim and (item.sent is None or item.sent.state != "part"):
            size_bytes = os.stat(window.path).st_size
            if size_bytes <= self._settings.publisher.maxBodyBytes:
                with open(window.path, "rb") as file:
                    body = file.read()
                damage = _differs(item, body)
                if not damage:
                    outcome = receiver.window(item.session_id, body, item.sidecar)
                    if outcome.verdict is Verdict.DELIVERED:
                        return self._arrived(item, outcome, len(body))
                    if outcome.verdict is Verdict.REFUSED and is_damaged(window.path):
                        damage = f"payload_damaged:{window.name}"
                    elif outcome.verdict is not Verdict.TOO_LARGE:
                        raise _Stop(outcome)
            elif item.sidecar is not None and item.sidecar.payload_bytes != size_bytes:
                damage = f"payload_size_mismatch:{window.name}"
        return self._send_lines(receiver, item, damage)

    def _arrived(self, item: Item, outcome: Outcome, size_bytes: int) -> tuple[Sent, Result]:
        damaged = "not whole, says the receiver" if outcome.damaged else ""
        sent = Sent("sent", note="; ".join(part for part in (damaged, _note(outcome.rejected)) if part))
        if outcome.rejected:
            self._keep_rejected(item, outcome)
            self._progress.note(item.folder, item.key, sent)
        number, sidecar = item.window.number, item.sidecar
        acknowledged = outcome.acknowledged and number is not None and sidecar is not None
        if outcome.acknowledged and number is not None and sidecar is not None:
            # Before the note of it: killed in between, the acknowledgement is enough.
            _leave(markers.acknowledge, item.folder, item.window.channel, number, sidecar.window_id)
        if not outcome.rejected:
            self._progress.note(item.folder, item.key, sent)
            if acknowledged and self._settings.deleteAckedPayloads and self._archive is None:
                self._delete(item)
        return sent, Result("done", size_bytes=size_bytes)

    def _send_lines(self, receiver: Receiver, item: Item, damage: str) -> tuple[Sent, Result]:
        publisher = self._settings.publisher
        window = item.window
        start = item.sent.offset if item.sent is not None else 0
        if not start and item.cursor is not None and item.cursor.fits(Disk(), window.path, window.compressed):
            start = item.cursor.offset
        reader = LineReader(
            window.path,
            window.compressed,
            max_lines=publisher.streamMaxLines,
            max_bytes=publisher.streamMaxBytes,
            start=start,
        )
        count = size_bytes = 0
        rejected = _count(item.sent.note) if item.sent is not None else 0
        for lines in reader:
            rejected += self._post(receiver, item, lines)
            count += lines.count
            size_bytes += len(lines.data)
            item.sent = Sent("part", lines.end, note=_note(rejected))
            self._progress.note(item.folder, item.key, item.sent)
        if item.sidecar is not None and not window.compressed and not damage:
            told = (item.sidecar.payload_bytes, item.sidecar.payload_crc32)
            if told != (reader.size_bytes, reader.crc32):
                damage = f"payload_checksum_mismatch:{window.name}"
        lost = reader.lost if reader.lost != "cut_line" else ""  # the writer's end cut it; nobody has its rest
        if reader.lost == "cut_line":
            log.warning("%s: its last line is cut", window.path)
        damage = damage or (f"{lost}:{window.name}" if lost else "")
        if damage:
            log.error("%s: %s: the lines that could be read were sent", window.path, damage)
            if window.number is not None and not window.temporary:
                _leave(markers.note_loss, item.folder, window.channel, window.number, damage)
        note = "; ".join(part for part in (damage, _note(rejected)) if part)
        sent = Sent("sent", reader.size_bytes, reader.crc32, note)
        self._progress.note(item.folder, item.key, sent)
        return sent, Result("done", lines=count, size_bytes=size_bytes)

    def _post(self, receiver: Receiver, item: Item, lines: Lines) -> int:
        """Post some lines, in halves where the receiver finds them too large. How many were rejected."""
        outcome = receiver.window(item.session_id, gzipped(lines.data), None)
        if outcome.verdict is Verdict.DELIVERED:
            if outcome.rejected:
                entries = [
                    (line, f"{rejected.type} {rejected.reason}".strip())
                    for rejected in outcome.lines
                    if (line := _line(lines.data, rejected.line))
                ]
                self._dead.lines(item.session_id, item.window.channel, entries)
            return outcome.rejected
        if outcome.verdict is not Verdict.TOO_LARGE:
            raise _Stop(outcome)
        parts = lines.data.removesuffix(b"\n").split(b"\n")
        if len(parts) == 1:
            self._dead.lines(item.session_id, item.window.channel, [(parts[0], outcome.text)])
            return 1
        middle = len(parts) // 2
        halves = (b"\n".join(half) + b"\n" for half in (parts[:middle], parts[middle:]))
        return sum(self._post(receiver, item, Lines(0, 0, half, 0)) for half in halves)

    def _keep_rejected(self, item: Item, outcome: Outcome) -> None:
        """The rejected lines of a window that was sent as a file."""
        wanted = {rejected.line: f"{rejected.type} {rejected.reason}".strip() for rejected in outcome.lines}
        entries: list[tuple[bytes, str]] = []
        number = 0
        for lines in LineReader(item.window.path, True, max_lines=5000, max_bytes=1 << 20):
            for line in lines.data.removesuffix(b"\n").split(b"\n"):
                number += 1
                if number in wanted:
                    entries.append((line, wanted[number]))
        self._dead.lines(item.session_id, item.window.channel, entries)
        log.error("%s: %d lines rejected by the receiver", item.window.path, outcome.rejected)

    def _delete(self, item: Item) -> None:
        """A window that was asked to be deleted once delivered: only ever a finished one in its session's folder."""
        window = item.window
        if window.temporary or window.number is None or os.path.dirname(window.path) != item.folder:
            return
        if not self._inside.holds(item.folder):
            return
        ack = f"{item.folder}/.gpufl-window-ack.{window.channel}.{window.number}"
        if not os.path.exists(ack):  # so that the hole it leaves is explained
            identity = item.sidecar.window_id if item.sidecar is not None else "-"
            if not _leave(markers.acknowledge, item.folder, window.channel, window.number, identity):
                return
        _leave(markers.remove, window.path)


def _differs(item: Item, body: bytes) -> str:
    """Why a window is not what its identity says, or, without one, not whole; empty if it is."""
    if item.sidecar is None:
        return f"payload_damaged:{item.window.name}" if is_damaged(item.window.path) else ""
    if len(body) != item.sidecar.payload_bytes or zlib.crc32(body) != item.sidecar.payload_crc32:
        return f"payload_checksum_mismatch:{item.window.name}"
    return ""


def gzipped(data: bytes) -> bytes:
    """As one gzip member."""
    packer = zlib.compressobj(6, zlib.DEFLATED, 31)
    return packer.compress(data) + packer.flush()


def _line(data: bytes, number: int) -> bytes:
    lines = data.split(b"\n")
    return lines[number - 1] if 0 < number <= len(lines) else b""


def _note(rejected: int) -> str:
    return f"{rejected} lines rejected" if rejected else ""


def _count(note: str) -> int:
    first = note.partition(" ")[0]
    return int(first) if first.isdigit() else 0


def _leave(what: object, *arguments: object) -> bool:
    """Write or remove something in a session's folder, which may be read-only: then our own notes have to do."""
    try:
        what(*arguments)  # type: ignore[operator]
    except OSError as error:
        log.warning("%s: %s", error.filename or arguments[0], error.strerror or error)
        return False
    return True
