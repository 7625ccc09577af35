"""Windows over HTTP: every answer, every damage, every end of a writer; the folder and the exit code tell the truth."""

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
    ACKNOWLEDGED,
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


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [401, 402, 403, 404, 408, 429, 500, 502, 503, 504, 302, 407])
def test_what_may_pass_is_tried_again_until_it_does(logs: Path, state: Path, status: int) -> None:
    store = Store()
    times = [Answer(status, body=b"{}")] * 5
    with Receiver(answering(*times, then=store)) as receiver:
        assert ship(logs, receiver, state) == 0
    assert sorted(store.lines) == lines_of(logs)
    assert set(store.windows.values()) == {1}
    assert (logs / CLEAN_ID / ".uploaded").exists()


@pytest.mark.parametrize("status", [400, 409, 415, 422])
def test_what_is_refused_is_given_up_and_kept(logs: Path, state: Path, status: int) -> None:
    """409 to everything made the real agent mark the session as uploaded, with nothing delivered."""
    store = Store()

    def answer(request: Received) -> Answer:
        refused = request.headers.get("x-gpuflight-window-channel") == "scope"
        return Answer(status, body=b'{"error":"window_identity_conflict"}') if refused else store(request)

    with Receiver(answer) as receiver:
        assert ship(logs, receiver, state) == 1
        tries = [r.headers.get("x-gpuflight-window-sequence") for r in receiver.received if "scope" in str(r.headers)]
    assert tries == [number for number in "1234" for _ in range(3)]
    assert not (logs / CLEAN_ID / ".uploaded").exists()
    assert f"status {status}" in reason(logs)
    assert store.completed == [], "a receiver is not told that a session is complete which is not"
    letters = state / "dead-letters" / CLEAN_ID
    for number in "1234":
        kept = letters / f"scope.{number}.log.gz"
        assert kept.read_bytes() == (logs / CLEAN_ID / kept.name).read_bytes()
        assert f"status {status}" in json.loads((letters / f"{kept.name}.json").read_text())["reason"]


@pytest.mark.parametrize("status", [402, 409])
def test_with_proof_it_counts_as_delivered(logs: Path, state: Path, status: int) -> None:
    with Receiver(lambda r: Answer(202 if "complete" in r.path else status, body=ACKNOWLEDGED)) as receiver:
        assert ship(logs, receiver, state) == 0
    assert (logs / CLEAN_ID / ".uploaded").exists()


def test_402_without_proof_never_counts(logs: Path, state: Path) -> None:
    with Receiver(lambda _: Answer(402, body=b'{"error":"GPU limit"}')) as receiver:
        assert ship(logs, receiver, state, give_up_after="0.5") == 3
        assert not any("complete" in request.path for request in receiver.received)
    assert not (logs / CLEAN_ID / ".uploaded").exists()
    assert not (logs / CLEAN_ID / ".failed").exists()


def test_a_web_page_is_no_receiver(logs: Path, state: Path) -> None:
    page = Answer(200, {"Content-Type": "text/html; charset=utf-8"}, b"<html>log in first</html>")
    with Receiver(lambda _: page) as receiver:
        assert ship(logs, receiver, state, give_up_after="0.5") == 3
    assert not (logs / CLEAN_ID / ".uploaded").exists()


def test_too_large_is_sent_as_lines_in_halves(logs: Path, state: Path) -> None:
    store = Store()

    def answer(request: Received) -> Answer:
        lines = gzip.decompress(request.body).count(b"\n") if request.body else 0
        return Answer(413) if lines > 2 else store(request)

    with Receiver(answer) as receiver:
        assert ship(logs, receiver, state) == 0
    assert sorted(store.lines) == lines_of(logs)
    assert (logs / CLEAN_ID / ".uploaded").exists()


def test_a_line_that_is_too_large_alone_is_a_dead_letter(logs: Path, state: Path) -> None:
    store = Store()

    def answer(request: Received) -> Answer:
        big = request.body and b'"type":"shutdown"' in gzip.decompress(request.body)
        return Answer(413) if big else store(request)

    with Receiver(answer) as receiver:
        assert ship(logs, receiver, state) == 1
    lines = lines_of(logs)
    assert sorted(store.lines) == [line for line in lines if b'"type":"shutdown"' not in line]
    kept = [
        json.loads(line)["line"].encode()
        for path in (state / "dead-letters" / CLEAN_ID).glob("*.lines")
        for line in path.read_text().splitlines()
    ]
    assert sorted(kept) == [line for line in lines if b'"type":"shutdown"' in line]
    assert "1 lines rejected" in reason(logs)


