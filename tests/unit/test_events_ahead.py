"""Windows decompressed by a thread ahead, where that takes long, and in the reader's own where it does not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.gpufl_files import kernels, session_folder, shutdown, start

from gpuflight.events.files import SessionReader, find_sessions, inflate, reader

pytest.importorskip("numpy")


def folder(path: Path) -> None:
    batches = b"".join(kernels([[i, 1, 7, 5, i]], number=i + 1) for i in range(50))
    session_folder(path, {"device.1.log.gz": start() + batches + shutdown()})


@pytest.mark.parametrize("fast", [True, False])
def test_the_same_comes_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    monkeypatch.setattr(inflate, "FAST", fast)
    folder(tmp_path)
    read = SessionReader(find_sessions(str(tmp_path))[0])
    found = [b.columns["corr_id"].tolist() for b in read if b.table == "kernel"]
    assert found == [[i] for i in range(50)] and not read.ledger.lost


def test_a_reader_that_stops_early_leaves_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflate, "FAST", False)
    monkeypatch.setattr(reader, "_AHEAD", 1)
    folder(tmp_path)
    batches = iter(SessionReader(find_sessions(str(tmp_path))[0]))
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert not [t for t in threading.enumerate() if t.name == "gpuflight-inflate"]


def test_what_fails_ahead_fails_in_the_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Iterator[bytes]:
        raise MemoryError
        yield b""

    monkeypatch.setattr(inflate, "FAST", False)
    monkeypatch.setattr(reader, "chunks", fails)
    folder(tmp_path)
    with pytest.raises(MemoryError):
        list(SessionReader(find_sessions(str(tmp_path))[0]))
