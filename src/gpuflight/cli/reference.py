"""The generated parts of the documentation: settings, commands and plugins, as the code knows them.

``python -m gpuflight.cli.reference FILE…`` replaces, in each file, what stands between ``<!-- generated: NAME -->`` and
``<!-- end -->``. tests/unit/test_docs.py fails when a file is out of date; ``make docs`` brings it up to date.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

_BLOCK = re.compile(r"(<!-- generated: (?P<name>[a-z ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def settings_table() -> str:
    """Every setting: path, type, default, meaning."""
    from gpuflight.settings import Settings

    lines = ["| setting | type | default | meaning |", "|---|---|---|---|", *_rows(Settings, "")]
    return "\n".join(lines)


def commands_text() -> str:
    """The ``--help`` of every command."""
    from gpuflight.cli import COMMANDS, build_parser
    from gpuflight.cli.server import build_parser as build_server_parser
    from gpuflight.cli.vis import build_parser as build_vis_parser

    with _plain_help():
        parser = build_parser(everything=True)
        subparsers = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
        helps = {"gpuflight": parser.format_help()}
        helps |= {f"gpuflight {name}": subparsers.choices[name].format_help() for name in COMMANDS}
        helps["gpuflight-vis"] = build_vis_parser().format_help()
        helps["gpuflight-server"] = build_server_parser().format_help()
    # Python before 3.13 says the placeholder of an option twice.
    helps = {name: re.sub(r"(-\w+) (\S+), (--[\w-]+) \2", r"\1, \3 \2", text) for name, text in helps.items()}
    return "\n".join(f"## {name}\n\n```text\n{text.rstrip()}\n```\n" for name, text in helps.items()).rstrip()


def collectors_table() -> str:
    """Every collector of this package: name, what it does, its own settings."""
    return _plugins_table("collectors")


def subscribers_table() -> str:
    """Every subscriber of this package: name, what it does, its own settings."""
    from gpuflight.subscribers.base import SubscriberSettings

    common = {name: field for name, field in SubscriberSettings.model_fields.items() if name not in ("type", "name")}
    settings = "<br>".join(
        f"`{name}` = `{_json(field.get_default(call_default_factory=True))}`: {field.description}"
        for name, field in common.items()
    )
    return _plugins_table("subscribers", skip=set(SubscriberSettings.model_fields)) + f"\n| all | | {settings} |"


GENERATED: dict[str, Callable[[], str]] = {
    "settings": settings_table,
    "commands": commands_text,
    "collectors": collectors_table,
    "subscribers": subscribers_table,
}


def refreshed(text: str) -> str:
    """``text`` with every generated block as it should be."""

    def block(found: re.Match[str]) -> str:
        return f"{found[1]}{GENERATED[found['name']]()}\n{found[3]}"

    return _BLOCK.sub(block, text)


def main(paths: list[str]) -> int:
    """Bring files up to date. Returns the exit code."""
    for path in paths:
        with open(path, encoding="utf-8") as file:
            before = file.read()
        after = refreshed(before)
        if after != before:
            with open(path, "w", encoding="utf-8") as file:
                file.write(after)
            print(f"{path}: brought up to date")
    return 0


def _rows(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        annotation = field.annotation
        inner = annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
        if inner is not None:
            yield from _rows(inner, path + ".")
            continue
        default = "required" if field.is_required() else f"`{_json(field.get_default(call_default_factory=True))}`"
        yield f"| `{path}` | {_type(annotation)} | {default} | {_cell(field.description or '')} |"
        element = _model_in(annotation)
        if element is not None:
            yield from _rows(element, path + ("[]." if get_origin(annotation) is list else "."))


def _plugins_table(family: str, skip: Collection[str] = ()) -> str:
    from gpuflight.cli.plugins import every_plugin

    lines = ["| name | what it does | settings |", "|---|---|---|"]
    for plugin in every_plugin()[family]:
        if plugin["error"] or not plugin["origin"].startswith("gpuflight."):
            continue
        settings = "<br>".join(
            f"`{name}` = `{json.dumps(about['default'], ensure_ascii=False)}`: {about['description']}"
            if about["default"] != "required"
            else f"`{name}` (required): {about['description']}"
            for name, about in plugin["settings"].items()
            if name not in skip
        )
        lines.append(f"| `{plugin['name']}` | {_cell(plugin['description'])} | {_cell(settings) or '–'} |")
    return "\n".join(lines)


def _type(annotation: Any) -> str:
    names = {int: "whole number", float: "number", str: "text", bool: "true/false", type(None): "null"}
    if annotation in names:
        return names[annotation]
    origin = get_origin(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if origin in (Union, UnionType):
        return " or ".join(_type(part) for part in get_args(annotation))
    if origin is list:
        return f"list of {_type(get_args(annotation)[0])}s"
    if origin is not None and hasattr(annotation, "__metadata__"):
        return _type(get_args(annotation)[0])
    if getattr(annotation, "__name__", "") == "SecretStr":
        return "secret"
    return "object"


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (list, Union, UnionType):
        return next((found for part in get_args(annotation) if (found := _model_in(part))), None)
    return None


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


@contextmanager
def _plain_help() -> Iterator[None]:
    """argparse formats to the terminal's width, and in colour from Python 3.14 on: pin both."""
    before = {name: os.environ.get(name) for name in ("COLUMNS", "NO_COLOR")}
    os.environ.update(COLUMNS="100", NO_COLOR="1")
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
