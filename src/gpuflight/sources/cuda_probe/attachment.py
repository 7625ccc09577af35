"""Hooking one file: which program of the kernel side goes to which function, and leaving launches alone for a time."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from gpuflight.sources.bpf.base import Link, ProbeObject, Uprobe
from gpuflight.sources.cuda_probe.cookies import Class
from gpuflight.sources.cuda_probe.functions import API_NUMBERS, SYMBOLS, Layer
from gpuflight.sources.cuda_probe.symbols import Found

_LAUNCHES = {Class.LAUNCH, Class.LAUNCH_CONFIG, Class.LAUNCH_GRAPH}


class Attachment:
    """One hooked file.

    ``number`` is its key in ``CudaRows.hits``. ``found`` says which functions it has; ``attached`` and ``failed``
    (symbol, reason) what became of them. Launches can be left alone while all else goes on: ``pause_launches``; spans
    then say nothing, as launches that open one are not seen.
    """

    def __init__(
        self, probe: ProbeObject, path: str, layer: Layer, number: int, found: Found, pid: int, *, launch_codes: bool
    ) -> None:
        self.path = path
        self.layer: Layer = layer
        self.number = number
        self.found = found
        self.pid = pid
        self.attached: list[str] = []
        self.failed: list[tuple[str, str]] = []
        self._probe = probe
        self._links: list[Link] = []
        self._launch_links: list[Link] = []
        self._launches, self._others, self._returns = self._plan(launch_codes=launch_codes)
        try:
            for program, uprobes in self._returns.items():  # first, so that no call is kept whose return is not seen
                self._links.append(self._attach(program, uprobes, count=False))
            for program, uprobes in self._others.items():
                self._links.append(self._attach(program, uprobes))
            self.resume_launches()
        except BaseException:
            self.close()
            raise

    def _plan(self, *, launch_codes: bool) -> tuple[dict[str, list[Uprobe]], ...]:
        launches: dict[str, list[Uprobe]] = {}
        others: dict[str, list[Uprobe]] = {}
        returns: dict[str, list[Uprobe]] = {}
        for place in self.found.places:
            function, per_thread = SYMBOLS[self.layer][place.symbol]
            api = API_NUMBERS[self.layer, function.name]
            cookie = function.cookie(api, self.layer, per_thread=per_thread, file_number=self.number)
            entry = Uprobe(self.path, place.offset, cookie, symbol=place.symbol)
            at_return = Uprobe(self.path, place.offset, cookie, ret=True, symbol=place.symbol)
            if function.kind in _LAUNCHES:
                launches.setdefault("cuda_launch", []).append(entry)
                if launch_codes:
                    returns.setdefault("cuda_launch_return", []).append(at_return)
            elif function.kind is Class.ENVIRONMENT:
                others.setdefault("cuda_environment", []).append(entry)
            else:
                kind = "nccl" if self.layer == "nccl" else "cuda"
                others.setdefault(f"{kind}_call", []).append(entry)
                if function.kind is not Class.REGISTER:
                    returns.setdefault(f"{kind}_return", []).append(at_return)
        return launches, others, returns

    def _attach(self, program: str, uprobes: list[Uprobe], *, count: bool = True) -> Link:
        link = self._probe.attach_uprobes(program, uprobes, self.pid)
        if count:
            self.attached += [uprobe.symbol for uprobe in link.attached]
        self.failed += [(uprobe.symbol, reason) for uprobe, reason in link.failed]
        return link

    @property
    def launches_hooked(self) -> bool:
        """Whether launches are counted at present."""
        return bool(self._launch_links)

    def pause_launches(self) -> None:
        """Leave launches alone: they cost nothing until ``resume_launches``. May be called twice."""
        _close(self._launch_links)

    def resume_launches(self) -> None:
        """Count launches again. May be called twice."""
        if self._launch_links:
            return
        first = not any(symbol in self.attached for symbol in self._symbols(self._launches))
        for program, uprobes in self._launches.items():
            self._launch_links.append(self._attach(program, uprobes, count=first))

    @staticmethod
    def _symbols(planned: dict[str, list[Uprobe]]) -> Iterable[str]:
        return (uprobe.symbol for uprobes in planned.values() for uprobe in uprobes)

    def close(self) -> None:
        """Hook nothing in this file any more. May be called twice."""
        self._links += self._launch_links
        self._launch_links.clear()
        _close(self._links)


def _close(links: list[Link]) -> None:
    """All at a time: the kernel takes 40 ms over each, waiting for programs that run."""
    threads = [threading.Thread(target=link.close, name="gpuflight-detach") for link in links]
    links.clear()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
