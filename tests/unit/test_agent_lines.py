"""Lines over HTTP as they are written: every answer, order, ends of sessions, restarts."""

from __future__ import annotations

import gzip
import json
import threading
import time
from pathlib import Path

import pytest
from tests.fakes.http_receiver import Answer, Received, Receiver
from tests.unit.agent_rig import CLEAN, CLEAN_ID, Store, agent_for, answering, copy, lines_of, quick_retries, ship

from gpuflight.agent.agent import Agent
from gpuflight.events.format.writer import SessionWriter

__all__ = ["quick_retries"]
pytestmark = pytest.mark.usefixtures("quick_retries")

MODES = ({"live": "true"}, {"upload_mode": "legacy"})


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    return copy(CLEAN, tmp_path / "logs")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("status", [401, 402, 404, 408, 429, 500, 503])
def test_what_may_pass_is_tried_again(logs: Path, state: Path, mode: dict[str, str], status: int) -> None:
    store = Store()
    with Receiver(answering(*[Answer(status)] * 4, then=store)) as receiver:
        assert ship(logs, receiver, state, **mode) == 0
    assert sorted(store.lines) == lines_of(logs), "and nothing twice, since each answer was awaited"
    assert store.completed == [CLEAN_ID]
    assert (logs / CLEAN_ID / ".uploaded").exists()


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("status", [400, 409, 422])
def test_what_is_refused_is_a_dead_letter(logs: Path, state: Path, mode: dict[str, str], status: int) -> None:
    store = Store()

    def answer(request: Received) -> Answer:
        if request.path.endswith("session-complete"):
            return store(request)
        body = gzip.decompress(request.body) if "content-encoding" in request.headers else request.body
        return Answer(status) if b"memcpy_event_batch" in body else store(request)

    with Receiver(answer) as receiver:
        assert ship(logs, receiver, state, stream_max_lines="1", **mode) == 1
    lines = lines_of(logs)
    assert sorted(store.lines) == [line for line in lines if b"memcpy_event_batch" not in line]
    (letter,) = (state / "dead-letters" / CLEAN_ID).glob("device.lines")
    kept = [json.loads(line) for line in letter.read_text().splitlines()]
    assert sorted(entry["line"].encode() for entry in kept) == [line for line in lines if b"memcpy_event_batch" in line]
    assert all(f"status {status}" in entry["reason"] for entry in kept)
    assert "lines rejected" in (logs / CLEAN_ID / ".failed").read_text()
    assert store.completed == []


def test_too_many_at_a_time_are_halved(logs: Path, state: Path) -> None:
    store = Store()

    def answer(request: Received) -> Answer:
        lines = gzip.decompress(request.body).count(b"\n") if request.body else 0
        return Answer(413) if lines > 3 else store(request)

    with Receiver(answer) as receiver:
        assert ship(logs, receiver, state, live="true") == 0
    assert sorted(store.lines) == lines_of(logs)


def test_lines_of_a_channel_stay_in_order(logs: Path, state: Path) -> None:
    store = Store()
    with Receiver(answering(*[Answer(503), Answer(500)] * 3, then=store)) as receiver:
        assert ship(logs, receiver, state, upload_mode="legacy") == 0
    for channel in ("device", "scope", "system", "sass"):
        expected = [
            line
            for number in range(1, 12)
            if (path := logs / CLEAN_ID / f"{channel}.{number}.log.gz").exists()
            for line in gzip.decompress(path.read_bytes()).split(b"\n")
            if line
        ]
        mine = set(expected)
        found = [line for line in store.lines if line in mine]
        of_all = [line for line in expected if sum(line == other for other in store.lines) == 1]
        assert [line for line in found if line in set(of_all)] == of_all


