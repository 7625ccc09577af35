"""The installed agent sends sessions of the fixtures to the installed server: what is stored is what the files hold."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.test_server_real import running
from tests.examples import every_second
from tests.unit import gpufl_files

from gpuflight.events.store import EventStore
from gpuflight.events.tables import TABLES

GPUFLIGHT = str(Path(sys.executable).with_name("gpuflight"))
GENERATIONS = ["v1.3.0rc1-clean", "v1.2.1-nested", "v1.1.0-nested", "v0-per-event-5cbcf7d"]
MODES = ["stream", "legacy"]
WAYS = [(generation, mode) for turn, generation in enumerate(GENERATIONS) for mode in MODES[:: (-1) ** turn]]


@pytest.mark.parametrize(("generation", "mode"), every_second(WAYS))
def test_a_session_of_the_files_is_the_session_of_the_store(tmp_path: Path, generation: str, mode: str) -> None:
    logs = tmp_path / "logs"
    shutil.copytree(gpufl_files.GEN / generation, logs)
    server_folder = tmp_path / "server"
    server_folder.mkdir()
    make = [GPUFLIGHT, "token", "create", "--role", "ingest", "--file", str(server_folder / "tokens.json")]
    (tmp_path / "key").write_text(subprocess.run(make, check=True, capture_output=True, text=True).stdout)
    with running(server_folder) as instance:
        agent = [
            GPUFLIGHT, "agent", "--folder", str(logs), "--type", "http", "--url", instance.url, "--upload-mode", mode,
            "--token-file", str(tmp_path / "key"), "--state-folder", str(tmp_path / "state"),
            "--cursor-file", str(tmp_path / "cursor.json"), "--exit-when-drained",
            "--poll-interval", "0.1", "--settle", "0.1", "--orphan-wait", "0.1",
        ]  # fmt: skip
        done = subprocess.run(agent, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        instance.process.send_signal(signal.SIGTERM)
        assert instance.finish() == 0
    batches, _ = gpufl_files.read(logs)
    session_id = batches[0].session_id
    store = EventStore(str(server_folder / "state" / "events"))
    try:
        session = store.session(session_id)
        assert session is not None
        # Nobody says of flat files that a session in them is over.
        assert (session.completed_ns is not None) == (generation != "v0-per-event-5cbcf7d")
        for table, count in gpufl_files.counts(batches).items():
            sql = store.relation(table, [session]).sql
            stored = store.rows(f"SELECT count(*) AS n FROM {sql}")[0]["n"]
            if TABLES[table].key:
                keys = {tuple(row.get(name) for name in TABLES[table].key) for row in gpufl_files.rows(batches, table)}
                count = len(keys)
            assert stored == count, table
    finally:
        store.close()
