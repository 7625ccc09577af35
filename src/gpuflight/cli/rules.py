"""``gpuflight rules``: list, explain, check and try the rules that judge."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from gpuflight.cli.session import add_settings_arguments
from gpuflight.errors import ConfigError, InputError, MissingExtra

if TYPE_CHECKING:
    from gpuflight.bottlenecks.base import Rule
    from gpuflight.rounds import Round
    from gpuflight.settings import Settings

DESCRIPTION = """\
The rules that judge every round: list them, explain one, check your own, or try them on recordings.

Rules of your own are TOML files in the folders of the setting rules.folders; thresholds of any rule are overridden by
rules.overrides (docs/rules.md).
"""

EXAMPLES = (
    "gpuflight rules list",
    "gpuflight rules explain gpu_lost",
    "gpuflight rules lint configs/rules",
    "gpuflight rules test --on capture --json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="every rule: id, name, severity, what it says")
    listing.add_argument("--kinds", action="store_true", help="instead the kinds of entities and edges")
    listing.add_argument("--json", action="store_true", help="as JSON")
    add_settings_arguments(listing)
    explain = actions.add_parser("explain", help="all about one rule: thresholds and their sources, what to do")
    explain.add_argument("name", metavar="RULE", help="its name or id (gpu_lost, H11)")
    add_settings_arguments(explain)
    lint = actions.add_parser("lint", help="check files with rules of your own, and the settings' overrides")
    lint.add_argument("files", metavar="FILE", nargs="*", help="files or folders (default: those of the settings)")
    add_settings_arguments(lint)
    test = actions.add_parser("test", help="when each rule would have fired on recordings, and how right it was")
    test.add_argument(
        "--on",
        metavar="WHAT",
        nargs="+",
        required=True,
        help="recordings, run folders, streams of rounds, folders with GPU session logs",
    )
    test.add_argument("--labels", metavar="FILE", help="what they show (TOML): prints precision and recall")
    test.add_argument("--rule", metavar="NAME", action="append", help="only this rule; may be given again")
    test.add_argument("--json", action="store_true", help="as JSON")
    add_settings_arguments(test)


def run(arguments: argparse.Namespace) -> int:
    """Do what was asked."""
    from gpuflight.cli.session import dump_config, load_settings

    settings = load_settings(arguments)
    if arguments.dump_config:
        return dump_config(settings)
    return {"list": _list, "explain": _explain, "lint": _lint, "test": _test}[arguments.action](arguments, settings)


def _rules(settings: Settings) -> dict[str, Rule]:
    from gpuflight.bottlenecks.build import all_rules
    from gpuflight.cli.plugin_settings import make_rules

    return {rule.name: rule for rule in all_rules(make_rules(settings))}


def _list(arguments: argparse.Namespace, settings: Settings) -> int:
    from gpuflight.cli.output import console, emit_json, make_table

    if arguments.kinds:
        from gpuflight.graph.edges import EDGE_KINDS
        from gpuflight.graph.nodes import NODE_KINDS

        print(f"entities: {', '.join(NODE_KINDS)}\nedges: {', '.join(EDGE_KINDS)}")
        return 0
    rules = _rules(settings)
    rows = [[rule.catalogue_id or "own", name, rule.severity, rule.description] for name, rule in rules.items()]
    rows.sort()
    if arguments.json:
        emit_json([dict(zip(("id", "rule", "severity", "description"), row, strict=True)) for row in rows])
    else:
        console().print(make_table(["id", ("rule", {"no_wrap": True}), "severity", "what it says"], rows))
    return 0


def _explain(arguments: argparse.Namespace, settings: Settings) -> int:
    from gpuflight.bottlenecks.catalogue import CATALOGUE, NOT_HERE
    from gpuflight.bottlenecks.pages import page
    from gpuflight.cli.output import clean_lines
    from gpuflight.settings import nearest

    wanted = CATALOGUE.get(arguments.name.upper(), arguments.name)
    if arguments.name.upper() in NOT_HERE:
        print(f"{arguments.name.upper()} {wanted} is no rule here: {NOT_HERE[arguments.name.upper()]}")
        return 0
    rules = _rules(settings)
    rule = rules.get(wanted)
    if rule is None:
        close = nearest(wanted, rules)
        raise InputError(f"there is no rule {wanted!r}" + (f"; did you mean {close}?" if close else ""))
    text = "\n".join(line for line in page(type(rule)).split("\n") if not line.startswith("<!--"))
    print(clean_lines(text.rstrip("\n")))
    return 0


def _lint(arguments: argparse.Namespace, settings: Settings) -> int:
    from gpuflight.bottlenecks.build import make_engine
    from gpuflight.bottlenecks.user_rules import load_file, load_folder
    from gpuflight.cli.plugin_settings import make_rules

    count = 0
    lines: list[str] = []
    for path in arguments.files:
        try:
            count += len(load_folder(path) if os.path.isdir(path) else load_file(path))
        except ConfigError as error:
            lines += str(error).splitlines()
    if lines:
        raise ConfigError("\n".join(lines))
    engine = make_engine(make_rules(settings))
    total = len(engine.rules) if engine is not None else 0
    print(f"{count} rules in {len(arguments.files)} files, all well" if arguments.files else f"{total} rules, all well")
    return 0


def _test(arguments: argparse.Namespace, settings: Settings) -> int:
    from gpuflight.bottlenecks.backtest import read_labels, score
    from gpuflight.cli.output import clean, console, emit_json, make_table

    labels = read_labels(arguments.labels) if arguments.labels else None
    episodes = [episode for path in arguments.on for episode in episodes_of(path, settings)]
    if arguments.rule:
        known = _rules(settings)
        for name in arguments.rule:
            if name not in known:
                raise InputError(f"--rule {name}: there is no such rule")
        episodes = [episode for episode in episodes if episode.rule in arguments.rule]
    names = {os.path.basename(os.path.normpath(path)) for path in arguments.on}
    scores = []
    if labels is not None:
        from fnmatch import fnmatchcase

        mine = [each for each in labels.expect if any(fnmatchcase(name, each.recording) for name in names)]
        if arguments.rule:
            mine = [each for each in mine if each.rule in arguments.rule]
        scores = score(episodes, mine, labels.ignore)
    if arguments.json:
        import msgspec

        figures = [{**msgspec.to_builtins(s), "precision": s.precision, "recall": s.recall} for s in scores]
        emit_json({"episodes": msgspec.to_builtins(episodes), "scores": figures})
        return 0
    for episode in episodes:
        until = f"{episode.to_s:g} s" if episode.to_s is not None else "the end"
        when = f"{episode.from_s:g} s to {until}"
        print(f"{clean(episode.recording)}: {when}: {episode.severity}: {episode.rule}: {clean(episode.message)}")
    if not episodes:
        print("no rule fired")
    if scores:
        rows: list[list[Any]] = [
            [s.rule, s.right, s.wrong, s.missed, _percent(s.precision), _percent(s.recall)] for s in scores
        ]
        right = {"justify": "right"}
        heads = [(name, right) for name in ("right", "wrong", "missed", "precision", "recall")]
        console().print(make_table(["rule", *heads], rows))
    return 0


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.0f} %"


def episodes_of(path: str, settings: Settings) -> list[Any]:
    """Findings over all rounds of a recording, a run folder or a stream of rounds, or over GPU session logs. Raises
    InputError."""
    from gpuflight.bottlenecks.backtest import run as backtest
    from gpuflight.bottlenecks.build import make_engine
    from gpuflight.cli.doctor_sources import replayed
    from gpuflight.cli.plugin_settings import make_rules
    from gpuflight.cli.rounds import EarlyEnd, run_rounds
    from gpuflight.cli.session import open_controller
    from gpuflight.graph.load import read_rounds

    engine = make_engine(make_rules(settings))
    if engine is None:
        raise InputError("the setting rules.enabled is false: nothing judges")
    name = os.path.basename(os.path.normpath(path))
    if not os.path.exists(path):
        raise InputError(f"{path}: there is no such file or folder")
    if path.endswith((".tar.zst", ".tzst")):
        with open_controller(settings, replay=path, judge=engine) as controller, EarlyEnd() as early_end:
            return backtest(engine, run_rounds(controller, seconds=None, early_end=early_end), name, judged=True)
    if os.path.isdir(path):
        streams = (os.path.join(path, name) for name in ("rounds.jsonl.zst", "rounds.jsonl"))
        inner = next((stream for stream in streams if os.path.exists(stream)), None)
        if inner is None and not os.path.exists(os.path.join(path, "graph.json")):
            return backtest(engine, [_recorded(path)], name)
        if inner is None:
            raise InputError(f"{path}: no rounds.jsonl.zst in this folder; is it a run folder of `gpuflight run`?")
        path = inner
    return backtest(engine, replayed(read_rounds(path)), name)


def _recorded(path: str) -> Round:
    """The one round that is made of GPU sessions that are over."""
    try:
        from gpuflight.cli.doctor_sessions import recorded
    except ModuleNotFoundError as error:
        raise MissingExtra(str(error.name), "events", "reading GPU session logs") from None
    return recorded(path)
