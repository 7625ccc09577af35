"""Which profiler a file is of."""

from __future__ import annotations

from gpuflight.errors import InputError
from gpuflight.events.imports.base import Import
from gpuflight.events.imports.kineto import Kineto
from gpuflight.events.imports.nsys import Nsys
from gpuflight.events.ledger import Ledger

_SQLITE = b"SQLite format 3\x00"


def open_import(path: str, ledger: Ledger | None = None) -> Import:
    """The import of a file, told by its first bytes. Raises InputError if it is of none that is known."""
    try:
        with open(path, "rb") as file:
            head = file.read(64)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    if head.startswith(_SQLITE):
        return Nsys(path, ledger)
    if head.startswith(b"\x1f\x8b") or head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"["):
        return Kineto(path, ledger)
    raise InputError(
        f"{path}: neither a trace of the PyTorch profiler (JSON, may be gzip) nor an SQLite export of Nsight Systems"
        " (`nsys export --type sqlite` makes one of a .nsys-rep)"
    )
