"""The offset of another host's clock, told from HTTP answers."""

from __future__ import annotations

import math
from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuflight.collectors.remote_clock import DATE_RENEWAL_S, DRIFT, ClockOffset, date_s, stamps_ns

NOW_S = 1_700_000_000


def exchange(clock: ClockOffset, at_s: float, offset_s: float, *, there_ms: float = 1, back_ms: float = 1,
             late_s: float = 0.0, round_age_s: float | None = None) -> None:  # fmt: skip
    """One exchange that begins ``at_s``; the other host stamps a Date that is up to ``late_s`` old."""
    stamped_s = at_s + there_ms / 1e3 + offset_s
    ended_ns = int((stamped_s - round_age_s) * 1e9) if round_age_s is not None else 0
    received_s = at_s + (there_ms + back_ms) / 1e3
    date = formatdate(int(stamped_s - late_s), usegmt=True)
    clock.learn(int(at_s * 1e9), int(received_s * 1e9), date, ended_ns)


@given(
    st.floats(-1e6, 1e6),
    st.lists(
        st.tuples(st.floats(0, 100), st.floats(0, 3000), st.floats(0, 3000), st.floats(0, DATE_RENEWAL_S - 0.01),
                  st.none() | st.floats(0, 30)),
        min_size=1, max_size=12,
    ),
)  # fmt: skip
def test_the_true_offset_is_always_within_the_error(
    offset_s: float, exchanges: list[tuple[float, float, float, float, float | None]]
) -> None:
    clock, at_s = ClockOffset(), float(NOW_S)
    for wait_s, there_ms, back_ms, late_s, round_age_s in exchanges:
        at_s += wait_s + 6.0
        exchange(clock, at_s, offset_s, there_ms=there_ms, back_ms=back_ms, late_s=late_s, round_age_s=round_age_s)
        assert clock.known
        assert abs(clock.offset_s - offset_s) <= clock.error_s + 1e-3


def test_many_exchanges_tell_more_than_a_date_header_can() -> None:
    clock = ClockOffset()
    exchange(clock, NOW_S, 42.25)
    first = clock.error_s
    assert first == pytest.approx((1 + DATE_RENEWAL_S) / 2, abs=0.01)
    for index in range(40):
        exchange(clock, NOW_S + 5 + index * 5.07, 42.25, round_age_s=0.01)
    assert clock.error_s < first / 1.5
    assert clock.offset_s == pytest.approx(42.25, abs=clock.error_s)


def test_a_clock_that_was_set_is_believed_at_once() -> None:
    clock = ClockOffset()
    for index in range(5):
        exchange(clock, NOW_S + 5 * index, 100.0)
    exchange(clock, NOW_S + 30, -7.0)
    assert abs(clock.offset_s + 7.0) <= clock.error_s <= 1.3


def test_a_drifting_clock_is_followed() -> None:
    clock = ClockOffset()
    for index in range(500):
        offset_s = 1.0 + index * 60 * 5e-5  # 50 ppm
        exchange(clock, NOW_S + 60.01 * index, offset_s, round_age_s=0.5)
        assert abs(clock.offset_s - offset_s) <= clock.error_s + 1e-3


def stamped(clock: ClockOffset, at_ns: int, offset_ns: int, there_ns: int, held_ns: int, back_ns: int) -> None:
    """One exchange with a gpuflight that had the request ``there_ns`` after it was sent, and so on."""
    received_ns = at_ns + there_ns + offset_ns
    end_ns = at_ns + there_ns + held_ns + back_ns
    clock.learn(at_ns, end_ns, "Tue, 14 Nov 2023 22:13:20 GMT", 1, f"{received_ns} {received_ns + held_ns}")


SPENT_NS = st.integers(0, 3 * 10**9)


