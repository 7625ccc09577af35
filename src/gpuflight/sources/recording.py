"""Recording what every source answered, and answering from such a recording.

Each source has one lowest boundary that answers bytes for a key; it passes every question through ``Tape.ask``. A live
tape just asks; a recording tape asks and keeps the answer, or the error; a replaying tape gives back what was kept.

The file is a zstd-compressed tar, made to be looked into with ``tar --zstd -xf``::

    meta.json             {"schema": 1, "version", "hostname", "time", "redacted"}
    0001/round.json       {"round": 1, "wall_ns", "monotonic_s"}   when the round began
    0001/proc.jsonl       one line per answer: {"k": key, "t": text} | {"k", "b": base64} | {"k", "e": [errno, text]}
    0001/netlink.jsonl                         | {"k", "u": [reason, hint]}   (source not available)
    …
    end.json              {"rounds_count": n}    missing if the file was cut short

A round holds only the answers that differ from the last one to the same key, so an idle machine costs little. A replay
answers with the newest one at or before its round; a key first asked later has its first answer.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import io
import json
import os
import tarfile
import threading
from bisect import bisect_right
from collections.abc import Callable
from datetime import UTC, datetime
from typing import IO, Any, Literal

import zstandard

from gpuflight.errors import InputError, SourceUnavailable
from gpuflight.sources.clock import Clock

SCHEMA = 1
MAX_BYTES = 4 << 30
"""Largest content, uncompressed, that is loaded: more is taken for a damaged or hostile file."""

_FORGET_ROUNDS = 64

Mode = Literal["live", "record", "replay"]
Redactor = Callable[[str, str, bytes], bytes]
"""(source, key, answer) → the answer as it may be stored."""


class Tape:
    """The recorder under all sources of a World. ``Tape()`` is live; see ``record``, ``replay`` and ``blank``."""

    def __init__(self) -> None:
        self.mode: Mode = "live"
        self._writer: _Writer | None = None
        self._reader: _Reader | None = None

    @classmethod
    def record(cls, path: str, clock: Clock, *, hostname: str = "", redactor: Redactor | None = None, version: str = "",
               force: bool = False) -> Tape:  # fmt: skip
        """A tape that writes ``path`` when closed; the file appears whole or not at all.

        Raises InputError if the file exists (unless ``force``) or cannot be made.
        """
        tape = cls()
        tape.mode = "record"
        tape._writer = _Writer(path, clock, hostname, redactor, version, force)
        return tape

    @classmethod
    def replay(cls, path: str) -> Tape:
        """A tape that answers from a file. Raises InputError if it is no recording, is damaged, or is too new."""
        tape = cls()
        tape.mode = "replay"
        tape._reader = _Reader.load(path)
        return tape

    @classmethod
    def blank(cls) -> Tape:
        """A tape that holds no answer: under sources that must not touch this machine, beside a tree of fixtures."""
        tape = cls()
        tape.mode = "replay"
        tape._reader = _Reader()
        return tape

    def ask(self, source: str, key: str, live: Callable[[], bytes]) -> bytes:
        """The answer of ``source`` to ``key``: what ``live`` gives or raises, or what was recorded of it.

        Raises OSError or SourceUnavailable as ``live`` does; in a replay also SourceUnavailable for what the recording
        does not hold. Any other exception of ``live`` is passed on and not recorded.
        """
        if self._reader is not None:
            return self._reader.answer(source, key)
        if self._writer is None:
            return live()
        try:
            answer = live()
        except (OSError, SourceUnavailable) as error:
            self._writer.keep(source, key, error)
            raise
        self._writer.keep(source, key, answer)
        return answer

    def begin_round(self, number: int) -> None:
        """Recording: what is asked from now on belongs to round ``number``. Replaying: move there, or to the last.

        Raises InputError if a recording cannot be written on (the disk is full): it ends without a file.
        """
        if self._writer is not None:
            self._writer.begin_round(number)
        if self._reader is not None:
            self._reader.begin_round(number)

    @property
    def rounds(self) -> list[int]:
        """Numbers of the recorded rounds, of a replay; else empty."""
        return list(self._reader.rounds) if self._reader is not None else []

    @property
    def meta(self) -> dict[str, Any]:
        """What ``meta.json`` says, of a replay; else empty."""
        return dict(self._reader.meta) if self._reader is not None else {}

    @property
    def clock(self) -> Clock:
        """The clock of a replay: each round's recorded beginning."""
        if self._reader is None:
            raise ValueError("only a replay has a clock of its own")
        return _ReplayClock(self._reader)

    def close(self) -> None:
        """End a recording: its file appears now. May be called twice.

        Raises InputError if another file of its name appeared meanwhile, OSError if it cannot be written.
        """
        if self._writer is not None:
            self._writer.close()

    def discard(self) -> None:
        """End a recording without leaving a file."""
        if self._writer is not None:
            self._writer.discard()


