"""The TOML of a user's probe: what it means, and that each mistake is one line that says where, what and what to do."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuflight.graph import units
from gpuflight.sources.bpf.toml_lines import TomlLines
from gpuflight.sources.bpf.user_probe_layout import Layout, LayoutError
from gpuflight.sources.bpf.user_probe_spec import UNITS, Place, ProbeMistake, parse_place, parse_spec

GOOD = """\
description = "reads"  # line 1

[[attach]]
program = "on_read"
uprobe = "libc.so.6:read"
cookie = 7

[[attach]]
program = "on_end"
raw_tracepoint = "sched_process_exit"

[[maps]]
name = "reads"
entity = "Process"
key = ["u32 pid", "u32 operation"]
value = ["u64 calls", "u64 time_ns", "u64 slots[8]", "char comm[16]"]
where = { operation = 2 }
entries = 64

[maps.metrics]
reads_per_s = { rate = "calls" }
read_mean_us = { mean = ["time_ns", "calls"], scale = 0.001 }
read_p99_ns = { quantile = 0.99, of = "slots" }
open_count = { value = "calls" }

[constants]
limit = 5

[losses]
3 = "reads of nobody"
"""


def test_what_a_file_means() -> None:
    spec = parse_spec(GOOD, "reads.toml")
    assert spec.description == "reads"
    assert spec.sections == {"on_read": "uprobe", "on_end": "raw_tp/sched_process_exit"}
    assert spec.attach[0].place == Place("libc.so.6", "read")
    assert spec.attach[0].cookie == 7
    (described,) = spec.maps
    assert described.id == "pid"
    assert described.where == {"operation": 2}
    assert described.key.size == 8
    assert described.value.size == 8 + 8 + 64 + 16
    assert list(described.metrics) == ["reads_per_s", "read_mean_us", "read_p99_ns", "open_count"]
    assert spec.entries == {"reads": 64}
    assert spec.constants == {"limit": 5}
    assert spec.losses == {3: "reads of nobody"}


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ('"reads"  # line 1', '"reads', 1, "no TOML"),
        ('"reads"  # line 1', '" "', 1, "description is empty (say in one line"),
        ("description", "decription", 1, "there is no decription (did you mean description?)"),
        ('"libc.so.6:read"', '"libc.so.6"', 5, "'libc.so.6' is no place in a file (write FILE:SYMBOL"),
        ('"libc.so.6:read"', "5", 5, "expected a text, got a whole number"),
        ("cookie = 7", 'kprobe = "vfs_read"', 6, "uprobe and kprobe in one [[attach]] (write an [[attach]] for each)"),
        ("cookie = 7", "coockie = 7", 6, "there is no coockie (did you mean cookie?)"),
        ('program = "on_end"', "", 8, "program is missing"),
        ('"sched_process_exit"', '"sched/sched_process_exit"', 10, "is no name in the kernel"),
        ("raw_tracepoint", "tracepoint", 10, "is no tracepoint (write GROUP/EVENT"),
        ("cookie = 7", "everywhere = true\npid = 5", 6, "everywhere belongs to uprobe and uretprobe, without a pid"),
        ('raw_tracepoint = "sched_process_exit"', "pid = 4", 10, "pid belongs to uprobe and uretprobe"),
        ('"on_end"', '"on_read"', 9, "on_read has two targets of different kinds (write a program for each)"),
        ('"Process"', '"process"', 14, "a map cannot be about 'process' (did you mean Process?)"),
        ('"Process"', '"Thread"', 15, "the key has no number tid, which says which Thread is meant"),
        ('"Process"', '"GPU"', 14, "there are Process, Thread, Disk"),
        ('entity = "Process"', 'entity = "Process"\nid = "tgid"', 15, "the key has no number tgid"),
        ('"u32 pid"', '"u33 pid"', 15, "'u33 pid' is no field; write u32 pid"),
        ('"u64 time_ns"', '"u64 calls"', 16, "there are two fields calls"),
        ("slots[8]", "slots[0]", 16, "has 0 elements"),
        ("operation = 2", "operator = 2", 17, "the key has no number operator"),
        ("entries = 64", "entries = -1", 18, "-1 entries"),
        ('rate = "calls"', 'rate = "call"', 21, "the value has no number 'call' (did you mean calls?)"),
        ('rate = "calls"', 'rate = "comm"', 21, "the value has no number 'comm'"),
        ('rate = "calls"', 'rate = "slots"', 21, "slots is an array (quantile takes an array"),
        ('rate = "calls"', 'rate = "calls", value = "calls"', 21, "rate and value in one metric"),
        ('{ rate = "calls" }', "{ scale = 2.0 }", 21, "reads_per_s says not where it comes from"),
        ("reads_per_s", "reads_count", 21, "reads_count is a rate (end its name with _per_s)"),
        ("reads_per_s", "Reads_per_s", 21, "'Reads_per_s' is no name of a metric"),
        ("read_mean_us", "read_mean", 22, "read_mean does not say its unit (end it with one of"),
        ('["time_ns", "calls"]', '["time_ns"]', 22, "mean takes two fields"),
        ("quantile = 0.99", "quantile = 99", 23, "quantile is 99 (it lies between 0 and 1)"),
        ('of = "slots"', 'of = "calls"', 23, "calls is one number"),
        (', of = "slots"', "", 23, "the value has no number ''"),
        ('{ value = "calls" }', '{ value = "calls", of = "slots" }', 24, "of belongs to quantile"),
        ("limit = 5", 'limit = "5"', 26, "expected a whole number"),
        ('3 = "reads', '32 = "reads', 30, "gf_loss(32) is not possible (0 to 31 are)"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(old: str, new: str, line: int, words: str) -> None:
    assert old in GOOD
    with pytest.raises(ProbeMistake) as caught:
        parse_spec(GOOD.replace(old, new, 1), "reads.toml")
    assert str(caught.value).startswith(f"reads.toml:{line}: "), str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "`" not in str(caught.value)


def test_two_maps_must_not_give_the_same_metric() -> None:
    again = GOOD.split("[[maps]]")[1].split("[constants]")[0]
    with pytest.raises(ProbeMistake, match=r"reads.toml:38: Process has a metric reads_per_s already"):
        parse_spec(GOOD.replace("[losses]", f"[[maps]]{again}\n[losses]"), "reads.toml")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("libc.so.6:read", Place("libc.so.6", "read")),
        ("/usr/lib/a:b.so:f+0x10", Place("/usr/lib/a:b.so", "f", 16)),
        ("/bin/x:0x1234", Place("/bin/x", offset=0x1234)),
        ("/bin/x:64+8", Place("/bin/x", offset=72)),
        ("libx.so:_ZN1a1bEv", Place("libx.so", "_ZN1a1bEv")),
    ],
)
def test_places(text: str, place: Place) -> None:
    assert parse_place(text) == place


@pytest.mark.parametrize("text", ["", "read", "libc:", ":read", "libc:read+", "libc:read+x"])
def test_what_is_no_place(text: str) -> None:
    with pytest.raises(ValueError, match="FILE:SYMBOL"):
        parse_place(text)


@given(st.text(max_size=300) | st.lists(st.sampled_from(GOOD.splitlines()), max_size=40).map("\n".join))
def test_whatever_is_in_a_file_it_is_a_mistake_or_a_meaning(text: str) -> None:
    try:
        parse_spec(text, "any.toml")
    except ProbeMistake as error:
        assert error.file == "any.toml"
        assert 1 <= error.line <= text.count("\n") + 1


def test_units_are_those_that_people_are_shown() -> None:
    assert {unit for unit, _, _ in units._UNITS} >= set(UNITS)


# --- fields ----------------------------------------------------------------------------------------------------------


def test_fields_lie_where_the_compiler_puts_them() -> None:
    layout = Layout(["u8 a", "s32 b", "u16 c[3]", "u64 d", "char e[3]"])
    assert layout.size == 32
    data = struct.pack("<B3xi3H2xQ3s5x", 1, -2, 3, 4, 5, 6, b"xyz")
    assert layout.unpack(data) == (1, -2, 3, 4, 5, 6, b"xyz")
    assert [layout.fields[name].index for name in "abcde"] == [0, 1, 2, 5, 6]


def test_values_of_all_cpus_are_summed() -> None:
    layout = Layout(["u32 a", "s64 b", "u16 c"])
    cpu = struct.pack("<I4xqH6x", 1, -5, 2)
    assert layout.total(cpu * 3) == (3, -15, 6)
    short = Layout(["u32 a"])
    assert short.total(struct.pack("<I4xI4x", 4, 5)) == (9,)


@given(st.lists(st.sampled_from(["u8", "u16", "u32", "u64", "s8", "s64", "char"]), min_size=1, max_size=12), st.data())
def test_a_layout_is_that_of_c(types: list[str], data: st.DataObject) -> None:
    """ctypes knows the rules of the platform."""
    import ctypes

    known = {
        "u8": ctypes.c_uint8, "u16": ctypes.c_uint16, "u32": ctypes.c_uint32, "u64": ctypes.c_uint64,
        "s8": ctypes.c_int8, "s64": ctypes.c_int64, "char": ctypes.c_char,
    }  # fmt: skip
    lengths = [data.draw(st.integers(1, 9)) for _ in types]

    class Struct(ctypes.Structure):
        _fields_ = [(f"f{n}", known[kind] * length) for n, (kind, length) in enumerate(zip(types, lengths, strict=True))]  # fmt: skip # noqa: E501

    layout = Layout([f"{kind} f{n}[{length}]" for n, (kind, length) in enumerate(zip(types, lengths, strict=True))])
    assert layout.size == ctypes.sizeof(Struct)


@pytest.mark.parametrize("line", ["", "u32", "int pid", "u32 1x", "u32 a[-1]", "u32 a[5000]", "u32 a, b", "float x"])
def test_what_is_no_field(line: str) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout(["u32 fine", line])
    assert caught.value.number == 1


def test_lines_of_tables_and_keys() -> None:
    lines = TomlLines('a = 1\n\n[[b]]\nc = 2\n[b.d]\n"e.f" = 3\n[[b]]\n  c.g = 4\n[b.d]\nx = [\n 1,\n]\n')
    assert lines.of(("a",)) == 1
    assert lines.of(("b", 0)) == 3
    assert lines.of(("b", 0, "c")) == 4
    assert lines.of(("b", 0, "d")) == 5
    assert lines.of(("b", 1, "c", "g")) == 8
    assert lines.of(("b", 1, "d", "x", 0)) == 10
    assert lines.of(("b", 1, "nothing")) == 7
    assert lines.of(("nothing",)) == 1
