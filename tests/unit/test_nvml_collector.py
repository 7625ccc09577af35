"""The nvml collector: entities and edges of made-up machines, and what it says when it cannot see."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from gpuflight.errors import SourceUnavailable
from gpuflight.graph import Graph, edges, nodes
from gpuflight.graph.codec import encode_graph
from gpuflight.sources.nvml import IN_USE_REASON, Gpu, Link, NvmlSnapshot

if TYPE_CHECKING:  # pytest loads them as a plugin
    from tests.fakes.nvml.fixtures import MakeRig, Rig

pytest_plugins = ("tests.fakes.nvml.fixtures",)


def gpu_of(graph: Graph, last: str) -> nodes.GPU:
    return next(gpu for gpu in graph.of_kind(nodes.GPU) if gpu.uuid.endswith(last))


def edge_between(graph: Graph, kind: type, source: str, target: str) -> edges.Edge:
    return next(e for e in graph.edges_of_kind(kind) if source in e.source and target in e.target)


def test_a_process_uses_a_gpu(make_rig: MakeRig) -> None:
    rig = make_rig("h100x8")
    rig.tree.process(4101, start=77)
    graph = rig.graph()
    access = edge_between(graph, edges.Access, "Process(pid=4101,start=77)", "000000000000)")
    assert access.metrics == {"memory_used_bytes": 40960 << 20, "sm_util_pct": 87.0, "memory_util_pct": 41.0}
    assert access.attributes == {"uses": ["compute"]}
    gpu = gpu_of(graph, "0")
    assert gpu.metrics["memory_unattributed_bytes"] == 4 << 20
    assert (gpu.metrics["processes_count"], gpu.metrics["processes_unmatched_count"]) == (1, 0)
    assert not graph.dangling()


def test_switches_and_links_carry_what_they_should(make_rig: MakeRig) -> None:
    graph = make_rig("h100x8", {"gpu2": {"link.3.errors": "2 0 5 0"}}).graph()
    assert len(graph.of_kind(nodes.NvSwitch)) == 4
    assert len(graph.edges_of_kind(edges.NvLink)) == 32
    whole = sum(e.metrics["expected_bytes_per_s"] for e in graph.edges_of_kind(edges.NvLink) if "0000)->" in e.id)
    assert whole == 18 * 25e9  # half of the data sheet's 900 GB/s, which counts both directions
    worn = edge_between(graph, edges.NvLink, "0002)", "NvSwitch(0000:05:00.0)")
    assert worn.metrics["errors_count"] == 7
    short = edge_between(graph, edges.NvLink, "0006)", "NvSwitch(0000:08:00.0)")
    assert (short.metrics["links_count"], short.metrics["links_active_count"]) == (5, 4)
    assert gpu_of(graph, "6").attributes["nvlinks_down"] == [17]
    assert gpu_of(graph, "6").metrics["nvlink_active_count"] == 17
    assert edge_between(graph, edges.Proximity, "0000)", "0001)").attributes["distance"] == "NV18"
    assert edge_between(graph, edges.Proximity, "0000)", "0006)").attributes["distance"] == "NV17"


def test_gpus_linked_directly_share_one_edge(make_rig: MakeRig) -> None:
    graph = make_rig("v100-old", {"gpu1": {"link.1.state": "0", "link.0.errors": "1 0 0 0"}}).graph()
    (link,) = graph.edges_of_kind(edges.NvLink)
    assert (link.source[-2:], link.target[-2:]) == ("0)", "1)")
    # Up at one end only is down; errors are those of both ends.
    assert link.metrics == {
        "links_count": 2,
        "links_active_count": 1,
        "expected_bytes_per_s": 25e9,
        "errors_count": 1,
    }
    assert graph.edges_of_kind(edges.Proximity)[0].attributes["distance"] == "NV1"
    assert gpu_of(graph, "0").metrics["nvlink_unplaced_count"] == 4  # never up: nobody knows where they would lead


def test_links_without_state_or_version_claim_no_bandwidth() -> None:
    from gpuflight.collectors.base import Batch
    from gpuflight.collectors.gpu_links import LinkEdges

    def edge(*links: Link) -> edges.Edge:
        snapshot = NvmlSnapshot(gpus=[Gpu(uuid="GPU-a", index=0, links=list(links))])
        batch = Batch()
        LinkEdges(snapshot).add_to(batch, snapshot)
        return next(e for e in batch.edges if isinstance(e, edges.NvLink))

    silent = edge(Link(0, None, "4.0", "switch", "0000:05:00.0"))
    assert "links_active_count" not in silent.metrics and "expected_bytes_per_s" not in silent.metrics
    newer = edge(Link(0, True, "6.0", "switch"))
    assert newer.target == "NvSwitch(fabric)"
    assert newer.unknown and "expected_bytes_per_s" in newer.unknown


def test_t25_peer_access_that_fails_is_on_the_edge(make_rig: MakeRig) -> None:
    graph = make_rig("h100x8", {"gpu0": {"p2p.1": "5 5 5 5"}}).graph()
    broken = edge_between(graph, edges.Proximity, "0000)", "0001)")
    assert broken.attributes["p2p_read"] == broken.attributes["p2p_write"] == "not_supported"
    assert edge_between(graph, edges.Proximity, "0000)", "0002)").attributes["p2p_read"] == "ok"


def test_pcie_machines_have_distances_and_no_links(make_rig: MakeRig) -> None:
    graph = make_rig("l40sx4").graph()
    distances = {(e.source[-2], e.target[-2]): e.attributes["distance"] for e in graph.edges_of_kind(edges.Proximity)}
    assert distances == {
        ("0", "1"): "PIX",
        ("2", "3"): "PHB",
        **dict.fromkeys([("0", "2"), ("0", "3"), ("1", "2"), ("1", "3")], "SYS"),
    }
    assert not graph.edges_of_kind(edges.NvLink)
    gpu = gpu_of(graph, "3")
    assert gpu.unknown and gpu.unknown["nvlink_active_count"] == "not supported by this GPU or driver"
    assert (
        "GPU(uuid=GPU-14050000-0000-4000-8000-000000000003)",
        "PciDevice(0001:ca:00.0)",
        "AttachedTo",
    ) in graph.edges
    assert (gpu.id, "Numa(1)", "Affinity") in graph.edges


def test_n12_t30_mig_utilisation_is_unknown_and_memory_is_not(make_rig: MakeRig) -> None:
    rig = make_rig("a100-mig")
    rig.tree.process(5001)
    rig.tree.process(5002)
    graph = rig.graph()
    migs = {mig.attributes["profile"]: mig for mig in graph.of_kind(nodes.MigInstance)}
    assert set(migs) == {"3g.40gb", "2g.20gb", "1g.10gb"}
    big = migs["3g.40gb"]
    assert big.metrics["memory_used_bytes"] == 8200 << 20
    assert "sm_util_pct" not in big.metrics
    assert big.unknown and big.unknown["sm_util_pct"] == "not supported by this GPU or driver"
    whole = gpu_of(graph, "0")
    assert "sm_util_pct" not in whole.metrics and whole.unknown and "sm_util_pct" in whole.unknown
    access = edge_between(graph, edges.Access, "pid=5001", big.id)
    assert access.metrics == {"memory_used_bytes": 8192 << 20}
    assert access.unknown and access.unknown["sm_util_pct"]
    assert (big.id, whole.id, "Belong") in graph.edges
    assert not [e for e in graph.edges_of_kind(edges.Access) if e.target == whole.id]


def test_rates_are_unknown_at_first_and_then_by_the_clock(make_rig: MakeRig) -> None:
    quiet = {"field.138": "1000", "energy_mj": "1000000", "violation_ns.1": "0", "pcie_replays": "0", "field.197": "0"}
    rig = make_rig("h100x8", {"gpu0": quiet})
    first = gpu_of(rig.graph(), "0")
    rates = ("nvlink_tx_bytes_per_s", "power_mean_watts", "throttled_thermal_pct", "pcie_replays_per_s")
    assert not set(rates) & first.metrics.keys()
    assert first.unknown and set(rates) <= first.unknown.keys()
    rig.fake.set("gpu 0", {"field.138": "11000", "energy_mj": "2000000", "violation_ns.1": "2500000000"})
    rig.fake.set("gpu 0", {"pcie_replays": "20", "field.197": "!NOT_SUPPORTED", "pcie_throughput_kb": "1 2"})
    second = gpu_of(rig.graph(seconds=5), "0")
    assert second.metrics["nvlink_tx_bytes_per_s"] == pytest.approx(10000 * 1024 / 5)
    assert second.metrics["power_mean_watts"] == pytest.approx(200)
    assert second.metrics["throttled_thermal_pct"] == pytest.approx(50)
    assert second.metrics["pcie_replays_per_s"] == pytest.approx(4)
    assert second.metrics["pcie_replays_count"] == 20
    assert second.metrics["pcie_tx_bytes_per_s"] == 1000  # the counters went away: the other way is taken
    rig.fake.set("gpu 0", {"pcie_replays": "1"})
    third = gpu_of(rig.graph(), "0")
    assert "pcie_replays_per_s" not in third.metrics
    assert third.unknown and "went back" in third.unknown["pcie_replays_per_s"]


def test_n04_a_process_that_ended_meanwhile_is_skipped_and_counted(make_rig: MakeRig) -> None:
    rig = make_rig("h100x8", {"gpu0": {"process": "9999:100"}})
    rig.tree.process(4101)
    graph = rig.graph()
    assert [e.source for e in graph.edges_of_kind(edges.Access)] == ["Process(pid=4101,start=1000)"]
    gpu = gpu_of(graph, "0")
    assert (gpu.metrics["processes_unmatched_count"], gpu.metrics["memory_unmatched_bytes"]) == (1, 100 << 20)
    assert rig.collector.losses == {"processes on GPUs that /proc does not show": 1}


def test_t29_pids_of_another_namespace_are_not_taken_for_ours(make_rig: MakeRig) -> None:
    rig = make_rig("h100x8", {"gpu1": {"process": "17:10"}, "gpu2": {"process": "55:20"}})
    rig.tree.pid_namespace(4026532999)  # gpuflight runs in a container
    rig.tree.process(4101)  # same number as on the host, but it has nothing to do with the GPU
    rig.tree.process(300, nspids="300\t17", opens="/dev/nvidia1 /dev/nvidiactl")  # a container in the container
    rig.tree.process(55, opens="/dev/nvidia2")  # a driver that translates for its caller
    graph = rig.graph()
    assert sorted(e.source for e in graph.edges_of_kind(edges.Access)) == [
        "Process(pid=300,start=1000)",
        "Process(pid=55,start=1000)",
    ]
    gpu = gpu_of(graph, "0")
    assert gpu.attributes["foreign_pidns"] is True
    assert gpu.metrics["memory_unmatched_bytes"] == 40960 << 20
    assert "foreign_pidns" not in gpu_of(graph, "1").attributes
    assert "another pid namespace" in rig.noted and "--pid=host" in rig.noted
    assert rig.collector.losses == {}  # they did not end


def test_t29_an_ambiguous_pid_is_nobody(make_rig: MakeRig) -> None:
    rig = make_rig("h100x8", {"gpu0": {"process": "none"}, "gpu1": {"process": "17:10"}})
    rig.tree.pid_namespace(4026532999)
    for pid in (300, 400):
        rig.tree.process(pid, nspids=f"{pid}\t17", opens="/dev/nvidia1")
    assert not rig.graph().edges_of_kind(edges.Access)


def test_unattributed_memory_is_unknown_when_a_part_is(make_rig: MakeRig) -> None:
    rig = make_rig("l40sx4", {"gpu1": {"process": "77:?", "memory_used": "100MiB"}})
    rig.tree.process(77)
    graph = rig.graph()
    gpu = gpu_of(graph, "1")
    assert "memory_unattributed_bytes" not in gpu.metrics
    assert gpu.unknown and "memory of 1 processes" in gpu.unknown["memory_unattributed_bytes"]
    access = edge_between(graph, edges.Access, "pid=77", "1)")
    assert "memory_used_bytes" not in access.metrics and access.unknown
    old = gpu_of(make_rig("v100-old").graph(), "0")
    assert old.unknown and "reserves" in old.unknown["memory_unattributed_bytes"]


def test_t20_a_missing_library_is_not_a_machine_without_gpus(make_rig: MakeRig) -> None:
    rig = make_rig(None)
    rig.tree.pci("0000:1b:00.0")
    rig.tree.pci("0000:43:00.0")
    rig.tree.pci("0000:00:02.0", vendor="0x1234", class_code="0x030000", driver="")  # somebody else's graphics
    with pytest.raises(SourceUnavailable) as caught:
        rig.graph()
    assert "is not there, although NVIDIA GPUs are on the PCI bus (0000:1b:00.0, 0000:43:00.0)" in caught.value.reason
    assert "NVIDIA_DRIVER_CAPABILITIES=utility" in caught.value.hint


def test_t20_without_gpus_it_says_so(make_rig: MakeRig) -> None:
    with pytest.raises(SourceUnavailable, match="no NVIDIA GPU is on the PCI bus"):
        make_rig(None).graph()


def test_t20_gpus_that_the_kernel_module_names_are_shown(make_rig: MakeRig) -> None:
    rig = make_rig(None)
    uuid = "GPU-fa4e0000-0000-4000-8000-000000000000"
    rig.tree.pci("0000:1b:00.0")
    rig.tree.pci("0000:43:00.0")
    rig.tree.kernel_module_lists("0000:1b:00.0", uuid, "NVIDIA H100 80GB HBM3")
    rig.tree.kernel_module_lists("0000:43:00.0", "GPU-????????-????-????-????-????????????", "Unknown")
    graph = rig.graph()
    (gpu,) = graph.of_kind(nodes.GPU)
    assert (gpu.uuid, gpu.attributes["state"], gpu.attributes["name"]) == (uuid, "unreachable", "NVIDIA H100 80GB HBM3")
    assert gpu.unknown and "is not there" in gpu.unknown["sm_util_pct"]
    assert not gpu.metrics
    assert (gpu.id, "PciDevice(0000:1b:00.0)", "AttachedTo") in graph.edges
    assert rig.collector.losses == {"GPUs on the PCI bus whose UUID nobody tells": 1}
    assert "install the NVIDIA driver" in rig.noted


def test_a_driver_that_sees_no_gpu(make_rig: MakeRig) -> None:
    with pytest.raises(SourceUnavailable) as caught:
        make_rig("no-gpus").graph()
    assert "570.124.06 sees no GPU" in caught.value.reason and "--gpus all" in caught.value.hint


def test_n08_n03_one_lost_gpu_does_not_cost_the_others(make_rig: MakeRig) -> None:
    rig = make_rig("h100x8-lost-midway")
    graph = rig.graph()
    assert "GPU 3 (0000:61:00.0) does not answer: the GPU is lost" in rig.noted
    assert [gpu.attributes["state"] for gpu in graph.of_kind(nodes.GPU)] == ["ok"] * 3 + ["lost"] + ["ok"] * 4
    lost = gpu_of(graph, "3")
    assert lost.attributes["state_reason"] == "the GPU is lost: it has fallen off the bus"
    assert "sm_util_pct" not in lost.metrics and "memory_used_bytes" not in lost.metrics
    assert lost.unknown and lost.unknown["sm_util_pct"] == lost.attributes["state_reason"]
    assert lost.attributes["name"] == "NVIDIA H100 80GB HBM3"
    assert not [e for e in graph.edges_of_kind(edges.Proximity) if lost.id in (e.source, e.target)]


def test_n13_eight_gpus_that_become_seven_stay_eight(make_rig: MakeRig) -> None:
    rig = make_rig("h100x8")
    rig.graph()
    rig.fake.set("gpu 3", visible="no")
    for _ in range(3):
        graph = rig.graph()
        assert len(graph.of_kind(nodes.GPU)) == 8
        assert gpu_of(graph, "3").attributes["state"] == "lost"


def test_n16_a_gpu_off_the_bus_is_seen_without_an_xid(make_rig: MakeRig) -> None:
    rig = make_rig("l40sx4")
    for address in ("0000:17:00.0", "0000:18:00.0", "0000:b1:00.0"):  # 0001:ca:00.0 is gone
        rig.tree.pci(address)
    rig.tree.pci("0000:e1:00.0")
    rig.tree.pci("0000:e2:00.0", driver="vfio-pci")
    graph = rig.graph()
    assert gpu_of(graph, "3").attributes["on_pci_bus"] is False
    assert "on_pci_bus" not in gpu_of(graph, "0").attributes
    assert "GPU 0001:ca:00.0 is not on the PCI bus any more" in rig.noted
    assert "GPU 0000:e1:00.0 is on the PCI bus but NVML does not show it" in rig.noted
    assert "GPU 0000:e2:00.0 is bound to vfio-pci" in rig.noted


def test_n16_a_gpu_lost_from_the_start_is_found_through_the_pci_bus(make_rig: MakeRig) -> None:
    rig = make_rig("h100x8-lost", {"gpu0": {"process": "none"}})
    for last, bus in enumerate(("1b", "43", "52", "61", "9d", "c3", "d1", "df")):
        rig.tree.pci(f"0000:{bus}:00.0")
        rig.tree.kernel_module_lists(f"0000:{bus}:00.0", f"GPU-fa4e0000-0000-4000-8000-00000000000{last}", "H100")
    lost = gpu_of(rig.graph(), "3")
    assert (lost.attributes["state"], lost.attributes["pci_address"]) == ("lost", "0000:61:00.0")
    assert "GPU 3 cannot be read: the GPU is lost" in rig.noted
    assert rig.collector.losses == {}


def test_a_lost_gpu_that_nobody_can_name_is_counted(make_rig: MakeRig) -> None:
    rig = make_rig("h100x8-lost")
    assert len(rig.graph().of_kind(nodes.GPU)) == 7
    assert rig.collector.losses["GPUs that NVML counts but does not identify"] == 1


def test_n11_an_xid_is_an_event_with_its_time_and_no_sticky_gauge(make_rig: MakeRig) -> None:
    rig = make_rig("h100x8")
    assert gpu_of(rig.graph(), "4").metrics["xid_events_count"] == 0
    rig.fake.set("gpu 4", event="1 8 79")
    gpu = gpu_of(rig.graph(), "4")
    assert (gpu.metrics["xid_events_count"], gpu.attributes["events"]) == (1, ["xid 79"])
    when = gpu.attributes["last_xid_time"]
    for _ in range(10):
        gpu = gpu_of(rig.graph(), "4")
        assert gpu.metrics["xid_events_count"] == 0
        assert "events" not in gpu.attributes
        assert (gpu.attributes["last_xid"], gpu.attributes["last_xid_time"]) == (79, when)
    assert when == "2023-11-14T22:13:30.000Z"
    assert "last_xid" not in gpu_of(rig.graph(), "5").attributes


def test_a_lost_gpu_does_not_hide_the_xids_of_others(make_rig: MakeRig) -> None:
    """NVML ends the waiting for events of all GPUs with GPU_IS_LOST."""
    rig = make_rig("h100x8")
    rig.graph()
    rig.fake.set("gpu 3", event="1 8 79", lost="yes")
    lost = gpu_of(rig.graph(), "3")
    assert (lost.attributes["state"], lost.attributes["events"]) == ("lost", ["xid 79"])
    rig.fake.set("gpu 4", event="2 8 31")
    graph = rig.graph()
    assert gpu_of(graph, "4").attributes["events"] == ["xid 31"]
    assert "XID events cannot be seen" not in rig.noted
    assert gpu_of(graph, "3").attributes["last_xid"] == 79


def test_xids_that_cannot_be_seen_are_unknown(make_rig: MakeRig) -> None:
    rig = make_rig("v100-old")
    gpu = gpu_of(rig.graph(), "0")
    assert "xid_events_count" not in gpu.metrics and gpu.unknown and gpu.unknown["xid_events_count"]
    assert "XID events cannot be seen" in rig.noted


def test_n15_n09_stale_values_are_marked_then_only_the_gpus_remain(make_rig: MakeRig) -> None:
    rig = make_rig("h100x8", deadline_s=0.1, expires_s=12)
    rig.graph()
    rig.fake.set("gpu 2", {"hang.nvmlDeviceGetUtilizationRates": "yes"})
    gpu = gpu_of(rig.graph(), "0")
    assert gpu.metrics["age_s"] == 5.0 and gpu.metrics["sm_util_pct"] == 87
    assert "nvmlDeviceGetUtilizationRates of GPU 2" in gpu.attributes["stale_reason"]
    assert gpu.unknown and "nvlink_tx_bytes_per_s" in gpu.unknown and "xid_events_count" in gpu.unknown
    assert "NVML values are 5 s old" in rig.noted
    rig.graph()
    graph = rig.graph()  # 15 s: older than 12
    assert len(graph.of_kind(nodes.GPU)) == 8
    gone = gpu_of(graph, "0")
    assert gone.attributes["state"] == "unreachable"
    assert "sm_util_pct" not in gone.metrics and "age_s" not in gone.metrics
    assert gone.metrics["sm_clock_max_hz"] == 1980_000_000
    rig.fake.set("gpu 2", {"hang.nvmlDeviceGetUtilizationRates": "no"})
    rig.nvml._watchdog._current.done.wait(10)
    back = gpu_of(rig.graph(), "0")
    assert back.attributes["state"] == "ok" and "age_s" not in back.metrics


def test_n14_the_collector_recovers(make_rig: MakeRig) -> None:
    rig = make_rig("driver-not-loaded")
    for _ in range(3):
        with pytest.raises(SourceUnavailable, match="not loaded"):
            rig.graph(seconds=1)
    rig.fake._replace("[system]\n[gpu 0]\nuuid = GPU-1\n")
    assert [gpu.uuid for gpu in rig.graph(seconds=30).of_kind(nodes.GPU)] == ["GPU-1"]


def test_n18_a_profiler_that_holds_the_counters_is_named(make_rig: MakeRig) -> None:
    rig = make_rig("h100x8", {"gpu0": {"utilization": "!IN_USE"}})
    rig.tree.process(700, comm="nsys")
    gpu = gpu_of(rig.graph(), "0")
    assert gpu.unknown and gpu.unknown["sm_util_pct"] == IN_USE_REASON
    assert "nsys (pid 700)" in rig.noted


def test_degraded_hardware_leaves_its_evidence(make_rig: MakeRig) -> None:
    """What the rules H01 to H11 look at."""
    graph = make_rig(
        "h100x8",
        {
            "gpu1": {"ecc_volatile": "3 1", "ecc_aggregate": "40 2", "remapped_rows": "1 2 1 1"},
            "gpu2": {"persistence": "0", "fabric": "2 0 0", "clocks_application": "1200 1200 2619 1000"},
        },
    ).graph()
    assert gpu_of(graph, "5").metrics["pcie_gen"] == 3 and gpu_of(graph, "5").metrics["pcie_gen_max"] == 5
    assert gpu_of(graph, "5").metrics["pcie_width"] == 8 and gpu_of(graph, "5").metrics["pcie_replays_count"] == 42
    assert gpu_of(graph, "7").attributes["clock_event_reasons"] == ["hw_slowdown", "hw_thermal_slowdown"]
    worn = gpu_of(graph, "1").metrics
    assert (worn["ecc_corrected_volatile_count"], worn["ecc_uncorrected_volatile_count"]) == (3, 1)
    assert (worn["ecc_corrected_aggregate_count"], worn["ecc_uncorrected_aggregate_count"]) == (40, 2)
    assert (worn["rows_remapped_uncorrected_count"], worn["row_remap_pending"], worn["row_remap_failed"]) == (2, 1, 1)
    third = gpu_of(graph, "2")
    assert (third.attributes["persistence"], third.attributes["fabric_state"]) == ("disabled", "in_progress")
    assert third.metrics["graphics_clock_application_hz"] == 1200_000_000


def test_t19_the_driver_is_asked_for_the_numa_node(make_rig: MakeRig) -> None:
    rig = make_rig("l40sx4", {"gpu0": {"numa_nodes": "1"}, "gpu1": {"numa_nodes": "0-1", "numa_node_id": "8"}})
    rig.tree.pci("0000:17:00.0")
    graph = rig.graph()
    first, second = gpu_of(graph, "0"), gpu_of(graph, "1")
    assert first.attributes["numa_node"] == 1
    assert [e.target for e in graph.edges_of_kind(edges.Affinity) if e.source == first.id] == ["Numa(1)"]
    assert second.attributes["numa_nodes"] == [0, 1]
    assert second.attributes["own_memory_numa_node"] == 8  # where its own memory is, not what it is near to
    assert [e.target for e in graph.edges_of_kind(edges.Affinity) if e.source == second.id] == ["Numa(0)", "Numa(1)"]


@pytest.mark.parametrize(
    "machine", ["h100x8", "h100x8-lost", "h100x8-lost-midway", "a100-mig", "l40sx4", "v100-old", "h100x2-struct535"]
)
def test_every_machine_gives_a_sound_graph(make_rig: MakeRig, machine: str) -> None:
    rig: Rig = make_rig(machine)
    for pid in (4101, 5001, 5002, 6001, 6002, 7001, 8001):
        rig.tree.process(pid)
    for _ in range(3):
        graph = rig.graph()
        assert not graph.dangling()
        for element in [*graph.nodes.values(), *graph.edges.values()]:
            assert all(math.isfinite(value) for value in element.metrics.values())
            names = element.metrics.keys() | element.attributes.keys()
            assert not names & (element.unknown or {}).keys(), (element.id, element.unknown)
            for value in element.attributes.values():
                assert isinstance(value, str | int | float | bool | list)
        encode_graph(graph)
