"""Containers, pods and systemd units: what holds each process, and what the group as a whole uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpuflight.collectors.base import Batch, Collector
from gpuflight.collectors.rates import Rates
from gpuflight.graph import Edge, Entity, edges, nodes
from gpuflight.sources.cgroup_paths import Layer
from gpuflight.sources.cgroups import CgroupCounters, CgroupInfo

if TYPE_CHECKING:
    from gpuflight.sources.cgroups import Cgroups
    from gpuflight.sources.world import World

_NO_PERIODS = "no enforcement period passed since the last round"
_NO_QUOTA = "no CPU quota is set, so nothing is throttled"


class ContainersCollector(Collector):
    """Containers, pods and systemd units that processes run in, with CPU, memory and pid use of each group."""

    expands = (nodes.Process,)
    precedence = 10

    def __init__(self, settings: Any = None) -> None:
        super().__init__(settings)
        self._host = nodes.Host(hostname="")
        self._rates = Rates()
        self._layers: dict[tuple[str, str], Entity] = {}  # by (kind, identity) of the layer
        self._entities: dict[str, Entity] = {}  # the same by entity id
        self._chains: dict[str, list[Edge]] = {}  # innermost layer's id → the edges from the host down to it
        self._members: dict[tuple[int, int], str] = {}  # (pid, start) → the innermost layer's id

    def observe(self, world: World) -> None:
        self._host = nodes.Host(hostname=world.procfs.hostname)
        self._rates.begin(world.clock.monotonic_s())
        self._layers, self._entities, self._chains, self._members = {}, {}, {}, {}
        innermost: dict[tuple[Layer, ...], str] = {}
        for pid, stat in world.procfs.processes().items():
            if stat.kernel_thread:
                continue
            try:
                info = world.cgroups.of(pid)
            except PermissionError:
                self.note("the cgroup of some processes may not be read", "run as root, or mount /proc without hidepid")
                continue
            except OSError:
                self.lose("vanished processes")
                continue
            if not info.layers:
                continue
            layer_id = innermost.get(info.layers)
            if layer_id is None:
                layer_id = innermost[info.layers] = self._add_chain(world.cgroups, info)
            self._members[pid, stat.start] = layer_id

    def expand(self, entities: Sequence[nodes.Process]) -> Batch:
        batch = Batch()
        seen: set[str] = set()
        for process in entities:
            layer_id = self._members.get((process.pid, process.start))
            if layer_id is None:
                continue
            if layer_id not in seen:
                seen.add(layer_id)
                batch.nodes.append(self._host)
                for edge in self._chains[layer_id]:
                    batch.nodes.append(self._entities[edge.target])
                    batch.edges.append(edge)
            batch.edges.append(edges.Host(layer_id, process.id))
        return batch

    def _add_chain(self, cgroups: Cgroups, info: CgroupInfo) -> str:
        """Entities of all layers of ``info``, and the edges from the host inwards; the innermost one's id."""
        outer = self._host.id
        chain: list[Edge] = []
        for layer in info.layers:
            key = (layer.kind, layer.identity)
            entity = self._layers.get(key)
            if entity is None:
                entity = self._layers[key] = self._entity(cgroups, info, layer)
                self._entities[entity.id] = entity
            chain.append(edges.Host(outer, entity.id))
            outer = entity.id
        self._chains[outer] = chain
        return outer

    def _entity(self, cgroups: Cgroups, info: CgroupInfo, layer: Layer) -> Entity:
        metrics, unknown = self._metrics(cgroups.counters(info, layer), layer)
        attributes: dict[str, Any] = {"cgroup": layer.path} if layer.path else {}
        if layer.runtime:
            attributes["runtime"] = layer.runtime
        if layer.kind == "unit":
            attributes["name"] = layer.name
            return nodes.Unit(path=layer.identity, attributes=attributes, metrics=metrics, unknown=unknown or None)
        if layer.kind == "pod":
            return self._pod(cgroups, info, layer, attributes, metrics, unknown)
        facts = cgroups.facts(layer)
        name = facts.name or layer.name or ("pod sandbox" if facts.sandbox else "")
        if not name:  # then what `docker ps` shows, the first 12 digits
            name = f"{layer.runtime or 'container'}-{layer.identity[:12]}"
            if facts.reason:
                self.note(f"the name of some containers is unknown: {facts.reason}", "run on the host, as root")
        attributes["name"] = name
        if facts.image:
            attributes["image"] = facts.image
        pod = next((outer for outer in info.layers if outer.kind == "pod"), None)
        if pod is not None:
            attributes["pod_uid"] = pod.identity
        return nodes.Container(
            container_id=layer.identity, attributes=attributes, metrics=metrics, unknown=unknown or None
        )

    def _pod(
        self,
        cgroups: Cgroups,
        info: CgroupInfo,
        layer: Layer,
        attributes: dict[str, Any],
        metrics: dict[str, int | float],
        unknown: dict[str, str],
    ) -> Entity:
        if layer.qos:
            attributes["qos"] = layer.qos
        container = next((inner for inner in info.layers if inner.kind == "container"), None)
        facts = cgroups.facts(container) if container is not None else None
        if facts is not None and facts.pod_name:
            attributes["name"] = facts.pod_name
            attributes["namespace"] = facts.pod_namespace
        else:
            attributes["name"] = f"pod-{layer.identity[:8]}"
        return nodes.Pod(uid=layer.identity, attributes=attributes, metrics=metrics, unknown=unknown or None)

    def _metrics(self, counters: CgroupCounters, layer: Layer) -> tuple[dict[str, int | float], dict[str, str]]:
        """Metrics of one group and what of them is unknown. A limit that is not set is neither: there is none."""
        unknown = dict(counters.unknown)
        metrics: dict[str, int | float] = {}
        key = (layer.kind, layer.identity)
        if counters.cpu_usage_s is not None:
            rate = self._rates.per_s((*key, "cpu"), counters.cpu_usage_s)
            if rate is None:
                unknown["cpu_pct"] = self._rates.why
            else:
                metrics["cpu_pct"] = round(100 * rate, 2)
        if counters.cpu_quota_cores is not None:
            metrics["cpu_quota_cores"] = round(counters.cpu_quota_cores, 3)
            self._throttling(counters, key, metrics, unknown)
        else:
            unknown.pop("throttled_pct", None)
        for name, value in (
            ("memory_used_bytes", counters.memory_used_bytes),
            ("memory_limit_bytes", counters.memory_limit_bytes),
            ("oom_kills_count", counters.oom_kills),
            ("pids_count", counters.pids),
            ("pids_limit_count", counters.pids_limit),
        ):
            if value is not None:
                metrics[name] = value
        return metrics, unknown

    def _throttling(
        self,
        counters: CgroupCounters,
        key: tuple[str, str],
        metrics: dict[str, int | float],
        unknown: dict[str, str],
    ) -> None:
        """Share of the enforcement periods since the last round in which the group used up its quota."""
        if counters.periods is None or counters.throttled_periods is None:
            unknown.setdefault("throttled_pct", "the kernel does not count throttling for it")
            return
        periods = self._rates.increase((*key, "periods"), counters.periods)
        throttled = self._rates.increase((*key, "throttled"), counters.throttled_periods)
        if periods is None or throttled is None:
            unknown["throttled_pct"] = self._rates.why
        elif periods[0] == 0:
            unknown["throttled_pct"] = _NO_PERIODS
            metrics["enforcement_periods_count"] = 0
        else:
            metrics["throttled_pct"] = round(100 * throttled[0] / periods[0], 2)
            metrics["enforcement_periods_count"] = int(periods[0])
