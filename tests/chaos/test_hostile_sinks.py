"""The installed server with receivers that mean it no good: none delays a round or another receiver; all is counted."""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.chaos.victims import ServerVictim, until
from tests.chaos.watch import Watch, lateness, stalls
from tests.fakes.http_receiver import Answer, Received, Receiver
from tests.services.watching import watching

from gpuflight.errors import DeliveryError
from gpuflight.subscribers.base import Parcel
from gpuflight.subscribers.spool import Spool

INTERVAL_S = 0.2
ROUNDS = 40
RETRY_AFTER_S = 1


def post(name: str, url: str, folder: Path, **more: Any) -> dict[str, Any]:
    """A sink that tries hard."""
    fast = {"policy": "spool", "retry_first_s": 0.02, "retry_max_s": 0.1, "deliver_deadline_s": 0.5}
    return {"type": "http_post", "name": name, "url": url, "spool_folder": str(folder), **fast, **more}


def statistics(url: str) -> dict[str, dict[str, Any]]:
    """Of every sink, by name."""
    lines = httpx.get(f"{url}/api/v1/subscribers", timeout=30).raise_for_status().json()["subscribers"]
    found = {line["name"]: {**line["statistics"], "state": line["state"]} for line in lines}
    for counts in found.values():
        assert counts["received"] == counts["sent"] + sum(counts["dropped_by"].values()) + counts["queued"]
    return found


def numbers(requests: list[Received]) -> list[int]:
    """Of the rounds that came."""
    return [int(request.headers["gpuflight-round"]) for request in requests]


def server(tmp_path: Path, subscribers: list[dict[str, Any]]) -> ServerVictim:
    off = watching("host", "mounts", "nics", "disks")
    return ServerVictim(tmp_path / "server", {"interval_s": INTERVAL_S, "collectors": off, "subscribers": subscribers})


def check_untouched(good: Receiver, watch: Watch, stalled: Path) -> None:
    """The good one got every round, in order, and none came late."""
    got = numbers(good.received)
    assert got == list(range(1, len(got) + 1))
    (life,) = watch.lives
    assert not lateness(life, INTERVAL_S, stalls(stalled))


def test_receivers_that_hang_fail_refuse_and_mislead(tmp_path: Path, stalled: Path) -> None:
    tried_s: list[float] = []

    def busy(_: Received) -> Answer:
        tried_s.append(time.monotonic())
        return Answer(429, {"Retry-After": str(RETRY_AFTER_S)})

    def answers(status: int) -> Receiver:
        return Receiver(lambda _: Answer(status))

    with (
        Receiver() as good,
        Receiver() as elsewhere,
        Receiver(lambda _: Answer(hang=True)) as hangs,
        Receiver(lambda _: Answer(hang=True)) as hangs_too,
        Receiver(lambda _: Answer(drip=True)) as drips,
        answers(500) as fails,
        Receiver(busy) as throttles,
        answers(413) as too_large,
        Receiver(lambda _: Answer(307, {"Location": elsewhere.url})) as misleads,
    ):
        receivers = {"hangs": hangs, "drips": drips, "fails": fails, "throttles": throttles}
        receivers |= {"too-large": too_large, "misleads": misleads}
        spool = tmp_path / "spool"
        sinks = [post(name, receiver.url, spool) for name, receiver in receivers.items()]
        sinks += [
            post("hangs-latest", hangs_too.url, spool, policy="latest"),
            post("good", good.url, spool, content="diff"),
        ]
        main = server(tmp_path, sinks)
        try:
            main.start()
            watch = Watch(main)
            good.wait_for(ROUNDS)
            watch.close()
            told = statistics(main.url)
        finally:
            main.kill()
    check_untouched(good, watch, stalled)
    assert not elsewhere.received
    for name in ("hangs", "drips", "fails", "throttles"):
        counts = told[name]
        assert counts["sent"] == 0 and counts["dropped_by"] == {}, "it may be well again one day: all is kept"
        assert counts["queued"] >= ROUNDS - 2 and counts["retries"] > 0, name
        assert set(numbers(receivers[name].received)) <= {1, 2}, "in order: the first one first, or a try of the second"
    for name, status in (("too-large", 413), ("misleads", 307)):
        counts = told[name]
        assert counts["sent"] == 0 and counts["retries"] == 0, "never again"
        assert set(counts["dropped_by"]) == {"failed"} and counts["dropped_by"]["failed"] >= ROUNDS - 2
        assert f"status {status}" in counts["last_error"]
    assert told["hangs-latest"]["queued"] <= 2 and set(told["hangs-latest"]["dropped_by"]) == {"replaced"}
    pauses_s = [after - before for before, after in itertools.pairwise(tried_s)]
    assert pauses_s and min(pauses_s) >= RETRY_AFTER_S - 0.05


