"""A session as it lies on disk, finished, killed, damaged or still written, to batches."""

from __future__ import annotations

import queue
import threading
import zlib
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from gpuflight.errors import InputError
from gpuflight.events.arrays import keep_freed_memory
from gpuflight.events.batch import Batch
from gpuflight.events.files import inflate
from gpuflight.events.files.folder import SessionFolder, find_sessions
from gpuflight.events.files.inflate import Damaged, chunks
from gpuflight.events.files.names import Window
from gpuflight.events.format.decoder import Decoder
from gpuflight.events.format.lines import Lines
from gpuflight.events.format.repair import is_whole
from gpuflight.events.ledger import Ledger, Place

_AHEAD = 4
_PIECE_BYTES = 3 << 20
"""Decoded at a time: less, and calls of numpy cost more than what they do; more, and it leaves the caches."""
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


class SessionReader:
    """Iterate over it once: batches of all channels, one after the other, windows in the order of writing.

    ``ledger`` tells afterwards what was lost, ``decoder.sessions`` which sessions there were. ``live``: whether
    somebody still writes; None: look.
    """

    def __init__(self, folder: SessionFolder, ledger: Ledger | None = None, *, live: bool | None = None) -> None:
        self.folder = folder
        self.ledger = Ledger() if ledger is None else ledger
        self.decoder = Decoder(folder.session_id, self.ledger)
        self._live = folder.live() if live is None else live

    def __iter__(self) -> Iterator[Batch]:
        for batches in self.blocks():
            yield from batches

    def blocks(self) -> Iterator[list[Batch]]:
        """The same, batches of whole lines together: what came of one numbered batch is not taken apart."""
        keep_freed_memory()
        self._look_beside()
        pieces = self._pieces()
        # what a thread would gain by decompressing meanwhile, the hand-over between the cores costs
        for _, lines, place in pieces if inflate.FAST else _ahead(pieces):
            yield self.decoder.feed(lines, place)
        if not self._live:
            for session in self.decoder.sessions.values():
                if not session.ended:
                    self.ledger.add("unclean_end", subject=session.id)

    def _look_beside(self) -> None:
        """What the companions say: holes, losses noted, identities missing."""
        beside = self.folder.companions
        for loss in beside.losses:
            self.ledger.add("marked_loss", subject=f"{loss.channel}: {loss.reason}"[:200])
        marked = {(loss.channel.removeprefix("agent-"), loss.window) for loss in beside.losses}
        for channel, number in beside.bad_sidecars:
            self.ledger.add("bad_sidecar", Place(self.folder.path, channel, number), subject=channel)
        for channel in self.folder.windows.keys() | {c for c, _ in beside.sidecars}:
            for number in self.folder.missing(channel):
                place = Place(self.folder.path, channel, number)
                if (channel, number) in beside.acknowledged:
                    self.ledger.add("acked_window", place, subject=channel)
                elif (channel, number) not in marked:
                    self.ledger.add("missing_window", place, subject=channel)

    def _pieces(self) -> Iterator[tuple[Window, bytes, Place]]:
        for windows in self.folder.windows.values():
            chosen = list(self._chosen(windows))
            for i, window in enumerate(chosen):
                yield from self._window(window, last=i == len(chosen) - 1)

    def _chosen(self, windows: list[Window]) -> Iterator[Window]:
        """Of files with one number those to read: one, or several if they differ."""
        for _, group in groupby(windows, key=lambda w: w.number):
            same = list(group)
            if len(same) > 1 and same[0].number is not None:
                yield from self._different(same)
            else:
                yield from same

    def _different(self, same: list[Window]) -> Iterator[Window]:
        """Raw and compressed file of one window count once; a half-compressed one only if there is no other."""
        kept: list[Window] = []
        usable = [w for w in same if not w.part and not (w.compressed and _damaged(w))]
        for window in same:
            place = _place(window)
            if usable and window not in usable:
                self.ledger.add("unfinished_file", place, subject=window.channel)
                continue
            try:
                if any(_equal(other, window) for other in kept):
                    self.ledger.add("repeated_window", place, subject=window.channel)
                    continue
            except OSError:
                self.ledger.add("vanished_file", place, subject=window.channel)
                continue
            if kept:
                self.ledger.add("window_collision", place, subject=window.channel)
            kept.append(window)
            yield window

    def _window(self, window: Window, last: bool) -> Iterator[tuple[Window, bytes, Place]]:
        place = _place(window)
        lines = Lines(place, self.ledger)
        checksum, size = 0, 0

        def seen(data: bytes) -> None:
            nonlocal checksum, size
            checksum = zlib.crc32(data, checksum)
            size += len(data)

        whole = True
        first = True
        identified = not window.temporary and window.number is not None and self.folder.companions.has_lock
        try:
            for piece in chunks(window.path, window.compressed, seen if identified else None, _PIECE_BYTES):
                if first and piece.startswith(_UTF16) and b"\0" in piece[:8]:
                    self.ledger.add("utf16_file", place, subject=window.channel)
                    return
                first = False
                data, at = lines.push(piece)
                if data:
                    yield window, data, at
        except Damaged as damage:
            whole = False
            reason = "unfinished_file" if window.part and damage.reason != "empty_file" else damage.reason
            self.ledger.add(reason, place, subject=window.channel)
        except FileNotFoundError:
            self.ledger.add("vanished_file", place, subject=window.channel)
            return
        except OSError as error:
            self.ledger.add("unreadable_file", place, subject=f"{window.channel}: {error.strerror}")
            return
        yield from self._rest(window, lines, whole=whole, growing=last and self._live and not window.compressed)
        if identified:
            self._identify(window, place, size, checksum)

    def _rest(
        self, window: Window, lines: Lines, *, whole: bool, growing: bool
    ) -> Iterator[tuple[Window, bytes, Place]]:
        """A last line without its newline: taken if it is whole."""
        rest, at = lines.rest()
        if not rest.strip():
            return
        if whole and is_whole(rest):
            self.ledger.add("no_newline", at, subject=window.channel)
            yield window, rest, at
        else:
            reason = "unfinished_line" if growing else "cut_line"
            self.ledger.add(reason, at, size_bytes=len(rest), subject=window.channel)

    def _identify(self, window: Window, place: Place, size: int, checksum: int) -> None:
        """Compares a finished window with its sidecar."""
        key = (window.channel, window.number if window.number is not None else -1)
        sidecar = self.folder.companions.sidecars.get(key)
        if sidecar is None:
            if key not in self.folder.companions.bad_sidecars:
                self.ledger.add("missing_sidecar", place, subject=window.channel)
        elif (
            (sidecar.payload_bytes, sidecar.payload_crc32, sidecar.payload_file) != (size, checksum, window.name)
            or (sidecar.channel, sidecar.window_sequence) != key
            or (self.folder.session_id and sidecar.session_id != self.folder.session_id)
        ):
            self.ledger.add("sidecar_mismatch", place, subject=window.channel)


