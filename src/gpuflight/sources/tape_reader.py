"""Reading a recording: all of it into memory, nothing onto the disk."""

from __future__ import annotations

import json
import tarfile
from bisect import bisect_right
from typing import IO, Any

import zstandard

from gpuflight.errors import InputError, SourceUnavailable
from gpuflight.sources.tape_lines import SCHEMA, decode

MAX_BYTES = 4 << 30
"""Largest content, uncompressed, that is loaded: more is taken for a damaged or hostile file."""


class Reader:
    """A whole recording in memory: per source and key when the answer changed (round, questions before in it), and to
    what."""

    def __init__(self) -> None:
        self.meta: dict[str, Any] = {}
        self.rounds: list[int] = []
        self.began: list[tuple[int, float]] = []  # (wall_ns, monotonic_s) of each round
        self.position = 0
        self._answers: dict[tuple[str, str], tuple[list[tuple[int, int]], list[bytes | Exception]]] = {}
        # Questions of this round, for the keys whose answer changed within some round.
        self._asked: dict[tuple[str, str], int] = {}
        self._within: set[tuple[str, str]] = set()

    @classmethod
    def load(cls, path: str) -> Reader:
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
        key = (source, answer.pop("k"))
        positions, answers = self._answers.setdefault(key, ([], []))
        before = int(answer.pop("n", 0))
        if before:
            self._within.add(key)
        positions.append((position, before))
        answers.append(decode(answer))

    def begin_round(self, number: int) -> None:
        self.position = max(0, bisect_right(self.rounds, number) - 1)
        self._asked.clear()

    def answer(self, source: str, key: str) -> bytes:
        kept = self._answers.get((source, key))
        if kept is None:
            raise SourceUnavailable(
                f"the recording holds no answer of {source} to {key}", "record with the same collectors and settings"
            )
        positions, answers = kept
        before = 0
        if (source, key) in self._within:
            before = self._asked.get((source, key), 0)
            self._asked[source, key] = before + 1
        answer = answers[max(0, bisect_right(positions, (self.position, before)) - 1)]
        if isinstance(answer, OSError):
            raise OSError(answer.errno, answer.strerror)  # a new one: a raised exception keeps its traceback
        if isinstance(answer, SourceUnavailable):
            raise SourceUnavailable(answer.reason, answer.hint)
        assert isinstance(answer, bytes)  # noqa: S101
        return answer


class ReplayClock:
    """Stands at the recorded beginning of the current round."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def wall_ns(self) -> int:
        return self._reader.began[self._reader.position][0]

    def monotonic_s(self) -> float:
        return self._reader.began[self._reader.position][1]
