"""Credentials: from files that may be renewed, and out of the command line that everybody can read."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterable

from pydantic import SecretStr

from gpuflight.errors import ConfigError

_MAX_BYTES = 65_536


def read_secret(value: SecretStr | None, path: str | None) -> str | None:
    """A secret that is given, or stands in a file (its white space at both ends is cut). Raises ConfigError."""
    if path is not None:
        try:
            with open(path, "rb") as file:
                text = file.read(_MAX_BYTES).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
        if not text:
            raise ConfigError(f"{path}: is empty, where a secret is expected")
    else:
        text = value.get_secret_value().strip() if value is not None else ""
    if not text.isascii() or any(ord(char) < 32 or ord(char) == 127 for char in text):
        raise ConfigError("a secret is one line of printable ASCII")
    return text or None


def hide_arguments(secrets: Iterable[str]) -> bool:
    """Overwrite secrets in this process's own command line, where ``ps`` shows them to everybody; whether none is
    there any more. It was there until now: a file or the environment are better places."""
    wanted = [secret.encode() for secret in secrets if secret]
    if not wanted:
        return True
    try:
        with open("/proc/self/stat", "rb") as file:  # arg_start and arg_end, proc_pid_stat(5)
            fields = file.read().rpartition(b")")[2].split()
        start, end = int(fields[45]), int(fields[46])
        shown = _command_line()
        if not start or end - start != len(shown) or ctypes.string_at(start, len(shown)) != shown:
            return False
        for secret in wanted:
            for found in re.finditer(re.escape(secret), shown):
                ctypes.memset(start + found.start(), ord("x"), len(secret))
        left = _command_line()
    except (OSError, ValueError, IndexError):
        return False
    return not any(secret in left for secret in wanted)


def _command_line() -> bytes:
    descriptor = os.open("/proc/self/cmdline", os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = b""
        while piece := os.read(descriptor, 1 << 16):
            found += piece
        return found
    finally:
        os.close(descriptor)
