"""NUMA nodes and CPU packages, and on which of them each process's memory lies and may run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from pydantic import BaseModel, ConfigDict, Field

from gpuflight.collectors.base import Batch, Collector
from gpuflight.collectors.rates import Rates
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import Edge, Entity, edges, nodes
from gpuflight.sources.cpus import CpuTopology
from gpuflight.sources.numa_maps import parse_numa_maps
from gpuflight.sources.sysfs import SysFs, format_list, parse_list, reason

if TYPE_CHECKING:
    from gpuflight.sources.procfs import ProcFs, ProcStat
    from gpuflight.sources.world import World

_NODES = "devices/system/node"
_NUMASTAT = ("numa_hit", "numa_miss", "numa_foreign", "local_node", "other_node")
_MEMINFO = {"MemTotal": "memory_total_bytes", "MemFree": "memory_free_bytes", "MemUsed": "memory_used_bytes"}
_ACCELERATOR_DEVICES = ("/dev/nvidia", "/dev/davinci", "/dev/kfd", "/dev/dri/renderD")


class NumaSettings(BaseModel):
    """What the numa collector reads."""

    model_config = ConfigDict(extra="forbid")

    min_rss_bytes: int = Field(64 << 20, ge=0, description="Smallest resident size of which numa_maps is read.")
    budget_ms: float = Field(40.0, gt=0, description="Time for numa_maps in one round; the rest waits its turn.")
    affinity_recheck_rounds: int = Field(60, ge=1, description="How often a process's allowed CPUs are read again.")
    max_threads: int = Field(512, ge=0, description="Most threads of a process whose CPU time is split by node.")


class _Memory(Struct, gc=False):
    """What the last read of a process's numa_maps gave: bytes by node, or why there is none."""

    sizes: dict[int, int]
    why: str
    round: int


class _Allowed(Struct, gc=False):
    """CPUs and memory nodes a process may use, in list format."""

    cpus: str
    nodes: list[int]
    mems: str
    round: int


