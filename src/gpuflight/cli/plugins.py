"""``gpuflight plugins``: everything that registered itself, and what could not be loaded."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

DESCRIPTION = """\
List every plugin of every family: collectors, subscribers, layouts, renderers, rules, server backends; with those of
other packages (entry points gpuflight.<family>). One that cannot be loaded is listed with its error and harms nobody.
"""

EXAMPLES = (
    "gpuflight plugins",
    "gpuflight plugins --family collectors --json",
)

FAMILY_MODULES = (
    "gpuflight.collectors.base",
    "gpuflight.subscribers.base",
    "gpuflight.vis.base",
    "gpuflight.bottlenecks.base",
    "gpuflight.server.base",
)
"""Where the families are declared; a family exists once its base class is imported."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--family", metavar="NAME", help="only this family")
    parser.add_argument("--json", action="store_true", help="print the list as JSON, with the settings of each plugin")


def run(arguments: argparse.Namespace) -> int:
    """Discover and print."""
    from gpuflight.cli.output import clean, console, emit_json, make_table
    from gpuflight.errors import InputError

    found = every_plugin()
    if arguments.family is not None:
        if arguments.family not in found:
            raise InputError(f"there is no family {arguments.family!r}; there are: {', '.join(found)}")
        found = {arguments.family: found[arguments.family]}
    if arguments.json:
        emit_json(found)
        return 0
    screen = console()
    for family, plugins in found.items():
        screen.print(family, style="bold")
        rows = [
            [
                plugin["name"],
                plugin["version"],
                "broken" if plugin["error"] else plugin["stability"],
                plugin["error"] or plugin["description"],
            ]
            for plugin in plugins
        ]
        if rows:
            screen.print(make_table([("name", {"overflow": "fold"}), "version", "stability", "what it does"], rows))
        else:
            screen.print("none")
        screen.print()
    broken = [f"{clean(plugin['name'])}" for plugins in found.values() for plugin in plugins if plugin["error"]]
    if broken:
        screen.print(f"cannot be loaded: {', '.join(broken)}")
    return 0


def every_plugin() -> dict[str, list[dict[str, Any]]]:
    """Family → its plugins by name, broken ones last, as plain data."""
    from importlib.util import find_spec

    from gpuflight.registry import families

    for module in FAMILY_MODULES:
        if find_spec(module) is not None:
            import_module(module)
    result: dict[str, list[dict[str, Any]]] = {}
    for name, family in sorted(families().items()):
        family.discover()
        result[name] = [_described(plugin) for _, plugin in sorted(family.plugins.items())]
        result[name] += [
            {
                "name": broken.name,
                "version": "",
                "stability": "",
                "description": "",
                "origin": broken.origin,
                "error": broken.error,
                "settings": {},
            }
            for broken in family.broken
        ]
    return result


def _described(plugin: Any) -> dict[str, Any]:
    fields = plugin.settings_class.model_fields if plugin.settings_class is not None else {}
    return {
        "name": plugin.name,
        "version": plugin.version,
        "stability": plugin.stability,
        "description": plugin.description,
        "origin": f"{plugin.__module__}:{plugin.__qualname__}",
        "error": "",
        "settings": {
            name: {"default": _default(field), "description": field.description or ""} for name, field in fields.items()
        },
    }


def _default(field: Any) -> Any:
    from gpuflight.settings import mask

    return "required" if field.is_required() else mask(field.get_default(call_default_factory=True))
