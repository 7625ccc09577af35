"""Windows over HTTP: every generation, every damage, every end of a writer."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.conftest import DATA
from tests.fakes.http_receiver import Answer, Received, Receiver
from tests.unit.agent_rig import (
    CLEAN,
    CLEAN_ID,
    Store,
    agent_for,
    answering,
    copy,
    lines_of,
    quick_retries,
    ship,
)  # fmt: skip

from gpuflight.events.format.writer import SessionWriter

__all__ = ["quick_retries"]
pytestmark = pytest.mark.usefixtures("quick_retries")


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    return copy(CLEAN, tmp_path / "logs")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def reason(logs: Path, session: str = CLEAN_ID) -> str:
    return (logs / session / ".failed").read_text().strip()


# --- what lies there --------------------------------------------------------------------------------------------------


def test_a_hole_is_told_and_all_behind_it_sent(tmp_path: Path, state: Path) -> None:
    """The real agent stops before the hole and marks the session as uploaded."""
    logs = copy(CLEAN, tmp_path / "logs")
    for name in ("device.4.log.gz", ".gpufl-window.device.4.json"):
        (logs / CLEAN_ID / name).unlink()
    os.utime(logs / CLEAN_ID, (1_700_000_000, 1_700_000_000))
    store = Store()
    with Receiver(store) as receiver:
        assert ship(logs, receiver, state) == 1
    assert sorted(store.lines) == lines_of(logs)
    assert "device.4: missing" in reason(logs)
    assert store.completed == []


def test_a_hole_that_was_acknowledged_is_none(logs: Path, state: Path) -> None:
    (logs / CLEAN_ID / "device.4.log.gz").unlink()
    (logs / CLEAN_ID / ".gpufl-window-ack.device.4").write_text("id\n")
    store = Store()
    with Receiver(store) as receiver:
        assert ship(logs, receiver, state) == 0
    assert store.completed == [CLEAN_ID]


def test_a_window_that_comes_late_is_sent(logs: Path, state: Path) -> None:
    """A salvage publishes lower numbers later; the session was already closed."""
    payload = logs / CLEAN_ID / "device.4.log.gz"
    data = payload.read_bytes()
    payload.unlink()
    store = Store()
    with Receiver(store) as receiver:
        assert ship(logs, receiver, state) == 1
        assert "device.4: missing" in reason(logs)
        payload.write_bytes(data)
        assert ship(logs, receiver, state) == 0
    assert not (logs / CLEAN_ID / ".failed").exists()
    assert (logs / CLEAN_ID / ".uploaded").exists()
    assert store.completed == [CLEAN_ID]
    assert set(store.windows.values()) == {1}
    assert sorted(store.lines) == lines_of(logs)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "no gzip"])
def test_of_a_damaged_window_what_can_be_read_is_sent(logs: Path, state: Path, damage: str) -> None:
    """The real agent stops the channel there, and ends with 0."""
    payload = logs / CLEAN_ID / "device.5.log.gz"
    data = payload.read_bytes()
    whole = [line for line in gzip.decompress(data).split(b"\n") if line]
    payload.write_bytes(
        {"cut": data[:-200], "flipped": data[:200] + b"\xff\xff" + data[202:], "empty": b"", "no gzip": b"x" * 99}[
            damage
        ]
    )
    store = Store()
    with Receiver(store) as receiver:
        assert ship(logs, receiver, state) == 1
    marker = json.loads((logs / CLEAN_ID / ".gpufl-transport-loss.agent-device.5.json").read_text())
    assert marker["reason"] == "payload_checksum_mismatch:device.5.log.gz"
    assert "payload_checksum_mismatch" in reason(logs)
    assert store.completed == []
    sent = set(store.lines)
    others = set(lines_of(logs)) - set(whole)
    assert others <= sent
    if damage == "cut":
        assert whole[0] in sent


def test_a_window_without_its_identity_is_sent_without(tmp_path: Path, state: Path) -> None:
    """The real agent tries it for ever."""
    logs = copy(CLEAN, tmp_path / "logs")
    (logs / CLEAN_ID / ".gpufl-window.device.3.json").unlink()
    (logs / CLEAN_ID / ".gpufl-window.device.6.json").write_text("{")
    store = Store()
    with Receiver(store) as receiver:
        assert ship(logs, receiver, state) == 0
    assert len(store.windows) == 17
    assert sorted(store.lines) == lines_of(logs)


def test_a_damaged_window_without_its_identity_is_seen_to_be_damaged(logs: Path, state: Path) -> None:
    (logs / CLEAN_ID / ".gpufl-window.device.3.json").unlink()
    payload = logs / CLEAN_ID / "device.3.log.gz"
    first = gzip.decompress(payload.read_bytes()).split(b"\n")[0]
    payload.write_bytes(payload.read_bytes()[:-100])
    store = Store()
    with Receiver(store) as receiver:
        assert ship(logs, receiver, state) == 1
    assert "payload_damaged:device.3.log.gz" in reason(logs)
    assert first in store.lines
    assert store.completed == []


def test_a_receiver_that_could_not_read_all_of_a_window(logs: Path, state: Path) -> None:
    """It has taken what there was: no acknowledgement, and not uploaded."""
    store = Store()
    with Receiver(answering(Answer(200, body=b'{"window_acknowledged":false}'), then=store)) as receiver:
        assert ship(logs, receiver, state) == 1
    assert "not whole, says the receiver" in reason(logs)
    assert len(list((logs / CLEAN_ID).glob(".gpufl-window-ack.*"))) == 18


def test_the_plain_file_of_a_window_is_no_other_window(logs: Path, state: Path) -> None:
    packed = logs / CLEAN_ID / "device.2.log.gz"
    (logs / CLEAN_ID / "device.2.log").write_bytes(gzip.decompress(packed.read_bytes()))
    (logs / CLEAN_ID / "device.3.log").write_bytes(b'{"type":"other window of this number"}\n')
    before = lines_of(CLEAN)
    store = Store()
    with Receiver(store) as receiver:
        assert ship(logs, receiver, state) == 0
    assert sorted(store.lines) == sorted([*before, b'{"type":"other window of this number"}'])


def test_a_second_file_of_a_number_is_not_sent_because_the_first_was_acknowledged(logs: Path, state: Path) -> None:
    """The receiver could not take the second one at once: it was taken for sent when its turn came again."""
    other = b'{"type":"other window of this number"}'
    (logs / CLEAN_ID / "device.3.log").write_bytes(other + b"\n")
    before = lines_of(CLEAN)
    store = Store()
    refused: list[Received] = []

    def answer(request: Received) -> Answer:
        if not refused and other in gzip.decompress(request.body):
            refused.append(request)
            return Answer(503)
        return store(request)

    with Receiver(answer) as receiver:
        assert ship(logs, receiver, state) == 0
    assert refused and sorted(store.lines) == sorted([*before, other])


def test_a_half_compressed_window_beside_its_plain_file(tmp_path: Path, state: Path) -> None:
    """The writer was killed while it compressed: the plain file is the window."""
    logs = copy("v1.3.0rc1-killed", tmp_path / "logs")
    (session,) = logs.iterdir()
    expected = lines_of(logs)
    raw = sorted((session / ".tmp").glob("device.[0-9]*.log"))
    for path, keep in ((raw[0], -20), (raw[1], None)):
        (session / ".tmp" / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes())[:keep])
    (session / ".tmp" / f"{raw[2].name}.gz.part").write_bytes(b"\x1f\x8b")
    store = Store()
    with Receiver(store) as receiver:
        assert ship(logs, receiver, state) == 0
    assert sorted(store.lines) == expected


def test_windows_that_are_not_compressed(tmp_path: Path, state: Path) -> None:
    """Their lines are sent, and held against their identity."""
    logs = tmp_path / "logs"
    logs.mkdir()
    with SessionWriter(str(logs), "plain", compress=False, rotate_bytes=500) as writer:
        for number in range(20):
            writer.event("shutdown", {"ts_ns": 1_790_000_000_000_000_000 + number, "app": "a" * 50})
    store = Store()
    with Receiver(store) as receiver:
        assert ship(logs, receiver, state) == 0
        assert sorted(store.lines) == lines_of(logs)
        damaged = sorted((logs / "plain").glob("device.*.log"))[0]
        damaged.write_bytes(damaged.read_bytes().replace(b"aaa", b"bbb"))
        (logs / "plain" / ".uploaded").unlink()
        assert ship(logs, receiver, tmp_path / "another") == 1
    assert f"payload_checksum_mismatch:{damaged.name}" in reason(logs, "plain")


@pytest.mark.parametrize(
    "name",
    ["v1.3.0rc1-killed", "v1.2.1-nested", "v1.2.1-nested-killed", "v1.1.0-nested", "v1.0.2-flat-killed",
     "v0.1-flat-batch-682ac92", "v0-per-event-5cbcf7d", "v1.3.0rc1-segments"],
)  # fmt: skip
def test_every_generation_arrives_whole(tmp_path: Path, state: Path, name: str) -> None:
    """The real agent never sees a killed session of 1.3, loses channels of 1.1, and waits for ever at flat files."""
    logs = copy(name, tmp_path / "logs")
    expected = lines_of(logs)
    assert expected
    store = Store()
    with Receiver(store) as receiver:
        assert ship(logs, receiver, state) == 0
    assert sorted(store.lines) == expected
    for session in logs.iterdir():
        if session.is_dir():
            assert (session / ".uploaded").exists()
            assert session.name in store.completed


def test_windows_in_descending_order_are_sent_oldest_first(tmp_path: Path, state: Path) -> None:
    logs = copy("v1.1.0-nested", tmp_path / "logs")
    store = Store()
    with Receiver(store) as receiver:
        assert ship(logs, receiver, state) == 0
    times = [json.loads(line).get("base_time_ns") for line in store.lines if b"kernel_event_batch" in line]
    assert times == sorted(times)
    assert len(times) > 5


def test_what_a_salvage_publishes_after_it_was_sent_is_not_sent_again(tmp_path: Path, state: Path) -> None:
    logs = copy("v1.3.0rc1-killed", tmp_path / "logs")
    (session,) = logs.iterdir()
    expected = lines_of(logs)
    store = Store()
    with Receiver(store) as receiver:
        assert ship(logs, receiver, state) == 0
        assert sorted(store.lines) == expected
        (raw, *_) = sorted((session / ".tmp").glob("device.[0-9]*.log"))
        published = session / f"{raw.name}.gz"
        published.write_bytes(gzip.compress(raw.read_bytes()))
        raw.unlink()
        assert ship(logs, receiver, state) == 0
    assert sorted(store.lines) == expected
    assert (session / ".uploaded").exists()


def test_a_cut_last_line_is_left_out(tmp_path: Path, state: Path) -> None:
    logs = copy(DATA / "gpufl" / "faults" / "active-midline", tmp_path / "logs")
    store = Store()
    with Receiver(store) as receiver:
        assert ship(logs, receiver, state) == 0
    for line in store.lines:
        json.loads(line)


# --- writers that live ------------------------------------------------------------------------------------------------


class Writer:
    """A session that is being written: its lock is held by another process."""

    def __init__(self, session: Path) -> None:
        session.mkdir(parents=True)
        (session / ".tmp").mkdir()
        (session / ".tmp" / "device.log").write_bytes(b"")
        self.session = session
        self.number = 0
        self.lines: list[bytes] = []
        read, self._end = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            os.close(self._end)
            held = os.open(session / ".gpufl-session.lock", os.O_RDWR | os.O_CREAT)
            fcntl.lockf(held, fcntl.LOCK_EX)
            (session / ".tmp" / "held").touch()
            os.read(read, 1)
            os._exit(0)
        os.close(read)
        while not (session / ".tmp" / "held").exists():
            time.sleep(0.005)
        (session / ".tmp" / "held").unlink()

    def window(self, *, number: int = 0) -> Callable[[], None]:
        """A finished window; with a number it is only published by calling what is returned."""
        if not number:
            self.number += 1
        of = number or self.number
        line = json.dumps({"type": "shutdown", "session_id": self.session.name, "n": of}).encode()
        self.lines.append(line)
        data = gzip.compress(line + b"\n")
        about = {
            "schema_version": 1, "type": "transport_window", "window_id": f"{self.session.name}-{of}",
            "session_id": self.session.name, "channel": "device", "window_sequence": of,
            "payload_file": f"device.{of}.log.gz", "payload_bytes": len(data), "payload_crc32": zlib.crc32(data),
        }  # fmt: skip

        def publish() -> None:
            (self.session / f".gpufl-window.device.{of}.json").write_text(json.dumps(about))
            staged = self.session / ".tmp" / f"device.{of}.log.gz"
            staged.write_bytes(data)
            staged.rename(self.session / staged.name)

        if not number:
            publish()
        return publish

    def end(self, *, clean: bool = True) -> None:
        os.close(self._end)
        os.waitpid(self._pid, 0)
        if clean:
            shutil.rmtree(self.session / ".tmp")


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    made = Writer(tmp_path / "live" / "2e2e2e2e-0000-4000-8000-000000000001")
    yield made
    if (made.session / ".tmp").exists():
        made.end()


def wait_for(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s, "it does not happen"
        time.sleep(0.01)


def test_a_session_that_grows_and_ends(writer: Writer, state: Path) -> None:
    store = Store()
    writer.window()
    codes: list[int] = []
    with Receiver(store) as receiver:
        agent = agent_for(writer.session.parent, receiver, state, exit_when_drained="true")
        thread = threading.Thread(target=lambda: codes.append(agent.run(threading.Event())))
        thread.start()
        for number in range(2, 6):
            wait_for(lambda number=number: len(store.windows) == number - 1)  # type: ignore[misc]
            writer.window()
        late = writer.window(number=6)
        writer.number = 6
        writer.window()  # 7, before 6
        wait_for(lambda: len(store.windows) == 6)
        late()
        wait_for(lambda: len(store.windows) == 7)
        assert store.completed == [], "its writer lives"
        assert not (writer.session / ".uploaded").exists()
        writer.end()
        thread.join(30)
        agent.close()
    assert codes == [0]
    assert store.completed == [writer.session.name]
    assert sorted(store.lines) == sorted(writer.lines)
    assert set(store.windows.values()) == {1}


def test_told_to_end_while_something_waits(writer: Writer, state: Path) -> None:
    writer.window()
    stop = threading.Event()

    def answer(_: Received) -> Answer:
        stop.set()
        return Answer(503)

    with Receiver(answer) as receiver:
        agent = agent_for(writer.session.parent, receiver, state)
        assert agent.run(stop) == 3
        agent.close()


def test_told_to_end_when_all_there_is_was_sent(writer: Writer, state: Path) -> None:
    writer.window()
    store, stop = Store(), threading.Event()
    with Receiver(store) as receiver:
        agent = agent_for(writer.session.parent, receiver, state)
        threading.Thread(target=lambda: (wait_for(lambda: agent.totals.counts.windows == 1), stop.set())).start()
        assert agent.run(stop) == 0
        agent.close()
