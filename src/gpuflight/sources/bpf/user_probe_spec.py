"""The TOML beside a user's probe: where it is attached, and what its maps mean. Its manual is docs/user-probes.md."""

from __future__ import annotations

import difflib
import re
import tomllib
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from gpuflight.errors import GpuflightError
from gpuflight.sources.bpf.toml_lines import TomlLines
from gpuflight.sources.bpf.user_probe_layout import Layout, LayoutError

ENTITIES = {"Process": "pid", "Thread": "tid", "Disk": "dev", "Nic": "ifindex", "Numa": "node", "Host": ""}
"""Kinds of entity that a map can be about → the field of its key that says which one."""

UNITS = (
    "_bytes_per_s", "_bits_per_s", "_per_s", "_bytes", "_count", "_pct", "_ns", "_us", "_ms", "_s", "_cores", "_hz",
    "_celsius", "_watts", "_joules",
)  # fmt: skip
"""How the name of a metric ends."""

_NAME = re.compile(r"[a-z][a-z0-9_]{0,79}")
_PLACE = re.compile(r"(?P<file>.+):(?:(?P<symbol>[^:+]+?)(?:\+(?P<plus>0x[0-9a-fA-F]+|\d+))?)")
_OFFSET = re.compile(r"0x[0-9a-fA-F]+|\d+")
_WHERE = re.compile(r" - at `\$?([^`]*)`$")
_STEP = re.compile(r"\.([A-Za-z_]\w*)|\[(\d+)\]")


_WORDS = (
    ("`str`", "a text"),
    ("`int`", "a whole number"),
    ("`float`", "a number"),
    ("`bool`", "true or false"),
    ("`array`", "a list"),
    ("`object`", "a table"),
    ("Expected", "expected"),
)


class ProbeMistake(GpuflightError):
    """Something in a user's probe that cannot be used. The message is one line: file, line, what, what to do."""

    exit_code = 2

    def __init__(self, file: str, line: int, what: str, hint: str = "") -> None:
        self.where = f"{file}:{line}" if line else file
        super().__init__((f"{self.where}: " if file else "") + what + (f" ({hint})" if hint else ""))
        self.file = file
        self.line = line
        self.what = what
        self.hint = hint


class Place(Struct, frozen=True):
    """A place in a file: a symbol, ``plus`` bytes after its beginning, or an offset in the file."""

    file: str
    symbol: str = ""
    plus: int = 0
    offset: int = -1


class Attach(Struct, forbid_unknown_fields=True):
    """One ``[[attach]]``: a program, and at most one of the targets; without one, where its source says."""

    program: str
    uprobe: str = ""
    uretprobe: str = ""
    tracepoint: str = ""
    raw_tracepoint: str = ""
    kprobe: str = ""
    kretprobe: str = ""
    pid: int = 0
    cookie: int = 0
    optional: bool = False
    everywhere: bool = False

    @property
    def target(self) -> tuple[str, str]:
        """Kind and text of the target; ("", "") without one."""
        for kind in TARGETS:
            if text := getattr(self, kind):
                return kind, text
        return "", ""

    @property
    def section(self) -> str:
        """The target as a program's section says it; empty without one."""
        kind, text = self.target
        if kind in ("uprobe", "uretprobe", ""):
            return kind
        return f"{'raw_tp' if kind == 'raw_tracepoint' else kind}/{text}"

    @property
    def place(self) -> Place:
        """Of a uprobe or uretprobe. Raises ValueError."""
        return parse_place(self.target[1])


TARGETS = ("uprobe", "uretprobe", "tracepoint", "raw_tracepoint", "kprobe", "kretprobe")


