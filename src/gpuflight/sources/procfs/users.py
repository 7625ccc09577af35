"""Names of users, from /etc/passwd alone: asking a directory service could hang."""

from __future__ import annotations

from gpuflight.sources.fs import FileSystem


class Users:
    """Maps user ids to names; read once until told to forget."""

    def __init__(self, fs: FileSystem) -> None:
        self._fs = fs
        self._names: dict[int, str] | None = None

    def forget(self) -> None:
        """Read the file again when next asked."""
        self._names = None

    def name(self, uid: int) -> str | None:
        """Name of a user; None if the file does not have it."""
        if self._names is None:
            try:
                self._names = parse_passwd(self._fs.read("/etc/passwd"))
            except OSError:
                self._names = {}
        return self._names.get(uid)


def parse_passwd(raw: bytes) -> dict[int, str]:
    """uid → name; of two names for one uid the first."""
    names: dict[int, str] = {}
    for line in raw.decode("utf-8", "backslashreplace").split("\n"):
        fields = line.split(":")
        if len(fields) >= 3 and fields[2].isdecimal() and not line.startswith("#"):
            names.setdefault(int(fields[2]), fields[0])
    return names
