"""The HTTP source: compression, limits, the tape. The network side is in tests/e2e/test_remote_real.py."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import pytest
import zstandard

from gpuflight.collectors.remote_peer import Peer, PeerOptions
from gpuflight.errors import SourceUnavailable
from gpuflight.sources.clock import ManualClock
from gpuflight.sources.http import Answer, Http, Request, decompress, library
from gpuflight.sources.recording import Tape

BODY = b'{"schema": 1}' * 1000


@pytest.mark.parametrize("encoding", ["", "identity", "gzip", "ZSTD"])
def test_bodies_are_decompressed_up_to_the_limit(encoding: str) -> None:
    data = {"gzip": gzip.compress, "ZSTD": zstandard.compress}.get(encoding, bytes)(BODY)
    assert decompress(data, encoding, 1 << 20) == BODY
    if encoding not in ("", "identity"):
        with pytest.raises(ValueError, match="larger than 1000 bytes"):
            decompress(data, encoding, 1000)


def test_a_small_body_that_swells_is_refused_before_it_fills_the_memory() -> None:
    for bomb, encoding in ((gzip.compress(bytes(50 << 20)), "gzip"), (zstandard.compress(bytes(50 << 20)), "zstd")):
        assert len(bomb) < 1 << 17
        with pytest.raises(ValueError, match="larger than"):
            decompress(bomb, encoding, 1 << 16)


def test_damaged_and_unknown_compression() -> None:
    with pytest.raises(ValueError, match="cut off"):
        decompress(gzip.compress(BODY)[:-20], "gzip", 1 << 20)
    with pytest.raises(ValueError, match="unknown compression: br"):
        decompress(b"x", "br", 1 << 20)
    with pytest.raises(zstandard.ZstdError):
        decompress(b"no zstd at all", "zstd", 1 << 20)


def test_a_recording_gives_back_what_each_round_used(tmp_path: Path) -> None:
    path = str(tmp_path / "x.tar.zst")
    tape = Tape.record(path, ManualClock())
    source = Http(tape)
    assert source.recording and not source.replaying
    answers = [Answer("u", error="down"), Answer("u", 200, {"etag": "1"}, BODY, 1, 2), Answer("u", 200, {}, BODY, 3, 4)]
    for number, answer in enumerate(answers, 1):
        tape.begin_round(number)
        assert source.taped("u", lambda answer=answer: answer) == answer  # type: ignore[misc]
    source.close()
    tape.close()

    tape = Tape.replay(path)
    source = Http(tape)
    assert source.replaying and not source.recording
    for number, answer in enumerate(answers, 1):
        tape.begin_round(number)
        assert source.taped("u", lambda: pytest.fail("asked in a replay")) == answer
    with pytest.raises(SourceUnavailable):
        source.taped("other", lambda: pytest.fail("asked in a replay"))


def test_live_nothing_is_encoded() -> None:
    answer = Answer("u", 200, {}, BODY)
    assert Http().taped("u", lambda: answer) is answer


def test_without_httptools_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httptools", None)
    monkeypatch.delitem(sys.modules, "gpuflight.sources.http_connection", raising=False)
    monkeypatch.delattr("gpuflight.sources.http_connection", raising=False)
    library.cache_clear()
    with pytest.raises(SourceUnavailable, match=r"gpuflight\[server\]"):
        Http().get(Request("http://127.0.0.1:1"))
    peer = Peer(PeerOptions(url="http://127.0.0.1:1", name="n7"))
    peer.poll(Http(), ("", ""))
    assert "httptools is not installed" in peer.view.error
