"""Rules as data: what users write in TOML becomes a rule like any other.

::

    [hot_gpu]
    kind = "GPU"
    where = { name = "*H100*" }
    when = "temperature_celsius > 80 and mean('sm_util_pct', 60) > 50"
    for_s = 30
    severity = "warn"
    message = "{label} has {temperature_celsius:.0f} °C"
    advice = "look at the fans"

Expressions are those of the library simpleeval (numbers, texts, comparisons, arithmetic, ``and``, ``or``, ``not``,
``in``): it walks the syntax tree, nothing of Python can be reached from them. Names are metrics and attributes of the
element; one that is not known makes the rule unknown. ``mean``, ``least``, ``most`` and ``increase`` of a metric take
its name and seconds.
"""

from __future__ import annotations

import ast
import os
import string
import tomllib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from simpleeval import InvalidExpression, SimpleEval

from gpuflight.bottlenecks.base import CLEAR, MASS_KINDS, ElementRule, Need, NotYet, Screen, Threshold, Unknown, Verdict
from gpuflight.bottlenecks.overrides import selects
from gpuflight.bottlenecks.window import Look, evidence
from gpuflight.errors import ConfigError
from gpuflight.graph.edges import EDGE_KINDS
from gpuflight.graph.nodes import NODE_KINDS
from gpuflight.registry import PluginMeta
from gpuflight.rounds import Severity

SUFFIX = ".toml"
_PAST = ("mean", "least", "most", "increase")
_COMPARISONS = {ast.Gt: ">", ast.GtE: ">=", ast.Lt: "<", ast.LtE: "<="}
_TURNED = {">": "<", ">=": "<=", "<": ">", "<=": ">="}
_MAX_EXPRESSION = 2000


class RuleText(BaseModel):
    """One table of a rules file."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    kind: str = Field(description="kind of entity or edge that it judges")
    when: str = Field(min_length=1, max_length=_MAX_EXPRESSION, description="the condition")
    clear_when: str | None = Field(default=None, max_length=_MAX_EXPRESSION, description="ends an open finding")
    where: dict[str, str] = Field(default_factory=dict, description="which elements: attribute → pattern with * and ?")
    for_s: float = Field(default=0.0, ge=0, description="how long the condition must hold (s), beside two rounds")
    severity: Severity = Field(default="warn", description="info, warn or critical")
    title: str = Field(default="", max_length=200)
    message: str = Field(min_length=1, max_length=500, description="text with {label} and {names of metrics}")
    advice: str = Field(min_length=1, max_length=1000)
    verify: str = Field(default="", max_length=500)
    explains: list[str] = Field(default_factory=list, description="rules whose findings are symptoms of this one")


class UserRule(ElementRule):
    """Base of the rules that are made from TOML."""

    abstract: ClassVar[bool] = True
    text: ClassVar[RuleText]
    origin: ClassVar[str]
    _when: ClassVar[tuple[str, Any]]
    _clear_when: ClassVar[tuple[str, Any] | None]
    _names: ClassVar[tuple[str, ...]]

    def judge(self, look: Look) -> Verdict:
        if self.text.where and not selects(self.text.where, look.element):
            return CLEAR
        if look.active and self._clear_when is not None:
            holds = not self._evaluate(self._clear_when, look)
        else:
            holds = self._evaluate(self._when, look)
        if not holds:
            return CLEAR
        values = {name: _value(look, name) for name in self._names}
        seen = [
            evidence(look.id, name, value) for name, value in values.items() if isinstance(value, int | float | str)
        ]
        message = string.Formatter().vformat(self.text.message, (), {**values, "label": look.label})
        return look.fired(message, seen, severity=self.text.severity)

    def _evaluate(self, expression: tuple[str, Any], look: Look) -> bool:
        evaluator = SimpleEval(functions=_functions(look), names=lambda node: _value(look, node.id))
        try:
            return bool(evaluator.eval(expression[0], previously_parsed=expression[1]))
        except (InvalidExpression, TypeError, ZeroDivisionError, OverflowError) as error:
            raise Unknown(f"{self.text.kind}: {expression[0]!r} cannot be computed: {error}") from None


def _value(look: Look, name: str) -> Any:
    """A metric or attribute of the element. Raises Unknown."""
    metrics, attributes = look.element.metrics, look.element.attributes
    if name in metrics:
        return metrics[name]
    if name in attributes:
        value = attributes[name]
        return tuple(value) if isinstance(value, list) else value
    if name in ("id", "kind"):
        return getattr(look.element, name)
    return look.metric(name)


def _functions(look: Look) -> Mapping[str, Callable[[str, float], float]]:
    def past(how: str) -> Callable[[str, float], float]:
        def ask(metric: str, seconds: float) -> float:
            if how == "increase":
                return look.increase(metric, seconds)
            series = look.history(metric, seconds)
            spans = series.spans(look.window.now_s, seconds)
            if not spans:
                raise NotYet(f"{metric}: nothing is known of the last {seconds:g} s")
            if how == "mean":
                return sum(held * value for held, value in spans) / sum(held for held, _ in spans)
            values = [value for _, value in spans]
            return max(values) if how == "most" else min(values)

        return ask

    return {how: past(how) for how in _PAST}


def load_folder(folder: str) -> list[UserRule]:
    """The rules of every ``*.toml`` in a folder, by file name. Raises ConfigError with one line per mistake."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(SUFFIX))
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}") from None
    found: list[UserRule] = []
    lines: list[str] = []
    for name in names:
        try:
            found += load_file(os.path.join(folder, name))
        except ConfigError as error:
            lines += str(error).splitlines()
    if lines:
        raise ConfigError("\n".join(lines))
    return found


