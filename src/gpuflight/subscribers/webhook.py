"""The subscriber that tells a chat, a pager or any other receiver of webhooks about findings."""

from __future__ import annotations

import string
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from pydantic import Field, field_validator

from gpuflight.errors import DeliveryError
from gpuflight.graph.codec import time_text
from gpuflight.rounds import Finding, Round, Severity
from gpuflight.subscribers.base import Parcel, parcel
from gpuflight.subscribers.encoding import Encoding, compress
from gpuflight.subscribers.http_post import HttpPost, HttpPostSettings

_FIELDS = (
    "id", "rule", "severity", "change", "message", "entities", "edges", "evidence", "cost", "advice", "verify",
    "hostname", "round", "time", "icon",
)  # fmt: skip
_TAKEN = ("id", "rule", "severity", "message", "cost", "advice", "verify")
_ICONS = {"critical": "\N{LARGE RED CIRCLE}", "warn": "\N{LARGE YELLOW CIRCLE}", "info": "\N{LARGE BLUE CIRCLE}"}
_CLEARED = "\N{LARGE GREEN CIRCLE}"
_DEPTH = 8

_formatter = string.Formatter()


class WebhookSettings(HttpPostSettings):
    """Settings of the webhook subscriber."""

    content: Literal["graph"] = Field(default="graph", description="of no effect: findings are sent")
    compression: Encoding = Field(default="none", description="content coding of the body")
    severities: list[Severity] = Field(
        default=["warn", "critical"], min_length=1, description="of findings that are told"
    )
    changes: list[Literal["opened", "updated", "cleared"]] = Field(
        default=["opened", "cleared"], min_length=1, description="what is told of a finding"
    )
    symptoms: bool = Field(default=False, description="tell also findings that another one explains")
    max_per_round: int = Field(default=20, ge=1, le=1000, description="of more than so many at once, how many more")
    template: dict[str, Any] | None = Field(
        default=None,
        description='the body as JSON, with {names} in its texts, as {"text": "{severity}: {message} on {hostname}"};'
        f" names: {', '.join(_FIELDS)}; null: all of the finding",
    )

    @field_validator("template")
    @classmethod
    def _has_known_names(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        for text in _texts(value, 0):
            try:
                fields = [name for _, name, _, _ in _formatter.parse(text) if name is not None]
            except ValueError as error:
                raise ValueError(f"{text[:60]!r}: {error}") from None
            for name in fields:
                if name not in _FIELDS:
                    raise ValueError(f"there is no name {{{name}}}; there are: {', '.join(_FIELDS)}")
        return value


class Webhook(HttpPost):
    """Tells a URL about findings that open and end, one request each, by a template."""

    stability = "beta"
    settings_class = WebhookSettings

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._told: dict[str, Finding] = {}

    def pack(self, completed: Round, after: int | None) -> Parcel:
        """What changed since the round that was packed before: rounds that were left out in between lose nothing."""
        known, self._told = self._told, {finding.id: finding for finding in completed.findings}
        events = [body for change, finding in self._changes(known) if (body := self._body(change, finding, completed))]
        most = self.settings.max_per_round
        if len(events) > most:
            more = Finding(id="more", rule="more", severity="info", message=f"and {len(events) - most} further changes")
            events = [*events[:most], self._rendered("opened", more, completed)]
        return parcel(completed, msgspec.json.encode(events))

    def send(self, packed: Parcel) -> None:
        for number, body in enumerate(msgspec.json.decode(packed.data)):
            self.send_body(packed, msgspec.json.encode(body), str(number))

    def trial(self, completed: Round) -> None:
        """Posts a made-up finding with the header ``Gpuflight-Trial: true``."""
        made_up = Finding(id="trial", rule="trial", severity="info", message="a trial: nothing was found")
        body = msgspec.json.encode(self._rendered("opened", made_up, completed))
        self._post(parcel(completed, compress(body, self.settings.compression)), (b"Gpuflight-Trial", b"true"))

    def _changes(self, known: dict[str, Finding]) -> Iterator[tuple[str, Finding]]:
        for finding_id, finding in self._told.items():
            before = known.get(finding_id)
            if before is None:
                yield "opened", finding
            elif before.severity != finding.severity:
                yield "updated", finding
        for finding_id, finding in known.items():
            if finding_id not in self._told:
                yield "cleared", finding

    def _body(self, change: str, finding: Finding, completed: Round) -> Any:
        settings = self.settings
        wanted = change in settings.changes and finding.severity in settings.severities
        if not wanted or (finding.explained_by and not settings.symptoms):
            return None
        return self._rendered(change, finding, completed)

    def _rendered(self, change: str, finding: Finding, completed: Round) -> Any:
        host = completed.env.hostname
        about = {"change": change, "hostname": host, "round": completed.number, "time": time_text(completed.time_ns)}
        if self.settings.template is None:
            return {**about, "finding": {**msgspec.to_builtins(finding), "change": change}}
        evidence = ", ".join(f"{seen.metric} {seen.value} {seen.unit}".rstrip() for seen in finding.evidence)
        values = {
            **{
                name: getattr(finding, name)
                for name in ("id", "rule", "severity", "message", "cost", "advice", "verify")
            },
            **about,
            "entities": ", ".join(finding.entities),
            "edges": ", ".join(finding.edges),
            "evidence": evidence,
            "icon": _CLEARED if change == "cleared" else _ICONS[finding.severity],
        }
        return _filled(self.settings.template, values)


def _texts(value: Any, depth: int) -> Iterator[str]:
    if depth > _DEPTH:
        raise ValueError(f"nested more than {_DEPTH} deep")
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each, depth + 1)


def _filled(value: Any, names: dict[str, Any]) -> Any:
    """The template with its names filled in. They stand in JSON texts, so nothing in them can end one."""
    if isinstance(value, str):
        try:
            return _formatter.vformat(value, (), names)
        except (ValueError, TypeError) as error:
            raise DeliveryError(f"the template {value[:60]!r}: {error}", retryable=False) from error
    if isinstance(value, dict):
        return {key: _filled(each, names) for key, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, names) for each in value]
    return value
