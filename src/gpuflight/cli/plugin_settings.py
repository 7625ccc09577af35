"""The blocks of the settings that belong to plugins: checked against the plugins' own settings classes.

The settings layer knows no plugins, so this stands above both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from gpuflight.errors import ConfigError
from gpuflight.registry import plugins
from gpuflight.settings import Settings, dump, nearest, problems, validate
from gpuflight.settings.load import merge
from gpuflight.settings.problems import Path, path_text

if TYPE_CHECKING:
    from gpuflight.bottlenecks.settings import RulesSettings
    from gpuflight.collectors.base import Collector
    from gpuflight.server.consume.settings import ConsumeSettings
    from gpuflight.server.events.settings import EventsSettings
    from gpuflight.subscribers.base import Subscriber


class _NoSettings(BaseModel):
    """For plugins without settings of their own: any key is unknown."""

    model_config = ConfigDict(extra="forbid")


def collector_names() -> list[str]:
    """Every collector there is."""
    return list(_collector_classes())


def select_collectors(settings: Settings, names: Sequence[str]) -> Settings:
    """The settings with exactly the collectors ``names`` enabled. Raises ConfigError for a name that does not exist."""
    known = _collector_classes()
    for name in names:
        if name not in known:
            raise ConfigError(f"--collectors: {_no_such('collector', name, known)}")
    chosen = {name: {"enabled": name in names} for name in known}
    return _with(settings, {"collectors": chosen})


def make_collectors(settings: Settings) -> list[Collector]:
    """Every enabled collector, constructed with its settings, in the order of their names. Raises ConfigError with one
    line per mistake."""
    classes = _collector_classes()
    blocks = _collector_blocks(settings, classes)
    if "remote" in classes:
        enabled, block = blocks["remote"]
        blocks["remote"] = (enabled, _with_remotes(settings, block))
    return [cls(blocks[name][1]) for name, cls in classes.items() if blocks[name][0]]


def make_subscribers(settings: Settings) -> list[Subscriber]:
    """Every configured subscriber, constructed with its settings. Raises ConfigError with one line per mistake."""
    return [cls(block) for cls, block in _subscriber_blocks(settings)]


def make_consume(settings: Settings) -> ConsumeSettings:
    """The section ``consume``. Raises ConfigError with one line per mistake."""
    from gpuflight.server.consume.settings import ConsumeSettings

    lines: list[str] = []
    from_file = dict(settings._file.get("consume", {}))
    checked = _check(ConsumeSettings, from_file, settings.consume, ("consume",), settings, lines)
    if lines or not isinstance(checked, ConsumeSettings):
        raise ConfigError("\n".join(lines))
    return checked


def make_events(settings: Settings) -> EventsSettings:
    """The section ``events``. Raises ConfigError with one line per mistake."""
    from gpuflight.server.events.settings import EventsSettings

    lines: list[str] = []
    from_file = dict(settings._file.get("events", {}))
    checked = _check(EventsSettings, from_file, settings.events, ("events",), settings, lines)
    if lines or not isinstance(checked, EventsSettings):
        raise ConfigError("\n".join(lines))
    return checked


def make_rules(settings: Settings) -> RulesSettings:
    """The section ``rules``. Raises ConfigError with one line per mistake."""
    from gpuflight.bottlenecks.settings import RulesSettings

    lines: list[str] = []
    from_file = dict(settings._file.get("rules", {}))
    checked = _check(RulesSettings, from_file, settings.rules, ("rules",), settings, lines)
    if lines or not isinstance(checked, RulesSettings):
        raise ConfigError("\n".join(lines))
    return checked


def effective(settings: Settings) -> dict[str, Any]:
    """The whole effective configuration, plugins' defaults included, secrets masked; loads again as a file."""
    result = dump(settings)
    classes = _collector_classes()
    result["collectors"] = {
        name: {"enabled": enabled, **(dump(block) if block is not None else {})}
        for name, (enabled, block) in _collector_blocks(settings, classes).items()
    }
    result["subscribers"] = [
        {**dump(block), "type": cls.name, "name": block.name or cls.name} for cls, block in _subscriber_blocks(settings)
    ]
    if settings.consume:
        result["consume"] = dump(make_consume(settings))
    result["events"] = dump(make_events(settings))
    result["rules"] = dump(make_rules(settings))
    return result


def _collector_classes() -> dict[str, type[Collector]]:
    from gpuflight.collectors.base import Collector

    return plugins(Collector)


def _collector_blocks(
    settings: Settings, classes: dict[str, type[Collector]]
) -> dict[str, tuple[bool, BaseModel | None]]:
    """Name → (enabled, settings) of every collector there is."""
    lines: list[str] = []
    in_file = settings._file.get("collectors", {})
    result: dict[str, tuple[bool, BaseModel | None]] = {}
    for name in settings.collectors:
        if name not in classes:
            lines.append(
                f"{_origin(settings, name in in_file)}collectors.{name}: {_no_such('collector', name, classes)}"
            )
    for name, cls in classes.items():
        block = dict(settings.collectors.get(name, {}))
        from_file = dict(in_file.get(name, {}))
        path: Path = ("collectors", name)
        enabled = _enabled(from_file.pop("enabled", True), block.pop("enabled", True), path, settings, lines)
        checked = _check(cls.settings_class or _NoSettings, from_file, block, path, settings, lines)
        result[name] = (enabled, checked if cls.settings_class else None)
    if lines:
        raise ConfigError("\n".join(lines))
    return result


