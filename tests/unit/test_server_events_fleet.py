"""Two servers that share the folder of a fleet's event store."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("duckdb")
pytest.importorskip("fastapi")
from tests.unit.events_fixture import SESSION, EventServer

from gpuflight.errors import InputError
from gpuflight.events.store import EventStore, open_store
from gpuflight.events.store.parquet import ParquetStore

KERNELS = f"/api/v1/sessions/{SESSION}/kernels/top"


def test_what_one_takes_in_the_other_knows_and_tells(tmp_path: Path) -> None:
    with EventServer(tmp_path, store="parquet") as one, EventServer(tmp_path, store="parquet") as two:
        first = one.window("device", 1)
        assert first["window_acknowledged"]
        other = two.window("device", 1)  # the first answer was lost, the sender tried the next server
        assert other["window_acknowledged"]
        assert other["repeated"]
        answers = [server.client.get(KERNELS) for server in (one, two)]
        assert answers[0].json() == answers[1].json()
        assert answers[0].json()["count"] > 0
        before = answers[0].headers["etag"]
        assert one.client.get(KERNELS, headers={"if-none-match": before}).status_code == 304
        two.window("scope", 1)
        one.events.store.records.fleet.refresh()  # type: ignore[attr-defined]
        assert one.client.get(KERNELS, headers={"if-none-match": before}).status_code == 200
        listed = one.client.get("/api/v1/sessions").json()["sessions"]
        assert [line["session"]["session_id"] for line in listed] == [SESSION]


def test_a_folder_says_which_store_it_has(tmp_path: Path) -> None:
    for kind, expected in (("duckdb", EventStore), ("parquet", ParquetStore)):
        folder = str(tmp_path / kind)
        open_store(folder, kind).close()  # type: ignore[arg-type]
        again = open_store(folder)
        assert type(again) is expected
        again.close()
        other = "parquet" if kind == "duckdb" else "duckdb"
        with pytest.raises(InputError, match=f"of the kind {kind} is here; {other} is asked for"):
            open_store(folder, other)  # type: ignore[arg-type]
    new = open_store(str(tmp_path / "new"))
    assert type(new) is EventStore
    new.close()