@pytest.fixture(params=["1m"])
def tiny_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of so much."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", folder]).returncode
    ):
        pytest.skip("no right to mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize("tiny_disk", ["256k"], indirect=True)
def test_a_disk_that_is_full_costs_the_one_that_spools_there_only(
    tmp_path: Path, tiny_disk: Path, stalled: Path
) -> None:
    """Rounds that find no room are counted; what was stored before arrives, and a whole round follows the gap."""
    with Receiver() as there:
        port = there.port  # nobody is there for now
    with Receiver() as good:
        full = post("full", f"http://127.0.0.1:{port}/", tiny_disk, content="diff", compression="none")
        main = server(tmp_path, [full, post("good", good.url, tmp_path / "spool", content="diff")])
        try:
            main.start()
            watch = Watch(main)

            def counts() -> dict[str, Any]:
                return statistics(main.url)["full"]

            until(lambda: counts()["dropped_by"].get("spool", 0) > 3)
            until(lambda: any(word in counts()["last_error"] for word in ("full", "refused")), counts)
            lost = counts()["dropped_by"]["spool"]
            with Receiver(port=port) as there:
                until(lambda: counts()["sent"] > counts()["dropped_by"]["spool"] - lost + 5 and counts()["queued"] < 3)
                until(lambda: max(numbers(there.received)) > max(watch.lives[0][-1].number - 3, 10))
                got = there.received[:]
            watch.close()
            told = counts()
        finally:
            main.kill()
    check_untouched(good, watch, stalled)
    assert set(told["dropped_by"]) == {"spool"}
    assert numbers(got) == sorted(set(numbers(got)))
    before = None
    for request in got:
        base = request.headers.get("gpuflight-base-round")
        assert base is None or int(base) == before, "a difference only upon what came before it"
        before = int(request.headers["gpuflight-round"])
    gaps = [request for last, request in itertools.pairwise(got) if numbers([request])[0] != numbers([last])[0] + 1]
    assert gaps and all("gpuflight-base-round" not in request.headers for request in gaps)


def test_a_disk_that_a_spool_filled_is_one_that_delivering_empties(tiny_disk: Path) -> None:
    """SQLite needs room to delete: what fills the disk to the last page could not be removed from it again."""
    spool = Spool(str(tiny_disk / "full.sqlite"))
    spool.open()

    def fill(size_bytes: int) -> list[int]:
        ids = []
        try:
            while True:
                packed = Parcel(number=len(ids), time_ns=0, key=f"a-{len(ids)}", data=os.urandom(size_bytes))
                ids.append(spool.append(packed))
        except DeliveryError as error:
            assert error.retryable and "disk is full" in str(error)
        return ids

    for size_bytes in (3000, 400_000, 7000, 300_000, 20_000):
        first = spool.append(Parcel(number=0, time_ns=0, key="first", data=os.urandom(100_000)))
        ids = fill(size_bytes)
        spool.remove(first)  # one that is larger than what is left of the disk
        assert ids and len(ids) * size_bytes >= 300_000, "most of the disk can be used, whatever lay there before"
        for parcel_id in ids[::2]:
            spool.remove(parcel_id)
        large = fill(100_000)
        assert len(large) * 100_000 > len(ids[::2]) * size_bytes / 2 - 100_000, "and what was removed in between"
        for parcel_id in [*ids[1::2], *large]:
            spool.remove(parcel_id)
        assert spool.inventory() == []
    spool.close()
