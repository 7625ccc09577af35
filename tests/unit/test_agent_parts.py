"""The agent's small parts: lines cut into requests, the gate before a receiver, what is remembered, dead letters."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuflight.agent import batches
from gpuflight.agent.batches import LineReader
from gpuflight.agent.dead_letters import DeadLetters
from gpuflight.agent.gate import LONGEST_S, Gate
from gpuflight.agent.progress import Progress, Sent
from gpuflight.agent.receiver import Outcome, Verdict, judge
from gpuflight.events.files import inflate
from gpuflight.events.tail.cursors import Cursor
from gpuflight.subscribers.http_client import Answer

LINES = st.lists(st.binary(max_size=30).map(lambda data: data.replace(b"\n", b" ")), max_size=40)


@given(LINES, st.integers(1, 7), st.integers(1, 60), st.integers(1, 50), st.booleans(), st.data())
def test_lines_cut_into_requests_are_the_lines(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[bytes],
    most: int,
    max_bytes: int,
    piece: int,
    packed: bool,
    data: st.DataObject,
) -> None:
    """Each once and in order, within both limits; and after a restart from the end of any of them, the rest."""
    content = b"".join(line + b"\n" for line in lines)
    path = str(tmp_path_factory.mktemp("window") / ("x.gz" if packed else "x"))
    Path(path).write_bytes(gzip.compress(content) if packed else content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inflate, "PIECE_BYTES", piece)
        reader = LineReader(path, packed, max_lines=most, max_bytes=max_bytes)
        found = list(reader)
        assert (reader.crc32, reader.size_bytes, reader.lost) == (zlib.crc32(content), len(content), "")
        kept = [line for line in lines if line.strip()]
        assert [line for part in found for line in part.data.split(b"\n") if line.strip()] == kept
        assert sum(part.count for part in found) == len(kept)
        for part in found:
            assert part.data == content[part.start : part.end]
            count = part.data.count(b"\n")
            assert count <= most
            assert count == 1 or len(part.data) <= max_bytes
        start = data.draw(st.sampled_from([0, *(part.end for part in found)]))
        again = LineReader(path, packed, max_lines=most, max_bytes=max_bytes, start=start)
        rest = b"".join(part.data for part in again)
        assert [line for line in rest.split(b"\n") if line.strip()] == [
            line for line in content[start:].split(b"\n") if line.strip()
        ]
        assert again.crc32 == reader.crc32


def test_a_line_beyond_the_limit_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MAX_LINE_BYTES", 100)
    monkeypatch.setattr(inflate, "PIECE_BYTES", 64)
    path = tmp_path / "x"
    path.write_bytes(b'{"a":1}\n' + b"x" * 1000 + b'\n{"a":2}\n')
    reader = LineReader(str(path), False, max_lines=10, max_bytes=1000)
    assert b"".join(part.data for part in reader) == b'{"a":1}\n{"a":2}\n'
    assert reader.lost == "line_too_long"


@pytest.mark.parametrize(("end", "whole"), [(b'{"type":"x"}', True), (b'{"type":"x', False)])
def test_the_last_line_without_newline(tmp_path: Path, end: bytes, whole: bool) -> None:
    path = tmp_path / "x"
    path.write_bytes(b'{"a":1}\n' + end)
    reader = LineReader(str(path), False, max_lines=10, max_bytes=1000)
    assert b"".join(part.data for part in reader) == b'{"a":1}\n' + (end if whole else b"")
    assert reader.lost == ("" if whole else "cut_line")


def test_the_gate_closes_once_for_all_who_find_out_and_ever_longer() -> None:
    now = 100.0
    gate = Gate(lambda: now)
    assert gate.closed_for_s() == 0
    pauses = []
    for _ in range(12):
        gate.close("no answer")
        first = gate.closed_for_s()
        gate.close("no answer")
        assert gate.closed_for_s() == first
        pauses.append(first)
        now += first + 0.001
        assert gate.closed_for_s() == 0
    assert all(0.25 * 2**n <= pause <= 0.5 * 2**n for n, pause in enumerate(pauses[:6]))
    assert max(pauses) <= LONGEST_S
    gate.close("busy", 300.0)
    assert gate.closed_for_s() == pytest.approx(300.0)
    gate.open()
    assert gate.closed_for_s() == 0 and gate.reason == ""


def test_what_is_remembered_is_there_after_a_restart(tmp_path: Path) -> None:
    progress = Progress(str(tmp_path))
    session = tmp_path / "session"
    session.mkdir()
    progress.note(str(session), "device.1", Sent("part", 17))
    progress.note(str(session), "device.1", Sent("sent", 34, 5, "note", True))
    progress.note("/gone", "device.1", Sent("sent"))
    progress.close_session(str(session), "failed", "why")
    cursors = {("s", "device"): Cursor(3, 7, 9)}
    assert progress.import_cursors(cursors) == 1
    progress.close()
    progress = Progress(str(tmp_path))
    assert progress.windows(str(session)) == {"device.1": Sent("sent", 34, 5, "note", True)}
    assert progress.session(str(session)) == ("failed", "why")
    assert progress.import_cursors(cursors) == 0
    assert progress.cursors("s", "/first")["device"].file_index == 3
    assert progress.cursors("s", "/second") == {}, "a cursor names no folder: it belongs to the first that asks"
    assert progress.cursors("s", "/first")["device"].offset == 7
    assert progress.forget_gone() == 1
    assert progress.windows("/gone") == {}
    progress.close()


def test_dead_letters_take_no_more_than_their_room(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    letters = DeadLetters(str(tmp_path / "dead"), kept_bytes=300)
    letters.lines("../session", "device", [(b"\xff{", "bad")])
    letters.lines("../session", "device", [(b"x" * 400, "too much")])
    assert os.listdir(tmp_path / "dead") == ["_session"], "no name leads out of the folder"
    (line,) = (tmp_path / "dead" / "_session" / "device.lines").read_text().splitlines()
    assert json.loads(line) == {"reason": "bad", "line": "\\xff{"}
    assert "is full" in caplog.text
    assert letters.count == 2
    window = tmp_path / "device.1.log.gz"
    window.write_bytes(b"y" * 500)
    letters.window("s", str(window), "refused")
    kept = tmp_path / "dead" / "s" / window.name
    assert kept.samefile(window), "a link takes no room"
    assert json.loads((tmp_path / "dead" / "s" / f"{window.name}.json").read_text())["reason"] == "refused"


@pytest.mark.parametrize(
    ("status", "body", "headers", "expected"),
    [
        (200, b"", {}, Outcome(Verdict.DELIVERED)),
        (202, b'{"window_acknowledged":true}', {}, Outcome(Verdict.DELIVERED, acknowledged=True)),
        (200, b'{"window_acknowledged":"true"}', {}, Outcome(Verdict.DELIVERED)),
        (200, b"[1]", {}, Outcome(Verdict.DELIVERED)),
        (200, b'{"rejected":-1}', {}, Outcome(Verdict.DELIVERED)),
        (200, b'{"rejected":2,"errors":[7,{"line":"x"}]}', {}, Outcome(Verdict.DELIVERED, rejected=2)),
        (200, b"<html>", {"content-type": "text/html"}, Outcome(Verdict.WAIT)),
        (409, b'{"error":"window_identity_conflict"}', {}, Outcome(Verdict.REFUSED)),
        (409, b'{"window_acknowledged":true}', {}, Outcome(Verdict.DELIVERED, acknowledged=True)),
        (400, b'{"window_acknowledged":true}', {}, Outcome(Verdict.REFUSED)),
        (402, b"", {}, Outcome(Verdict.RETRY)),
        (503, b"", {"retry-after": "7"}, Outcome(Verdict.WAIT, retry_after_s=7.0)),
        (413, b"", {}, Outcome(Verdict.TOO_LARGE)),
        (301, b"", {"location": "https://elsewhere"}, Outcome(Verdict.WAIT)),
    ],
)
def test_what_an_answer_means(status: int, body: bytes, headers: dict[str, str], expected: Outcome) -> None:
    found = judge(Answer(status, headers, body))
    assert (found.verdict, found.acknowledged, found.rejected, found.retry_after_s) == (
        expected.verdict,
        expected.acknowledged,
        expected.rejected,
        expected.retry_after_s,
    )
