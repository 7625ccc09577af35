"""Access tokens: who they belong to, where they are kept, whether one is right.

A token is ``gpfl_`` and 256 random bits. The file keeps its SHA-256 only: a slow password hash protects short secrets
that can be guessed, which 256 bits cannot. No import of the web framework here, ``gpuflight token`` uses this as well.
"""

from __future__ import annotations

import enum
import fcntl
import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from gpuflight.errors import ConfigError, InputError
from gpuflight.subscribers.atomic import write_atomic

log = logging.getLogger(__name__)

PREFIX = "gpfl_"
MIN_CONFIGURED_LENGTH = 12
"""Shortest token that settings may bring: with the rate limit on failed logins it cannot be tried out."""

_MAX_FILE_BYTES = 1 << 20
_MAX_TOKEN_LENGTH = 512
_PREFIX_SHOWN = 8
"""Of a token, its own ``gpfl_`` included: three letters to know it by, which leave 238 bits."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Role(enum.IntEnum):
    """What a client may do; each role may do what the ones before it may, except that only ``ingest`` and those from
    operator on may send events: an agent's key shows nobody anything, and who may look may not write."""

    INGEST = 0
    VIEWER = 1
    OPERATOR = 2
    ADMIN = 3

    @property
    def label(self) -> str:
        """The role as people write it."""
        return self.name.lower()

    @classmethod
    def of(cls, label: str) -> Role:
        """The role of that name. Raises InputError."""
        try:
            return cls[label.upper()]
        except KeyError:
            raise InputError(
                f"there is no role {label!r}; there are: {', '.join(role.label for role in cls)}"
            ) from None


class TokenInfo(Struct, frozen=True):
    """A token without its secret. ``created`` is a time in UTC, ISO 8601; ``prefix`` how the token begins, empty where
    that was not kept."""

    id: str
    name: str
    role: str
    created: str
    sha256: str
    prefix: str = ""

    @property
    def rank(self) -> Role:
        """The role of the token."""
        return Role.of(self.role)

    def public(self) -> dict[str, str]:
        """What may be shown of it."""
        return {"id": self.id, "name": self.name, "role": self.role, "created": self.created}


class AuthSettings(Protocol):
    """What of ``settings.server.auth`` is used here."""

    @property
    def token(self) -> Any:
        """A pydantic SecretStr, or None."""

    @property
    def token_file(self) -> str | None:
        """Path of a file that holds one token."""

    @property
    def store_file(self) -> str | None:
        """Path of the file that ``gpuflight token`` keeps."""


class _File(Struct, frozen=True):
    schema: int
    tokens: list[TokenInfo]


def default_store_path() -> str:
    """Where the tokens of this user are kept: ``/var/lib/gpuflight`` for root, else the XDG folder for state."""
    if os.geteuid() == 0:
        return "/var/lib/gpuflight/tokens.json"
    home = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(home, "gpuflight", "tokens.json")


