"""Our requests beside those that the real gpufl-agent made for the same session, byte by byte."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import DATA
from tests.fakes.http_receiver import Answer, Received, Receiver
from tests.unit.agent_rig import ACKNOWLEDGED, CLEAN, CLEAN_ID, copy, ship

OBSERVED = DATA / "gpufl" / "observed-agent-traffic"
NOT_OURS = {"user-agent", "host"}
"""It says who it is; and Host is of the connection."""
PUBLISHED_LATER = {("device", 1), ("scope", 1), ("system", 1), ("sass", 1)}
"""Their first lines name a folder, which was replaced in the fixture after the requests had been recorded."""


def observed(name: str) -> list[dict[str, Any]]:
    requests = [json.loads(line) for line in (OBSERVED / name).read_text().splitlines()]
    for request in requests:
        request["hdr"] = {key.lower(): value for key, value in request["hdr"].items()}
    return requests


def kept(headers: dict[str, str]) -> dict[str, str]:
    return {key: value for key, value in headers.items() if key not in NOT_OURS}


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Received]:
    real = os.uname()
    monkeypatch.setattr(os, "uname", lambda: os.uname_result((real[0], "vm", *real[2:])))
    with Receiver(lambda _: Answer(202, body=ACKNOWLEDGED)) as receiver:
        assert ship(copy(CLEAN, tmp_path / "logs"), receiver, tmp_path / "state") == 0
        return list(receiver.received)


def test_windows_are_sent_as_the_real_agent_sends_them(ours: list[Received]) -> None:
    theirs = observed("stream-clean-ack.jsonl")
    assert len(ours) == len(theirs) == 20

    def identity(headers: dict[str, str]) -> tuple[str, int]:
        return headers.get("x-gpuflight-window-channel", ""), int(headers.get("x-gpuflight-window-sequence", 0))

    of_ours = {identity(request.headers): request for request in ours}
    for request in theirs:
        which = identity(request["hdr"])
        mine = of_ours[which]
        assert mine.path == request["path"]
        expected, found = kept(request["hdr"]), kept(mine.headers)
        assert found.keys() == expected.keys()
        if which in PUBLISHED_LATER:
            for name in ("content-length", "x-gpuflight-window-crc32"):
                expected.pop(name), found.pop(name)
        else:
            assert len(mine.body) == request["bytes"]
        assert found == expected
        if request["bytes"]:
            lines = gzip.decompress(mine.body)
            if which not in PUBLISHED_LATER:
                assert len(lines) == request["raw"]
                assert lines.startswith(request["first"].encode())
            assert lines.count(b"\n") == request["lines"]


def test_the_payload_is_the_file(ours: list[Received]) -> None:
    for request in ours[:-1]:
        channel = request.headers["x-gpuflight-window-channel"]
        number = request.headers["x-gpuflight-window-sequence"]
        assert request.body == (CLEAN / CLEAN_ID / f"{channel}.{number}.log.gz").read_bytes()


def test_channels_are_in_order_and_the_end_comes_last(ours: list[Received]) -> None:
    assert [request.path for request in ours].index("/api/v1/events/session-complete") == len(ours) - 1
    for channel in ("device", "scope", "system", "sass"):
        numbers = [
            int(request.headers["x-gpuflight-window-sequence"])
            for request in ours[:-1]
            if request.headers["x-gpuflight-window-channel"] == channel
        ]
        assert numbers == list(range(1, len(numbers) + 1))


def test_what_is_left_in_the_folder_is_the_same(tmp_path: Path) -> None:
    """Acknowledgements and the end as the real agent writes them; nothing is deleted unless it is asked for."""
    before = {path.name for path in (CLEAN / CLEAN_ID).iterdir()}
    with Receiver(lambda _: Answer(202, body=ACKNOWLEDGED)) as receiver:
        logs = copy(CLEAN, tmp_path / "logs")
        assert ship(logs, receiver, tmp_path / "state") == 0
    session = logs / CLEAN_ID
    after = {path.name: path for path in session.iterdir()}
    assert before < after.keys()
    assert after[".uploaded"].read_bytes() == b""
    acks = {name for name in after if name.startswith(".gpufl-window-ack.")}
    assert after.keys() - before == acks | {".uploaded"}
    assert len(acks) == 19
    for ack in acks:
        channel, number = ack.removeprefix(".gpufl-window-ack.").rsplit(".", 1)
        sidecar = json.loads((session / f".gpufl-window.{channel}.{number}.json").read_text())
        assert (session / ack).read_text() == sidecar["window_id"] + "\n"


def test_the_loss_marker_is_the_same(tmp_path: Path) -> None:
    logs = copy(CLEAN, tmp_path / "logs")
    payload = logs / CLEAN_ID / "device.5.log.gz"
    payload.write_bytes(payload.read_bytes()[:-9] + b"\0" + payload.read_bytes()[-8:])
    with Receiver(lambda _: Answer(202, body=ACKNOWLEDGED)) as receiver:
        assert ship(logs, receiver, tmp_path / "state") == 1
    ours = (logs / CLEAN_ID / ".gpufl-transport-loss.agent-device.5.json").read_bytes()
    assert ours == (OBSERVED / "loss-marker-agent-device.5.json").read_bytes().strip()


def test_lines_are_posted_one_by_one_as_the_real_agent_posts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session of that recording is not among the fixtures, but the lines of this one are made of the same parts."""
    theirs = observed("legacy-mode-first40.jsonl")
    with Receiver(lambda _: Answer(202)) as receiver:
        logs = copy(CLEAN, tmp_path / "logs")
        assert ship(logs, receiver, tmp_path / "state", upload_mode="legacy") == 0
        ours = receiver.received[:-1]
        end = receiver.received[-1]
    assert end.path == "/api/v1/events/session-complete"
    for request in theirs:
        event_type = request["path"].rpartition("/")[2]
        channel = request["hdr"]["x-key"]
        same = [r for r in ours if r.path == request["path"] and r.headers["x-key"] == channel]
        assert same, f"{event_type} in {channel}"
        mine = same[0]
        assert kept(mine.headers).keys() == kept(request["hdr"]).keys()
        for name in ("content-type", "authorization", "x-key", "x-topic"):
            assert mine.headers[name] == request["hdr"][name]
        head = '{"agentSendingTime":'
        assert mine.body.startswith(head.encode())
        assert request["first"].startswith(head)
        body = json.loads(mine.body)
        assert list(body) == ["agentSendingTime", "data", "type", "hostname", "ipAddr"]
        assert body["type"] == event_type
        assert json.loads(body["data"])["type"] == event_type
        after = len(head) + 13  # the time, ms
        line = body["data"].split(f'"session_id":"{CLEAN_ID}"')[0]
        escaped = line.replace('"', '\\"')
        beginning = request["first"][after:]
        if len(beginning) > len(f',"data":"{escaped}'):
            assert beginning.startswith(f',"data":"{escaped}')
        assert mine.body.decode()[after:].startswith(f',"data":"{escaped}')


