"""When which peer is asked, and by how many threads."""

from __future__ import annotations

import threading

import pytest

from gpuflight.collectors.remote_pool import THREADS_AT_MOST, Pool


class Peer:
    failures_count = 0
    retry_after_s = 0.0


def pool(**changes: float) -> Pool:
    return Pool([Peer()], lambda index: None, [5.0], changes.get("backoff_max_s", 60.0))


def test_answering_peers_are_asked_at_their_interval_more_or_less() -> None:
    waits = [pool().next_wait_s(5.0, 0) for _ in range(300)]
    assert 4.5 <= min(waits) < 4.8 and 5.2 < max(waits) <= 5.5


@pytest.mark.parametrize(
    ("failures", "least", "most"), [(1, 2.5, 5), (2, 5, 10), (3, 10, 20), (9, 30, 60), (10**6, 30, 60)]
)
def test_others_are_left_in_peace_but_never_given_up(failures: int, least: float, most: float) -> None:
    waits = [pool().next_wait_s(5.0, failures) for _ in range(300)]
    assert least <= min(waits) and max(waits) <= most
    assert max(waits) - min(waits) > (most - least) / 2, "they must not all come back at once"


def test_a_long_interval_is_not_shortened_by_the_backoff() -> None:
    assert 150 <= pool().next_wait_s(300.0, 5) <= 300


def test_retry_after_is_obeyed() -> None:
    assert pool().next_wait_s(5.0, 1, retry_after_s=120.0) >= 120.0


def test_peers_that_never_answer_hold_up_nobody() -> None:
    """All but the last one hang."""
    count = THREADS_AT_MOST - 1
    release, reached, asked_again = threading.Event(), threading.Event(), threading.Event()
    peers = [Peer() for _ in range(count + 1)]
    turns = 0

    def poll(index: int) -> None:
        nonlocal turns
        if index < count:
            release.wait(30)
            return
        turns += 1
        reached.set()
        if turns >= 3:
            asked_again.set()

    made = Pool(peers, poll, [0.01] * len(peers), 60.0)
    made.start()
    made.start()
    try:
        assert reached.wait(20) and asked_again.wait(20)
        assert made.threads_count <= THREADS_AT_MOST
    finally:
        release.set()
        made.stop(20)
    assert not [thread for thread in threading.enumerate() if thread in made._threads]


def test_peers_that_answer_at_once_need_few_threads() -> None:
    enough = threading.Event()
    seen: dict[int, int] = {}

    def poll(index: int) -> None:
        seen[index] = seen.get(index, 0) + 1
        if len(seen) == 50 and min(seen.values()) >= 3:
            enough.set()

    made = Pool([Peer() for _ in range(50)], poll, [0.01] * 50, 60.0)
    made.start()
    try:
        assert enough.wait(30)
    finally:
        made.stop(20)
    assert made.threads_count <= THREADS_AT_MOST


def test_a_defect_does_not_end_the_asking(caplog: pytest.LogCaptureFixture) -> None:
    twice = threading.Event()
    calls: list[int] = []

    def poll(index: int) -> None:
        calls.append(index)
        if len(calls) > 1:
            twice.set()
        raise RuntimeError("oops")

    peer = Peer()
    made = Pool([peer], poll, [0.01], 0.02)
    made.start()
    try:
        assert twice.wait(20)
    finally:
        made.stop(20)
    assert peer.failures_count >= 2
