"""When rules would have fired on recorded rounds, and how right they were against labels."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import msgspec
from msgspec import Struct, field

from gpuflight.bottlenecks.engine import Engine
from gpuflight.errors import ConfigError, InputError
from gpuflight.rounds import Round


class Episode(Struct, kw_only=True):
    """A finding from its opening to its end; times are seconds since the first round. ``to_s`` is None if it was open
    at the end."""

    recording: str
    rule: str
    id: str
    severity: str
    entities: list[str]
    edges: list[str]
    message: str
    from_s: float
    to_s: float | None = None


class Label(Struct, kw_only=True, forbid_unknown_fields=True):
    """What a recording shows: ``rule`` should fire about an element whose id matches ``element`` (``*`` and ``?``), and
    open between ``from_s`` and ``to_s``. ``clears_by_s``: it should have ended by then."""

    recording: str
    rule: str
    element: str = "*"
    from_s: float = 0.0
    to_s: float = float("inf")
    clears_by_s: float | None = None


class _Labels(Struct, forbid_unknown_fields=True):
    expect: list[Label]
    ignore: list[str] = field(default_factory=list)
    """Rules that are not counted as wrong where no label names them: what the machine of the recording has anyway."""


class Score(Struct, kw_only=True):
    """Of one rule: findings that a label expects, that none does, and labels that nothing answered to."""

    rule: str
    right: int = 0
    wrong: int = 0
    missed: int = 0

    @property
    def precision(self) -> float | None:
        """Share of its findings that were expected; None without any."""
        return self.right / (self.right + self.wrong) if self.right + self.wrong else None

    @property
    def recall(self) -> float | None:
        """Share of the labels that it answered to; None without any."""
        return self.right / (self.right + self.missed) if self.right + self.missed else None


def run(engine: Engine, rounds: Iterable[Round], recording: str, *, judged: bool = False) -> list[Episode]:
    """Every finding over the rounds, in the order of their opening. ``judged``: the rounds carry findings already."""
    open_now: dict[str, Episode] = {}
    found: list[Episode] = []
    first_s: float | None = None
    for done in rounds:
        now_s = done.monotonic_s if done.monotonic_s is not None else done.time_ns / 1e9
        first_s = now_s if first_s is None else first_s
        findings = done.findings if judged else engine.judge(done).findings
        here = {finding.id for finding in findings}
        for finding in findings:
            if finding.id not in open_now:
                episode = Episode(
                    recording=recording,
                    rule=finding.rule,
                    id=finding.id,
                    severity=finding.severity,
                    entities=list(finding.entities),
                    edges=list(finding.edges),
                    message=finding.message,
                    from_s=round(now_s - first_s, 3),
                )
                open_now[finding.id] = episode
                found.append(episode)
        for gone in open_now.keys() - here:
            open_now.pop(gone).to_s = round(now_s - first_s, 3)
    return found


def read_labels(path: str) -> _Labels:
    """A labels file: TOML with ``[[expect]]`` tables, and ``ignore``. Raises InputError, ConfigError."""
    try:
        with open(path, "rb") as file:
            return msgspec.convert(tomllib.load(file), _Labels, strict=False)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from None


def score(episodes: Sequence[Episode], labels: Sequence[Label], ignored: Sequence[str] = ()) -> list[Score]:
    """Each rule that fired or should have. A label is answered by the first finding that matches it; a second finding
    about another element that matches is right as well. Notes (info) that no label names are not wrong."""
    scores: dict[str, Score] = {}

    def of(rule: str) -> Score:
        return scores.setdefault(rule, Score(rule=rule))

    answered: set[int] = set()
    for episode in episodes:
        matching = [n for n, label in enumerate(labels) if _matches(episode, label)]
        if matching:
            answered.update(matching)
            of(episode.rule).right += 1
        elif episode.rule not in ignored and episode.severity != "info":
            of(episode.rule).wrong += 1
    for number, label in enumerate(labels):
        if number not in answered:
            of(label.rule).missed += 1
    return sorted(scores.values(), key=lambda each: each.rule)


def _matches(episode: Episode, label: Label) -> bool:
    return (
        episode.rule == label.rule
        and fnmatchcase(episode.recording, label.recording)
        and label.from_s <= episode.from_s <= label.to_s
        and any(fnmatchcase(element, label.element) for element in (*episode.entities, *episode.edges))
        and (label.clears_by_s is None or (episode.to_s is not None and episode.to_s <= label.clears_by_s))
    )
