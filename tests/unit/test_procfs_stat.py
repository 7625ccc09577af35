"""The parsers of the one-record files of /proc."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.proc import KERNEL_THREAD, stat_record

from gpuflight.sources.procfs.stat import (
    parse_cgroup,
    parse_cmdline,
    parse_environ,
    parse_namespace,
    parse_owner,
    parse_stat,
    parse_status,
    printable,
)

RECORD = {"comm": b"python", "ppid": 7, "threads": 3, "start": 918273, "rss": 55, "utime": 40, "stime": 2, "majflt": 9}


@pytest.mark.parametrize(
    ("comm", "text"),
    [
        (b"python", "python"),
        (b"Web Content", "Web Content"),
        (b":-) R 1 2 3", ":-) R 1 2 3"),
        (b"((sd-pam))", "((sd-pam))"),
        (b"a\nb", "a\nb"),
        (b"caf\xe9", "caf\\xe9"),
        ("日本".encode(), "日本"),
        (b"", ""),
    ],
)
def test_comm_may_hold_anything(comm: bytes, text: str) -> None:
    stat = parse_stat(stat_record(42, RECORD | {"comm": comm}))
    assert (stat.comm, stat.pid, stat.ppid, stat.state, stat.start) == (text, 42, 7, "S", 918273)


@given(st.binary(max_size=15).filter(lambda comm: b"\0" not in comm), st.integers(1, 4_194_304), st.integers(0, 2**60))
def test_any_comm_leaves_the_other_fields_alone(comm: bytes, pid: int, start: int) -> None:
    stat = parse_stat(stat_record(pid, RECORD | {"comm": comm, "start": start}))
    assert (stat.pid, stat.start, stat.threads, stat.rss_pages, stat.cpu_ticks, stat.majflt) == (
        pid,
        start,
        3,
        55,
        42,
        9,
    )
    assert stat.id == f"Process(pid={pid},start={start})"
    stat.comm.encode()  # JSON can carry it


@given(st.binary(max_size=200))
def test_garbage_is_a_value_error(raw: bytes) -> None:
    try:
        parse_stat(raw)
    except ValueError:
        return
    pytest.fail("garbage was understood")


def test_a_record_cut_short_is_a_value_error() -> None:
    raw = stat_record(42, RECORD)
    with pytest.raises(ValueError, match="fields"):
        parse_stat(raw[: raw.index(b"918273")])


def test_kernel_threads_and_images() -> None:
    assert parse_stat(stat_record(2, RECORD | {"flags": KERNEL_THREAD})).kernel_thread
    before = parse_stat(stat_record(2, RECORD))
    assert not before.kernel_thread
    assert parse_stat(stat_record(2, RECORD | {"utime": 99})).image == before.image
    assert parse_stat(stat_record(2, RECORD | {"start_stack": 1})).image != before.image
    assert parse_stat(stat_record(2, RECORD | {"comm": b"other"})).image != before.image


def test_status_and_owner() -> None:
    raw = b"Name:\ta b:c\nUid:\t1000\t1001\t1000\t1000\nNSpid:\t4242\t7\nCpus_allowed_list:\t0-3,8\nVmRSS:\t  12 kB\n"
    assert parse_status(raw)["VmRSS"] == "12 kB"
    assert parse_status(raw)["Name"] == "a b:c"
    assert parse_owner(raw) == (1001, [4242, 7], "0-3,8")


def test_an_owner_without_nspid_and_one_without_anything() -> None:
    assert parse_owner(b"Name:\tx\nUid:\t0\t5\t0\t0\n") == (5, [], "")
    with pytest.raises(ProcessLookupError):
        parse_owner(b"")
    with pytest.raises(ValueError, match="Uid"):
        parse_owner(b"Name:\tx\n")


def test_cmdlines() -> None:
    assert parse_cmdline(b"python\0-c\0a b\0") == ["python", "-c", "a b"]
    assert parse_cmdline(b"sh\0\0x\0") == ["sh", "", "x"]
    assert parse_cmdline(b"postgres: writer   \0\0\0\0") == ["postgres: writer   "]
    assert parse_cmdline(b"") == []
    assert parse_cmdline(b"\xff\0") == ["\\xff"]


def test_environ_takes_the_first_of_two() -> None:
    assert parse_environ(b"A=1\0B=x=y\0A=2\0junk\0=z\0") == {"A": "1", "B": "x=y"}


def test_cgroups_of_v1_v2_and_paths_with_colons() -> None:
    raw = b"12:cpu,cpuacct:/a:b\n1:name=systemd:/x\n0::/user.slice/c\n"
    assert parse_cgroup(raw) == [("cpu,cpuacct", "/a:b"), ("name=systemd", "/x"), ("", "/user.slice/c")]


def test_namespaces() -> None:
    assert parse_namespace("net:[4026531840]") == 4026531840
    with pytest.raises(ValueError, match="substring"):
        parse_namespace("net")


def test_paths_that_are_no_utf8_become_printable() -> None:
    assert printable("/plain") == "/plain"
    assert printable("/caf\udce9") == "/caf\\xe9"
    assert printable("/日本") == "/日本"
