"""One answer as one line of JSON in a recording, and back; ``recording`` tells the form."""

from __future__ import annotations

import base64
import errno
import json
import os
from typing import Any

from gpuflight.errors import SourceUnavailable

SCHEMA = 1
"""Number of the form; a reader refuses a higher one than it knows."""


def line_of(value: dict[str, Any]) -> bytes:
    """A line of ASCII, so that names which are not UTF-8 keep their surrogates as escapes."""
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def encode(key: str, answer: bytes | Exception, asked_before: int = 0) -> bytes:
    """The line of an answer, or of the error that was raised instead; ``asked_before``: how often in its round."""
    line: dict[str, Any] = {"k": key, "n": asked_before} if asked_before else {"k": key}
    if isinstance(answer, OSError):
        return line_of(line | {"e": [answer.errno or errno.EIO, answer.strerror or ""]})
    if isinstance(answer, SourceUnavailable):
        return line_of(line | {"u": [answer.reason, answer.hint]})
    assert isinstance(answer, bytes)  # noqa: S101
    try:
        return line_of(line | {"t": answer.decode("utf-8")})
    except UnicodeDecodeError:
        return line_of(line | {"b": base64.b64encode(answer).decode("ascii")})


def decode(answer: dict[str, Any]) -> bytes | Exception:
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