def digest_of(token: str) -> str:
    """SHA-256 of a token, as hexadecimal digits."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


class TokenStore:
    """The tokens of a file (without path: of this object only) and those that settings bring, which are of role admin.
    Thread-safe.

    The file is read again when it changed, so that ``gpuflight token create`` and ``revoke`` work on a server that
    runs. A file that cannot be read lets nobody in by it. Once any token was there, ``configured`` stays true for the
    life of the object: revoking the last token, or losing the file, does not open the door.
    """

    def __init__(self, path: str | None = None, configured: tuple[str, ...] = ()) -> None:
        self.path = path
        self._fixed = tuple(
            TokenInfo(f"settings-{index}", f"settings-{index}", "admin", "", digest_of(token))
            for index, token in enumerate(configured)
        )
        self._lock = threading.Lock()
        self._seen: tuple[int, int, int] | None = None
        self._stored: tuple[TokenInfo, ...] = ()
        self._broken = False
        self._configured = bool(configured)

    @classmethod
    def from_settings(cls, auth: AuthSettings) -> TokenStore:
        """The store that ``settings.server.auth`` describes. Raises ConfigError for a token that cannot be used."""
        given = []
        if auth.token is not None:
            given.append(_checked(auth.token.get_secret_value(), "server.auth.token"))
        if auth.token_file is not None:
            given.append(_checked(_read_token_file(auth.token_file), auth.token_file))
        store = cls(auth.store_file or default_store_path(), tuple(given))
        try:
            store.all()
        except InputError as error:
            raise ConfigError(str(error)) from None
        return store

    @property
    def configured(self) -> bool:
        """Whether any token is, or was, there: then nobody comes in without one."""
        with self._lock:
            self._refresh()
            return self._configured

    def verify(self, token: str) -> TokenInfo | None:
        """Whose token this is, or None. Compares with every token in constant time, whichever fits."""
        if len(token) > _MAX_TOKEN_LENGTH:
            return None
        digest = digest_of(token)
        with self._lock:
            self._refresh()
            known = (*self._fixed, *self._stored)
        found = None
        for info in known:
            if hmac.compare_digest(info.sha256, digest):
                found = info
        return found

    def all(self) -> list[TokenInfo]:
        """Every token, those of the settings first. Raises InputError if the file cannot be read."""
        with self._lock:
            return [*self._fixed, *self._load()]

    def create(self, role: Role, name: str | None = None) -> tuple[str, TokenInfo]:
        """A new token, and what is kept of it. The token cannot be had again. Raises InputError, OSError."""
        if name is not None and not _NAME.fullmatch(name):
            raise InputError(f"{name!r} cannot be the name of a token: letters, digits, `.`, `_`, `-`, at most 64")
        token = PREFIX + secrets.token_urlsafe(32)
        with self._changing() as stored:
            names = {info.name for info in stored} | {info.id for info in stored}
            token_id = secrets.token_hex(4)
            while token_id in names:
                token_id = secrets.token_hex(4)
            chosen = name or f"{role.label}-{token_id}"
            if chosen in names:
                raise InputError(f"there is a token {chosen!r} already; revoke it first or choose another name")
            now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
            info = TokenInfo(token_id, chosen, role.label, now, digest_of(token), token[:_PREFIX_SHOWN])
            stored.append(info)
        return token, info

    def revoke(self, which: str) -> TokenInfo:
        """Remove a token by its name or id. Raises InputError if there is none in the file, OSError."""
        with self._changing() as stored:
            for info in stored:
                if which in (info.name, info.id):
                    stored.remove(info)
                    return info
            known = ", ".join(info.name for info in stored) or "none"
            raise InputError(f"there is no token {which!r}; there are: {known}")

    @contextmanager
    def _changing(self) -> Iterator[list[TokenInfo]]:
        """The tokens of the file, to be changed; written when the block ends well. One process at a time."""
        if self.path is None:
            with self._lock:
                kept = list(self._stored)
                yield kept
                self._stored = tuple(kept)
                self._configured = self._configured or bool(kept)
            return
        folder = os.path.dirname(os.path.abspath(self.path))
        os.makedirs(folder, mode=0o700, exist_ok=True)
        with self._lock:
            lock = os.open(self.path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                stored = list(self._load())
                yield stored
                data = msgspec.json.format(msgspec.json.encode(_File(1, stored)), indent=2) + b"\n"
                write_atomic(self.path, data, mode=0o600)
                self._load()
            finally:
                os.close(lock)

    def _refresh(self) -> None:
        """Read the file again if it is not the one that was read; never raises."""
        if self.path is None:
            return
        try:
            status = os.stat(self.path)
            now: tuple[int, int, int] | None = (status.st_ino, status.st_size, status.st_mtime_ns)
        except FileNotFoundError:
            now = None
        except OSError:
            now = (-1, -1, -1)
        if now == self._seen and not self._broken:
            return
        try:
            self._load()
        except InputError as error:
            if not self._broken:
                log.error("%s: nobody comes in by a token of this file", error)
            self._broken, self._configured, self._stored = True, True, ()

    def _load(self) -> tuple[TokenInfo, ...]:
        """Read the file. Raises InputError."""
        if self.path is None:
            return self._stored
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            self._seen, self._stored, self._broken = None, (), False
            return ()
        except OSError as error:
            raise InputError(f"{self.path}: {error.strerror}") from None
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise InputError(f"{self.path}: not a regular file")
            if status.st_mode & 0o022:
                raise InputError(f"{self.path}: others may write it; `chmod 600` it after a look at what it holds")
            data = file.read(_MAX_FILE_BYTES)
        try:
            content = msgspec.json.decode(data, type=_File)
            ranks = [info.rank for info in content.tokens]
        except (msgspec.DecodeError, UnicodeDecodeError, InputError) as error:
            raise InputError(f"{self.path}: not a file of tokens: {error}") from None
        if content.schema != 1:
            raise InputError(f"{self.path}: written by a later release (schema {content.schema})")
        self._seen = (status.st_ino, status.st_size, status.st_mtime_ns)
        self._stored, self._broken = tuple(content.tokens), False
        self._configured = self._configured or bool(ranks)
        return self._stored


def _checked(token: str, origin: str) -> str:
    if len(token) < MIN_CONFIGURED_LENGTH:
        raise ConfigError(
            f"{origin}: too short for a token, at least {MIN_CONFIGURED_LENGTH} characters;"
            " `gpuflight token create` makes one"
        )
    if len(token) > _MAX_TOKEN_LENGTH or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"{origin}: a token is printable ASCII without spaces, at most {_MAX_TOKEN_LENGTH} long")
    return token


def _read_token_file(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_FILE_BYTES).decode("ascii", "replace").strip()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
