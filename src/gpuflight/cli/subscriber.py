"""``gpuflight subscriber``: where rounds are delivered."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from gpuflight.cli.rest import Rest, add_server_arguments
from gpuflight.errors import ConfigError, InputError

DESCRIPTION = """\
Try and manage the subscribers: the places that rounds are delivered to (docs/server.md).

without a server
  types [TYPE]             every type there is; with TYPE the JSON schema of its settings
  test --config FILE [NAME…]
                           make one round and deliver it on trial to each subscriber of a configuration, or those named
with a running server
  list                     every subscriber with its state, and the last error of each
  stats NAME               statistics of one
  create KEY=VALUE…        a new one; type= says which, see `types`; --file for settings that hold secrets
  pause, resume NAME       deliver nothing until resumed
  test NAME                a trial delivery of the newest round
  delete NAME              end one, what waits for it included

`test` ends with 1 if a delivery fails.
"""

EXAMPLES = (
    "gpuflight subscriber types s3",
    "gpuflight subscriber test --config server.json",
    "gpuflight subscriber create type=memory name=last-hour rounds_count=720",
    "gpuflight subscriber list",
    "gpuflight subscriber test last-hour",
    "gpuflight subscriber pause last-hour",
    "gpuflight subscriber resume last-hour",
    "gpuflight subscriber stats last-hour",
    "gpuflight subscriber delete last-hour",
)

ACTIONS = ("types", "test", "list", "stats", "create", "pause", "resume", "delete")
_ROOT = "/api/v1/subscribers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("action", choices=ACTIONS, metavar="ACTION", help=", ".join(ACTIONS))
    parser.add_argument("words", nargs="*", metavar="NAME|KEY=VALUE", help="what it is about, see above")
    parser.add_argument("--json", action="store_true", help="print JSON")
    local = parser.add_argument_group("with test")
    local.add_argument("--config", metavar="FILE", help="the configuration whose subscribers are tried")
    local.add_argument(
        "--replay", metavar="FILE", help="make the round of a recording of `gpuflight record`, not of this machine"
    )
    create = parser.add_argument_group("with create")
    create.add_argument(
        "--file", metavar="FILE", help="settings as JSON, TOML or YAML, - for JSON on stdin; KEY=VALUE is laid on them"
    )
    add_server_arguments(parser)
    _in_any_order(parser)


def run(arguments: argparse.Namespace) -> int:
    """Do the action."""
    action, words = arguments.action, arguments.words
    if arguments.file is not None and action != "create":
        raise InputError(f"--file goes with create, not with {action}")
    if arguments.config is None and arguments.replay is not None:
        raise InputError("--replay goes with test --config")
    if arguments.config is not None:
        if action != "test":
            raise InputError(f"--config goes with test, not with {action}")
        return _test_configuration(arguments)
    if action == "types":
        return _types(words, arguments.json)
    if action == "create":
        return _create(Rest(arguments), words, arguments)
    if action == "list":
        if words:
            raise InputError("list takes no name")
        return _list(Rest(arguments), arguments.json)
    if len(words) != 1:
        needs = "needs --config FILE, or the name of a subscriber of a server" if action == "test" else "needs one name"
        raise InputError(f"{action} {needs}; `gpuflight subscriber list` shows those of a server")
    actions: dict[str, Callable[[Rest, str, bool], int]] = {
        "test": _test, "stats": _stats, "pause": _switch("pause"), "resume": _switch("resume"), "delete": _delete,
    }  # fmt: skip
    return actions[action](Rest(arguments), words[0], arguments.json)


def _in_any_order(parser: argparse.ArgumentParser) -> None:
    """Let names follow options: before Python 3.13 argparse takes a list of words as ended where an option stands, and
    its own remedy is not for the parsers of commands."""
    plain = parser.parse_known_args

    def mixed(args: Any = None, namespace: Any = None) -> Any:
        parser.parse_known_args = plain  # type: ignore[method-assign] # which the remedy calls
        try:
            return parser.parse_known_intermixed_args(args, namespace)
        finally:
            parser.parse_known_args = mixed  # type: ignore[method-assign]

    parser.parse_known_args = mixed  # type: ignore[method-assign]


# --- without a server ---


def _types(words: list[str], as_json: bool) -> int:
    from gpuflight.cli.output import console, emit_json, make_table
    from gpuflight.registry import get, plugins
    from gpuflight.subscribers.base import Subscriber

    if len(words) > 1:
        raise InputError("types takes one type, or none")
    found = {words[0]: get(Subscriber, words[0])} if words else plugins(Subscriber)
    if words or as_json:
        schemas = {name: cls.settings_class.model_json_schema() for name, cls in found.items()}
        emit_json(schemas[words[0]] if words else {"types": schemas})
        return 0
    rows = [[name, cls.stability, cls.description] for name, cls in found.items()]
    console().print(make_table(["type", "stability", "description"], rows))
    return 0


def _test_configuration(arguments: argparse.Namespace) -> int:
    from gpuflight.cli.output import emit_json
    from gpuflight.cli.plugin_settings import make_subscribers
    from gpuflight.cli.session import open_controller
    from gpuflight.settings import load
    from gpuflight.subscribers.trial import try_delivery

    settings = load(arguments.config)
    members = {member.label: member for member in make_subscribers(settings)}
    if not members:
        raise ConfigError(f"{arguments.config}: there are no subscribers in it")
    names = list(dict.fromkeys(arguments.words)) or list(members)
    for name in names:
        if name not in members:
            raise InputError(f"there is no subscriber {name!r} in {arguments.config}; there are: {', '.join(members)}")
    with open_controller(settings, replay=arguments.replay) as controller:
        completed = controller.run_round()
        results = {}
        for name in names:
            results[name] = try_delivery(members[name], completed, arguments.timeout)
            if not arguments.json:
                _print_trial(name, results[name])
    if arguments.json:
        emit_json({"subscribers": [{"name": name, **result} for name, result in results.items()]})
    return 0 if all(result["ok"] for result in results.values()) else 1


# --- with one ---


def _list(server: Rest, as_json: bool) -> int:
    from gpuflight.cli.output import clean, console, emit_json, make_table

    found = server.call("GET", _ROOT)
    if as_json:
        emit_json(found)
        return 0
    rows, troubles = [], []
    for line in _lines(found):
        told = line.get("statistics")
        counts = told if isinstance(told, dict) else {}
        origin = "file" if line.get("origin") == "configuration" else line.get("origin")
        numbers = [counts.get(key, "?") for key in ("sent", "dropped", "queued")]
        rows.append([clean(cell) for cell in (line.get("name"), line.get("type"), line.get("state"), origin, *numbers)])
        if counts.get("last_error"):
            troubles.append(clean(f"{line.get('name')}: {counts['last_error']}"))
    if rows:
        heads: list[Any] = [("name", {"overflow": "fold"}), "type", "state", "origin", "sent", "dropped", "queued"]
        console().print(make_table(heads, rows))
    else:
        print("none")
    for trouble in troubles:
        print(trouble)
    return 0


def _stats(server: Rest, name: str, as_json: bool) -> int:
    from gpuflight.cli.output import clean, emit_json

    found = server.call("GET", f"{_path(name)}/statistics")
    if as_json:
        emit_json(found)
        return 0
    counts = found.pop("statistics", {})
    for key, value in {**found, **(counts if isinstance(counts, dict) else {})}.items():
        text = json.dumps(value) if isinstance(value, dict | list | bool) or value is None else value
        print(f"{clean(key)}: {clean(text)}")
    return 0


def _create(server: Rest, words: list[str], arguments: argparse.Namespace) -> int:
    from gpuflight.cli.output import clean, emit_json

    settings = _settings_of(arguments.file)
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise InputError(f"{word}: give KEY=VALUE, e.g. type=memory")
        try:
            settings[key] = json.loads(text)
        except (ValueError, RecursionError):
            settings[key] = text
    if "type" not in settings:
        raise InputError("create needs type=TYPE; `gpuflight subscriber types` lists them")
    found = server.call("POST", _ROOT, settings)
    if arguments.json:
        emit_json(found)
    else:
        print(f"{clean(found.get('name'))}: created")
    return 0


def _switch(action: str) -> Callable[[Rest, str, bool], int]:
    def act(server: Rest, name: str, as_json: bool) -> int:
        from gpuflight.cli.output import clean, emit_json

        found = server.call("POST", f"{_path(name)}/{action}")
        if as_json:
            emit_json(found)
        else:
            print(f"{clean(name)}: {clean(found.get('state'))}")
        return 0

    return act


def _test(server: Rest, name: str, as_json: bool) -> int:
    from gpuflight.cli.output import emit_json

    found = server.call("POST", f"{_path(name)}/test")
    if as_json:
        emit_json(found)
    else:
        _print_trial(name, found)
    return 0 if found.get("ok") is True else 1


def _delete(server: Rest, name: str, as_json: bool) -> int:
    from gpuflight.cli.output import clean, emit_json

    found = server.call("DELETE", _path(name))
    if as_json:
        emit_json(found)
    else:
        late = "" if found.get("ended_in_time") else "; it did not answer and was left behind"
        print(f"{clean(name)}: deleted{late}")
    return 0


def _path(name: str) -> str:
    if name in ("", ".", ".."):
        raise InputError(f"{name!r} is no name of a subscriber")
    return f"{_ROOT}/{quote(name, safe='')}"


def _lines(found: Any) -> list[dict[str, Any]]:
    lines = found.get("subscribers")
    return [line for line in lines if isinstance(line, dict)] if isinstance(lines, list) else []


def _settings_of(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    if path != "-":
        from gpuflight.settings import read_config_file

        return read_config_file(path)
    try:
        found = json.load(sys.stdin)
    except (ValueError, RecursionError) as error:
        raise InputError(f"stdin: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InputError("stdin: must hold one object of settings")
    return found


def _print_trial(name: str, result: dict[str, Any]) -> None:
    from gpuflight.cli.output import clean

    if result.get("ok") is True:
        text = f"ok in {result.get('duration_s')} s"
    else:
        text = f"failed: {result.get('error')}" + (
            " (may pass: it would be tried again)" * bool(result.get("retryable"))
        )
    print(clean(f"{name}: {text}"), flush=True)
