"""Users' own probes: found in their folder, loaded, attached. What their maps mean is the collector's business."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec import Struct

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.bpf.base import ProbeObject, Uprobe
from gpuflight.sources.bpf.loaded import Shape
from gpuflight.sources.bpf.taped import decode
from gpuflight.sources.bpf.toml_lines import TomlLines
from gpuflight.sources.bpf.user_probe_everywhere import Everywhere, Sweep, sweep
from gpuflight.sources.bpf.user_probe_folder import Found, Unsafe, read_object, read_text, scan_folder
from gpuflight.sources.bpf.user_probe_spec import Attach, MapSpec, ProbeMistake, Spec, parse_spec

if TYPE_CHECKING:
    from gpuflight.sources.bpf.bcc_backend import BccBackend
    from gpuflight.sources.bpf.bcc_compiler import MapShape
    from gpuflight.sources.bpf.libbpf import LibbpfBackend
    from gpuflight.sources.bpf.loaded import LoadedObject
    from gpuflight.sources.bpf.probes import Probes

SOURCE = "user_probes"
"""The name of what this answers in recordings."""

_WITH_METRICS = {1, 2, 5, 6, 9, 10}
"""Types of maps: hash and array, per CPU, and hash maps that drop what was used least recently."""

T = TypeVar("T")


class UserProbe(Struct):
    """One that is attached. ``attached``: how many places; ``missing``: optional ones that are not there, and why."""

    name: str
    spec: Spec
    loaded: ProbeObject
    shapes: dict[str, Shape]
    attached: int = 0
    missing: list[str] = msgspec.field(default_factory=list)
    everywhere: list[Everywhere] = msgspec.field(default_factory=list)

    def refresh(self) -> None:
        """Look again for files of the places that are probed everywhere. Raises SourceUnavailable."""
        for each in self.everywhere:
            each.refresh(self.loaded)

    def close(self) -> None:
        """Detach and unload it."""
        self.loaded.close()


class UserProbes:
    """The probes of one folder. ``folder`` None: of a recording only."""

    def __init__(self, folder: str | None, probes: Probes) -> None:
        self._folder = folder
        self._probes = probes
        self._tape = probes.tape

    def scan(self) -> list[Found]:
        """What lies in the folder now. Raises SourceUnavailable(reason, hint) if it cannot or may not be used."""

        def live() -> list[Found]:
            if self._folder is None:
                raise SourceUnavailable("no folder with probes is set", "name it in collectors.user_probes.folder")
            return scan_folder(self._folder)

        return self._ask("folder", live, list[Found])

    def load(self, found: Found, spec: Spec) -> UserProbe:
        """Load and attach one. Raises SourceUnavailable: the reason is one line that names the file."""
        shapes: dict[str, Shape] = {}

        def live() -> ProbeObject:
            loaded = self._load(found, spec)
            shapes.update(loaded.shapes())
            return loaded

        loaded = self._probes.open_by(f"user/{found.name}", live)
        try:
            shapes = self._ask(f"maps {found.name}", lambda: shapes, dict[str, Shape])
            probe = UserProbe(found.name, spec, loaded, shapes)
            lines = TomlLines(found.toml)
            for number, attach in enumerate(spec.attach):
                if attach.everywhere:
                    probe.everywhere.append(Everywhere(attach, partial(self._sweep, attach)))
                else:
                    self._attach(probe, found, attach, lines.of(("attach", number, attach.target[0])))
            probe.refresh()
        except BaseException:
            loaded.close()
            raise
        return probe

    def _attach(self, probe: UserProbe, found: Found, attach: Attach, line: int) -> None:
        kind, text = attach.target
        try:
            if kind in ("uprobe", "uretprobe"):
                path, offset = self._place(attach)
                uprobe = Uprobe(path, offset, attach.cookie, kind == "uretprobe", attach.place.symbol)
                link = probe.loaded.attach_uprobes(attach.program, [uprobe], attach.pid)
                if link.failed:
                    raise SourceUnavailable(f"{text} cannot be probed: {link.failed[0][1]}")
            else:
                probe.loaded.attach(attach.program)
        except SourceUnavailable as error:
            if attach.optional:
                probe.missing.append(str(error))
                return
            raise SourceUnavailable(f"{found.file}:{line}: {error.reason}", error.hint) from None
        probe.attached += 1

    def _sweep(self, attach: Attach) -> Sweep:
        return self._ask(f"everywhere {attach.target[1]}", lambda: sweep(attach.place), Sweep)

    def _place(self, attach: Attach) -> tuple[str, int]:
        def live() -> tuple[str, int]:
            from gpuflight.sources.bpf.user_probe_places import NoPlace, find_place

            try:
                return find_place(attach.place, attach.pid)
            except NoPlace as error:
                raise SourceUnavailable(str(error), error.hint) from None

        return self._ask(f"place {attach.pid} {attach.target[1]}", live, tuple[str, int])

    def _ask(self, key: str, live: Callable[[], T], kind: type[T]) -> T:
        if self._tape.mode == "live":
            return live()
        return decode(self._tape.ask(SOURCE, key, lambda: msgspec.msgpack.encode(live())), kind)

    def _load(self, found: Found, spec: Spec) -> LoadedObject:
        assert self._folder is not None  # noqa: S101 - a recording has no folder and is asked nothing live
        try:
            return load_user_probe(os.path.abspath(os.path.expanduser(self._folder)), found, spec, self._probes)
        except ProbeMistake as error:
            raise SourceUnavailable(f"{error.where}: {error.what}", error.hint) from error


def load_user_probe(folder: str, found: Found, spec: Spec, probes: Probes) -> LoadedObject:
    """Load one probe, attach nothing. Raises ProbeMistake for what is wrong in its files, SourceUnavailable."""
    path = os.path.join(folder, found.code)
    try:
        if found.code.endswith(".o"):
            return _load_object(found, spec, read_object(path), probes)
        return _load_source(found, spec, read_text(path), folder, probes)
    except Unsafe as error:
        raise ProbeMistake(found.code, 0, f"it is not used: {error}") from None
    except OSError as error:
        raise ProbeMistake(found.code, 0, f"it cannot be read: {error.strerror}") from error


def _load_source(found: Found, spec: Spec, source: str, folder: str, probes: Probes) -> LoadedObject:
    backend = _bcc(probes)
    _compile(found, spec, source, folder, backend)  # before the question of rights: mistakes are worth more
    backend.available()
    return backend.load_source(
        found.name,
        source,
        found.code,
        include=[folder],
        programs=[attach.program for attach in spec.attach],
        map_entries=spec.entries,
        constants=spec.constants,
        sections=spec.sections,
    )


def check_source(folder: str, found: Found, spec: Spec, probes: Probes) -> list[str]:
    """Compile the C of a probe, and compare it with what the TOML says: the compiler's warnings. Needs no rights.

    Raises ProbeMistake, SourceUnavailable.
    """
    try:
        return _compile(found, spec, read_text(os.path.join(folder, found.code)), folder, _bcc(probes))
    except Unsafe as error:
        raise ProbeMistake(found.code, 0, f"it is not used: {error}") from None
    except OSError as error:
        raise ProbeMistake(found.code, 0, f"it cannot be read: {error.strerror}") from error


def _compile(found: Found, spec: Spec, source: str, folder: str, backend: BccBackend) -> list[str]:
    from gpuflight.sources.bpf.bcc_compiler import CompileFailed, CompilerDied

    try:
        compiled = backend.compile_source(source, found.code, include=[folder], constants=spec.constants)
    except CompileFailed as error:
        problem = error.problems[0]
        raise ProbeMistake(os.path.basename(problem.file), problem.line, problem.text, "correct the C") from error
    except CompilerDied as error:
        raise ProbeMistake(found.code, 0, error.reason, error.hint) from error
    shapes = {
        shape.name: Shape(shape.key_bytes, shape.value_bytes, shape.entries, shape.kind)
        for shape in compiled.maps.values()
    }
    check_spec(found, spec, compiled.programs, shapes)
    return [str(problem) for problem in compiled.warnings] + list(
        _vain_increments(found, source, compiled.maps.values())
    )


def _vain_increments(found: Found, source: str, maps: Iterable[MapShape]) -> Iterator[str]:
    """bcc's ``map.increment(key)`` silently does nothing for a key that an LRU or per-CPU map does not have."""
    for known in maps:
        if known.kind not in (5, 9, 10):
            continue
        for call in re.finditer(rf"\b{re.escape(known.name)}\s*\.\s*(?:atomic_)?increment\s*\(", source):
            line = source.count("\n", 0, call.start()) + 1
            yield (
                f"{found.code}:{line}: {known.name}.increment() does nothing for a new key of an LRU or per-CPU map"
                " (use lookup_or_try_init and add)"
            )