def test_every_line_is_in_one_of_the_posts(tmp_path: Path) -> None:
    with Receiver(lambda _: Answer(202)) as receiver:
        logs = copy(CLEAN, tmp_path / "logs")
        assert ship(logs, receiver, tmp_path / "state", upload_mode="legacy") == 0
        posted = sorted(json.loads(r.body)["data"].encode() for r in receiver.received[:-1])
    expected = [
        line
        for path in (CLEAN / CLEAN_ID).glob("*.log.gz")
        for line in gzip.decompress(path.read_bytes()).split(b"\n")
        if line.strip()
    ]
    assert posted == sorted(expected)


def test_positions_of_the_real_agent_are_taken_over(tmp_path: Path) -> None:
    """What it has sent is not sent again; what came after is."""
    logs = copy(CLEAN, tmp_path / "logs")
    cursor = tmp_path / "cursor.json"
    shutil.copy(OBSERVED / "cursor-after-clean.json", cursor)
    before = cursor.read_bytes()
    late = json.loads((logs / CLEAN_ID / ".gpufl-window.device.11.json").read_text())
    late |= {"window_id": "late", "window_sequence": 12, "payload_file": "device.12.log.gz"}
    (logs / CLEAN_ID / ".gpufl-window.device.12.json").write_text(json.dumps(late))
    shutil.copy(logs / CLEAN_ID / "device.11.log.gz", logs / CLEAN_ID / "device.12.log.gz")
    with Receiver(lambda _: Answer(202, body=ACKNOWLEDGED)) as receiver:
        assert ship(logs, receiver, tmp_path / "state", cursor_file=str(cursor)) == 0
        sent = [request.headers.get("x-gpuflight-window-id") for request in receiver.received]
    assert sent == ["late", None]
    assert (logs / CLEAN_ID / ".uploaded").exists()
    assert cursor.read_bytes() == before, "it belongs to the other agent"
