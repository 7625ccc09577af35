"""What of a source's answers may be stored in a recording: the files that hold secrets, with them taken out."""

from __future__ import annotations

import re

import msgspec

from gpuflight.redaction import redact_argv, redact_environ, redact_text
from gpuflight.sources.container_files import without_secrets
from gpuflight.sources.procfs.stat import parse_environ

_OF_A_PROCESS = re.compile(r"read /proc/[^/]+/(?:task/\d+/)?(cmdline|environ|mountinfo|mounts)$")
_EXEC_KIND, _EXEC_LENGTH, _EXEC_HEAD = 1, 56, 64  # of struct exec_row: kind, place of arguments_length, of arguments
_TEXTS = ("read /proc/cmdline", "read /proc/mounts")


def redact_answer(source: str, key: str, answer: bytes) -> bytes:
    """The answer as it may be stored. Bytes that are not UTF-8 stay what they are."""
    if source == "tools":
        return _text(answer)
    if source == "files":
        if key == "read /etc/passwd":
            return _passwd(answer)
        return _text(without_secrets(key, answer))  # what container runtimes keep about their containers
    if source == "bpf" and key.startswith("process drain events"):
        return _executions(answer)
    if source != "proc":
        return answer
    if key in _TEXTS:
        return _text(answer)
    match = _OF_A_PROCESS.match(key)
    if match is None:
        return answer
    if match[1] == "cmdline":
        return _cmdline(answer)
    if match[1] == "environ":
        kept = redact_environ(parse_environ(answer))
        return "".join(f"{name}={value}\0" for name, value in kept.items()).encode()
    return _text(answer)


def _cmdline(answer: bytes) -> bytes:
    end = len(answer.rstrip(b"\0"))
    arguments = answer[:end].decode("utf-8", "surrogateescape").split("\0")
    return "\0".join(redact_argv(arguments)).encode("utf-8", "surrogateescape") + answer[end:]


def _executions(answer: bytes) -> bytes:
    """Records of programs that were started (``struct exec_row`` of process.bpf.c): their arguments."""
    from gpuflight.sources.bpf.taped import Drained

    kept = msgspec.msgpack.decode(answer, type=Drained)
    kept.records = [_execution(record) for record in kept.records]
    return msgspec.msgpack.encode(kept)


def _execution(record: bytes) -> bytes:
    if len(record) <= _EXEC_HEAD or int.from_bytes(record[:4], "little") != _EXEC_KIND:
        return record
    arguments = record[_EXEC_HEAD:]
    length = int.from_bytes(record[_EXEC_LENGTH : _EXEC_LENGTH + 4], "little")
    redacted = _cmdline(arguments)
    if length <= len(arguments):  # all of them are here, and shall seem so
        length = len(redacted)
    head = record[:_EXEC_LENGTH] + max(length, 0).to_bytes(4, "little") + record[_EXEC_LENGTH + 4 : _EXEC_HEAD]
    return head + redacted


def _passwd(answer: bytes) -> bytes:
    """Names, numbers and home directories of users, without what people are called."""
    users = [line.split(b":") for line in answer.split(b"\n")]
    return b"".join(b":".join([*user[:4], b"", user[5], b""]) + b"\n" for user in users if len(user) >= 6)


def _text(answer: bytes) -> bytes:
    return redact_text(answer.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