def _with_remotes(settings: Settings, block: BaseModel | None) -> BaseModel | None:
    """The settings of the collector ``remote`` with the instances of ``remotes`` added. Raises ConfigError."""
    from gpuflight.collectors.remote import RemotePeer, RemoteSettings

    if not settings.remotes or not isinstance(block, RemoteSettings):
        return block
    peers = list(block.peers)
    lines: list[str] = []
    names = {peer.name: f"collectors.remote.peers[{index}]" for index, peer in enumerate(peers) if peer.name}
    in_file = bool(settings._file.get("remotes"))
    for index, remote in enumerate(settings.remotes):
        path: Path = ("remotes", index)
        try:
            peers.append(RemotePeer.model_validate(remote.model_dump()))
        except ValidationError as error:
            lines += [_origin(settings, in_file) + line for _, line in problems(error, RemotePeer, path)]
            continue
        if remote.name and remote.name in names:
            where = f"{path_text((*path, 'name'))}: {remote.name!r} is already the name of {names[remote.name]}"
            lines.append(f"{_origin(settings, in_file)}{where}; names must be unique")
        elif remote.name:
            names[remote.name] = path_text(path)
    if lines:
        raise ConfigError("\n".join(lines))
    return block.model_copy(update={"peers": peers})


def _subscriber_blocks(settings: Settings) -> list[tuple[type[Subscriber], Any]]:
    if not settings.subscribers:
        return []
    from gpuflight.subscribers.base import Subscriber

    classes: dict[str, type[Subscriber]] = plugins(Subscriber)
    lines: list[str] = []
    result: list[tuple[type[Subscriber], Any]] = []
    seen: dict[str, int] = {}
    # A list is not merged but replaced: it came from one place as a whole.
    plain = [entry.model_dump() for entry in settings.subscribers]
    from_file = plain == _named(settings._file.get("subscribers"))
    for index, entry in enumerate(settings.subscribers):
        path: Path = ("subscribers", index)
        cls = classes.get(entry.type)
        if cls is None:
            no_such = _no_such("subscriber", entry.type, classes)
            lines.append(f"{_origin(settings, from_file)}{path_text((*path, 'type'))}: {no_such}")
            continue
        data = {"name": entry.name, "type": entry.type, **(entry.model_extra or {})}
        assert cls.settings_class is not None  # noqa: S101 - the base has one
        checked = _check(cls.settings_class, data if from_file else {}, data, path, settings, lines)
        name = entry.name or entry.type
        if name in seen:
            lines.append(
                f"{_origin(settings, from_file)}{path_text((*path, 'name'))}: {name!r} is already the name of"
                f" subscribers[{seen[name]}]; names must be unique"
            )
        seen.setdefault(name, index)
        result.append((cls, checked))
    if lines:
        raise ConfigError("\n".join(lines))
    return result


def _named(entries: Any) -> Any:
    return [{"name": None, **entry} for entry in entries] if isinstance(entries, list) else entries


def _check(
    model: type[BaseModel],
    from_file: dict[str, Any],
    block: dict[str, Any],
    path: Path,
    settings: Settings,
    lines: list[str],
) -> BaseModel | None:
    """The block as ``model``; mistakes go to ``lines``. What the file says is taken strictly, the rest as text."""
    found: dict[Path, str] = {}
    checked: BaseModel | None = None
    partial = {key: value for key, value in from_file.items() if key in model.model_fields}
    for data, strict in ((partial, True), (block, False)):
        try:
            checked = validate(model, data, strict=strict)
        except ValidationError as error:
            for where, line in problems(error, model, path):
                # A part may lack, or contradict, what another layer says; only single values are judged strictly.
                if not strict or (where != path and not line.endswith(": missing")):
                    found.setdefault(where, line)
    for where, line in found.items():
        relative = where[len(path) :]
        here = not relative or relative[0] in from_file or (line.endswith(": missing") and bool(from_file))
        lines.append(_origin(settings, here) + line)
    return checked if not found else None


def _enabled(in_file: Any, effective: Any, path: Path, settings: Settings, lines: list[str]) -> bool:
    where = path_text((*path, "enabled"))
    if not isinstance(in_file, bool):
        lines.append(f"{_origin(settings, True)}{where}: must be true or false")
        return False
    try:
        return TypeAdapter(bool).validate_python(effective)
    except ValidationError:
        lines.append(f"{where}: must be true or false")
        return False


def _with(settings: Settings, change: dict[str, Any]) -> Settings:
    merged = settings.model_copy(update={"collectors": merge(settings.collectors, change["collectors"])})
    merged._file = settings._file
    merged._file_name = settings._file_name
    return merged


def _origin(settings: Settings, from_file: bool) -> str:
    return f"{settings._file_name}: " if from_file and settings._file_name else ""


def _no_such(what: str, name: str, known: dict[str, Any]) -> str:
    close = nearest(name, known)
    return f"there is no {what} {name!r}" + (
        f"; did you mean {close}?" if close else f"; there are: {', '.join(known) or 'none'}"
    )
