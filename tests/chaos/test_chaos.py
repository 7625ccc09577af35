"""Server, receivers and peer are killed (``kill -9``) or stopped at random for a while; nothing accepted is lost.

``GPUFLIGHT_CHAOS_S`` is how long (s), ``GPUFLIGHT_CHAOS_SEED`` chooses other dice. What a spool accepted is not asked
of the server, which may lie: it is read from the spool's file after each kill. A spool gives every round a number of
its own, so that their count is what it ever accepted; every one must arrive, in order for each run of the server.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.chaos.destinations import SPOOLED, TOPIC, Arrival, Bucket, Destination, Post, Store, Topic
from tests.chaos.victims import ServerVictim, SpoolBook, until
from tests.chaos.watch import Watch, growth, lateness, stalls
from tests.services.watching import watching

DURATION_S = float(os.environ.get("GPUFLIGHT_CHAOS_S", "12"))
SEED = int(os.environ.get("GPUFLIGHT_CHAOS_SEED", "1"))
INTERVAL_S = 0.4
WATCHED = ("host", "mounts", "nics", "disks", *(("process_tree", "pipes", "numa") if DURATION_S > 60 else ()))
"""Collectors: in a short run the rounds must not cost more than their delivery."""
UNSTORED_MAX = 16
"""As in subscribers/intake.py: rounds that may be in memory only, and die with the server."""
SLACK = 4
"""Threads or descriptors that may come and go: connections to receivers and of whoever watches."""
PEER = "peer-1"
CONSUMED = "consumed"


def havoc(victims: list[Any], dice: random.Random, after_kill: dict[Any, Any], duration_s: float) -> int:
    """Kill, stop, start again; all are alive at the end. Returns how many were killed."""
    end_s = time.monotonic() + duration_s
    killed_count = 0
    while time.monotonic() < end_s:
        time.sleep(dice.uniform(0.3, 1.5))
        victim = dice.choice(victims)
        if isinstance(victim, Destination) and (not victim.keeps_data or dice.random() < 0.3):
            victim.freeze(dice.uniform(0.3, 2.0))
            continue
        victim.kill()
        killed_count += 1
        after_kill.get(victim, lambda: None)()
        time.sleep(dice.uniform(0.0, 1.0))
        victim.start()
    return killed_count


@pytest.mark.skipif(os.geteuid() != 0, reason="a peer that is another machine needs a mount namespace")
def test_whatever_dies_what_a_spool_accepted_arrives_in_order_and_no_round_waits(tmp_path: Path, stalled: Path) -> None:
    dice = random.Random(SEED)
    spool_folder = tmp_path / "main" / "spool"
    light = {"collectors": watching(*WATCHED)}
    peer = ServerVictim(tmp_path / "peer", {"interval_s": INTERVAL_S, **light}, machine_id="9" * 32)
    with ExitStack() as stack:
        destinations = make_destinations(tmp_path)
        for destination in destinations:
            stack.callback(destination.end)
            destination.start()
        books = [SpoolBook(spool_folder / f"{one.name}.sqlite", tmp_path / f"copy-{one.name}") for one in destinations]
        remote = {"interval_s": INTERVAL_S, "backoff_max_s": 0.5, "timeout_s": 1.0}
        config = {
            "interval_s": INTERVAL_S,
            "collectors": {**light["collectors"], "remote": remote},
            "remotes": [{"url": peer.url, "name": PEER}],
            "subscribers": [
                {**SPOOLED, **one.sink(), "name": one.name, "spool_folder": str(spool_folder)} for one in destinations
            ],
        }
        main = ServerVictim(tmp_path / "main", config)
        topic = next(one for one in destinations if isinstance(one, Topic))
        store = next(one for one in destinations if isinstance(one, Store))
        consumer = make_consumer(tmp_path / "consumer", topic, store)
        for server in (peer, main, consumer):
            stack.callback(server.kill)
            server.start()

        def read_books() -> None:
            for book in books:
                book.read()

        watch = Watch(main)
        until(lambda: watch.lives and len(watch.lives[0]) > 4)
        killed_count = havoc([*destinations, peer, main, consumer], dice, {main: read_books}, DURATION_S)
        assert killed_count >= DURATION_S / 10
        until(lambda: fresh_peer(main.url), lambda: hosts(main.url))
        watch.close()
        httpx.post(f"{main.url}/api/v1/control/stop").raise_for_status()
        drain(main.url)
        for line in counts(main.url):
            assert line["received"] == line["sent"] and not line["dropped"], line
        main.kill()
        read_books()
        arrived = [one.arrived() for one in destinations]
        published = {(one.instance, one.number) for one in topic.arrived()}
        wait_consumed(lambda: {(one.instance, one.number) for one in store.rounds_in(CONSUMED)}, published)

    for destination, book, rounds in zip(destinations, books, arrived, strict=True):
        assert not book.waiting, "all was delivered"
        check_order(rounds if destination.tells_order else sorted(rounds), destination)
        there = {(one.instance, one.number) for one in rounds}
        assert {split(key) for key in book.known} <= there, "what lay in the spool at a kill arrived"
        assert len(there) == book.accepted_count, "all that it ever accepted arrived, and nothing else"
        check_seen(watch, there)
    stalled_s = stalls(stalled)
    for life in watch.lives:
        assert not lateness(life, INTERVAL_S, stalled_s), life[0]
    check_flat(watch)


def make_destinations(folder: Path) -> list[Destination]:
    """One of each kind, not started yet."""
    posts = [Post(folder / f"post-{content}", SEED, content) for content in ("graph", "diff")]
    return [*posts, Bucket(), Topic(folder / "kafka"), Store(folder / "mongodb")]


def make_consumer(folder: Path, topic: Topic, store: Store) -> ServerVictim:
    """A server that takes the rounds out of the topic again and puts them into a database of its own."""
    mongodb = {"uri": store.uri, "database": CONSUMED, "timeout_s": 3.0}
    quick = {"client": {"session.timeout.ms": 6000}, "retry_first_s": 0.1, "retry_max_s": 0.5}
    consume = {"brokers": [topic.address], "topic": TOPIC, "mongodb": mongodb, **quick}
    return ServerVictim(folder, {"interval_s": 1.0, "consume": consume}, "--consume", "kafka")


def wait_consumed(there: Callable[[], set[tuple[str, int]]], published: set[tuple[str, int]]) -> None:
    """Wait until all is there, as long as it goes on."""
    while (now := there()) != published:
        assert now <= published
        until(lambda now=now: there() != now, lambda now=now: sorted(published - now))  # type: ignore[misc]


def split(key: str) -> tuple[str, int]:
    """Run of the server and number of a round, from its key."""
    instance, _, number = key.rpartition("-")
    return instance[:12], int(number)


def counts(url: str) -> list[dict[str, Any]]:
    """Statistics of every subscriber."""
    lines = httpx.get(f"{url}/api/v1/subscribers", timeout=30).raise_for_status().json()["subscribers"]
    return [line["statistics"] for line in lines]


def drain(url: str) -> None:
    """Wait until nothing is queued any more; a slow store may take its time as long as it goes on."""
    while any(line["queued"] for line in counts(url)):
        sent = [line["sent"] for line in counts(url)]
        until(
            lambda sent=sent: (
                sent != [line["sent"] for line in counts(url)]  # type: ignore[misc]
                or not any(line["queued"] for line in counts(url))
            ),
            lambda: counts(url),
        )


def hosts(url: str) -> list[dict[str, Any]]:
    """All that are in the picture."""
    found = httpx.get(f"{url}/api/v1/graph", params={"kind": "Host"}, timeout=30).json().get("nodes", [])
    return list(found)


def fresh_peer(url: str) -> bool:
    """Whether the peer is in the picture, and not as a thing of the past."""
    return any(host.get("ns") == PEER and not host.get("attributes", {}).get("stale") for host in hosts(url))


def check_order(rounds: list[Arrival], destination: Destination) -> None:
    """Each run of the server in order, none missing in between, and a difference only upon what it starts from."""
    first: dict[tuple[str, int], Arrival] = {}
    for one in rounds:
        first.setdefault((one.instance, one.number), one)  # a repeat may come late, from a connection given up long ago
    of_run: dict[str, list[Arrival]] = {}
    for one in first.values():
        of_run.setdefault(one.instance, []).append(one)
    assert of_run
    for run in of_run.values():
        numbers = [one.number for one in run]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), (destination.name, numbers)
        for one in run:
            whole = destination.content == "graph" or one.number == numbers[0]
            expected = {None} if whole else {one.number - 1}
            assert one.base in expected | ({None} if destination.wholes_between else set()), (destination.name, one)
        wholes = sum(one.base is None for one in run)
        assert destination.content == "graph" or wholes <= 1 + len(run) // 10, "differences, but for some"


def check_seen(watch: Watch, there: set[tuple[str, int]]) -> None:
    """The rounds that the live stream showed of each run arrived, but for those that were in memory only at its end."""
    last_of_run: dict[str, int] = {}
    for instance, number in there:
        last_of_run[instance] = max(number, last_of_run.get(instance, 0))
    for life in watch.lives:
        if life[-1].number > UNSTORED_MAX:
            assert any(last >= life[-1].number - UNSTORED_MAX for last in last_of_run.values())


def check_flat(watch: Watch) -> None:
    """Threads and descriptors: no more in a later life than in the first, and no more at the end of one."""
    for attribute in ("threads_count", "descriptors_count"):
        settled = [max(getattr(seen, attribute) for seen in life[2:]) for life in watch.lives if len(life) > 6]
        assert settled, "no life was long enough to say"
        assert max(settled) <= settled[0] + SLACK, f"{attribute}: {settled}"
        for life in watch.lives:
            if len(life) >= 16:
                assert growth(life, attribute) <= SLACK, [getattr(seen, attribute) for seen in life]