class _Writer:
    """Streams the rounds into a temporary file beside the target."""

    def __init__(
        self, path: str, clock: Clock, hostname: str, redactor: Redactor | None, version: str, force: bool
    ) -> None:
        self._path = os.path.abspath(path)
        self._temporary = f"{self._path}.part-{os.getpid()}"
        self._clock = clock
        self._redactor = redactor
        self._force = force
        self._lock = threading.Lock()
        self._round = 0
        self._began: dict[str, Any] = {}
        self._answers: dict[str, dict[str, bytes]] = {}  # of the current round: source → key → line
        self._last: dict[tuple[str, str], list[Any]] = {}  # [digest of the newest answer, round it was last asked in]
        self._rounds_count = 0
        self._open = False
        if not force and os.path.lexists(self._path):
            raise InputError(f"{path} exists already; choose another name or pass --force")
        try:
            descriptor = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from error
        self._file: IO[bytes] = os.fdopen(descriptor, "wb")
        self._compressor = zstandard.ZstdCompressor(level=3).stream_writer(self._file, closefd=False)
        self._tar = tarfile.open(fileobj=self._compressor, mode="w|", format=tarfile.PAX_FORMAT)  # noqa: SIM115
        self._open = True
        self._add(
            "meta.json",
            _line(
                {
                    "schema": SCHEMA,
                    "version": version,
                    "hostname": hostname,
                    "time": datetime.fromtimestamp(clock.wall_ns() / 1e9, UTC).isoformat(),
                    "redacted": redactor is not None,
                }
            ),
        )

    def begin_round(self, number: int) -> None:
        with self._lock:
            if not self._open:
                return
            try:
                self._flush()
            except OSError as error:
                self._open = False
                self._remove()
                raise InputError(f"cannot write {self._path}: {error.strerror}") from error
            self._round = number
            self._began = {
                "round": number,
                "wall_ns": self._clock.wall_ns(),
                "monotonic_s": self._clock.monotonic_s(),
            }

    def keep(self, source: str, key: str, answer: bytes | Exception) -> None:
        if isinstance(answer, bytes) and self._redactor is not None:
            answer = self._redactor(source, key, answer)
        line = _encode(key, answer)
        digest = hashlib.blake2b(line, digest_size=16).digest()
        with self._lock:
            if not self._open or not self._began:  # a thread that was left behind, or before the first round
                return
            last = self._last.get((source, key))
            if last is None:
                self._last[source, key] = [digest, self._round]
            elif last[1] == self._round:
                return  # the first answer of a round stands
            else:
                last[1] = self._round
                if last[0] == digest:
                    return
                last[0] = digest
            self._answers.setdefault(source, {})[key] = line

    def close(self) -> None:
        with self._lock:
            if not self._open:
                return
            self._open = False
            try:
                self._flush()
                self._add("end.json", _line({"rounds_count": self._rounds_count}))
                self._tar.close()
                self._compressor.close()  # type: ignore[no-untyped-call]
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
                self._publish()
            except OSError as error:
                self._remove()
                if isinstance(error, FileExistsError):
                    raise InputError(f"cannot write {self._path}: {error.strerror}") from error
                error.filename = self._path
                raise

    def discard(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                self._remove()

    def _publish(self) -> None:
        if self._force:
            os.replace(self._temporary, self._path)
            return
        try:
            os.link(self._temporary, self._path)  # unlike rename never replaces a file that appeared meanwhile
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            if os.path.lexists(self._path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self._path) from None
            os.rename(self._temporary, self._path)
        else:
            os.unlink(self._temporary)

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            os.unlink(self._temporary)

    def _flush(self) -> None:
        """Write the round that ends."""
        if not self._began:
            return
        folder = f"{self._round:04d}"
        self._add(f"{folder}/round.json", _line(self._began))
        for source, lines in sorted(self._answers.items()):
            self._add(f"{folder}/{source}.jsonl", b"".join(lines.values()))
        self._answers = {}
        self._rounds_count += 1
        self._began = {}
        if self._rounds_count % _FORGET_ROUNDS == 0:  # keys of what is gone; asked again, they are simply stored again
            oldest = self._round - _FORGET_ROUNDS
            self._last = {key: last for key, last in self._last.items() if last[1] >= oldest}

    def _add(self, name: str, content: bytes) -> None:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        member.mode = 0o600
        member.mtime = self._clock.wall_ns() // 1_000_000_000
        try:
            self._tar.addfile(member, io.BytesIO(content))
        except OSError as error:
            error.filename = self._path  # a full disk is told by its name
            raise


class _Reader:
    """A whole recording in memory: per source and key the rounds in which the answer changed, and to what."""

    def __init__(self) -> None:
        self.meta: dict[str, Any] = {}
        self.rounds: list[int] = []
        self.began: list[tuple[int, float]] = []  # (wall_ns, monotonic_s) of each round
        self.position = 0
        self._answers: dict[tuple[str, str], tuple[list[int], list[bytes | Exception]]] = {}

    @classmethod
    def load(cls, path: str) -> _Reader:
        """Read everything. Nothing is ever written to the disk, whatever the members are called."""
        reader = cls()
        try:
            with open(path, "rb") as file:
                reader._read(file, path)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror or error}") from error
        except (zstandard.ZstdError, tarfile.TarError, EOFError) as error:
            raise InputError(f"{path} is not a gpuflight recording, or was cut short ({error})") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path} is a damaged recording ({type(error).__name__}: {error})") from error
        return reader

    def _read(self, file: IO[bytes], path: str) -> None:
        complete = False
        size = 0
        index: dict[str, int] = {}
        with (
            zstandard.ZstdDecompressor().stream_reader(file) as plain,
            tarfile.open(fileobj=plain, mode="r|") as tar,
        ):
            for member in tar:
                size += member.size
                if size > MAX_BYTES:
                    raise InputError(f"{path} holds more than {MAX_BYTES >> 30} GiB: not loaded")
                content = tar.extractfile(member)
                if content is None:  # a link or a folder: nothing of ours
                    continue
                folder, _, name = member.name.rpartition("/")
                if member.name == "meta.json":
                    self.meta = json.loads(content.read())
                    schema = self.meta["schema"]
                    if schema > SCHEMA:
                        raise InputError(
                            f"{path} was recorded by a newer gpuflight (schema {schema}, known is {SCHEMA}): update"
                        )
                elif not self.meta:
                    raise InputError(f"{path} is not a gpuflight recording: it does not begin with meta.json")
                elif member.name == "end.json":
                    complete = True
                elif name == "round.json":
                    began = json.loads(content.read())
                    index[folder] = len(self.rounds)
                    self.rounds.append(began["round"])
                    self.began.append((began["wall_ns"], began["monotonic_s"]))
                elif name.endswith(".jsonl") and folder in index:
                    for line in content:
                        self._store(name.removesuffix(".jsonl"), json.loads(line), index[folder])
        if not complete or not self.rounds:
            raise InputError(f"{path} was cut short: it has no end")

    def _store(self, source: str, answer: dict[str, Any], position: int) -> None:
        positions, answers = self._answers.setdefault((source, answer.pop("k")), ([], []))
        positions.append(position)
        answers.append(_decode(answer))

    def begin_round(self, number: int) -> None:
        self.position = max(0, bisect_right(self.rounds, number) - 1)

    def answer(self, source: str, key: str) -> bytes:
        kept = self._answers.get((source, key))
        if kept is None:
            raise SourceUnavailable(
                f"the recording holds no answer of {source} to {key}", "record with the same collectors and settings"
            )
        positions, answers = kept
        answer = answers[max(0, bisect_right(positions, self.position) - 1)]
        if isinstance(answer, OSError):
            raise OSError(answer.errno, answer.strerror)  # a new one: a raised exception keeps its traceback
        if isinstance(answer, SourceUnavailable):
            raise SourceUnavailable(answer.reason, answer.hint)
        assert isinstance(answer, bytes)  # noqa: S101
        return answer