class Numa(Collector):
    """NUMA nodes, CPU packages and distances; allowed CPUs and resident memory of processes by node."""

    seeds = True
    expands = (nodes.Process,)
    settings_class = NumaSettings
    settings: NumaSettings

    def __init__(self, settings: NumaSettings | None = None) -> None:
        super().__init__(settings)
        self._topology: CpuTopology | None = None
        self._rates = Rates()
        self._memory: dict[str, _Memory] = {}
        self._allowed: dict[str, _Allowed] = {}
        self._by_cpus: dict[str, list[int]] = {}
        self._layout: Batch | None = None
        self._generation = -1
        self._round = 0
        self._only_node: dict[int, tuple[nodes.Process, ProcStat, Edge]] = {}

    def observe(self, world: World) -> None:
        self._round += 1
        self._only_node_before, self._only_node = self._only_node, {}
        self._clock = world.clock
        self._sysfs: SysFs = world.sysfs
        self._procfs: ProcFs = world.procfs
        self._budget_s = self.settings.budget_ms / 1000
        if self._topology is None:
            self._topology = CpuTopology(world.sysfs, world.fs)
        self._topology.refresh()
        if self._generation != self._sysfs.generation:
            self._generation = self._sysfs.generation
            self._layout = None
            self._by_cpus.clear()
        if not self._topology.nodes and not self._topology.packages:
            raise SourceUnavailable("sysfs shows neither CPUs nor NUMA nodes", "mount /sys")
        if self._topology.nodes_reason:
            self.note(self._topology.nodes_reason)
        self._rates.begin(world.clock.monotonic_s())
        self._processes: dict[int, ProcStat] = world.procfs.processes()
        self._gpu_pids = self._pids_with_accelerator() if len(self._topology.nodes) > 1 else set()
        if len(self._memory) + len(self._allowed) > len(self._processes):  # else nothing to forget is worth looking for
            alive = {stat.id for stat in self._processes.values()}
            for store in (self._memory, self._allowed):
                for gone in store.keys() - alive:
                    del store[gone]

    def seed(self) -> Batch:
        topology = self._topology
        assert topology is not None  # noqa: S101 - observe always comes first
        if self._layout is None:
            self._layout = _layout(topology)
        batch = Batch(list(self._layout.nodes), list(self._layout.edges))
        batch.nodes.extend(self._node(index) for index in topology.nodes)
        return batch

    def expand(self, entities: Sequence[nodes.Process]) -> Batch:
        topology = self._topology
        if topology is None or not topology.nodes:
            return Batch()
        batch = Batch()
        if len(topology.nodes) == 1:
            self._on_only_node(entities, next(iter(topology.nodes)), batch)
            return batch
        found = []
        for entity in entities:
            stat = self._processes.get(entity.pid)
            if stat is None or stat.start != entity.start:
                self.lose("vanished processes")
            elif not stat.kernel_thread:
                found.append((entity, stat))
        self._read_memory([stat for _, stat in found])
        sets: dict[str, list[int]] = {}
        for entity, stat in found:
            self._place(entity, stat, batch.edges, sets)
        for text, members in sets.items():
            numa_set = nodes.NumaSet(nodes=text)
            batch.nodes.append(numa_set)
            batch.edges.extend(edges.NumaSetContain(numa_set.id, _numa_id(index)) for index in members)
        return batch

    def _on_only_node(self, entities: Sequence[nodes.Process], only: int, batch: Batch) -> None:
        """The edges of a host with one node; a process that neither ran nor was asked anew keeps its edge."""
        before, known = self._only_node_before, self._only_node
        rounds, turn = self.settings.affinity_recheck_rounds, self._round
        page_size, target = self._procfs.page_size, _numa_id(only)
        for entity in entities:
            pid = entity.pid
            stat = self._processes.get(pid)
            if stat is None or stat.start != entity.start:
                self.lose("vanished processes")
                continue
            if stat.kernel_thread:
                continue
            kept = before.get(pid)
            if kept is None or kept[0] is not entity or kept[1] is not stat or not (turn + pid) % rounds:
                cpus = self._allowed_of(entity, stat).cpus
                edge = _to_only_node(entity.id, target, cpus, stat.rss_pages * page_size)
                if kept is not None and kept[2] == edge:
                    edge = kept[2]
                kept = (entity, stat, edge)
            known[pid] = kept
            batch.edges.append(kept[2])

    # -- nodes ---------------------------------------------------------------------------------------------------

    def _node(self, index: int) -> Entity:
        assert self._topology is not None  # noqa: S101
        node = self._topology.nodes[index]
        attributes = {
            "cpus": format_list(node.cpus),
            "has_cpus": bool(node.cpus),
            "has_memory": node.has_memory,
        }
        metrics: dict[str, int | float] = {}
        unknown: dict[str, str] = {}
        try:
            for line in self._sysfs.text(f"{_NODES}/node{index}/meminfo").splitlines():
                _, _, key, value, *_ = line.split()  # "Node 0 MemTotal:  5859532 kB"
                name = _MEMINFO.get(key.rstrip(":"))
                if name:
                    metrics[name] = int(value) * 1024
        except OSError as error:
            unknown |= dict.fromkeys(_MEMINFO.values(), reason(error))
        except ValueError:
            unknown |= dict.fromkeys(_MEMINFO.values(), "meminfo has an unknown form")
        try:
            words = self._sysfs.text(f"{_NODES}/node{index}/numastat").split()
            for name, text in zip(words[::2], words[1::2], strict=True):
                if name in _NUMASTAT:
                    metric = (name if name.startswith("numa_") else f"numa_{name}") + "_per_s"
                    rate = self._rates.per_s((index, name), int(text))
                    if rate is None:
                        unknown[metric] = self._rates.why
                    else:
                        metrics[metric] = rate
        except (OSError, ValueError):
            unknown |= dict.fromkeys(("numa_miss_per_s", "numa_foreign_per_s"), "numastat cannot be read")
        return nodes.Numa(index=index, attributes=attributes, metrics=metrics, unknown=unknown or None)

    # -- processes -----------------------------------------------------------------------------------------------

    def _place(self, entity: nodes.Process, stat: ProcStat, out: list[Edge], sets: dict[str, list[int]]) -> None:
        assert self._topology is not None  # noqa: S101
        memory = self._memory.get(stat.id)
        sizes = memory.sizes if memory is not None else {}
        allowed = self._allowed_of(entity, stat)
        cpu_pct = self._cpu_time_by_node(stat)
        attributes: dict[str, object] = {"resident_source": "numa_maps"}
        metrics: dict[str, int | float] = {}
        unknown: dict[str, str] = {}
        if allowed.cpus:
            attributes["cpus_allowed"] = allowed.cpus
        else:
            unknown["cpus_allowed"] = "status cannot be read"
        if allowed.mems:
            attributes["mems_allowed"] = allowed.mems
        if memory is None or memory.why:
            why = memory.why if memory is not None else self._why_not_read(stat)
            unknown |= {"resident_bytes": why, "cpu_memory_similarity": why}
        else:
            if memory.round < self._round:
                metrics["numa_maps_age_rounds"] = self._round - memory.round
            similarity, basis = self._similarity(sizes, cpu_pct, allowed.cpus)
            if similarity is None:
                unknown["cpu_memory_similarity"] = basis
            else:
                metrics["cpu_memory_similarity"] = similarity
                attributes["similarity_basis"] = basis
        known = memory is not None and not memory.why
        per_node: dict[int, dict[str, int | float]] = {}
        for index, size in sizes.items():
            per_node.setdefault(index, {})["resident_bytes"] = size
        for index, pct in cpu_pct.items():
            per_node.setdefault(index, {})["cpu_pct"] = pct
        # One edge speaks of the process as a whole: to the set of nodes it may run on, or to the node if it is one.
        # On it, as on every edge, resident_bytes is what lies on the target.
        members = allowed.nodes
        if len(members) == 1:
            target = _numa_id(members[0])
            metrics |= per_node.pop(members[0], {})
        elif members:
            text = format_list(members)
            sets[text] = members
            target = f"NumaSet({text})"
        if members:
            if known:
                metrics["resident_bytes"] = sum(sizes.get(index, 0) for index in members)
                metrics["resident_total_bytes"] = sum(sizes.values())
            out.append(edges.NumaAccess(entity.id, target, attributes, metrics, unknown or None))
        out.extend(
            edges.NumaAccess(entity.id, _numa_id(index), {}, share)
            for index, share in sorted(per_node.items())
            if index in self._topology.nodes
        )

    def _allowed_of(self, entity: nodes.Process, stat: ProcStat) -> _Allowed:
        known = self._allowed.get(entity.id)
        given = entity.attributes.get("cpus_allowed")
        turn = (self._round + stat.pid) % self.settings.affinity_recheck_rounds == 0
        if known is None or (turn and known.round != self._round):
            try:
                status = self._procfs.status(stat.pid)
            except OSError:
                status = {}
            cpus = status.get("Cpus_allowed_list", "")
            known = _Allowed(cpus, self._nodes_of(cpus), status.get("Mems_allowed_list", ""), self._round)
            self._allowed[entity.id] = known
        if isinstance(given, str) and given and given != known.cpus:
            known = _Allowed(given, self._nodes_of(given), known.mems, known.round)
            self._allowed[entity.id] = known
        return known

    def _nodes_of(self, cpus: str) -> list[int]:
        assert self._topology is not None  # noqa: S101
        found = self._by_cpus.get(cpus)
        if found is None:
            try:
                found = self._topology.nodes_of(parse_list(cpus))
            except ValueError:
                found = []
            if len(self._by_cpus) > 4096:  # masks are few; a host that makes up new ones all day must not fill memory
                self._by_cpus.clear()
            self._by_cpus[cpus] = found
        return found

    def _cpu_time_by_node(self, stat: ProcStat) -> dict[int, float]:
        """CPU time over the round in percent of one core, by the node of the CPU that each thread last ran on.

        Field 39 of each thread's stat is that CPU: a thread that moved between nodes counts to the one it ended on.
        """
        assert self._topology is not None  # noqa: S101
        if stat.pid not in self._gpu_pids or not 0 < stat.threads <= self.settings.max_threads:
            return {}
        try:
            threads = self._procfs.threads(stat.pid) if stat.threads > 1 else [stat]
        except OSError:
            return {}
        shares: dict[int, float] = {}
        for thread in threads:
            ticks = self._rates.per_s((thread.pid, thread.start), thread.utime_ticks + thread.stime_ticks)
            node = self._topology.node_of_cpu.get(thread.processor)
            if ticks is not None and node is not None:
                shares[node] = shares.get(node, 0.0) + ticks * 100 / self._procfs.ticks_per_second
        return {node: pct for node, pct in shares.items() if pct > 0}

    def _similarity(self, sizes: dict[int, int], cpu_pct: dict[int, float], cpus: str) -> tuple[float | None, str]:
        assert self._topology is not None  # noqa: S101
        if cpu_pct:
            value = cosine(cpu_pct, sizes)
            return value, "cpu_time" if value is not None else "no resident memory"
        of_cpu = self._topology.node_of_cpu
        counts: dict[int, int] = {}
        try:
            for cpu in parse_list(cpus):
                if cpu in of_cpu:
                    counts[of_cpu[cpu]] = counts.get(of_cpu[cpu], 0) + 1
        except ValueError:
            pass
        if not counts:
            return None, "allowed CPUs are not known"
        value = cosine(counts, sizes)
        return value, "cpus_allowed" if value is not None else "no resident memory"

    # -- numa_maps -----------------------------------------------------------------------------------------------

    def _wanted(self, stat: ProcStat) -> bool:
        return stat.rss_pages * self._procfs.page_size >= self.settings.min_rss_bytes or stat.pid in self._gpu_pids

    def _why_not_read(self, stat: ProcStat) -> str:
        if self._wanted(stat):
            return "numa_maps waits its turn: the time for it was used up"
        return f"numa_maps is not read below {self.settings.min_rss_bytes >> 20} MiB"

    def _read_memory(self, stats: list[ProcStat]) -> None:
        """Read numa_maps of those that matter, the longest unread first, until the round's time for it is used up."""
        wanted = [stat for stat in stats if self._wanted(stat)]
        wanted.sort(key=lambda stat: (known.round if (known := self._memory.get(stat.id)) else -1, -stat.rss_pages))
        waiting = 0
        for stat in wanted:
            if self._budget_s <= 0:
                waiting += 1
                continue
            begin_s = self._clock.monotonic_s()
            try:
                sizes = parse_numa_maps(self._procfs.numa_maps(stat.pid), self._procfs.page_size)
                self._memory[stat.id] = _Memory(sizes, "", self._round)
            except FileNotFoundError:
                self._memory[stat.id] = _Memory({}, "no numa_maps: kernel without CONFIG_NUMA", self._round)
            except PermissionError as error:
                self._memory[stat.id] = _Memory({}, reason(error), self._round)
                self.note("numa_maps of other users' processes is unreadable", "run as root or grant CAP_SYS_PTRACE")
            except OSError as error:  # ESRCH and the like: gone between two reads
                self._memory[stat.id] = _Memory({}, reason(error), self._round)
                self.lose("vanished processes")
            self._budget_s -= self._clock.monotonic_s() - begin_s
        if waiting:
            self.note("numa_maps read in rotation: not every process every round", "raise numa.budget_ms", waiting)

    def _pids_with_accelerator(self) -> set[int]:
        paths = self._procfs.fds().paths
        return {ref.pid for path, refs in paths.items() if path.startswith(_ACCELERATOR_DEVICES) for ref in refs}


