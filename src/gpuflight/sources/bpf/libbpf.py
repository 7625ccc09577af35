"""Probes compiled long ago (CO-RE), loaded through libbpf: no compiler, no headers, a few milliseconds."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import re
from collections.abc import Mapping, Sequence

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.bpf import bcc_load, features, syscalls
from gpuflight.sources.bpf.base import Link, ProbeBackend, ProbeObject, Uprobe
from gpuflight.sources.bpf.library import LibBpf, load_library
from gpuflight.sources.bpf.loaded import LoadedObject
from gpuflight.sources.bpf.maps import Map
from gpuflight.sources.bpf.objects import constants_of, read_object
from gpuflight.sources.bpf.uprobes import attach_classic, attach_multi
from gpuflight.sources.bpf.verifier import last_words, log_among


class LibbpfBackend(ProbeBackend):
    """Loads the objects of this package. ``multi=False``: uprobes one by one even where the kernel has better."""

    name = "libbpf"

    def __init__(self, *, multi: bool = True, folder: str | None = None) -> None:
        self._multi = multi
        self._folder = folder

    def available(self) -> None:
        """Without BTF of the kernel too: a probe that only looks at arguments of functions does not need it."""
        load_library()
        features.require_rights()

    @property
    def version(self) -> str:
        return load_library().version

    def load(
        self,
        name: str,
        *,
        programs: Sequence[str] | None = None,
        map_entries: Mapping[str, int] | None = None,
        constants: Mapping[str, int] | None = None,
    ) -> ProbeObject:
        content = read_object(name, platform.machine(), self._folder)
        return self.load_content(name, content, programs=programs, map_entries=map_entries, constants=constants)

    def load_content(
        self,
        name: str,
        content: bytes,
        *,
        programs: Sequence[str] | None = None,
        map_entries: Mapping[str, int] | None = None,
        constants: Mapping[str, int] | None = None,
    ) -> LibbpfObject:
        """As ``load``, of an object that was compiled elsewhere."""
        why_classic = features.why_no_uprobe_multi() if self._multi else "switched off"
        return LibbpfObject(load_library(), name, content, programs, map_entries or {}, constants or {}, why_classic)


class LibbpfLink(Link):
    """A link that libbpf made."""

    def __init__(self, library: LibBpf, handle: int) -> None:
        self._library = library
        self._handle = handle
        self.attached: list[Uprobe] = []
        self.failed: list[tuple[Uprobe, str]] = []

    @property
    def fd(self) -> int:
        return int(self._library.bpf_link__fd(self._handle))

    def close(self) -> None:
        handle, self._handle = self._handle, 0
        self.closed = True
        if handle:
            self._library.bpf_link__destroy(handle)


class LibbpfObject(LoadedObject):
    """An object in the kernel."""

    backend = "libbpf"

    def __init__(
        self,
        library: LibBpf,
        name: str,
        content: bytes,
        programs: Sequence[str] | None,
        map_entries: Mapping[str, int],
        constants: Mapping[str, int],
        why_classic: str,
    ) -> None:
        super().__init__(name)
        self.why_classic = why_classic
        self._library = library
        with library.listening() as said:
            self._handle = library.bpf_object__open_mem(content, len(content), None)
            if not self._handle:
                raise _refused(name, ctypes.get_errno(), said)
            try:
                self._programs = self._choose(programs)
                self._resize(map_entries)
                self._set(constants, content)
                error = library.bpf_object__load(self._handle)
                if error:
                    raise _refused(name, -error, said)
                self._maps = {
                    map_name: Map(library.bpf_map__fd(handle)) for map_name, handle in self._handles_of_maps().items()
                }
            except BaseException:
                library.bpf_object__close(self._handle)
                raise
        library.give_back_memory()
        self._count()

    def _choose(self, wanted: Sequence[str] | None) -> dict[str, int]:
        library = self._library
        chosen: dict[str, int] = {}
        program = library.bpf_object__next_program(self._handle, None)
        while program:
            name = library.bpf_program__name(program).decode()
            if wanted is None or name in wanted:
                chosen[name] = program
                section = library.bpf_program__section_name(program).decode().partition("/")[0]
                if section in ("uprobe", "uretprobe"):
                    self._prepare_uprobe(program)
            else:
                library.bpf_program__set_autoload(program, False)
            program = library.bpf_object__next_program(self._handle, program)
        if missing := sorted(set(wanted or ()) - set(chosen)):
            raise KeyError(f"no program {', '.join(missing)} in {self.name}")
        return chosen

    def section(self, program: str) -> str:
        """What the source says of where a program belongs: ``uprobe``, ``raw_tp/EVENT``… Raises KeyError."""
        return str(self._library.bpf_program__section_name(self._programs[program]).decode())

    def _prepare_uprobe(self, program: int) -> None:
        if not self.why_classic:
            # libbpf before 1.3 does not know of uprobe_multi, but hands on what it is told.
            self._library.bpf_program__set_expected_attach_type(program, syscalls.UPROBE_MULTI)
        elif not bcc_load.has_cookies():
            raise SourceUnavailable(
                "the kernel does not tell uprobes which symbol they are at (Linux 5.15 does)",
                "use a newer kernel, or install bcc (Debian: python3-bpfcc)",
            )

    def _handles_of_maps(self) -> dict[str, int]:
        library = self._library
        found: dict[str, int] = {}
        handle = library.bpf_object__next_map(self._handle, None)
        while handle:
            found[library.bpf_map__name(handle).decode()] = handle
            handle = library.bpf_object__next_map(self._handle, handle)
        return found

    def _resize(self, entries: Mapping[str, int]) -> None:
        handles = self._handles_of_maps()
        for name, count in entries.items():
            error = self._library.bpf_map__set_max_entries(handles[name], count)
            if error:
                raise OSError(-error, f"{name} cannot have {count} entries: {os.strerror(-error)}")

    def _set(self, constants: Mapping[str, int], content: bytes) -> None:
        if not constants:
            return
        known = constants_of(content)
        places = {name: known[name] for name in constants}
        # libbpf calls the map after the object and the section; an object from memory has no name of its own.
        handle = next(at for name, at in self._handles_of_maps().items() if name.endswith(".rodata"))
        size = ctypes.c_size_t()
        start = self._library.bpf_map__initial_value(handle, ctypes.byref(size))
        for name, value in constants.items():
            offset, width = places[name]
            if offset + width > size.value:
                raise KeyError(name)
            mask = (1 << 8 * width) - 1
            ctypes.memmove(start + offset, (value & mask).to_bytes(width, "little"), width)

    def attach_uprobes(self, program: str, uprobes: Sequence[Uprobe], pid: int = 0) -> Link:
        attach = attach_classic if self.why_classic else attach_multi
        link = attach(self._library.bpf_program__fd(self._programs[program]), uprobes, pid)
        self._keep(link)
        return link

    def attach(self, program: str) -> Link:
        handle = self._programs[program]
        section = self._library.bpf_program__section_name(handle).decode()
        with self._library.listening() as said:
            made = self._library.bpf_program__attach(handle)
            code = ctypes.get_errno()
        if not made:
            hint = ""
            if section.startswith("tracepoint/") and features.tracefs() is None:
                said[:] = ["tracefs is not mounted"]
                hint = features.TRACEFS_HINT
            raise SourceUnavailable(
                f"{section} cannot be attached: {said[-1] if said else os.strerror(code)}", hint or _LIMITS
            )
        link = LibbpfLink(self._library, made)
        self._keep(link)
        return link

    def run_iter(self, link: Link) -> bytes:
        assert isinstance(link, LibbpfLink)  # noqa: S101
        with open(syscalls.create_iter(link.fd), "rb", buffering=0) as file:
            return file.read()

    def _program_fds(self) -> list[tuple[str, int]]:
        return [(name, self._library.bpf_program__fd(handle)) for name, handle in self._programs.items()]

    def close(self) -> None:
        self.closed = True
        if not self._handle:
            return
        self._detach()
        handle, self._handle = self._handle, 0
        self._library.bpf_object__close(handle)
        self._programs, self._maps = {}, {}


_LIMITS = "see dmesg, and the limits of this process (ulimit -n)"
_NO_EVENT = re.compile(r"failed to find kernel BTF type ID of '(\w+)'")


def _refused(name: str, code: int, said: Sequence[str]) -> SourceUnavailable:
    """Why an object cannot be loaded: the kernel's word, and of the verifier's many the last that mean something."""
    missing = next((match[1] for line in said if (match := _NO_EVENT.search(line))), "")
    if missing and not any("vmlinux BTF" in line for line in said):
        return SourceUnavailable(f"this kernel has no event {missing}, which the probe {name} needs", "a newer kernel")
    if any("vmlinux BTF" in line or "kernel BTF" in line for line in said):
        return SourceUnavailable(f"the probe {name} needs type information (BTF) of the kernel", features.BTF_HINT)
    if log := log_among(list(said)):
        return SourceUnavailable(f"the kernel refuses the probe {name}: {last_words(log)}", "report it: it is a defect")
    lines = [line.strip() for line in said if line.strip() and not line.startswith("--")]
    detail = ""
    with contextlib.suppress(StopIteration):
        detail = next(line for line in reversed(lines) if "failed" in line or "invalid" in line or "unknown" in line)
    hint = features.RIGHTS_HINT if code in (errno.EPERM, errno.EACCES) else _LIMITS
    return SourceUnavailable(
        f"the kernel refuses the probe {name}: {os.strerror(code)}" + (f" ({detail})" if detail else ""), hint
    )
