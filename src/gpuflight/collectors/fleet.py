"""Other hosts as a database has them: whatever wrote their rounds there (the MongoDB subscriber, a consumer)."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace
from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from gpuflight.collectors.base import Batch, Collector
from gpuflight.collectors.fleet_namespace import Namespace, View
from gpuflight.collectors.remote_join import Half, Joined, join_hosts
from gpuflight.collectors.remote_pool import Pool
from gpuflight.errors import InputError, SourceUnavailable
from gpuflight.graph import Entity
from gpuflight.graph.namespaces import NAME_PATTERN, valid_name
from gpuflight.round_documents import Head, head_from
from gpuflight.sources.mongo_client import MongoOptions, split_uri
from gpuflight.sources.mongodb import MongoReader

if TYPE_CHECKING:
    from gpuflight.sources.world import World

_CLOSE_S = 2.0
_IDLE_S, _IDLE_ROUNDS = 30.0, 3.0
NamespaceName = Annotated[str, Field(pattern=f"^{NAME_PATTERN}$")]


class FleetSettings(BaseModel):
    """Which database to read, and how."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    uri: SecretStr | None = Field(None, description="Connection string of MongoDB; null: no database is read.")
    database: str = Field("gpuflight", pattern=r"^[A-Za-z0-9_\-]{1,38}$", description="Name of the database.")
    namespaces: list[NamespaceName] | None = Field(None, description="Which namespaces; all that are there when null.")
    interval_s: float = Field(5.0, ge=0.1, le=86_400, description="Time between two looks (s), ± 10 %.")
    timeout_s: float = Field(30.0, gt=0, le=600, description="Longest time one question may take (s).")
    backoff_max_s: float = Field(60.0, ge=0.1, description="Longest time between two tries if it is down (s).")
    full_check_s: float = Field(
        600.0, ge=1, description="How often all of a namespace is compared, not only what changed (s)."
    )
    stale_after_s: float = Field(
        60.0, ge=0, description="A namespace without a new round for longer is marked as stale (s)."
    )
    end_after_s: float = Field(3600.0, ge=0, description="How long its last graph then stands (s).")
    show_own: bool = Field(False, description="Show this very host too, if the database has it.")
    max_entities: int = Field(
        150_000, ge=1, description="Entities of all of them; below `limits.max_nodes`, so that our own find room."
    )
    max_edges: int = Field(700_000, ge=1, description="Edges of all of them; below `limits.max_edges`.")
    tls_ca_file: str | None = Field(None, min_length=1, description="Certificate authorities (PEM).")
    tls_certificate_key_file: str | None = Field(None, min_length=1, description="Our certificate with its key (PEM).")

    @field_validator("uri")
    @classmethod
    def _is_a_connection_string(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            split_uri(value.get_secret_value())
        return value


class Seen(Struct):
    """What the last look at the database showed; replaced as a whole. ``read_ns``: when one last succeeded (wall clock
    of this host, ns; 0: never)."""

    heads: list[Head] = field(default_factory=list)
    read_ns: int = 0
    error: str = ""
    unreadable_count: int = 0


class Fleet(Collector):
    """Other hosts as a database of rounds has them, joined with each other by their sockets"""

    seeds = True
    precedence = -20  # after remote: what a peer says itself is newer
    settings_class = FleetSettings
    settings: FleetSettings

    def __init__(self, settings: FleetSettings | None = None) -> None:
        super().__init__(settings)
        self.failures_count = 0
        self.retry_after_s = 0.0
        self._reader: MongoReader | None = None
        self._where = ""
        if self.settings.uri is not None:
            options = MongoOptions(
                uri=self.settings.uri.get_secret_value(),
                timeout_s=self.settings.timeout_s,
                tls_ca_file=self.settings.tls_ca_file or "",
                tls_certificate_key_file=self.settings.tls_certificate_key_file or "",
            )
            self._reader = MongoReader(options, self.settings.database)
            self._where = self._reader.where
        self._namespaces: dict[str, Namespace] = {}
        self._seen = Seen()
        self._looking = threading.Lock()
        self._pool: Pool | None = None
        self._observed_s = self._gap_s = 0.0
        self._own: tuple[str, str] | None = None
        self._batch = Batch()
        self._halves: list[list[Half]] = []
        self._joined = Joined()

    def observe(self, world: World) -> None:
        self._batch = Batch()
        if self._reader is None:
            return
        now_s = time.monotonic()
        self._gap_s, self._observed_s = now_s - (self._observed_s or now_s), now_s
        if self._pool is None and not world.mongo.replaying:
            self._pool = Pool([self], self._poll, [self.settings.interval_s], self.settings.backoff_max_s)
            self._pool.start()
        seen, views = self._taped(world)
        now_ns = world.clock.wall_ns()
        if seen is not None:
            self._say(seen, now_ns)
        if self._own is None:
            self._own = world.procfs.identity()
        shown = self._chosen(views, self._own, now_ns)
        self._join(shown)
        for view in shown:
            self._show(view, now_ns)

    def seed(self) -> Batch:
        return self._batch

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop(_CLOSE_S)
        # A look that hangs keeps its connection; the threads of the driver hold up no end of the process.
        if self._reader is not None and self._looking.acquire(timeout=_CLOSE_S):
            try:
                self._reader.close()
            finally:
                self._looking.release()

    # --- beside the rounds -------------------------------------------------------------------------------------------

    def _poll(self, _index: int) -> None:
        """One look, unless rounds are no longer made with this collector. Never raises."""
        idle_s = max(_IDLE_S, _IDLE_ROUNDS * self._gap_s)
        if time.monotonic() - self._observed_s < idle_s:
            self.look()

    def look(self) -> None:
        """Read what changed. Never raises; ``observe`` says what went wrong."""
        assert self._reader is not None  # noqa: S101 - without one nothing polls
        with self._looking:
            try:
                self._look(self._reader)
            except SourceUnavailable as error:
                self.failures_count += 1
                self._seen = replace(self._seen, error=str(error))
            else:
                self.failures_count = 0

    def _look(self, reader: MongoReader) -> None:
        heads: list[Head] = []
        unreadable_count = 0
        for document in reader.heads(self.settings.namespaces):
            try:
                head = head_from(document)
            except InputError:
                unreadable_count += 1
                continue
            if not valid_name(head.namespace):
                unreadable_count += 1
            elif head.complete_seq:
                heads.append(head)
        heads.sort(key=lambda head: head.namespace)
        for head in heads:
            if time.time_ns() - head.written_ns > (self.settings.end_after_s + self.settings.stale_after_s) * 1e9:
                self._namespaces.pop(head.namespace, None)
                continue
            known = self._namespaces.setdefault(head.namespace, Namespace(head.namespace))
            now_s = time.monotonic()
            full = now_s - known.full_s > self.settings.full_check_s
            known.update(reader, head, full=full)
            if full:
                known.full_s = now_s
        for name in self._namespaces.keys() - {head.namespace for head in heads}:
            del self._namespaces[name]
        self._seen = Seen(heads, time.time_ns(), "", unreadable_count)

    # --- in a round --------------------------------------------------------------------------------------------------

    def _taped(self, world: World) -> tuple[Seen | None, list[View]]:
        """What was read, or what was recorded of it; None for a recording that does not tell, which was said."""
        seen = self._seen
        mongo = world.mongo
        if not mongo.replaying and not mongo.recording:
            return seen, self._views(seen)
        try:
            raw = mongo.taped(self._where, lambda: msgspec.msgpack.encode(seen))
            seen = msgspec.msgpack.decode(raw, type=Seen)
        except (OSError, SourceUnavailable, msgspec.DecodeError, UnicodeDecodeError) as error:
            self.note(f"{self._where}: {_words(error)}")
            return None, []
        for view in self._views(seen) if mongo.recording else []:
            mongo.taped(f"{self._where} {view.head.namespace}", view.encoded)
        if mongo.replaying:
            for head in seen.heads:
                try:
                    raw = mongo.taped(f"{self._where} {head.namespace}", bytes)
                    self._namespaces.setdefault(head.namespace, Namespace(head.namespace)).take(head, raw)
                except (OSError, SourceUnavailable, InputError, ValueError) as error:
                    self.note(f"{head.namespace}: {_words(error)}")
        return seen, self._views(seen)

    def _views(self, seen: Seen) -> list[View]:
        spaces = self._namespaces
        found = [spaces.get(head.namespace) for head in seen.heads]
        return [known.view for known in found if known is not None and known.view is not None]

    def _say(self, seen: Seen, now_ns: int) -> None:
        if seen.error and seen.read_ns:
            age_s = max(0.0, (now_ns - seen.read_ns) / 1e9)
            self.note(f"{seen.error}; what was read stands, {age_s:.0f} s old", "it is tried again and again")
        elif seen.error:
            self.note(seen.error, "it is tried again and again")
        elif not seen.read_ns:
            self.note(f"{self._where}: no answer yet")
        if seen.unreadable_count:
            self.lose("namespaces that cannot be read", seen.unreadable_count)

    def _chosen(self, views: list[View], own: tuple[str, str], now_ns: int) -> list[View]:
        """What is shown: not this host itself, not what ended, no more than there is room for."""
        left_nodes, left_edges = self.settings.max_entities, self.settings.max_edges
        shown = []
        for view in views:
            head = view.head
            identity = (str(head.env.get("machine_id", "")), str(head.env.get("boot_id", "")))
            if own[1] and identity == own and not self.settings.show_own:
                self.note(f"{head.namespace}: it is this very host; it is not drawn twice")
                continue
            age_s = _age_s(head, now_ns)
            if age_s > self.settings.stale_after_s + self.settings.end_after_s:
                self.note(f"{head.namespace}: no round for {age_s:.0f} s, so its graph has ended")
                continue
            nodes_count, edges_count = len(view.entities) + 1, len(view.connections)
            if nodes_count > left_nodes or edges_count > left_edges:
                limit = "max_entities" if nodes_count > left_nodes else "max_edges"
                self.note(f"{head.namespace}: left out, since all namespaces together have more than {limit}")
                self.lose("entities of namespaces beyond the limit", nodes_count)
                continue
            left_nodes -= nodes_count
            left_edges -= edges_count
            if view.unreadable_count:
                self.lose("documents that cannot be read", view.unreadable_count)
            shown.append(view)
        return shown

    def _join(self, shown: list[View]) -> None:
        """Join the halves of hosts; anew only if those of any changed."""
        halves = [view.halves for view in shown if view.halves]
        if len(halves) != len(self._halves) or any(a is not b for a, b in zip(halves, self._halves, strict=True)):
            self._halves = halves
            stand_ins: dict[str, Entity] = {}
            for view in shown:
                stand_ins.update(view.stand_ins)
            by_host: dict[str, list[Half]] = {}
            for half in (half for found in halves for half in found):  # a host that comes nested is a side of its own
                by_host.setdefault(half.own.partition("(ns=")[2].partition(",")[0], []).append(half)
            self._joined = join_hosts([], by_host, stand_ins)
        if self._joined.ambiguous_count:
            self.lose("connections that more than two hosts claim", self._joined.ambiguous_count)
        self._batch.nodes += self._joined.nodes
        self._batch.edges += self._joined.edges

    def _show(self, view: View, now_ns: int) -> None:
        head, host = view.head, view.host
        assert host is not None  # noqa: S101 - made for every view
        age_s = _age_s(head, now_ns)
        env = head.env
        told = {
            "name": host.hostname,
            "machine_id": env.get("machine_id"),
            "boot_id": env.get("boot_id"),
            "gpuflight_version": env.get("version"),
            "database": self._where,
        }
        attributes = {**{name: value for name, value in told.items() if value}, **host.attributes}
        metrics = {**host.metrics, "round_age_s": round(age_s, 1)}
        if age_s > self.settings.stale_after_s:
            attributes["stale"] = True
            metrics["stale_s"] = round(age_s, 1)
        self._batch.nodes.append(replace(host, attributes=attributes, metrics=metrics))
        self._batch.nodes += view.entities
        self._batch.edges += view.connections


def _age_s(head: Head, now_ns: int) -> float:
    """Since the last round was written whole, by the clocks of its writer and of this host."""
    return max(0.0, (now_ns - head.written_ns) / 1e9)


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
