"""Probes compiled by bcc on this machine: for kernels without type information (BTF), and for users' own.

Nothing but the compiler is bcc's: maps, programs, uprobes and costs go through the same calls as on the libbpf side, so
both give the same numbers, and uprobe_multi is used where the kernel has it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Mapping, Sequence

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.bpf import bcc_attach, bcc_load, features, syscalls
from gpuflight.sources.bpf.base import Link, ProbeBackend, ProbeObject, ProgramCost, Uprobe
from gpuflight.sources.bpf.bcc_compiler import SOURCES, Compiled, CompileFailed, Compiler
from gpuflight.sources.bpf.loaded import LoadedObject
from gpuflight.sources.bpf.maps import Map
from gpuflight.sources.bpf.uprobes import attach_classic, attach_multi

_NEEDS = {27: "ring buffers (Linux 5.8)", 9: "LRU hash maps (Linux 4.10)", 10: "LRU hash maps (Linux 4.10)"}
"""Map types that came late, and with which kernel."""


class BccBackend(ProbeBackend):
    """Compiles probes with bcc. ``multi=False`` attaches uprobes one by one even where the kernel has better;
    ``cookies=False`` loads one program per cookie, as kernels before 5.15 need it."""

    name = "bcc"

    def __init__(self, *, multi: bool = True, cookies: bool = True, compiler: Compiler | None = None) -> None:
        self.compiler = compiler or Compiler()
        self._multi = multi
        self._cookies = cookies

    def available(self) -> None:
        features.require_rights()
        self.compiler.version()

    @property
    def version(self) -> str:
        return self.compiler.version()

    def load(
        self,
        name: str,
        *,
        programs: Sequence[str] | None = None,
        map_entries: Mapping[str, int] | None = None,
        constants: Mapping[str, int] | None = None,
    ) -> ProbeObject:
        try:
            source = (SOURCES / f"{name}.bpf.c").read_text("utf-8")
        except OSError as error:
            raise SourceUnavailable(
                f"the source of the probe {name} is missing from this installation: {error.strerror}",
                "reinstall gpuflight",
            ) from error
        try:
            return self.load_source(
                name, source, f"{name}.bpf.c", programs=programs, map_entries=map_entries, constants=constants
            )
        except CompileFailed as error:
            raise SourceUnavailable(
                f"bcc {self.compiler.version()} does not compile the probe {name}: {error}"
            ) from error

    def load_source(
        self,
        name: str,
        source: str,
        file: str,
        *,
        include: Sequence[str] = (),
        programs: Sequence[str] | None = None,
        map_entries: Mapping[str, int] | None = None,
        constants: Mapping[str, int] | None = None,
        sections: Mapping[str, str] | None = None,
    ) -> BccObject:
        """Load any C text written with ``gf.h``, or with bcc's own macros for maps.

        ``include``: folders of its headers. ``sections``: where programs are attached, instead of what the source says
        (``uprobe``, ``kprobe/FUNCTION``, ``raw_tp/EVENT``, ``tracepoint/GROUP/EVENT``). Raises CompileFailed, KeyError
        and SourceUnavailable.
        """
        compiled = self.compile_source(source, file, include=include, constants=constants)
        why_classic = features.why_no_uprobe_multi() if self._multi else "switched off"
        if not self._has_cookies:
            why_classic = "the kernel has no cookies (Linux 5.15 has them)"
        return BccObject(name, compiled, programs, map_entries or {}, sections or {}, why_classic, self._has_cookies)

    def compile_source(
        self, source: str, file: str, *, include: Sequence[str] = (), constants: Mapping[str, int] | None = None
    ) -> Compiled:
        """Compile only, which needs no rights. Raises CompileFailed, SourceUnavailable."""
        return self.compiler.compile(
            source, file, include=include, values=constants, cookie_in_program=not self._has_cookies
        )

    @property
    def _has_cookies(self) -> bool:
        return self._cookies and bcc_load.has_cookies()


class BccObject(LoadedObject):
    """A compiled source in the kernel."""

    backend = "bcc"

    def __init__(
        self,
        name: str,
        compiled: Compiled,
        programs: Sequence[str] | None,
        map_entries: Mapping[str, int],
        sections: Mapping[str, str],
        why_classic: str,
        cookies: bool,
    ) -> None:
        super().__init__(name)
        self.why_classic = why_classic
        self.compiled = compiled
        self._cookies = cookies
        self._sections = {**dict.fromkeys(compiled.programs, "uprobe"), **compiled.sections, **sections}
        self._loaded: dict[tuple[str, int], int] = {}  # (program, cookie) → descriptor
        if missing := sorted(set(programs or ()) - set(compiled.programs)):
            raise KeyError(f"no program {', '.join(missing)} in {name}")
        if missing := sorted(set(map_entries) - set(compiled.maps)):
            raise KeyError(f"no map {', '.join(missing)} in {name}")
        _unlock_memory()
        try:
            self._make_maps(map_entries)
            for program in compiled.programs if programs is None else programs:
                self._load(program)
        except BaseException:
            self.close()
            raise
        self._count()

    def _make_maps(self, entries: Mapping[str, int]) -> None:
        self._references: dict[int, int] = {}
        for shape in self.compiled.maps.values():
            try:
                fd = bcc_load.create_map(shape, entries.get(shape.name))
            except OSError as error:
                hint = features.RIGHTS_HINT if error.errno == errno.EPERM else ""
                needs = (
                    f"; it needs {_NEEDS[shape.kind]}" if error.errno == errno.EINVAL and shape.kind in _NEEDS else ""
                )
                raise SourceUnavailable(
                    f"the kernel refuses the map {shape.name} of the probe {self.name}: {error.strerror}{needs}", hint
                ) from error
            self._references[shape.reference] = fd
            self._maps[shape.name] = Map(fd)

    def _load(self, program: str, cookie: int = 0) -> int:
        """The descriptor of a program, loaded at most once for each cookie that it has to hold itself."""
        key = (program, 0 if self._cookies else cookie)
        known = self._loaded.get(key)
        if known is not None:
            return known
        instructions = bcc_load.link(self.compiled.programs[program], self._references, cookie)
        section = self._sections[program].partition("/")[0]
        kind = {"raw_tp": bcc_load.RAW_TRACEPOINT, "tracepoint": bcc_load.TRACEPOINT}.get(section, bcc_load.KPROBE)
        attach_type = syscalls.UPROBE_MULTI if section in ("uprobe", "uretprobe") and not self.why_classic else 0
        try:
            fd = bcc_load.load_program(program, kind, instructions, attach_type)
        except OSError as error:
            reason = error.reason if isinstance(error, bcc_load.Rejected) else error.strerror
            hint = features.RIGHTS_HINT if error.errno == errno.EPERM else ""
            raise SourceUnavailable(
                f"the kernel refuses the program {program} of the probe {self.name}: {reason}", hint
            ) from error
        self._loaded[key] = fd
        return fd

    def attach_uprobes(self, program: str, uprobes: Sequence[Uprobe], pid: int = 0) -> Link:
        if program not in self.compiled.programs:
            raise KeyError(program)
        link: Link
        if not self._cookies:
            link = bcc_attach.attach_without_cookies(lambda cookie: self._load(program, cookie), uprobes, pid)
        else:
            attach = attach_classic if self.why_classic else attach_multi
            link = attach(self._load(program), uprobes, pid)
        self._keep(link)
        return link

    def attach(self, program: str) -> Link:
        link = bcc_attach.attach_section(self._load(program), self._sections[program])
        self._keep(link)
        return link

    def run_iter(self, link: Link) -> bytes:
        raise SourceUnavailable("iterators need a kernel with type information (BTF) and the backend libbpf")

    def costs(self) -> list[ProgramCost]:
        total: dict[str, ProgramCost] = {}
        for cost in super().costs():  # one for each cookie where the kernel has none
            known = total.setdefault(cost.program, cost)
            if known is not cost and known.run_count is not None:
                known.run_count += cost.run_count or 0
                known.run_time_ns = (known.run_time_ns or 0) + (cost.run_time_ns or 0)
                known.missed_count = (known.missed_count or 0) + (cost.missed_count or 0)
        return list(total.values())

    def _program_fds(self) -> list[tuple[str, int]]:
        return [(program, fd) for (program, _), fd in self._loaded.items()]

    def close(self) -> None:
        self.closed = True
        self._detach()
        for fd in (*self._loaded.values(), *(known.fd for known in self._maps.values())):
            os.close(fd)
        self._loaded, self._maps = {}, {}


def _unlock_memory() -> None:
    """Before 5.11 maps count against RLIMIT_MEMLOCK; later kernels do not care whether this succeeds."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