def cosine(left: dict[int, int | float] | dict[int, int] | dict[int, float], right: dict[int, int]) -> float | None:
    """Cosine of the angle between two vectors by node: 1 for the same distribution, 0 for no node in common.

    ``sum(l*r) / (|l| * |r|)``; None if either is all zero.
    """
    size = math.sqrt(sum(value * value for value in left.values()) * sum(value * value for value in right.values()))
    if not size:
        return None
    return min(1.0, sum(value * right.get(node, 0) for node, value in left.items()) / size)


def _numa_id(index: int) -> str:
    return f"Numa({index})"


def _layout(topology: CpuTopology) -> Batch:
    """Packages, their nodes, and distances: what stays while the hardware does."""
    batch = Batch()
    for package in topology.packages.values():
        entity = nodes.CpuPackage(
            index=package.index,
            attributes={"cpus": format_list(package.cpus)} | ({"name": package.model} if package.model else {}),
            metrics={"cores_count": package.cores_count, "cpus_count": len(package.cpus)},
            unknown=None if package.model else {"name": "cpuinfo names no model"},
        )
        batch.nodes.append(entity)
        batch.edges.extend(edges.Affinity(entity.id, _numa_id(node)) for node in topology.nodes_of(package.cpus))
    for node in topology.nodes.values():
        for other, distance in node.distances.items():
            if node.index < other:
                back = topology.nodes[other].distances.get(node.index, distance)
                metrics: dict[str, int | float] = {"distance": distance}
                if back != distance:
                    metrics["distance_back"] = back
                batch.edges.append(edges.NumaDistance(_numa_id(node.index), _numa_id(other), {}, metrics))
    return batch


def _to_only_node(process: str, target: str, cpus: str, resident_bytes: int) -> Edge:
    """One node holds everything: its share is the resident size, and numa_maps is not worth its page walk."""
    attributes: dict[str, object] = {"resident_source": "rss"}
    if cpus:
        attributes["cpus_allowed"] = cpus
    metrics: dict[str, int | float] = {"resident_bytes": resident_bytes}
    if resident_bytes:
        metrics["cpu_memory_similarity"] = 1.0
    return edges.NumaAccess(process, target, attributes, metrics)
