"""Reading a configuration file: JSON, TOML or YAML, UTF-8 with or without a byte order mark."""

from __future__ import annotations

import json
import os
import tomllib
from typing import Any

from gpuflight.errors import ConfigError

_MAX_BYTES = 16 * 1024 * 1024


def read_config_file(path: str) -> dict[str, Any]:
    """The file as a dictionary. The format follows the name (``.json``, ``.toml``, ``.yaml``, ``.yml``); a name
    without one of these is JSON if it begins with ``{``, else YAML. Raises ConfigError with the place of a mistake."""
    try:
        with open(path, "rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if len(raw) > _MAX_BYTES:
        raise ConfigError(f"{path}: larger than {_MAX_BYTES} bytes; this is no configuration file")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from error
    suffix = os.path.splitext(path)[1].lower()
    if suffix == ".json" or (suffix not in (".toml", ".yaml", ".yml") and text.lstrip().startswith("{")):
        data = _json(path, text)
    elif suffix == ".toml":
        data = _toml(path, text)
    else:
        data = _yaml(path, text)
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must hold one object of settings, not {_kind(data)}")
    result: dict[str, Any] = _plain(path, data, "")
    return result


def _json(path: str, text: str) -> Any:
    if not text.strip():
        return {}
    try:
        return json.loads(text, object_pairs_hook=lambda pairs: _unique(path, pairs))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}") from error


def _toml(path: str, text: str) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


def _yaml(path: str, text: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """SafeLoader that refuses a key given twice, where YAML libraries let the last one win in silence."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key_node, _ in node.value:
                if key_node.tag == "tag:yaml.org,2002:merge":
                    continue
                key = key_node.value
                if key in seen:
                    raise ConfigError(f"{path}:{key_node.start_mark.line + 1}: {key}: given twice")
                seen.add(key)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)  # noqa: S506 - a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else path
        raise ConfigError(f"{place}: not valid YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: not valid YAML: {str(error).splitlines()[0]}") from error


def _unique(path: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{path}: {twice}: given twice")
    return result


def _plain(path: str, value: Any, at: str) -> Any:
    """Only what JSON has, so that the three formats mean the same: dates become text, keys must be text."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"{path}: {at + '.' if at else ''}{key}: keys must be text, this is {_kind(key)}")
        return {key: _plain(path, inner, f"{at}.{key}" if at else key) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(path, inner, f"{at}[{index}]") for index, inner in enumerate(value)]
    if value is None or isinstance(value, (str, int, float)):
        return value
    return str(value)


def _kind(value: Any) -> str:
    names = {list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)