def _load_object(found: Found, spec: Spec, content: bytes, probes: Probes) -> LoadedObject:
    backend = _libbpf(probes)
    backend.available()
    lines = TomlLines(found.toml)
    try:
        loaded = backend.load_content(
            found.name,
            content,
            programs=[attach.program for attach in spec.attach],
            map_entries=spec.entries,
            constants=spec.constants,
        )
    except (KeyError, OSError) as error:
        what = error.args[0] if isinstance(error, KeyError) else error.strerror
        raise ProbeMistake(found.file, 0, f"{found.code} does not fit: {what}", "compile it again") from error
    try:
        check_spec(found, spec, [attach.program for attach in spec.attach], loaded.shapes())
        for number, attach in enumerate(spec.attach):
            section = loaded.section(attach.program)
            wanted = attach.section
            same = section.startswith(("uprobe", "uretprobe")) if wanted.endswith("probe") else section == wanted
            if wanted and not same:
                raise ProbeMistake(
                    found.file,
                    lines.of(("attach", number)),
                    f"{attach.program} of {found.code} was compiled for {section}, not for {wanted}",
                    "compile it again, or correct the target",
                )
    except BaseException:
        loaded.close()
        raise
    return loaded


def check_spec(found: Found, spec: Spec, programs: Iterable[str], shapes: Mapping[str, Shape]) -> None:
    """Compare a TOML with the code beside it. Raises ProbeMistake."""
    lines = TomlLines(found.toml)
    known = list(programs)
    for number, attach in enumerate(spec.attach):
        if attach.program not in known:
            raise ProbeMistake(
                found.file,
                lines.of(("attach", number, "program")),
                f"{found.code} has no program {attach.program}",
                _nearest(attach.program, known),
            )
    for number, described in enumerate(spec.maps):
        shape = shapes.get(described.name)
        if shape is None:
            names = [name for name in shapes if name != "gf_losses" and not name.startswith(".")]
            raise ProbeMistake(
                found.file,
                lines.of(("maps", number, "name")),
                f"{found.code} has no map {described.name}",
                _nearest(described.name, names),
            )
        _check_sizes(found, described, shape, lines, number)


