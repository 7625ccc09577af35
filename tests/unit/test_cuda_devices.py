"""CUDA_VISIBLE_DEVICES and what else decides which GPU device 0 is.."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuflight.sources.cuda_devices import (
    MIG_AND_GPU,
    MIXED,
    NOT_SO_MANY,
    SEVERAL_MIGS,
    Allocated,
    CudaDevice,
    CudaGpu,
    CudaMig,
    Visible,
    allocated,
    minors_of,
    permitted_minors,
    visible_devices,
)


def gpu(number: int, uuid: str = "", model: str = "H100", **more: object) -> CudaGpu:
    return CudaGpu(
        uuid or f"GPU-{number}abc",
        number,
        f"0000:{number + 1:02x}:00.0",
        model,
        minor=number,
        **more,  # type: ignore[arg-type]
    )


FOUR = [gpu(number) for number in range(4)]
MIXED_BOX = [gpu(0, model="T4"), gpu(1, model="H100"), gpu(2, model="T4")]
TWO_MIGS = (CudaMig("MIG-aa1", 1, 0), CudaMig("MIG-ab2", 2, 0))
SPLIT = gpu(0, "GPU-5b11", mig=True, migs=TWO_MIGS)


def uuids(visible: Visible) -> list[str]:
    """UUIDs by number; reasons as they are."""
    return [one if isinstance(one, str) else one.uuid for one in visible.devices]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("  ", []),
        ("2", [2]),
        ("3,1", [3, 1]),
        (" 3 , 1 ", [3, 1]),
        ("1,-1,2", [1]),
        ("-1", []),
        ("1,9,2", [1]),
        ("NoDevFiles", []),
        ("0,x", [0]),
        ("0,,1", [0]),
        ("0,1,0", []),
        ("1,01", []),
        ("GPU-2abc,0", [2, 0]),
        ("GPU-2", [2]),
        ("GPU-", []),
        ("GPU-9", []),
        ("0,GPU-0abc", []),
        ("gpu-2abc", []),
        ("MIG-1", []),
    ],
)
def test_values(value: str | None, expected: list[int]) -> None:
    """Empty is none, not all; −1 and what does not exist end the list; a device named twice spoils all of it."""
    assert uuids(visible_devices(FOUR, value)) == [f"GPU-{number}abc" for number in expected]


def test_reasons_say_what_is_wrong() -> None:
    assert visible_devices(FOUR, "1").device(1) == NOT_SO_MANY
    assert "empty" in str(visible_devices(FOUR, "").device(0))
    assert "'-1'" in str(visible_devices(FOUR, "1,-1").device(1))
    assert "twice" in str(visible_devices(FOUR, "1,1").device(0))
    assert "chose" in str(visible_devices(FOUR, None).device(-1))


def test_numbers_mean_nothing_by_default_among_different_models() -> None:
    """CUDA's default order is the fastest first, which is not the order of PCI addresses."""
    for value in (None, "0,1"):
        visible = visible_devices(MIXED_BOX, value)
        assert visible.device(0) == MIXED == visible.device(1)
        assert visible.only is None
    assert uuids(visible_devices(MIXED_BOX, "1,0", "PCI_BUS_ID")) == ["GPU-1abc", "GPU-0abc"]
    assert uuids(visible_devices(MIXED_BOX, "GPU-2,GPU-0")) == ["GPU-2abc", "GPU-0abc"], "a UUID is what it is"
    assert visible_devices(MIXED_BOX, None, "FASTEST_FIRST").device(0) == MIXED
    assert visible_devices(MIXED_BOX[:1], None).device(0) == CudaDevice("GPU-0abc", "GPU-0abc")
    nameless = [gpu(0, model=""), gpu(1, model="")]
    assert visible_devices(nameless, None).device(0) == MIXED


def test_gpus_that_cannot_be_counted() -> None:
    visible = visible_devices(FOUR, None, disorder="GPU 2 is lost")
    assert visible.device(0) == "GPU 2 is lost" == visible.device(7)
    assert uuids(visible_devices(FOUR, "GPU-1,2", disorder="GPU 2 is lost")) == ["GPU-1abc", "GPU 2 is lost"]


def test_mig() -> None:
    one = gpu(0, "GPU-one", mig=True, migs=TWO_MIGS[:1])
    assert visible_devices([one], None).only == CudaDevice("MIG-aa1", "GPU-one") == visible_devices([one], "0").only
    assert visible_devices([SPLIT], None).device(0) == SEVERAL_MIGS == visible_devices([SPLIT], "0").device(0)
    assert uuids(visible_devices([SPLIT, gpu(1)], "MIG-ab")) == ["MIG-ab2"]
    assert uuids(visible_devices([SPLIT], "MIG-a")) == [], "the beginning of two"
    assert uuids(visible_devices([SPLIT], "MIG-ab,MIG-aa")) == ["MIG-ab2", "MIG-aa1"]
    assert uuids(visible_devices([SPLIT], "MIG-GPU-5b11/2/0")) == ["MIG-ab2"], "the form of drivers before 470"
    assert uuids(visible_devices([SPLIT], "MIG-GPU-5b11/7/0")) == []
    assert uuids(visible_devices([SPLIT, gpu(1)], "MIG-ab,GPU-1")) == [MIG_AND_GPU] * 2
    assert (
        visible_devices([SPLIT, gpu(1)], None).device(0)
        == MIG_AND_GPU
        == visible_devices([SPLIT, gpu(1)], "1").device(0)
    )
    empty = gpu(0, "GPU-empty", mig=True)
    assert uuids(visible_devices([empty, gpu(1)], None)) == ["GPU-1abc"], "nothing to use on the first"
    assert uuids(visible_devices([empty], "GPU-empty")) == []


