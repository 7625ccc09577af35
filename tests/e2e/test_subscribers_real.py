"""Delivery by the installed server: killed and started again, with a receiver that comes and goes; and full disks."""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.e2e.test_server_real import PATIENCE_S, running, wait_ready
from tests.fakes.http_receiver import Answer, Received, Receiver
from tests.unit.test_subscribers_sinks import make_rounds
from tests.unit.test_subscribers_spool import Sink, spooling

from gpuflight.subscribers.delivery import SubscriberSet
from gpuflight.subscribers.file_json import FileJson, FileJsonSettings


def stored(url: str) -> int:
    """Rounds that are safe: delivered, or on disk."""
    statistics = httpx.get(f"{url}/api/v1/subscribers/archive/statistics").json()["statistics"]
    assert statistics["received"] == statistics["sent"] + statistics["dropped"] + statistics["queued"]
    assert statistics["dropped"] == 0
    return int(statistics["sent"]) + int(statistics["queued"])


def wait_for(condition: Any) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_what_a_spool_took_arrives_in_order_though_all_die_in_between(tmp_path: Path) -> None:
    """At least once, and in order for each run of the server, over ``kill -9`` and a receiver that fails at random."""
    dice = random.Random(5)
    with Receiver() as first:
        port = first.port
    settings = {
        "type": "http_post",
        "name": "archive",
        "url": f"http://127.0.0.1:{port}/",
        "policy": "spool",
        "spool_folder": str(tmp_path / "state"),
        "content": "diff",
        "retry_first_s": 0.02,
        "retry_max_s": 0.1,
    }
    config = {"server": {"reach": {"url_hosts": ["127.0.0.1"], "folders": [str(tmp_path / "state")]}}}
    config |= {"interval_s": 0.05, "collectors": {name: {"enabled": False} for name in ("sockets", "threads")}}
    accepted: list[Received] = []

    def moody(request: Received) -> Answer:
        status = dice.choice([204, 204, 204, 204, 502, 503, 429])
        if status == 204:
            accepted.append(request)
        return Answer(status)

    runs = 4
    for run in range(runs):
        with running(tmp_path, config=config) as server:
            url = server.url
            wait_ready(url)
            if run == 0:
                assert httpx.post(f"{url}/api/v1/subscribers", json=settings).status_code == 201
            if run % 2:
                enough = len(accepted) + 5
                with Receiver(moody, port):
                    wait_for(lambda enough=enough: len(accepted) > enough)
            wait_for(lambda url=url: stored(url) >= 10)
            server.process.kill()
            server.process.wait()
    with running(tmp_path, config=config) as server, Receiver(moody, port):
        url = server.url
        wait_for(lambda: httpx.get(f"{url}/api/v1/subscribers/archive/statistics").status_code == 200)
        wait_for(lambda: stored(url) > 20)
        httpx.post(f"{url}/api/v1/control/stop")
        wait_for(lambda: httpx.get(f"{url}/api/v1/subscribers/archive/statistics").json()["statistics"]["queued"] == 0)
    of_run: dict[str, list[int]] = {}
    bases: dict[tuple[str, int], str | None] = {}
    for request in accepted:
        instance, _, number = request.headers["idempotency-key"].rpartition("-")
        of_run.setdefault(instance, []).append(int(number))
        bases[instance, int(number)] = request.headers.get("gpuflight-base-round")
    assert len(of_run) == runs + 1
    for instance, numbers in of_run.items():
        once = list(dict.fromkeys(numbers))
        assert numbers == sorted(numbers), "in order; what came twice came twice in a row"
        assert once == list(range(once[0], once[0] + len(once))), "none is missing"
        assert bases[instance, once[0]] is None, "each run begins with a whole round"
        assert all(bases[instance, number] == str(number - 1) for number in once[1:])


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder]).returncode:
        pytest.skip("no right to mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_is_counted_and_passes(tiny_disk: Path) -> None:
    filler = tiny_disk / "filler"
    members = SubscriberSet()
    path = tiny_disk / "rounds.jsonl"
    fast = {"retry_first_s": 0.01, "retry_max_s": 0.01}
    sink = Sink(spooling(tiny_disk / "spool"), open_gate=False)
    members.add(sink)
    members.add(FileJson(FileJsonSettings(path=str(path), mode="append", **fast)))
    rounds = make_rounds(6)
    for completed in rounds[:2]:
        members.publish(completed)
    wait_for(lambda: members.status()[0].statistics.queued_bytes == 200)
    wait_for(lambda: members.status()[1].statistics.queued == 0)
    try:
        with filler.open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
    except OSError:
        pass
    before = path.read_bytes()

    def publish_until_the_spool_is_full() -> bool:
        members.publish(rounds[2])
        for line in members.status():
            counts = line.statistics
            assert counts.received == counts.sent + counts.dropped + counts.queued
        return "disk is full" in members.status()[0].statistics.last_error

    wait_for(publish_until_the_spool_is_full)  # a little room is left in the pages that it has
    wait_for(lambda: members.status()[1].statistics.retries > 0)
    assert "No space left" in members.status()[1].statistics.last_error
    assert path.read_bytes().startswith(before)
    dropped = members.status()[0].statistics.dropped_by
    assert set(dropped) == {"spool"}
    filler.unlink()
    members.publish(rounds[5])
    sink.gate.set()
    assert members.flush(PATIENCE_S)
    assert members.close(PATIENCE_S)
    assert sink.arrived[:2] == [1, 2] and sink.arrived[-1] == 6
    lines = path.read_bytes().splitlines()
    assert all(line.startswith(b"{") and line.endswith(b"}") for line in lines), "no half lines"
