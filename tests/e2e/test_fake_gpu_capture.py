"""The installed command on made-up GPU machines: a fake libnvidia-ml.so.1 under the real pynvml, this machine's /proc.

Every number that is expected is taken from the machine's description (tests/fakes/nvml/machines) or worked out from it
here by other means than the product's.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.runner import (
    HIDDEN,
    NO_NETLINK,
    NOTHING,
    PATIENCE_S,
    PLAIN,
    USER,
    Capture,
    Outcome,
    Running,
    Sandbox,
    Way,
    sandbox,
)
from tests.fakes.nvml import FakeNvml, NoCompiler, fake_nvml

from gpuflight.errors import InputError
from gpuflight.graph import Graph, edges, nodes
from gpuflight.graph.load import load_graph, read_rounds

GPUS = {"h100x8": 8, "a100-mig": 1, "l40sx4": 4, "v100-old": 2}
"""Machines on which all is well, and how many GPUs they have."""

LIMITED = (USER, NO_NETLINK, HIDDEN)

NVLINK_BYTES_PER_S = 25e9
"""Per link and direction, of NVLink 2.0 to 4.0 alike (V100, A100, H100 data sheets: 6, 12, 18 links for 150, 300, 450
GB/s)."""

TOPOLOGY = {"10": "PIX", "20": "PXB", "30": "PHB", "40": "NODE", "50": "SYS"}
"""nvmlGpuTopologyLevel_t as nvidia-smi topo -m abbreviates it."""


@dataclass
class Machine:
    """A capture under way on one made-up machine."""

    fake: FakeNvml
    box: Sandbox
    name: str
    running: Running
    outcome: Outcome = field(default_factory=lambda: Outcome(0, "", ""))
    capture: Capture | None = None

    def finish(self) -> Capture:
        """What was found, once it is done; asserts all that must be true of any capture."""
        if self.capture is None:
            self.outcome = self.running.finish()
            self.capture = self.box.capture(self.name)
        return self.capture

    @property
    def graph(self) -> Graph:
        return self.finish().loaded.graph

    @property
    def folder(self) -> Path:
        self.finish()
        return self.box.work / self.name

    def screen(self) -> str:
        """What was printed, however it was wrapped."""
        self.finish()
        return " ".join(self.outcome.out.split())


class Fleet:
    """Starts captures and hands out what they found."""

    def __init__(self, box: Sandbox) -> None:
        self.box = box
        self.machines: dict[str, Machine] = {}

    def start(
        self, machine: str, *arguments: str, name: str = "", way: Way = PLAIN, pid: tuple[str, int] | None = None
    ) -> Machine:
        """Capture ``machine``; ``pid`` puts a real process in the place of one that the description names."""
        name = name or machine
        folder = self.box.home.parent / f"{name}.nvml"
        folder.mkdir()
        fake = fake_nvml(machine, folder)
        if pid is not None:
            text = fake.description.read_text()
            assert f"process = {pid[0]}:" in text
            fake.description.write_text(text.replace(f"process = {pid[0]}:", f"process = {pid[1]}:"))
        arguments = arguments or ("--offline", "1", "--interval", "0.5")
        running = self.box.start("run", *arguments, "--out", name, way=way, env=fake.environment)
        self.machines[name] = Machine(fake, self.box, name, running)
        return self.machines[name]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with sandbox() as box:
        fleet = Fleet(box)
        try:
            fleet.start("h100x8-hang", "--offline", "0.5", "--interval", "0.5")  # the longest first
            fleet.start("h100x8", pid=("4101", os.getpid()))
            fleet.start("a100-mig", pid=("5001", os.getpid()))
            for name in ("l40sx4", "v100-old", "h100x8-lost", "driver-not-loaded"):
                fleet.start(name)
            for way in LIMITED:
                fleet.start("h100x8", name=way.name, way=way, pid=("4101", os.getpid()))
        except NoCompiler as error:
            pytest.skip(str(error))
        yield fleet
        for machine in fleet.machines.values():
            if machine.running.process.poll() is None:
                machine.running.process.kill()
                machine.running.process.communicate()


# -- what a description says ---------------------------------------------------------------------------------------


def described(fake: FakeNvml) -> list[dict[str, str]]:
    """The values of every GPU of a description, with everything that sections share written out; ``processes`` too."""
    gpus: dict[int, dict[str, str]] = {}
    section: list[int] = []
    for line in fake.description.read_text().splitlines():
        line = line.split("#")[0].strip()
        if head := re.fullmatch(r"\[(\w+)(?: (\d+))?(?:-(\d+))?.*\]", line):
            first, last = int(head[2] or 0), int(head[3] or head[2] or 0)
            section = list(range(first, last + 1)) if head[1] == "gpu" else []
        elif "=" in line:
            key, value = (part.strip() for part in line.split("=", 1))
            for index in section:
                gpu = gpus.setdefault(index, {"processes": ""})
                text = value.replace("{i}", f"{index:x}")
                if key == "process":
                    gpu["processes"] += text + " "
                for name in spread(key):
                    gpu[name] = text
    return [gpus[index] for index in sorted(gpus)]


def spread(key: str) -> list[str]:
    """``link.0-4.remote_pci`` → five keys."""
    head = re.fullmatch(r"(\w+\.)(\d+)-(\d+)(.*)", key)
    return [f"{head[1]}{n}{head[4]}" for n in range(int(head[2]), int(head[3]) + 1)] if head else [key]


def size(text: str) -> int:
    number = re.fullmatch(r"(\d+)(MiB|GiB)?", text)
    assert number
    return int(number[1]) << {"MiB": 20, "GiB": 30, None: 0}[number[2]]


def processes(gpu: dict[str, str]) -> list[tuple[int, int]]:
    """(pid, bytes) of a described GPU."""
    found = (text.split(":") for text in gpu["processes"].split())
    return [(int(fields[0]), int(fields[1]) << 20) for fields in found]


def links_of(gpu: dict[str, str]) -> dict[str, tuple[int, int]]:
    """Address of the other end → (links, of which active)."""
    ends: dict[str, tuple[int, int]] = {}
    for number in range(int(gpu.get("links", "0"))):
        if address := gpu.get(f"link.{number}.remote_pci"):
            links, active = ends.get(address, (0, 0))
            up = gpu.get(f"link.{number}.state", gpu["link.state"]) == "1"
            ends[address] = (links + 1, active + up)
    return ends


def gpu_users(graph: Graph) -> list[edges.Access]:
    """Who uses a GPU, or a part of one."""
    devices = (nodes.GPU, nodes.MigInstance)
    return [edge for edge in graph.edges_of_kind(edges.Access) if isinstance(graph.nodes[edge.target], devices)]


def pid_of(graph: Graph, name: str) -> int:
    process = graph.nodes[name]
    assert isinstance(process, nodes.Process)
    return process.pid


def gpus_by_uuid(graph: Graph) -> dict[str, nodes.GPU]:
    return {gpu.uuid: gpu for gpu in graph.of_kind(nodes.GPU)}


# -- every machine -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*GPUS, "h100x8-lost", "h100x8-hang", "driver-not-loaded"])
def test_every_machine_is_captured(fleet: Fleet, name: str) -> None:
    """``finish`` asserts what holds for any capture; here, that the screen says what there is."""
    machine = fleet.machines[name]
    line = machine.finish().lines["nvml"]
    assert line["status"] == ("ok" if name in GPUS or name == "h100x8-lost" else "skipped")
    found = len(machine.graph.of_kind(nodes.GPU))
    if name in GPUS:
        assert found == GPUS[name]
    if found == 0:
        assert line["reason"].split(";")[0] in machine.screen()
        assert line["hint"] in machine.screen()
    assert "\x1b" not in machine.screen()


def test_what_is_wrong_is_said(fleet: Fleet) -> None:
    names = ("driver-not-loaded", "h100x8-hang", "h100x8-lost", "v100-old")
    said = {name: fleet.machines[name].finish().said("nvml") for name in names}
    assert "the NVIDIA driver is not loaded" in said["driver-not-loaded"]
    assert "modprobe nvidia" in said["driver-not-loaded"]
    assert "nvmlDeviceGetUtilizationRates of GPU 2 has not returned" in said["h100x8-hang"]
    assert "GPU 3 cannot be read: the GPU is lost" in said["h100x8-lost"]
    assert "dmesg" in said["h100x8-lost"]
    assert "the driver is too old" in said["v100-old"]


def test_a_gpu_that_is_lost_from_the_start_costs_no_other_gpu(fleet: Fleet) -> None:
    lost = fleet.machines["h100x8-lost"]
    expected = {gpu["uuid"] for index, gpu in enumerate(described(lost.fake)) if index != 3}
    assert gpus_by_uuid(lost.graph).keys() == expected


# -- values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GPUS)
def test_gpus_have_the_values_of_the_description(fleet: Fleet, name: str) -> None:
    machine = fleet.machines[name]
    found = gpus_by_uuid(machine.graph)
    wanted = described(machine.fake)
    assert found.keys() == {gpu["uuid"] for gpu in wanted}
    for index, gpu in enumerate(wanted):
        entity = found[gpu["uuid"]]
        what, metrics = entity.attributes, entity.metrics
        assert (what["index"], what["state"]) == (index, "ok")
        assert (what["name"], what["pci_address"]) == (gpu["name"], gpu["pci"])
        assert what["compute_capability"] == gpu["compute_capability"].replace(" ", ".")
        assert what["performance_state"] == f"P{gpu['performance_state']}"
        assert metrics["memory_total_bytes"] == size(gpu["memory_total"])
        used = size(gpu["memory_used"]) if "memory_used" in gpu else size(gpu["memory_overhead"]) + sum(
            amount for _, amount in processes(gpu)
        )  # fmt: skip
        if name == "v100-old":  # memory v1 counts what the driver reserves for itself as used
            used += size(gpu["memory_reserved"])
        assert metrics["memory_used_bytes"] == used
        for number, metric in enumerate(("sm_util_pct", "memory_util_pct")):
            if "utilization" in gpu:
                assert metrics[metric] == int(gpu["utilization"].split()[number])
            else:
                assert (entity.unknown or {})[metric]
        clocks = [int(clock) * 1_000_000 for clock in gpu["clocks"].split()]
        assert [metrics[f"{of}_clock_hz"] for of in ("graphics", "sm", "memory")] == clocks[:3]
        assert metrics["power_watts"] == int(gpu["power_mw"]) / 1000
        assert metrics["power_limit_watts"] == int(gpu["power_limit_mw"]) / 1000
        assert metrics["temperature_celsius"] == int(gpu["temperature"])
        assert (metrics["pcie_gen"], metrics["pcie_width"]) == (int(gpu["pcie_gen"]), int(gpu["pcie_width"]))
        assert metrics["pcie_replays_count"] == int(gpu["pcie_replays"])
        assert metrics["processes_count"] == len(processes(gpu))


def test_rates_are_there_in_the_second_round(fleet: Fleet) -> None:
    for gpu in fleet.machines["h100x8"].graph.of_kind(nodes.GPU):
        assert gpu.metrics["power_mean_watts"] == pytest.approx(95, rel=0.5)  # energy grows by 95 J a second
        assert gpu.metrics["nvlink_rx_bytes_per_s"] > gpu.metrics["nvlink_tx_bytes_per_s"] > 0


# -- wires ---------------------------------------------------------------------------------------------------------


def test_nvlinks_and_switches(fleet: Fleet) -> None:
    machine = fleet.machines["h100x8"]
    wanted = {
        (f"GPU(uuid={gpu['uuid']})", f"NvSwitch({address})"): links
        for gpu in described(machine.fake)
        for address, links in links_of(gpu).items()
    }
    found = {
        (edge.source, edge.target): (edge.metrics["links_count"], edge.metrics["links_active_count"])
        for edge in machine.graph.edges_of_kind(edges.NvLink)
    }
    assert found == wanted
    assert len(wanted) == 8 * 4
    assert list(wanted.values()).count((5, 4)) == 1, "one link is down"
    for edge in machine.graph.edges_of_kind(edges.NvLink):
        assert edge.metrics["expected_bytes_per_s"] == edge.metrics["links_active_count"] * NVLINK_BYTES_PER_S
    assert len(machine.graph.of_kind(nodes.NvSwitch)) == 4


@pytest.mark.parametrize("name", ["h100x8", "l40sx4"])
def test_every_pair_of_gpus_has_its_distance(fleet: Fleet, name: str) -> None:
    machine = fleet.machines[name]
    gpus = described(machine.fake)
    wanted = {
        frozenset((gpus[a]["uuid"], gpus[b]["uuid"])): TOPOLOGY[gpus[a].get(f"topology.{b}", gpus[a]["topology"])]
        for a in range(len(gpus))
        for b in range(a)
    }
    found = {
        frozenset(end.removeprefix("GPU(uuid=").removesuffix(")") for end in (edge.source, edge.target)): edge
        for edge in machine.graph.edges_of_kind(edges.Proximity)
    }
    assert {pair: edge.attributes["pci_distance"] for pair, edge in found.items()} == wanted
    for pair, edge in found.items():
        active = min(sum(up for _, up in links_of(gpu).values()) for gpu in gpus if gpu["uuid"] in pair)
        assert edge.attributes["distance"] == (f"NV{active}" if active else wanted[pair])


def test_gpus_are_on_their_pci_device_and_numa_node(fleet: Fleet) -> None:
    machine = fleet.machines["h100x8"]
    for gpu in described(machine.fake):
        source = f"GPU(uuid={gpu['uuid']})"
        places = {edge.target for edge in machine.graph.edges.values() if edge.source == source}
        assert {f"PciDevice({gpu['pci']})", f"Numa({gpu['numa_nodes']})"} <= places


def test_the_process_on_gpu_0_is_joined_to_it(fleet: Fleet) -> None:
    machine = fleet.machines["h100x8"]
    [access] = gpu_users(machine.graph)
    assert pid_of(machine.graph, access.source) == os.getpid()
    assert machine.graph.nodes[access.source].attributes["name"], "known to the process tree, too"
    assert access.target == f"GPU(uuid={described(machine.fake)[0]['uuid']})"
    assert access.metrics["memory_used_bytes"] == 40960 << 20
    assert access.attributes["uses"] == ["compute"]
    assert f"({os.getpid()}) 40 GiB" in machine.screen()


def test_mig_instances_belong_to_their_gpu(fleet: Fleet) -> None:
    machine = fleet.machines["a100-mig"]
    graph = machine.graph
    [gpu] = graph.of_kind(nodes.GPU)
    assert gpu.attributes["mig_mode"] == "enabled"
    text = machine.fake.description.read_text()
    wanted = dict(zip(re.findall(r"uuid = (MIG-\S+)", text), re.findall(r"name = .* MIG (\S+)", text), strict=True))
    found = {instance.uuid: instance for instance in graph.of_kind(nodes.MigInstance)}
    assert found.keys() == wanted.keys()
    for uuid, profile in wanted.items():
        assert profile in found[uuid].attributes["name"]
        assert edges.Belong(f"MigInstance(uuid={uuid})", gpu.id).key in graph.edges
    [access] = gpu_users(graph)
    assert access.target == "MigInstance(uuid=MIG-11111111-0000-5000-8000-000000000000)"
    assert access.metrics["memory_used_bytes"] == 8192 << 20
    assert f"({os.getpid()}) 8 GiB" in machine.screen()


# -- commands on such a capture ------------------------------------------------------------------------------------


def test_path_names_the_narrowest_hop(fleet: Fleet) -> None:
    for name, bandwidth in (("h100x8", 5 * NVLINK_BYTES_PER_S), ("v100-old", 2 * NVLINK_BYTES_PER_S)):
        machine = fleet.machines[name]
        arguments = ("path", "gpu:0", "gpu:1", "--graph", str(machine.folder))
        found = json.loads(fleet.box.run(*arguments, "--json").out)
        ends = [f"GPU(uuid={gpu['uuid']})" for gpu in described(machine.fake)[:2]]
        assert [found["source"], found["target"]] == ends
        assert {hop["kind"] for hop in found["hops"]} == {"NvLink"}
        assert found["narrowest"]["expected_bytes_per_s"] >= bandwidth
        assert found["unknown_count"] == 0
        shown = fleet.box.run(*arguments).out
        assert re.search(r"^narrowest hop: NvLink \d+ GB/s", shown, re.MULTILINE)
        assert ends[0] in shown
        assert ends[1] in shown


def test_the_picture_shows_gpus_switches_and_links(fleet: Fleet) -> None:
    machine = fleet.machines["h100x8"]
    picture = fleet.box.work / "picture.html"
    fleet.box.run(str(machine.folder / "graph.json"), "-o", str(picture), program="gpuflight-vis")
    data = drawn(picture)
    gpus = {f"GPU(uuid={gpu['uuid']})" for gpu in described(machine.fake)}
    switches = {node.id for node in machine.graph.of_kind(nodes.NvSwitch)}
    boxes = data["boxes"]["id"]
    assert gpus | switches <= set(boxes)
    ends = [boxes[number] for number in data["links"]["ends"]]
    kinds = [data["words"][number] for number in data["links"]["kind"]]
    links = {(ends[2 * i], ends[2 * i + 1]) for i, kind in enumerate(kinds) if kind == "NvLink"}
    assert links == {(gpu, switch) for gpu in gpus for switch in switches}
    [access] = gpu_users(machine.graph)
    assert ("Access", access.source, access.target) in {
        (kind, ends[2 * i], ends[2 * i + 1]) for i, kind in enumerate(kinds)
    }
    assert [line["collector"] for line in data["coverage"] if line["status"] == "failed"] == []


def drawn(picture: Path) -> dict[str, Any]:
    """The data inside a page."""
    found = re.search(r'<script [^>]*id="data" data-encoding="(\w+)">(.*?)</script>', picture.read_text(), re.DOTALL)
    assert found
    text = zlib.decompress(base64.b64decode(found[2])).decode() if found[1] == "deflate" else found[2]
    data: dict[str, Any] = json.loads(text)
    return data


def test_env_counts_the_gpus(fleet: Fleet) -> None:
    for name, state in (("h100x8", "yes"), ("h100x8-lost", "limited"), ("driver-not-loaded", "no")):
        machine = fleet.machines[name]
        answer = json.loads(fleet.box.run("env", "--json", env=machine.fake.environment).out)
        [check] = [check for check in answer["checks"] if check["name"] == "NVML"]
        assert check["state"] == state
        assert ("8 GPUs" in check["found"]) == (name == "h100x8")


# -- what changes while one looks ----------------------------------------------------------------------------------


def wait_for(condition: Callable[[], bool], running: Running) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert running.process.poll() is None, running.process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_gpu_lost_in_the_middle_stays_as_lost(fleet: Fleet) -> None:
    """Also: Ctrl-C in the middle of a capture on a machine with GPUs keeps everything."""
    machine = fleet.start("h100x8", "--offline", "3600", "--interval", "0.2", name="losing")
    wait_for(lambda: last_round(machine) >= 1, machine.running)
    machine.fake.set("gpu 3", lost="yes")
    seen = last_round(machine)
    wait_for(lambda: last_round(machine) >= seen + 2, machine.running)  # the next one may have begun before
    machine.running.process.send_signal(signal.SIGINT)
    lost = described(machine.fake)[3]
    found = gpus_by_uuid(machine.graph)
    assert found.keys() == {gpu["uuid"] for gpu in described(machine.fake)}
    assert {uuid for uuid, gpu in found.items() if gpu.attributes["state"] == "lost"} == {lost["uuid"]}
    gpu = found[lost["uuid"]]
    assert gpu.attributes["name"] == lost["name"]
    assert gpu.attributes["pci_address"] == lost["pci"]
    assert "fallen off the bus" in gpu.attributes["state_reason"]
    assert "sm_util_pct" not in gpu.metrics
    assert gpu.unknown is not None
    assert "fallen off the bus" in gpu.unknown["sm_util_pct"]
    assert "does not answer" in machine.finish().said("nvml")
    assert "ended early" in machine.outcome.err
    first = next(iter(read_rounds(machine.folder / "rounds.jsonl.zst")))
    assert gpus_by_uuid(first.graph)[lost["uuid"]].attributes["state"] == "ok"


def last_round(machine: Machine) -> int:
    """Number of the last round that a capture under way has written, 0 before the first."""
    part = machine.box.work / machine.name / "rounds.jsonl.zst.part"
    copy = machine.box.home.parent / "so-far.jsonl.zst"  # it goes by the suffix
    try:
        copy.write_bytes(part.read_bytes())
        return [item.round_number for item in read_rounds(copy)][-1]
    except (OSError, InputError, IndexError):  # no round yet, or half of one
        return 0


# -- with fewer rights, and elsewhere ------------------------------------------------------------------------------


@pytest.mark.parametrize("way", LIMITED, ids=str)
def test_with_fewer_rights_the_gpus_are_the_same(fleet: Fleet, way: Way) -> None:
    limited = fleet.machines[way.name]
    everything = fleet.machines["h100x8"]
    found, wanted = gpus_by_uuid(limited.graph), gpus_by_uuid(everything.graph)
    assert found.keys() == wanted.keys()
    for uuid, gpu in found.items():
        assert gpu.attributes == wanted[uuid].attributes
    assert len(limited.graph.edges_of_kind(edges.NvLink)) == 32
    seen = [pid_of(limited.graph, access.source) for access in gpu_users(limited.graph)]
    if way is HIDDEN and os.geteuid() == 0:  # our own process is not theirs to see
        assert seen == []
        assert "processes on GPUs that /proc does not show" in limited.finish().lines["nvml"]["losses"]
    else:
        assert seen == [os.getpid()]


def test_a_recording_is_replayed_where_there_is_nothing(fleet: Fleet) -> None:
    """Recorded with GPUs; replayed by a user without any right, without NVML, without a PATH."""
    machine = fleet.machines["h100x8"]
    arguments = ("record", "gpus.tar.zst", "--rounds", "2", "--interval", "0.3")
    env = {**machine.fake.environment, "FAKE_NVML_PROCESSES": f"5:{os.getpid()}:77"}
    fleet.box.run(*arguments, env=env)
    (fleet.box.work / "gpus.tar.zst").chmod(0o644)
    fleet.box.run("run", "--replay", "gpus.tar.zst", "--out", "here")
    fleet.box.run("run", "--replay", "gpus.tar.zst", "--out", "there", way=NOTHING, env={"PATH": "/nowhere"})
    here, there = fleet.box.capture("here"), fleet.box.capture("there")
    assert here.loaded.graph == there.loaded.graph
    assert gpus_by_uuid(there.loaded.graph).keys() == gpus_by_uuid(machine.graph).keys()
    assert load_graph(fleet.box.work / "there").env == here.loaded.env
    uses = {access.target: access for access in gpu_users(there.loaded.graph)}
    fifth = uses[f"GPU(uuid={described(machine.fake)[5]['uuid']})"]
    assert pid_of(there.loaded.graph, fifth.source) == os.getpid()
    assert fifth.metrics["memory_used_bytes"] == 77 << 20