def load_file(path: str) -> list[UserRule]:
    """The rules of one file. Raises ConfigError with one line per mistake: file, rule, key, what, what to do."""
    try:
        with open(path, "rb") as file:
            tables = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    rules: list[UserRule] = []
    lines: list[str] = []
    for name, table in tables.items():
        try:
            rules.append(make_rule(name, table, path))
        except ConfigError as error:
            lines += [f"{path}: {line}" for line in str(error).splitlines()]
    if lines:
        raise ConfigError("\n".join(lines))
    return rules


def make_rule(name: str, table: Any, origin: str = "") -> UserRule:
    """A rule from one table. Raises ConfigError with one line per mistake."""
    if not isinstance(table, dict):
        raise ConfigError(f"{name}: must be a table, [{name}]")
    if not name.isidentifier() or name != name.lower():
        raise ConfigError(f"{name}: names of rules are small letters, digits and _")
    try:
        text = RuleText.model_validate(table)
    except ValidationError as error:
        raise ConfigError("\n".join(_mistake(name, each) for each in error.errors())) from None
    kinds: dict[str, type[Any]] = {**EDGE_KINDS, **NODE_KINDS}  # Host is both; the entity is meant
    if text.kind not in kinds:
        raise ConfigError(f"{name}.kind: there is no kind {text.kind!r}; `gpuflight rules list --kinds` names them")
    when = _parsed(f"{name}.when", text.when)
    clear_when = _parsed(f"{name}.clear_when", text.clear_when) if text.clear_when else None
    trees = [when[1], *([clear_when[1]] if clear_when else [])]
    names = sorted({node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)} - set(_PAST))
    _check_message(name, text.message)
    fields = [field for _, field, _, _ in string.Formatter().parse(text.message) if field and field != "label"]
    screens = tuple(_screens(when[1]))[:1]
    if text.kind in MASS_KINDS and not screens:
        raise ConfigError(
            f"{name}.when: a host has thousands of {text.kind}: compare a metric with a number, joined by `and`"
        )
    kind = kinds[text.kind]
    histories = _histories(name, trees)
    made: type[UserRule] = PluginMeta(  # type: ignore[assignment]
        f"UserRule_{name}",
        (UserRule,),
        {
            "__module__": __name__,
            "__doc__": text.title or text.message,
            "abstract": True,  # made, not registered: it belongs to one configuration
            "name": name,
            "description": text.title or text.message,
            "catalogue_id": "",
            "text": text,
            "origin": origin,
            "subject": kind,
            "severity": text.severity,
            "needs": (Need(kind=kind, metrics=tuple(names)),),
            "screens": screens,
            "thresholds": {s.metric: Threshold(value=float(s.limit), unit="", source=origin) for s in screens},  # type: ignore[arg-type]
            "persist_s": text.for_s,
            "histories": {kind: histories} if histories else {},
            "explains": tuple(text.explains),
            "advice": text.advice,
            "verify": text.verify,
            "_when": when,
            "_clear_when": clear_when,
            "_names": tuple(dict.fromkeys([*names, *fields])),
        },
    )
    return made()


