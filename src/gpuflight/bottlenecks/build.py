"""From settings to an engine."""

from __future__ import annotations

from collections.abc import Collection

from gpuflight.bottlenecks.base import Rule
from gpuflight.bottlenecks.engine import Engine, Subscribers
from gpuflight.bottlenecks.overrides import Override, Overrides
from gpuflight.bottlenecks.settings import RulesSettings
from gpuflight.errors import ConfigError
from gpuflight.graph import Edge, Entity
from gpuflight.registry import plugins


def all_rules(settings: RulesSettings) -> list[Rule]:
    """Every rule of the catalogue, of other packages and of the user's folders, by name. Raises ConfigError."""
    rules: dict[str, Rule] = {name: cls() for name, cls in plugins(Rule).items()}
    lines = []
    if settings.folders:
        from gpuflight.bottlenecks.user_rules import load_folder  # needs a library that the others do without

        for folder in settings.folders:
            for rule in load_folder(folder):
                if rule.name in rules:
                    lines.append(f"{rule.origin}: there is a rule {rule.name!r} already; choose another name")
                else:
                    rules[rule.name] = rule
    if lines:
        raise ConfigError("\n".join(lines))
    return list(rules.values())


def make_engine(
    settings: RulesSettings,
    *,
    subscribers: Subscribers | None = None,
    snapshot: bool = False,
    about: Collection[type[Entity] | type[Edge]] = (),
) -> Engine | None:
    """The engine as configured; None if it is off. ``about``: only rules with evidence of one of these kinds. Raises
    ConfigError with one line per mistake."""
    if not settings.enabled:
        return None
    rules = {rule.name: rule for rule in all_rules(settings)}
    lines = [
        f"rules.{block}: there is no rule {name!r}; `gpuflight rules list` names them"
        for block, names in (("only", settings.only), ("off", settings.off))
        for name in names
        if name not in rules
    ]
    for number, override in enumerate(settings.overrides):
        where = f"rules.overrides[{number}]"
        rule = rules.get(override.rule)
        if rule is None:
            lines.append(f"{where}.rule: there is no rule {override.rule!r}; `gpuflight rules list` names them")
            continue
        for name in override.thresholds:
            if name.removesuffix(".clear") not in rule.thresholds:
                known = ", ".join(rule.thresholds) or "none"
                lines.append(f"{where}.thresholds: {rule.name} has no threshold {name!r}; there are: {known}")
    if lines:
        raise ConfigError("\n".join(lines))
    wanted = (set(settings.only) or set(rules)) - set(settings.off)
    chosen = [
        rule
        for name, rule in rules.items()
        if name in wanted and (not about or any(need.kind in about for need in rule.needs))
    ]
    overrides = Overrides(
        [Override(rule=each.rule, thresholds=each.thresholds, where=each.where) for each in settings.overrides]
    )
    return Engine(chosen, overrides=overrides, subscribers=subscribers, snapshot=snapshot)
