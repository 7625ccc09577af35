"""The installed server takes GPU sessions in and is killed in the middle of it: what it acknowledged is there, once."""

from __future__ import annotations

import gzip
import json
import signal
import threading
import zlib
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.e2e.test_server_real import Instance, running
from tests.unit import gpufl_files
from tests.unit.events_fixture import window_of

from gpuflight.events.store import EventStore

SESSION = "s"
KERNELS, FILLS = 300, 7


def window(number: int) -> tuple[bytes, dict[str, str]]:
    """A window with a numbered batch, single events, and a name that only it tells."""
    base = gpufl_files.START_NS + number * 10**9
    lines = [gpufl_files.start()] if number == 0 else []
    lines.append(gpufl_files.line("dictionary_update", kernel_dict={str(number + 1): f"kernel {number}"}))
    rows = [[index, number + 1, 7, 10, number * KERNELS + index] for index in range(KERNELS)]
    lines.append(gpufl_files.kernels(rows, number=number + 1, base=base))
    lines += [
        gpufl_files.line("memset_event", name="memset", device_id="0", stream_id="7", start_ns=base + index,
                         end_ns=base + index + 5, corr_id=number, bytes=64)
        for index in range(FILLS)
    ]  # fmt: skip
    body = gzip.compress(b"".join(lines), mtime=0)
    return body, {
        "Content-Encoding": "gzip",
        "X-GpuFlight-Session-Id": SESSION,
        "X-GpuFlight-Window-Id": f"window-{number}",
        "X-GpuFlight-Window-Channel": "device",
        "X-GpuFlight-Window-Sequence": str(number + 1),
        "X-GpuFlight-Window-CRC32": str(zlib.crc32(body)),
    }


