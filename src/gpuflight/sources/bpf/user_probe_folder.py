"""The folder of a user's own probes: NAME.toml with NAME.c, or with NAME.bpf.o that was compiled elsewhere.

What lies there runs in the kernel, with our rights. So the folder, all folders above it and each file must belong to
root or to the user we run as, and nobody else may write them (a sticky folder above, such as /tmp, is fine).
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Sequence

from msgspec import Struct

from gpuflight.errors import SourceUnavailable

MAX_PROBES = 100
_TEXT_BYTES, _OBJECT_BYTES = 1 << 20, 16 << 20
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ENDINGS = (".toml", ".bpf.c", ".c", ".bpf.o")


class Unsafe(Exception):
    """Somebody else could change what would run; the message says what, and what to do."""


class Found(Struct):
    """One probe in the folder: its TOML, and the fingerprint of all its files. ``mistake``: why it is not used."""

    name: str
    file: str  # the TOML's name
    toml: str = ""
    code: str = ""  # name of the .c or .bpf.o beside it
    fingerprint: str = ""
    mistake: str = ""


def scan_folder(folder: str) -> list[Found]:
    """The probes of a folder, by name. Raises SourceUnavailable if the folder cannot be used."""
    path = os.path.abspath(os.path.expanduser(folder))
    try:
        names = sorted(os.listdir(path))
        check_folder(path)
    except OSError as error:
        raise SourceUnavailable(
            f"the folder of user probes {path} cannot be read: {error.strerror}",
            "make it, or correct collectors.user_probes.folder",
        ) from error
    except Unsafe as error:
        raise SourceUnavailable(f"probes of {path} are not loaded: {error}") from None
    probes = {name.removesuffix(".toml") for name in names if name.endswith(".toml")}
    lone = {name for name in names if name.endswith((".c", ".bpf.o")) and _stem(name) not in probes}
    found = [_find(path, name, names) for name in sorted(probes)[:MAX_PROBES]]
    found += [
        Found(_stem(name), name, mistake=f"{name}: there is no {_stem(name)}.toml beside it (write one)")
        for name in sorted(lone)
    ]
    if len(probes) > MAX_PROBES:
        found.append(
            Found("", path, mistake=f"{path}: {len(probes)} probes, the first {MAX_PROBES} are used (use fewer)")
        )
    return found


def _stem(name: str) -> str:
    for ending in _ENDINGS:
        if name.endswith(ending):
            return name.removesuffix(ending)
    return name


def _find(folder: str, name: str, names: Sequence[str]) -> Found:
    file = f"{name}.toml"
    found = Found(name, file)
    if not _NAME.fullmatch(name):
        found.mistake = f"{file}: {name!r} is no name of a probe (small letters, digits and _, at most 40)"
        return found
    code = [candidate for candidate in (f"{name}.bpf.o", f"{name}.bpf.c", f"{name}.c") if candidate in names]
    if not code:
        found.mistake = f"{file}: there is neither {name}.c nor {name}.bpf.o beside it (write one)"
        return found
    found.code = code[0]
    try:
        found.toml = read_text(os.path.join(folder, file))
        found.fingerprint = _fingerprint(folder, names)
    except Unsafe as error:
        found.mistake = f"{file}: it is not used: {error}"
    except OSError as error:
        found.mistake = f"{file}: it cannot be read: {error.strerror}"
    return found


def _fingerprint(folder: str, names: Sequence[str]) -> str:
    """Of everything in the folder that a probe may be made of, headers included."""
    digest = hashlib.blake2b(digest_size=8)
    for name in names:
        if name.endswith((*_ENDINGS, ".h")):
            known = os.stat(os.path.join(folder, name))
            digest.update(f"{name} {known.st_ino} {known.st_size} {known.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def read_text(path: str) -> str:
    """A small text that only root or we could have written. Raises Unsafe, OSError."""
    data = read_file(path, _TEXT_BYTES)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise Unsafe("it is not UTF-8 text; save it as such") from None


def read_object(path: str) -> bytes:
    """A compiled probe that only root or we could have written. Raises Unsafe, OSError."""
    return read_file(path, _OBJECT_BYTES)


def read_file(path: str, most_bytes: int) -> bytes:
    """A file that only root or we could have written, by way of its links. Raises Unsafe, OSError."""
    real = os.path.realpath(path)
    check_folder(os.path.dirname(real))
    fd = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        known = os.fstat(fd)  # of what is open, whatever the name means by now
        if not stat.S_ISREG(known.st_mode):
            raise Unsafe("it is no regular file")
        _check(known, os.path.basename(real))
        if known.st_size > most_bytes:
            raise Unsafe(f"it has {known.st_size} bytes; at most {most_bytes} are read")
        return file.read(most_bytes)


def check_folder(path: str) -> None:
    """Raises Unsafe if somebody else could put other files there, OSError if it cannot be looked at."""
    real = os.path.realpath(path)
    _check(os.stat(real), real)
    while real != "/":
        real = os.path.dirname(real)
        known = os.stat(real)
        if not known.st_mode & stat.S_ISVTX:
            _check(known, real)


def _check(known: os.stat_result, name: str) -> None:
    if known.st_uid not in (0, os.geteuid()):
        raise Unsafe(f"{name} belongs to user {known.st_uid}; it must belong to root or to user {os.geteuid()}, as whom"
                     " gpuflight runs: chown it")  # fmt: skip
    if known.st_mode & _OTHERS_WRITE:
        who = "everybody" if known.st_mode & stat.S_IWOTH else f"group {known.st_gid}"
        raise Unsafe(f"{name} may be written by {who}: chmod go-w it")
