"""GPM over the real pynvml on the fake library: which units of a GPU worked since the round before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gpuflight.sources.nvml.gpm import FIRST_SAMPLE

if TYPE_CHECKING:  # pytest loads them as a plugin
    from tests.fakes.nvml.fixtures import MakeRig

pytest_plugins = ("tests.fakes.nvml.fixtures",)
UNITS = ("sm_active_pct", "sm_occupancy_pct", "tensor_active_pct", "dram_active_pct")
UNSUPPORTED = "not supported by this GPU or driver"
TOO_OLD = "the driver is too old for it"


def test_units_are_known_from_the_second_round_on(make_rig: MakeRig) -> None:
    rig = make_rig("h100x8")
    first = rig.snapshot().gpus[0]
    assert {name: first.unknown.get(name) for name in UNITS} == dict.fromkeys(UNITS, FIRST_SAMPLE)
    busy, idle = rig.snapshot().gpus[:2]
    assert [busy.metrics[name] for name in UNITS] == [62.5, 31.25, 38.0, 47.75]
    assert [idle.metrics[name] for name in UNITS] == [0.0] * 4
    assert not set(UNITS) & (busy.unknown.keys() | idle.unknown.keys())
    assert busy.metrics["sm_util_pct"] == 87  # NVML's own; GPM's share of time is asked for MIG only


def test_a_gpu_that_has_none_says_so(make_rig: MakeRig) -> None:
    rig = make_rig("l40sx4")
    for _ in range(3):
        gpu = rig.snapshot().gpus[0]
        assert {name: gpu.unknown.get(name) for name in UNITS} == dict.fromkeys(UNITS, UNSUPPORTED)


def test_a_driver_without_the_functions_says_so(make_rig: MakeRig) -> None:
    rig = make_rig("h100x8", {"system": {"without": "nvmlGpmQueryDeviceSupport nvmlGpmSampleGet"}})
    rig.snapshot()
    gpu = rig.snapshot().gpus[0]
    assert {gpu.unknown.get(name) for name in UNITS} == {TOO_OLD}


def test_what_fails_once_begins_anew(make_rig: MakeRig) -> None:
    rig = make_rig("h100x8")
    rig.snapshot()
    rig.fake.set("gpu 0", {"fail.nvmlGpmSampleGet": "UNKNOWN"})
    assert rig.snapshot().gpus[0].unknown["sm_active_pct"] == "NVML error 999"
    rig.fake.set("gpu 0", {"fail.nvmlGpmSampleGet": "no"})
    assert rig.snapshot().gpus[0].unknown["sm_active_pct"] == FIRST_SAMPLE
    assert rig.snapshot().gpus[0].metrics["sm_active_pct"] == 62.5


@pytest.mark.parametrize(
    ("value", "reason"),
    [("!NOT_SUPPORTED", UNSUPPORTED), ("-3", "NVML gives a number that makes no sense"),
     ("1e300", "NVML gives a number that makes no sense")],
)  # fmt: skip
def test_one_unit_may_be_unknown(value: str, reason: str, make_rig: MakeRig) -> None:
    rig = make_rig("h100x8", {"gpu0": {"gpm.5": value}})
    rig.snapshot()
    gpu = rig.snapshot().gpus[0]
    assert gpu.unknown["tensor_active_pct"] == reason and "tensor_active_pct" not in gpu.metrics
    assert gpu.metrics["sm_active_pct"] == 62.5


def test_mig_devices_have_their_own_utilisation(make_rig: MakeRig) -> None:
    units = {f"gpm.{number}": "50" for number in (1, 2, 3, 5, 10)}
    rig = make_rig("a100-mig", {"gpu0": units, "mig 0 0": {**units, "gpm.1": "93.5"}, "mig 0 1": {"gpm.1": "4"}})
    assert rig.snapshot().gpus[0].migs[0].unknown["sm_util_pct"] == FIRST_SAMPLE
    gpu = rig.snapshot().gpus[0]
    assert [mig.metrics.get("sm_util_pct") for mig in gpu.migs[:2]] == [93.5, 4.0]
    assert gpu.migs[0].metrics["tensor_active_pct"] == 50.0
    assert gpu.metrics["sm_active_pct"] == 50.0


def test_the_graph_has_them(make_rig: MakeRig) -> None:
    rig = make_rig("h100x8")
    rig.graph()
    gpu = rig.graph().nodes["GPU(uuid=GPU-fa4e0000-0000-4000-8000-000000000000)"]
    assert gpu.metrics["sm_active_pct"] == 62.5


def test_a_lost_gpu_and_closing_give_no_error(make_rig: MakeRig) -> None:
    rig = make_rig("h100x8")
    rig.snapshot()
    rig.fake.set("gpu 3", lost="yes")
    assert next(gpu for gpu in rig.snapshot().gpus if gpu.index == 3).state == "lost"
    rig.nvml.close()
