"""What a probe backend offers, whichever library loads the programs: the words between collectors and the engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from msgspec import Struct


class Uprobe(Struct, frozen=True):
    """One place to probe in one file.

    ``path``: as gpuflight opens it (``/proc/PID/root/usr/lib/libcudart.so.12``). ``offset``: in the file (bytes; see
    ``elf.read_elf``). ``cookie``: what ``gf_cookie(ctx)`` says in the program. ``ret``: when the function
    returns. ``symbol``: for people.
    """

    path: str
    offset: int
    cookie: int = 0
    ret: bool = False
    symbol: str = ""


class ProgramCost(Struct):
    """What one program of ours cost since it was loaded, as the kernel counted it; None where it does not count."""

    program: str
    run_count: int | None = None
    run_time_ns: int | None = None
    missed_count: int | None = None  # runs that the kernel left out because the program was running on this CPU already


class Link(ABC):
    """Programs that are attached. Closing it detaches them; so does the end of our process, whatever ends it."""

    attached: list[Uprobe]
    failed: list[tuple[Uprobe, str]]
    closed: bool = False

    @abstractmethod
    def close(self) -> None:
        """Detach. May be called twice. Classic uprobes take the kernel about 0.1 s each: that goes on behind."""


class ProbeObject(ABC):
    """One loaded object: its programs and maps. All methods raise OSError as the kernel answers, and what they say."""

    name: str
    backend: str
    closed: bool = False
    why_classic: str = ""
    """Why uprobes are attached one by one instead of by one uprobe_multi link; empty if they are not."""

    @abstractmethod
    def attach_uprobes(self, program: str, uprobes: Sequence[Uprobe], pid: int = 0) -> Link:
        """Attach a program to many places at once, best effort; ``Link.failed`` says what could not be, and why.

        ``pid``: this process only; 0 for all that map the file. Raises KeyError without such a program.
        """

    @abstractmethod
    def attach(self, program: str) -> Link:
        """Attach a program as its section says (tp_btf, raw_tp, tracepoint, iter).

        Raises SourceUnavailable, KeyError without such a program.
        """

    @abstractmethod
    def read(self, map_name: str) -> list[tuple[bytes, bytes]]:
        """Every key and value of a map. Of a per-CPU map the value is that of all CPUs, each rounded up to 8 bytes.

        What programs change meanwhile may be seen before or after the change. Raises KeyError without such a map.
        """

    def read_packed(self, map_name: str) -> tuple[bytes, bytes]:
        """As ``read``, all keys one after the other and all values: for maps of thousands of entries."""
        pairs = self.read(map_name)
        return b"".join(key for key, _ in pairs), b"".join(value for _, value in pairs)

    @abstractmethod
    def lookup(self, map_name: str, key: bytes) -> bytes | None:
        """The value of one key, as in ``read``; None if it is not there."""

    @abstractmethod
    def update(self, map_name: str, key: bytes, value: bytes) -> None:
        """Set a key, whether it is there or not."""

    @abstractmethod
    def delete(self, map_name: str, key: bytes) -> bool:
        """Remove a key; False if it was not there."""

    @abstractmethod
    def clear(self, map_name: str) -> None:
        """Remove every key; of an array, set every value to zero."""

    @abstractmethod
    def drain(self, map_name: str, limit: int = 65536) -> list[bytes]:
        """What lies in a ring buffer, oldest first, at most ``limit``. Never waits."""

    @abstractmethod
    def lost(self, map_name: str) -> int:
        """How many records found no room in a ring buffer since it was loaded (``gf_ring_output``)."""

    @abstractmethod
    def losses(self) -> dict[int, int]:
        """The counters of ``gf_loss(id)`` that are not zero, since the object was loaded."""

    @abstractmethod
    def run_iter(self, link: Link) -> bytes:
        """All that an attached iterator writes, from its beginning."""

    @abstractmethod
    def costs(self) -> list[ProgramCost]:
        """What each loaded program cost so far."""

    @abstractmethod
    def close(self) -> None:
        """Detach and unload everything. May be called twice."""


class ProbeBackend(ABC):
    """A way to load probes."""

    name: str

    @property
    def version(self) -> str:
        """Of the library behind it, where ``available`` says nothing against it; empty if it has none."""
        return ""

    @abstractmethod
    def available(self) -> None:
        """Nothing if it can work here. Raises SourceUnavailable(reason, hint)."""

    @abstractmethod
    def load(
        self,
        name: str,
        *,
        programs: Sequence[str] | None = None,
        map_entries: Mapping[str, int] | None = None,
        constants: Mapping[str, int] | None = None,
    ) -> ProbeObject:
        """Load the object NAME of this package.

        ``programs``: only these. ``map_entries``: other sizes of maps (ring buffers in bytes). ``constants``: other
        values of ``GF_CONSTANT``. Raises SourceUnavailable if the kernel refuses, KeyError for names that it has not.
        """