def test_large_windows_are_not_read_whole(logs: Path, state: Path) -> None:
    store = Store()
    with Receiver(store) as receiver:
        assert ship(logs, receiver, state, max_body_bytes="600", stream_max_lines="3") == 0
    assert sorted(store.lines) == lines_of(logs)


def test_rejected_lines_are_kept_and_told(logs: Path, state: Path) -> None:
    body = json.dumps(
        {"accepted": 5, "rejected": 1, "errors": [{"line": 2, "type": "dictionary_update", "reason": "unknown"}]}
    ).encode()
    first = Answer(202, body=body)
    store = Store()
    with Receiver(answering(first, then=store)) as receiver:
        assert ship(logs, receiver, state, senders="1") == 1
    assert "1 lines rejected" in reason(logs)
    (letter,) = (state / "dead-letters" / CLEAN_ID).glob("*.lines")
    entry = json.loads(letter.read_text())
    window = logs / CLEAN_ID / f"{letter.stem}.1.log.gz"
    assert entry["line"] == gzip.decompress(window.read_bytes()).split(b"\n")[1].decode()
    assert entry["reason"] == "dictionary_update unknown"


def test_long_lists_of_rejected_lines_are_read(logs: Path, state: Path) -> None:
    errors = [{"line": 1, "type": "kernel_event_batch", "reason": "x" * 290}] * 1000
    body = json.dumps({"accepted": 0, "rejected": 1000, "errors": errors, "window_acknowledged": True}).encode()
    with Receiver(answering(Answer(200, body=body), then=Store())) as receiver:
        assert ship(logs, receiver, state) == 1
    assert "1000 lines rejected" in reason(logs)
    assert len(list((logs / CLEAN_ID).glob(".gpufl-window-ack.*"))) == 19


def test_timeouts_are_tried_again(logs: Path, state: Path) -> None:
    store = Store()
    with Receiver(answering(Answer(hang=True), Answer(drip=True), then=store)) as receiver:
        assert ship(logs, receiver, state, deadline="0.3") == 0
        receiver.over.set()
    assert sorted(store.lines) == lines_of(logs)


def test_nobody_there(logs: Path, state: Path) -> None:
    with Receiver() as receiver:
        url = f"http://127.0.0.1:{receiver.port}"
    assert ship(logs, url, state, give_up_after="0.5") == 3
    store = Store()
    with Receiver(store) as receiver:
        assert ship(logs, receiver, state) == 0
    assert sorted(store.lines) == lines_of(logs)


def test_a_window_that_fails_does_not_hold_up_others(logs: Path, state: Path) -> None:
    """A 500 for one window: all others arrive, also those of other sessions; it is tried again for ever."""
    shutil.copytree(logs / CLEAN_ID, logs / "other")
    store = Store()

    def answer(request: Received) -> Answer:
        headers = request.headers
        ill = headers.get("x-gpuflight-window-channel") == "device" and headers["x-gpuflight-session-id"] == CLEAN_ID
        return Answer(500) if ill else store(request)

    with Receiver(answer) as receiver:
        assert ship(logs, receiver, state, give_up_after="1") == 3
    assert store.completed == ["other"]
    assert not (logs / CLEAN_ID / ".uploaded").exists()
    assert (logs / "other" / ".uploaded").exists()


def test_retry_after_is_kept_to(logs: Path, state: Path) -> None:
    store = Store()
    times: list[float] = []

    def answer(request: Received) -> Answer:
        times.append(time.monotonic())
        return store(request)

    with Receiver(answering(Answer(429, {"Retry-After": "1"}), then=answer)) as receiver:
        began_s = time.monotonic()
        assert ship(logs, receiver, state, senders="1") == 0
    assert times[0] - began_s >= 1.0


@pytest.mark.parametrize("status", [404, 405, 409, 501])
def test_an_older_backend_knows_no_session_complete(logs: Path, state: Path, status: int) -> None:
    store = Store()
    with Receiver(lambda r: Answer(status) if "complete" in r.path else store(r)) as receiver:
        assert ship(logs, receiver, state) == 0
    assert (logs / CLEAN_ID / ".uploaded").exists()