class Metric(Struct, forbid_unknown_fields=True):
    """How one metric comes from the fields of a value: exactly one of rate, value, mean and quantile.

    ``rate``: increase of a field per second. ``value``: a field as it is. ``mean``: increase of the first field per
    increase of the second. ``quantile``: of a log2 histogram, the array ``of`` (slot n counts values below 2ⁿ⁺¹), over
    the last round: the upper bound of the slot. ``scale``: a factor.
    """

    rate: str = ""
    value: str = ""
    mean: list[str] = field(default_factory=list)
    quantile: float = 0.0
    of: str = ""
    scale: float = 1.0


class MapSpec(Struct):
    """One ``[[maps]]``: the meaning of a map, or of those of its keys that ``where`` chooses."""

    name: str
    entity: str
    id: str
    key: Layout
    value: Layout
    metrics: dict[str, Metric]
    where: dict[str, int]
    combine: Literal["sum", "max"]


class Spec(Struct):
    """What a TOML file says."""

    description: str
    attach: list[Attach]
    maps: list[MapSpec]
    constants: dict[str, int]
    entries: dict[str, int]
    losses: dict[int, str]

    @property
    def sections(self) -> dict[str, str]:
        """Program → section, where the TOML names a target."""
        return {attach.program: attach.section for attach in self.attach if attach.section}


class _RawMap(Struct, forbid_unknown_fields=True):
    name: str
    entity: str
    key: list[str]
    value: list[str]
    metrics: dict[str, dict[str, Any]]
    id: str = ""
    where: dict[str, int] = field(default_factory=dict)
    combine: Literal["sum", "max"] = "sum"
    entries: int = 0


class _Raw(Struct, forbid_unknown_fields=True):
    description: str
    attach: list[Attach]
    maps: list[_RawMap]
    constants: dict[str, int] = field(default_factory=dict)
    losses: dict[str, str] = field(default_factory=dict)


def parse_place(text: str) -> Place:
    """``FILE:SYMBOL``, ``FILE:SYMBOL+BYTES`` or ``FILE:OFFSET``. Raises ValueError."""
    found = _PLACE.fullmatch(text)
    if found is None:
        raise ValueError("write FILE:SYMBOL, FILE:SYMBOL+0x10 or FILE:0x1234")
    symbol = found["symbol"].strip()
    if _OFFSET.fullmatch(symbol):
        return Place(found["file"], offset=int(symbol, 0) + int(found["plus"] or "0", 0))
    return Place(found["file"], symbol, int(found["plus"] or "0", 0))


