"""Metrics that users measure themselves: probes in C with a TOML beside them, from a folder of theirs."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from msgspec import Struct, field
from pydantic import BaseModel, ConfigDict, Field

from gpuflight.collectors.base import Batch, Collector
from gpuflight.collectors.user_probe_entities import Gone, Subjects
from gpuflight.collectors.user_probe_rows import Row, Rows, metrics_of
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import Entity, edges, nodes
from gpuflight.sources.bpf.user_probe_folder import Found
from gpuflight.sources.bpf.user_probe_spec import ProbeMistake, Spec
from gpuflight.sources.bpf.user_probes import UserProbe, UserProbes, claims, read_spec

if TYPE_CHECKING:
    from gpuflight.sources.world import World

RETRY_ROUNDS = 12
"""Rounds after which a probe that could not be loaded is tried again though its files did not change."""

LOADING_S = 2.0
"""Once so much time of a round went into compiling and loading, further probes wait for the next one."""


class UserProbesSettings(BaseModel):
    """Where a user's own probes lie."""

    model_config = ConfigDict(extra="forbid")

    folder: str | None = Field(
        None,
        description="folder with NAME.toml and NAME.c (or NAME.bpf.o) of each probe; null: none (docs/user-probes.md)",
    )


class _Known(Struct):
    """One probe between rounds: loaded, or why it is not."""

    fingerprint: str
    probe: UserProbe | None = None
    reason: str = ""
    hint: str = ""
    rounds: int = 0
    rows: list[Rows] = field(default_factory=list)
    lost: dict[int, int] = field(default_factory=dict)
    costs: dict[str, tuple[int, int]] = field(default_factory=dict)

    def close(self) -> None:
        if self.probe is not None:
            self.probe.close()
            self.probe = None