class _ReplayClock:
    """Stands at the recorded beginning of the current round."""

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader

    def wall_ns(self) -> int:
        return self._reader.began[self._reader.position][0]

    def monotonic_s(self) -> float:
        return self._reader.began[self._reader.position][1]


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _encode(key: str, answer: bytes | Exception) -> bytes:
    if isinstance(answer, OSError):
        return _line({"k": key, "e": [answer.errno or errno.EIO, answer.strerror or ""]})
    if isinstance(answer, SourceUnavailable):
        return _line({"k": key, "u": [answer.reason, answer.hint]})
    assert isinstance(answer, bytes)  # noqa: S101
    try:
        return _line({"k": key, "t": answer.decode("utf-8")})
    except UnicodeDecodeError:
        return _line({"k": key, "b": base64.b64encode(answer).decode("ascii")})


def _decode(answer: dict[str, Any]) -> bytes | Exception:
    """The answer or the error of one line. Raises ValueError, TypeError or KeyError if it makes no sense."""
    if "t" in answer:
        return str(answer["t"]).encode("utf-8")
    if "b" in answer:
        return base64.b64decode(answer["b"], validate=True)
    if "e" in answer:
        number, text = answer["e"]
        return OSError(int(number), str(text) or os.strerror(int(number)))
    reason, hint = answer["u"]
    return SourceUnavailable(str(reason), str(hint))