def parse_spec(text: str, file: str) -> Spec:
    """Read a TOML text; ``file`` is its name, for messages. Raises ProbeMistake with the first mistake in it."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at line (\d+), column \d+\)", str(error))
        what = str(error).partition(" (at ")[0]
        line = int(found[1]) if found else text.count("\n") + 1
        raise ProbeMistake(file, line, f"no TOML: {what[:1].lower()}{what[1:]}") from None
    return _Reader(text, file).read(data)


class _Reader:
    """One file on its way to a Spec."""

    def __init__(self, text: str, file: str) -> None:
        self._lines = TomlLines(text)
        self._file = file

    def _mistake(self, path: tuple[str | int, ...], what: str, hint: str = "") -> ProbeMistake:
        return ProbeMistake(self._file, self._lines.of(path), what, hint)

    def _convert(self, data: Any, kind: Any, path: tuple[str | int, ...]) -> Any:
        try:
            return msgspec.convert(data, kind)
        except msgspec.ValidationError as error:
            message = str(error)
            found = _WHERE.search(message)
            steps = [name or int(number) for name, number in _STEP.findall(found[1])] if found else []
            what = _WHERE.sub("", message)
            unknown = re.search(r"contains unknown field `(.+)`", what)
            hint = ""
            if unknown is not None:
                steps.append(unknown[1])
                close = difflib.get_close_matches(unknown[1], _field_names(kind), 1)
                what = f"there is no {unknown[1]}"
                hint = f"did you mean {close[0]}?" if close else "see docs/user-probes.md"
            missing = re.search(r"missing required field `(.+)`", what)
            if missing is not None:
                what = f"{missing[1]} is missing"
            raise self._mistake((*path, *steps), _readable(what), hint) from None

    def read(self, data: dict[str, Any]) -> Spec:
        raw: _Raw = self._convert(data, _Raw, ())
        if not raw.description.strip():
            raise self._mistake(("description",), "description is empty", "say in one line what the probe measures")
        if not raw.attach:
            raise self._mistake(("attach",), "nothing is attached", "add [[attach]]")
        if not raw.maps:
            raise self._mistake(("maps",), "no map is read", "add [[maps]]")
        for number, attach in enumerate(raw.attach):
            self._check_attach(attach, ("attach", number))
        sections: dict[str, str] = {}
        for number, attach in enumerate(raw.attach):
            if sections.setdefault(attach.program, attach.section) != attach.section:
                raise self._mistake(
                    ("attach", number, "program"),
                    f"{attach.program} has two targets of different kinds",
                    "write a program for each",
                )
        maps = [self._map(raw_map, ("maps", number)) for number, raw_map in enumerate(raw.maps)]
        entries = {raw_map.name: raw_map.entries for raw_map in raw.maps if raw_map.entries}
        self._check_names(maps)
        for which in raw.losses:
            if not re.fullmatch(r"\d|[12]\d|3[01]", which):
                raise self._mistake(("losses", which), f"gf_loss({which}) is not possible", "0 to 31 are")
        losses = {int(which): said for which, said in raw.losses.items()}
        return Spec(raw.description.strip(), raw.attach, maps, raw.constants, entries, losses)

    def _check_attach(self, attach: Attach, path: tuple[str | int, ...]) -> None:
        given = [kind for kind in TARGETS if getattr(attach, kind)]
        if len(given) > 1:
            raise self._mistake(
                (*path, given[1]), f"{' and '.join(given)} in one [[attach]]", "write an [[attach]] for each"
            )
        kind, text = attach.target
        if kind in ("uprobe", "uretprobe"):
            try:
                parse_place(text)
            except ValueError as error:
                raise self._mistake((*path, kind), f"{text!r} is no place in a file", str(error)) from None
        elif kind == "tracepoint" and not re.fullmatch(r"\w+/\w+", text):
            raise self._mistake(
                (*path, kind), f"{text!r} is no tracepoint", "write GROUP/EVENT, as in sched/sched_switch"
            )
        elif kind in ("raw_tracepoint", "kprobe", "kretprobe") and not re.fullmatch(r"[\w.]+", text):
            raise self._mistake((*path, kind), f"{text!r} is no name in the kernel", "write the name alone")
        if attach.everywhere and (attach.pid or kind not in ("uprobe", "uretprobe")):
            raise self._mistake(
                (*path, "everywhere"), "everywhere belongs to uprobe and uretprobe, without a pid", "choose one of them"
            )
        if attach.pid < 0 or (attach.pid and kind not in ("uprobe", "uretprobe")):
            raise self._mistake((*path, "pid"), "pid belongs to uprobe and uretprobe", "look at the pid in the program")

    def _map(self, raw: _RawMap, path: tuple[str | int, ...]) -> MapSpec:
        if raw.entity not in ENTITIES:
            close = difflib.get_close_matches(raw.entity, ENTITIES, 1, 0.4)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(ENTITIES)}"
            raise self._mistake((*path, "entity"), f"a map cannot be about {raw.entity!r}", hint)
        if not 0 <= raw.entries <= 1 << 24:
            raise self._mistake((*path, "entries"), f"{raw.entries} entries", "1 to 16777216 are possible")
        key, value = self._layout(raw.key, (*path, "key")), self._layout(raw.value, (*path, "value"))
        wanted = raw.id or ENTITIES[raw.entity]
        if wanted and (wanted not in key.fields or key.fields[wanted].array or not key.fields[wanted].length):
            raise self._mistake(
                (*path, "id" if raw.id else "key"),
                f"the key has no number {wanted}, which says which {raw.entity} is meant",
                f"name such a field {wanted}, or name it by id",
            )
        for name in raw.where:
            if name not in key.fields or key.fields[name].array:
                raise self._mistake((*path, "where", name), f"the key has no number {name}", "where looks at the key")
        if not raw.metrics:
            raise self._mistake((*path, "metrics"), f"the map {raw.name} gives no metric", "add [maps.metrics]")
        metrics = {}
        for name, given in raw.metrics.items():
            at = (*path, "metrics", name)
            metrics[name] = self._convert(given, Metric, at)
            self._check_metric(name, metrics[name], value, at)
        return MapSpec(raw.name, raw.entity, wanted, key, value, metrics, raw.where, raw.combine)

    def _layout(self, lines: list[str], path: tuple[str | int, ...]) -> Layout:
        if not lines:
            raise self._mistake(path, f"{path[-1]} has no fields", 'write them as in C: ["u32 pid"]')
        try:
            return Layout(lines)
        except LayoutError as error:
            raise self._mistake((*path, error.number), str(error)) from None

    def _check_metric(self, name: str, metric: Metric, value: Layout, path: tuple[str | int, ...]) -> None:
        if not _NAME.fullmatch(name):
            raise self._mistake(path, f"{name!r} is no name of a metric", "small letters, digits and _")
        unit = next((unit for unit in UNITS if name.endswith(unit)), "")
        if not unit:
            raise self._mistake(path, f"{name} does not say its unit", f"end it with one of {' '.join(UNITS)}")
        given = [kind for kind in ("rate", "value", "mean", "quantile") if getattr(metric, kind)]
        if len(given) != 1:
            what = " and ".join(given) + " in one metric" if given else f"{name} says not where it comes from"
            raise self._mistake(path, what, "give exactly one of rate, value, mean, quantile")
        if metric.rate and not unit.endswith("_per_s"):
            raise self._mistake(path, f"{name} is a rate", "end its name with _per_s")
        if metric.mean and len(metric.mean) != 2:
            raise self._mistake(path, "mean takes two fields", 'as in mean = ["time_ns", "calls"]')
        if metric.quantile and not 0 < metric.quantile < 1:
            raise self._mistake(path, f"quantile is {metric.quantile:g}", "it lies between 0 and 1")
        if metric.of and not metric.quantile:
            raise self._mistake(path, "of belongs to quantile", "give a quantile")
        for needed in (metric.rate, metric.value, *metric.mean, metric.of if metric.quantile else ""):
            if needed or metric.quantile:
                self._check_field(needed or metric.of, value, bool(metric.quantile), path)

    def _check_field(self, name: str, value: Layout, array: bool, path: tuple[str | int, ...]) -> None:
        known = value.fields.get(name)
        if known is None or not known.length:
            numbers = [known.name for known in value.fields.values() if known.length]
            close = difflib.get_close_matches(name, numbers, 1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(numbers)}"
            raise self._mistake(path, f"the value has no number {name!r}", hint)
        if known.array != array:
            what = f"{name} is {'an array' if known.array else 'one number'}"
            raise self._mistake(path, what, "quantile takes an array, everything else one number")

    def _check_names(self, maps: list[MapSpec]) -> None:
        seen: dict[tuple[str, str], str] = {}
        for number, known in enumerate(maps):
            for name in known.metrics:
                if (known.entity, name) in seen:
                    raise self._mistake(
                        ("maps", number, "metrics", name), f"{known.entity} has a metric {name} already", "rename one"
                    )
                seen[known.entity, name] = known.name


def _field_names(kind: Any) -> list[str]:
    names: list[str] = []
    for struct in (kind, _RawMap, Attach, Metric) if kind is _Raw else (kind,):
        names += [known.name for known in msgspec.structs.fields(struct)]
    return names


def _readable(what: str) -> str:
    """msgspec's words for somebody who writes TOML."""
    for theirs, ours in _WORDS:
        what = what.replace(theirs, ours)
    return what