@given(
    st.integers(-(10**15), 10**15),
    st.lists(st.tuples(st.integers(0, 100), SPENT_NS, SPENT_NS, SPENT_NS), min_size=1, max_size=12),
)
def test_with_times_in_ns_the_true_offset_is_always_within_the_error(
    offset_ns: int, exchanges: list[tuple[int, int, int, int]]
) -> None:
    clock, at_ns = ClockOffset(), NOW_S * 10**9
    best_s = math.inf
    for wait_s, there_ns, held_ns, back_ns in exchanges:
        at_ns += (wait_s + 10) * 10**9
        stamped(clock, at_ns, offset_ns, there_ns, held_ns, back_ns)
        assert abs(clock.offset_s - offset_ns / 1e9) <= clock.error_s + 1e-6
        best_s = min(best_s, (there_ns + back_ns) / 2e9)
    spent_s = (at_ns - NOW_S * 10**9) / 1e9 + 10
    assert clock.error_s <= best_s + DRIFT * spent_s + 1e-6, "the best of all exchanges counts, the longer ago the less"


def test_an_even_way_there_and_back_gives_the_offset_itself() -> None:
    """RFC 5905 §8: θ = ½ · [(T2 - T1) + (T3 - T4)], with an error of half the delay δ = (T4 - T1) - (T3 - T2)."""
    clock = ClockOffset()
    stamped(clock, NOW_S * 10**9, 42_000_000, 300_000, 50_000_000, 300_000)
    assert clock.offset_s == pytest.approx(0.042, abs=1e-6) and clock.error_s == pytest.approx(300e-6, abs=1e-6)
    for turn in range(1, 20):  # slow ones after it do not spoil it
        stamped(clock, (NOW_S + turn) * 10**9, 42_000_000, 300_000_000, 0, 10_000_000)
    assert clock.offset_s == pytest.approx(0.042, abs=0.003) and clock.error_s < 0.003


def test_a_clock_that_was_set_between_two_exact_exchanges_is_believed_at_once() -> None:
    clock = ClockOffset()
    stamped(clock, NOW_S * 10**9, 0, 10**5, 10**6, 10**5)
    stamped(clock, (NOW_S + 5) * 10**9, 10**9, 10**5, 10**6, 10**5)
    assert clock.offset_s == pytest.approx(1.0, abs=1e-3) and clock.error_s < 1e-3


@pytest.mark.parametrize("text", ["", "x", "1", "2 1", "1 2 3", "-1 5", "1.5 2", "٣ ٤", "9" * 30 + " " + "9" * 30])
def test_times_that_are_none_leave_it_to_the_date(text: str) -> None:
    assert stamps_ns(text) is None
    clock = ClockOffset()
    clock.learn(NOW_S * 10**9, NOW_S * 10**9 + 10**6, "Tue, 14 Nov 2023 22:13:20 GMT", 0, text)
    assert clock.known and clock.error_s > 1.0 and abs(clock.offset_s) <= clock.error_s


def test_times_of_a_clock_that_was_set_during_the_answer_are_left_to_the_date() -> None:
    clock = ClockOffset()
    clock.learn(NOW_S * 10**9, NOW_S * 10**9 + 10**6, "Tue, 14 Nov 2023 22:13:20 GMT", 0, f"{NOW_S} {NOW_S * 10**9}")
    assert clock.known and abs(clock.offset_s) <= clock.error_s


def test_without_a_date_it_is_not_known() -> None:
    clock = ClockOffset()
    clock.learn(NOW_S * 10**9, NOW_S * 10**9 + 5, "yesterday", NOW_S * 10**9)
    assert not clock.known


def test_a_round_from_the_future_is_not_the_hosts_clock() -> None:
    """A proxy stamps Date by its own clock, or the graph was made elsewhere: the header stands."""
    clock = ClockOffset()
    exchange(clock, NOW_S, 0.0, round_age_s=-3600.0)
    assert clock.known and abs(clock.offset_s) <= clock.error_s <= 1.3


@pytest.mark.parametrize("text", ["", "x", "Mon, 99 Nov 2023 00:00:00 GMT", "0"])
def test_what_is_no_date(text: str) -> None:
    assert date_s(text) is None
    assert date_s("Tue, 14 Nov 2023 22:13:20 GMT") == NOW_S