def test_session_complete_is_tried_until_it_is_taken(logs: Path, state: Path) -> None:
    """The real agent gives up after three tries and marks the session as uploaded."""
    store = Store()
    tries: list[int] = []

    def answer(request: Received) -> Answer:
        if "complete" in request.path:
            tries.append(1)
            if len(tries) < 6:
                return Answer(503)
        return store(request)

    with Receiver(answer) as receiver:
        assert ship(logs, receiver, state) == 0
    assert store.completed == [CLEAN_ID]


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


# --- whose sessions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("marker", "code"), [(".uploaded", 0), (".failed", 1)])
def test_what_another_agent_has_closed_is_left_alone(logs: Path, state: Path, marker: str, code: int) -> None:
    (logs / CLEAN_ID / marker).touch()
    with Receiver() as receiver:
        assert ship(logs, receiver, state) == code
        assert receiver.received == []


def test_removing_the_marker_of_a_failure_asks_for_another_try(logs: Path, state: Path) -> None:
    store = Store()
    with Receiver(lambda r: Answer(400) if "device" in str(r.headers) else store(r)) as receiver:
        assert ship(logs, receiver, state) == 1
    with Receiver(store) as receiver:
        assert ship(logs, receiver, state) == 1, "nothing has changed"
        assert receiver.received == []
        (logs / CLEAN_ID / ".failed").unlink()
        assert ship(logs, receiver, state) == 0
    assert sorted(store.lines) == lines_of(logs)
    assert set(store.windows.values()) == {1}


def test_an_empty_folder(tmp_path: Path, state: Path) -> None:
    (tmp_path / "logs").mkdir()
    with Receiver() as receiver:
        assert ship(tmp_path / "logs", receiver, state, exit_if_empty="true") == 0
        assert receiver.received == []


def test_channels_that_are_not_wanted_stay(logs: Path, state: Path) -> None:
    store = Store()
    with Receiver(store) as receiver:
        assert ship(logs, receiver, state, log_types="system") == 0
    assert len(store.windows) == 3


def test_two_agents_do_not_share_what_they_remember(logs: Path, state: Path) -> None:
    from gpuflight.errors import InputError

    with Receiver(Store()) as receiver:
        first = agent_for(logs, receiver, state)
        try:
            with pytest.raises(InputError, match="another agent uses it"):
                agent_for(logs, receiver, state)
        finally:
            first.close()


def test_a_damaged_memory_is_put_aside(logs: Path, state: Path) -> None:
    store = Store()
    with Receiver(store) as receiver:
        assert ship(logs, receiver, state) == 0
        (state / "agent.sqlite").write_bytes(b"nonsense" * 1000)
        (logs / CLEAN_ID / ".uploaded").unlink()
        assert ship(logs, receiver, state) == 0
    assert list(state.glob("agent.sqlite.damaged-*"))
    assert set(store.windows.values()) == {1}, "the acknowledgements in the folder are enough"


# --- what is deleted --------------------------------------------------------------------------------------------------


def test_windows_are_deleted_only_if_asked(logs: Path, state: Path, tmp_path: Path) -> None:
    beside = tmp_path / "logs" / "notes.txt"
    beside.write_text("mine")
    (logs / CLEAN_ID / "notes.txt").write_text("mine")
    store = Store()
    with Receiver(store) as receiver:
        assert ship(logs, receiver, state, delete_acked_payloads="true") == 0
    left = {path.name for path in (logs / CLEAN_ID).iterdir()}
    assert not [name for name in left if ".log" in name]
    assert {"notes.txt", ".uploaded", ".gpufl-session.lock", ".gpufl-window.device.1.json"} <= left
    assert beside.read_text() == "mine"
    with Receiver(store) as receiver:
        assert ship(logs, receiver, tmp_path / "another") == 0
        assert receiver.received == []


def test_windows_that_were_not_acknowledged_stay(logs: Path, state: Path) -> None:
    with Receiver(Store(acknowledges=False)) as receiver:
        assert ship(logs, receiver, state, delete_acked_payloads="true") == 0
    assert len(list((logs / CLEAN_ID).glob("*.log.gz"))) == 19