def test_a_poisonous_line_holds_up_its_channel_only(logs: Path, state: Path) -> None:
    store = Store()
    shut = threading.Event()

    def answer(request: Received) -> Answer:
        ill = request.headers.get("x-key") == "scope" and not shut.is_set()
        return Answer(500) if ill else store(request)

    with Receiver(answer) as receiver:
        agent = agent_for(logs, receiver, state, upload_mode="legacy", exit_when_drained="true")
        codes: list[int] = []
        thread = threading.Thread(target=lambda: codes.append(agent.run(threading.Event())))
        thread.start()
        others = sum(
            gzip.decompress(path.read_bytes()).count(b"\n")
            for path in (logs / CLEAN_ID).glob("*.log.gz")
            if not path.name.startswith("scope")
        )
        deadline_s = time.monotonic() + 30
        while len(store.lines) < others:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert store.completed == []
        shut.set()
        thread.join(30)
        agent.close()
    assert codes == [0]
    assert sorted(store.lines) == lines_of(logs)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_session_that_is_being_written(tmp_path: Path, state: Path, mode: dict[str, str]) -> None:
    """Lines arrive before their window is finished, and a second start sends nothing twice."""
    logs = tmp_path / "logs"
    logs.mkdir()
    store = Store()
    stop = threading.Event()
    ended: list[int] = []

    def run(agent: Agent) -> None:
        ended.append(agent.run(stop))
        agent.close()

    def wait_for_lines(count: int) -> None:
        deadline_s = time.monotonic() + 30
        while len(store.lines) < count:
            assert time.monotonic() < deadline_s, f"{len(store.lines)} of {count}"
            time.sleep(0.01)

    with Receiver(store) as receiver:
        with SessionWriter(str(logs), "live") as writer:
            thread = threading.Thread(target=run, args=(agent_for(logs, receiver, state, **mode),))
            thread.start()
            writer.event("job_start", {"ts_ns": 1_790_000_000_000_000_000, "app": "a"})
            writer.flush()
            wait_for_lines(4)
            for number in range(5):
                writer.rows("kernel_event_batch", {"dt_ns": [1_790_000_000_000_000_000 + number], "corr_id": [number]})
                writer.flush()
                wait_for_lines(5 + number)
            assert not list((logs / "live").glob("*.gz")), "no window is finished"
            stop.set()
            thread.join(30)
            assert not thread.is_alive()
            writer.event("shutdown", {"ts_ns": 1_790_000_001_000_000_000, "app": "a"})
        assert store.completed == []
        assert ship(logs, receiver, state, **mode) == 0
        assert store.completed == ["live"]
        assert sorted(store.lines) == lines_of(logs)
        assert ship(logs, receiver, state, **mode) == 0
    assert sorted(store.lines) == lines_of(logs)
    assert ended == [0], "all that was there had arrived"


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_session_that_goes_on_after_it_was_closed(logs: Path, state: Path, mode: dict[str, str]) -> None:
    store = Store()
    with Receiver(store) as receiver:
        assert ship(logs, receiver, state, **mode) == 0
        late = b'{"type":"late","session_id":"1"}\n'
        (logs / CLEAN_ID / "device.12.log.gz").write_bytes(gzip.compress(late))
        assert ship(logs, receiver, state, **mode) == 0
    assert store.lines.count(late.strip()) == 1
    assert store.completed == [CLEAN_ID] * 2
    assert sorted(store.lines) == lines_of(logs)


def test_a_hole_and_a_damaged_window_are_told(logs: Path, state: Path) -> None:
    (logs / CLEAN_ID / "device.4.log.gz").unlink()
    cut = logs / CLEAN_ID / "scope.2.log.gz"
    cut.write_bytes(cut.read_bytes()[:-300])
    store = Store()
    with Receiver(store) as receiver:
        assert ship(logs, receiver, state, live="true") == 1
        told = (logs / CLEAN_ID / ".failed").read_text()
        assert ship(logs, receiver, state, live="true") == 1, "it is still so"
    assert "device.4: hole in the window numbers" in told
    assert "scope.2: compressed file ends early" in told
    assert store.completed == []
    assert set(store.lines) > {line for line in lines_of(logs) if b"host_metric" in line}


def test_a_hole_that_is_filled_late_is_none(logs: Path, state: Path) -> None:
    late = logs / CLEAN_ID / "device.4.log.gz"
    data = late.read_bytes()
    late.unlink()
    store = Store()
    with Receiver(store) as receiver:
        assert ship(logs, receiver, state, live="true") == 1
        late.write_bytes(data)
        assert ship(logs, receiver, state, live="true") == 0
    assert not (logs / CLEAN_ID / ".failed").exists()
    assert sorted(store.lines) == lines_of(logs)
    assert store.completed == [CLEAN_ID]


@pytest.mark.parametrize(("marker", "code"), [(".uploaded", 0), (".failed", 1)])
def test_what_another_agent_has_closed_is_left_alone(logs: Path, state: Path, marker: str, code: int) -> None:
    (logs / CLEAN_ID / marker).touch()
    with Receiver() as receiver:
        assert ship(logs, receiver, state, live="true") == code
        assert receiver.received == []


def test_positions_of_the_real_agent_are_taken_over(logs: Path, state: Path, tmp_path: Path) -> None:
    cursor = tmp_path / "cursor.json"
    streams = {f"{CLEAN_ID}.{channel}": {"fileIndex": 3, "offset": 0} for channel in ("device", "scope")}
    streams |= {f"{CLEAN_ID}.{channel}": {"fileIndex": 99, "offset": 0} for channel in ("system", "sass")}
    cursor.write_text(json.dumps({"streams": streams}))
    store = Store()
    with Receiver(store) as receiver:
        assert ship(logs, receiver, state, live="true", cursor_file=str(cursor)) == 0
    expected = [
        line
        for path in (logs / CLEAN_ID).glob("*.log.gz")
        if path.name.startswith(("device", "scope")) and int(path.name.split(".")[1]) >= 3
        for line in gzip.decompress(path.read_bytes()).split(b"\n")
        if line
    ]
    assert sorted(store.lines) == sorted(expected)


def test_waiting_costs_little(logs: Path, state: Path) -> None:
    """A receiver that fails for one channel only is asked again at intervals, not in a loop."""
    asked = 0

    def answer(_: Received) -> Answer:
        nonlocal asked
        asked += 1
        return Answer(500)

    with Receiver(answer) as receiver:
        agent = agent_for(logs, receiver, state, live="true")
        stop = threading.Event()
        timer = threading.Timer(1.5, stop.set)
        timer.start()
        cpu_s = time.process_time()
        assert agent.run(stop) == 3
        cpu_s = time.process_time() - cpu_s
        agent.close()
    assert 4 <= asked < 200
    assert cpu_s < 1.0
