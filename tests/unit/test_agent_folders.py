"""Folders of sessions: whose they are, what is deleted, what only seems to lie there, and thousands of them."""

from __future__ import annotations

import gzip
import os
import threading
from pathlib import Path

import pytest
from tests.fakes.http_receiver import Answer, Received, Receiver
from tests.unit.agent_rig import (
    CLEAN,
    CLEAN_ID,
    Store,
    agent_for,
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


@pytest.mark.parametrize("mode", [{}, {"live": "true"}, {"upload_mode": "legacy"}], ids=str)
def test_a_folder_of_any_name(logs: Path, state: Path, mode: dict[str, str]) -> None:
    odd = os.path.join(os.fsencode(logs), b"\xff session \n\"'")
    os.rename(os.fsencode(logs / CLEAN_ID), odd)
    os.utime(logs, (1_700_000_000, 1_700_000_000))
    store = Store()
    with Receiver(store) as receiver:
        assert ship(logs, receiver, state, **mode) == 0
        assert ship(logs, receiver, state, **mode) == 0
    assert sorted(store.lines) == lines_of(logs)
    assert os.path.exists(os.path.join(odd, b".uploaded"))


@pytest.mark.parametrize("mode", [{}, {"live": "true"}], ids=str)
def test_a_disk_that_is_full_for_a_while(
    logs: Path, state: Path, mode: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is counted as delivered that could not be noted; it goes on once there is room."""
    from gpuflight.agent.progress import Progress

    real, failures = Progress._do, [28] * 12

    def full(self: Progress, sql: str, *values: object) -> None:
        if failures and "cursor" not in sql:
            raise OSError(failures.pop(), "No space left on device", self.path)
        real(self, sql, *values)

    monkeypatch.setattr(Progress, "_do", full)
    store = Store()
    with Receiver(store) as receiver:
        assert ship(logs, receiver, state, **mode) == 0
    assert not failures or mode
    assert sorted(set(store.lines)) == sorted(set(lines_of(logs)))
    assert (logs / CLEAN_ID / ".uploaded").exists()


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
    half = logs / CLEAN_ID / ".gpufl-agent.failed.tmp"
    half.symlink_to(precious)
    markers.close(str(logs / CLEAN_ID), "another")
    assert precious.read_text() == "kept"
    assert (logs / CLEAN_ID / ".failed").read_text() == "another\n"
    assert not list((logs / CLEAN_ID).glob("*.tmp"))


def test_a_pipe_in_place_of_a_window_does_not_hang(logs: Path, state: Path) -> None:
    os.mkfifo(logs / CLEAN_ID / "device.12.log.gz")
    store = Store()
    with Receiver(store) as receiver:
        assert ship(logs, receiver, state) == 1
    assert "device.12: is no regular file" in reason(logs)
    assert len(store.windows) == 19


@pytest.mark.parametrize(
    "name", [".gpufl-window.device.99.json", ".gpufl-session.lock", "run.device.1.log", "x.sass.log"]
)
def test_no_pipe_is_waited_for(tmp_path: Path, state: Path, name: str) -> None:
    logs = copy(CLEAN, tmp_path / "logs")
    folder = logs / CLEAN_ID if name.startswith(".") else logs
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    for other in ("run.device.2.log", "run.device.3.log"):
        (logs / other).write_text('{"type":"shutdown","session_id":"flat","ts_ns":1790000000000000000}\n')
    store = Store()
    with Receiver(store) as receiver:
        assert ship(logs, receiver, state, give_up_after="3") in (0, 1, 3)
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
    assert most < 100