def test_orphans_are_pruned_once_they_are_delivered(tmp_path: Path, state: Path) -> None:
    logs = copy("v1.3.0rc1-killed", tmp_path / "logs")
    (session,) = logs.iterdir()
    expected = lines_of(logs)
    (session / "notes.txt").write_text("mine")
    store = Store()
    with Receiver(store) as receiver:
        assert ship(logs, receiver, state, prune_failed="true") == 0
    assert sorted(store.lines) == expected
    assert [path.name for path in session.iterdir()] == ["notes.txt"]


def test_a_read_only_folder(logs: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuflight.agent import markers

    def refuse(path: str, *_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system", path)

    monkeypatch.setattr(markers, "_write", refuse)
    store = Store()
    with Receiver(store) as receiver:
        assert ship(logs, receiver, state) == 0
        assert ship(logs, receiver, state) == 0
    assert set(store.windows.values()) == {1}


# --- whoever writes logs may be allowed less than we are ----------


@pytest.mark.parametrize("mode", [{}, {"live": "true"}], ids=str)
def test_links_that_lead_out_are_not_followed(logs: Path, state: Path, tmp_path: Path, mode: dict[str, str]) -> None:
    secret = tmp_path / "secret.gz"
    secret.write_bytes(gzip.compress(b'{"type":"secret"}\n'))
    session = logs / CLEAN_ID
    (session / "device.12.log.gz").symlink_to(secret)
    before = lines_of(CLEAN)
    store = Store()
    with Receiver(store) as receiver:
        code = ship(logs, receiver, state, **mode)
    assert sorted(store.lines) == before
    if not mode:
        assert code == 1
        assert "device.12: leads out of the folder that is sent" in reason(logs)


def test_marks_replace_links_and_never_follow_them(logs: Path, state: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (logs / CLEAN_ID / ".gpufl-window-ack.device.1").symlink_to(precious)
    (logs / CLEAN_ID / ".failed").symlink_to(precious)
    from gpuflight.agent import markers

    markers.close(str(logs / CLEAN_ID), "a reason")
    markers.acknowledge(str(logs / CLEAN_ID), "device", 1, "id")
    assert precious.read_text() == "kept"
    assert not (logs / CLEAN_ID / ".failed").is_symlink()
    assert (logs / CLEAN_ID / ".failed").read_text() == "a reason\n"
    assert not list((logs / CLEAN_ID).glob("*.tmp"))


def test_a_pipe_in_place_of_a_window_does_not_hang(logs: Path, state: Path) -> None:
    os.mkfifo(logs / CLEAN_ID / "device.12.log.gz")
    store = Store()
    with Receiver(store) as receiver:
        assert ship(logs, receiver, state) == 1
    assert "device.12: is no regular file" in reason(logs)
    assert len(store.windows) == 19


def test_nothing_is_deleted_through_a_link(tmp_path: Path, state: Path) -> None:
    elsewhere = copy(CLEAN, tmp_path / "elsewhere")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / CLEAN_ID).symlink_to(elsewhere / CLEAN_ID)
    with Receiver(Store()) as receiver:
        ship(tmp_path / "logs", receiver, state, delete_acked_payloads="true", prune_failed="true")
    assert len(list((elsewhere / CLEAN_ID).glob("*.log.gz"))) == 19


def test_thousands_of_sessions(tmp_path: Path, state: Path) -> None:
    """Few senders, few descriptors, each window once."""
    logs = tmp_path / "logs"
    sessions = 1000
    for number in range(sessions):
        session = logs / f"run-{number % 10}" / f"session-{number:04}"
        session.mkdir(parents=True)
        (session / "device.1.log.gz").write_bytes(gzip.compress(b'{"type":"shutdown","n":%d}\n' % number))
    for folder, _, files in os.walk(logs):
        for path in (folder, *(os.path.join(folder, file) for file in files)):
            os.utime(path, (1_700_000_000, 1_700_000_000))
    store = Store()
    most = 0

    def answer(request: Received) -> Answer:
        nonlocal most
        most = max(most, threading.active_count())
        return store(request)

    with Receiver(answer) as receiver:
        before = len(os.listdir("/proc/self/fd"))
        assert ship(logs, receiver, state, settle="0", poll_interval="0.5") == 0
        after = len(os.listdir("/proc/self/fd"))
    assert len(store.lines) == len(set(store.lines)) == sessions
    assert sorted(store.completed) == sorted(f"session-{number:04}" for number in range(sessions))
    assert after <= before + 10
    assert most < 30