def _check_sizes(found: Found, described: MapSpec, shape: Shape, lines: TomlLines, number: int) -> None:
    if shape.kind not in _WITH_METRICS:
        raise ProbeMistake(
            found.file,
            lines.of(("maps", number, "name")),
            f"the map {described.name} holds no sums",
            "metrics come from hash maps and arrays",
        )
    value = (described.value.size + 7) // 8 * 8 if shape.per_cpu else described.value.size
    stored = (shape.value_bytes + 7) // 8 * 8 if shape.per_cpu else shape.value_bytes
    for what, said, real in (("key", described.key.size, shape.key_bytes), ("value", value, stored)):
        if said != real:
            raise ProbeMistake(
                found.file,
                lines.of(("maps", number, what)),
                f"a {what} of the map {described.name} has {real} bytes in {found.code}, the fields have {said}",
                "write every field of the C struct, in its order",
            )


def read_spec(found: Found) -> Spec:
    """The meaning of what was found. Raises ProbeMistake, also for what was wrong with the files."""
    if found.mistake:
        raise ProbeMistake("", 0, found.mistake)
    return parse_spec(found.toml, found.file)


def claims(spec: Spec) -> list[tuple[str, str]]:
    """(kind of entity, metric) of all it gives: two probes must not give the same."""
    return [(described.entity, metric) for described in spec.maps for metric in described.metrics]


def _bcc(probes: Probes) -> BccBackend:
    from gpuflight.sources.bpf.bcc_backend import BccBackend

    for backend in probes.backends():
        if isinstance(backend, BccBackend):
            return backend
    raise SourceUnavailable(
        "a probe in C is compiled by bcc, which the settings exclude",
        "set probes.backend to auto, or compile the probe to a .bpf.o",
    )


def _libbpf(probes: Probes) -> LibbpfBackend:
    from gpuflight.sources.bpf.libbpf import LibbpfBackend

    for backend in probes.backends():
        if isinstance(backend, LibbpfBackend):
            return backend
    raise SourceUnavailable(
        "a compiled probe is loaded by libbpf, which the settings exclude",
        "set probes.backend to auto, or give the probe as C",
    )


def _nearest(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, 1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(names)) or 'none'}"
