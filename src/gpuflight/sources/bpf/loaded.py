"""A probe in the kernel, by the descriptors of its maps and programs: all that does not depend on who loaded it."""

from __future__ import annotations

from msgspec import Struct

from gpuflight.sources.bpf.base import Link, ProbeObject, ProgramCost
from gpuflight.sources.bpf.costs import STATISTICS, program_cost
from gpuflight.sources.bpf.maps import ARRAYS, HASH, PER_CPU, PERCPU_HASH, Map, possible_cpus
from gpuflight.sources.bpf.ringbuf import RingBuffer
from gpuflight.sources.bpf.uprobes import together


class Shape(Struct, frozen=True):
    """What a map is: bytes of a key and of one value, most entries, and its type as the kernel numbers it."""

    key_bytes: int
    value_bytes: int
    entries: int
    kind: int

    @property
    def per_cpu(self) -> bool:
        """Whether it holds a value for each CPU."""
        return self.kind in PER_CPU

    @property
    def keyed(self) -> bool:
        """Whether keys come and go, as in hash maps; an array has all of them always."""
        return self.kind not in ARRAYS

    @property
    def grows(self) -> bool:
        """Whether keys are added until it is full: neither an array, nor one that drops old keys."""
        return self.kind in (HASH, PERCPU_HASH)


class LoadedObject(ProbeObject):
    """Reads maps, drains ring buffers, asks for costs. Its maker fills in maps and programs, calls ``_count``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._links: list[Link] = []
        self._maps: dict[str, Map] = {}
        self._rings: dict[str, RingBuffer] = {}
        self._counted = False

    def read(self, map_name: str) -> list[tuple[bytes, bytes]]:
        return self._maps[map_name].items()

    def read_packed(self, map_name: str) -> tuple[bytes, bytes]:
        return self._maps[map_name].packed()

    def lookup(self, map_name: str, key: bytes) -> bytes | None:
        return self._maps[map_name].lookup(key)

    def update(self, map_name: str, key: bytes, value: bytes) -> None:
        self._maps[map_name].update(key, value)

    def delete(self, map_name: str, key: bytes) -> bool:
        return self._maps[map_name].delete(key)

    def clear(self, map_name: str) -> None:
        self._maps[map_name].clear()

    def drain(self, map_name: str, limit: int = 65536) -> list[bytes]:
        ring = self._rings.get(map_name)
        if ring is None:
            known = self._maps[map_name]
            ring = self._rings[map_name] = RingBuffer(known.fd, known.max_entries)
        return ring.drain(limit)

    def lost(self, map_name: str) -> int:
        return sum_of_cpus(self._maps[f"{map_name}_lost"].lookup(bytes(4)) or b"")

    def losses(self) -> dict[int, int]:
        counters = {int.from_bytes(key, "little"): sum_of_cpus(value) for key, value in self.read("gf_losses")}
        return {which: count for which, count in counters.items() if count}

    def costs(self) -> list[ProgramCost]:
        counting = STATISTICS.counting
        return [program_cost(name, fd, counting) for name, fd in self._program_fds()]

    def shapes(self) -> dict[str, Shape]:
        """Every map of it."""
        found = {}
        for name, known in self._maps.items():
            size = known.value_size // possible_cpus() if known.type in PER_CPU else known.value_size
            found[name] = Shape(known.key_size, size, known.max_entries, known.type)
        return found

    def _keep(self, link: Link) -> None:
        """Remember a link until it is closed: whoever attaches and detaches for years leaves nothing behind."""
        self._links = [known for known in self._links if not known.closed]
        self._links.append(link)

    def _program_fds(self) -> list[tuple[str, int]]:
        """Name and descriptor of every program."""
        raise NotImplementedError

    def _count(self) -> None:
        """Have the kernel count what the programs cost, from now until ``_detach``."""
        self._counted = True
        STATISTICS.start()

    def _detach(self) -> None:
        """Links, ring buffers and counting end. May be called twice."""
        together([link.close for link in self._links])
        for ring in self._rings.values():
            ring.close()
        self._links, self._rings = [], {}
        if self._counted:
            self._counted = False
            STATISTICS.stop()


def sum_of_cpus(value: bytes) -> int:
    """The sum of a per-CPU counter of 8 bytes."""
    return sum(int.from_bytes(value[at : at + 8], "little") for at in range(0, len(value), 8))
