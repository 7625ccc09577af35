"""SysFs: caches, reasons, lists, addresses."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.sysfs_tree import Tree

from gpuflight.sources.sysfs import (
    Facts,
    SysFs,
    disk_of_device,
    disk_of_name,
    format_list,
    parse_list,
    pci_address,
    pci_address_in,
    reason,
)


@given(st.sets(st.integers(0, 2000)))
def test_lists_round_trip(numbers: set[int]) -> None:
    assert parse_list(format_list(numbers)) == sorted(numbers)


@pytest.mark.parametrize(
    ("text", "numbers"), [("0-3,8", [0, 1, 2, 3, 8]), ("", []), ("\n", []), ("7\n", [7]), ("0-1,4-5", [0, 1, 4, 5])]
)
def test_parse_list(text: str, numbers: list[int]) -> None:
    assert parse_list(text) == numbers


def test_parse_list_refuses_garbage() -> None:
    with pytest.raises(ValueError):
        parse_list("0-x")


def test_format_list_sorts_and_joins() -> None:
    assert format_list([8, 2, 1, 0, 3, 3]) == "0-3,8"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("00000000:3B:00.0", "0000:3b:00.0"),
        ("0000:3b:00.0", "0000:3b:00.0"),
        ("3b:00.0", "0000:3b:00.0"),
        ("00000009:01:00.0", "0009:01:00.0"),
        ("NA", ""),
        ("", ""),
    ],
)
def test_pci_address(text: str, address: str) -> None:
    assert pci_address(text) == address


def test_innermost_pci_address_of_a_path() -> None:
    assert pci_address_in("devices/pci0000:00/0000:00:01.0/0000:3b:00.0/net/eth0") == "0000:3b:00.0"
    assert pci_address_in("devices/virtual/net/lo") == ""


def test_dynamic_files_are_read_once_a_round(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.write("/sys/a", "1\n")
    tree.sysfs.begin_round(1)
    assert tree.sysfs.number("a") == tree.sysfs.number("a") == 1
    assert tree.fs.reads["/sys/a"] == 1
    tree.write("/sys/a", "2\n")
    assert tree.sysfs.number("a") == 1
    tree.sysfs.begin_round(2)
    assert tree.sysfs.number("a") == 2


def test_static_files_are_kept_until_the_recheck(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    sysfs = SysFs(tree.fs, recheck_rounds=10)
    tree.write("/sys/a", "1\n")
    for number in range(1, 10):
        sysfs.begin_round(number)
        assert sysfs.text("a", static=True) == "1"
    assert tree.fs.reads["/sys/a"] == 1
    tree.write("/sys/a", "2\n")
    generation = sysfs.generation
    sysfs.begin_round(10)
    assert sysfs.generation == generation + 1
    assert sysfs.text("a", static=True) == "2"


def test_forget_drops_a_device_and_what_is_below_it(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    for name in ("dev", "device"):
        tree.write(f"/sys/{name}/x", "1")
        tree.sysfs.text(f"{name}/x", static=True)
        tree.write(f"/sys/{name}/x", "2")
    tree.sysfs.forget("dev")
    assert tree.sysfs.text("dev/x", static=True) == "2"
    assert tree.sysfs.text("device/x", static=True) == "1"


def test_an_error_is_remembered_like_an_answer(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.write("/sys/speed", "1")
    tree.fail("/sys/speed", errno.EIO)
    tree.sysfs.begin_round(1)
    for _ in range(3):
        with pytest.raises(OSError) as caught:
            tree.sysfs.text("speed")
        assert caught.value.errno == errno.EIO
    assert tree.fs.reads["/sys/speed"] == 1


@pytest.mark.parametrize("code", [errno.EIO, errno.EINVAL, errno.ENOENT, errno.EACCES, errno.ENODEV, errno.ETIMEDOUT])
def test_every_error_becomes_a_reason(tmp_path: Path, code: int) -> None:
    tree = Tree(tmp_path)
    tree.write("/sys/x", "1")
    tree.fail("/sys/x", code)
    facts = Facts(tree.sysfs)
    assert facts.number("x_count", "x") is None
    assert facts.metrics == {}
    assert facts.unknown["x_count"]
    assert reason(OSError(code, "words")) == facts.unknown["x_count"] or code == errno.ETIMEDOUT


def test_text_that_is_no_number_is_unknown(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.write("/sys/x", "Unknown\n")
    facts = Facts(tree.sysfs)
    facts.number("x_count", "x")
    assert "x_count" in facts.unknown and not facts.metrics


def test_numa_node_minus_one_is_unknown_not_zero(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.write("/sys/dev/numa_node", "-1\n")
    facts = Facts(tree.sysfs)
    assert facts.numa_node("dev/numa_node") is None
    assert "numa_node" not in facts.attributes
    assert "-1" in facts.unknown["numa_node"]


def test_a_partition_counts_to_its_disk(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    device = tree.pci("pci0000:00/0000:00:04.0", 0x010802)
    disk = tree.disk("nvme0n1", device, below="nvme/nvme0/")
    tree.partition(disk, "nvme0n1p2", "259:2")
    tree.link("/sys/dev/block/259:0", disk)
    assert disk_of_device(tree.sysfs, "259:2") == "nvme0n1"
    assert disk_of_device(tree.sysfs, "259:0") == "nvme0n1"
    assert disk_of_name(tree.sysfs, "nvme0n1p2") == "nvme0n1"
    with pytest.raises(OSError):
        disk_of_device(tree.sysfs, "8:0")