def _parsed(where: str, expression: str) -> tuple[str, Any]:
    try:
        tree = SimpleEval.parse(expression)
    except (InvalidExpression, SyntaxError, ValueError, RecursionError) as error:
        first = (str(error).splitlines() or ["?"])[0]
        raise ConfigError(f"{where}: not an expression: {first}") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in _PAST):
            raise ConfigError(f"{where}: the functions are {', '.join(_PAST)}")
        if isinstance(node, ast.Attribute | ast.Subscript | ast.Lambda | ast.ListComp | ast.JoinedStr):
            raise ConfigError(f"{where}: only names, numbers, texts, comparisons and arithmetic")
        if isinstance(node, ast.Pow):
            raise ConfigError(f"{where}: ** is not for here")
    return expression, tree


def _check_message(name: str, message: str) -> None:
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(message) if field is not None]
    except ValueError as error:
        raise ConfigError(f"{name}.message: {error}") from None
    for field in fields:
        if not field.isidentifier():
            raise ConfigError(f"{name}.message: {{{field}}}: only {{label}} and names of metrics and attributes")


def _screens(tree: ast.AST) -> list[Screen]:
    """Comparisons of a metric with a number that must all hold: any of them is a necessary condition."""
    if isinstance(tree, ast.Expr):
        return _screens(tree.value)
    if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And):
        return [screen for value in tree.values for screen in _screens(value)]
    if isinstance(tree, ast.Compare) and len(tree.ops) == 1:
        how = _COMPARISONS.get(type(tree.ops[0]))
        left, right = tree.left, tree.comparators[0]
        if how and isinstance(left, ast.Name) and (limit := _number(right)) is not None:
            return [Screen(left.id, how, limit)]  # type: ignore[arg-type]
        if how and isinstance(right, ast.Name) and (limit := _number(left)) is not None:
            return [Screen(right.id, _TURNED[how], limit)]  # type: ignore[arg-type]
    return []


def _number(node: ast.AST) -> float | None:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _histories(name: str, trees: list[Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for node in (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)):
        assert isinstance(node.func, ast.Name)  # noqa: S101 - checked by _parsed
        metric = node.args[0].value if len(node.args) == 2 and isinstance(node.args[0], ast.Constant) else None
        seconds = _number(node.args[1]) if len(node.args) == 2 else None
        if not isinstance(metric, str) or seconds is None or not 0 < seconds <= 86_400:
            raise ConfigError(f"{name}: {node.func.id} takes the name of a metric as text and seconds, at most a day")
        found[metric] = max(seconds, found.get(metric, 0.0))
    return found


def _mistake(name: str, error: Any) -> str:
    where = ".".join([name, *(str(part) for part in error["loc"])])
    if error["type"] == "extra_forbidden":
        return f"{where}: there is no such key; there are: {', '.join(RuleText.model_fields)}"
    if error["type"] == "missing":
        return f"{where}: missing"
    return f"{where}: {error['msg'][0].lower()}{error['msg'][1:]}"