class UserProbeCollector(Collector):
    """Users' own probes: metrics of processes, threads, disks and more, counted by their C programs in the kernel"""

    name = "user_probes"
    seeds = True
    precedence = -10  # a metric of ours is not replaced by one of the same name
    deadline_s = 10.0
    settings_class = UserProbesSettings
    settings: UserProbesSettings

    def __init__(self, settings: UserProbesSettings | None = None) -> None:
        super().__init__(settings)
        self._world: World | None = None
        self._known: dict[str, _Known] = {}
        self._batch = Batch()

    def observe(self, world: World) -> None:
        self._batch = Batch()
        if self._world is not world:
            self.close()
            self._world = world
            self._source = UserProbes(self.settings.folder, world.probes)
        try:
            found = self._source.scan()
        except SourceUnavailable:
            self.close()
            raise
        self._world = world
        self._load(found, world)
        subjects = Subjects(world)
        for name, known in sorted(self._known.items()):
            if known.probe is None:
                self.note(known.reason, known.hint)
                continue
            for missing in known.probe.missing:
                self.note(f"{name}.toml: {missing}")
            self._look_everywhere(known, known.probe)
            self._read(known, known.probe, subjects, world.clock.monotonic_s())

    def seed(self) -> Batch:
        return self._batch

    def close(self) -> None:
        for known in self._known.values():
            known.close()
        self._known.clear()
        self._world = None

    def _look_everywhere(self, known: _Known, probe: UserProbe) -> None:
        if probe.everywhere and known.rounds and known.rounds % RETRY_ROUNDS == 0:
            try:
                probe.refresh()
            except SourceUnavailable as error:
                self.note(f"{probe.name}.toml: {error.reason}", error.hint)
        for each in probe.everywhere:
            target = each.attach.target[1]
            for why in each.refused.values():
                self.note(f"{probe.name}.toml: {target} is not probed in every file: {why}")
            if each.unreadable:
                self.note(
                    f"{probe.name}.toml: {target} is not looked for in processes of others",
                    "run as root",
                    each.unreadable,
                )
            if not each.attached:
                self.note(f"{probe.name}.toml: no process has {target} in memory yet")

    def _load(self, found: list[Found], world: World) -> None:
        """Bring what is loaded in line with what lies in the folder."""
        names = {one.name for one in found if not one.mistake}
        for name in self._known.keys() - names:
            self._known.pop(name).close()
        began_s = world.clock.monotonic_s()
        taken: dict[tuple[str, str], str] = {}
        for one in found:
            if one.mistake:
                self.note(one.mistake)
                continue
            try:
                spec = read_spec(one)
                self._claim(one, spec, taken)
            except ProbeMistake as error:
                self._refuse(one, f"{error.where}: {error.what}", error.hint)
                continue
            known = self._known.get(one.name)
            if known is not None and known.fingerprint == one.fingerprint:
                known.rounds += 1
                if known.probe is not None or known.rounds % RETRY_ROUNDS:
                    continue
            if world.clock.monotonic_s() - began_s > LOADING_S:
                self.note("probes that wait to be loaded in the next round")
                continue
            self._open(one, spec)

    def _claim(self, found: Found, spec: Spec, taken: dict[tuple[str, str], str]) -> None:
        for claim in claims(spec):
            if claim in taken:
                raise ProbeMistake(
                    found.file, 0, f"{claim[0]} has {claim[1]} from {taken[claim]} already", "rename one"
                )
        taken.update(dict.fromkeys(claims(spec), found.file))

    def _refuse(self, found: Found, reason: str, hint: str) -> None:
        before = self._known.get(found.name)
        if before is not None:
            before.close()
        rounds = before.rounds if before is not None and before.fingerprint == found.fingerprint else 0
        self._known[found.name] = _Known(found.fingerprint, reason=reason, hint=hint, rounds=rounds)

    def _open(self, found: Found, spec: Spec) -> None:
        before = self._known.pop(found.name, None)
        if before is not None:
            before.close()
        try:
            probe = self._source.load(found, spec)
        except SourceUnavailable as error:
            named = error.reason if error.reason.startswith(found.name) else f"{found.file}: {error.reason}"
            self._refuse(found, named, error.hint)
            return
        rows = [Rows(described, probe.shapes[described.name]) for described in spec.maps]
        self._known[found.name] = _Known(found.fingerprint, probe, rows=rows)

    def _read(self, known: _Known, probe: UserProbe, subjects: Subjects, now_s: float) -> None:
        read: dict[str, list[tuple[bytes, bytes]]] = {}
        for rows in known.rows:
            name = rows.spec.name
            try:
                if name not in read:
                    read[name] = probe.loaded.read(name)
                found = rows.read(read[name], now_s)
            except (OSError, SourceUnavailable, struct.error) as error:
                self.note(f"{probe.name}.toml: the map {name} cannot be read: {error}")
                continue
            shape = probe.shapes[name]
            if shape.grows and len(read[name]) >= shape.entries:
                self.note(
                    f"the map {name} of {probe.name} is full ({shape.entries} rows): new ones are not counted",
                    f"raise entries of the map in {probe.name}.toml",
                )
            if rows.restarted:
                self.lose("rows that the map dropped and began again", rows.restarted)
            self._show(probe, rows, found, subjects)
        self._count(known, probe)

    def _show(self, probe: UserProbe, rows: Rows, found: list[Row], subjects: Subjects) -> None:
        spec = rows.spec
        if subjects.foreign_pids and spec.entity in ("Process", "Thread"):
            self.note(
                "process ids of the kernel mean nothing in the pid namespace that gpuflight runs in",
                "run gpuflight in the host's pid namespace (docker run --pid=host, hostPID: true)",
            )
            return
        members: dict[str, tuple[Entity, list[Row]]] = {}
        for row in found:
            try:
                entity = subjects.of(spec.entity, row.key, spec.id)
            except Gone:
                self._drop(probe, rows, row, "rows of what has ended")
                continue
            except (OSError, ValueError):
                self.lose(f"rows that belong to no known {spec.entity}")
                continue
            if not rows.belongs(row, entity.id):  # what was counted is of both
                self._drop(probe, rows, row, "rows whose process number was used again")
                continue
            members.setdefault(entity.id, (entity, []))[1].append(row)
        for entity, part in members.values():
            entity.metrics, unknown = metrics_of(spec, part, rows.elapsed_s)
            entity.unknown = unknown or None
            self._batch.nodes.append(entity)
            if isinstance(entity, nodes.Thread):
                owner = subjects.process_of_thread(part[0].key)
                self._batch.nodes.append(owner)
                self._batch.edges.append(edges.Own(owner.id, entity.id))

    def _drop(self, probe: UserProbe, rows: Rows, row: Row, what: str) -> None:
        self.lose(what)
        rows.forget(row.raw_key)
        if not probe.shapes[rows.spec.name].keyed:
            return
        try:
            probe.loaded.delete(rows.spec.name, row.raw_key)
        except (OSError, SourceUnavailable):
            self.lose("rows that could not be deleted")

    def _count(self, known: _Known, probe: UserProbe) -> None:
        """What the probe lost by its own count, and what it cost, since the last round."""
        try:
            losses = probe.loaded.losses() if "gf_losses" in probe.shapes else {}
            costs = probe.loaded.costs()
        except (OSError, SourceUnavailable) as error:
            self.note(f"{probe.name}: losses and costs cannot be read: {error}")
            return
        for which, count in losses.items():
            if count > known.lost.get(which, 0):
                what = probe.spec.losses.get(which, f"losses of kind {which} of {probe.name}")
                self.lose(what, count - known.lost.get(which, 0))
        known.lost = losses
        for cost in costs:
            if cost.run_count is None or cost.run_time_ns is None:
                continue
            runs, time_ns = known.costs.get(cost.program, (0, 0))
            known.costs[cost.program] = cost.run_count, cost.run_time_ns
            self.spend(f"{probe.name}.{cost.program}", cost.run_count - runs, (cost.run_time_ns - time_ns) / 1e6)