class Senders:
    """Send windows until the server is gone; ``acknowledged`` by number."""

    def __init__(self, url: str, numbers: list[int], enough: int) -> None:
        self.acknowledged: list[int] = []
        self.reached = threading.Event()
        self._url, self._enough = url, enough
        self._waiting = numbers[::-1]
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._send) for _ in range(3)]
        for thread in self._threads:
            thread.start()

    def _send(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while True:
                with self._lock:
                    if not self._waiting:
                        return
                    number = self._waiting.pop()
                body, headers = window(number)
                try:
                    answer = client.post("/api/v1/events/stream", content=body, headers=headers)
                except httpx.TransportError:
                    return
                assert answer.status_code in (200, 503), answer.text  # 503: it is about to end
                if answer.status_code == 200 and answer.json()["window_acknowledged"]:
                    with self._lock:
                        self.acknowledged.append(number)
                        if len(self.acknowledged) >= self._enough:
                            self.reached.set()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive()


def stored(folder: Path) -> tuple[dict[int, int], dict[int, int], dict[int, str]]:
    """Per window its kernels and its fills, and the names by id, from the files."""
    store = EventStore(str(folder / "state" / "events"))
    try:
        session = store.session(SESSION)
        if session is None:
            return {}, {}, {}
        sql = {name: store.relation(name, [session]).sql for name in ("kernel", "memset", "name")}
        kernels = store.rows(
            f"SELECT kernel_id - 1 AS n, count(*) AS c, count(DISTINCT corr_id) AS d FROM {sql['kernel']} GROUP BY 1"
        )
        assert all(row["c"] == row["d"] for row in kernels)
        fills = store.rows(f"SELECT corr_id AS n, count(*) AS c FROM {sql['memset']} GROUP BY 1")
        names = store.rows(f"SELECT id, text FROM {sql['name']} WHERE dictionary = 'kernel'")
        return (
            {row["n"]: row["c"] for row in kernels},
            {row["n"]: row["c"] for row in fills},
            {row["id"]: row["text"] for row in names},
        )
    finally:
        store.close()


@pytest.mark.parametrize("seed", [3, 17])
def test_killed_in_the_middle_of_ingest_no_acknowledged_window_is_lost_and_none_doubled(
    tmp_path: Path, seed: int
) -> None:
    windows, acknowledged = 60, set[int]()
    for turn in range(3):
        waiting = [number for number in range(windows) if number not in acknowledged]
        # Those that were acknowledged last come again: their agent was killed too.
        waiting = sorted(acknowledged)[-4:] + waiting
        with running(tmp_path) as instance:
            senders = Senders(instance.url, waiting, enough=5 + seed % 7 + turn)
            assert senders.reached.wait(120)
            instance.process.send_signal(signal.SIGKILL)
            instance.process.wait(60)
            senders.join()
        acknowledged |= set(senders.acknowledged)
        kernels, fills, names = stored(tmp_path)
        for number in acknowledged:
            assert kernels[number] == KERNELS and fills[number] == FILLS, number
            assert names[number + 1] == f"kernel {number}"
        # What was stored and not acknowledged is whole too.
        assert set(kernels.values()) == {KERNELS} and set(fills.values()) == {FILLS}
    with running(tmp_path) as instance:
        senders = Senders(instance.url, list(range(windows)), enough=windows)
        senders.join()
        assert len(senders.acknowledged) == windows
        top = httpx.get(f"{instance.url}/api/v1/sessions/{SESSION}/kernels/top?limit=1000").json()
        assert top["count"] == windows * KERNELS and all(line["name"] for line in top["lines"])
        _end(instance)
    kernels, fills, _ = stored(tmp_path)
    assert kernels == dict.fromkeys(range(windows), KERNELS) and fills == dict.fromkeys(range(windows), FILLS)


def test_an_agents_key_a_session_and_the_answers_about_it(tmp_path: Path) -> None:
    """The command line makes the key, the agent's requests go to a server that needs one, a viewer asks."""
    import subprocess
    import sys

    gpuflight = str(Path(sys.executable).with_name("gpuflight"))
    tokens = ["--file", str(tmp_path / "tokens.json")]
    made = {
        role: subprocess.run(
            [gpuflight, "token", "create", "--role", role, *tokens], check=True, capture_output=True, text=True
        ).stdout.strip()
        for role in ("ingest", "viewer")
    }
    folder = gpufl_files.CLEAN
    with running(tmp_path) as instance:
        stream = f"{instance.url}/api/v1/events/stream"
        for sidecar in sorted(folder.glob(".gpufl-window.*.json")):
            channel, number = sidecar.name.split(".")[2:4]
            body, headers = window_of(folder, channel, int(number))
            assert httpx.post(stream, content=body, headers=headers).status_code == 401
            answer = httpx.post(stream, content=body, headers={**headers, "Authorization": f"Bearer {made['ingest']}"})
            assert answer.json()["window_acknowledged"] is True
        viewer = {"Authorization": f"Bearer {made['viewer']}"}
        assert httpx.post(stream, content=b"", headers=viewer).status_code == 403
        found = httpx.get(f"{instance.url}/api/v1/sessions", headers=viewer).json()
        assert [line["state"] for line in found["sessions"]] == ["ended"]
        metrics = httpx.get(f"{instance.url}/metrics", headers=viewer).text
        assert "gpuflight_events_sessions 1\n" in metrics
        assert json.dumps(found).count(found["sessions"][0]["session"]["session_id"]) == 1
        _end(instance)


def test_a_second_server_that_wants_the_same_store_says_who_has_it(tmp_path: Path) -> None:
    config: dict[str, Any] = {"events": {"folder": str(tmp_path / "shared")}}
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    with running(tmp_path / "one", config=config) as first, running(tmp_path / "two", config=config) as second:
        assert httpx.post(f"{first.url}/api/v1/events/stream", content=gpufl_files.start()).status_code == 200
        refused = httpx.post(f"{second.url}/api/v1/events/stream", content=gpufl_files.start())
        assert refused.status_code == 503 and "another process has it open" in refused.json()["error"]["message"]
        assert httpx.get(f"{second.url}/healthz").status_code == 200
        _end(second)
        _end(first)


def _end(instance: Instance) -> None:
    instance.process.send_signal(signal.SIGTERM)
    assert instance.finish() == 0
