"""Subscribers that come and go while the server runs, and that a restart brings back.

Those of the configuration can be paused and tried, not changed: the file says what they are. The graph that the
controller keeps is no subscriber, so nothing here can take it away.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from typing import Any

import msgspec
from pydantic import ValidationError

from gpuflight.errors import ConfigError, InputError
from gpuflight.registry import plugins
from gpuflight.rounds import Round
from gpuflight.settings import Settings, dump, nearest, problems
from gpuflight.settings.dump import MASK
from gpuflight.subscribers.atomic import write_atomic
from gpuflight.subscribers.base import Subscriber, SubscriberSettings
from gpuflight.subscribers.delivery import CLOSE_DEADLINE_S, SubscriberSet, SubscriberStatus
from gpuflight.subscribers.netguard import Refused, Rules, check
from gpuflight.subscribers.spool import state_folder
from gpuflight.subscribers.trial import TRIAL_DEADLINE_S, try_delivery

log = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_CREATED = 64
"""Each has a thread or two."""
_VERSION = 1


class Rejected(InputError):
    """A request that is not carried out: HTTP status, code for programs, and what more is known."""

    def __init__(self, status: int, code: str, message: str, detail: Any = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.detail = detail


class SubscriberManager(SubscriberSet):
    """The set of all subscribers, with those created at run time. ``path`` is the file that keeps the latter, None
    keeps nothing. Every method may be called from any thread; those that change something take turns."""

    def __init__(self, rules: Rules = Rules(), path: str | None = None) -> None:  # noqa: B008 - it is frozen
        super().__init__()
        self.rules = rules
        self.path = path
        self._management = threading.Lock()
        self._created: dict[str, dict[str, Any]] = {}
        self._broken: list[Any] = []
        """What the file held and could not be brought back: kept there, for somebody to repair."""
        self._trials: set[str] = set()

    @classmethod
    def from_settings(cls, settings: Settings) -> SubscriberManager:
        """As the settings say: what may be touched, and where it is kept. Brings nothing back yet, see ``restore``."""
        reach = settings.server.reach
        rules = Rules(url_hosts=tuple(reach.url_hosts), folders=tuple(reach.folders), loopback=reach.loopback)
        return cls(rules, os.path.join(settings.server.state_folder or state_folder(), "subscribers.json"))

    def restore(self) -> None:
        """Bring back what an earlier process created. What cannot be, for whatever reason, is logged and left in the
        file; a file that cannot be read is moved aside. Never raises."""
        with self._management:
            for line in self._read():
                try:
                    settings, paused = dict(line["settings"]), bool(line["paused"])
                    subscriber = self._build(settings)
                    super().add(subscriber)
                    if paused:
                        super().pause(subscriber.label)
                except (KeyError, TypeError, ValueError, ConfigError, InputError) as error:
                    log.warning("a subscriber of %s is left out: %s", self.path, error)
                    self._broken.append(line)
                else:
                    self._created[subscriber.label] = {"settings": settings, "paused": paused}

    # --- asking ---

    def types(self) -> list[dict[str, Any]]:
        """Every type there is: name, what it does, JSON schema of its settings."""
        return [
            {
                "type": name,
                "description": cls.description,
                "version": cls.version,
                "stability": cls.stability,
                "schema": (cls.settings_class or SubscriberSettings).model_json_schema(),
            }
            for name, cls in plugins(Subscriber).items()
        ]

    def overview(self) -> list[dict[str, Any]]:
        """Every subscriber with its state and statistics, without settings."""
        return [self._shown(line) for line in self.status()]

    def describe(self, name: str) -> dict[str, Any]:
        """One subscriber with its settings, secrets masked."""
        subscriber = self._member(name)
        settings = {**dump(subscriber.settings), "type": subscriber.name, "name": name}
        return {**self.statistics(name), "settings": settings}

    def statistics(self, name: str) -> dict[str, Any]:
        """One subscriber as in ``overview``."""
        for line in self.status():
            if line.name == name:
                return self._shown(line)
        raise _no_such(name)

    # --- changing ---

    def create(self, settings: dict[str, Any]) -> str:
        """A new subscriber by its settings, ``type`` among them; returns its name."""
        with self._management:
            if len(self._created) >= MAX_CREATED:
                raise Rejected(409, "too_many", f"there are {MAX_CREATED} created subscribers already")
            subscriber = self._build(settings)
            name = subscriber.label
            if name in self.names():
                raise Rejected(409, "name_taken", f"there is a subscriber {name!r} already")
            self._created[name] = {"settings": {**settings, "name": name}, "paused": False}
            try:
                self._save()
                self.add(subscriber)
            except BaseException:
                del self._created[name]
                raise
            return name

    def update(self, name: str, changes: dict[str, Any]) -> None:
        """Some settings anew; what is not named, or masked, stays. Its queue begins anew, but for a spool that stays
        where it is."""
        with self._management:
            before = self._own(name)
            for fixed in ("name", "type"):
                if fixed in changes and changes[fixed] != before["settings"].get(fixed):
                    raise _bad(fixed, f"{fixed}: cannot be changed")
            settings = {**before["settings"], **_unmasked(changes, before["settings"])}
            old, new = self._member(name), self._build(settings)
            self._created[name] = {"settings": settings, "paused": before["paused"]}
            try:
                self._save()
            except BaseException:
                self._created[name] = before
                raise
            self.remove(name, discard_spool=_spool_of(old) not in (None, _spool_of(new)))
            self.add(new)
            if before["paused"]:
                super().pause(name)

    def delete(self, name: str) -> bool:
        """End a subscriber, its spool included; False if it did not answer and was left behind."""
        with self._management:
            before = self._own(name)
            del self._created[name]
            try:
                self._save()
            except BaseException:
                self._created[name] = before
                raise
            return self.remove(name, CLOSE_DEADLINE_S, discard_spool=True)

    def set_paused(self, name: str, paused: bool) -> None:
        """Pause or resume; outlives the process unless the subscriber comes from the configuration."""
        with self._management:
            self._member(name)
            if name in self._created:
                before = self._created[name]["paused"]
                self._created[name]["paused"] = paused
                try:
                    self._save()
                except BaseException:
                    self._created[name]["paused"] = before
                    raise
            (super().pause if paused else super().resume)(name)

    def trial(self, name: str, completed: Round, timeout_s: float = TRIAL_DEADLINE_S) -> dict[str, Any]:
        """A trial delivery beside the queue: whether it went well in time, how long it took, what went wrong."""
        subscriber = self._member(name)
        with self._management:
            if name in self._trials:
                raise Rejected(409, "trial_under_way", f"a trial of {name!r} has not ended yet")
            self._trials.add(name)
        return try_delivery(subscriber, completed, timeout_s, lambda: self._trials.discard(name))

    # --- inside ---

    def _shown(self, line: SubscriberStatus) -> dict[str, Any]:
        plain: dict[str, Any] = msgspec.to_builtins(line)
        plain["statistics"]["dropped"] = line.statistics.dropped
        created = line.name in self._created
        return {**plain, "origin": "rest" if created else "configuration"}

    def _member(self, name: str) -> Subscriber:
        try:
            return self.member(name)
        except InputError:
            raise _no_such(name) from None

    def _own(self, name: str) -> dict[str, Any]:
        self._member(name)
        if name not in self._created:
            raise Rejected(409, "of_the_configuration", f"{name!r} comes from the configuration: change it there")
        return self._created[name]

    def _build(self, settings: dict[str, Any]) -> Subscriber:
        """A subscriber by its settings, and within the rules. Raises Rejected with the field."""
        known = plugins(Subscriber)
        kind = settings.get("type")
        if not isinstance(kind, str) or kind not in known:
            close = nearest(str(kind), known)
            hint = f"did you mean {close}?" if close else f"there are: {', '.join(known)}"
            raise _bad(
                "type", "type: missing" if kind is None else f"type: there is no subscriber type {kind!r}; {hint}"
            )
        cls = known[kind]
        model = cls.settings_class or SubscriberSettings
        try:
            checked = model.model_validate_json(json.dumps(settings), strict=True)
        except ValidationError as error:
            found = problems(error, model)
            detail = [{"field": ".".join(map(str, where)) or "settings", "problem": line} for where, line in found]
            raise Rejected(422, "bad_settings", "; ".join(line for _, line in found), detail) from None
        if not NAME.fullmatch(checked.name or kind):
            raise _bad("name", "name: letters, digits, dot, hyphen and underscore, at most 64, not a mark first")
        subscriber: Subscriber = cls(checked)
        try:
            check(subscriber.outside(), self.rules)
        except Refused as error:
            raise Rejected(
                422, "not_allowed", str(error), [{"field": _touching(checked), "problem": str(error)}]
            ) from None
        subscriber.rules = self.rules
        return subscriber

    def _read(self) -> list[Any]:
        if self.path is None:
            return []
        try:
            with open(self.path, "rb") as file:
                data = json.load(file)
            if data["version"] != _VERSION or not isinstance(data["subscribers"], list):
                raise ValueError(f"version {data['version']!r}")
            return list(data["subscribers"])
        except FileNotFoundError:
            return []
        except OSError as error:
            log.warning("%s cannot be read: %s", self.path, error.strerror)
        except (ValueError, KeyError, TypeError) as error:
            aside = f"{self.path}.damaged-{time.time_ns()}"
            log.warning("%s is not what this version writes (%s); it is moved to %s", self.path, error, aside)
            try:
                os.replace(self.path, aside)
            except OSError as problem:
                log.warning("%s: %s", self.path, problem.strerror)
        return []

    def _save(self) -> None:
        if self.path is None:
            return
        data = {"version": _VERSION, "subscribers": [*self._created.values(), *self._broken]}
        try:
            os.makedirs(os.path.dirname(self.path) or ".", mode=0o700, exist_ok=True)
            write_atomic(self.path, json.dumps(data, indent=1).encode() + b"\n", mode=0o600)
        except OSError as error:
            raise Rejected(503, "not_saved", f"{self.path}: {error.strerror}; nothing was changed") from None


def _unmasked(changes: dict[str, Any], before: Any) -> dict[str, Any]:
    """Changes in which a masked secret stands for the one that there is: what ``describe`` gave can be sent back."""
    known = before if isinstance(before, dict) else {}
    result = {}
    for key, value in changes.items():
        if value == MASK and key in known:
            value = known[key]
        elif isinstance(value, dict):
            value = _unmasked(value, known.get(key))
        result[key] = value
    return result


def _spool_of(subscriber: Subscriber) -> str | None:
    settings = subscriber.settings
    return str(getattr(settings, "spool_folder", None)) if settings.policy == "spool" else None


def _touching(settings: Any) -> str:
    return next((name for name in ("url", "brokers", "path", "endpoint_url") if hasattr(settings, name)), "type")


def _no_such(name: str) -> Rejected:
    return Rejected(404, "no_such_subscriber", f"there is no subscriber {name!r}")


def _bad(field: str, problem: str) -> Rejected:
    return Rejected(422, "bad_settings", problem, [{"field": field, "problem": problem}])
