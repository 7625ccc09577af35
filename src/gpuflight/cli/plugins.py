"""``gpuflight plugins``: everything that registered itself, and what could not be loaded."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuflight.settings import Settings

DESCRIPTION = """\
List every plugin of every family: collectors, subscribers, layouts, renderers, rules, server backends; with those of
other packages (entry points gpuflight.<family>). One that cannot be loaded is listed with its error and harms nobody.
The probes of the folder in collectors.user_probes.folder are listed too. --check looks over a folder of probes: TOML,
C, the places they are attached to and, with the rights for it, whether the kernel takes them. Nothing is attached.
"""

EXAMPLES = (
    "gpuflight plugins",
    "gpuflight plugins --family collectors --json",
    "gpuflight plugins --check probes",
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
    parser.add_argument("--config", metavar="FILE", help="settings that name the folder of probes")
    parser.add_argument(
        "--check", metavar="FOLDER", help="look over the probes in FOLDER instead; exit code 1 if one will not work"
    )
    parser.add_argument("--json", action="store_true", help="print the list as JSON, with the settings of each plugin")


def run(arguments: argparse.Namespace) -> int:
    """Discover and print."""
    from gpuflight.cli.output import clean, console, emit_json, make_table
    from gpuflight.errors import InputError
    from gpuflight.settings import load

    if arguments.check is not None:
        return check(arguments.check, as_json=arguments.json)
    found = every_plugin(probes_folder(load(arguments.config)))
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


def check(folder: str, *, as_json: bool) -> int:
    """Say of every probe in a folder whether it will work, and if not, where and why."""
    import msgspec

    from gpuflight.cli.output import clean, console, emit_json
    from gpuflight.errors import InputError, SourceUnavailable
    from gpuflight.sources.bpf.user_probe_check import check_probes

    try:
        checked = check_probes(folder)
    except SourceUnavailable as error:
        raise InputError(str(error)) from error
    if as_json:
        emit_json({"probes": msgspec.to_builtins(checked)})
    else:
        screen = console()
        for probe in checked:
            state = "will not work" if probe.mistakes else "looks fine" if probe.unchecked else "works here"
            screen.print(f"{clean(probe.name)}: {state}", style="bold")
            for lines, word in (
                (probe.mistakes, ""),
                (probe.warnings, "warning: "),
                (probe.unchecked, "not checked: "),
            ):
                for line in lines:
                    screen.print(f"  {word}{clean(line)}", soft_wrap=True)
            if not probe.mistakes:
                screen.print(f"  gives {clean(', '.join(probe.metrics))}", soft_wrap=True)
    return 1 if any(probe.mistakes for probe in checked) else 0


def probes_folder(settings: Settings) -> str | None:
    """The folder of users' probes in the settings."""
    folder = settings.collectors.get("user_probes", {}).get("folder")
    return folder if isinstance(folder, str) and folder else None


def every_plugin(probes: str | None = None) -> dict[str, list[dict[str, Any]]]:
    """Family → its plugins by name, broken ones last, as plain data; with the probes of a folder as one more family."""
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
    if probes is not None:
        result["user_probes"] = _probes(probes)
    return result


def _probes(folder: str) -> list[dict[str, Any]]:
    """What lies in a folder of probes, by its TOML alone: nothing is compiled for a list."""
    from gpuflight.errors import SourceUnavailable
    from gpuflight.sources.bpf.user_probe_folder import scan_folder
    from gpuflight.sources.bpf.user_probe_spec import ProbeMistake
    from gpuflight.sources.bpf.user_probes import read_spec

    def line(name: str, origin: str, description: str = "", error: str = "") -> dict[str, Any]:
        return {
            "name": name,
            "version": "",
            "stability": "user",
            "description": description,
            "origin": origin,
            "error": error,
            "settings": {},
        }

    try:
        found = scan_folder(folder)
    except SourceUnavailable as error:
        return [line(folder, folder, error=str(error))]
    lines = []
    for one in found:
        try:
            lines.append(line(one.name, f"{folder}/{one.file}", read_spec(one).description))
        except ProbeMistake as error:
            lines.append(line(one.name, f"{folder}/{one.file}", error=str(error)))
    return lines


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
