"""Server, receivers and peer are killed (``kill -9``) or stopped at random for a while; nothing accepted is lost.

``GPUFLIGHT_CHAOS_S`` is how long (s), ``GPUFLIGHT_CHAOS_SEED`` chooses other dice. What a spool accepted is not asked
of the server, which may lie: it is read from the spool's file after each kill. A spool gives every round a number of
its own, so that their count is what it ever accepted; every one must arrive, in order for each run of the server.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.chaos.victims import ReceiverVictim, ServerVictim, SpoolBook, Victim, until
from tests.chaos.watch import Watch, growth, lateness, stalls
from tests.conftest import ROOT

DURATION_S = float(os.environ.get("GPUFLIGHT_CHAOS_S", "20"))
SEED = int(os.environ.get("GPUFLIGHT_CHAOS_SEED", "1"))
INTERVAL_S = 0.4
UNSTORED_MAX = 16
"""As in subscribers/intake.py: rounds that may be in memory only, and die with the server."""
SLACK = 4
"""Threads or descriptors that may come and go: connections to receivers and of whoever watches."""
PEER = "peer-1"

SPOOLED = {"policy": "spool", "retry_first_s": 0.05, "retry_max_s": 0.3, "deliver_deadline_s": 1.0}


@pytest.fixture
def stalled(tmp_path: Path) -> Iterator[Path]:
    """A file with how long the machine kept others waiting."""
    path = tmp_path / "stalls.txt"
    meter = subprocess.Popen([sys.executable, "-m", "tests.chaos.stalls", str(path)], cwd=ROOT, stdin=subprocess.PIPE)
    assert meter.stdin is not None
    until(path.exists)
    yield path
    meter.stdin.close()
    assert meter.wait(30) == 0


@contextmanager
def alive(*victims: Victim) -> Iterator[None]:
    """Start all, kill all at the end."""
    with ExitStack() as stack:
        for victim in victims:
            stack.callback(victim.kill)
            victim.start()
        yield


def havoc(victims: list[Victim], dice: random.Random, after_kill: dict[Victim, Any], duration_s: float) -> int:
    """Kill, stop, start again; all are alive at the end. Returns how many were killed."""
    end_s = time.monotonic() + duration_s
    killed_count = 0
    while time.monotonic() < end_s:
        time.sleep(dice.uniform(0.3, 1.5))
        victim = dice.choice(victims)
        if not isinstance(victim, ServerVictim) and dice.random() < 0.3:
            victim.freeze(dice.uniform(0.3, 2.0))
            continue
        victim.kill()
        killed_count += 1
        after_kill.get(victim, lambda: None)()
        time.sleep(dice.uniform(0.0, 1.0))
        victim.start()
    return killed_count


def test_whatever_dies_what_a_spool_accepted_arrives_in_order_and_no_round_waits(tmp_path: Path, stalled: Path) -> None:
    dice = random.Random(SEED)
    receivers = [ReceiverVictim(tmp_path / f"receiver-{index}", SEED) for index in range(2)]
    spool_folder = tmp_path / "main" / "spool"
    contents = ("graph", "diff")
    sinks = [
        {
            "type": "http_post",
            "name": f"post-{content}",
            "content": content,
            "spool_folder": str(spool_folder),
            **SPOOLED,
        }
        | {"url": f"http://127.0.0.1:{receiver.port}/"}
        for content, receiver in zip(contents, receivers, strict=True)
    ]
    light = {"collectors": {name: {"enabled": False} for name in ("sockets", "threads", "unix_sockets")}}
    peer = ServerVictim(tmp_path / "peer", {"interval_s": INTERVAL_S, **light}, machine_id="9" * 32)
    remote = {"interval_s": INTERVAL_S, "backoff_max_s": 0.5, "timeout_s": 1.0}
    config = {
        "interval_s": INTERVAL_S,
        "collectors": {**light["collectors"], "remote": remote},
        "remotes": [{"url": peer.url, "name": PEER}],
        "subscribers": sinks,
    }
    main = ServerVictim(tmp_path / "main", config)
    books = [SpoolBook(spool_folder / f"post-{content}.sqlite", tmp_path / f"copy-{content}") for content in contents]

    def read_books() -> None:
        for book in books:
            book.read()

    with alive(*receivers, peer, main):
        watch = Watch(main)
        until(lambda: watch.lives and len(watch.lives[0]) > 4)
        killed_count = havoc([*receivers, peer, main], dice, {main: read_books}, DURATION_S)
        assert killed_count >= DURATION_S / 5
        until(lambda: fresh_peer(main.url))
        watch.close()
        httpx.post(f"{main.url}/api/v1/control/stop").raise_for_status()
        until(lambda: all(line["queued"] == 0 for line in counts(main.url)))
        for line in counts(main.url):
            assert line["received"] == line["sent"] and not line["dropped"], line
        main.kill()
        read_books()

    for book, receiver, content in zip(books, receivers, contents, strict=True):
        assert not book.waiting, "all was delivered"
        arrived = receiver.received()
        check_order(arrived, differences=content == "diff")
        keys = {key for key, _ in arrived}
        assert book.known <= keys, "what lay in the spool at a kill arrived"
        assert len(keys) == book.accepted_count, "all that it ever accepted arrived, and nothing else"
    check_seen(watch, [key for key, _ in receivers[0].received()])
    stalled_s = stalls(stalled)
    for life in watch.lives:
        assert not lateness(life, INTERVAL_S, stalled_s), life[0]
    check_flat(watch)


def counts(url: str) -> list[dict[str, Any]]:
    """Statistics of every subscriber."""
    lines = httpx.get(f"{url}/api/v1/subscribers", timeout=30).raise_for_status().json()["subscribers"]
    return [line["statistics"] for line in lines]


def fresh_peer(url: str) -> bool:
    """Whether the peer is in the picture, and not as a thing of the past."""
    nodes = httpx.get(f"{url}/api/v1/graph", params={"kind": "Host"}, timeout=30).json().get("nodes", [])
    return any(node.get("ns") == PEER and not node.get("attributes", {}).get("stale") for node in nodes)


def check_order(arrived: list[tuple[str, str]], *, differences: bool) -> None:
    """Each run of the server in order, none missing in between, and a difference only upon what it starts from."""
    first_arrivals = dict(reversed([(key, base) for key, base in reversed(arrived)]))
    of_run: dict[str, list[int]] = {}
    for key in dict.fromkeys(key for key, _ in arrived):
        instance, _, number = key.rpartition("-")
        of_run.setdefault(instance, []).append(int(number))
    assert of_run
    for instance, numbers in of_run.items():
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), f"{instance}: {numbers}"
        bases = [first_arrivals[f"{instance}-{number}"] for number in numbers]
        expected = ["", *map(str, numbers[:-1])] if differences else [""] * len(numbers)
        assert bases == expected


def check_seen(watch: Watch, keys: list[str]) -> None:
    """The rounds that the live stream showed of each run arrived, but for those that were in memory only at its end."""
    last_of_run: dict[str, int] = {}
    for key in keys:
        instance, _, number = key.rpartition("-")
        last_of_run[instance] = max(int(number), last_of_run.get(instance, 0))
    lasts = sorted(last_of_run.values())
    for life in watch.lives:
        if life[-1].number > UNSTORED_MAX:
            assert any(last >= life[-1].number - UNSTORED_MAX for last in lasts)


def check_flat(watch: Watch) -> None:
    """Threads and descriptors: no more in a later life than in the first, and no more at the end of one."""
    for attribute in ("threads_count", "descriptors_count"):
        settled = [max(getattr(seen, attribute) for seen in life[2:]) for life in watch.lives if len(life) > 6]
        assert settled, "no life was long enough to say"
        assert max(settled) <= settled[0] + SLACK, f"{attribute}: {settled}"
        for life in watch.lives:
            if len(life) >= 16:
                assert growth(life, attribute) <= SLACK, [getattr(seen, attribute) for seen in life]
