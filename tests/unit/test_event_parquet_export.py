"""The tests of exports once more, with the store of a fleet; and its reports are those of the other store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("duckdb")
from tests.unit import test_event_export, test_event_export_arrow
from tests.unit.gpufl_files import CLEAN, GEN

from gpuflight.events.files import find_sessions
from gpuflight.events.load import load_folders
from gpuflight.events.report import build_report
from gpuflight.events.store import EventStore
from gpuflight.events.store.parquet import ParquetStore

for _module in (test_event_export, test_event_export_arrow):
    for _name, _test in vars(_module).items():
        if _name.startswith("test_") and "command" not in _name:
            globals()[f"{_name}_of_{_module.__name__.rpartition('_')[2]}"] = _test


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ParquetStore]:
    made = ParquetStore(str(tmp_path_factory.mktemp("events") / "store"), threads=1, upkeep_interval_s=0)
    load_folders(made, find_sessions(str(GEN)))
    yield made
    made.close()


def test_reports_are_the_same(store: ParquetStore, tmp_path: Path) -> None:
    other = EventStore(str(tmp_path / "other"), threads=1)
    try:
        load_folders(other, find_sessions(str(GEN)))
        for session in other.catalogue.find()[0]:
            mine = store.session(session.session_id)
            assert mine is not None
            of_fleet = msgspec.to_builtins(build_report(store, mine, now_ns=1, state_now="ended"))
            of_one = msgspec.to_builtins(build_report(other, session, now_ns=1, state_now="ended"))
            for loss in of_fleet["losses"] + of_one["losses"]:
                del loss["place"]  # any one of several
            assert of_fleet == of_one
    finally:
        other.close()


def test_the_command_takes_the_folder_of_a_fleet(
    store: ParquetStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from gpuflight.cli import main

    folder = str(tmp_path / "fleet")
    made = ParquetStore(folder, threads=1, upkeep_interval_s=0)
    load_folders(made, find_sessions(str(CLEAN)))
    made.close()
    assert main(["report", CLEAN.name, "--store", folder, "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out)["kernels"]["count"] == 48
