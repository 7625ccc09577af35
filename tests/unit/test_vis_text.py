"""Names made harmless, numbers made readable."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuflight.vis.text import clean, clean_value, finite, human, plural, width


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("memory_used_bytes", 80 * 1024**3, "80 GiB"),
        ("rss_bytes", 1023, "1023 B"),
        ("rss_bytes", 1024, "1 KiB"),
        ("rss_bytes", 1536, "1.5 KiB"),
        ("size_bytes", 0, "0 B"),
        ("rx_bytes_per_s", 12_400_000_000, "12.4 GB/s"),
        ("bytes_per_s", 500, "500 B/s"),
        ("speed_bits_per_s", 400e9, "400 Gbit/s"),
        ("sm_clock_hz", 1_755_000_000, "1.75 GHz"),
        ("sm_util_pct", 97.25, "97.2 %"),
        ("power_watts", 640, "640 W"),
        ("temperature_celsius", -3, "-3 °C"),
        ("rtt_ms", 0.04, "0.04 ms"),
        ("reads_per_s", 7.41, "7.41 /s"),
        ("link_speed_gt_per_s", 32.0, "32 GT/s"),
        ("threads_count", 24, "24"),
        ("faults_count", 1_234_567, "1.23 M"),
        ("anything", math.inf, "inf"),
        ("anything", math.nan, "nan"),
        ("anything_bytes", None, "None"),
        ("flag", True, "True"),
    ],
)
def test_a_metric_is_written_with_the_unit_of_its_name(name, value, text):
    assert human(name, value) == text


def test_control_characters_become_visible():
    assert clean("a\x00b\nc\x7f") == "a␀b␊c␡"


def test_characters_that_reorder_text_are_taken_out():
    assert clean("gpu\u202etxt.exe") == "gpu\ufffdtxt.exe"
    assert clean("\u2066x\u2069") == "\ufffdx\ufffd"


def test_right_to_left_names_and_emoji_stay():
    assert clean("תהליך 🚀") == "תהליך 🚀"


def test_a_lone_surrogate_cannot_reach_the_file():
    cleaned = clean("a\ud800b")
    assert cleaned == "a\ufffdb"
    cleaned.encode()


def test_long_text_is_cut_and_says_how_long_it_was():
    assert clean("x" * 65536, 200) == "x" * 200 + "… (65536 characters)"


@pytest.mark.parametrize(
    ("value", "cleaned"),
    [
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (2**53, 2**53),
        (2**53 + 1, "9007199254740993"),
        (-(2**90), str(-(2**90))),
        (None, None),
        (True, True),
        ((1, "a\x00", math.nan), [1, "a␀", "nan"]),
        (b"\xff", "b'\\xff'"),
    ],
)
def test_values_that_json_readers_disagree_on_become_text(value, cleaned):
    assert clean_value(value) == cleaned


def test_a_long_list_is_cut_and_says_so():
    cleaned = clean_value(list(range(1000)))
    assert len(cleaned) == 257
    assert cleaned[-1] == "… (1000 items)"


@given(st.text() | st.integers() | st.floats() | st.binary() | st.lists(st.floats() | st.text(), max_size=4))
def test_any_value_survives_a_strict_json_reader(value):
    text = msgspec.json.encode(clean_value(value))
    msgspec.json.decode(text)


def test_finite_says_none_for_what_is_no_number():
    metrics = {"a": math.nan, "b": True, "c": "7", "d": 10**400, "e": 3}
    assert [finite(metrics, name) for name in "abcdex"] == [None, None, None, None, 3.0, None]


def test_plural():
    assert plural(1, "idle process") == "1 idle process"
    assert plural(57, "idle process") == "57 idle processes"
    assert plural(2, "entity") == "2 entities"
    assert plural(2, "listening socket") == "2 listening sockets"
    assert plural(2, "NVSwitch") == "2 NVSwitches"
    assert plural(12345, "thread") == "12\u202f345 threads"


def test_wide_characters_count_as_wide():
    assert width("计算节点", 10) > 1.5 * width("node", 10)
