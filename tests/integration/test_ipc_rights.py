"""The same machine seen with fewer rights, and from another IPC namespace: what cannot be seen is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_ipc_rig import start_rig

pytestmark = pytest.mark.rig

HERE = Path(__file__).parent
NOBODY = 65534
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="starts processes with other rights: needs root")


@pytest.fixture(scope="module")
def rig_facts() -> Iterator[dict[str, Any]]:
    process, facts = start_rig()
    yield facts
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.wait(20)
    process.stdout.close()


def read(*arguments: str) -> dict[str, Any]:
    """What ipc_reader.py saw. Fails if it wrote anything to stderr: a traceback above all."""
    done = subprocess.run(
        [sys.executable, str(HERE / "ipc_reader.py"), *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    assert done.returncode == 0
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@root_only
def test_an_ordinary_user_gets_less_and_is_told(rig_facts: dict[str, Any]) -> None:
    answer = read("nobody")
    assert answer["uid"] == NOBODY
    rig_pids = [f"Process(pid={pid}," for pid in rig_facts["pids"].values()]
    for name in ("pipes", "shared_memory", "message_queues"):
        assert any("may not be read" in reason for reason in answer[name]["notes"]), name
    mapped = [edge for edge in answer["shared_memory"]["edges"] if any(pid in edge for pid in rig_pids)]
    assert mapped == []  # nothing is guessed from the creator in the table
    # Sender and receiver stand in a table that everybody may read.
    queue = f"MessageQueue(sysv,{rig_facts['ids']['queue']})"
    users = [edge for edge in answer["message_queues"]["edges"] if queue in edge]
    assert len(users) == 2
    # A segment whose users cannot be seen is there, and is not said to be unused without a word.
    assert f"SharedMemory(sysv,{rig_facts['ids']['segment']})" in answer["shared_memory"]["orphans"]
    assert answer["shared_memory"]["losses"]["System V segments whose users cannot be seen"] >= 1
    assert any("System V semaphores" in reason for reason in answer["semaphores"]["notes"])


@root_only
def test_another_ipc_namespace_is_not_mistaken_for_ours(rig_facts: dict[str, Any]) -> None:
    answer = read("ipcns")
    ids = rig_facts["ids"]
    # The table of the reader's namespace is empty; the rig's segment is seen through its users, under its own key.
    segments = [node for node in answer["shared_memory"]["nodes"] if node.startswith("SharedMemory(sysv,")]
    assert [node for node in segments if node.startswith(f"SharedMemory(sysv,{ids['segment']},ipcns=")]
    assert f"SharedMemory(sysv,{ids['segment']})" not in segments
    queues = [node for node in answer["message_queues"]["nodes"] if node.startswith("MessageQueue(sysv,")]
    assert queues == []
    posix = [node for node in answer["message_queues"]["nodes"] if f"/{rig_facts['tag']}_mq" in node]
    assert len(posix) == 1
    assert ",ipcns=" in posix[0]
    for name in ("message_queues", "semaphores", "shared_memory"):
        assert any("other IPC namespaces" in reason for reason in answer[name]["notes"]), name
