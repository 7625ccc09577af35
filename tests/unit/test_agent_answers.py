"""Windows over HTTP: every answer of a receiver; the folder and the exit code tell the truth."""

from __future__ import annotations

import gzip
import json
import shutil
import time
from pathlib import Path

import pytest
from tests.fakes.http_receiver import Answer, Received, Receiver
from tests.unit.agent_rig import (
    ACKNOWLEDGED,
    CLEAN,
    CLEAN_ID,
    Store,
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


def test_a_token_that_is_repeated_by_who_answers_is_shown_nowhere(
    logs: Path, state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token = "gpfl_" + "s3cret" * 10

    def answer(request: Received) -> Answer:
        padding = b"x" * 170  # so that a text that is cut would end within the token
        return Answer(
            400 if "device" in str(request.headers) else 401, body=padding + request.headers["authorization"].encode()
        )

    with Receiver(answer) as receiver:
        assert ship(logs, receiver, state, token=token, give_up_after="0.5") == 3
    everything = caplog.text + "".join(
        path.read_text(errors="replace") for path in (*state.rglob("*"), *logs.rglob(".*")) if path.is_file()
    )
    assert "status 401" in everything
    assert "s3cret" not in everything


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