def test_containers() -> None:
    assert allocated(FOUR, files={1, 3}).gpus == (FOUR[1], FOUR[3])
    assert allocated(FOUR, files={1, 3}, requested="all").gpus == (FOUR[1], FOUR[3]), "what images say is not believed"
    assert allocated(FOUR, files={1, 3}, permitted={3}).gpus == (FOUR[3],)
    assert allocated(FOUR, permitted=set()).gpus == ()
    assert allocated(FOUR).gpus == tuple(FOUR)
    for nothing in ("", "void", "all", None):
        assert allocated(FOUR, requested=nothing) == Allocated(tuple(FOUR))
    assert allocated(FOUR, requested="none") == Allocated(())
    assert allocated(FOUR, requested="2, GPU-0abc").gpus == (FOUR[0], FOUR[2]), "not in the order of the list"
    strange = allocated(FOUR, requested="GPU-9")
    assert strange.gpus == tuple(FOUR) and "GPU-9" in strange.reason
    unnumbered = allocated([FOUR[0]._replace(minor=None)], files={0})
    assert unnumbered.reason


def test_a_container_with_one_mig_device() -> None:
    for requested in ("MIG-ab2", "0:1"):
        (only,) = allocated([SPLIT, FOUR[1]], files={0}, requested=requested).gpus
        assert visible_devices([only], None).only == CudaDevice("MIG-ab2", "GPU-5b11")
    assert allocated([SPLIT], requested="0:7").reason


def test_files_and_device_cgroups() -> None:
    assert minors_of(["nvidia0", "nvidia12", "nvidiactl", "nvidia-uvm", "nvidia-caps", "null"]) == {0, 12}
    assert permitted_minors("c 1:3 rwm\nc 195:255 rw\nc 195:2 rw\nc 195:0 rwm\nb 195:4 rw\n") == {0, 2}
    assert permitted_minors("c 195:* rwm\n") is None
    assert permitted_minors("a *:* rwm\n") is None
    assert permitted_minors("c *:* m\n") == set(), "making nodes is not opening them"
    assert permitted_minors("") == set()


# --- whatever the values ------------------------------------------------------------

words = st.one_of(
    st.integers(-2, 6).map(str),
    st.sampled_from(["GPU-0abc", "GPU-1", "GPU-", "MIG-aa1", "MIG-a", "MIG-GPU-5b11/1/0", "", "x", " 2 ", "²", "1e3"]),
    st.text(max_size=6),
)
values = st.one_of(st.none(), st.lists(words, max_size=6).map(",".join))
pools = st.lists(st.sampled_from([*FOUR, *MIXED_BOX, SPLIT]), max_size=5, unique_by=lambda one: one.number)


@given(pool=pools, value=values, order=st.sampled_from([None, "PCI_BUS_ID", "FASTEST_FIRST", "", "x"]))
def test_every_answer_is_a_device_of_the_process_or_a_reason(
    pool: list[CudaGpu], value: str | None, order: str | None
) -> None:
    visible = visible_devices(pool, value, order)
    assert visible == visible_devices(list(reversed(pool)), value, order), "in whatever order NVML gives them"
    usable = {CudaDevice(one.uuid, one.uuid) for one in pool if not one.mig}
    usable |= {CudaDevice(mig.uuid, one.uuid) for one in pool for mig in one.migs}
    devices = [one for one in visible.devices if not isinstance(one, str)]
    assert set(devices) <= usable and len(set(devices)) == len(devices)
    for number in range(-1, 8):
        answer = visible.device(number)
        assert isinstance(answer, CudaDevice) or (answer and "\n" not in answer)
    assert visible.only is None or visible.only in usable


@given(numbers=st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True), rest=st.lists(words, max_size=3))
def test_a_list_of_numbers_chooses_and_orders_and_minus_one_ends_it(numbers: list[int], rest: list[str]) -> None:
    plain = ",".join(map(str, numbers))
    chosen = visible_devices(FOUR, plain)
    assert uuids(chosen) == [f"GPU-{number}abc" for number in numbers]
    assert visible_devices(FOUR, f"{plain},-1,{','.join(rest)}").devices == chosen.devices
    spaced = " , ".join(map(str, numbers))
    assert visible_devices(FOUR, f" {spaced}\t") == chosen
    by_uuid = ",".join(FOUR[number].uuid for number in numbers)
    assert visible_devices(FOUR, by_uuid).devices == chosen.devices


@given(files=st.none() | st.sets(st.integers(0, 5)), permitted=st.none() | st.sets(st.integers(0, 5)), requested=values)
def test_a_container_never_adds_a_gpu(
    files: set[int] | None, permitted: set[int] | None, requested: str | None
) -> None:
    got = allocated(FOUR, files=files, permitted=permitted, requested=requested)
    assert set(got.gpus) <= set(FOUR)
    assert list(got.gpus) == sorted(got.gpus, key=lambda one: one.number)
    if files is not None and permitted is not None:
        assert {one.minor for one in got.gpus} == files & permitted & {0, 1, 2, 3}