def read_session(path: str, ledger: Ledger | None = None) -> Iterator[Batch]:
    """Batches of all sessions in a folder or below it. Raises InputError if there is none."""
    folders = find_sessions(path)
    if not folders:
        raise InputError(f"{path}: no GPU session in this folder or three levels below it")
    for folder in folders:
        yield from SessionReader(folder, ledger)


def _place(window: Window) -> Place:
    return Place(window.path, window.channel, -1 if window.number is None else window.number, 0)


def _equal(first: Window, second: Window) -> bool:
    """Whether two files have the same content, decompressed."""
    one, other = _content(first), _content(second)
    mine = theirs = b""
    while True:
        mine = mine or next(one, b"")
        theirs = theirs or next(other, b"")
        if not mine or not theirs:
            return not mine and not theirs
        size = min(len(mine), len(theirs))
        if mine[:size] != theirs[:size]:
            return False
        mine, theirs = mine[size:], theirs[size:]


def _content(window: Window) -> Iterator[bytes]:
    try:
        yield from chunks(window.path, window.compressed)
    except Damaged:
        return


def _damaged(window: Window) -> bool:
    try:
        for _ in chunks(window.path, window.compressed):
            pass
    except Damaged:
        return True
    except OSError:
        return False
    return False


def _ahead(items: Iterator[Any]) -> Iterator[Any]:
    """The same items, made by a thread a few ahead: decompression leaves the interpreter to decoding meanwhile."""
    made: queue.Queue[Any] = queue.Queue(_AHEAD)
    stop = threading.Event()
    end = object()

    def put(item: Any) -> bool:
        while not stop.is_set():
            try:
                made.put(item, timeout=0.2)
            except queue.Full:
                continue
            return True
        return False

    def work() -> None:
        try:
            for item in items:
                if not put(item):
                    return
        except BaseException as error:  # noqa: BLE001 (raised again where the items are wanted)
            put(error)
        else:
            put(end)

    thread = threading.Thread(target=work, name="gpuflight-inflate", daemon=True)
    thread.start()
    try:
        while True:
            item = made.get()
            if item is end:
                return
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        thread.join()
