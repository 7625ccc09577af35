"""Putting the layers of settings together, and saying whose a mistake is."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_settings import BaseSettings, EnvSettingsSource
from pydantic_settings.exceptions import SettingsError

from gpuflight.errors import ConfigError
from gpuflight.settings.files import read_config_file
from gpuflight.settings.model import Settings
from gpuflight.settings.problems import Path, nearest, path_text, problems, validate

ENVIRONMENT_PREFIX = "GPUFLIGHT_"

# Variables of ours that are not settings.
_NOT_SETTINGS = ("GPUFLIGHT_DEBUG", "GPUFLIGHT_RECORDER", "GPUFLIGHT_TOKEN", "GPUFLIGHT_URL")


class _Environment(Settings, BaseSettings):  # type: ignore[misc]  # two model_config types, one meaning
    """The settings as pydantic-settings wants them to read the environment; never instantiated."""


def load(config: str | None = None, overrides: Mapping[str, Any] | None = None) -> Settings:
    """The effective settings: ``overrides`` (command line) > environment > the file ``config`` > defaults.

    Objects are merged key by key, lists are replaced. Raises ConfigError with one line per mistake, each beginning with
    where it was made: the file, the variable, or the command line.
    """
    lines: list[str] = []
    file_data: dict[str, Any] = {}
    if config is not None:
        file_data = read_config_file(config)
        try:
            validate(Settings, file_data, strict=True)
        except ValidationError as error:
            lines += [f"{config}: {line}" for _, line in problems(error, Settings)]
    environment: dict[str, Any] = {}
    try:
        environment = _environment()
    except ConfigError as error:
        lines += str(error).splitlines()
    line_overrides = dict(overrides or {})
    for origin, data in ((None, environment), ("command line", line_overrides)):
        try:
            validate(Settings, data, strict=False)
        except ValidationError as error:
            lines += [f"{origin or variable(path)}: {line}" for path, line in problems(error, Settings)]
    if lines:
        raise ConfigError("\n".join(lines))
    merged = merge(merge(file_data, environment), line_overrides)
    try:
        settings = validate(Settings, merged, strict=False)
    except ValidationError as error:  # e.g. half of an object from the file, half from the environment
        raise ConfigError("\n".join(line for _, line in problems(error, Settings))) from error
    settings._file = file_data
    settings._file_name = config or ""
    return settings


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``over`` laid on it: objects key by key, anything else replaced."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result


def variable(path: Path) -> str:
    """The environment variable of a setting: ``("limits", "max_nodes")`` → ``GPUFLIGHT_LIMITS__MAX_NODES``."""
    names = [part for part in path if isinstance(part, str)]
    return ENVIRONMENT_PREFIX + "__".join(names).upper()


def _environment() -> dict[str, Any]:
    lines = []
    for name in sorted(os.environ):
        if not name.upper().startswith(ENVIRONMENT_PREFIX) or name.upper() in _NOT_SETTINGS:
            continue
        first = name[len(ENVIRONMENT_PREFIX) :].lower().split("__")[0]
        if first not in Settings.model_fields:
            close = nearest(first, Settings.model_fields)
            lines.append(f"{name}: unknown setting" + (f"; did you mean {variable((close,))}?" if close else ""))
    try:
        source = EnvSettingsSource(_Environment, env_prefix=ENVIRONMENT_PREFIX, env_nested_delimiter="__")
        found = source()
    except SettingsError as error:
        # "error parsing value for field "limits" from source "EnvSettingsSource"": only the field is of use.
        field = next((name for name in Settings.model_fields if f'"{name}"' in str(error)), "?")
        lines.append(f"{variable((field,))}: not valid JSON")
        found = {}
    if lines:
        raise ConfigError("\n".join(lines))
    blocks = found.get("collectors")
    if isinstance(blocks, dict):
        found["collectors"] = {
            name: {key: _decoded(value) for key, value in block.items()} if isinstance(block, dict) else block
            for name, block in blocks.items()
        }
    if isinstance(found.get("consume"), dict):
        found["consume"] = {key: _decoded(value) for key, value in found["consume"].items()}
    return found


def _decoded(value: Any) -> Any:
    """A list or object given as JSON text; pydantic-settings decodes only fields whose type it knows."""
    if isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def set_path(target: dict[str, Any], assignment: str) -> None:
    """Lay ``limits.max_nodes=100`` (as from ``--set``) on ``target``. A value that is valid JSON is taken as that,
    anything else as text. Raises ConfigError."""
    path, equals, text = assignment.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {assignment}: give PATH=VALUE, e.g. limits.max_nodes=1000")
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    here = target
    for depth, key in enumerate(keys[:-1], start=1):
        inner = here.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {assignment}: {path_text(tuple(keys[:depth]))} is no object")
        here = inner
    here[keys[-1]] = value
