"""World.probes: opens probes on the best backend there is, and puts the tape under what they answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.bpf.base import ProbeBackend, ProbeObject
from gpuflight.sources.bpf.capabilities import Capabilities
from gpuflight.sources.bpf.taped import SOURCE, Opened, TapedObject, decode
from gpuflight.sources.recording import Tape

BackendChoice = Literal["auto", "libbpf", "bcc", "off"]


class Probes:
    """The probes of one host. For several threads at a time; a ProbeObject is for one."""

    def __init__(
        self,
        tape: Tape | None = None,
        *,
        backend: BackendChoice = "auto",
        own_cost: bool = True,
        backends: Sequence[ProbeBackend] | None = None,
    ) -> None:
        """``own_cost``: have the kernel count what probes cost. ``backends``: instead of our own, best first."""
        self._tape = tape if tape is not None else Tape()
        self._choice = backend
        self._own_cost = own_cost
        self._backends = backends
        self._lock = threading.Lock()
        self._open: dict[str, ProbeObject] = {}  # by the name it has in a recording
        self._round = 0

    @property
    def tape(self) -> Tape:
        """What answers are kept on, or come from."""
        return self._tape

    @property
    def replaying(self) -> bool:
        """Whether nothing may be loaded, and answers come from a recording."""
        return self._tape.mode == "replay"

    def begin_round(self, number: int) -> None:
        """Ring buffers of a recording hold what was drained in each round."""
        self._round = number

    def open(
        self,
        name: str,
        *,
        programs: Sequence[str] | None = None,
        map_entries: Mapping[str, int] | None = None,
        constants: Mapping[str, int] | None = None,
    ) -> ProbeObject:
        """Load the object NAME (see ``ProbeBackend.load``); close it, or the world does.

        Raises SourceUnavailable with one reason and one hint, KeyError for programs, maps or constants it has not.
        """
        return self.open_by(name, lambda: self._load(name, programs, map_entries, constants))

    def open_by(self, name: str, load: Callable[[], ProbeObject]) -> ProbeObject:
        """As ``open``, for a probe not of this package. Raises what ``load`` raises; a replay does not call it."""
        with self._lock:
            key = self._free_key(name)
            if self._tape.mode == "live":
                loaded = load()
            else:
                inner: list[ProbeObject] = []

                def live() -> bytes:
                    inner.append(load())
                    return msgspec.msgpack.encode(Opened(inner[0].backend, inner[0].why_classic))

                opened = decode(self._tape.ask(SOURCE, f"open {key}", live), Opened)
                loaded = TapedObject(name, key, opened, self._tape, inner[0] if inner else None, lambda: self._round)
            self._open[key] = loaded
            return loaded

    def _free_key(self, name: str) -> str:
        """``cuda``, ``cuda#2``: the first that no open object of this world has, so that a replay finds the same."""
        number, key = 1, name
        while (known := self._open.get(key)) is not None and not known.closed:
            number += 1
            key = f"{name}#{number}"
        return key

    def _load(
        self,
        name: str,
        programs: Sequence[str] | None,
        map_entries: Mapping[str, int] | None,
        constants: Mapping[str, int] | None,
    ) -> ProbeObject:
        from gpuflight.sources.bpf.costs import STATISTICS

        STATISTICS.wanted = self._own_cost
        refused: SourceUnavailable | None = None
        for backend in self.backends():
            try:
                backend.available()
                return backend.load(name, programs=programs, map_entries=map_entries, constants=constants)
            except SourceUnavailable as error:
                refused = refused or error  # what the best one misses is what the user should get
        raise refused or SourceUnavailable("probes are switched off", "set probes.backend to auto")

    def backends(self) -> list[ProbeBackend]:
        """Those that the settings allow, best first."""
        if self._backends is not None:
            return list(self._backends)
        chosen: list[ProbeBackend] = []
        if self._choice in ("auto", "libbpf"):
            from gpuflight.sources.bpf.libbpf import LibbpfBackend

            chosen.append(LibbpfBackend())
        if self._choice in ("auto", "bcc"):
            from gpuflight.sources.bpf.bcc_backend import BccBackend

            chosen.append(BccBackend())
        return chosen

    def capabilities(self) -> Capabilities:
        """What probes can do here, and why not more. Raises SourceUnavailable if a recording does not say."""

        def live() -> bytes:
            from gpuflight.sources.bpf.capabilities import find_capabilities
            from gpuflight.sources.bpf.costs import STATISTICS

            STATISTICS.wanted = self._own_cost
            return msgspec.msgpack.encode(find_capabilities(self.backends()))

        return decode(self._tape.ask(SOURCE, "capabilities", live), Capabilities)

    def close(self) -> None:
        """Detach and unload everything. May be called twice."""
        with self._lock:
            for loaded in self._open.values():
                loaded.close()
            self._open.clear()
